"""What a peer has of a run's frozen base: checked pieces at their places in one file, which is mapped.

The file has the whole base's length and holds what one stage computes with; the rest of it takes no room.
"""

import threading
from collections.abc import Iterable
from pathlib import Path

from swarm.core.errors import RemoteError
from swarm.data.piece_store import WholeFile
from swarm.data.pieces import PieceList, pieces_of
from swarm.model.adapters.base import BaseTensor


class BasePieces:
    """Given to others piece by piece, as token files are."""

    def __init__(self, path: Path, pieces: PieceList, tensors: Iterable[BaseTensor]) -> None:
        """Takes up what an earlier process left there of what the tensors lie in. Blocks."""
        self.pieces, self.name = pieces, path.name
        self.wanted = sorted(
            {
                index
                for tensor in tensors
                for index in pieces_of(tensor.first_byte, tensor.first_byte + tensor.size_bytes)
            }
        )
        self._file, self._held, self._putting = WholeFile(path, pieces), set[int](), threading.Lock()
        was_there = path.exists()
        with path.open("ab") as file:
            file.truncate(pieces.size_bytes)
        if was_there:
            self._held = {index for index in self.wanted if pieces.is_piece(index, self._file.piece(index))}

    @property
    def data(self) -> memoryview:
        """All of the base, zero where it is not here."""
        return self._file.data

    def missing(self) -> list[int]:
        """Pieces that are wanted and not here."""
        return [index for index in self.wanted if index not in self._held]

    def __contains__(self, index: object) -> bool:
        return index in self._held

    def held(self) -> list[int]:
        return sorted(self._held)

    def piece(self, index: int) -> bytes | None:
        return self._file.piece(index) if index in self._held else None

    def put(self, index: int, data: bytes | bytearray | memoryview) -> None:
        """Raises RemoteError for bytes that are not the piece's. Blocks."""
        if not self.pieces.is_piece(index, data):
            raise RemoteError("digest", f"piece {index} is not the one that the run's settings name")
        with self._putting, self._file.path.open("r+b") as file:
            if index not in self._held:
                file.seek(self.pieces.span(index)[0])
                file.write(data)
                self._held.add(index)
