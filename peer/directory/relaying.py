"""A volunteer whom others can dial carries those who cannot be dialled, as far as its owner allows.

Told in the directory, so that hidden peers find it while the host is down too. Like the host's, the relay is a p2pd of
its own that is counted and ended; what it carries comes in and goes out, and counts twice in the owner's month.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from swarm.core.errors import LocalError, RemoteError, TransientError
from swarm.core.ids import PeerId
from swarm.host_protocol import RelayOffer, relay_topic
from swarm.network.addresses import multiaddress, ports_of, version_of
from swarm.network.identity_file import load_or_create_identity
from swarm.network.loop import happened
from swarm.network.p2pd.p2p import P2PTransport
from swarm.network.p2pd.relay import Relay
from swarm.network.transport import Directory

log = logging.getLogger(__name__)

COUNT_EVERY_S = 1.0
LOOK_EVERY_S = 10.0
TOLD_FOR_S = 120.0
"""A relay that is gone is looked for no longer than that."""


class VolunteerRelay:
    """Relays while this peer can be dialled and something is left of the budget."""

    def __init__(
        self,
        key: Path,
        listen: Sequence[str],
        transport: P2PTransport,
        directory: Directory,
        host: PeerId,
        *,
        left_bytes: Callable[[], int],
        carried: Callable[[int], None],
    ) -> None:
        """`key`: the file of the relay's own identity. `left_bytes` of the budget; `carried` is told what came on top.

        `host` dials back, to see whether the relay can be reached.
        """
        self._key = key
        self._listen = listen
        self._transport = transport
        self._directory = directory
        self._host = host
        self._left_bytes = left_bytes
        self._carried = carried

    async def run(self) -> None:
        """For ever."""
        while True:
            if self._transport.can_be_dialled and self._left_bytes() > 0:
                try:
                    await self._relay()
                except (LocalError, RemoteError, TransientError) as error:
                    log.info("relays for nobody: %s", error)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _relay(self) -> None:
        """Until the budget is used up, or others cannot dial this peer any more."""
        identity = load_or_create_identity(self._key)
        relay = await Relay.start(identity, self._listen, self._left_bytes(), self._transport)
        try:
            told = await self._transport.ask_to_be_dialled(self._host, relay.addresses)
            if not told.answers:
                places = " and ".join(told.hosts)
                raise TransientError(f"the host cannot dial the relay at {places}: forward its port too")
            log.info("relays for peers that cannot be dialled, at %s", " and ".join(told.hosts))
            at = [
                multiaddress(host, port) for host in told.hosts for port in ports_of(relay.addresses, version_of(host))
            ]
            addresses = tuple(f"{address}/p2p/{relay.peer_id}" for address in at)
            await self._count(relay, RelayOffer(peer_id=relay.peer_id, addresses=addresses))
        finally:
            await relay.stop()
        log.info("relays no more")

    async def _count(self, relay: Relay, offer: RelayOffer) -> None:
        loop = asyncio.get_running_loop()
        before, tell_at = 0, loop.time()
        while self._left_bytes() > 0 and self._transport.can_be_dialled:
            if loop.time() >= tell_at:
                tell_at = loop.time() + TOLD_FOR_S / 2
                await self._directory.publish(relay_topic(self._host), offer.to_value(), ttl_s=TOLD_FOR_S)
            if await happened(relay.ended, within_s=COUNT_EVERY_S):
                raise LocalError("the relay's p2pd has ended")
            now = await relay.carried_bytes()
            self._carried(now - before)
            before = now
