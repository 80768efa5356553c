"""Canonical bytes: the one sequence for a value that is hashed and signed.

A strict subset of MessagePack: None, bool, 64-bit integers, float64, str, bytes, list, and dict with
string keys in sorted order, each in its shortest form; zero has no sign. Equal values of a type give equal
bytes, and `unpack` accepts nothing that `pack` would not have written.
"""

import hashlib
import struct
from collections.abc import Callable
from functools import lru_cache
from operator import attrgetter
from types import NoneType
from typing import Any, TypeAlias

from swarm.core.errors import RemoteError

Value: TypeAlias = (
    "None | bool | int | float | str | bytes | list[Value] | tuple[Value, ...] | dict[str, Value] | Packed"
)

MAX_DEPTH = 16
_NAME_CHARACTERS = 64
MAX_VALUES = 1 << 20
"""In one message from a stranger: 8 MiB of empty lists would else take half a gigabyte, and seconds."""


class Packed:
    """A value in its canonical bytes already: a large one that goes into many messages and digests is packed once.

    Stands for the value in what is packed; what is unpacked holds none.
    """

    __slots__ = ("data",)

    def __init__(self, value: Value) -> None:
        self.data = pack(value)


def pack(value: Value) -> bytes:
    """Canonical bytes of `value`. Raises TypeError for types outside the subset."""
    return _packed(value, 0)


def digest(domain: str, value: Value) -> bytes:
    """SHA-256 of the domain tag, a zero byte and the canonical bytes: 32 bytes."""
    return hashlib.sha256(signed_bytes(domain, value)).digest()


def signed_bytes(domain: str, value: Value) -> bytes:
    """The bytes a signature covers: `homeswarm/<domain>`, a zero byte, canonical bytes."""
    return b"homeswarm/" + domain.encode() + b"\0" + pack(value)


def unpack(data: bytes | bytearray | memoryview, *, max_bytes: int) -> Value:
    """Value of canonical bytes from a stranger. Raises RemoteError("malformed") for anything else."""
    if len(data) > max_bytes:
        raise RemoteError("malformed", f"message of {len(data)} bytes is over the limit of {max_bytes}")
    reader = _Reader(bytes(data))
    try:
        value = reader.read(0)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise RemoteError("malformed", f"not canonical MessagePack: {error}") from error
    if reader.at != len(reader.data):
        raise RemoteError("malformed", f"{len(reader.data) - reader.at} bytes after the value")
    return value


def _packed(value: Value, depth: int) -> bytes:
    scalar = _SCALARS.get(type(value))
    if scalar is not None:
        return scalar(value)
    if isinstance(value, (list, tuple)):
        return _packed_list(value, depth)
    if isinstance(value, dict):
        return _packed_map(value, depth)
    for kind, scalar in _SCALARS.items():
        if isinstance(value, kind):  # a kind of its own, such as NumPy's float64
            return scalar(value)
    raise TypeError(f"{type(value).__name__} has no canonical form")


def _packed_list(items: "list[Value] | tuple[Value, ...]", depth: int) -> bytes:
    # A round packs ten thousand values, most of them in lists: no call is made for one that takes none.
    if items and depth >= MAX_DEPTH:
        raise TypeError(f"nested deeper than {MAX_DEPTH}")
    found = [_head(len(items), 0x90, 16, _ARRAY)]
    for item in items:
        scalar = _SCALARS.get(type(item))
        found.append(scalar(item) if scalar is not None else _packed(item, depth + 1))
    return b"".join(found)


def _packed_map(entries: dict[str, Value], depth: int) -> bytes:
    if entries and depth >= MAX_DEPTH:
        raise TypeError(f"nested deeper than {MAX_DEPTH}")
    found = [_head(len(entries), 0x80, 16, _MAP)]
    for key in sorted(entries):
        if not isinstance(key, str):
            raise TypeError(f"key {key!r} is not a string")
        item = entries[key]
        scalar = _SCALARS.get(type(item))
        found.append(_packed_str(key))
        found.append(scalar(item) if scalar is not None else _packed(item, depth + 1))
    return b"".join(found)


def _packed_str(text: str) -> bytes:
    return _packed_name(text) if len(text) <= _NAME_CHARACTERS else _packed_text(text)


def _packed_text(text: str) -> bytes:
    data = text.encode()
    return _head(len(data), 0xA0, 32, _STR) + data


_packed_name = lru_cache(maxsize=4096)(_packed_text)
"""The same fields and peers are named in every message."""


def _packed_bytes(data: bytes) -> bytes:
    return (_SHORT_BIN[len(data)] if len(data) < len(_SHORT_BIN) else _number(len(data), _BIN)) + data


def _packed_int(value: int) -> bytes:
    if -32 <= value < 128:
        return _SHORT_INT[value]
    return _number(value, _POSITIVE if value > 0 else _NEGATIVE)


def _packed_float(value: float) -> bytes:
    return b"\xcb" + _FLOAT.pack(value or 0.0)  # also for -0.0


def _head(length: int, code: int, short: int, sizes: "_Sizes") -> bytes:
    return _BYTES[code | length] if length < short else _number(length, sizes)


def _number(value: int, sizes: "_Sizes") -> bytes:
    for code, (layout, _, last) in sizes.items():
        if value >= last if last < 0 else value <= last:
            return _BYTES[code] + layout.pack(value)
    raise TypeError(f"{value} does not fit")


_SCALARS: dict[type, Callable[[Any], bytes]] = {
    str: _packed_str,
    bytes: _packed_bytes,
    NoneType: lambda value: b"\xc0",
    bool: lambda value: b"\xc3" if value else b"\xc2",
    int: _packed_int,
    float: _packed_float,
    Packed: attrgetter("data"),
}
"""What has no others in it; a bool is also an int."""
_Size: TypeAlias = tuple[struct.Struct, int, int]
"""Layout of a big-endian number, with the first and the last number, away from zero, that take so long a form."""
_Sizes: TypeAlias = dict[int, _Size]


