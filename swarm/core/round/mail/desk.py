"""What one member sends and gets of a round's large messages: what goes whole, what by name, what is waited for.

Time enters as `now`. Whoever drives it brings ropes and answers, and looks again when something came or the time is
over: a peer (`peer.round.mail.ropes`), or the round's world of the tests.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from swarm.core.canonical import Value
from swarm.core.errors import RemoteError
from swarm.core.ids import PeerId
from swarm.core.kept import keep_newest
from swarm.core.round.facts import RoundFacts
from swarm.core.round.mail.sheets import MAX_DEPTH, Name, Restored, Sheet, Sheets, Tree, hand_on_s, name_of

MOST_WAITING = 4
"""Messages for which a member waits at a time: as many as a view has phases, and its result. For others it asks."""
MOST_ANSWERS = MAX_DEPTH + 2
"""So often a member may say what it lacks of a message: the message, what it names, and so on down."""
MOST_HANDED_ON = 1 << 8
"""Messages of one leader that a member hands on: a round has five, and one for each change of reducers."""
MOST_HANDED_ON_BYTES = 32 << 20
"""Of one leader's messages, to each of those behind: four of the longest kind."""


@dataclass(eq=False)
class Letter:
    """A message on its way to one member."""

    sheet: Sheet
    whole: Value
    """The rope of it for whom nobody hands it on to."""
    fresh: frozenset[Name]
    """Sheets in it that nobody can have had before."""
    rope: Value
    """As it is brought now."""
    said: set[Name] = field(default_factory=set)
    """What the member has said that it lacks."""
    num_answers: int = 0


@dataclass(eq=False)
class Waiting:
    """A leader's message to all of which something is lacking that others bring."""

    leader: PeerId
    name: Name | None
    """By which the leader has sent it; None if in pieces."""
    rope: Value
    found: Restored
    ends_at: float
    latest: float

    def goes_on(self, ends_at: float) -> None:
        """Something came: more is waited for, and no less long than before."""
        self.ends_at = max(self.ends_at, min(ends_at, self.latest))

    def lies(self, *, now: float) -> None:
        """What came is not what the leader named: that is asked for at once."""
        if self.name is not None:
            self.rope, self.found = [self.name], Restored(lacking=(self.name,))
        self.ends_at = self.latest = now


@dataclass(eq=False)
class Offer:
    """What a member hands on to one that stands behind it: at first with its bytes, for the leader's word is short and
    comes before them; else by name until it has come, and then once more."""

    leader: PeerId
    name: Name
    bytes_of: Value
    latest: float
    rope: Value
    """What is sent now; None: the name alone."""
    num_brought: int = 1

    def answered(self, status: object, *, now: float) -> bool:
        """Whether it is sent again."""
        if self.num_brought > 1 or now > self.latest or status not in ("early", "awaited"):
            return False
        self.rope = self.bytes_of if status == "awaited" else None
        self.num_brought += status == "awaited"
        return True


@dataclass
class Relayed:
    """What was handed on of one leader's messages."""

    names: set[Name] = field(default_factory=set)
    num_bytes: int = 0


