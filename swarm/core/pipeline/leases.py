"""How the members of stage 0 share out the data: a pure fold over the stage's certified rosters.

Chunks are leased in order. A member takes the ids of its leases in order; what a roster certifies is
consumed; a leaver's unfinished chunks go to others. Every member computes the same table.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from swarm.core.canonical import Value
from swarm.core.errors import RemoteError
from swarm.core.fields import Fields, integer_item
from swarm.core.forms import Wire
from swarm.core.ids import MicrobatchId, PeerId
from swarm.core.pipeline.data_order import DataOrder

MAX_OPEN_CHUNKS = 1 << 17
MAX_RANGES = 1 << 12
"""Runs of unconsumed ids in one chunk; members take ids in order, so that a few are usual."""
MAX_IDS = 1 << 24
"""Unconsumed ids in a table: what a stranger's table may make us list."""
NOBODY = PeerId("")


@dataclass(frozen=True)
class OpenChunk:
    """A leased chunk. `holder` is "" while nobody holds it."""

    position: int
    holder: PeerId
    left: tuple[tuple[int, int], ...]
    """Unconsumed ids as runs [start, stop), in order, with gaps between."""

    @property
    def num_left(self) -> int:
        return sum(stop - start for start, stop in self.left)

    def without(self, used: Sequence[int]) -> "OpenChunk":
        """The chunk when these ids, in order and each once, are consumed."""
        left: list[tuple[int, int]] = []
        for start, stop in self.left:
            at = start
            for number in used[bisect_left(used, start) : bisect_left(used, stop)]:
                if at < number:
                    left.append((at, number))
                at = number + 1
            if at < stop:
                left.append((at, stop))
        return OpenChunk(self.position, self.holder, tuple(left))


