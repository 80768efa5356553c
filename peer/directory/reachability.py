"""How a daemon stays in touch: with its host after an outage, and with peers that it cannot be dialled by.

The host dials it back. Who cannot be dialled asks its router to forward its ports. Where that does not help it still
calls everybody else, and is called over the connections that it opened itself; for two such peers to reach each other,
the host may offer a relay.
"""

import asyncio
import contextlib
import hashlib
import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

from swarm.core.errors import RemoteError, SettingsError, TransientError
from swarm.core.ids import PeerId
from swarm.host_protocol import RELAY, RelayOffer, relay_topic
from swarm.log_format import printable
from swarm.network.addresses import is_dialled, is_numeric, knock, resolved, version_of
from swarm.network.directory.dht import DHTDirectory
from swarm.network.directory.dial_back import DialledBack
from swarm.network.directory.swarm_time import seconds_ahead, swarm_time
from swarm.network.p2pd.p2p import P2PTransport
from swarm.network.p2pd.relay_place import RelayPlace
from swarm.network.p2pd.settings import check_address, is_relayed
from swarm.network.router.forwarded import Forwarded
from swarm.network.router.port_mapper import PortMapper
from swarm.network.transport import Message

log = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
ASK_AGAIN_S = 600.0
"""A router's settings may change; and whenever the host was out of reach, so may everything."""
CLOCK_EVERY_S = 60.0
CLOCK_SET_S = 1.0
"""A clock that has gone so much faster or slower than time was set meanwhile, or the machine has slept."""
HOST_S = 5.0
OFFER_EVERY_S = 60.0
"""Whether its relay still carries bulk is asked so often."""
MAX_RELAYS_TRIED = 4
"""Of volunteers, at a look."""
MOST_RELAY_ADDRESSES = 4
"""Of a relay, by which this peer says that it is reached: its record has room for them, and for its own beside."""
MAX_CAUSE = 160
"""Characters of what is said of one address."""


class Reach(Enum):
    """How others reach this peer."""

    UNKNOWN = "not known yet"
    REACHABLE = "reachable"
    RELAYED = "relayed"
    OUTBOUND = "outbound only"


