"""A state's bytes, pinned down: every peer must make the same, and accept no others."""

import struct
from collections.abc import Callable

import numpy as np
import pytest

from swarm.checkpoint.state import (
    CHUNK_BYTES,
    StageState,
    chunk_hash,
    merkle_root,
    state_chunks,
    state_digest,
    state_from_chunks,
    verify_chunk,
    verify_hashes,
)
from swarm.core import canonical
from swarm.core.errors import RemoteError
from swarm.model.layout import ParameterLayout

LAYOUT = ParameterLayout.of({"model.layers.0.weight": (700, 1000), "model.norm.weight": (33,)})
SMALL = ParameterLayout.of({"a": (2, 3), "b": (4,)})


def make_state(layout: ParameterLayout = LAYOUT, version: int = 7) -> StageState:
    rng = np.random.default_rng(3)
    count = layout.num_values
    return StageState(
        version=version,
        layout=layout,
        weights=rng.standard_normal(count, dtype=np.float32),
        moments={
            "second": rng.random(count, dtype=np.float32),
            "first": rng.standard_normal(count, dtype=np.float32),
            "codes": rng.integers(-128, 128, count, dtype=np.int8),
            "scales": rng.random(5, dtype=np.float32),
        },
        scalars={"beta1_power": 0.9**7, "beta2_power": 0.95**7},
        certified_norms=[0.5, 1.25],
        name=bytes(range(32)),
    )


def copied(state: StageState) -> list[bytes]:
    return [bytes(chunk) for chunk in state_chunks(state)]


@pytest.mark.parametrize("layout", [LAYOUT, SMALL])
def test_state_returns_byte_for_byte_from_its_chunks(layout: ParameterLayout) -> None:
    state = make_state(layout)
    returned = state_from_chunks(layout, copied(state), state_digest(state))
    assert returned.weights.tobytes() == state.weights.tobytes()
    assert sorted(returned.moments) == sorted(state.moments)
    for name, values in state.moments.items():
        assert returned.moments[name].dtype == values.dtype
        assert returned.moments[name].tobytes() == values.tobytes()
    assert (returned.version, returned.scalars, returned.certified_norms, returned.name) == (
        state.version,
        state.scalars,
        state.certified_norms,
        state.name,
    )
    assert copied(returned) == copied(state)


def test_state_without_moments_returns() -> None:
    state = StageState(0, SMALL, np.zeros(10, np.float32))
    assert state_from_chunks(SMALL, copied(state), state_digest(state)).moments == {}


def test_bytes_are_those_of_the_format() -> None:
    """Golden: a change here is a change of protocol."""
    state = StageState(
        version=3,
        layout=SMALL,
        weights=np.arange(10, dtype=np.float32),
        moments={"m": np.arange(10, dtype=np.float32) / 2},
        scalars={"p": 0.5},
        certified_norms=[1.0],
        name=b"\x01" * 32,
    )
    (chunk,) = copied(state)
    (length,) = struct.unpack_from("<I", chunk)
    header = canonical.unpack(chunk[4 : 4 + length], max_bytes=CHUNK_BYTES)
    assert isinstance(header, dict)
    assert header["moments"] == [["m", "float32", 10]]
    assert len(chunk) == 4096 + 80
    assert chunk[4096:4136] == struct.pack("<10f", *range(10))
    assert state_digest(state).hex() == "beca20b20af2b63f9ca0ab6f26b51296c057814792d16efa77e7dcb471b690fd"


def test_chunks_are_whole_and_share_memory() -> None:
    state = make_state()
    chunks = state_chunks(state)
    total = sum(len(chunk) for chunk in chunks)
    assert [len(chunk) for chunk in chunks[:-1]] == [CHUNK_BYTES] * (len(chunks) - 1)
    assert total == 4096 + sum(array.nbytes for array in (state.weights, *state.moments.values()))
    before = chunks[1][0]
    state.weights.view(np.uint8)[CHUNK_BYTES - 4096] ^= 255
    assert chunks[1][0] == before ^ 255


def flip_weight(state: StageState) -> None:
    state.weights.view(np.uint8)[-1] ^= 1


def flip_moment(state: StageState) -> None:
    state.moments["scales"].view(np.uint8)[0] ^= 1


def rename(state: StageState) -> None:
    state.name = bytes(32)


def step(state: StageState) -> None:
    state.version += 1


def nudge_scalar(state: StageState) -> None:
    state.scalars["beta1_power"] = float(np.nextafter(state.scalars["beta1_power"], 1))


def forget_norm(state: StageState) -> None:
    state.certified_norms.pop()


@pytest.mark.parametrize("change", [flip_weight, flip_moment, rename, step, nudge_scalar, forget_norm])
def test_digest_changes_with_anything_in_the_state(change: Callable[[StageState], None]) -> None:
    state = make_state()
    before = state_digest(state)
    assert before == state_digest(make_state())
    change(state)
    assert state_digest(state) != before


