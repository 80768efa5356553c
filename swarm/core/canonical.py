"""This is where values become the one sequence of bytes that is hashed and signed.

A strict subset of MessagePack: None, bool, 64-bit integers, float64, str, bytes, list, and dict with
string keys in sorted order, each in its shortest form. Equal values give equal bytes, and `unpack`
accepts nothing that `pack` would not have written.
"""

import hashlib
import struct
from typing import TypeAlias

from swarm.core.errors import RemoteError

Value: TypeAlias = "None | bool | int | float | str | bytes | list[Value] | tuple[Value, ...] | dict[str, Value]"

MAX_DEPTH = 16


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
    if pack(value) != reader.data:
        raise RemoteError("malformed", "bytes are not in canonical form")
    return value


def _pack(value: Value, out: bytearray, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise TypeError(f"nested deeper than {MAX_DEPTH}")
    if value is None:
        out.append(0xC0)
    elif value is True or value is False:
        out.append(0xC3 if value else 0xC2)
    elif isinstance(value, int):
        _pack_int(value, out)
    elif isinstance(value, float):
        out += struct.pack(">Bd", 0xCB, value)
    elif isinstance(value, str):
        data = value.encode()
        _pack_length(len(data), out, fix=(0xA0, 32), sizes=((0xD9, ">B"), (0xDA, ">H"), (0xDB, ">I")))
        out += data
    elif isinstance(value, bytes):
        _pack_length(len(value), out, fix=None, sizes=((0xC4, ">B"), (0xC5, ">H"), (0xC6, ">I")))
        out += value
    elif isinstance(value, list | tuple):
        _pack_length(len(value), out, fix=(0x90, 16), sizes=((0xDC, ">H"), (0xDD, ">I")))
        for item in value:
            _pack(item, out, depth + 1)
    elif isinstance(value, dict):
        _pack_length(len(value), out, fix=(0x80, 16), sizes=((0xDE, ">H"), (0xDF, ">I")))
        for key in sorted(value):
            if not isinstance(key, str):
                raise TypeError(f"key {key!r} is not a string")
            _pack(key, out, depth + 1)
            _pack(value[key], out, depth + 1)
    else:
        raise TypeError(f"{type(value).__name__} has no canonical form")


def _pack_int(value: int, out: bytearray) -> None:
    if 0 <= value < 128:
        out.append(value)
    elif -32 <= value < 0:
        out += struct.pack(">b", value)
    else:
        codes = (
            ((0xCC, ">B"), (0xCD, ">H"), (0xCE, ">I"), (0xCF, ">Q"))
            if value > 0
            else ((0xD0, ">b"), (0xD1, ">h"), (0xD2, ">i"), (0xD3, ">q"))
        )
        for code, layout in codes:
            try:
                packed = struct.pack(layout, value)
            except struct.error:
                continue
            out.append(code)
            out += packed
            return
        raise TypeError(f"{value} does not fit 64 bits")


def _pack_length(
    length: int, out: bytearray, *, fix: tuple[int, int] | None, sizes: tuple[tuple[int, str], ...]
) -> None:
    if fix is not None and length < fix[1]:
        out.append(fix[0] | length)
        return
    for code, layout in sizes:
        if length < 256 ** struct.calcsize(layout):
            out.append(code)
            out += struct.pack(layout, length)
            return
    raise TypeError(f"length {length} does not fit")


_FIXED = {
    0xCC: ">B",
    0xCD: ">H",
    0xCE: ">I",
    0xCF: ">Q",
    0xD0: ">b",
    0xD1: ">h",
    0xD2: ">i",
    0xD3: ">q",
    0xCB: ">d",
}
_STR = {0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
_BIN = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I"}
_ARRAY = {0xDC: ">H", 0xDD: ">I"}
_MAP = {0xDE: ">H", 0xDF: ">I"}


class _Reader:
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
        if code in (0xC0, 0xC2, 0xC3):
            return {0xC0: None, 0xC2: False, 0xC3: True}[code]
        if code in _FIXED:
            return self._number(_FIXED[code])
        if code in _STR:
            return self._bytes(int(self._number(_STR[code]))).decode()
        if code in _BIN:
            return self._bytes(int(self._number(_BIN[code])))
        if code in _ARRAY:
            return self._array(int(self._number(_ARRAY[code])), depth)
        if code in _MAP:
            return self._map(int(self._number(_MAP[code])), depth)
        raise RemoteError("malformed", f"byte 0x{code:02x} starts no canonical value")

    def _number(self, layout: str) -> int | float:
        value: int | float = struct.unpack_from(layout, self.data, self.at)[0]
        self.at += struct.calcsize(layout)
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
        for _ in range(length):
            key = self.read(depth + 1)
            if not isinstance(key, str) or key in entries:
                raise RemoteError("malformed", "map keys must be distinct strings")
            entries[key] = self.read(depth + 1)
        return entries

    def _check_length(self, length: int) -> None:
        # Each element takes at least a byte: an announced length can never make us allocate more than came.
        if length > len(self.data) - self.at:
            raise RemoteError("malformed", f"{length} elements announced, {len(self.data) - self.at} bytes left")
