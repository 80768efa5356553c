"""One member's desk: what liars on the tree can do, each with its bound."""

from dataclasses import replace

import pytest

from swarm.core.canonical import Value
from swarm.core.errors import RemoteError
from swarm.core.ids import PeerId
from swarm.core.round.mail import desk, sheets
from swarm.core.round.mail.desk import MOST_ANSWERS, MOST_WAITING, Desk, Letter, Offer, Waiting
from swarm.core.round.mail.sheets import FAN_OUT, Restored, Sheet, Tree
from tests.swarm.core.round.round_world import PHASE_S, World, facts_of

FACTS = facts_of(FAN_OUT + 2)
LEADER = FACTS.leaders[0]
TREE = Tree.of(FACTS, LEADER)
PARENT, LAST = TREE.before(TREE.order[-1]), TREE.order[-1]
INNER = tuple(Sheet(bytes([number]) * 300) for number in range(3))
SHEET = Sheet(b"[" + b"".join(one.data for one in INNER) + b"]", INNER)
PIECES: list[Value] = [[0, one.data] for one in INNER]
WHOLE: Value = [0, b"[", *PIECES, b"]"]
CALL_S = 10.0


def desk_of(peer: PeerId) -> Desk:
    return Desk(FACTS, peer, CALL_S, 1 << 20)


def letter_to(leader: Desk, peer: PeerId) -> Letter:
    return dict(leader.letters([other for other in FACTS.members if other != LEADER], SHEET))[peer]


def awaiting() -> tuple[Desk, Waiting]:
    """The last of the tree, which has its leader's name for a message."""
    last = desk_of(LAST)
    waiting = last.open(letter_to(desk_of(LEADER), LAST).rope, leader=LEADER, now=0.0)
    assert isinstance(waiting, Waiting)
    return last, waiting


def test_what_the_leader_names_is_handed_on_and_taken() -> None:
    parent, (last, waiting) = desk_of(PARENT), awaiting()
    rope = letter_to(desk_of(LEADER), PARENT).rope
    found = parent.open(rope, leader=LEADER, now=0.0)
    assert isinstance(found, Restored)
    ((to, offer),) = parent.offers(found, rope, LEADER, now=0.0)
    assert to == LAST
    assert parent.offers(found, rope, LEADER, now=0.0) == []
    assert last.handed_on(PARENT, LEADER, offer.name, offer.rope, now=0.1) == "ok"
    taken = last.look(waiting, now=0.1)
    assert isinstance(taken, Restored)
    assert taken.data == SHEET.data
    assert last.waiting == []


def test_what_was_refused_for_now_is_not_asked_for_again() -> None:
    last, waiting = awaiting()
    last.handed_on(PARENT, LEADER, SHEET.name, WHOLE, now=0.1)
    found = last.look(waiting, now=0.1)
    assert isinstance(found, Restored)
    assert last.open([SHEET.name], leader=LEADER, now=5.0) is found
    last.taken(found)
    assert isinstance(last.open([SHEET.name], leader=LEADER, now=5.0), Waiting)


def test_who_is_handed_nothing_asks_the_leader_and_gets_the_rest_from_it() -> None:
    last, waiting = awaiting()
    assert last.look(waiting, now=PHASE_S / 2 - 0.01) is waiting
    found = last.look(waiting, now=PHASE_S / 2)
    assert found == Restored(lacking=(SHEET.name,), num_carried=32)
    leader = desk_of(LEADER)
    letter = letter_to(leader, LAST)
    leader.lacked(LAST, letter, [SHEET.name])
    assert letter.rope == letter.whole
    assert leader.left_waiting == {LAST}
    other = Sheet(b"another message")
    assert dict(leader.letters([PARENT, LAST], other))[LAST].rope == [0, other.data]