def test_chunks_are_checked_one_by_one_against_verified_hashes() -> None:
    state = make_state()
    chunks = copied(state)
    hashes = [chunk_hash(chunk) for chunk in chunks]
    total = sum(map(len, chunks))
    verify_hashes(state_digest(state), hashes, total)
    for index, chunk in enumerate(chunks):
        verify_chunk(hashes, index, chunk)
    with pytest.raises(RemoteError, match="chunk 1"):
        verify_chunk(hashes, 1, chunks[2])
    with pytest.raises(RemoteError):
        verify_chunk(hashes, len(chunks), chunks[0])
    swapped = [hashes[1], hashes[0], *hashes[2:]]
    for wrong, wrong_total in (
        (swapped, total),
        (hashes[:-1], total),
        ([*hashes, hashes[-1]], total),
        (hashes, total - 1),
        (hashes, 0),
        ([], 0),
        ([digest[:31] for digest in hashes], total),
    ):
        with pytest.raises(RemoteError):
            verify_hashes(state_digest(state), wrong, wrong_total)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13])
def test_root_depends_on_every_hash_its_place_and_the_size(count: int) -> None:
    hashes = [chunk_hash(bytes([index])) for index in range(count)]
    roots = {merkle_root(hashes, 100), merkle_root(hashes, 101), merkle_root([*hashes, hashes[-1]], 100)}
    for index in range(count):
        roots.add(merkle_root([*hashes[:index], bytes(32), *hashes[index + 1 :]], 100))
    assert len(roots) == count + 3


def test_inner_node_is_no_leaf() -> None:
    left, right = chunk_hash(b"left"), chunk_hash(b"right")
    assert merkle_root([left, right], 9) != merkle_root([chunk_hash(left + right)], 9)


def rebuilt(chunks: list[bytes]) -> tuple[list[bytes], bytes]:
    """Chunks with a digest that fits them: what a certificate of liars could hold."""
    data = b"".join(chunks)
    cut = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
    return cut, merkle_root([chunk_hash(chunk) for chunk in cut], len(data))


def with_header(state: StageState, **changes: object) -> tuple[list[bytes], bytes]:
    data = b"".join(copied(state))
    (length,) = struct.unpack_from("<I", data)
    fields = canonical.unpack(data[4 : 4 + length], max_bytes=CHUNK_BYTES)
    assert isinstance(fields, dict)
    fields |= changes  # type: ignore[arg-type]
    packed = canonical.pack(fields)
    header = struct.pack("<I", len(packed)) + packed
    return rebuilt([header + bytes(-len(header) % 4096) + data[4096:]])


@pytest.mark.parametrize(
    "changes",
    [
        {"version": -1},
        {"version": True},
        {"version": "7"},
        {"name": bytes(31)},
        {"layout": bytes(32)},
        {"extra": 1},
        {"scalars": {"beta1_power": float("nan")}},
        {"scalars": {"beta1_power": 1}},
        {"certified_norms": [0.5] * 17},
        {"certified_norms": [float("inf")]},
        {"moments": []},
        {"moments": [["first", "float32", 1 << 62]]},
        {"moments": [["first", "object", 10]]},
        {"moments": [["first", "float32", 10], ["first", "float32", 10]]},
        {"moments": [["first", "float32"]]},
        {"moments": [["first", "float32", True]]},
        {"moments": [["weights", "float32", 10]]},
        {"moments": [["a/b", "float32", 10]]},
        {"moments": [["first\n", "float32", 10]]},
        {"moments": [[f"m{index}", "int8", 0] for index in range(9)]},
    ],
)
def test_state_is_refused_when_its_header_is_wrong_though_its_digest_fits(changes: dict[str, object]) -> None:
    chunks, digest = with_header(make_state(SMALL), **changes)
    with pytest.raises(RemoteError):
        state_from_chunks(SMALL, chunks, digest)


def test_state_is_refused_when_its_bytes_are_wrong_though_its_digest_fits() -> None:
    state = make_state(SMALL)
    data = b"".join(copied(state))
    accepted, digest = rebuilt([data])
    state_from_chunks(SMALL, accepted, digest)
    not_finite = bytearray(data)
    not_finite[4096:4100] = struct.pack("<f", float("nan"))
    padded = bytearray(data)
    padded[4095] = 1
    long_header = struct.pack("<I", 0xFFFFFFFF) + data[4:]
    for wrong in (data[:-1], data + b"\0", bytes(not_finite), bytes(padded), long_header, data[:2], b"\0" * 4096):
        with pytest.raises(RemoteError):
            state_from_chunks(SMALL, *rebuilt([wrong]))


def test_state_is_refused_when_its_digest_or_layout_is_another() -> None:
    state = make_state(SMALL)
    with pytest.raises(RemoteError) as caught:
        state_from_chunks(SMALL, copied(state), bytes(32))
    assert caught.value.kind == "digest"
    renamed = ParameterLayout.of({"a": (2, 3), "c": (4,)})
    with pytest.raises(RemoteError) as caught:
        state_from_chunks(renamed, copied(state), state_digest(state))
    assert caught.value.kind == "layout"
    with pytest.raises(RemoteError):
        state_from_chunks(SMALL, [], bytes(32))


def test_own_state_that_others_would_refuse_is_an_error_here() -> None:
    too_many = make_state(SMALL)
    too_many.certified_norms = [1.0] * 17
    misnamed = make_state(SMALL)
    misnamed.name = b""
    short = make_state(SMALL)
    short.weights = short.weights[:-1]
    strided = make_state(SMALL)
    strided.moments["first"] = np.zeros(20, np.float32)[::2]
    for state in (too_many, misnamed, short, strided):
        with pytest.raises(ValueError):
            state_digest(state)
