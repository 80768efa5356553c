"""An order of 0 to size - 1 whose every place is computed by itself, the same in every Python.

A Feistel network on the digits of a number in two bases, and again while it leads out of the range: Black and Rogaway,
"Ciphers with Arbitrary Finite Domains" (CT-RSA 2002).
"""

import hashlib
from math import isqrt

_ROUNDS = 6


def permuted(index: int, size: int, key: bytes) -> int:
    """Where the number `index` below `size` comes to stand."""
    if not 0 <= index < size:
        raise ValueError(f"{index} is not below {size}")
    high = isqrt(size - 1) + 1
    low = -(-size // high)
    while True:
        left, right = divmod(index, low)
        for number in range(_ROUNDS):
            if number % 2:
                right = (right + _mixed(key, number, left)) % low
            else:
                left = (left + _mixed(key, number, right)) % high
        index = left * low + right
        if index < size:
            return index


def _mixed(key: bytes, number: int, half: int) -> int:
    return int.from_bytes(hashlib.blake2b(b"%d/%d" % (number, half), digest_size=8, key=key).digest(), "big")
