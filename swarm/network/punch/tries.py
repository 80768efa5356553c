"""Which ports are dialled in which try, and how many tries anybody may cause.

A router that keeps one mapping a port (RFC 5382 calls it endpoint-independent) is met where its peer's onlooker saw it.
A symmetric one makes a new mapping for each destination; many count up, so the next ones are those after the one seen.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence

from swarm.core.ids import PeerId
from swarm.core.kept import keep_newest
from swarm.network.punch.seen import Endpoint

PORTS = 3
"""Local ports of each side in a try at mappings that stand: each with each, so nine streams at most."""
NEAR = 6
"""Ports dialled from one local port where mappings move."""
TRIES = {6: [(6, "stands"), (6, "stands")], 4: [(4, "stands"), (4, "moves"), (4, "moves")]}
"""By version of IP: what is supposed of the routers' mappings, try after try. One that is known to move is not tried as
if it stood. By IPv6 routers map nothing, they only keep out what nobody inside has called."""
_MOST_OF_A_PEER = 20
_MOST_OF_ALL = 240
STRANGERS_SHARE = 4
"""Those who are not expected together cause a fourth of all tries: keys are to be had for nothing."""
_WITHIN_S = 60.0
_MOST_PEERS = 1024
_MAX_PORT = 65535


def moves(seen: Sequence[int]) -> bool:
    """Whether connections from one local port were seen at several, by onlookers asked one after the other."""
    return len(set(seen)) > 1


def to_dial(endpoints: Sequence[Endpoint], *, near: bool) -> list[Endpoint]:
    """Where each local port dials, in order.

    Near by: the one seen comes second, not last or first. Two routers that both count up meet on the first dials of
    both sides, each making its next mapping. One that counts up meets one that stands on its second dial, whose
    mapping is the second next, and that is in the list too.
    """
    if not near:
        return list(endpoints)
    host, port = endpoints[0]
    return [Endpoint(host, port + step) for step in (1, 0, *range(2, NEAR)) if port + step <= _MAX_PORT]


class Limits:
    """Tries that peers have caused here within a minute."""

    def __init__(self) -> None:
        self._of_peer: OrderedDict[PeerId, deque[float]] = OrderedDict()
        self._of_strangers: deque[float] = deque()
        self._of_all: deque[float] = deque()

    def take(self, peer_id: PeerId, *, is_stranger: bool, now: float) -> bool:
        """Whether one more may be; it counts then."""
        of_peer = self._of_peer.setdefault(peer_id, deque())
        self._of_peer.move_to_end(peer_id)
        keep_newest(self._of_peer, _MOST_PEERS)
        for times in (of_peer, self._of_strangers, self._of_all):
            while times and times[0] < now - _WITHIN_S:
                times.popleft()
        if len(of_peer) >= _MOST_OF_A_PEER or len(self._of_all) >= _MOST_OF_ALL:
            return False
        if is_stranger:
            if len(self._of_strangers) >= _MOST_OF_ALL // STRANGERS_SHARE:
                return False
            self._of_strangers.append(now)
        of_peer.append(now)
        self._of_all.append(now)
        return True
