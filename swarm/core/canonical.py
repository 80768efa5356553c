"""This is where values become the one sequence of bytes that is hashed and signed.

A strict subset of MessagePack: None, bool, 64-bit integers, float64, str, bytes, list, and dict with
string keys in sorted order, each in its shortest form. Equal values give equal bytes, and `unpack`
accepts nothing that `pack` would not have written.
"""

import hashlib
import struct
from typing import TypeAlias

import msgpack

from swarm.core.errors import RemoteError

Value: TypeAlias = "None | bool | int | float | str | bytes | list[Value] | tuple[Value, ...] | dict[str, Value]"

MAX_DEPTH = 16


def pack(value: Value) -> bytes:
    """Canonical bytes of `value`. Raises TypeError for types outside the subset."""
    try:
        packed: bytes = _packer.pack(_ordered(value, 0))
    except (OverflowError, ValueError) as error:
        raise TypeError(f"{error}: no canonical form") from error
    return packed


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


_SCALARS = frozenset({type(None), bool, int, float, str, bytes})
_packer = msgpack.Packer()


def _ordered(value: Value, depth: int) -> object:
    """The value as `msgpack` is to write it: the keys of each dict sorted."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if not isinstance(value, list | tuple | dict):
        raise TypeError(f"{type(value).__name__} has no canonical form")
    if depth == MAX_DEPTH and value:
        raise TypeError(f"nested deeper than {MAX_DEPTH}")
    inside = depth + 1
    if not isinstance(value, dict):
        return [item if type(item) in _SCALARS else _ordered(item, inside) for item in value]
    for key in value:
        if not isinstance(key, str):
            raise TypeError(f"key {key!r} is not a string")
    items = [(key, value[key]) for key in sorted(value)]
    return {key: item if type(item) in _SCALARS else _ordered(item, inside) for key, item in items}


_Size = tuple[struct.Struct, int]
"""Layout of a big-endian number, and the least number (the greatest, below zero) that takes so long a form."""


def _size(layout: str, least: int) -> _Size:
    return (struct.Struct(layout), least)


_POSITIVE = {0xCC: _size(">B", 128), 0xCD: _size(">H", 1 << 8), 0xCE: _size(">I", 1 << 16), 0xCF: _size(">Q", 1 << 32)}
_NEGATIVE = {
    0xD0: _size(">b", -33),
    0xD1: _size(">h", -(1 << 7) - 1),
    0xD2: _size(">i", -(1 << 15) - 1),
    0xD3: _size(">q", -(1 << 31) - 1),
}
_STR = {0xD9: _size(">B", 32), 0xDA: _size(">H", 1 << 8), 0xDB: _size(">I", 1 << 16)}
_BIN = {0xC4: _size(">B", 0), 0xC5: _size(">H", 1 << 8), 0xC6: _size(">I", 1 << 16)}
_ARRAY = {0xDC: _size(">H", 16), 0xDD: _size(">I", 1 << 16)}
_MAP = {0xDE: _size(">H", 16), 0xDF: _size(">I", 1 << 16)}
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

    def read(self, depth: int) -> Value:
        if depth > MAX_DEPTH:
            raise RemoteError("malformed", f"nested deeper than {MAX_DEPTH}")
        code = self.data[self.at]
        self.at += 1
        if code < 0x80:
            return code
        if code >= 0xE0:
            return code - 256
        if code < 0x90:
            return self._map(code & 15, depth)
        if code < 0xA0:
            return self._array(code & 15, depth)
        if code < 0xC0:
            return self._bytes(code & 31).decode()
        if code in _BIN:
            return self._bytes(self._number(_BIN[code]))
        if code in _POSITIVE:
            return self._number(_POSITIVE[code])
        if code in _CONSTANTS:
            return _CONSTANTS[code]
        if code == 0xCB:
            self.at += 8
            number: float = _FLOAT.unpack_from(self.data, self.at - 8)[0]
            return number
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
        layout, least = size
        value: int = layout.unpack_from(self.data, self.at)[0]
        self.at += layout.size
        if value > least if least < 0 else value < least:
            raise RemoteError("malformed", f"{value} has a shorter form: bytes are not in canonical form")
        return value

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
