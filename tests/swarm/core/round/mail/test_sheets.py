"""A round's large records sent once: what comes out is what went in, and a leader sends no more than members do."""

from collections import Counter
from dataclasses import replace

import pytest

from swarm.core.canonical import Value, pack
from swarm.core.errors import RemoteError
from swarm.core.round.averaging_round import AveragingRound
from swarm.core.round.ballots import Proposal
from swarm.core.round.contribution import Roster
from swarm.core.round.facts import EquivocationError
from swarm.core.round.instructions import Accuse
from swarm.core.round.mail import sheets
from swarm.core.round.mail.sheets import FAN_OUT, LEAST_BYTES, MAX_PIECES, Restored, Sheet, Sheets, Tree
from swarm.core.round.voting import Proof
from tests.swarm.core.round.round_members import asked_result, certified, resigned, result_of, roster_of
from tests.swarm.core.round.round_world import PHASE_S, World, contribution, facts_of, round_of

MOST_OF_A_MEMBER = 2.0
"""What a leader sends of a round's papers, of what the busiest other member does; fixed before it was measured."""
FACTS = facts_of(5, num_parts=12)
COMMITS = {peer: contribution(peer, num_parts=12) for peer in FACTS.members}
ROSTER = roster_of(FACTS, commits=COMMITS)
BALLOT = Proposal.of_roster(replace(ROSTER, certificate=None), Proof())
MAX_BYTES = 1 << 20


def message(roster: Roster) -> Sheet:
    return Sheet(pack({"roster": roster.packed}), sheets.of_roster(roster))


def asked(proposal: Proposal) -> Sheet:
    return Sheet(pack({"proposal": proposal.packed}), sheets.of_proposal(proposal))


def restored(held: Sheets, rope: Value) -> Restored:
    return held.restore(rope, max_bytes=MAX_BYTES)


def with_contributions(*, but: int = 0) -> Sheets:
    made = Sheets()
    for peer in FACTS.members[but:]:
        made.hold(sheets.of_contribution(COMMITS[peer]), of=peer)
    return made


def test_each_record_is_sent_once_and_comes_out_as_it_is() -> None:
    leader, member = with_contributions(), with_contributions()
    result = certified(FACTS, result_of(FACTS, ROSTER))
    unsigned = replace(result, certificate=None)
    decided = Sheet(pack({"result": result.packed}), sheets.of_result(result))
    for sheet in (asked(BALLOT), message(ROSTER), asked(asked_result(FACTS, unsigned)), decided):
        rope = leader.rope(sheet)
        leader.hold(sheet.named(), of=FACTS.leaders[0])
        found = restored(member, rope)
        assert found.lacking == ()
        assert found.data == sheet.data
        member.hold(found.whole, of=FACTS.leaders[0])
    names = [name for peer in FACTS.members for name in [sheets.of_contribution(COMMITS[peer])[0].name]]
    assert all(name in pack(with_contributions().rope(asked(BALLOT))) for name in names)
    assert len(pack(leader.rope(message(ROSTER)))) < 300


def test_what_is_lacking_is_named_and_comes_when_it_is_asked_for() -> None:
    leader, member, sheet = with_contributions(), with_contributions(but=2), asked(BALLOT)
    found = restored(member, leader.rope(sheet))
    assert set(found.lacking) == {sheets.of_contribution(COMMITS[peer])[0].name for peer in FACTS.members[:2]}
    found = restored(member, leader.rope(sheet, whole={*leader.fresh(sheet), *found.lacking}))
    assert found.lacking == ()
    assert found.data == sheet.data


def test_whoever_knows_nothing_gets_all_of_it() -> None:
    leader, sheet = with_contributions(), message(ROSTER)
    leader.hold(sheet.named(), of=FACTS.leaders[0])
    whole: set[bytes] = set()
    for _ in range(sheets.MAX_DEPTH + 1):
        found = restored(Sheets(), leader.rope(sheet, whole=whole))
        whole.update(found.lacking)
    assert found.data == sheet.data


def test_a_rope_is_read_only_if_it_is_one() -> None:
    deep: list[Value] = [0]
    for _ in range(sheets.MAX_DEPTH + 1):
        deep = [0, deep]
    many: list[Value] = [0, *[b""] * MAX_PIECES]
    none: list[Value] = [None, [], [1], [0, 3], [b"short"], [bytes(32), b""], {"0": b""}, deep, many]
    for rope in none:
        with pytest.raises(RemoteError, match=r"rope|name"):
            restored(Sheets(), rope)