class Reachability:
    """What is known of it, and what is done for it."""

    def __init__(
        self,
        transport: P2PTransport,
        directory: DHTDirectory,
        host: PeerId,
        addresses: Sequence[str],
        *,
        mapper: PortMapper | None,
    ) -> None:
        """`mapper`: of the router, if it is to be asked."""
        self.reach = Reach.UNKNOWN
        self.why = "the host has not been asked yet"
        self._transport = transport
        self._directory = directory
        self._host = transport.host = host
        self._addresses = list(addresses)
        self._ask_at = 0.0
        self._clock_at = time.monotonic() + CLOCK_EVERY_S
        self._clock_ahead_s = time.time() - time.monotonic()
        self._relay: PeerId | None = None
        self._renew_at = 0.0
        self._offer_at = 0.0
        self._mapper = mapper
        self._forwarded_until = 0.0
        self._salt = secrets.token_bytes(16)
        """Of its order of volunteers' relays: one that others could know would be for sale, for some keys."""
        self._routers_word = ""
        """What came of asking it, to be said after that the host cannot, or can, dial this peer."""

    async def run(self) -> None:
        """Look again and again, for ever."""
        try:
            while True:
                before = self.reach
                with contextlib.suppress(TransientError, RemoteError):  # the host is away: what is known stands
                    await self._look()
                if self.reach is not before:
                    log.info("%s: %s", self.reach.value, self.why)
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            forwarded, self._transport.forwarded = self._transport.forwarded, None
            if forwarded is not None and self._mapper is not None:
                await self._mapper.end(list(forwarded.ports))

    async def _look(self) -> None:
        connected = await self._transport.connected_peers()
        if self._relay is not None and self._relay not in connected:
            self._relay, self._transport.relayed = None, ()
            self._is(Reach.OUTBOUND, "the connection to its relay broke")
        try:
            await self._ask_host(connected)
        except TransientError:  # it is away: what it said last stands
            if self._transport.can_be_dialled is False and self._relay is None:
                await self._take_place()
            raise
        if self._transport.can_be_dialled is False and (self._relay is None or time.monotonic() >= self._renew_at):
            await self._take_place()
        elif self._relay is not None and time.monotonic() >= self._offer_at:
            self._offer_at = time.monotonic() + OFFER_EVERY_S
            offer = await self._offer_of_host()
            if offer.peer_id == self._relay:
                self._transport.relay_carries_bulk = offer.carries_bulk

    async def _ask_host(self, connected: Sequence[PeerId]) -> None:
        """Be in touch with it, and from time to time be dialled back."""
        if self._host not in connected or not self._directory.num_neighbours:
            await self._redial()
        ahead_s = time.time() - time.monotonic()
        if time.monotonic() >= self._clock_at or abs(ahead_s - self._clock_ahead_s) > CLOCK_SET_S:
            self._clock_at, self._clock_ahead_s = time.monotonic() + CLOCK_EVERY_S, ahead_s
            await keep_the_hosts_time(self._transport, self._host)
        if time.monotonic() >= self._ask_at:
            told = await self._transport.ask_to_be_dialled(self._host)
            had, forwarded, routers_word = self._transport.forwarded, None, ""
            # Whoever had a port forwarded may be dialled because of that: it is asked for again before it ends.
            if self._mapper is not None and (had is not None or told.is_silent(4)):
                told, forwarded, routers_word = await through_router(self._transport, self._host, self._mapper, told)
            if forwarded is not None:
                self._forwarded_until = time.monotonic() + forwarded.lifetime_s
            elif had is not None and not told.is_silent(4) and time.monotonic() < self._forwarded_until:
                forwarded = had  # the router did not answer this time
            self._transport.forwarded, self._routers_word = forwarded, routers_word
            ask_again_s = ASK_AGAIN_S if forwarded is None else min(ASK_AGAIN_S, forwarded.lifetime_s / 2)
            self._transport.dialled_back = told
            self._ask_at = time.monotonic() + ask_again_s
            if told.answers:
                self._is(Reach.REACHABLE, f"the host dialled it back at {' and '.join(told.hosts)}{self._routers_word}")
                self._relay, self._transport.relayed = None, ()
            elif self._relay is None:
                self._is(Reach.OUTBOUND, f"the host cannot dial it at {' and '.join(told.hosts)}{self._routers_word}")

    async def _redial(self) -> None:
        """After an outage p2pd dials nobody by itself, and the directory's table may be empty."""
        failed = await dial_all(self._transport, self._host, self._addresses)
        answered = [address for address in self._addresses if address not in failed]
        if not answered:
            raise TransientError("the host does not answer")
        log.info("in touch with the host again")
        self._ask_at = 0.0
        await keep_the_hosts_time(self._transport, self._host)
        await self._directory.join(answered)

    async def _take_place(self) -> None:
        """At the host's relay or a volunteer's, or again there. Until the next look if all refuse."""
        refusals, silent = [], None
        offers = await self._offers_of_volunteers()
        try:
            offers.insert(0, await self._offer_of_host())
        except (TransientError, RemoteError) as error:
            silent = error
        for offer in offers:
            try:
                if offer.peer_id is None:
                    raise TransientError(offer.refusal)
                if not _dialled(offer):
                    raise TransientError(f"relay {offer.peer_id[-6:]!r} has no address that can be dialled")
                await self._transport.connect(offer.peer_id, _dialled(offer))
                place = await self._transport.take_place(offer.peer_id)
            except TransientError as error:
                refusals.append(printable(str(error))[:MAX_CAUSE])
            else:
                await self._take(offer, offer.peer_id, place)
                return
        if silent is not None:
            raise silent
        self._relay, self._transport.relayed = None, ()
        self._is(
            Reach.OUTBOUND, f"the host cannot dial it{self._routers_word}, and no relay takes it: {'; '.join(refusals)}"
        )

    async def _offer_of_host(self) -> RelayOffer:
        answer = await self._transport.call(self._host, RELAY, Message(), timeout_s=HOST_S, max_body_bytes=0)
        return RelayOffer.from_value(answer.meta)

    async def _offers_of_volunteers(self) -> list[RelayOffer]:
        """A few of those told of in the directory: the one it has a place at, then in an order of this peer's own."""
        offers = []
        with contextlib.suppress(TransientError):
            for told in (await self._directory.lookup(relay_topic(self._host))).values():
                with contextlib.suppress(RemoteError):
                    offer = RelayOffer.from_value(told)
                    if offer.peer_id not in (None, self._host, self._transport.peer_id):  # anybody tells of any relay
                        numeric = tuple(filter(is_numeric, offer.addresses))
                        offers.append(replace(offer, addresses=numeric, carries_bulk=True))  # the host's alone may not
        drawn = sorted(offers, key=lambda offer: (offer.peer_id != self._relay, self._draw(offer)))
        return drawn[:MAX_RELAYS_TRIED]

    def _draw(self, offer: RelayOffer) -> bytes:
        return hashlib.sha256(self._salt + str(offer.peer_id).encode()).digest()

    async def _take(self, offer: RelayOffer, relay: PeerId, place: RelayPlace) -> None:
        """Others are told no names (`addresses_in`)."""
        if relay != self._relay:  # else it is where it was: anybody can tell of it in the directory
            at = f"/p2p-circuit/p2p/{self._transport.peer_id}"
            host = await self._transport.host_of(relay)
            numeric = [number for address in _dialled(offer) for number in await _at_numbers(address, host)]
            self._transport.relayed = tuple(f"{number}{at}" for number in dict.fromkeys(numeric))[:MOST_RELAY_ADDRESSES]
        self._relay, self._transport.relay_carries_bulk = relay, offer.carries_bulk
        self._offer_at = time.monotonic() + OFFER_EVERY_S
        # By our own clock, for the relay's may differ; half of what is left in time for another try.
        self._renew_at = time.monotonic() + max(0.0, place.expires - time.time()) / 2
        self._is(Reach.RELAYED, f"through {relay}")

    def _is(self, reach: Reach, why: str) -> None:
        self.reach, self.why = reach, why


