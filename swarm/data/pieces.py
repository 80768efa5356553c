"""A run's token file in pieces that anybody may hand on: the run key signs for each of them."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO, ClassVar

from swarm.core.errors import RemoteError
from swarm.core.forms import Digest, Integer, Octets
from swarm.core.ids import PeerId
from swarm.identity.signed_record import SignedRecord

PIECE_BYTES = 1 << 20
MAX_PIECES = 1 << 17
"""128 GiB: the list of them fits into a message."""
_HASH_BYTES = 32


@dataclass(frozen=True)
class PieceList(SignedRecord, kind="list of pieces"):
    """SHA-256 of each MiB of a file."""

    DOMAIN: ClassVar[str] = "pieces"
    file_digest: Digest
    """SHA-256 of the whole."""
    size_bytes: Annotated[int, Integer(low=1, high=MAX_PIECES * PIECE_BYTES)]
    hashes: Annotated[bytes, Octets(max_length=MAX_PIECES * _HASH_BYTES)]
    """End to end."""

    def check(self, *, file_digest: bytes, size_bytes: int, run_key: PeerId) -> None:
        """Raises RemoteError unless the run key says this of the file."""
        if not self.is_signed_by(run_key):
            raise RemoteError("signature", "the list of a file's pieces is not signed by the run key")
        whole = len(self.hashes) == _HASH_BYTES * len(self)
        if not whole or (self.file_digest, self.size_bytes) != (file_digest, size_bytes):
            raise RemoteError("digest", f"the list of pieces is of another file than {file_digest.hex()[:16]}")

    def __len__(self) -> int:
        return (self.size_bytes + PIECE_BYTES - 1) // PIECE_BYTES

    def span(self, index: int) -> tuple[int, int]:
        """First byte of the piece, and the one after its last."""
        return index * PIECE_BYTES, min((index + 1) * PIECE_BYTES, self.size_bytes)

    def is_piece(self, index: int, data: bytes | memoryview) -> bool:
        return hashlib.sha256(data).digest() == self.hashes[index * _HASH_BYTES : (index + 1) * _HASH_BYTES]

    def missing(self, file: BinaryIO) -> list[int]:
        """Which pieces a file that is to be this one lacks."""
        file.seek(0)
        return [index for index in range(len(self)) if not self.is_piece(index, file.read(PIECE_BYTES))]


def list_pieces(path: Path, file_digest: bytes) -> PieceList:
    """Of a file whose digest this is, still to be signed."""
    hashes = b"".join(hashlib.sha256(piece).digest() for piece in _pieces(path))
    return PieceList(file_digest, path.stat().st_size, hashes)


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            yield piece
