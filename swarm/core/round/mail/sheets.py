"""A round's large records as they travel: each once, and from then on by name.

A *sheet* is a run of a message's canonical bytes that other messages hold too: a contribution, what a leader signed of
a roster, a certificate, the parts of a result, a whole message to all. Its name is its digest. A message is sent as a
*rope*: its bytes in order, where a sheet that the sender has sent or had before stands by its name alone. Whoever lacks
one says so and gets it. Nothing is decided here: the bytes that come out are those that would have been sent whole, or
none do.
"""

from collections import Counter
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias

from swarm.core.canonical import Value, digest, pack
from swarm.core.errors import RemoteError
from swarm.core.ids import PeerId, Step
from swarm.core.kept import once
from swarm.core.ranking import rank
from swarm.core.round.ballots import Proposal
from swarm.core.round.contribution import Contribution, Result, Roster
from swarm.core.round.facts import RoundFacts
from swarm.core.round.voting import Certificate

FAN_OUT = 8
"""To so many members whoever has a message to all sends it: the leader first."""
LEAST_BYTES = 256
"""What is shorter is sent as it is: a name takes 37 bytes, and an answer that it is lacking a round trip."""
MOST_HELD_BYTES = 32 << 20
"""Of one round: four messages of the longest kind."""
MAX_DEPTH = 2
"""A message, in it what a leader signed of a roster, in that a contribution."""
MAX_PIECES = 1 << 12
"""Of a rope: more than sheets can be in a message, with what stands between them."""
_WHOLE = 0
"""What the list of a sheet's pieces begins with."""

Name: TypeAlias = bytes


def name_of(data: bytes) -> Name:
    """Of a sheet with these bytes."""
    return digest("sheet", data)


@dataclass(frozen=True)
class Sheet:
    """Bytes that have a name, and the sheets in them in the order in which they stand there."""

    data: bytes
    inner: tuple["Sheet", ...] = ()

    @once
    def name(self) -> Name:
        return name_of(self.data)

    def named(self) -> Iterator["Sheet"]:
        """The sheets in it that are long enough for a name."""
        for one in self.inner:
            yield from one.named()
            if len(one.data) >= LEAST_BYTES:
                yield one


@dataclass(frozen=True)
class Restored:
    """What a rope came to."""

    data: bytes = b""
    """Of use only if nothing is lacking."""
    whole: tuple[Sheet, ...] = ()
    """Sheets in it that came with it."""
    lacking: tuple[Name, ...] = ()
    """Sheets that it names and that are not here."""
    num_carried: int = 0
    """Bytes that the rope itself takes on the wire, about."""


@dataclass
class Sheets:
    """The sheets of one round that one member holds. What it holds it takes all others to have, until one says no."""

    held: dict[Name, bytes] = field(default_factory=dict)
    _names_of: dict[PeerId, dict[Name, None]] = field(default_factory=dict)
    _num_bytes_of: Counter[PeerId] = field(default_factory=Counter)
    _num_bytes: int = 0

    def hold(self, sheets: Iterable[Sheet], *, of: PeerId) -> None:
        """They are of a message of that member that was taken, or sent. Where it becomes too much, the oldest are
        forgotten of whose are most bytes, so that nobody pushes out what others sent: they come again when they are
        wanted."""
        for one in sheets:
            if len(one.data) >= LEAST_BYTES and one.name not in self.held:
                self.held[one.name] = one.data
                self._names_of.setdefault(of, {})[one.name] = None
                self._num_bytes_of[of] += len(one.data)
                self._num_bytes += len(one.data)
        while self._num_bytes > MOST_HELD_BYTES:
            most = max(sorted(self._num_bytes_of), key=self._num_bytes_of.__getitem__)
            oldest = next(iter(self._names_of[most]))
            del self._names_of[most][oldest]
            num_bytes = len(self.held.pop(oldest))
            self._num_bytes_of[most] -= num_bytes
            self._num_bytes -= num_bytes

    def fresh(self, sheet: Sheet) -> set[Name]:
        """Names of the sheets in it that are not held."""
        inner = {name for one in sheet.inner for name in self.fresh(one)}
        return inner | {one.name for one in sheet.inner if one.name not in self.held}

    def rope(self, sheet: Sheet, *, whole: Container[Name] = ()) -> Value:
        """The sheet by its name if it is held, or else piece by piece. What is in `whole` is not left at its name."""
        if sheet.name in self.held and sheet.name not in whole:
            return [sheet.name]
        pieces: list[Value] = [_WHOLE]
        at = 0
        for inner in sheet.inner:
            begin = sheet.data.find(inner.data, at) if len(inner.data) >= LEAST_BYTES else -1
            if begin >= 0:
                pieces += [sheet.data[at:begin]] if begin > at else []
                pieces.append(self.rope(inner, whole=whole))
                at = begin + len(inner.data)
        return [*pieces, sheet.data[at:]] if at < len(sheet.data) else pieces

    def restore(self, rope: Value, *, max_bytes: int) -> Restored:
        """What was sent as the rope. Raises RemoteError if it is none, or of more than `max_bytes`."""
        reading = _Reading(self.held, max_bytes)
        data = reading.read(rope, 0)
        return Restored(data, tuple(reading.whole), tuple(dict.fromkeys(reading.lacking)), reading.num_carried)


