"""What a home's router forwards to this machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address, ip_network

LIFETIME_S = 1800
"""Asked for; a router may give less, or forward until it is told to end."""


@dataclass(frozen=True)
class Forwarded:
    """Of TCP ports."""

    outside: str
    """The router's own address, towards the Internet or the next router."""
    inside: str
    """This machine's, as the router sees it."""
    ports: Mapping[int, int]
    """The router's, by this machine's."""
    lifetime_s: int

    def is_beside(self, host: str | None) -> bool:
        """Whether an address is one of the same home, from which the router's own ports lead nowhere."""
        if host is None or ":" in host:
            return False
        return ip_address(host) in ip_network(f"{self.inside}/24", strict=False)