def _sizes(codes: range, layouts: str, first: int) -> _Sizes:
    """Those of the codes, from the shortest on."""
    made: _Sizes = {}
    for code, layout in zip(codes, layouts, strict=True):
        number = struct.Struct(">" + layout)
        last = -(1 << (8 * number.size - 1)) if layout.islower() else (1 << 8 * number.size) - 1
        made[code] = (number, first, last)
        first = last + (1 if last > 0 else -1)
    return made


_POSITIVE = _sizes(range(0xCC, 0xD0), "BHIQ", 128)
_NEGATIVE = _sizes(range(0xD0, 0xD4), "bhiq", -33)
_STR = _sizes(range(0xD9, 0xDC), "BHI", 32)
_BIN = _sizes(range(0xC4, 0xC7), "BHI", 0)
_ARRAY = _sizes(range(0xDC, 0xDE), "HI", 16)
_MAP = _sizes(range(0xDE, 0xE0), "HI", 16)
_BYTES = [bytes([code]) for code in range(256)]
_SHORT_INT = [*_BYTES[:128], *_BYTES[256 - 32 :]]
"""By the number; one below zero counts from the end."""
_SHORT_BIN = [bytes([0xC4, length]) for length in range(256)]
_FLOAT = struct.Struct(">d")
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}


class _Reader:
    """Reads what `pack` writes. The form is checked as it is read.

    It grows lists as their elements come, where a decoder that allocates announced lengths could be made to take
    gigabytes by a nest of them.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.announced = 0

    def read(self, depth: int) -> Value:
        if depth > MAX_DEPTH:
            raise RemoteError("malformed", f"nested deeper than {MAX_DEPTH}")
        code = self.data[self.at]
        self.at += 1
        if code < 0x80:
            return code
        if code < 0x90:
            return self._map(code & 15, depth)
        if code < 0xA0:
            return self._array(code & 15, depth)
        if code < 0xC0:
            return self._bytes(code & 31).decode()
        if code >= 0xE0:
            return code - 256
        if code in _BIN:
            return self._bytes(self._number(_BIN[code]))
        if code in _POSITIVE:
            return self._number(_POSITIVE[code])
        if code in _CONSTANTS:
            return _CONSTANTS[code]
        if code == 0xCB:
            return self._float()
        if code in _STR:
            return self._bytes(self._number(_STR[code])).decode()
        if code in _ARRAY:
            return self._array(self._number(_ARRAY[code]), depth)
        if code in _MAP:
            return self._map(self._number(_MAP[code]), depth)
        if code in _NEGATIVE:
            return self._number(_NEGATIVE[code])
        raise RemoteError("malformed", f"byte 0x{code:02x} starts no canonical value")

    def _number(self, size: _Size) -> int:
        layout, first, _ = size
        value: int = layout.unpack_from(self.data, self.at)[0]
        self.at += layout.size
        if value > first if first < 0 else value < first:
            raise RemoteError("malformed", f"{value} has a shorter form: bytes are not in canonical form")
        return value

    def _float(self) -> float:
        number: float = _FLOAT.unpack_from(self.data, self.at)[0]
        if number == 0.0 and self.data[self.at]:
            raise RemoteError("malformed", "-0.0 is 0.0 in canonical form")
        self.at += _FLOAT.size
        return number

    def _bytes(self, length: int) -> bytes:
        if self.at + length > len(self.data):
            raise RemoteError("malformed", f"{length} bytes announced, {len(self.data) - self.at} left")
        self.at += length
        return self.data[self.at - length : self.at]

    def _array(self, length: int, depth: int) -> Value:
        self._check_length(length)
        return self._values(length, depth + 1)

    def _map(self, length: int, depth: int) -> Value:
        self._check_length(length)
        found = self._values(2 * length, depth + 1)
        entries: dict[str, Value] = {}
        last: str | None = None
        for at in range(0, 2 * length, 2):
            key = found[at]
            if not isinstance(key, str) or (last is not None and key <= last):
                raise RemoteError(
                    "malformed", "map keys must be distinct strings in sorted order, as canonical form has"
                )
            entries[key] = found[at + 1]
            last = key
        return entries

    def _values(self, count: int, depth: int) -> list[Value]:
        """So many, one after the other. What there is most of is read here, without a call for each."""
        if count and depth > MAX_DEPTH:
            raise RemoteError("malformed", f"nested deeper than {MAX_DEPTH}")
        data, at = self.data, self.at
        found: list[Value] = []
        for _ in range(count):
            code = data[at]
            if code < 0x80:
                found.append(code)
                at += 1
            elif 0xA0 <= code < 0xC0 or (code == 0xC4 and at + 1 < len(data)):
                start, length = (at + 2, data[at + 1]) if code == 0xC4 else (at + 1, code & 31)
                at = start + length
                if at > len(data):
                    raise RemoteError("malformed", f"{length} bytes announced, {len(data) - start} left")
                found.append(data[start:at] if code == 0xC4 else data[start:at].decode())
            else:
                self.at = at
                found.append(self.read(depth))
                at = self.at
        self.at = at
        return found

    def _check_length(self, length: int) -> None:
        # Each element takes at least a byte: an announced length can never make us allocate more than came.
        if length > len(self.data) - self.at:
            raise RemoteError("malformed", f"{length} elements announced, {len(self.data) - self.at} bytes left")
        self.announced += length
        if self.announced > MAX_VALUES:
            raise RemoteError("malformed", f"a message of more than {MAX_VALUES} values")
