"""Places of which there are few, shared among whoever asks: who holds the most gives one up first.

A stranger makes as many keys and connections as it likes, but not as many addresses. So what is held before anybody has
proved to be somebody is counted by address, and taking it all costs addresses, not connections.
"""

from collections import Counter
from collections.abc import Hashable
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

_NET4, _NET6 = 8, 64
"""Bits of an address that who has one may choose: none of IPv4 but for a small network's, half of IPv6."""


class Places(Generic[K]):
    """At most `most` places, each held under a key for somebody."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[K, str] = {}
        """By key, for whom; what was last used, last."""
        self._of: Counter[str] = Counter()
        """How many each holds; none of nobody's."""

    def __contains__(self, key: K) -> bool:
        return key in self._held

    def __len__(self) -> int:
        return len(self._held)

    def take(self, key: K, who: str) -> K | None:
        """A place under `key`; whose place is lost for it: the one least lately used of who holds the most.

        That may be the new one's owner. None while there are places.
        """
        assert key not in self._held
        self._held[key] = who
        self._of[who] += 1
        if len(self._held) <= self._most:
            return None
        greatest = max(self._of.values())
        lost = next(held for held, of in self._held.items() if self._of[of] == greatest)
        self.leave(lost)
        return lost

    def leave(self, key: K) -> None:
        """The place is free, if it was held."""
        who = self._held.pop(key, None)
        if who is not None:
            self._of[who] -= 1
            if not self._of[who]:
                del self._of[who]

    def use(self, key: K) -> None:
        """It is used: those of the same holder that are not are given up before it."""
        self._held[key] = self._held.pop(key)

    def of(self, who: str) -> list[K]:
        """The keys it holds, the one least lately used first."""
        return [key for key, of in self._held.items() if of == who] if who in self._of else []


def caller_of(host: str | None) -> str:
    """Whose calls are counted together: an address of IPv4, a /64 of IPv6."""
    address = _address(host)
    return network_of(host) if address is not None and address.version == 6 else str(address or host or "")


def network_of(host: str | None) -> str:
    """Who is taken for one at this address: a /24 of IPv4, a /64 of IPv6; everybody of no known address together."""
    address = _address(host)
    if address is None:
        return ""
    kept = address.max_prefixlen - (_NET4 if address.version == 4 else _NET6)
    return f"{int(address) >> (address.max_prefixlen - kept)}/{kept}"


def _address(host: str | None) -> IPv4Address | IPv6Address | None:
    """One of IPv4 where a socket of both versions names it as IPv6 does (::ffff:5.0.0.1): all of them are one /64."""
    try:
        address = ip_address(host or "")
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address
