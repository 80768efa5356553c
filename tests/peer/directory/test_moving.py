"""A swarm that starts uneven becomes even by itself: peers go where they are needed, and stay."""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bootstrap.program.ledger import Ledger
from peer.directory.moving import Mover, Said, placements
from swarm.core.canonical import Value
from swarm.core.ids import PeerId, StageIndex
from swarm.network.memory import MemoryNetwork
from tests.process_swarm import ProcessSwarm, Zygote
from tests.swarm.core.round.round_world import identities
from tests.swarm_in_process import InProcessSwarm, manifest_of, swarm_in_process
from tests.verification.exhibits import small_settings
from tests.verification.histories import end_with_one_history

EVEN = ([3, 3], [2, 4])
"""The last stage's work is up to twice the first's, for it has the loss."""


def stages(swarm: InProcessSwarm) -> list[int]:
    """How many peers serve each stage, as the host knows."""
    present = [figures.stage for figures in swarm.host.progress.peers.values() if not figures.left]
    return [present.count(0), present.count(1)]


async def _five_and_one(folder: Path) -> None:
    manifest = manifest_of(
        optimizer={"total_steps": 100_000},
        checkpoint={"every_steps": 1000, "snapshot_every": 2},
        limits={"rebalance_s": 0.4, "min_replicas": 1},
        deadlines={"call_s": 5.0, "hop_s": 20.0, "step_s": 20.0, "lease_s": 6.0, "drain_s": 1.0},
    )
    async with swarm_in_process(manifest, folder, peers=(5, 1)) as swarm:
        await swarm.until(lambda: stages(swarm) in EVEN, timeout_s=300)
        came = swarm.host.progress.done_versions()
        await swarm.until_version(came + 20, timeout_s=300)
        assert stages(swarm) in EVEN
        admitted = [event["peer_id"] for event in swarm.events if event["event"] == "admitted"]
        assert max(admitted.count(peer) for peer in admitted) == 2, "somebody went back and forth"
        assert len(admitted) == 6 + stages(swarm)[1] - 1


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_five_and_one_become_even_and_stay(tmp_path: Path) -> None:
    asyncio.run(_five_and_one(tmp_path))


def stages_of_peers(ledger: Ledger) -> list[int]:
    """How many peers serve each stage, by where each was admitted last."""
    admissions: list[Any] = [event.facts for event in ledger.events("admitted")]
    at = {facts["peer"]: facts["stage"] for facts in admissions}
    return [list(at.values()).count(0), list(at.values()).count(1)]


def microbatches_per_s(steps: Sequence[tuple[float, int]]) -> float:
    """Of steps, each with when it ended and its microbatches, those after the first."""
    return sum(num for _, num in steps[1:]) / (steps[-1][0] - steps[0][0])


MEASURED_STEPS = 8


@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.timeout(400)
def test_processes_become_even_by_themselves_and_train_as_much_faster(zygote: Zygote, tmp_path: Path) -> None:
    """Each peer does four microbatches a second, as if on a machine of its own: 5 and 1 do four, 3 and 3 do twelve."""
    with ProcessSwarm(
        zygote,
        tmp_path,
        founders=1,
        steps=100_000,
        every=100_000,
        delay=1,
        target_tokens=3072,
        in_flight=4,
        rebalance_s=1.5,
        slow_s=0.25,
    ) as swarm:
        swarm.start_host()
        for stage, letters in ((0, "abcde"), (1, "a")):
            for letter in letters:
                swarm.start_peer(f"p{stage}{letter}", stage)
        swarm.wait_for("version", version=2)
        ledger = Ledger(tmp_path / "host" / "ledger.sqlite")
        give_up_at = time.monotonic() + 180
        while stages_of_peers(ledger) != [3, 3]:
            assert time.monotonic() < give_up_at, f"still {stages_of_peers(ledger)}"
            time.sleep(0.5)
        swarm.wait_for("joined", stage=1, timeout_s=60)
        even_at, before = time.time(), len(swarm.events())
        swarm.wait_for_more("version", after=before, count=2 * MEASURED_STEPS, timeout_s=180)
        moved = [event.at for event in ledger.events("admitted")][6:]
        results: list[tuple[float, Any]] = [(event.at, event.facts) for event in ledger.events("result")]
        ended = [(at, len(facts["ids"])) for at, facts in results if facts["stage"] == 0]
        uneven = microbatches_per_s([done for done in ended if done[0] < moved[0]])
        even = microbatches_per_s([done for done in ended if done[0] > even_at][-MEASURED_STEPS:])
        print(f"{uneven:.1f} microbatches a second, then {even:.1f}: {even / uneven:.2f} times as many")
        assert len(moved) == 2, "somebody went back and forth"
        assert even > 1.3 * uneven
        ledger.close()
        end_with_one_history(swarm)
    assert zygote.leftovers() == []


