"""What a result says of its parts, held against what its reducers signed, by voters that got none of them."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from swarm.core.canonical import pack
from swarm.core.errors import RemoteError, TransientError
from swarm.core.ids import PeerId
from swarm.core.round.contribution import Exclusion, ReducedPart, Result
from swarm.core.round.voter import RoundVoter, Witness
from swarm.core.round.words import Words
from tests.swarm.core.round.round_members import (
    asked_result,
    certificate_by,
    facts_and_rounds,
    result_of,
    roster_of,
    signed_result,
    vote_by,
    witnesses_of,
)
from tests.swarm.core.round.round_world import cached_verify, contribution, facts_of, identity_of, words_for

FACTS, _ = facts_and_rounds(2, witnesses=2)
LIAR, OTHER = FACTS.leaders
UNCERTIFIED = roster_of(FACTS, reducers=(LIAR, OTHER, LIAR))
ROSTER = replace(UNCERTIFIED, certificate=certificate_by(FACTS, "roster", 0, UNCERTIFIED.facts_digest()))
RESULT = result_of(FACTS, ROSTER)
WORDS = words_for(RESULT)


def vote_on(result: Result, words: Words | None) -> bool:
    """Whether a neighbour of a stage of two votes for what its leader, the liar, asks."""
    me = witnesses_of(FACTS)[0]
    witness = Witness(RoundVoter(FACTS, me, identity_of(me).sign, cached_verify))
    try:
        return witness.on_ballot(LIAR, asked_result(FACTS, result), words) is not None
    except RemoteError as error:
        if error.kind not in ("signature", "malformed"):
            raise
        return False


def said(part: int, **fields: object) -> Result:
    """The result, where its leader says something else of a part."""
    parts: list[ReducedPart] = list(RESULT.parts)
    parts[part] = replace(parts[part], **fields)  # type: ignore[arg-type]
    return signed_result(replace(RESULT, parts=tuple(parts)))


def test_a_result_is_voted_for_with_its_reducers_words_alone() -> None:
    assert vote_on(RESULT, WORDS)
    assert not vote_on(RESULT, None)


LEADERS_LIES = {
    "squares": said(1, squares=1e30),
    "digest": said(1, digest=bytes(31) + b"1"),
    "who is left out": said(1, contributors=(LIAR,), excluded=(Exclusion(OTHER, "malformed"),)),
}


@pytest.mark.parametrize("what", LEADERS_LIES)
def test_a_leader_changes_nothing_of_a_part_that_another_reduced(what: str) -> None:
    result = LEADERS_LIES[what]
    assert not vote_on(result, WORDS)
    signed_by_leader = words_for(result, reducer=LIAR)
    mixed = replace(WORDS, said=(WORDS.said[0], replace(signed_by_leader.said[1], reducer=WORDS.said[1].reducer)))
    assert not vote_on(result, replace(mixed, said=(*mixed.said, WORDS.said[2])))


BAD_WORDS: dict[str, Callable[[], Words]] = {
    "one short": lambda: replace(WORDS, said=WORDS.said[:-1]),
    "of another part": lambda: replace(WORDS, said=(WORDS.said[2], *WORDS.said[1:])),
    "by nobody": lambda: replace(WORDS, said=(replace(WORDS.said[0], reducer=200), *WORDS.said[1:])),
    "by another": lambda: replace(WORDS, said=(replace(WORDS.said[0], reducer=WORDS.said[1].reducer), *WORDS.said[1:])),
    "with a share": lambda: replace(WORDS, said=(replace(WORDS.said[0], shares=(bytes(64),)), *WORDS.said[1:])),
    "more weight": lambda: replace(WORDS, weights=(65, 64)),
    "less weight": lambda: replace(WORDS, weights=(63, 64)),
    "too few weights": lambda: replace(WORDS, weights=(64,)),
    "another norm cap": lambda: replace(WORDS, norm_cap=None),
}


@pytest.mark.parametrize("what", BAD_WORDS)
def test_words_that_do_not_fit_are_no_words(what: str) -> None:
    assert not vote_on(RESULT, BAD_WORDS[what]())


def test_what_a_reducer_signed_falsely_of_its_own_part_bears_its_name() -> None:
    """A voter without bytes cannot see it: whoever has the bytes can, and then it is proved."""
    result = said(0, squares=1e30)
    words = words_for(result)
    assert vote_on(result, words)
    weights = {made.peer_id: made.num_tokens for made in ROSTER.contributions}
    made = dict(words.of_result(result, weights, norm_cap=words.norm_cap))[result.parts[0]]
    assert (made.reducer, made.squares) == (LIAR, 1e30)
    made.check(cached_verify)


def vote_on_empty(*, voted: Sequence[PeerId], gone: Sequence[PeerId] = (), by: PeerId | None = None) -> bool:
    """Whether a neighbour votes for a result that leaves all parts empty; `by`: who signs the votes, if others do."""
    result = signed_result(replace(RESULT, parts=tuple(ReducedPart.empty(part) for part in range(3))))
    votes = [replace(vote_by(FACTS, by or peer, "result", 0, result.root()), voter=peer) for peer in voted]
    me = witnesses_of(FACTS)[0]
    witness = Witness(RoundVoter(FACTS, me, identity_of(me).sign, cached_verify))
    try:
        asked = asked_result(FACTS, result)
        return witness.on_ballot(LIAR, asked, words_for(result, votes=votes), gone=gone) is not None
    except TransientError:
        return False


def test_a_leader_leaves_no_part_empty_without_the_votes_of_the_members_who_are_there() -> None:
    assert not vote_on_empty(voted=())
    assert not vote_on_empty(voted=(LIAR,))
    assert vote_on_empty(voted=(LIAR, OTHER))
    assert vote_on_empty(voted=(LIAR,), gone=(OTHER,))
    with pytest.raises(RemoteError):
        vote_on_empty(voted=(LIAR, OTHER), by=LIAR)


def test_words_of_64_members_and_64_parts_take_five_kilobytes() -> None:
    facts = facts_of(64, num_parts=64)
    commits = {peer: contribution(peer, num_parts=64) for peer in facts.members}
    result = result_of(facts, roster_of(facts, commits=commits))
    size, whole = len(pack(words_for(result).to_value())), len(pack(result.to_value()))
    assert size < 5 * 1024
    assert size < 0.025 * whole
