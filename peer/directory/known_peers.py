"""The peers that a daemon has met, kept so that it finds the swarm when the seeds are down."""

import contextlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from swarm.core.errors import TransientError
from swarm.core.ids import PeerId
from swarm.disk.durable_lines import replace_lines
from swarm.identity.key import is_peer_id
from swarm.network.directory.dht import DHTDirectory

log = logging.getLogger(__name__)

MOST_PEERS = 32
MOST_ADDRESSES = 4
MAX_ADDRESS_CHARACTERS = 300
MET_AT_ONCE = 4
"""Of them, asked in one go."""


class KnownPeers:
    """Addresses of the peers met last, in a file. What it holds are hints: the directory's records are signed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._addresses = _load(path)
        self._next = 0

    def remember(self, addresses: Mapping[PeerId, Sequence[str]]) -> None:
        """These peers answered; the newest are kept."""
        addresses = {peer: found for peer, found in addresses.items() if found}
        merged = {peer: kept for peer, kept in self._addresses.items() if peer not in addresses}
        merged |= {peer: list(found[:MOST_ADDRESSES]) for peer, found in addresses.items()}
        merged = dict(list(merged.items())[-MOST_PEERS:])
        if merged != self._addresses:
            self._addresses = merged
            with contextlib.suppress(OSError):  # only hints: tried again at the next change
                replace_lines(self._path, [json.dumps(merged, indent=1)])

    async def meet(self, directory: DHTDirectory) -> int:
        """Join the directory through some of them, others each time; how many answered."""
        peers = list(self._addresses)
        if not peers:
            return 0
        chosen = [peers[(self._next + i) % len(peers)] for i in range(min(MET_AT_ONCE, len(peers)))]
        self._next += len(chosen)
        addresses = [_with_peer(address, peer) for peer in chosen for address in self._addresses[peer]]
        with contextlib.suppress(TransientError):
            return await directory.join(addresses)
        return 0


def _with_peer(address: str, peer: PeerId) -> str:
    return f"{address.partition('/p2p/')[0]}/p2p/{peer}"


def _load(path: Path) -> dict[PeerId, list[str]]:
    try:
        read = json.loads(path.read_text())
        return {
            PeerId(peer): [str(address)[:MAX_ADDRESS_CHARACTERS] for address in addresses[:MOST_ADDRESSES]]
            for peer, addresses in list(read.items())[:MOST_PEERS]
            if is_peer_id(peer)
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.warning("%s: %s; it is made anew", path, error)
        return {}
