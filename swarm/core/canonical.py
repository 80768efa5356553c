"""Canonical bytes: the one sequence for a value that is hashed and signed.

A strict subset of MessagePack: None, bool, 64-bit integers, float64, str, bytes, list, and dict with
string keys in sorted order, each in its shortest form; zero has no sign. Equal values of a type give equal
bytes, and `unpack` accepts nothing that `pack` would not have written.
"""

import hashlib
from typing import Any, TypeAlias

import ormsgpack

from swarm.core.errors import RemoteError

Value: TypeAlias = (
    "None | bool | int | float | str | bytes | list[Value] | tuple[Value, ...] | dict[str, Value] | Packed"
)

MAX_VALUES = 1 << 20
"""In one message from a stranger: 8 MiB of empty lists would else take half a gigabyte, and seconds."""
_STRICT = (
    ormsgpack.OPT_SORT_KEYS
    | ormsgpack.OPT_PASSTHROUGH_DATACLASS
    | ormsgpack.OPT_PASSTHROUGH_DATETIME
    | ormsgpack.OPT_PASSTHROUGH_ENUM
    | ormsgpack.OPT_PASSTHROUGH_SUBCLASS
    | ormsgpack.OPT_PASSTHROUGH_UUID
)
"""What is no value is left to `_other`, which refuses it."""
_BASES: tuple[type, ...] = (str, bytes, int, float, list, tuple, dict)
_MINUS_ZERO = b"\xcb\x80" + bytes(7)


class Packed:
    """A value in its canonical bytes already: a large one that goes into many messages and digests is packed once.

    Stands for the value in what is packed; what is unpacked holds none.
    """

    __slots__ = ("data",)

    def __init__(self, value: Value) -> None:
        self.data = pack(value)


def pack(value: Value) -> bytes:
    """Canonical bytes of `value`. Raises TypeError for types outside the subset."""
    data = ormsgpack.packb(value, _other, _STRICT)
    # The bytes of -0.0 may also stand in a text or in bytes, which looking at the values leaves alone.
    return ormsgpack.packb(_without_minus_zero(value), _other, _STRICT) if _MINUS_ZERO in data else data


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
    if len(data) > MAX_VALUES and _has_too_many_values(data):
        raise RemoteError("malformed", f"a message of more than {MAX_VALUES} values")
    try:
        value: Value = ormsgpack.unpackb(data)
        is_canonical = pack(value) == data
    except (ValueError, TypeError) as error:  # TypeError: nested deeper than `pack` goes
        raise RemoteError("malformed", f"not canonical MessagePack: {error}") from error
    if not is_canonical:
        raise RemoteError("malformed", "not canonical: a longer form, keys out of order or twice, or -0.0")
    return value


def _other(value: Any) -> Any:
    """What stands for a value of a kind of its own, such as NumPy's float64."""
    if isinstance(value, Packed):
        return ormsgpack.Fragment(value.data)
    for base in _BASES:
        if isinstance(value, base):
            return base(value)
    raise TypeError(f"{type(value).__name__} has no canonical form")


def _without_minus_zero(value: Value) -> Value:
    if isinstance(value, float):
        return value or 0.0
    if isinstance(value, dict):
        return {key: _without_minus_zero(one) for key, one in value.items()}
    return [_without_minus_zero(one) for one in value] if isinstance(value, list | tuple) else value


_NUMBER_BYTES = {0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_LENGTH_BYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
"""By the code. The last two pairs are lists and maps; the others' length is of bytes."""


def _has_too_many_values(data: bytes | bytearray | memoryview) -> bool:
    """Whether its lists and maps announce them. Of bytes that are not MessagePack, anything; what follows a whole value
    is not looked at."""
    at = found = seen = 0
    while at < len(data) and seen <= found <= MAX_VALUES:
        code = data[at]
        at += 1
        seen += 1
        if 0x80 <= code < 0xA0:
            found += (code & 15) * (1 if code >= 0x90 else 2)
        elif 0xA0 <= code < 0xC0:
            at += code & 31
        elif code in _LENGTH_BYTES:
            length = int.from_bytes(data[at : at + _LENGTH_BYTES[code]], "big")
            at += _LENGTH_BYTES[code] + (length if code < 0xDC else 0)
            found += 0 if code < 0xDC else length * (1 if code < 0xDE else 2)
        else:
            at += _NUMBER_BYTES.get(code, 0)
    return found > MAX_VALUES