def _dialled(offer: RelayOffer) -> list[str]:
    """What is an address of its own, of all that a stranger says is one."""
    found = []
    for address in offer.addresses:
        with contextlib.suppress(SettingsError):
            check_address("address", address)
            if is_dialled(address) and not is_relayed(address):
                found.append(address)
    return found[:MOST_RELAY_ADDRESSES]


async def _at_numbers(address: str, host: str | None) -> list[str]:
    """The address with numbers in the place of its name, one of each version of IP: who has but one dials by that.

    `host`: the number that its peer is reached at.
    """
    if is_numeric(address):
        return [address]
    _, kind, name, *rest = address.split("/")
    found: list[str] = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(HOST_S):
            found = await resolved(name)
    numbers = {version_of(one): one for one in [*found, *([host] if host is not None else [])]}
    return [
        "/".join(["", f"ip{version}", one, *rest])
        for version, one in sorted(numbers.items())
        if kind in ("dns", f"dns{version}")
    ]


async def through_router(
    transport: P2PTransport, host: PeerId, mapper: PortMapper, told: DialledBack
) -> tuple[DialledBack, Forwarded | None, str]:
    """Have the router forward this peer's ports, and the host try them, where it did not get through, as it `told`.

    What that came to, what leads here now, and what is to be said of it. There may be another router before the host,
    which forwards nothing: then the host does not get through either. Raises as `P2PTransport.ask_to_be_dialled`.
    """
    ports = transport.ports()
    if not ports:
        return told, None, ""
    try:
        forwarded = await mapper.ask(ports)
    except TransientError as error:
        return told, None, f" ({error})"
    addresses = [*transport.addresses_at(forwarded), *transport.addresses_by(6)]
    told = await transport.ask_to_be_dialled(host, addresses)
    outside = next((one.host for one in told.at if one.answers and version_of(one.host) == 4), None)
    if outside is None:
        await mapper.end(ports)
        return told, None, f", nor at what its router, at {forwarded.outside}, forwards"
    return told, replace(forwarded, outside=outside), ", at a port that its router forwards"


async def keep_the_hosts_time(transport: P2PTransport, host: PeerId) -> None:
    """For the directory's records; if the host does not say, what is known of its clock stands."""
    try:
        swarm_time.set_by(*await seconds_ahead(transport, host, timeout_s=HOST_S))
    except (TransientError, RemoteError) as error:
        log.info("the host's clock: %s", error)


async def dial_all(transport: P2PTransport, host: PeerId, addresses: Sequence[str]) -> dict[str, str]:
    """Dial each address, all at once: those that failed, each with its cause."""

    async def dial(address: str) -> str:
        closed = await knock(address)
        if closed:
            return closed
        try:
            await transport.connect(host, [address])
        except TransientError as error:
            return str(error).removeprefix(f"{host}: ")[:MAX_CAUSE]
        return ""

    causes = await asyncio.gather(*(dial(address) for address in addresses))
    return {address: cause for address, cause in zip(addresses, causes, strict=True) if cause}
