"""A stage's state - weights, moments, name - as bytes, chunks and one digest.

The bytes are a header (canonical MessagePack, padded to 4 KiB), the weights, then the moments sorted by name, all
little-endian. The digest is the root of a SHA-256 Merkle tree over 1 MiB chunks, so a joiner checks each chunk from
any donor as it comes.
"""

import hashlib
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from swarm.core import canonical
from swarm.core.canonical import Value
from swarm.core.errors import RemoteError
from swarm.core.state.step_rule import NUM_CERTIFIED_NORMS
from swarm.model.layout import ParameterLayout

CHUNK_BYTES = 1 << 20
UNNAMED = bytes(32)
"""The name of a state at which a stage is to begin: its genesis gives it one."""
HEADER_ALIGNMENT_BYTES = 4096
MAX_MOMENTS = 8
MOST_MOMENT_BYTES = 8
"""A value, of one moment."""

MOMENT_DTYPES = ("float32", "float64", "int8", "uint8")
_PLAIN = re.compile(r"[a-z][a-z0-9_]{0,31}")
"""A moment's name: it becomes part of tensors' names in files."""

Bytes: TypeAlias = bytes | bytearray | memoryview
Array: TypeAlias = NDArray[np.float32] | NDArray[np.float64] | NDArray[np.int8] | NDArray[np.uint8]


@dataclass
class StageState:
    """All that decides a stage's future: replicas at one version hold the same bytes of it."""

    version: int
    layout: ParameterLayout
    weights: NDArray[np.float32]
    """Flat, in layout order."""
    moments: dict[str, Array] = field(default_factory=dict)
    """The optimizer's vectors by name, 1-D."""
    scalars: dict[str, float] = field(default_factory=dict)
    """The optimizer's running products."""
    certified_norms: list[float] = field(default_factory=list)
    """Norms of the last certified gradients, newest last, at most 16."""
    name: bytes = UNNAMED
    """The version's name, H(previous name, result root)."""


def state_chunks(state: StageState) -> list[Bytes]:
    """The state's bytes in chunks of 1 MiB (the last may be shorter); most share the state's memory."""
    return _rechunked([memoryview(header_bytes(state)), *(_raw(array) for _, array in arrays_of(state))])


def chunk_hash(chunk: Bytes) -> bytes:
    """Leaf of the Merkle tree: SHA-256 of a domain tag and the chunk."""
    leaf = hashlib.sha256(b"homeswarm/state-leaf\0")
    leaf.update(chunk)
    return leaf.digest()


def state_digest(state: StageState) -> bytes:
    """The 32 bytes that stand for a state in certificates."""
    chunks = state_chunks(state)
    return merkle_root([chunk_hash(chunk) for chunk in chunks], sum(len(chunk) for chunk in chunks))


def merkle_root(hashes: Sequence[bytes], total_bytes: int) -> bytes:
    """Root over the chunks' hashes and the total size; an odd node at the end of a row moves up as it is."""
    if not hashes:
        raise ValueError("a state has at least one chunk")
    row = list(hashes)
    while len(row) > 1:
        row = _row_above(row)
    return _root(row[0], total_bytes)


def merkle_path(hashes: Sequence[bytes], index: int) -> tuple[bytes, ...]:
    """What shows a chunk's hash to be under the root: from the chunk up, the node beside each that has one."""
    row, at, path = list(hashes), index, []
    while len(row) > 1:
        if at ^ 1 < len(row):
            path.append(row[at ^ 1])
        row, at = _row_above(row), at // 2
    return tuple(path)


def root_by_path(leaf: bytes, index: int, path: Sequence[bytes], total_bytes: int) -> bytes:
    """The root above a chunk's hash. Raises RemoteError("malformed") for another path than one of such a state."""
    width, node, beside = num_chunks_of(total_bytes), leaf, list(path)
    if not 0 <= index < width:
        raise RemoteError("malformed", f"chunk {index} of {width}")
    while width > 1:
        if index ^ 1 < width:
            if not beside:
                raise RemoteError("malformed", f"path of {len(path)} nodes is too short")
            other = beside.pop(0)
            node = _node(other, node) if index % 2 else _node(node, other)
        width, index = -(-width // 2), index // 2
    if beside:
        raise RemoteError("malformed", f"path of {len(path)} nodes is too long")
    return _root(node, total_bytes)


def _row_above(row: Sequence[bytes]) -> list[bytes]:
    pairs = [_node(row[at], row[at + 1]) for at in range(0, len(row) - 1, 2)]
    return [*pairs, *row[2 * len(pairs) :]]


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"homeswarm/state-node\0" + left + right).digest()


