"""The foretold length of results holds what real ones take, and bounds how many members a stage may have."""

from dataclasses import replace

from swarm.core.canonical import pack
from swarm.core.cohorts import MAX_MEMBERS
from swarm.core.round.contribution import Lack, Rate, ReducedPart, Share
from swarm.core.round.words import Word, Words
from swarm.core.state.result_size import most_members, most_work, result_bytes
from swarm.network.transport import MAX_META_BYTES
from tests.swarm.core.round.round_members import certificate_by, result_of, roster_of
from tests.swarm.core.round.round_world import contribution, facts_of


def test_a_full_result_is_no_longer_than_foretold_and_not_much_shorter() -> None:
    num_parts, facts = 40, facts_of(70, num_parts=40)
    rates = tuple(Rate(peer, 20) for peer in facts.members[:16])
    listed = [most_work(140) if number < 23 else 2 for number in range(70)]  # liars, as many as may be
    made = {
        peer: contribution(peer, num_parts=num_parts, num_work=num_work, first_id=9)
        for peer, num_work in zip(facts.members, listed, strict=True)
    }
    roster = roster_of(facts, commits={peer: replace(one, rates=rates) for peer, one in made.items()})
    words = {peer: [Lack(other, bytes(64)) for other in facts.members if other != peer] for peer in facts.members[:44]}
    roster = roster.without(words)
    roster = replace(roster, certificate=certificate_by(facts, "roster", 0, roster.facts_digest()))
    shares = tuple(Share(number, facts.members[0], bytes(32)) for number in range(2))
    stay = tuple(made.peer_id for made in roster.contributions)
    parts = tuple(ReducedPart(part, b"1" * 32, stay, squares=1.0, shares=shares) for part in range(num_parts))
    result = result_of(facts, roster, parts=parts)
    result = replace(result, certificate=certificate_by(facts, "commit", 0, result.root()))
    words = Words((1 << 20,) * len(stay), 2.5, (Word(69, bytes(64), (bytes(64),) * 2),) * num_parts)
    found, foretold = len(pack(result.to_value())) + len(pack(words.to_value())), result_bytes(70, num_parts, 140)
    assert 0.6 * foretold < found < foretold


def test_a_stage_has_as_many_members_as_its_results_allow() -> None:
    assert most_members(238, 128, max_bytes=MAX_META_BYTES) == MAX_MEMBERS
    many = most_members(800, 1024, max_bytes=MAX_META_BYTES)
    assert 64 < many < 128
    assert result_bytes(many, 800, 1024) <= MAX_META_BYTES < result_bytes(many + 1, 800, 1024)
    assert most_members(1 << 16, 1, max_bytes=1 << 20) == 0
