"""Which values of a stage lie in which chunk of its state, so that a few chunks speak alone.

Whatever a step does to a value depends on that value of the weights, the moments and the gradient, and where moments
are in int8 on the block of values that share a scale. So what a chunk becomes follows from a *window*: a run of values,
whole blocks of them. What becomes of weights that Muon turns depends on all of their matrix. Moments that windows of
local steps carry are bytes of results: what becomes of these depends on the results alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from swarm.checkpoint.state import CHUNK_BYTES, Array, Bytes, StageState, arrays_of, header_bytes, num_chunks_of
from swarm.core.errors import RemoteError
from swarm.optim.carried_moments import CARRIED
from swarm.optim.exact import WINDOW_GRAIN
from swarm.optim.matrices import Matrices, are_of_muon

HEADER = "header"


@dataclass(frozen=True)
class Piece:
    """What of one array lies in a chunk: bytes [start, stop) of the array's own."""

    name: str
    """"header", "weights" or a moment's."""
    start: int
    stop: int


@dataclass(frozen=True)
class _Place:
    start: int
    """Of the array's bytes in the state's."""
    num_bytes: int
    dtype: np.dtype[np.generic]
    values_each: int
    """How many of the stage's values one element of the array is for; 0: it is not of values."""
    is_packed: bool = False
    """Of the values that Muon does not turn, one element for each."""


class StateMap:
    """Where the arrays of a state lie in its bytes."""

    def __init__(self, state: StageState) -> None:
        """What the arrays hold does not matter."""
        self.header = header_bytes(state)
        self.num_values = state.layout.num_values
        of_muon = are_of_muon(state.moments)
        self._matrices = Matrices.of(state.layout) if of_muon else Matrices((), self.num_values)
        self._places: dict[str, _Place] = {}
        at = len(self.header)
        for name, array in arrays_of(state):
            is_packed = of_muon and name == "second"
            each = 0 if name == CARRIED else 1 if is_packed or array.size == self.num_values else WINDOW_GRAIN
            self._places[name] = _Place(at, array.nbytes, array.dtype, each, is_packed)
            at += array.nbytes
        self.total_bytes = at

    def pieces(self, chunk: int) -> list[Piece]:
        """What lies in the chunk, in order: each piece follows from one window."""
        start, stop = chunk * CHUNK_BYTES, min((chunk + 1) * CHUNK_BYTES, self.total_bytes)
        found = [Piece(HEADER, start, min(stop, len(self.header)))] if start < len(self.header) else []
        for name, place in self._places.items():
            first, last = max(start, place.start), min(stop, place.start + place.num_bytes)
            if first < last:
                found += self._by_window(Piece(name, first - place.start, last - place.start), place)
        return found

    def _by_window(self, piece: Piece, place: _Place) -> list[Piece]:
        """Cut where values that are packed do not follow one another."""
        if not place.is_packed:
            return [piece]
        item, at, found = place.dtype.itemsize, piece.start, []
        for where in self._matrices.unpacked(slice(piece.start // item, -(-piece.stop // item))):
            stop = min(piece.stop, self._matrices.packed(where).stop * item)
            found.append(Piece(piece.name, at, stop))
            at = stop
        return found

    def window_of(self, piece: Piece) -> slice:
        """The values that what is in the piece follows from."""
        place = self._places[piece.name]
        item, each = place.dtype.itemsize, place.values_each
        first, last = piece.start // item * each, -(-piece.stop // item) * each
        if place.is_packed:
            (values,) = self._matrices.unpacked(slice(first, last))
            first, last = values.start, values.stop
        elif piece.name == "weights":
            values = self._matrices.widened(slice(first, last))
            first, last = values.start, values.stop
        return slice(
            first // WINDOW_GRAIN * WINDOW_GRAIN, min(-(-last // WINDOW_GRAIN) * WINDOW_GRAIN, self.num_values)
        )

    def chunks_of(self, window: slice) -> set[int]:
        """The chunks that hold anything of the window."""
        found: set[int] = set()
        for name in self._of_values():
            start, stop = self._bytes_of(name, window)
            found |= set(range(start // CHUNK_BYTES, num_chunks_of(stop)))
        return found

    def arrays(self, chunks: Mapping[int, Bytes], window: slice) -> dict[str, Array]:
        """The window's part of each array, copied from `chunks`, which are those of `chunks_of`. Raises RemoteError."""
        return {name: self._array(name, chunks, *self._bytes_of(name, window)) for name in self._of_values()}

    def piece(self, piece: Piece, chunks: Mapping[int, Bytes]) -> Array:
        """What of one array lies in the piece, copied from its chunk. Raises RemoteError."""
        start = self._places[piece.name].start
        return self._array(piece.name, chunks, start + piece.start, start + piece.stop)

    def cut(self, piece: Piece, arrays: Mapping[str, Array], window: slice) -> bytes:
        """The piece's bytes, where `arrays` are the window's part of each."""
        start, _ = self._bytes_of(piece.name, window)
        offset = self._places[piece.name].start - start
        return arrays[piece.name].tobytes()[piece.start + offset : piece.stop + offset]

    def _of_values(self) -> list[str]:
        return [name for name, place in self._places.items() if place.values_each]

    def _bytes_of(self, name: str, window: slice) -> tuple[int, int]:
        """From where to where the window's part of an array lies in the state's bytes."""
        place = self._places[name]
        item, each = place.dtype.itemsize, place.values_each
        if place.is_packed:
            packed = self._matrices.packed(window)
            return place.start + item * packed.start, place.start + item * packed.stop
        return place.start + item * (window.start // each), place.start + item * -(-window.stop // each)

    def _array(self, name: str, chunks: Mapping[int, Bytes], start: int, stop: int) -> Array:
        found = bytearray()
        while start < stop:
            chunk = start // CHUNK_BYTES
            until = min(stop, (chunk + 1) * CHUNK_BYTES)
            held = memoryview(chunks.get(chunk, b""))[start - chunk * CHUNK_BYTES : until - chunk * CHUNK_BYTES]
            if len(held) != until - start:
                raise RemoteError("malformed", f"chunk {chunk} of the state is not there, or cut short")
            found += held
            start = until
        made: Array = np.empty(len(found) // self._places[name].dtype.itemsize, dtype=self._places[name].dtype)
        made.view(np.uint8)[:] = found
        return made
