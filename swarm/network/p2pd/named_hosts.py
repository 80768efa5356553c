"""Where each peer was to be dialled: p2pd keeps that to itself, and tells only whence the connection is that it has."""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from ipaddress import ip_address

from swarm.core.ids import PeerId
from swarm.core.kept import keep_newest
from swarm.network.addresses import resolved
from swarm.network.p2pd.settings import is_relayed

MOST_PEERS, MOST_OF_A_PEER = 1024, 8
"""Of whom something is kept: those named last."""


class NamedHosts:
    """Addresses and names of hosts, by peer."""

    def __init__(self, *, public_only: bool) -> None:
        """`public_only`: nobody is dialled past p2pd at another address on somebody's word (`elsewhere`)."""
        self._public_only = public_only
        self._named: OrderedDict[PeerId, tuple[str, ...]] = OrderedDict()

    def name(self, peer_id: PeerId, addresses: Sequence[str]) -> None:
        """TCP multiaddresses at which the peer is to be dialled."""
        hosts = [address.split("/")[2] for address in addresses if not is_relayed(address)]
        self._named[peer_id] = tuple(dict.fromkeys([*hosts, *self._named.pop(peer_id, ())]))[:MOST_OF_A_PEER]
        keep_newest(self._named, MOST_PEERS)

    async def of(self, peer_id: PeerId) -> list[str]:
        """The numeric addresses, those named last first."""
        found = await asyncio.gather(*map(resolved, self._named.get(peer_id, ())))
        return list(dict.fromkeys(host for hosts in found for host in hosts))

    async def elsewhere(self, peer_id: PeerId) -> list[str]:
        """Those of them that may be dialled past p2pd: no neighbour's, and none of this machine."""
        return [host for host in await self.of(peer_id) if not self._public_only or ip_address(host).is_global]