@pytest.mark.parametrize("rope", [[0, b"made up"], [0, 7], "no rope", [0, *[b""] * sheets.MAX_PIECES], [b"short"]])
def test_bytes_that_the_leader_did_not_name_are_refused_and_asked_for_at_once(rope: Value) -> None:
    last, waiting = awaiting()
    with pytest.raises(RemoteError):
        last.handed_on(PARENT, LEADER, SHEET.name, rope, now=0.1)
    last.hold([Sheet(bytes(300))], of=PARENT, now=0.1)
    found = last.look(waiting, now=0.1)
    assert isinstance(found, Restored)
    assert found.lacking == (SHEET.name,)


def test_a_lie_that_shows_only_when_more_has_come_is_not_the_leader_s() -> None:
    last, waiting = awaiting()
    assert last.handed_on(PARENT, LEADER, SHEET.name, [0, b"(", [INNER[0].name]], now=0.1) == "ok"
    last.hold([INNER[0]], of=PARENT, now=0.2)
    found = last.look(waiting, now=0.2)
    assert isinstance(found, Restored)
    assert found.lacking == (SHEET.name,)


def test_names_of_things_that_nobody_has_are_answered_with_the_message_itself() -> None:
    last, waiting = awaiting()
    last.handed_on(PARENT, LEADER, SHEET.name, [0, [bytes(32)]], now=0.1)
    assert last.look(waiting, now=0.1 + PHASE_S / 2 - 0.01) is waiting
    found = last.look(waiting, now=PHASE_S)
    assert isinstance(found, Restored)
    leader = desk_of(LEADER)
    letter = letter_to(leader, LAST)
    leader.lacked(LAST, letter, found.lacking)
    assert letter.rope == letter.whole


def test_nobody_has_bytes_sent_without_end() -> None:
    leader = desk_of(LEADER)
    letter = letter_to(leader, LAST)
    for one in [SHEET.name, *(inner.name for inner in INNER)][:MOST_ANSWERS]:
        leader.lacked(LAST, letter, [one])
    with pytest.raises(RemoteError, match="lacks again"):
        leader.lacked(LAST, letter, [INNER[0].name])
    letter = letter_to(leader, PARENT)
    leader.lacked(PARENT, letter, [bytes(32)])
    with pytest.raises(RemoteError, match="lacks again"):
        leader.lacked(PARENT, letter, [bytes([1]) * 32])
    with pytest.raises(RemoteError, match="lacks again"):
        leader.lacked(PARENT, letter, [])


def test_a_leader_s_names_are_waited_for_a_few_at_a_time() -> None:
    last = desk_of(LAST)
    for number in range(MOST_WAITING):
        assert isinstance(last.open([bytes([number]) * 32], leader=LEADER, now=0.0), Waiting)
    others: list[Value] = [[bytes([99]) * 32], [0, [bytes([98]) * 32]]]
    for rope in others:
        assert isinstance(last.open(rope, leader=LEADER, now=0.0), Restored)
    assert len(last.waiting) == MOST_WAITING


def test_whoever_does_not_lead_has_nobody_wait() -> None:
    last = desk_of(LAST)
    assert isinstance(last.open([SHEET.name], leader=None, now=0.0), Restored)
    assert last.waiting == []


def test_what_the_leader_has_not_named_is_not_kept_and_comes_once_more_at_most() -> None:
    last = desk_of(LAST)
    offer = Offer(LEADER, SHEET.name, WHOLE, latest=1.0, rope=WHOLE)
    assert last.handed_on(PARENT, LEADER, SHEET.name, offer.rope, now=0.0) == "early"
    assert last.brought == {}
    assert last.here.held == {}
    assert offer.answered("early", now=0.0)
    assert offer.rope is None
    last.open([SHEET.name], leader=LEADER, now=0.2)
    assert last.handed_on(PARENT, LEADER, SHEET.name, offer.rope, now=0.2) == "awaited"
    assert offer.answered("awaited", now=0.2)
    assert offer.rope == WHOLE
    assert not offer.answered("early", now=0.3)
    late = replace(offer, num_brought=1)
    assert late.answered("early", now=1.0)
    assert not late.answered("early", now=1.1)


