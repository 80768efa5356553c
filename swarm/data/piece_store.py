"""A run's token file where it lies: whole at the host, some pieces of it at a peer."""

import threading
from collections.abc import Hashable, Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from swarm.core.errors import LocalError, RemoteError
from swarm.data.pieces import PIECE_BYTES, PieceList, pieces_of
from swarm.data.token_file import DTYPES, TokenBytes
from swarm.disk.mapped_file import mapped
from swarm.disk.whole_file import whole_file


class Donated(Protocol):
    """A file whose pieces others are given."""

    @property
    def pieces(self) -> PieceList: ...

    @property
    def name(self) -> str:
        """At the mirrors of whoever gives it."""

    def held(self) -> list[int]:
        """Pieces that are here, sorted."""

    def piece(self, index: int) -> bytes | None:
        """None if it is not here. Blocks."""


class WholeFile:
    """A file at its full length: all of it, at the host."""

    def __init__(self, path: Path, pieces: PieceList) -> None:
        self.path = path
        self.pieces = pieces
        self.name = path.name

    @property
    def data(self) -> memoryview:
        """Mapped."""
        return mapped(self.path)

    def held(self) -> list[int]:
        return list(range(len(self.pieces)))

    def piece(self, index: int) -> bytes:
        start, stop = self.pieces.span(index)
        with self.path.open("rb") as file:
            file.seek(start)
            return file.read(stop - start)


class PieceFolder:
    """Checked pieces, each in a file of its own; read as the whole file would be."""

    def __init__(self, folder: Path, pieces: PieceList, token_bytes: TokenBytes) -> None:
        """Takes up what an earlier process left there. Blocks."""
        folder.mkdir(parents=True, exist_ok=True)
        self.pieces = pieces
        self.name = folder.name
        self._folder = folder
        self._dtype = DTYPES[token_bytes]
        self._clock = count()
        self._putting = threading.Lock()
        """Whoever gives up on a piece leaves a thread that writes it, while another may bring it already."""
        self._touched: dict[int, int] = {}
        """When each piece that is here was last read or written, in a count of its own."""
        self._kept_for: dict[Hashable, frozenset[int]] = {}
        """By reader."""
        for path in sorted(folder.iterdir()):
            index = int(path.name) if path.name.isdecimal() else -1
            if 0 <= index < len(pieces) and pieces.is_piece(index, path.read_bytes()):
                self._touched[index] = next(self._clock)
            else:
                path.unlink()

    def __len__(self) -> int:
        return self.pieces.size_bytes // self._dtype.itemsize

    def __contains__(self, index: object) -> bool:
        return index in self._touched

    def held(self) -> list[int]:
        return sorted(self._touched)

    def piece(self, index: int) -> bytes | None:
        return (self._folder / str(index)).read_bytes() if index in self._touched else None

    def put(self, index: int, data: bytes | bytearray | memoryview) -> None:
        """Raises RemoteError for bytes that are not the piece's. Blocks."""
        if not self.pieces.is_piece(index, data):
            raise RemoteError("digest", f"piece {index} is not the one that the run's settings name")
        with self._putting:
            if index not in self._touched:
                with whole_file(self._folder / str(index)) as partial:
                    partial.write_bytes(data)
            self._touched[index] = next(self._clock)

    def forget(self, reader: Hashable, kept: Iterable[int], most: int) -> None:
        """What a reader needs are the `kept`. Of the pieces that no reader needs have at most so many for each, those
        that were needed last."""
        self._kept_for[reader] = frozenset(kept)
        others = sorted(set(self._touched).difference(*self._kept_for.values()), key=self._touched.__getitem__)
        for index in others[: max(0, len(others) - most * len(self._kept_for))]:
            del self._touched[index]
            (self._folder / str(index)).unlink(missing_ok=True)

    def let_go(self, reader: Hashable) -> None:
        """It needs none any more."""
        self._kept_for.pop(reader, None)

    def of_tokens(self, start: int, stop: int) -> range:
        """The pieces that hold tokens [start, stop), of which there is one at least."""
        size = self._dtype.itemsize
        return pieces_of(start * size, stop * size)

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Tokens [start, stop), copied. Raises ValueError outside the file, LocalError if a piece is not here."""
        if not 0 <= start <= stop <= len(self):
            raise ValueError(f"tokens [{start}, {stop}) lie outside the {len(self)} tokens of {self.name}")
        found: npt.NDArray[np.int64] = np.zeros(stop - start, np.int64)
        at = 0
        for part in self._read(start, stop):
            found[at : at + len(part)] = part
            at += len(part)
        return found

    def _read(self, start: int, stop: int) -> Iterator[npt.NDArray[np.unsignedinteger]]:
        size = self._dtype.itemsize
        for index in self.of_tokens(start, stop) if start < stop else ():
            if index not in self._touched:
                raise LocalError(f"piece {index} of {self.name} is not here")
            self._touched[index] = next(self._clock)
            begin, end = self.pieces.span(index)
            begin, end = max(start * size, begin), min(stop * size, end)
            with open(self._folder / str(index), "rb") as file:
                file.seek(begin - index * PIECE_BYTES)
                yield np.frombuffer(file.read(end - begin), self._dtype)
