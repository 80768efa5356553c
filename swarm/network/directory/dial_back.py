"""How a peer learns whether others can dial it: whoever it asks dials it back, over IPv4 and over IPv6.

p2pd has AutoNAT for that, but tells nobody what came of it, needs a quarter of a minute, and dials no private address.
A peer is connected over one version of IP. For the other it brings the asked one's own word, a moment old, on where it
was seen (`swarm.network.punch.onlooker`): nobody has an address dialled that it does not use itself.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from swarm.core.directory.address_rates import AddressRates
from swarm.core.errors import TransientError
from swarm.core.forms import Integer, Text
from swarm.core.ids import PeerId
from swarm.core.layout import AtMost
from swarm.core.record import Record
from swarm.network.addresses import MAX_PORT, knock, multiaddress, version_of
from swarm.network.directory.swarm_time import swarm_time
from swarm.network.p2pd.control import ControlClient, ControlError
from swarm.network.places import network_of
from swarm.network.punch.seen import MAX_HOST_CHARACTERS, Judge, Seen
from swarm.network.transport import Message

DIAL_BACK = "dial_back"
"""A `DialBackRequest` -> a `DialledBack`: whether something accepts connections at one of the caller's ports."""
DIAL_S = 3.0
MAX_PORTS = 2
"""Of each version of IP."""
MAX_AT_ONCE, MAX_AT_ONCE_EACH = 8, 4
"""Addresses; a caller with both versions of IP has two. The latter of one small network: who never answers keeps nobody
elsewhere from hearing whether it can be dialled."""
AT_ONCE_OF_A_NETWORK, PER_S_OF_A_NETWORK = 64.0, 1.0
"""Calls: behind a provider's router many share an address, whose ports nobody is to look through from here."""
_VERSIONS = 2

Ports = Annotated[tuple[Annotated[int, Integer(high=MAX_PORT)], ...], AtMost(MAX_PORTS)]


@dataclass(frozen=True)
class DialBackRequest(Record, kind="dial-back request"):
    """Where the caller listens."""

    ports4: Ports
    ports6: Ports
    seen: Annotated[tuple[Seen, ...], AtMost(_VERSIONS - 1)]
    """The asked one's word on where the caller is seen by the version of IP that it is not connected over."""

    def ports(self, version: int) -> tuple[int, ...]:
        return self.ports6 if version == 6 else self.ports4


@dataclass(frozen=True)
class DialledAt(Record, kind="dialled-back address"):
    """What being dialled at one address came to."""

    host: Annotated[str, Text(MAX_HOST_CHARACTERS)]
    """The IP address from which the other peer sees this one."""
    answers: bool


@dataclass(frozen=True)
class DialledBack(Record, kind="dial-back"):
    """What being dialled back came to."""

    at: Annotated[tuple[DialledAt, ...], AtMost(_VERSIONS)]
    """The first is where the connection that was asked by comes from."""

    @property
    def answers(self) -> bool:
        """At one of them at least."""
        return any(one.answers for one in self.at)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Where it answers, or all at which it does not."""
        return tuple(one.host for one in self.at if one.answers) or tuple(one.host for one in self.at)

    def is_silent(self, version: int) -> bool:
        """Whether it was dialled by this version of IP, and did not answer."""
        tried = [one.answers for one in self.at if version_of(one.host) == version]
        return bool(tried) and not any(tried)


class DialBack:
    """The side that dials: the caller's own addresses alone, and only so many callers at a time."""

    def __init__(self, control: ControlClient, me: PeerId) -> None:
        self._control = control
        self._judge = Judge(me, lambda _: False, public_only=False)
        """Its own word is enough."""
        self._under_way = Counter[str]()
        """By network."""
        self._rates = AddressRates(calls_per_s=PER_S_OF_A_NETWORK, burst=AT_ONCE_OF_A_NETWORK)

    async def answer(self, sender: PeerId, request: Message) -> Message:
        asked = DialBackRequest.from_value(request.meta)
        try:
            host = await self._control.remote_host(sender)
        except ControlError as error:
            raise TransientError(f"its p2pd does not answer: {error}") from error
        if host is None:
            raise TransientError("this peer is reached through a relay alone, and cannot be dialled back")
        hosts = {version_of(host): host}
        for word in asked.seen:
            seen = self._judge.endpoint([word], sender, now=swarm_time.now()).host
            hosts.setdefault(version_of(seen), seen)
        networks = list(map(network_of, hosts.values()))
        if self._under_way.total() + len(networks) > MAX_AT_ONCE or any(
            self._under_way[network] >= MAX_AT_ONCE_EACH for network in networks
        ):
            raise TransientError(f"busy: {self._under_way.total()} peers are being dialled back already")
        wait_s = max(self._rates.take(network, now=asyncio.get_running_loop().time()) for network in networks)
        if wait_s:
            raise TransientError(f"this network was dialled back too often lately; ask again in {wait_s:.0f} s")
        self._under_way.update(networks)
        try:
            at = await asyncio.gather(*(_dialled(one, asked.ports(version)) for version, one in hosts.items()))
            return Message(DialledBack(tuple(at)).to_value())
        finally:
            self._under_way -= Counter(networks)  # and forgets a network that has none


async def _dialled(host: str, ports: tuple[int, ...]) -> DialledAt:
    tried = [multiaddress(host, port) for port in ports if port]
    failed = await asyncio.gather(*map(partial(knock, timeout_s=DIAL_S), tried))
    return DialledAt(host, "" in failed)
