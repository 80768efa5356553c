"""What a peer has of a run's frozen base: checked pieces at their places in one file, which is mapped.

The file has the whole base's length and holds what some stages compute with; the rest of it takes no room.
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

    def __init__(self, path: Path, pieces: PieceList) -> None:
        """Blocks."""
        self.pieces, self.name = pieces, path.name
        self._file, self._held, self._putting = WholeFile(path, pieces), set[int](), threading.Lock()
        self._unseen = set(range(len(pieces))) if path.exists() else set[int]()
        """Pieces that an earlier process may have left."""
        with path.open("ab") as file:
            file.truncate(pieces.size_bytes)
        self.data = self._file.data
        """All of the base, zero where it is not here: mapped once, whoever computes with it."""

    def take_up(self, tensors: Iterable[BaseTensor]) -> list[int]:
        """The pieces that the tensors lie in; of these, what an earlier process left is here from now on. Blocks."""
        spans = ((tensor.first_byte, tensor.first_byte + tensor.size_bytes) for tensor in tensors)
        wanted = sorted({index for span in spans for index in pieces_of(*span)})
        with self._putting:
            unseen = self._unseen.intersection(wanted)
            self._held |= {index for index in unseen if self.pieces.is_piece(index, self._file.piece(index))}
            self._unseen -= unseen
        return wanted

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
