"""This is where the members of stage 0 share out the data: a pure fold over the stage's certified rosters.

Chunks are leased in order. A member takes the ids of its leases in order; what a roster certifies is
consumed; a leaver's unfinished chunks go to others. Every member computes the same table.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from swarm.core.canonical import Value
from swarm.core.data_order import DataOrder
from swarm.core.fields import Fields, integer_item
from swarm.core.ids import MicrobatchId, PeerId

MAX_OPEN_CHUNKS = 4096


@dataclass(frozen=True)
class OpenChunk:
    """A leased chunk. `holder` is "" while nobody holds it; `left` are its unconsumed ids in order."""

    position: int
    holder: PeerId
    left: tuple[MicrobatchId, ...]


@dataclass(frozen=True)
class LeaseTable:
    """Which ids each member of stage 0 may use for the coming step."""

    next_chunk: int = 0
    open_chunks: tuple[OpenChunk, ...] = ()
    consumed: int = 0
    """Microbatches certified so far: the run's data position."""

    def ids_of(self, peer_id: PeerId) -> list[MicrobatchId]:
        """The member's unconsumed ids, in the order to take them."""
        return [number for chunk in self.open_chunks if chunk.holder == peer_id for number in chunk.left]

    def advance(
        self, *, consumed: Iterable[MicrobatchId], members: Iterable[PeerId], order: DataOrder, ids_each: int
    ) -> "LeaseTable":
        """The table after a roster: each member then holds at least `ids_each` ids."""
        used = set(consumed)
        present = sorted(set(members))
        chunks: dict[int, OpenChunk] = {}
        for chunk in self.open_chunks:
            left = tuple(number for number in chunk.left if number not in used)
            if left:
                holder = chunk.holder if chunk.holder in present else PeerId("")
                chunks[chunk.position] = OpenChunk(chunk.position, holder, left)
        next_chunk = self.next_chunk
        for peer in present:
            held = sum(len(chunk.left) for chunk in chunks.values() if chunk.holder == peer)
            while held < ids_each:
                free = min((c.position for c in chunks.values() if not c.holder), default=None)
                if free is None:
                    left = tuple(MicrobatchId(number) for number in order.ids_of_chunk(next_chunk))
                    taken = OpenChunk(next_chunk, peer, left)
                    next_chunk += 1
                else:
                    taken = OpenChunk(free, peer, chunks[free].left)
                chunks[taken.position] = taken
                held += len(taken.left)
        ordered = tuple(chunks[position] for position in sorted(chunks))
        known = {number for chunk in self.open_chunks for number in chunk.left}
        return LeaseTable(next_chunk, ordered, self.consumed + len(used & known))

    def to_value(self) -> Value:
        return {
            "next_chunk": self.next_chunk,
            "consumed": self.consumed,
            "open_chunks": [[c.position, c.holder, list(c.left)] for c in self.open_chunks],
        }

    @classmethod
    def from_value(cls, value: Value) -> "LeaseTable":
        """Raises RemoteError("malformed")."""
        fields = Fields("lease table", value)
        table = cls(
            fields.integer("next_chunk"),
            fields.items("open_chunks", _open_chunk, max_items=MAX_OPEN_CHUNKS),
            fields.integer("consumed"),
        )
        fields.done()
        return table


def _open_chunk(value: Value) -> OpenChunk:
    entry = Fields(
        "open chunk",
        dict(zip(("position", "holder", "left"), value, strict=False))
        if isinstance(value, list) and len(value) == 3
        else value,
    )
    return OpenChunk(
        entry.integer("position"),
        entry.peer("holder"),
        tuple(MicrobatchId(number) for number in entry.items("left", integer_item, max_items=1 << 20)),
    )
