"""A stage of several cohorts in a running swarm: real codecs, signatures, steps and audits at both levels."""

import asyncio
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from swarm.averaging.codecs import result_codec, vector_codec
from swarm.averaging.seeds import reduced_seed
from swarm.bulk_digest import bulk_digest
from swarm.core import cohorts
from swarm.core.ids import Version
from swarm.core.round.contribution import ReducedPart, Result
from tests.swarm_in_process import InProcessSwarm, identity_of, manifest_of, swarm_in_process
from verification.kinds.reducer_fraud import ReducerFraud
from verification.replay.evidence_file import evidence_in

Floats = NDArray[np.float32]


def wide(num_members: int, num_steps: int, **tables: dict[str, Any]) -> str:
    """A run whose second stage comes to have so many members, with a microbatch for each in a step."""
    named: dict[str, dict[str, Any]] = {
        "batch": {"microbatch_size": 1, "target_tokens": 16 * num_members},
        "optimizer": {"total_steps": num_steps},
        "limits": {"max_peers_per_stage": max(64, num_members), "max_in_flight": num_members},
        "checkpoint": {"every_steps": num_steps, "snapshot_every": 4},
    }
    for name, fields in tables.items():
        named[name] = named.get(name, {}) | fields
    return manifest_of(**named)


@pytest.fixture
def small_cohorts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five members are three cohorts."""
    monkeypatch.setattr(cohorts, "COHORT_MEMBERS", 2)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """As in a daemon the garbage collector leaves alone what lives: here, all that seventy peers hold."""
    gc.disable()
    yield
    gc.enable()


def certified(swarm: InProcessSwarm, step: int) -> Result:
    """The step's result, of which every member holds the same bytes."""
    held = [peer.steps.context.results[step] for peer in swarm.of_stage(1)]
    assert len({result.root() for result, _ in held}) == 1
    assert len({tuple(bytes(body) for body in bodies) for _, bodies in held}) == 1
    return held[0][0]


def weighted_sum(vectors: list[tuple[int, Floats]]) -> Floats:
    """Of (tokens, vector), by their shares of all tokens: elementwise fp32, in order."""
    total = np.zeros_like(vectors[0][1])
    for tokens, vector in vectors:
        total += vector * np.float32(tokens / sum(tokens for tokens, _ in vectors))
    total[np.abs(total) < np.float32(2.0**-126)] = 0
    return total


def reference(swarm: InProcessSwarm, result: Result, reduced: ReducedPart) -> bytes:
    """Digest of what the part must be: the cohorts' weighted sums of what members committed to, combined once.

    Of the members whose contribution to the part its reducers had in time; the others the result names.
    """
    roster, codec, part = result.roster, vector_codec("int8"), reduced.part
    first = swarm.of_stage(1)[0].steps
    where = first.replica.parts()[part]

    def committed(peer: str) -> Floats:
        (wanted,) = [made.part_digests[part] for made in roster.contributions if made.peer_id == peer]
        stores = [peer.steps.context.reductions for peer in swarm.of_stage(1)]
        body = next(found for store in stores if (found := store.input(roster.step, part, wanted)) is not None)
        values = np.empty(where.stop - where.start, dtype=np.float32)
        codec.decode(body, values)
        return values

    tokens = {made.peer_id: made.num_tokens for made in roster.contributions if made.peer_id in reduced.contributors}
    assert {*tokens} | {one.peer_id for one in reduced.excluded} == {made.peer_id for made in roster.contributions}
    heard = [[peer for peer in cohort if peer in tokens] for cohort in roster.cohorts]
    shares = [
        (sum(tokens[peer] for peer in cohort), weighted_sum([(tokens[peer], committed(peer)) for peer in cohort]))
        for cohort in heard
        if cohort
    ]
    seed = reduced_seed(roster.run_id, roster.stage, Version(roster.step), part)
    return bulk_digest(result_codec("int8").encode(weighted_sum(shares), seed=seed))


async def everyone_is_in(swarm: InProcessSwarm, *, timeout_s: float) -> int:
    """The first version of which all peers of the second stage are members."""
    peers = swarm.of_stage(1)

    def are_members() -> bool:
        rounds = [peer.daemon.at for peer in peers]
        return all(one is not None and len(one.steps.chain.members) == len(peers) for one in rounds)

    await swarm.until(are_members, timeout_s=timeout_s)
    return max(peer.steps.version for peer in peers)


async def check_two_steps(swarm: InProcessSwarm, *, timeout_s: float) -> None:
    """Two steps in which more than one cohort was heard: a microbatch goes to whom the routing likes best."""
    checked, step = 0, await everyone_is_in(swarm, timeout_s=timeout_s)
    while checked < 2:
        assert all([await peer.steps.wait_for_version(step + 1, timeout_s=timeout_s) for peer in swarm.of_stage(1)])
        result = certified(swarm, step)
        assert len(result.roster.cohorts) > 1
        for reduced in result.parts:
            assert reduced.digest == reference(swarm, result, reduced)
        heard = min(len(reduced.shares) for reduced in result.parts)
        checked, step = checked + (heard > 1), step + 1


def run(manifest: str, folder: Path, num_members: int, watch: Callable[[InProcessSwarm], Any], **more: Any) -> None:
    async def train() -> None:
        async with swarm_in_process(manifest, folder, peers=(1, num_members), **more) as swarm:
            await watch(swarm)

    asyncio.run(train())


@pytest.mark.usefixtures("small_cohorts")
def test_every_part_is_the_weighted_sum_of_the_cohorts_weighted_sums(tmp_path: Path) -> None:
    manifest = wide(5, 400, averaging={"rule": "mean"})
    run(manifest, tmp_path, 5, lambda swarm: check_two_steps(swarm, timeout_s=60.0))


@pytest.mark.soak
@pytest.mark.usefixtures("small_cohorts")
def test_who_reduces_wrongly_is_banned_and_the_others_go_on(tmp_path: Path) -> None:
    audits = {"hop_budget": 0.0, "contribution_budget": 0.0, "reducer_share": 8.0}
    manifest = wide(5, 400, audits=audits, run={"trust": "friends"})
    banned: list[dict[str, Any]] = []

    def hear(event: dict[str, Any]) -> None:
        if event["event"] == "banned":
            banned.append(event)

    async def watch(swarm: InProcessSwarm) -> None:
        await swarm.until(lambda: bool(banned), timeout_s=90.0)
        step = swarm.host.progress.done_versions() + 2
        await swarm.until_version(step, timeout_s=60.0)

    run(manifest, tmp_path, 5, watch, attacks={(1, 4): "wrong_reducer@0"}, on_event=hear)
    ((accused, kind, file),) = [(event["peer_id"], event["kind"], event["evidence"]) for event in banned]
    assert (accused, kind) == (identity_of(5).peer_id, "reducer_fraud")
    evidence = evidence_in(Path(file))
    assert ReducerFraud.from_evidence(evidence).reduction.level in ("cohort", "shares")


@pytest.mark.soak
@pytest.mark.usefixtures("no_collector")
def test_seventy_members_take_two_steps_alike(tmp_path: Path) -> None:
    slow = {"call_s": 120.0, "hop_s": 300.0, "step_s": 600.0, "straggler_s": 60.0}
    manifest = wide(70, 400, averaging={"rule": "mean"}, deadlines=slow)
    run(manifest, tmp_path, 70, lambda swarm: check_two_steps(swarm, timeout_s=1200.0))
