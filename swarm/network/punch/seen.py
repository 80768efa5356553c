"""Where a peer's connection was seen from: an onlooker's signed word, and when it is enough to dial there.

A peer that is told an address by another must not become a weapon against a third (as SYN packets to whoever is
named would make it): it dials only an address from which the other's own connection was seen a moment ago, by the
run's host or by two members that agree, and ports near the one that was seen.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Annotated, ClassVar, NamedTuple

from swarm.core.errors import RemoteError
from swarm.core.forms import Integer, Text
from swarm.core.ids import PeerId
from swarm.core.record import SignedValue
from swarm.identity.key import verify
from swarm.network.places import caller_of

MAX_HOST_CHARACTERS = 64
FRESH_S = 60.0
"""A word is worth nothing after that; nor is one from so far in the future."""
ENOUGH_MEMBERS = 2
"""Of those who are not the host."""


class Endpoint(NamedTuple):
    """Where a TCP connection comes from."""

    host: str
    port: int


@dataclass(frozen=True)
class Seen(SignedValue):
    """One onlooker's word."""

    DOMAIN: ClassVar[str] = "seen-at"
    onlooker: PeerId
    peer_id: PeerId
    """Whose connection it was."""
    host: Annotated[str, Text(MAX_HOST_CHARACTERS)]
    port: Annotated[int, Integer(low=1, high=65535)]
    at_ms: Annotated[int, Integer()]
    """Swarm time."""

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.host, self.port)


@dataclass(frozen=True)
class Judge:
    """Whose words count here."""

    host: PeerId | None
    """The run's; None while none is known."""
    is_member: Callable[[PeerId], bool]
    public_only: bool = True
    """Dial no private, loopback or other special address on another's word. Off in tests on one machine."""

    def endpoint(self, words: Sequence[Seen], owner: PeerId, *, now: float) -> Endpoint:
        """Where to dial `owner`, by these onlookers of one connection each from one of its ports.

        By the first word that counts. Raises RemoteError("unseen") when they are not enough, old, false or differ in
        the address.
        """
        believed: dict[PeerId, Endpoint] = {}
        for word in words:
            if word.peer_id != owner or word.onlooker == owner:
                raise RemoteError("unseen", f"a word on {word.peer_id}, not by another on {owner}", owner)
            if abs(now - word.at_ms / 1000) > FRESH_S:
                raise RemoteError("unseen", f"seen {now - word.at_ms / 1000:.0f} s ago", owner)
            if not verify(word.onlooker, word.signed_bytes(), word.signature):
                raise RemoteError("unseen", f"a word that {word.onlooker} did not sign", owner)
            if word.onlooker == self.host or self.is_member(word.onlooker):
                believed.setdefault(word.onlooker, word.endpoint)
        if self.host not in believed and len(believed) < ENOUGH_MEMBERS:
            raise RemoteError("unseen", f"neither the host nor {ENOUGH_MEMBERS} members have seen it there", owner)
        if len({caller_of(word.host) for word in words}) > 1:
            raise RemoteError("unseen", "its onlookers differ", owner)
        endpoint = next(iter(believed.values()))
        address = _address(endpoint.host)
        if address is None or address.is_multicast or (self.public_only and not _is_public(address)):
            raise RemoteError("unseen", f"{endpoint.host!r} is no address to dial on another's word", owner)
        return endpoint


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None


_GLOBAL_UNICAST = ip_network("2000::/3")
"""All that the Internet routes of IPv6; a router may lead the rest into the network that it stands in."""


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    """Whether it is a machine's on the Internet, by its own number and by no IPv4 number within it."""
    if isinstance(address, IPv4Address):
        return address.is_global
    return address.is_global and address in _GLOBAL_UNICAST and address.sixtofour is None and address.teredo is None
