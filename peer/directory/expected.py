"""Whose calls have most of a peer's places: members of its stage, who answers beside it, and the host.

All others share a part, by address: keys cost nothing, and a thousand of them must not crowd out a round.
"""

from peer.stage.events import PeersChanged, VersionTurned
from swarm.core.ids import PeerId
from swarm.core.state.stage_chain import StageChain
from swarm.network.transport import Transport


class ExpectedCallers:
    """Tells the transport whenever they change."""

    def __init__(self, transport: Transport, host: PeerId, chain: StageChain) -> None:
        self._transport = transport
        self._host = host
        self._members = chain.members
        self._live: dict[int, frozenset[PeerId]] = {}
        """By stage."""
        self._tell()

    def turned(self, event: VersionTurned) -> None:
        if event.chain.members != self._members:
            self._members = event.chain.members
            self._tell()

    def changed(self, event: PeersChanged) -> None:
        self._live[event.stage] = event.peers
        self._tell()

    def _tell(self) -> None:
        self._transport.expect({self._host, *self._members}.union(*self._live.values()))