def said(since_ms: int = 0, microbatch_s: float = 1.0, *, moving: bool = False) -> dict[str, Value]:
    return {"addresses": [], "version": 3, **Said(since_ms, microbatch_s, may_move=True, moving=moving).to_value()}


def test_peer_counts_where_it_was_last() -> None:
    a, b, c = (PeerId(name) for name in "abc")
    found = placements([{a: said(1), b: said(1)}, {b: said(2, 0.0), c: said(1, 3.0)}])
    assert found is not None
    peers, costs = found
    assert [(peer.peer_id, peer.stage) for peer in peers] == [("a", 0), ("b", 1), ("c", 1)]
    assert costs == [1.0, 3.0]


def test_nobody_plans_while_somebody_is_on_the_way() -> None:
    a, b, c = (PeerId(name) for name in "abc")
    assert placements([{a: said(1), b: said(1)}, {b: said(2, 0.0, moving=True), c: said(1, 3.0)}]) is None


def test_boaster_does_not_move_the_median() -> None:
    stage = {PeerId(f"p{number}"): said(0, 1.0) for number in range(4)} | {PeerId("q"): said(0, 1e6)}
    found = placements([stage, {PeerId("r"): said()}])
    assert found is not None
    assert found[1] == [1.0, 1.0]


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"since_ms": "now", "microbatch_s": 1.0, "may_move": True, "moving": False},
        {"since_ms": 0, "microbatch_s": float("nan"), "may_move": True, "moving": False},
        {"since_ms": 0, "microbatch_s": -1.0, "may_move": True, "moving": False},
    ],
)
def test_record_that_cannot_be_read_counts_nowhere(record: dict[str, Value]) -> None:
    found = placements([{PeerId("a"): said(), PeerId("b"): record}])
    assert found is not None
    assert [peer.peer_id for peer in found[0]] == ["a"]


def test_nobody_plans_before_every_stage_is_measured() -> None:
    assert placements([{PeerId("a"): said()}, {PeerId("b"): said(0, 0.0)}]) is None
    assert placements([{PeerId("a"): said()}, {}]) is None


def test_nobody_leaves_a_stage_whose_roster_still_names_one_who_has_left() -> None:
    network = MemoryNetwork(random.Random(0))
    limits = replace(small_settings().limits, rebalance_s=0.01, min_replicas=1)
    settings = small_settings(limits=limits)
    everyone = identities(6)
    roster = [identity.peer_id for identity in everyone[:5]]  # of stage 0, from which the fifth has gone to stage 1

    async def main() -> None:
        movers = []
        for number, identity in enumerate(everyone):
            directory, me, stage = network.directory(identity), identity.peer_id, StageIndex(int(number >= 4))
            await directory.publish(str(stage), said(), ttl_s=60.0)
            if stage == 0:
                movers.append(Mover(settings, directory, me, stage, str, lambda: 1.0, lambda: tuple(roster)))
        running = [asyncio.ensure_future(mover.run()) for mover in movers]
        await asyncio.sleep(0.3)
        assert [mover.target for mover in movers] == [None] * 4
        roster.pop()
        async with asyncio.timeout(10.0):
            while not any(mover.target == 1 for mover in movers):  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.01)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    asyncio.run(main())
