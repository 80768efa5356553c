"""Honest messages, spoilt: one place changed, or several, in their values or in their bytes."""

import random
from collections.abc import Callable

from swarm.core.canonical import Value, pack, unpack

MAX_BYTES = 1 << 26
_NUMBERS = (0, 1, -1, 2, 63, 64, 65, 255, 256, 1 << 16, 1 << 20, (1 << 20) + 1, 1 << 31, 1 << 32, (1 << 63) - 1)
_HUGE = (1 << 63, (1 << 64) - 1, -(1 << 63), -(1 << 31))
_FLOATS = (0.0, -0.0, 1.0, -1.0, 5e-324, 1e308, float("nan"), float("inf"), float("-inf"))
_TEXTS = ("", "x", "\0", "é" * 70, "\U0001f600", "x" * 65, "x" * 300, "12D3KooW", "-" * 70_000, "fp32", "train")
_BOMBS = (
    b"\x91" * 40,  # a deep nest
    b"\xdd\xff\xff\xff\xff",  # a list of 4 Gi elements
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xcf" + b"\xff" * 8,
    b"\xcb\x7f\xf8\0\0\0\0\0\1",  # another NaN
    b"\xc7\0\0",  # an extension, of which there are none
)


def spoilt(sample: bytes, rng: random.Random) -> bytes:
    """A message like the sample, a canonical value; now and then nothing like it."""
    chance = rng.random()
    if chance < 0.02:
        return rng.randbytes(rng.randrange(64))
    if chance < 0.15:
        return spoilt_bytes(sample, rng)
    value = odd_value(rng) if chance < 0.18 else unpack(sample, max_bytes=MAX_BYTES)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        value = spoilt_value(value, rng)
    try:
        data = pack(value)
    except TypeError:  # nested too deep to be packed
        return spoilt_bytes(sample, rng)
    return spoilt_bytes(data, rng) if chance > 0.97 else data


def spoilt_value(value: Value, rng: random.Random) -> Value:
    """The value with one place in it changed."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        return {**value, key: spoilt_value(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [*value[:at], spoilt_value(value[at], rng), *value[at + 1 :]]
    if rng.random() < 0.15:
        return odd_value(rng)
    return _CHANGES[type(value)](value, rng)


def odd_value(rng: random.Random, depth: int = 0) -> Value:
    """Any value; small, but for a few long ones."""
    kind = rng.randrange(10 if depth < 3 else 7)
    if kind >= 7 and rng.random() < 0.02:
        return [rng.choice((0, None, b""))] * rng.choice((100, 5000, 70_000))
    match kind:
        case 0:
            return rng.choice((None, True, False))
        case 1 | 2:
            return rng.choice((*_NUMBERS, *_HUGE, rng.getrandbits(rng.randrange(1, 63))))
        case 3:
            return rng.choice(_FLOATS)
        case 4:
            return rng.choice(_TEXTS)
        case 5 | 6:
            return rng.randbytes(rng.choice((0, 1, 31, 32, 33, 63, 64, 65)))
        case 7:
            return {rng.choice(("a", "value", "view", "stage", "")): odd_value(rng, depth + 1) for _ in range(3)}
        case 8:
            return [odd_value(rng, depth + 1) for _ in range(rng.randrange(7))]
        case _:
            nested: Value = odd_value(rng, depth + 1)
            for _ in range(rng.randrange(20)):
                nested = [nested]
            return nested


def spoilt_bytes(data: bytes, rng: random.Random) -> bytes:
    """The bytes with some flipped, cut out, put in or repeated."""
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at, more = rng.randrange(len(made) + 1), rng.randrange(len(made) + 1)
        match rng.randrange(7):
            case 0 | 1 if made:
                made[at % len(made)] ^= 1 << rng.randrange(8)
            case 2:
                del made[at:]
            case 3:
                made += rng.randbytes(rng.randrange(1, 40))
            case 4:
                made[at:at] = rng.choice(_BOMBS)
            case 5:
                made[at:at] = made[more : more + rng.randrange(64)]
            case _:
                del made[at : at + rng.randrange(1, 9)]
    return bytes(made)


def _spoilt_map(value: dict[str, Value], rng: random.Random) -> Value:
    made = dict(value)
    keys = list(made)
    match rng.randrange(4):
        case 0 if keys:
            del made[rng.choice(keys)]
        case 1 if keys:
            made[rng.choice(("extra", "", "x" * 300))] = made.pop(rng.choice(keys))
        case 2 if len(keys) > 1:
            one, other = rng.sample(keys, 2)
            made[one], made[other] = made[other], made[one]
        case _:
            made[rng.choice(("extra", "value", "signature", "a"))] = odd_value(rng)
    return made


def _spoilt_list(value: list[Value], rng: random.Random) -> Value:
    made = list(value)
    at, other = rng.randrange(len(made) + 1), rng.randrange(len(made) + 1)
    match rng.randrange(7):
        case 0:
            del made[at : at + 1]
        case 1:
            made[at:at] = made[other : other + 1]
        case 2:
            made.reverse()
        case 3:
            made.insert(at, odd_value(rng))
        case 4:
            return made * rng.choice((2, 70))
        case 5:
            rng.shuffle(made)
        case _:
            return []
    return made


def _spoilt_integer(value: int, rng: random.Random) -> Value:
    near = (value + 1, value - 1, 2 * value, -value, float(value), str(value), value > 0, rng.choice(_NUMBERS))
    made = rng.choice((*near, rng.choice(_HUGE)))
    return made if not isinstance(made, int) or -(1 << 63) <= made < 1 << 64 else 0


def _spoilt_text(value: str, rng: random.Random) -> Value:
    if rng.random() < 0.3:
        return value.encode()
    at = rng.randrange(len(value) + 1)
    return rng.choice((value[:at], value + "x", value[:at] + "\0" + value[at + 1 :], value[::-1], rng.choice(_TEXTS)))


def _spoilt_octets(value: bytes, rng: random.Random) -> Value:
    if rng.random() < 0.2:
        return rng.choice((bytes(len(value)), b"", value.hex(), value * 2, list(value[:8])))
    return spoilt_bytes(value, rng)


_CHANGES: dict[type, Callable[..., Value]] = {
    dict: _spoilt_map,
    list: _spoilt_list,
    int: _spoilt_integer,
    str: _spoilt_text,
    bytes: _spoilt_octets,
    float: lambda value, rng: rng.choice((*_FLOATS, -value, value * 1e300, int(value) if abs(value) < 1e9 else 0)),
    bool: lambda value, rng: rng.choice((not value, None, int(value), odd_value(rng))),
    type(None): lambda value, rng: odd_value(rng),
}
