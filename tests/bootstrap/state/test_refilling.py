"""A stage that is killed whole in a run of strangers is served again, and nobody chooses by whom."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bootstrap.state import coming_back
from swarm.core.directory.posting import refills
from swarm.core.ids import PeerId, StageIndex
from tests.branches import Branches
from tests.swarm_in_process import InProcessSwarm, manifest_of, swarm_in_process

PUBLIC: dict[str, dict[str, Any]] = {
    "run": {"trust": "public"},
    "audits": {"agreements_to_promote": 4},
    "optimizer": {"total_steps": 400},
    "limits": {"founders_per_stage": 2, "min_replicas": 1, "refill_s": 0.2},
    "checkpoint": {"every_steps": 4, "snapshot_every": 4},
    "deadlines": {"call_s": 2.0, "hop_s": 10.0, "step_s": 10.0, "lease_s": 1.0, "drain_s": 0.5},
}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is gone is given up in seconds."""
    monkeypatch.setattr(coming_back, "SILENT_S", 0.5)
    monkeypatch.setattr(coming_back, "LOOK_WHERE_QUIET_S", 0.2)


def posted(swarm: InProcessSwarm) -> list[dict[str, Any]]:
    return [event for event in swarm.events if event["event"] == "posted"]


def test_a_stage_killed_whole_is_served_again_from_what_the_run_key_has_anchored(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with swarm_in_process(manifest_of(**PUBLIC), tmp_path, peers=(2, 2)) as swarm:
            await swarm.until(lambda: any(event["event"] == "checkpoint" for event in swarm.events))
            newcomer = await swarm.add_peer(1)  # who knocks there is no member, and nobody is left to examine it
            await swarm.until_version(6)
            founders = {peer.peer_id for peer in swarm.of_stage(0)}
            for peer in swarm.of_stage(1)[:2]:
                await swarm.kill(peer)
            # Where the posted leaves in mid-round, a lease goes by before the host names who decides without it.
            await swarm.until(lambda: any(event["event"] == "continued" for event in swarm.events), timeout_s=150.0)
            geneses = swarm.host.books.geneses
            assert set(geneses[1].members) == {PeerId(event["peer_id"]) for event in posted(swarm)} <= founders
            assert newcomer.peer_id not in geneses[1].members
            assert len(geneses[1].members) == len(geneses[0].members) == 1
            continued = next(event for event in swarm.events if event["event"] == "continued")
            assert continued["to"] % 4 == 0
            assert continued["to"] > 0, "it began again from nothing"
            work = dict(zip(geneses[1].members, geneses[1].work, strict=True))
            assert min(work.values()) > 0, "what the posted had done counts no more"
            await swarm.until_version(swarm.host.progress.done_versions() + 4)
        assert Branches.read(tmp_path / "host" / "ledger.sqlite").breaches() == []

    asyncio.run(scenario())


A, B, C, D, E, F = (PeerId(letter) for letter in "abcdef")


def test_those_posted_are_drawn_by_their_work_and_no_stage_gives_more_than_it_has_to_spare() -> None:
    work = [{A: 4, B: 4, C: 4, D: 4}, {}, {E: 4, F: 4}]
    posted = Counter[PeerId]()
    for number in range(400):
        found = refills(work, StageIndex(1), min_replicas=2, num_arriving=0, seed=bytes([number % 256, number // 256]))
        assert len(found) == 2
        assert {source for _, source in found} == {0}
        posted.update(peer for peer, _ in found)
    assert set(posted) == {A, B, C, D}
    assert min(posted.values()) > 150


def test_who_has_done_nothing_is_posted_nowhere_and_who_has_done_much_more_often() -> None:
    work = [{A: 12, B: 4, C: 4, D: 0}, {}]
    posted = Counter[PeerId]()
    for number in range(400):
        found = refills(work, StageIndex(1), min_replicas=1, num_arriving=1, seed=number.to_bytes(2, "big"))
        posted.update(peer for peer, _ in found)
    assert sum(posted.values()) == 400
    assert posted[D] == 0
    assert 0.5 < posted[A] / 400 < 0.7


def test_nobody_is_posted_where_enough_are_on_the_way_or_none_can_be_spared() -> None:
    work = [{A: 1, B: 1, C: 1}, {}]
    assert refills(work, StageIndex(1), min_replicas=2, num_arriving=2, seed=b"") == ()
    assert refills(work, StageIndex(1), min_replicas=3, num_arriving=0, seed=b"") == ()
    assert refills([{}, {}], StageIndex(1), min_replicas=1, num_arriving=0, seed=b"") == ()
