"""A swarm that starts uneven becomes even by itself: peers go where they are needed, and stay."""

import asyncio
from pathlib import Path

import pytest

from peer.moving import Said, placements
from swarm.core.canonical import Value
from swarm.core.ids import PeerId
from tests.swarm_in_process import InProcessSwarm, manifest_of, swarm_in_process

EVEN = ([3, 3], [2, 4])
"""The last stage's work is up to twice the first's, for it has the loss."""


def stages(swarm: InProcessSwarm) -> list[int]:
    """How many peers serve each stage, as the host knows."""
    present = [figures.stage for figures in swarm.coordinator.progress.peers.values() if not figures.left]
    return [present.count(0), present.count(1)]


async def _five_and_one(folder: Path) -> None:
    manifest = manifest_of(
        optimizer={"total_steps": 100_000},
        checkpoint={"every_steps": 1000, "snapshot_every": 2},
        limits={"rebalance_s": 0.4, "min_replicas": 1},
        deadlines={"call_s": 5.0, "hop_s": 20.0, "round_phase_s": 3.0, "step_s": 20.0, "lease_s": 6.0, "drain_s": 1.0},
    )
    async with swarm_in_process(manifest, folder, peers=(5, 1)) as swarm:
        await swarm.until(lambda: stages(swarm) in EVEN, timeout_s=300)
        came = swarm.coordinator.progress.done_versions()
        await swarm.until_version(came + 20, timeout_s=300)
        assert stages(swarm) in EVEN
        admitted = [event["peer_id"] for event in swarm.events if event["event"] == "admitted"]
        assert max(admitted.count(peer) for peer in admitted) == 2, "somebody went back and forth"
        assert len(admitted) == 6 + stages(swarm)[1] - 1


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_five_and_one_become_even_and_stay(tmp_path: Path) -> None:
    asyncio.run(_five_and_one(tmp_path))


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
