"""Chance that is fixed before a run and told bit by bit: a chain of values, each the hash of the next.

Whoever commits the end of a chain has chosen all of its values, and can neither change one nor hide which is which. Its
end is the value of version -1, and goes on before that: the value of -2 is the end, hashed.
"""

import hashlib
import math
from functools import lru_cache

from swarm.core.canonical import digest, signed_bytes
from swarm.core.errors import LocalError, RemoteError

SHORTEST_CHAIN, LONGEST_CHAIN = 1 << 12, 1 << 21
"""Versions that one chain lasts for. The longest takes a peer two seconds to make, and whoever checks a value of it for
the first time as long; it lasts for the longest run (`swarm.core.settings.MOST_STEPS`)."""
END = -1
"""The version whose value is a chain's end."""

_LINK = signed_bytes("draw-chain", bytes(32))[:-32]
"""What a value is prefixed with before it is hashed: a link is digest("draw-chain", value)."""


class HashChain:
    """A peer's or the host's own chance, fixed before the run: one value a version, each the hash of the next.

    Hashing value v v + 1 times gives the chain's end. A revealed value tells the earlier ones and none of the later.
    `seed` is secret and serves one chain only. One value in sqrt(length) is kept, the others are hashed again.
    """

    @classmethod
    def of_run(cls, seed: bytes, total_steps: int) -> "HashChain":
        """One that outlasts a run of so many steps, twice. If it is amended to more, there is another."""
        length = SHORTEST_CHAIN
        while length <= min(2 * total_steps, LONGEST_CHAIN - 1):
            length *= 2
        return cls(seed, length)

    def __init__(self, seed: bytes, length: int) -> None:
        assert len(seed) == 32, f"a seed of {len(seed)} bytes, not 32"
        assert length >= 1, f"a chain of {length} values"
        self.length = length
        self._spacing = math.isqrt(length - 1) + 1
        value = digest("draw-chain-seed", seed)
        kept = {length - 1: value}
        for version in reversed(range(length - 1)):
            value = hashlib.sha256(_LINK + value).digest()
            if version % self._spacing == self._spacing - 1:
                kept[version] = value
        self._kept = kept
        self.end = _links(value, 1)
        """32 bytes, committed before any value is revealed."""

    @property
    def secret(self) -> bytes:
        """32 bytes committed to on admission and never shown: from the value of a version that no run comes to."""
        return digest("bias-secret", self.reveal(self.length - 1))

    def reveal(self, version: int) -> bytes:
        """The value of `version`, 32 bytes. Raises LocalError past the end of the chain."""
        if not version < self.length:
            raise LocalError(f"hash chain of {self.length} versions has no value for version {version}")
        if version < 0:
            return earlier(self.end, END, version)
        after = min(version - version % self._spacing + self._spacing, self.length) - 1
        return _links(self._kept[after], after - version)


def earlier(value: bytes, of: int, version: int) -> bytes:
    """The value of a `version` up to `of` on a chain, from the value of that."""
    assert version <= of, f"the value of version {of} does not tell that of {version}"
    return _links(value, of - version)


def is_on(known: tuple[int, bytes], version: int, value: bytes) -> bool:
    """Whether a chain has this value of `version`, given a version and its value that it is known to have."""
    at, held = known
    if len(value) != 32 or max(version, at) - min(version, at) > LONGEST_CHAIN + 1:
        return False
    return _links(value, version - at) == held if at <= version else _links(held, at - version) == value


def check_reveal(
    end: bytes,
    version: int,
    value: bytes,
    *,
    known: tuple[int, bytes] | None = None,
    length: int = LONGEST_CHAIN,
) -> None:
    """Raises RemoteError("draw") unless `value` is the one of `version` on the chain that ends in `end`.

    `known` is a version and its value, checked before: only the links between are hashed, one a version.
    """
    if not 0 <= version < length:
        raise RemoteError("draw", f"reveal of version {version} on a chain of {length}")
    if len(value) != 32:
        raise RemoteError("draw", f"reveal of {len(value)} bytes, not 32")
    if not is_on(known or (END, end), version, value):
        raise RemoteError("draw", f"reveal of version {version} is not on the chain that ends in {end.hex()[:16]}")


@lru_cache(maxsize=1 << 10)
def _links(value: bytes, num: int) -> bytes:
    """Every member of a stage tells the same of the host's chain: it is hashed once."""
    for _ in range(num):
        value = hashlib.sha256(_LINK + value).digest()
    return value
