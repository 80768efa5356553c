"""A part that came in fragments, put together; it is then checked as if it had come whole.

Fragments have numbers, not places: none can lie outside its part or over another. What a sender begins and does not
end is bounded, and goes with the step.
"""

from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from swarm.core.errors import RemoteError
from swarm.core.forms import Integer
from swarm.core.ids import PeerId
from swarm.core.kept import keep_newest
from swarm.core.record import Record
from swarm.memory.kept_buffers import BUFFERS

MOST_FRAGMENTS = 128
"""Of one part."""
MOST_BEGUN = 32
"""Parts of one sender of which some fragments are here: twice as many as it has messages under way."""


@dataclass(frozen=True)
class Fragment(Record):
    """Which of how many fragments of one part, in order."""

    number: int
    count: Annotated[int, Integer(low=2, high=MOST_FRAGMENTS)]

    def _check_fields(self) -> None:
        Integer(high=self.count - 1).read(self.number, "fragment.number")


_Begun: TypeAlias = OrderedDict[tuple[bytes, int], dict[int, memoryview]]
"""Bodies by number, by the part's name and how many there are of it."""


class Fragments:
    """Of the parts that come in one step's round."""

    def __init__(self) -> None:
        self._begun: defaultdict[PeerId, _Begun] = defaultdict(OrderedDict)

    def put(
        self, sender: PeerId, part: bytes, fragment: Fragment, body: memoryview, *, max_bytes: int
    ) -> memoryview | None:
        """The whole part, which the sender names so, if all its fragments are here. They stay until `drop`: should the
        whole not be taken yet, its last fragment alone comes again. Raises RemoteError if they exceed `max_bytes`.

        Of a sender that begins too many parts the oldest is forgotten.
        """
        begun = self._begun[sender]
        held = begun.setdefault((part, fragment.count), {})
        held[fragment.number] = body
        num_bytes = sum(map(len, held.values()))
        if num_bytes > max_bytes:
            self.drop(sender, part, fragment)
            raise RemoteError("too_large", f"fragments of a part of more than {max_bytes} bytes", sender)
        keep_newest(begun, MOST_BEGUN)
        if len(held) < fragment.count:
            return None
        whole, at = BUFFERS.take(num_bytes), 0
        for number in range(fragment.count):
            whole[at : at + len(held[number])] = held[number]
            at += len(held[number])
        return whole

    def holds(self, sender: PeerId, part: bytes, fragment: Fragment) -> bool:
        """Whether the fragment is here, and others are still to come: where none is, the last one is wanted again."""
        held = self._begun[sender].get((part, fragment.count), {})
        return fragment.number in held and len(held) < fragment.count

    def drop(self, sender: PeerId, part: bytes, fragment: Fragment) -> None:
        """Forget the fragments of a part that was cut like this."""
        self._begun[sender].pop((part, fragment.count), None)