def test_a_rope_of_names_comes_to_no_more_than_a_message_may_have() -> None:
    held, sheet = Sheets(), Sheet(bytes(LEAST_BYTES))
    held.hold([sheet], of=FACTS.members[0])
    names: list[Value] = [[sheet.name]] * 10
    rope: Value = [0, *names]
    assert len(held.restore(rope, max_bytes=10 * LEAST_BYTES).data) == 10 * LEAST_BYTES
    with pytest.raises(RemoteError, match="more bytes"):
        held.restore(rope, max_bytes=10 * LEAST_BYTES - 1)


def test_what_is_held_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sheets, "MOST_HELD_BYTES", 10 * LEAST_BYTES)
    held, made = Sheets(), [Sheet(bytes([number]) * LEAST_BYTES) for number in range(30)]
    held.hold(made, of=FACTS.members[0])
    assert list(held.held) == [sheet.name for sheet in made[-10:]]


@pytest.mark.parametrize("num_members", [1, 2, 9, 10, 65])
def test_everybody_is_handed_on_to_by_one(num_members: int) -> None:
    facts = facts_of(num_members)
    leader = facts.leaders[0]
    tree = Tree.of(facts, leader)
    heard = [peer for member in facts.members for peer in tree.after(member)]
    assert sorted(heard) == [peer for peer in facts.members if peer != leader]
    assert all(peer in tree.after(tree.before(peer)) for peer in heard)
    assert max(len(tree.after(member)) for member in facts.members) <= FAN_OUT
    assert len(tree.after(leader)) == min(FAN_OUT, num_members - 1)


def test_who_shows_another_contribution_than_it_commits_to_is_accused() -> None:
    member, other = round_of(FACTS, FACTS.members[0]), FACTS.members[1]
    one = COMMITS[other]
    two = resigned(replace(one, part_digests=one.part_digests[::-1]))
    assert member.on_contribution(other, one) == []
    assert member.on_contribution(other, two) == [Accuse(one, two)]
    with pytest.raises(RemoteError, match="sent by"):
        member.on_contribution(FACTS.members[2], one)
    with pytest.raises(RemoteError, match="not signed"):
        member.on_contribution(FACTS.members[2], replace(COMMITS[FACTS.members[2]], signature=bytes(64)))


def test_a_leader_hears_of_a_contribution_that_is_not_the_one_committed_to() -> None:
    first: AveragingRound = round_of(FACTS, FACTS.leaders[0])
    other = next(peer for peer in FACTS.members if peer != first.me)
    two = resigned(replace(COMMITS[other], part_digests=COMMITS[other].part_digests[::-1]))
    first.on_contribution(other, COMMITS[other])
    with pytest.raises(EquivocationError):
        first.on_commit(other, 0, two, None, None, None, now=0.0)


def papers_sent(world: World) -> tuple[int, list[int]]:
    """Bytes of the round's papers that the leader sent, and the others, the busiest last."""
    by: Counter[str] = Counter()
    for sent in world.sent_bytes.values():
        by.update(sent)
    leader = world.leader().peer_id
    return by[leader], sorted(by[peer] for peer in world.members if peer != leader)


@pytest.mark.parametrize(
    ("num_members", "num_parts"),
    [(64, 64), *(pytest.param(*sizes, marks=pytest.mark.soak) for sizes in ((130, 4), (256, 1)))],
)
def test_a_leader_sends_about_what_a_member_does(num_members: int, num_parts: int) -> None:
    world = World(num_members, num_members, num_parts=num_parts, slowest_s=0.1)
    world.run()
    leader, others = papers_sent(world)
    assert len(world.roots()) == 1
    assert world.errors == []
    assert all(member.finished is not None for member in world.survivors)
    assert leader <= MOST_OF_A_MEMBER * others[-1]


def test_who_hands_nothing_on_delays_those_behind_it_once_and_no_more() -> None:
    num_members = 2 * FAN_OUT
    world = World(3, num_members, slowest_s=0.1)
    tree = Tree.of(world.facts, world.leader().peer_id)
    silent = tree.order[1]
    world.members[silent].hands_on = False
    world.run()
    behind = set(tree.after(silent))
    assert behind
    assert world.leader().desk.left_waiting == behind
    assert len(world.roots()) == 1
    assert world.errors == []
    late = max(member.finished_at for member in world.survivors)
    assert late < 6 * PHASE_S


def test_who_shows_its_contribution_to_its_leader_alone_is_in_the_round() -> None:
    world = World(3, 5, slowest_s=0.1)
    hidden = next(member for member in world.members.values() if member is not world.leader())
    world.cut = lambda one, other: (
        one == hidden.peer_id and other != world.leader().peer_id and hidden.round.roster is None
    )
    world.run()
    result = world.leader().finished
    assert result is not None
    assert hidden.peer_id in {made.peer_id for made in result.roster.contributions}
    assert len(world.roots()) == 1
