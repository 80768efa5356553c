"""This is where results without bodies are kept in bounds and handed out without a gap."""

from dataclasses import replace

import pytest

from peer import bare_results
from peer.bare_results import BareResults
from swarm.core.contribution import Result
from swarm.core.ids import Step
from tests.round_members import certified, facts_and_rounds, result_of, roster_of


@pytest.fixture
def results() -> list[Result]:
    facts, _ = facts_and_rounds(4)
    made = certified(facts, result_of(facts, roster_of(facts)))
    return [replace(made, roster=replace(made.roster, step=Step(number))) for number in range(8)]


def test_what_follows_without_a_gap_is_handed_out(results: list[Result]) -> None:
    kept = BareResults()
    for result in (*results[:3], *results[4:]):
        kept.keep(result)
    assert [one.data for one in kept.since(1, at_most=9)] == [one.packed.data for one in results[1:3]]
    assert [one.data for one in kept.since(4, at_most=2)] == [one.packed.data for one in results[4:6]]
    assert kept.since(3, at_most=9) == []
    kept.clear()
    assert kept.since(4, at_most=9) == []


def test_the_oldest_go_first_and_an_answer_is_bounded(results: list[Result], monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(results[0].packed.data)
    kept = BareResults(most_bytes=3 * size + size // 2)
    for result in results:
        kept.keep(result)
    assert len(kept) == 3
    assert kept.since(4, at_most=9) == []
    monkeypatch.setattr(bare_results, "MOST_AT_ONCE_BYTES", size)
    assert len(kept.since(5, at_most=9)) == 1
    monkeypatch.setattr(bare_results, "MOST_AT_ONCE_BYTES", 1)
    assert len(kept.since(5, at_most=9)) == 1, "a result that is longer than an answer goes by itself"