def test_only_who_stands_before_a_member_brings_it_anything() -> None:
    last, _ = awaiting()
    other = next(peer for peer in FACTS.members if peer not in (PARENT, LAST, LEADER))
    for sender, leader in ((other, LEADER), (LEADER, LEADER), (PARENT, LAST), (PARENT, PeerId("nobody"))):
        with pytest.raises(RemoteError):
            last.handed_on(sender, leader, SHEET.name, WHOLE, now=0.1)


def test_a_leader_of_nonsense_has_no_more_handed_on_than_a_round_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk, "MOST_HANDED_ON", 3)
    monkeypatch.setattr(desk, "MOST_HANDED_ON_BYTES", 2000)
    parent, many = desk_of(PARENT), desk_of(PARENT)

    def num_offered(at: Desk, data: bytes) -> int:
        rope: Value = [0, data]
        found = at.open(rope, leader=LEADER, now=0.0)
        assert isinstance(found, Restored)
        return len(at.offers(found, rope, LEADER, now=0.0))

    assert [num_offered(parent, bytes([number]) * 900) for number in range(3)] == [1, 1, 0]
    assert [num_offered(many, bytes([number])) for number in range(5)] == [1, 1, 1, 0, 0]


def test_a_flood_of_sheets_pushes_out_those_of_its_sender_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sheets, "MOST_HELD_BYTES", 3000)
    last = desk_of(LAST)
    last.hold(INNER, of=LEADER, now=0.0)
    last.hold([Sheet(bytes([100 + number]) * 400) for number in range(50)], of=PARENT, now=0.0)
    assert {one.name for one in INNER} <= last.here.held.keys()
    assert sum(map(len, last.here.held.values())) <= 3000
    last.hold([Sheet(b"?" * 300)], of=PeerId("a stranger"), now=0.0)
    assert Sheet(b"?" * 300).name not in last.here.held


def altered(rope: Value) -> Value:
    return [0, b"nothing of the kind"]


def nameless(rope: Value) -> Value:
    return [0, [bytes(32)]]


@pytest.mark.parametrize("lie", [altered, nameless])
def test_a_round_ends_alike_whatever_a_member_hands_on(lie: object) -> None:
    world = World(3, 2 * FAN_OUT, slowest_s=0.1)
    tree = Tree.of(world.facts, world.leader().peer_id)
    liar = tree.order[1]
    world.members[liar].brings = lie  # type: ignore[assignment]
    world.run()
    result = world.leader().finished
    assert result is not None
    assert len(world.roots()) == 1
    assert len(result.roster.contributions) == 2 * FAN_OUT
    assert not result.roster.left_out
    assert all(member.finished for member in world.survivors)
    assert max(member.finished_at for member in world.survivors) < 8 * PHASE_S
    assert world.leader().desk.left_waiting <= {*tree.after(liar)}


def test_a_round_ends_alike_when_all_who_hand_on_are_silent() -> None:
    world = World(4, 3 * FAN_OUT, slowest_s=0.1)
    tree = Tree.of(world.facts, world.leader().peer_id)
    for peer in tree.order[1 : FAN_OUT + 1]:
        world.members[peer].hands_on = False
    world.run()
    result = world.leader().finished
    assert result is not None
    assert len(world.roots()) == 1
    assert not result.roster.left_out
    assert world.leader().desk.left_waiting == {*tree.order[FAN_OUT + 1 :]}
    assert world.errors == []


def test_members_of_two_branches_that_are_named_two_messages_take_their_own_alone() -> None:
    """What a leader signs twice is the voters' matter; a branch hands on nothing that was not named to who gets it."""
    last, waiting = awaiting()
    other = Sheet(b"what the leader has shown to another branch")
    assert last.handed_on(PARENT, LEADER, other.name, [0, other.data], now=0.1) == "early"
    assert last.look(waiting, now=0.1) is waiting
    with pytest.raises(RemoteError, match="not what the leader has named"):
        last.handed_on(PARENT, LEADER, SHEET.name, [0, other.data], now=0.1)
