"""Tokens on disk: little-endian unsigned integers of 1, 2 or 4 bytes, and nothing else.

The file is its own canonical form, so the SHA-256 of its bytes names the data in a run's settings.
"""

import hashlib
import os
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import numpy as np
import numpy.typing as npt

from swarm.core.errors import LocalError

TokenBytes = Literal[1, 2, 4]

_DTYPES: dict[int, np.dtype[np.unsignedinteger]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}
_HASH_BLOCK_BYTES = 1 << 22


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

    Left by an exception, it leaves nothing behind.
    """

    def __init__(self, path: Path, token_bytes: TokenBytes) -> None:
        self._path = path
        self._partial = path.with_name(path.name + ".partial")
        self._dtype = _DTYPES[token_bytes]
        self._largest_id = 256**token_bytes - 1
        self._hash = hashlib.sha256()
        self._file = open(self._partial, "wb")  # noqa: SIM115 - closed by __exit__
        self.num_tokens = 0

    def write(self, tokens: npt.NDArray[np.integer]) -> None:
        """Append ids. Raises ValueError for an id that does not fit the file's width."""
        if tokens.size == 0:
            return
        if int(tokens.min()) < 0 or int(tokens.max()) > self._largest_id:
            raise ValueError(f"token ids {int(tokens.min())}..{int(tokens.max())} do not fit {self._dtype}")
        data = np.ascontiguousarray(tokens, dtype=self._dtype).tobytes()
        self._hash.update(data)
        self._file.write(data)
        self.num_tokens += tokens.size

    @property
    def digest(self) -> bytes:
        """SHA-256 of the bytes written so far."""
        return self._hash.digest()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._partial, self._path)
        else:
            self._file.close()
            self._partial.unlink(missing_ok=True)


class TokenFile:
    """A token file mapped into memory: reads touch only the pages they need."""

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
        self._tokens = np.memmap(path, dtype=_DTYPES[token_bytes], mode="r")

    def __len__(self) -> int:
        return len(self._tokens)

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Tokens [start, stop), copied. Raises ValueError outside the file."""
        if not 0 <= start <= stop <= len(self):
            raise ValueError(f"tokens [{start}, {stop}) lie outside the {len(self)} tokens of {self.path}")
        return self._tokens[start:stop].astype(np.int64)

    def digest(self) -> bytes:
        """SHA-256 of the file, read anew."""
        hasher = hashlib.sha256()
        with open(self.path, "rb") as file:
            while block := file.read(_HASH_BLOCK_BYTES):
                hasher.update(block)
        return hasher.digest()

    def verify(self, *, num_tokens: int, digest: bytes) -> None:
        """Raises LocalError unless the file is the one the run's settings name."""
        if len(self) != num_tokens:
            raise LocalError(f"token file {self.path} holds {len(self)} tokens, the run says {num_tokens}")
        found = self.digest()
        if found != digest:
            raise LocalError(f"token file {self.path} has SHA-256 {found.hex()}, the run says {digest.hex()}")
