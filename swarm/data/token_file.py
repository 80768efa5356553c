"""Tokens on disk: little-endian unsigned integers of 1, 2 or 4 bytes, and nothing else.

The file is its own canonical form; the digest of the list of its pieces names the data in a run's settings.
"""

import hashlib
import os
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Literal, Protocol, Self

import numpy as np
import numpy.typing as npt

from swarm.core.errors import LocalError
from swarm.data.pieces import HASH_BYTES, PIECE_BYTES, PieceList, list_pieces

TokenBytes = Literal[1, 2, 4]

DTYPES: dict[int, np.dtype[np.unsignedinteger]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}


def token_bytes_for(vocab_size: int) -> TokenBytes:
    """The narrowest width that holds every id below `vocab_size`. Raises ValueError above 2^32 ids."""
    if vocab_size <= 1 << 8:
        return 1
    if vocab_size <= 1 << 16:
        return 2
    if vocab_size <= 1 << 32:
        return 4
    raise ValueError(f"{vocab_size} token ids do not fit 4 bytes")


class TokenWriter:
    """Writes a token file block by block; the file appears at `path`, whole and synced, when the writer closes.

    Left by an exception, what was written stays beside it, and another writer may go on from a place in it.
    """

    def __init__(self, path: Path, token_bytes: TokenBytes, *, num_tokens: int = 0, hashes: bytes = b"") -> None:
        """Goes on after `num_tokens` that were written and synced, with the `hashes` of their whole pieces.

        Raises LocalError if they are not there.
        """
        self._path = path
        self._partial = partial_path(path)
        self._dtype = DTYPES[token_bytes]
        self._largest_id = 256**token_bytes - 1
        self._hashes = bytearray(hashes)
        self._file = self._opened(num_tokens * token_bytes)
        self.num_tokens = num_tokens

    def _opened(self, size_bytes: int) -> BinaryIO:
        if not size_bytes:
            self._piece = hashlib.sha256()
            self._piece_bytes = 0
            return open(self._partial, "wb")
        file = open(self._partial, "r+b")  # noqa: SIM115 - the same
        whole = size_bytes // PIECE_BYTES
        if os.fstat(file.fileno()).st_size < size_bytes or len(self._hashes) != whole * HASH_BYTES:
            file.close()
            raise LocalError(f"{self._partial} does not hold the {size_bytes} bytes that were written")
        file.truncate(size_bytes)
        file.seek(whole * PIECE_BYTES)
        rest = file.read()
        self._piece = hashlib.sha256(rest)
        self._piece_bytes = len(rest)
        return file

    def write(self, tokens: npt.NDArray[np.integer]) -> None:
        """Append ids. Raises ValueError for an id that does not fit the file's width."""
        if tokens.size == 0:
            return
        if int(tokens.min()) < 0 or int(tokens.max()) > self._largest_id:
            raise ValueError(f"token ids {int(tokens.min())}..{int(tokens.max())} do not fit {self._dtype}")
        data = memoryview(np.ascontiguousarray(tokens, dtype=self._dtype).tobytes())
        self._file.write(data)
        self.num_tokens += tokens.size
        while data:
            taken = data[: PIECE_BYTES - self._piece_bytes]
            self._piece.update(taken)
            self._piece_bytes += len(taken)
            data = data[len(taken) :]
            if self._piece_bytes == PIECE_BYTES:
                self._hashes += self._piece.digest()
                self._piece, self._piece_bytes = hashlib.sha256(), 0

    def fill_piece(self) -> None:
        """Zeros up to the end of the piece, so that what follows begins with one."""
        if self._piece_bytes:
            self.write(np.zeros((PIECE_BYTES - self._piece_bytes) // self._dtype.itemsize, self._dtype))

    def sync(self) -> bytes:
        """Have what was written on disk; the hashes of its whole pieces, for another writer to go on with."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return bytes(self._hashes)

    @property
    def pieces(self) -> PieceList:
        """Of what was written so far."""
        last = self._piece.digest() if self._piece_bytes else b""
        return PieceList(self.num_tokens * self._dtype.itemsize, bytes(self._hashes) + last)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.sync()
            self._file.close()
            os.replace(self._partial, self._path)
        else:
            self._file.close()


def partial_path(path: Path) -> Path:
    """Of a token file that is being written."""
    return path.with_name(path.name + ".partial")


class Tokens(Protocol):
    """Tokens by their places in a run's file."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Tokens [start, stop), copied. Raises ValueError outside the file, LocalError for what is not here."""


class TokenFile:
    """A whole token file mapped into memory: reads touch only the pages they need."""

    def __init__(self, path: Path, token_bytes: TokenBytes) -> None:
        """Raises LocalError if the file is missing, empty, or no whole number of tokens."""
        try:
            size_bytes = path.stat().st_size
        except OSError as error:
            raise LocalError(f"token file {path} cannot be read: {error.strerror}") from error
        if size_bytes == 0 or size_bytes % token_bytes:
            raise LocalError(f"token file {path} has {size_bytes} bytes, no whole number of {token_bytes}-byte tokens")
        self.path = path
        self.token_bytes = token_bytes
        self._tokens = np.memmap(path, dtype=DTYPES[token_bytes], mode="r")

    def __len__(self) -> int:
        return len(self._tokens)

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Tokens [start, stop), copied. Raises ValueError outside the file."""
        if not 0 <= start <= stop <= len(self):
            raise ValueError(f"tokens [{start}, {stop}) lie outside the {len(self)} tokens of {self.path}")
        return self._tokens[start:stop].astype(np.int64)


class CheckedTokens:
    """A whole token file of which somebody else says that it is a run's: what is read of it is checked."""

    def __init__(self, path: Path, token_bytes: TokenBytes, *, num_tokens: int, digest: bytes) -> None:
        """Raises LocalError unless the list of its pieces, which lies beside it or is made anew, is the one that the
        run's settings name. Blocks."""
        self._file = TokenFile(path, token_bytes)
        if len(self._file) != num_tokens:
            raise LocalError(f"token file {path} holds {len(self._file)} tokens, the run says {num_tokens}")
        self._pieces = _pieces_beside(path, num_tokens * token_bytes)
        if self._pieces.digest != digest:
            self._pieces = list_pieces(path)
        if self._pieces.digest != digest:
            raise LocalError(f"token file {path} has digest {self._pieces.digest.hex()}, the run says {digest.hex()}")

    def __len__(self) -> int:
        return len(self._file)

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """As `TokenFile.read`. Raises LocalError where the file is not the run's."""
        size = self._file.token_bytes
        with open(self._file.path, "rb") as file:
            for index in range(start * size // PIECE_BYTES, (stop * size - 1) // PIECE_BYTES + 1):
                begin, end = self._pieces.span(index)
                file.seek(begin)
                if not self._pieces.is_piece(index, file.read(end - begin)):
                    raise LocalError(f"piece {index} of token file {self._file.path} is not the run's")
        return self._file.read(start, stop)


def pieces_path(path: Path) -> Path:
    """Of the list of a token file's pieces."""
    return path.with_suffix(".pieces")


def _pieces_beside(path: Path, size_bytes: int) -> PieceList:
    try:
        return PieceList(size_bytes, pieces_path(path).read_bytes())
    except OSError:
        return list_pieces(path)