class _Reading:
    """Of one rope."""

    def __init__(self, held: dict[Name, bytes], max_bytes: int) -> None:
        self.held = held
        self.whole: list[Sheet] = []
        self.lacking: list[Name] = []
        self.num_carried = 0
        self._left_bytes = max_bytes
        self._left_pieces = MAX_PIECES

    def read(self, rope: Value, depth: int) -> bytes:
        if not isinstance(rope, list) or not rope or depth > MAX_DEPTH:
            raise RemoteError("malformed", "a rope that is neither a name nor pieces")
        if isinstance(rope[0], bytes):
            return self._named(rope)
        if rope[0] != _WHOLE:
            raise RemoteError("malformed", "a rope that is neither a name nor pieces")
        self._left_pieces -= len(rope)
        if self._left_pieces < 0:
            raise RemoteError("malformed", f"a rope of more than {MAX_PIECES} pieces")
        num_lacking = len(self.lacking)
        pieces = [self._carried(one) if isinstance(one, bytes) else self.read(one, depth + 1) for one in rope[1:]]
        data = b"".join(pieces)
        if len(self.lacking) == num_lacking and depth:
            self.whole.append(Sheet(data))
        return data

    def _named(self, rope: list[Value]) -> bytes:
        name = rope[0]
        if len(rope) != 1 or not isinstance(name, bytes) or len(name) != 32:
            raise RemoteError("malformed", "a sheet's name is 32 bytes, and alone")
        self.num_carried += len(name)
        data = self.held.get(name)
        if data is None:
            self.lacking.append(name)
            return b""
        return self._take(data)

    def _carried(self, data: bytes) -> bytes:
        self.num_carried += len(data)
        return self._take(data)

    def _take(self, data: bytes) -> bytes:
        self._left_bytes -= len(data)
        if self._left_bytes < 0:
            raise RemoteError("too_large", "a rope of more bytes than a message may have")
        return data


def hand_on_s(phase_s: float, call_s: float) -> float:
    """How long whoever lacks a sheet that others bring waits for it, from the last one that came, before it asks the
    leader for it; twice as long in all. Where others hand on to who hands on to it, as long for each. So whoever hands
    nothing on delays each of those behind it once a round."""
    return min(phase_s, call_s / 2) / 2


def of_contribution(made: Contribution | None) -> tuple[Sheet, ...]:
    return (Sheet(made.packed.data),) if made is not None else ()


def of_certificate(made: Certificate | None) -> tuple[Sheet, ...]:
    return (Sheet(pack(made.to_value())),) if made is not None else ()


def of_roster(roster: Roster | None) -> tuple[Sheet, ...]:
    """The sheets in a roster's bytes, in order."""
    if roster is None:
        return ()
    made = (*roster.contributions, *(one.contribution for one in roster.left_out))
    inner = tuple(sheet for contribution in made for sheet in of_contribution(contribution))
    return (*of_certificate(roster.certificate), Sheet(roster.packed_value.data, inner))


def of_result(result: Result | None) -> tuple[Sheet, ...]:
    if result is None:
        return ()
    parts = Sheet(pack([part.packed_outcome for part in result.parts]))
    return (*of_certificate(result.certificate), parts, *of_roster(result.roster))


def of_proposal(proposal: Proposal) -> tuple[Sheet, ...]:
    return (*of_certificate(proposal.proof.certificate), *of_result(proposal.result), *of_roster(proposal.roster))


@dataclass(frozen=True)
class Tree:
    """Who hands on what a leader sends to all. The host's word draws it, so that nobody chooses who stands before whom;
    and the step turns it: whoever hands nothing on stands before others in the next round."""

    order: tuple[PeerId, ...]
    """The leader, then the others."""

    @classmethod
    def of(cls, facts: RoundFacts, leader: PeerId) -> "Tree":
        """Raises RemoteError if the leader is no member."""
        facts.check_member(leader)
        return _drawn(facts.members, facts.said.value, facts.step, leader)

    def after(self, peer: PeerId) -> tuple[PeerId, ...]:
        """To whom it hands on."""
        at = self._place[peer]
        return self.order[FAN_OUT * at + 1 : FAN_OUT * (at + 1) + 1]

    def before(self, peer: PeerId) -> PeerId:
        """Who hands on to it; it is not the leader."""
        return self.order[(self._place[peer] - 1) // FAN_OUT]

    def depth(self, peer: PeerId) -> int:
        """How many hands it goes through to it, the leader's among them."""
        depth, at = 0, self._place[peer]
        while at > 0:
            depth, at = depth + 1, (at - 1) // FAN_OUT
        return depth

    @once
    def _place(self) -> dict[PeerId, int]:
        return {peer: at for at, peer in enumerate(self.order)}


@lru_cache(maxsize=64)
def _drawn(members: tuple[PeerId, ...], said: bytes, step: Step, leader: PeerId) -> Tree:
    others = (peer for peer in members if peer != leader)
    return Tree((leader, *rank(others, "hand on", said, step, leader)))