@dataclass
class Desk:
    """One member's, in one round."""

    facts: RoundFacts
    me: PeerId
    call_s: float
    """How long a call may take."""
    max_bytes: int
    """Of a message."""
    here: Sheets = field(default_factory=Sheets)
    waiting: list[Waiting] = field(default_factory=list)
    brought: dict[Name, Restored] = field(default_factory=dict)
    """Messages that were handed on and not taken yet: they may be refused for now, and come again by name."""
    left_waiting: set[PeerId] = field(default_factory=set)
    """To whom nobody handed on what this member sent to all: it gets the rest of this member's messages from itself."""
    _relayed: dict[PeerId, Relayed] = field(default_factory=dict)

    @property
    def patience_s(self) -> float:
        return hand_on_s(self.facts.phase_s, self.call_s)

    def _hand_on_s(self, leader: PeerId) -> float:
        """How long what a leader sends to all may be on its way here by others' hands: as long as each of them waits,
        one after the other, so that whoever stands behind one that asks the leader need not ask as well."""
        return self.patience_s * max(1, Tree.of(self.facts, leader).depth(self.me) - 1)

    # -- sending ------------------------------------------------------------------------------------------

    def letters(self, to: Collection[PeerId], sheet: Sheet) -> list[tuple[PeerId, Letter]]:
        """The message for each of them: by name where one of the others hands it on."""
        fresh, whole = frozenset(self.here.fresh(sheet)), self.here.rope(sheet)
        self.here.hold(sheet.named(), of=self.me)
        others = frozenset(to) if len(to) > 1 else frozenset()
        tree = Tree.of(self.facts, self.me)
        by_name = {peer for peer in others - self.left_waiting if tree.before(peer) in others}
        return [(peer, Letter(sheet, whole, fresh, [sheet.name] if peer in by_name else whole)) for peer in to]

    def lacked(self, peer: PeerId, letter: Letter, names: Collection[Name]) -> None:
        """The member says what it lacks; `letter.rope` is what it gets. Raises RemoteError if it has got that, or asks
        more often than it can have a reason to."""
        sheet = letter.sheet
        if not {one.name for one in sheet.named()}.issuperset(names):  # whoever handed on to it has made it up
            names = {sheet.name}
        letter.num_answers += 1
        if letter.num_answers > MOST_ANSWERS or letter.said.issuperset(names):
            raise RemoteError("protocol", "lacks again what it was sent", peer)
        letter.said.update(names)
        if sheet.name in names:
            self.left_waiting.add(peer)
            letter.rope = letter.whole
        else:
            letter.rope = self.here.rope(sheet, whole={*letter.fresh, *letter.said})

    # -- getting ------------------------------------------------------------------------------------------

    def open(self, rope: Value, *, leader: PeerId | None, now: float) -> Restored | Waiting:
        """A message came; `leader`: who sent it to all, if that is who leads. Raises RemoteError if it is no rope."""
        found, name = self.here.restore(rope, max_bytes=self.max_bytes), _name_in(rope)
        if not found.lacking or leader is None:
            return found
        if name is not None and name in self.brought:
            return self.brought[name]
        if len(self.waiting) >= MOST_WAITING:
            return found
        ends_at = now + self._hand_on_s(leader)
        waiting = Waiting(leader, name, rope, found, ends_at, latest=ends_at + self.patience_s)
        self.waiting.append(waiting)
        return waiting

    def look(self, waiting: Waiting, *, now: float) -> Restored | Waiting:
        """What came of it, or itself if it is waited for until `ends_at`; what still lacks then is asked for."""
        if waiting.found.lacking and self.here.held.keys() >= {*waiting.found.lacking}:
            try:
                self._restore(waiting, waiting.rope, now=now)
            except RemoteError:
                if waiting.name is None:  # the leader's own
                    self.give_up(waiting)
                    raise
        if waiting.found.lacking and now < waiting.ends_at:
            return waiting
        self.give_up(waiting)
        if waiting.name is not None and not waiting.found.lacking:
            self.brought[waiting.name] = waiting.found
            keep_newest(self.brought, MOST_WAITING)
        return waiting.found

    def give_up(self, waiting: Waiting) -> None:
        if waiting in self.waiting:
            self.waiting.remove(waiting)

    def _restore(self, waiting: Waiting, rope: Value, *, now: float) -> None:
        try:
            found = self.here.restore(rope, max_bytes=self.max_bytes)
            if not found.lacking and waiting.name is not None and name_of(found.data) != waiting.name:
                raise RemoteError("digest", "what is handed on is not what the leader has named")
        except RemoteError:
            waiting.lies(now=now)
            raise
        waiting.rope, waiting.found = rope, found

    def hold(self, sheets: Iterable[Sheet], *, of: PeerId, now: float) -> None:
        """They are of a message of that peer that was taken. Of no member nothing is kept."""
        if of not in self.facts.members:
            return
        self.here.hold(sheets, of=of)
        for waiting in self.waiting:
            waiting.goes_on(now + self.patience_s)

    def taken(self, found: Restored) -> None:
        """The message was taken."""
        self.brought = {name: held for name, held in self.brought.items() if held is not found}

    # -- handing on ---------------------------------------------------------------------------------------

    def offers(self, found: Restored, rope: Value, leader: PeerId, *, now: float) -> list[tuple[PeerId, Offer]]:
        """To whom what the leader sent to all is handed on: once, and no more of one leader than there is a use for."""
        name, relayed = name_of(found.data), self._relayed.setdefault(leader, Relayed())
        if name in relayed.names or len(relayed.names) >= MOST_HANDED_ON:
            return []
        relayed.names.add(name)
        relayed.num_bytes += found.num_carried
        if relayed.num_bytes > MOST_HANDED_ON_BYTES:
            return []
        latest = now + 2 * self.patience_s
        return [(peer, Offer(leader, name, rope, latest, rope)) for peer in Tree.of(self.facts, leader).after(self.me)]

    def handed_on(self, sender: PeerId, leader: PeerId, name: Name, rope: Value, *, now: float) -> str:
        """A member hands on what the leader sends to all, or None for its rope and asks whether it is awaited. Nothing
        is kept that the leader has not named. Raises RemoteError if it is not what was named, or not for it to bring.
        """
        if leader == self.me or Tree.of(self.facts, leader).before(self.me) != sender:
            raise RemoteError("protocol", "it is not this peer that hands on here", sender)
        relayed = self._relayed.get(leader)
        if relayed is not None and name in relayed.names:
            return "ok"
        awaited = [one for one in self.waiting if one.name == name and one.leader == leader]
        if not awaited:
            return "early"
        if rope is None:
            return "awaited"
        for waiting in awaited:
            self._restore(waiting, rope, now=now)
            waiting.goes_on(now + self.patience_s)
        return "ok"


def _name_in(rope: Value) -> Name | None:
    """The name that is all of the rope."""
    first = rope[0] if isinstance(rope, list) else None
    return first if isinstance(first, bytes) else None
