"""Canonical bytes: the one sequence for a value that is hashed and signed.

A strict subset of MessagePack: None, bool, 64-bit integers, float64, str, bytes, list, and dict with
string keys in sorted order, each in its shortest form; zero has no sign. Equal values of a type give equal
bytes, and `unpack` accepts nothing that `pack` would not have written.
"""

import hashlib
import struct
from functools import lru_cache
from typing import TypeAlias

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
    out = bytearray()
    _pack(value, out, 0)
    return bytes(out)


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


def _pack(value: Value, out: bytearray, depth: int) -> None:
    # What messages are made of most comes first: a round packs ten thousand values.
    if depth > MAX_DEPTH:
        raise TypeError(f"nested deeper than {MAX_DEPTH}")
    if isinstance(value, str):
        out += _packed_name(value) if len(value) <= _NAME_CHARACTERS else _packed_text(value)
    elif type(value) is int:
        _pack_int(value, out)
    elif isinstance(value, bytes):
        if len(value) < len(_SHORT_BIN):
            out += _SHORT_BIN[len(value)]
        else:
            _pack_number(len(value), out, _BIN)
        out += value
    elif isinstance(value, (list, tuple)):
        _pack_head(len(value), out, (0x90, 16), _ARRAY)
        for item in value:
            _pack(item, out, depth + 1)
    elif isinstance(value, dict):
        _pack_head(len(value), out, (0x80, 16), _MAP)
        for key in sorted(value):
            if not isinstance(key, str):
                raise TypeError(f"key {key!r} is not a string")
            out += _packed_name(key) if len(key) <= _NAME_CHARACTERS else _packed_text(key)
            _pack(value[key], out, depth + 1)
    else:
        _pack_scalar(value, out)


def _pack_scalar(value: Value, out: bytearray) -> None:
    if value is None:
        out.append(0xC0)
    elif value is True or value is False:
        out.append(0xC3 if value else 0xC2)
    elif isinstance(value, int):  # an enumeration's
        _pack_int(value, out)
    elif isinstance(value, float):
        out.append(0xCB)
        out += _FLOAT.pack(value or 0.0)  # also for -0.0
    elif isinstance(value, Packed):
        out += value.data
    else:
        raise TypeError(f"{type(value).__name__} has no canonical form")


def _pack_int(value: int, out: bytearray) -> None:
    if -32 <= value < 128:
        out.append(value & 0xFF)
    else:
        _pack_number(value, out, _POSITIVE if value > 0 else _NEGATIVE)


def _packed_text(text: str) -> bytes:
    data, out = text.encode(), bytearray()
    _pack_head(len(data), out, (0xA0, 32), _STR)
    return bytes(out) + data


_packed_name = lru_cache(maxsize=4096)(_packed_text)
"""The same fields and peers are named in every message."""


def _pack_head(length: int, out: bytearray, short: tuple[int, int], sizes: "_Sizes") -> None:
    if length < short[1]:
        out.append(short[0] | length)
    else:
        _pack_number(length, out, sizes)


def _pack_number(value: int, out: bytearray, sizes: "_Sizes") -> None:
    for code, (layout, _, last) in sizes.items():
        if value >= last if last < 0 else value <= last:
            out.append(code)
            out += layout.pack(value)
            return
    raise TypeError(f"{value} does not fit")


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
        return [self.read(depth + 1) for _ in range(length)]

    def _map(self, length: int, depth: int) -> Value:
        self._check_length(length)
        entries: dict[str, Value] = {}
        last: str | None = None
        for _ in range(length):
            key = self.read(depth + 1)
            if not isinstance(key, str) or (last is not None and key <= last):
                raise RemoteError(
                    "malformed", "map keys must be distinct strings in sorted order, as canonical form has"
                )
            entries[key] = self.read(depth + 1)
            last = key
        return entries

    def _check_length(self, length: int) -> None:
        # Each element takes at least a byte: an announced length can never make us allocate more than came.
        if length > len(self.data) - self.at:
            raise RemoteError("malformed", f"{length} elements announced, {len(self.data) - self.at} bytes left")
        self.announced += length
        if self.announced > MAX_VALUES:
            raise RemoteError("malformed", f"a message of more than {MAX_VALUES} values")
