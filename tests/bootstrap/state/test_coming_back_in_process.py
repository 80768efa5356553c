"""Everybody leaves, dies and comes back as a seed has it, and the run goes on."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from bootstrap.program.ledger import Event
from swarm.checkpoint.kept_past import KeptPast
from swarm.core.canonical import Value
from swarm.core.ids import StageIndex, Version
from swarm.core.pipeline.data_order import DataOrder
from swarm.core.pipeline.leases import LeaseTable, OpenChunk
from swarm.core.state.stage_chain import Genesis
from tests.branches import Branches
from tests.comings_and_goings import HOST, STAGES, endure, name_of, schedule
from tests.swarm_in_process import identity_of, manifest_of, swarm_in_process

IN_EVERY_TEST_RUN = 1
SOAKED = range(500)


def test_a_run_endures_comings_and_goings(tmp_path: Path) -> None:
    endure(IN_EVERY_TEST_RUN, tmp_path)


@pytest.mark.soak
@pytest.mark.drawn(24)
@pytest.mark.parametrize("seed", [seed for seed in SOAKED if seed != IN_EVERY_TEST_RUN])
def test_runs_endure_comings_and_goings(tmp_path: Path, seed: int) -> None:
    endure(seed, tmp_path)


@pytest.mark.soak
@pytest.mark.drawn(24)
@pytest.mark.parametrize("seed", SOAKED)
def test_runs_in_windows_endure_comings_and_goings(tmp_path: Path, seed: int) -> None:
    endure(seed, tmp_path, num_stages=1)


def test_a_schedule_follows_from_its_seed_and_leaves_a_stage_alone_for_a_while() -> None:
    for seed in SOAKED:
        plan = schedule(seed)
        assert plan == schedule(seed) != schedule(seed + 1)
        everybody = {HOST, *(name_of(stage, index) for stage in range(STAGES) for index in range(plan.replicas))}
        stages = [{name for name in everybody if name[:2] == f"p{stage}"} for stage in range(STAGES)]
        here, was_alone = set(everybody), False
        for act in plan.acts:
            who = set(act.who)
            assert who <= (everybody - here if act.kind == "return" else everybody if act.kind == "die" else here), plan
            here = here | who if act.kind == "return" else here - who
            was_alone = was_alone or any(not stage & here for stage in stages)
        assert here == everybody, plan
        assert was_alone, plan


@pytest.mark.soak
def test_a_host_that_is_killed_and_started_again_takes_the_run_up(tmp_path: Path) -> None:
    manifest = manifest_of(optimizer={"total_steps": 16}, limits={"founders_per_stage": 2})

    async def scenario() -> None:
        async with swarm_in_process(manifest, tmp_path, peers=(2, 2)) as swarm:
            await swarm.until_version(3)
            await swarm.kill_host()
            await swarm.restart_host()
            await swarm.until(lambda: any(event["event"] == "recovered" for event in swarm.events))
            report = await swarm.finished()
            assert report["steps"] == 16
        assert Branches.read(tmp_path / "host" / "ledger.sqlite").breaches() == []

    asyncio.run(scenario())


def test_the_last_of_a_stage_hands_over_a_snapshot_and_the_results_since(tmp_path: Path) -> None:
    manifest = manifest_of(optimizer={"total_steps": 5000}, checkpoint={"every_steps": 5000, "snapshot_every": 4})

    async def main() -> None:
        async with swarm_in_process(manifest, tmp_path, peers=[1, 1]) as swarm:
            await swarm.until_version(7)
            leaver = swarm.of_stage(1)[0]
            await swarm.leave(leaver)
            (given,) = [event for event in swarm.events if event["event"] == "handed_over"]
            assert given["version"] >= 7
            folder = swarm.run.folder.root / "handed-over" / "stage-1"
            (past,) = KeptPast(folder, StageIndex(1), swarm.run.settings, swarm.run.states[1].layout).holdings()
            assert past.oldest < past.newest == given["version"]

    asyncio.run(main())


@pytest.mark.soak
def test_one_of_two_replicas_leaves_and_comes_back(tmp_path: Path) -> None:
    manifest = manifest_of(optimizer={"total_steps": 24}, limits={"founders_per_stage": 2})

    async def scenario() -> None:
        async with swarm_in_process(manifest, tmp_path, peers=(2, 2)) as swarm:
            await swarm.until_version(3)
            leaver = swarm.of_stage(1)[0]
            await swarm.leave(leaver)
            assert leaver not in swarm.of_stage(1)
            await swarm.restart(leaver)
            report = await swarm.finished()
            assert report["steps"] == 24
            assert all(len(set(digests.values())) == 1 for digests in report["state_digests"].values())

    asyncio.run(scenario())


# -- what is a breach ------------------------------------------------------------------------------------------

PEER, RUN_KEY = identity_of(0).peer_id, identity_of(1).peer_id
ORDER = DataOrder(num_tokens=2000, sequence_length=8, microbatch_size=1, chunk_tokens=36, seed=0)


def genesis(stage: int, version: int, era: int = 0) -> tuple[str, Value]:
    made = Genesis(
        "run", StageIndex(stage), Version(version), bytes(32), (PEER,), LeaseTable(), PEER, RUN_KEY, (), bytes(32), era
    )
    return "genesis", replace(made, signature=bytes(64)).to_value()


def result(stage: int, step: int, *ids: int, branch: int = 0) -> tuple[str, Value]:
    facts: dict[str, Value] = {"stage": stage, "step": step, "name": bytes([branch, stage, step, *bytes(29)])}
    return "result", {**facts, "ids": list(ids), "credit": [[PEER, len(ids), 8 * len(ids)]]}


def rollback(to: int, version: int) -> tuple[str, Value]:
    return "rollback", {"to": to, "version": version}


def told(*events: tuple[str, Value]) -> Branches:
    return Branches.of(Event(number, 0.0, kind, facts) for number, (kind, facts) in enumerate(events, start=1))


BEGUN = [genesis(0, 0), genesis(1, 0), *(result(stage, step, step) for step in range(3) for stage in (0, 1))]


def test_a_run_that_goes_back_and_does_its_steps_again_has_no_breach() -> None:
    run = told(
        *BEGUN, rollback(2, 5), genesis(0, 5, 1), genesis(1, 5, 1), result(0, 5, 2, branch=1), result(1, 5, 2, branch=1)
    )
    assert run.breaches() == []
    assert [(start.to, start.version) for start in run.starts] == [(0, 0), (2, 5)]
    assert (run.versions(), run.version(), run.highest()) == ([6, 6], 6, 6)
    assert {(made.stage, made.step) for made in run.abandoned} == {(0, 2), (1, 2)}
    assert run.used_before(6) == {0, 1, 2}
    nothing_lost = told(*BEGUN, rollback(3, 3), genesis(0, 3, 1), genesis(1, 3, 1), result(0, 3, 3))
    assert nothing_lost.breaches() == []
    assert not nothing_lost.abandoned


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([genesis(0, 2, 1), genesis(1, 2, 1)], "begins again at version 2 after it made 3"),
        ([rollback(4, 5), genesis(0, 5, 1), genesis(1, 5, 1)], "which was not certified"),
        ([rollback(2, 5), genesis(0, 5, 1), genesis(1, 5, 1), result(0, 5, 1, branch=1)], "used twice"),
        ([rollback(2, 5), genesis(0, 5, 1), genesis(1, 5, 1), result(0, 2, 2)], "recorded 2 times"),
        ([rollback(2, 3), genesis(0, 3, 1), genesis(1, 3, 1), result(0, 2, 7, branch=1)], "2 versions 3"),
        ([result(0, 4, 4)], "without one of the step before"),
        ([("result", {**dict(result(0, 3, 3)[1]), "credit": []})], "credit for other than"),  # type: ignore[arg-type]
    ],
)
def test_a_breach_is_told(events: list[tuple[str, Value]], said: str) -> None:
    assert any(said in breach for breach in told(*BEGUN, *events).breaches()), told(*BEGUN, *events).breaches()


def test_leases_and_what_is_used_make_up_all_the_data_that_was_begun() -> None:
    run = told(*BEGUN, rollback(2, 5), genesis(0, 5, 1), genesis(1, 5, 1))
    assert run.breaches_of_leases(5, LeaseTable(1, (OpenChunk(0, PEER, ((2, 4),)),)), ORDER) == []
    for left, wrong in (((1, 4), "are to be used again"), ((3, 4), "are skipped"), ((3, 4), "is not done again")):
        found = run.breaches_of_leases(5, LeaseTable(1, (OpenChunk(0, PEER, (left,)),)), ORDER)
        assert any(wrong in breach for breach in found), found
