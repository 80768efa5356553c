"""A run's token file in pieces that anybody may hand on: the list of their hashes is what the run's settings name."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from swarm.core.canonical import digest
from swarm.core.errors import RemoteError
from swarm.core.forms import Integer, Octets
from swarm.core.record import Record

PIECE_BYTES = 1 << 20
MAX_PIECES = 1 << 17
"""128 GiB: the list of them fits into a message."""
HASH_BYTES = 32


@dataclass(frozen=True)
class PieceList(Record, kind="list of pieces"):
    """SHA-256 of each MiB of a file."""

    size_bytes: Annotated[int, Integer(low=1, high=MAX_PIECES * PIECE_BYTES)]
    hashes: Annotated[bytes, Octets(max_length=MAX_PIECES * HASH_BYTES)]
    """End to end."""

    @property
    def digest(self) -> bytes:
        """What names the file: its length and pieces, and so all of its bytes."""
        return digest("pieces", [self.size_bytes, hashlib.sha256(self.hashes).digest()])

    def _check_fields(self) -> None:
        if len(self.hashes) != HASH_BYTES * len(self):
            raise RemoteError("malformed", f"{len(self.hashes)} bytes of hashes for {len(self)} pieces")

    def check(self, *, file_digest: bytes, size_bytes: int) -> None:
        """Raises RemoteError unless it is the file's that a run's settings name."""
        if (self.digest, self.size_bytes) != (file_digest, size_bytes):
            raise RemoteError("digest", f"the list of pieces is of another file than {file_digest.hex()[:16]}")

    def __len__(self) -> int:
        return (self.size_bytes + PIECE_BYTES - 1) // PIECE_BYTES

    def span(self, index: int) -> tuple[int, int]:
        """First byte of the piece, and the one after its last."""
        return index * PIECE_BYTES, min((index + 1) * PIECE_BYTES, self.size_bytes)

    def is_piece(self, index: int, data: bytes | bytearray | memoryview) -> bool:
        return hashlib.sha256(data).digest() == self.hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES]


def pieces_of(start: int, stop: int) -> range:
    """Those that hold a file's bytes [start, stop), of which there is one at least."""
    return range(start // PIECE_BYTES, (stop - 1) // PIECE_BYTES + 1)


def list_pieces(path: Path) -> PieceList:
    """Of a file that is here."""
    hashes = b"".join(hashlib.sha256(piece).digest() for piece in _pieces(path))
    return PieceList(path.stat().st_size, hashes)


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            yield piece
