"""Certified results stay on disk in bounds, are handed out without a gap, and lead on from a state after a restart."""

from dataclasses import replace
from pathlib import Path

import pytest

from swarm.checkpoint import results as module
from swarm.checkpoint.kept_past import KeptPast
from swarm.checkpoint.results import PARTS, SIGNED, ResultStore, results_on
from swarm.core.ids import StageIndex, Step, Version
from swarm.core.round.contribution import Result
from swarm.core.state.stage_chain import StageChain
from tests.swarm.core.round.round_members import certified, facts_and_rounds, result_of, roster_of
from tests.verification.exhibits import SmallRun, small_settings

BODIES = [b"first part", b"", b"third"]


@pytest.fixture(scope="module")
def chain() -> StageChain:
    return SmallRun(small_settings(2)).snapshot(1)[1]


@pytest.fixture(scope="module")
def results() -> list[Result]:
    facts, _ = facts_and_rounds(4)
    made = certified(facts, result_of(facts, roster_of(facts)))
    return [replace(made, roster=replace(made.roster, step=Step(number))) for number in range(8)]


def written(store: ResultStore, results: list[Result]) -> None:
    for result in results:
        store.keep(result, BODIES)
        store.write(int(result.roster.step))


def test_what_follows_without_a_gap_is_handed_out(tmp_path: Path, chain: StageChain, results: list[Result]) -> None:
    store = ResultStore(tmp_path, chain, kept=2)
    written(store, results[:3])
    store.keep(results[4], BODIES)  # not on disk yet
    for held in (store, ResultStore(tmp_path, chain, kept=2)):
        assert [one.data for one in held.signed_since(1, at_most=9)] == [one.packed.data for one in results[1:3]]
        assert [one.data for one in held.signed_since(0, at_most=2)] == [one.packed.data for one in results[:2]]
        assert held.signed_since(3, at_most=9) == []
    assert [one.data for one in store.signed_since(4, at_most=9)] == [results[4].packed.data]
    other = replace(chain, lineage=bytes(32))
    assert ResultStore(tmp_path, other, kept=2).signed_since(1, at_most=9) == []
    store.begin_again(other)
    assert store.signed_since(1, at_most=9) == []
    store.forget_others()
    assert not list(tmp_path.iterdir())


def test_the_oldest_go_first_and_an_answer_is_bounded(
    tmp_path: Path, chain: StageChain, results: list[Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = ResultStore(tmp_path / "probe", chain, kept=1)
    written(probe, results[:1])
    (file,) = (tmp_path / "probe").glob(f"*{SIGNED}")
    size = file.stat().st_size
    store = ResultStore(tmp_path / "kept", chain, kept=2, most_signed_bytes=3 * size + size // 2)
    written(store, results)
    assert sorted(store) == [6, 7]
    assert [bytes(body) for body in store[7][1]] == BODIES
    assert len(list((tmp_path / "kept").glob(f"*{PARTS}"))) == 2
    assert len(list((tmp_path / "kept").glob(f"*{SIGNED}"))) == 3
    assert store.signed_since(4, at_most=9) == []
    monkeypatch.setattr(module, "MOST_AT_ONCE_BYTES", len(results[0].packed.data))
    assert len(store.signed_since(5, at_most=9)) == 1
    monkeypatch.setattr(module, "MOST_AT_ONCE_BYTES", 1)
    assert len(store.signed_since(5, at_most=9)) == 1, "a result that is longer than an answer goes by itself"


def test_what_is_torn_or_without_its_parts_leads_nowhere(
    tmp_path: Path, chain: StageChain, results: list[Result]
) -> None:
    start = replace(chain, version=Version(0))
    written(ResultStore(tmp_path, chain, kept=8), results[:4])
    assert [int(result.roster.step) for result, _, _ in results_on(tmp_path, start)] == [0, 1, 2, 3]
    (signed,) = tmp_path.glob(f"*-{2:08d}{SIGNED}")
    whole = signed.read_bytes()
    signed.write_bytes(whole[:-1])
    assert [int(result.roster.step) for result, _, _ in results_on(tmp_path, start)] == [0, 1]
    signed.write_bytes(whole)
    signed.with_suffix(PARTS).unlink()
    assert [int(result.roster.step) for result, _, _ in results_on(tmp_path, start)] == [0, 1]


def test_who_comes_back_holds_what_led_to_its_version(tmp_path: Path, chain: StageChain, results: list[Result]) -> None:
    written(ResultStore(tmp_path, replace(chain, version=Version(0)), kept=3), results[:5])

    def back_at(version: int) -> ResultStore:
        return ResultStore(tmp_path, replace(chain, version=Version(version)), kept=3)

    assert sorted(back_at(5)) == [2, 3, 4]
    result, bodies = back_at(5)[4]
    assert (result, [bytes(body) for body in bodies]) == (results[4], BODIES)
    assert sorted(back_at(4)) == [2, 3], "what comes after its version is not taken for its past"
    assert sorted(back_at(7)) == [], "nothing leads there"
    (torn,) = tmp_path.glob(f"*-{3:08d}{PARTS}")
    torn.write_bytes(b"first")
    assert sorted(back_at(5)) == [4]


def test_a_folder_without_states_holds_nothing(tmp_path: Path, chain: StageChain, results: list[Result]) -> None:
    run = SmallRun(small_settings(2))
    written(ResultStore(tmp_path, chain, kept=8), results)
    past = KeptPast(tmp_path, StageIndex(1), run.settings, run.replicas[1][0].layout)
    assert past.holdings() == []
    assert past.newest(chain.lineage) == -1
    assert past.made_again(chain.lineage, 0) is None
