"""Token files: what is written is read, in the announced bytes, whole or not at all."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from swarm.core.errors import LocalError
from swarm.data.token_file import TokenBytes, TokenFile, TokenWriter, token_bytes_for


@pytest.mark.parametrize(("token_bytes", "largest"), [(1, 255), (2, 65535), (4, 2**32 - 1)])
def test_file_holds_little_endian_ids(tmp_path: Path, token_bytes: TokenBytes, largest: int) -> None:
    path = tmp_path / "train.tokens"
    with TokenWriter(path, token_bytes) as writer:
        writer.write(np.array([0, 1], dtype=np.int64))
        writer.write(np.array([], dtype=np.int64))
        writer.write(np.array([largest], dtype=np.uint64))
    expected = b"".join(number.to_bytes(token_bytes, "little") for number in (0, 1, largest))
    assert path.read_bytes() == expected
    assert writer.digest == hashlib.sha256(expected).digest()
    tokens = TokenFile(path, token_bytes)
    assert len(tokens) == writer.num_tokens == 3
    assert tokens.read(1, 3).tolist() == [1, largest]
    assert tokens.read(1, 3).dtype == np.int64
    tokens.verify(num_tokens=3, digest=writer.digest)


def test_reader_owns_what_it_read(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "t", 1) as writer:
        writer.write(np.arange(4))
    tokens = TokenFile(tmp_path / "t", 1)
    tokens.read(0, 4)[:] = 9
    assert tokens.read(0, 4).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("start", "stop"), [(-1, 1), (0, 5), (3, 2), (5, 5)])
def test_read_outside_the_file_is_refused(tmp_path: Path, start: int, stop: int) -> None:
    with TokenWriter(tmp_path / "t", 2) as writer:
        writer.write(np.arange(4))
    with pytest.raises(ValueError, match="lie outside the 4 tokens"):
        TokenFile(tmp_path / "t", 2).read(start, stop)


@pytest.mark.parametrize("token", [-1, 256])
def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, token: int) -> None:
    path = tmp_path / "t"
    path.write_bytes(b"old")
    with pytest.raises(ValueError, match="do not fit"):
        _write(path, [[1, 2], [token]])
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def _write(path: Path, blocks: list[list[int]]) -> None:
    with TokenWriter(path, 1) as writer:
        for block in blocks:
            writer.write(np.array(block))


def test_verify_names_what_differs(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "t", 1) as writer:
        writer.write(np.arange(10))
    tokens = TokenFile(tmp_path / "t", 1)
    with pytest.raises(LocalError, match="holds 10 tokens, the run says 11"):
        tokens.verify(num_tokens=11, digest=writer.digest)
    with pytest.raises(LocalError, match=f"SHA-256 {writer.digest.hex()}, the run says {bytes(32).hex()}"):
        tokens.verify(num_tokens=10, digest=bytes(32))


def test_file_that_is_no_token_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="cannot be read"):
        TokenFile(tmp_path / "missing", 1)
    for size in (0, 3):
        (tmp_path / "t").write_bytes(bytes(size))
        with pytest.raises(LocalError, match=f"has {size} bytes"):
            TokenFile(tmp_path / "t", 2)


@pytest.mark.parametrize(("vocab_size", "expected"), [(1, 1), (256, 1), (257, 2), (65536, 2), (65537, 4), (2**32, 4)])
def test_token_bytes_are_the_narrowest(vocab_size: int, expected: int) -> None:
    assert token_bytes_for(vocab_size) == expected


def test_token_bytes_have_a_limit() -> None:
    with pytest.raises(ValueError, match="do not fit 4 bytes"):
        token_bytes_for(2**32 + 1)
