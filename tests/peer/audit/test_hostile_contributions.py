"""One of three replicas sends nonsense: it is refused when it comes, with a reason, and the others go on without it.

Whoever has signed for the nonsense is banned.
"""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peer.round.work import ContributionEncoder
from peer.state.replica import Accumulation, StageReplica
from swarm.bulk_digest import bulk_digest
from swarm.core.errors import RemoteError
from swarm.core.ids import Step, Version
from swarm.core.round.contribution import Contribution, Result
from swarm.core.round.facts import WorkLimits
from tests.swarm.core.round.round_world import cached_verify, contribution, facts_of, identity_of
from tests.swarm_in_process import InProcessSwarm, manifest_of, prepare, swarm_in_process

STEPS = 10
"""Where the liar reduces its own part nobody gives a reason: with so many steps others do, too."""
TABLES: dict[str, dict[str, Any]] = {
    "codecs": {"averaging": "fp32"},
    "averaging": {"rule": "centered_clip", "delay": 0},
    "optimizer": {"learning_rate": 0.01, "warmup_steps": 1, "total_steps": STEPS},
    "checkpoint": {"every_steps": STEPS, "snapshot_every": STEPS},
    "limits": {"founders_per_stage": 3},
    "batch": {"microbatch_size": 2, "target_tokens": 192},
}

Encoded = tuple[list[bytearray], list[bytes]]
Nonsense = Callable[[bytearray], tuple[bytearray, bytes]]


def _committed(part: bytearray) -> tuple[bytearray, bytes]:
    return part, bulk_digest(part)


def _filled_with(number: float) -> Nonsense:
    return lambda part: _committed(bytearray(np.full(len(part) // 4, number, dtype=np.float32).tobytes()))


NONSENSE: dict[str, tuple[Nonsense, str]] = {
    "nan": (_filled_with(float("nan")), "fp32 vector holds"),
    "infinity": (_filled_with(float("inf")), "fp32 vector holds"),
    "largest": (_filled_with(3e38), "fp32 vector holds"),
    "short": (lambda part: _committed(part[:-4]), "bytes where"),
    "long": (lambda part: _committed(bytes(part) + bytes(4)), "bytes where"),
    "empty": (lambda part: _committed(bytearray()), "bytes where"),
    "other digest": (lambda part: (part, hashlib.sha256(b"another part").digest()), "differ from its commitment"),
}


def bans(swarm: InProcessSwarm) -> list[tuple[str, str]]:
    return [(event["peer_id"], event["kind"]) for event in swarm.events if event["event"] == "banned"]


LONGER = ("nan", "infinity", "largest", "short", "empty", "other digest")


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[pytest.mark.soak] if what in LONGER else []) for what in NONSENSE]
)
def test_nonsense_is_left_out_with_a_reason_and_changes_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    nonsense, reason = NONSENSE[what]
    is_signed = what != "other digest"
    liars: list[StageReplica] = []
    honest_encode = ContributionEncoder.encode

    def encode(encoder: ContributionEncoder, step: Step, accumulation: Accumulation, seeds: Sequence[bytes]) -> Encoded:
        parts, digests = honest_encode(encoder, step, accumulation, seeds)
        if encoder.replica in liars and parts:
            made = [nonsense(part) for part in parts]
            parts, digests = [part for part, _ in made], [digest for _, digest in made]
        return parts, digests

    monkeypatch.setattr(ContributionEncoder, "encode", encode)
    run = prepare(manifest_of(**TABLES), tmp_path)
    results: list[Result] = []

    async def train() -> dict[str, Any]:
        async with swarm_in_process(run, tmp_path, peers=(3, 3)) as swarm:
            await swarm.until_version(1)
            liar = swarm.of_stage(0)[0]
            liars.append(liar.steps.replica)
            report = await swarm.finished(timeout_s=90.0)
            honest = swarm.of_stage(0)[-1]
            results.extend(held[0] for held in honest.steps.context.results.values())
            last = {peer.peer_id: peer.steps.replica.state.weights for peer in swarm.of_stage(0)}
            assert len({weights.tobytes() for weights in last.values()}) == 1
            assert all(bool(np.isfinite(weights).all()) for weights in last.values())
            of_liar = [made for made in results if liar.peer_id in [c.peer_id for c in made.roster.contributions]]
            found = [
                (left_out, made)
                for made in of_liar
                for part in made.parts
                for left_out in part.excluded
                if left_out.peer_id == liar.peer_id
            ]
            if is_signed:
                assert found, "the liar was never left out"
                assert {left_out.why for left_out, _ in found} == {"malformed"}
            else:
                assert not found, "what was not committed to has not come, and proves nothing against anybody"
            assert reason in caplog.text
            for _, made in found:
                for part in made.parts:
                    assert liar.peer_id not in part.contributors
                    assert part.contributors, "the others' contributions count"
            await swarm.until(lambda: not is_signed or bool(bans(swarm)))
            assert bans(swarm) == ([(liar.peer_id, "protocol_violation")] if is_signed else [])
        return report

    report = asyncio.run(train())
    assert report["steps"] == STEPS