def _root(top: bytes, total_bytes: int) -> bytes:
    return hashlib.sha256(b"homeswarm/state-root\0" + struct.pack("<Q", total_bytes) + top).digest()


def num_chunks_of(total_bytes: int) -> int:
    return -(-total_bytes // CHUNK_BYTES)


def verify_hashes(root: bytes, hashes: Sequence[bytes], total_bytes: int) -> None:
    """Raises RemoteError("digest") unless `hashes` are those of the state with digest `root`."""
    if total_bytes < 1 or len(hashes) != num_chunks_of(total_bytes) or any(len(digest) != 32 for digest in hashes):
        raise RemoteError(
            "malformed", f"{len(hashes)} hashes for {total_bytes} bytes, which are {num_chunks_of(total_bytes)} chunks"
        )
    if merkle_root(hashes, total_bytes) != root:
        raise RemoteError("digest", f"the list of {len(hashes)} chunk hashes does not have root {root.hex()[:16]}")


def verify_chunk(hashes: Sequence[bytes], index: int, chunk: Bytes) -> None:
    """Raises RemoteError("digest") unless `chunk` is the one at `index` of a verified list of hashes."""
    if not 0 <= index < len(hashes) or len(chunk) > CHUNK_BYTES:
        raise RemoteError("malformed", f"chunk {index} of {len(chunk)} bytes; there are {len(hashes)} of {CHUNK_BYTES}")
    if chunk_hash(chunk) != hashes[index]:
        raise RemoteError("digest", f"chunk {index} of {len(chunk)} bytes does not have its hash")


def state_from_chunks(
    layout: ParameterLayout,
    chunks: Sequence[Bytes],
    expected_digest: bytes,
    *,
    whole: Callable[[Sequence[Bytes]], memoryview] = lambda chunks: memoryview(b"".join(chunks)),
) -> StageState:
    """The state whose bytes a donor sent, read-only. `whole`: where the chunks lie end to end.

    Raises RemoteError for anything but that state of that layout.
    """
    total_bytes = sum(len(chunk) for chunk in chunks)
    verify_hashes(expected_digest, [chunk_hash(chunk) for chunk in chunks], total_bytes)
    if any(len(chunk) != CHUNK_BYTES for chunk in chunks[:-1]):
        raise RemoteError("malformed", f"a chunk before the last does not have {CHUNK_BYTES} bytes")
    state = read_header(layout, chunks[0])
    at, sizes = len(header_bytes(state)), {name: array.nbytes for name, array in arrays_of(state)}
    if at + sum(sizes.values()) != total_bytes:
        raise RemoteError("malformed", f"state of {total_bytes} bytes is not as long as its header says")
    held, arrays = whole(chunks), dict[str, Any]()
    for name, array in arrays_of(state):
        arrays[name] = np.frombuffer(held[at : at + array.nbytes].toreadonly(), dtype=array.dtype)
        at += array.nbytes
        if array.dtype.kind == "f" and not _is_finite(arrays[name]):
            raise RemoteError("not-finite", "the state holds values that are not finite")
    return replace(state, weights=arrays.pop("weights"), moments=arrays)


def _is_finite(array: Array) -> bool:
    """Piece by piece: what is looked at need not be in memory."""
    return all(np.isfinite(array[at : at + CHUNK_BYTES]).all() for at in range(0, len(array), CHUNK_BYTES))


def read_header(layout: ParameterLayout, first_chunk: Bytes) -> StageState:
    """The state that the first chunk announces; what its arrays hold is not known yet. Raises RemoteError."""
    first = memoryview(first_chunk).cast("B")
    (length,) = struct.unpack_from("<I", first) if len(first) >= 4 else (len(first),)
    if 4 + length > len(first):
        raise RemoteError("malformed", f"header of {length} bytes in a first chunk of {len(first)}")
    state = _state_of_header(layout, canonical.unpack(first[4 : 4 + length], max_bytes=CHUNK_BYTES))
    header = header_bytes(state)
    if first[: len(header)] != header:
        raise RemoteError("malformed", "the state's header is not in canonical form")
    return state


def root_as(
    layout: ParameterLayout, first_chunk: Bytes, hashes: Sequence[bytes], total_bytes: int, *, version: int, name: bytes
) -> bytes:
    """The digest of a state as this version, under this name: its first chunk differs. Raises RemoteError."""
    state = read_header(layout, first_chunk)
    header = header_bytes(replace(state, version=version, name=name))
    first = b"".join([header, memoryview(first_chunk).cast("B")[len(header) :]])
    return merkle_root([chunk_hash(first), *hashes[1:]], total_bytes)


def arrays_of(state: StageState) -> list[tuple[str, Array]]:
    """By name, in the order of the state's bytes."""
    return [("weights", state.weights), *((name, state.moments[name]) for name in sorted(state.moments))]


def header_bytes(state: StageState) -> bytes:
    """What the state's bytes begin with."""
    if state.weights.dtype != np.float32 or state.weights.shape != (state.layout.num_values,):
        raise ValueError(f"weights are {state.layout.num_values} fp32 values, got {state.weights.shape}")
    if len(state.certified_norms) > NUM_CERTIFIED_NORMS or len(state.moments) > MAX_MOMENTS or len(state.name) != 32:
        raise ValueError(
            f"a state has at most {NUM_CERTIFIED_NORMS} norms, {MAX_MOMENTS} moments and a name of 32 bytes; got "
            f"{len(state.certified_norms)}, {len(state.moments)}, {len(state.name)}"
        )
    fields: dict[str, Value] = {
        "certified_norms": [float(norm) for norm in state.certified_norms],
        "layout": layout_digest(state.layout),
        "moments": [[name, str(state.moments[name].dtype), len(state.moments[name])] for name in sorted(state.moments)],
        "name": state.name,
        "scalars": {name: float(value) for name, value in state.scalars.items()},
        "version": state.version,
    }
    packed = canonical.pack(fields)
    padding = -(4 + len(packed)) % HEADER_ALIGNMENT_BYTES
    return struct.pack("<I", len(packed)) + packed + bytes(padding)


def layout_digest(layout: ParameterLayout) -> bytes:
    """32 bytes that stand for names and shapes."""
    tensors: list[Value] = [[name, list(shape)] for name, shape in zip(layout.names, layout.shapes, strict=True)]
    return canonical.digest("state-layout", tensors)


def _state_of_header(layout: ParameterLayout, value: Value) -> StageState:
    """A state with empty arrays of the announced sizes. Raises RemoteError("malformed")."""
    if not isinstance(value, dict) or len(value) != 6:
        raise RemoteError("malformed", "the state's header is not a map of its six fields")
    match value:
        case {
            "certified_norms": list(norms),
            "layout": bytes(digest),
            "moments": list(moments),
            "name": bytes(name),
            "scalars": dict(scalars),
            "version": int(version),
        } if len(name) == 32 and version >= 0 and version is not True and version is not False:
            pass
        case _:
            raise RemoteError("malformed", "the state's header lacks fields or has wrong ones")
    if digest != layout_digest(layout):
        raise RemoteError("layout", "the state is of another model or stage: names or shapes differ")
    if len(norms) > NUM_CERTIFIED_NORMS or len(scalars) > 64 or len(moments) > MAX_MOMENTS:
        raise RemoteError("malformed", f"{len(norms)} norms, {len(scalars)} scalars, {len(moments)} moments: too many")
    state = StageState(version, layout, np.empty(layout.num_values, np.float32), name=name)
    state.certified_norms = [_finite(norm) for norm in norms]
    state.scalars = {key: _finite(scalar) for key, scalar in scalars.items()}
    for entry in moments:
        match entry:
            case [str(moment), str(dtype), int(length)] if (
                type(length) is int
                and dtype in MOMENT_DTYPES
                and 0 <= length * np.dtype(dtype).itemsize <= MOST_MOMENT_BYTES * layout.num_values
                and moment not in (*state.moments, "weights")
                and _PLAIN.fullmatch(moment)
            ):
                state.moments[moment] = np.empty(length, dtype)
            case _:
                raise RemoteError("malformed", f"moment {str(entry)[:80]} is not one of this layout")
    return state


def _finite(value: Value) -> float:
    if not isinstance(value, float) or not np.isfinite(value):
        raise RemoteError("malformed", f"{str(value)[:40]} is no finite number")
    return value


def _raw(array: Array) -> memoryview:
    """The array's bytes, shared. Little-endian, which every machine we run on is."""
    if array.ndim != 1 or not array.flags.c_contiguous or str(array.dtype) not in MOMENT_DTYPES:
        raise ValueError(f"a state holds contiguous vectors of {', '.join(MOMENT_DTYPES)}, got {array.dtype}")
    return array.data.cast("B") if len(array) else memoryview(b"")


def _rechunked(segments: Iterable[memoryview]) -> list[Bytes]:
    chunks: list[Bytes] = []
    rest = bytearray()
    for segment in segments:
        at = 0
        if rest:
            at = min(CHUNK_BYTES - len(rest), len(segment))
            rest += segment[:at]
            if len(rest) < CHUNK_BYTES:
                continue
            chunks.append(bytes(rest))
            rest = bytearray()
        while at + CHUNK_BYTES <= len(segment):
            chunks.append(segment[at : at + CHUNK_BYTES])
            at += CHUNK_BYTES
        rest += segment[at:]
    if rest:
        chunks.append(bytes(rest))
    return chunks
