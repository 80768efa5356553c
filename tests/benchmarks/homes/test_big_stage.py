"""What is counted of a run of a big stage, from what was seen of it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.big_stage import Fetched, Watched, fetched_by, figures, work_s, write_manifest
from swarm.core.ids import PeerId
from swarm.core.plan import HEADERS
from swarm.core.round.contribution import Result
from swarm.manifest.file import read_manifest
from swarm.manifest.model import stage_num_parameters
from swarm.network.identity_file import load_or_create_identity
from tests.swarm.core.round.round_members import result_of, roster_of
from tests.swarm.core.round.round_world import facts_of
from tests.swarm.core.round.test_left_out import lacks

STAGE = {
    "num_parameters": 1000,
    "round_s": 2.0,
    "join_s": 7.0,
    "join_bytes": 400.0,
    "audit_up_bytes": 50.0,
    "memory_bytes": {"host.a": 5000},
}
FACTS = facts_of(4)
FIRST = int(FACTS.step)
STRANGER = PeerId("stranger")


def watched(results: list[Result], up_bytes: int) -> Watched:
    versions = [{"event": "version", "version": FIRST + number, "at": 10.0 * number} for number in range(3)]
    steps = [{"event": "step", "stage": 1, "step": FIRST, "round_s": 3.0, "at": 9.0}]
    steps += [
        {"event": "admitted", "at": 9.5},
        {"event": "step", "stage": 1, "step": FIRST + 1, "round_s": 5.0, "at": 19.0},
    ]
    lines: list[dict[str, Any]] = [
        {"at": at, "up_bytes": {"one": up}, "up_ack_bytes": {"one": small}, "up_apart_bytes": {"one": small}}
        for at, up, small in ((0.0, 5, 2), (20.0, 5 + up_bytes + 2 * (up_bytes // 10), 2 + up_bytes // 10))
    ]
    ended = {**versions[-1], "at": 50.0}
    num_parts = len(results[0].parts) if results else 1
    fetched = [
        Fetched(STRANGER, FIRST, num_parts, 1.0, 11.0),  # of a round that it was no member of
        Fetched(STRANGER, FIRST - 1, 2 * num_parts, -10.0, 10.0),  # half of it before the count begins
        Fetched(FACTS.members[0], FIRST, num_parts, 1.0, 11.0),
    ]
    return Watched(
        [*versions, *steps], lines, versions[0], ended, None, results, fetched, [7000, 9000], True, {"peer0": "one"}
    )


def test_who_is_left_out_whole_is_no_dropped_part_and_bytes_beyond_the_round_s_were_sent_twice() -> None:
    roster = roster_of(FACTS)
    slow, *others = FACTS.members
    smaller = roster.without({slow: lacks(roster, slow, others)})
    reduces_nothing_of_its_own = [smaller.combiner_of(part) for part in range(3)].count(slow)
    assert reduces_nothing_of_its_own == 1
    sent = (2 * 2 + 1 * 3) / 3  # of a part three contributed to, its reducer's own goes nowhere
    due = (sent + 3 + 2) * 1000 * (1 + 2 / 128) + 4 * 50  # and two results were fetched
    found = figures(
        watched([result_of(FACTS, smaller)], round(1.25 * due * HEADERS)), STAGE, STAGE, {**STAGE, "round_s": 2.5}
    )
    assert found["left_out_whole"] == {slow[-6:]: 1}
    assert (found["contributions_dropped"], found["part_contributions"]) == (0, 9)
    assert abs(found["bytes_sent_twice_share"] - 0.25) < 0.001
    assert abs(found["acknowledgements_share"] - 0.1 / 1.2) < 0.001
    assert abs(found["to_host_and_source_share"] - 0.1 / 1.2) < 0.001
    rounds = ("undisturbed_round_seconds", "round_seconds", "plan_round_seconds", "step_seconds")
    assert [found[name] for name in rounds] == [3.0, 4.0, 2.0, 10.0]
    assert (found["beside_round_seconds"], found["plan_beside_round_seconds"]) == (5.0, 2.5)
    assert found["longest_standstill_s"] == 20.0
    assert found["host_bytes_per_parameter_each"] == [7.0, 9.0]
    assert (found["host_bytes_per_parameter"], found["plan_host_bytes_per_parameter"]) == (9.0, 5.0)


def test_what_was_fetched_is_told_by_the_log(tmp_path: Path) -> None:
    me = load_or_create_identity(tmp_path / "peer0" / "identity.key").peer_id
    (tmp_path / "peer0.log").write_text(
        "2026-11-28 15:33:41,362 INFO peer.state.catch_up: 34 parts of step 1's result came in 349.7 s\n"
        "2026-11-28 15:33:41,417 WARN peer.round.taking: step 1: this peer is left out\n"
    )
    (found,) = fetched_by(tmp_path, "peer0")
    assert (found.peer, found.step, found.num_parts) == (me, 1, 34)
    assert round(found.ended - found.began, 1) == 349.7
    assert round(found.within(found.ended - 34.97, found.ended + 1.0), 3) == 3.4
    assert not list(fetched_by(tmp_path, "newcomer"))


def test_a_part_without_a_contribution_on_the_roster_dropped_it() -> None:
    result = result_of(FACTS, roster_of(FACTS))
    part = replace(result.parts[0], digest=bytes(32), contributors=())
    found = figures(watched([replace(result, parts=(part, *result.parts[1:]))], 0), STAGE, STAGE, STAGE)
    assert found["contributions_dropped"] == 4


def test_the_plan_is_told_how_long_steps_took_beside_their_rounds() -> None:
    assert work_s(watched([], 0)) == 6.0, "7 and 5 s"


def test_its_manifest_is_of_about_so_many_parameters(tmp_path: Path) -> None:
    write_manifest(tmp_path / "run.toml", params=10_000_000, snapshot_every=2)
    sizes = stage_num_parameters(read_manifest(tmp_path / "run.toml").model)
    assert len(sizes) == 2
    assert 0.98e7 < sizes[1] < 1.02e7
