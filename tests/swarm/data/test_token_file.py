"""Token files: what is written is read, in the announced bytes, whole or not at all."""

from pathlib import Path

import numpy as np
import pytest

from swarm.core.errors import LocalError
from swarm.data.pieces import PIECE_BYTES, list_pieces
from swarm.data.token_file import (
    CheckedTokens,
    TokenBytes,
    TokenFile,
    TokenWriter,
    pieces_path,
    token_bytes_for,
)


@pytest.mark.parametrize(("token_bytes", "largest"), [(1, 255), (2, 65535), (4, 2**32 - 1)])
def test_file_holds_little_endian_ids(tmp_path: Path, token_bytes: TokenBytes, largest: int) -> None:
    path = tmp_path / "train.tokens"
    with TokenWriter(path, token_bytes) as writer:
        writer.write(np.array([0, 1], dtype=np.int64))
        writer.write(np.array([], dtype=np.int64))
        writer.write(np.array([largest], dtype=np.uint64))
    expected = b"".join(number.to_bytes(token_bytes, "little") for number in (0, 1, largest))
    assert path.read_bytes() == expected
    assert writer.pieces == list_pieces(path)
    tokens = TokenFile(path, token_bytes)
    assert len(tokens) == writer.num_tokens == 3
    assert tokens.read(1, 3).tolist() == [1, largest]
    assert tokens.read(1, 3).dtype == np.int64
    checked = CheckedTokens(path, token_bytes, num_tokens=3, digest=writer.pieces.digest)
    assert checked.read(1, 3).tolist() == [1, largest]


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
def test_failed_write_leaves_the_old_file(tmp_path: Path, token: int) -> None:
    path = tmp_path / "t"
    path.write_bytes(b"old")
    with pytest.raises(ValueError, match="do not fit"):
        _write(path, [[1, 2], [token]])
    assert path.read_bytes() == b"old"


def test_a_writer_goes_on_where_another_was_broken_off(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 1 << 16, 3 * PIECE_BYTES // 2 + 77)
    broken = TokenWriter(tmp_path / "t", 2)
    broken.write(tokens[: PIECE_BYTES + 5])
    place = broken.num_tokens, broken.sync()
    broken.write(tokens[:1000])
    broken.__exit__(RuntimeError, None, None)
    with pytest.raises(LocalError, match="does not hold"):
        TokenWriter(tmp_path / "t", 2, num_tokens=1 << 22, hashes=bytes(32 * 8))
    with TokenWriter(tmp_path / "t", 2, num_tokens=place[0], hashes=place[1]) as writer:
        writer.write(tokens[PIECE_BYTES + 5 :])
        filled = writer.num_tokens
        writer.fill_piece()
    assert writer.pieces == list_pieces(tmp_path / "t")
    file = TokenFile(tmp_path / "t", 2)
    assert np.array_equal(file.read(0, filled), tokens)
    assert len(file) == 2 * PIECE_BYTES
    assert not file.read(filled, len(file)).any()


def _write(path: Path, blocks: list[list[int]]) -> None:
    with TokenWriter(path, 1) as writer:
        for block in blocks:
            writer.write(np.array(block))


def test_checked_tokens_name_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "t.tokens"
    with TokenWriter(path, 1) as writer:
        writer.write(np.arange(PIECE_BYTES + 10) % 251)
    count, digest = writer.num_tokens, writer.pieces.digest
    with pytest.raises(LocalError, match=f"holds {count} tokens, the run says 11"):
        CheckedTokens(path, 1, num_tokens=11, digest=digest)
    with pytest.raises(LocalError, match=f"digest {digest.hex()}, the run says {bytes(32).hex()}"):
        CheckedTokens(path, 1, num_tokens=count, digest=bytes(32))
    pieces_path(path).write_bytes(writer.pieces.hashes)
    with path.open("r+b") as file:
        file.seek(PIECE_BYTES + 3)
        file.write(b"\0")
    tokens = CheckedTokens(path, 1, num_tokens=count, digest=digest)
    assert tokens.read(0, 5).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(LocalError, match="piece 1 of token file"):
        tokens.read(PIECE_BYTES - 1, PIECE_BYTES + 1)


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