@pytest.mark.parametrize("num_tokens", [1e30, -1, 0, float("nan"), float("inf"), 1 << 40, "64", None])
def test_a_weight_is_a_count_that_a_microbatch_can_have(num_tokens: Any) -> None:
    facts = replace(facts_of(3), limits=WorkLimits(max_tokens=64))
    good = contribution(facts.members[0])
    facts.check_contribution(good, cached_verify)
    value: Any = good.to_value()
    value["value"]["work"][0][3] = num_tokens
    with pytest.raises(RemoteError, match="num_tokens"):
        Contribution.from_value(value)


def listing(good: Contribution, **changed: Any) -> Contribution:
    """The same, signed, with other microbatches in it."""
    unsigned = replace(good, work=tuple(replace(item, **changed) for item in good.work))
    return replace(unsigned, signature=identity_of(good.peer_id).sign(unsigned.signed_bytes()))


def test_a_weight_of_more_tokens_than_a_microbatch_has_is_refused() -> None:
    facts = replace(facts_of(3), limits=WorkLimits(max_tokens=64))
    good = contribution(facts.members[0])
    for num_tokens, refused in ((64, False), (65, True), (1 << 32, True)):
        made = listing(good, num_tokens=num_tokens)
        if refused:
            with pytest.raises(RemoteError, match="more than 64 tokens"):
                facts.check_contribution(made, cached_verify)
        else:
            facts.check_contribution(made, cached_verify)


def test_a_contribution_lists_no_more_than_a_step_can_hold() -> None:
    """Else two of them would make a roster that fits into no message, and its leader could not go on."""
    facts = replace(facts_of(3), limits=WorkLimits(max_work=2))
    facts.check_contribution(contribution(facts.members[0], num_work=2), cached_verify)
    with pytest.raises(RemoteError, match="lists 3 microbatches, where 2 are the most"):
        facts.check_contribution(contribution(facts.members[0], num_work=3), cached_verify)


@pytest.mark.parametrize(("version", "delay", "refused"), [(0, 0, False), (-1, 1, False), (-1, 0, True), (1, 1, True)])
def test_what_no_auditor_can_replay_is_no_contribution(version: int, delay: int, refused: bool) -> None:
    """Work of a version that nobody has was audited by nobody, and counted."""
    facts = replace(facts_of(3), limits=WorkLimits(delay=delay))
    made = listing(contribution(facts.members[0]), version=Version(int(facts.step) + version))
    if refused:
        with pytest.raises(RemoteError, match="versions that are not its step's"):
            facts.check_contribution(made, cached_verify)
    else:
        facts.check_contribution(made, cached_verify)


def test_a_window_is_of_whole_inner_steps() -> None:
    facts = replace(facts_of(3), limits=WorkLimits(work_multiple=2))
    facts.check_contribution(contribution(facts.members[0], num_work=4), cached_verify)
    with pytest.raises(RemoteError, match="lists 3 microbatches, where inner steps are of 2"):
        facts.check_contribution(contribution(facts.members[0], num_work=3), cached_verify)