@dataclass(frozen=True)
class LeaseTable(Wire):
    """Which ids each member of stage 0 may use for the coming step."""

    next_chunk: int = 0
    open_chunks: tuple[OpenChunk, ...] = ()
    """By position."""
    consumed: int = 0
    """Microbatches certified so far: the run's data position."""

    def ids_of(self, peer_id: PeerId) -> list[MicrobatchId]:
        """The member's unconsumed ids, in the order to take them."""
        return [
            MicrobatchId(number)
            for chunk in self.open_chunks
            if chunk.holder == peer_id
            for start, stop in chunk.left
            for number in range(start, stop)
        ]

    def ids_by_holder(self) -> dict[PeerId, frozenset[MicrobatchId]]:
        """The unconsumed ids of each."""
        held: dict[PeerId, list[MicrobatchId]] = {}
        for chunk in self.open_chunks:
            ids = (MicrobatchId(number) for start, stop in chunk.left for number in range(start, stop))
            held.setdefault(chunk.holder, []).extend(ids)
        return {holder: frozenset(ids) for holder, ids in held.items()}

    def advance(
        self, *, consumed: Iterable[MicrobatchId], members: Iterable[PeerId], order: DataOrder, ids_each: int
    ) -> "LeaseTable":
        """The table after a roster: each member then holds at least `ids_each` ids."""
        used = sorted(set(consumed))
        present = sorted(set(members))
        chunks: dict[int, OpenChunk] = {}
        free: list[int] = []
        held = dict.fromkeys(present, 0)
        before = sum(chunk.num_left for chunk in self.open_chunks)
        after = 0
        for chunk in self.open_chunks:
            chunk = chunk.without(used)
            after += chunk.num_left
            if not chunk.left:
                continue
            chunks[chunk.position] = chunk
            if chunk.holder in held:
                held[chunk.holder] += chunk.num_left
            else:
                free.append(chunk.position)
        next_chunk = self.next_chunk
        free.reverse()  # the oldest chunk is taken first
        for peer in present:
            while held[peer] < ids_each:
                if free:
                    position = free.pop()
                    left = chunks[position].left
                else:
                    position, ids = next_chunk, order.ids_of_chunk(next_chunk)
                    left = ((ids.start, ids.stop),)
                    next_chunk += 1
                chunks[position] = OpenChunk(position, peer, left)
                held[peer] += chunks[position].num_left
        for position in free:
            chunks[position] = OpenChunk(position, NOBODY, chunks[position].left)
        ordered = tuple(chunks[position] for position in sorted(chunks))
        return LeaseTable(next_chunk, ordered, self.consumed + before - after)

    def skipping(self, ranges: Iterable[tuple[int, int]], order: DataOrder) -> "LeaseTable":
        """The table when nobody is ever to take the ids of these ranges, each [start, stop); they are not consumed.

        Raises ValueError for a range that lies too far ahead.
        """
        unwanted = sorted(ranges)
        next_chunk = max([self.next_chunk, *(order.chunk_of(MicrobatchId(stop - 1)) + 1 for _, stop in unwanted)])
        num_ids = (next_chunk - self.next_chunk) * order.microbatches_per_chunk
        if num_ids + sum(chunk.num_left for chunk in self.open_chunks) > MAX_IDS:
            raise ValueError(f"microbatches up to {unwanted[-1][1]} are more than {MAX_IDS} ahead of the data used")
        chunks = list(self.open_chunks)
        for position in range(self.next_chunk, next_chunk):
            held = order.ids_of_chunk(position)
            chunks.append(OpenChunk(position, NOBODY, ((held.start, held.stop),)))
        ids = sorted({number for start, stop in unwanted for number in range(start, stop)})
        chunks = [chunk.without(ids) for chunk in chunks]
        if len(chunks) > MAX_OPEN_CHUNKS or any(len(chunk.left) > MAX_RANGES for chunk in chunks):
            raise ValueError(f"{len(unwanted)} ranges leave more than a table of leases can hold; skip fewer")
        return LeaseTable(next_chunk, tuple(chunk for chunk in chunks if chunk.left), self.consumed)

    def to_value(self) -> Value:
        """Chunks under their holders: `[position, start, stop, ...]` each."""
        held: dict[PeerId, list[Value]] = {}
        for chunk in self.open_chunks:
            bounds = [bound for run in chunk.left for bound in run]
            held.setdefault(chunk.holder, []).append([chunk.position, *bounds])
        return {
            "next_chunk": self.next_chunk,
            "consumed": self.consumed,
            "held": [[holder, held[holder]] for holder in sorted(held)],
        }

    @classmethod
    def from_value(cls, value: Value) -> "LeaseTable":
        """Raises RemoteError("malformed") for anything that `to_value` of a table would not have given."""
        fields = Fields("lease table", value)
        next_chunk, consumed = fields.integer("next_chunk"), fields.integer("consumed")
        holders = fields.items("held", _held_by_one, max_items=MAX_OPEN_CHUNKS)
        fields.done()
        names = [holder for holder, _ in holders]
        if names != sorted(set(names)):
            raise RemoteError("malformed", "lease table's holders are not in order, each once")
        chunks = sorted((chunk for _, held in holders for chunk in held), key=lambda chunk: chunk.position)
        if len(chunks) > MAX_OPEN_CHUNKS or any(chunk.position >= next_chunk for chunk in chunks):
            raise RemoteError("malformed", f"lease table of {len(chunks)} chunks, or with one not yet begun")
        bounds = [bound for chunk in chunks for run in chunk.left for bound in run]
        if any(one.position == other.position for one, other in pairwise(chunks)) or bounds != sorted(bounds):
            raise RemoteError("malformed", "lease table's chunks overlap")
        if sum(chunk.num_left for chunk in chunks) > MAX_IDS:
            raise RemoteError("malformed", f"lease table holds more than {MAX_IDS} ids")
        return cls(next_chunk, tuple(chunks), consumed)


def _held_by_one(value: Value) -> tuple[PeerId, tuple[OpenChunk, ...]]:
    if not isinstance(value, list) or len(value) != 2:
        raise RemoteError("malformed", "leases of one holder are not a pair")
    fields = Fields("leases", {"holder": value[0], "chunks": value[1]})
    holder = fields.peer("holder")

    def read(entry: Value) -> OpenChunk:
        position, *bounds = Fields("chunk", {"bounds": entry}).items(
            "bounds", integer_item, max_items=1 + 2 * MAX_RANGES
        ) or (0,)
        gaps = list(pairwise(bounds))
        if not bounds or len(bounds) % 2 or any(one >= other for one, other in gaps):
            raise RemoteError("malformed", f"chunk {position} of {holder} is not made of runs of ids with gaps between")
        return OpenChunk(position, holder, tuple(zip(bounds[::2], bounds[1::2], strict=True)))

    chunks = fields.items("chunks", read, max_items=MAX_OPEN_CHUNKS)
    positions = [chunk.position for chunk in chunks]
    if not chunks or positions != sorted(positions):
        raise RemoteError("malformed", f"chunks of {holder} are not in order")
    return holder, chunks
