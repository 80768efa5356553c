"""Sessions that were offered to peers: what a connection begins with, for whom it is, and until when.

There are few of them, and whoever has asked for the most loses one first.
"""

import secrets
from dataclasses import dataclass

from swarm.core.ids import PeerId
from swarm.network.bulk.sealed_socket import SECRET_BYTES
from swarm.network.places import Places, network_of

SESSION_BYTES = 16


@dataclass
class Session:
    """An offer that was made."""

    peer_id: PeerId
    secret: bytes
    ends_at: float
    purpose: str


class Sessions:
    """At most so many, each of one peer and for one purpose."""

    def __init__(self, most: int) -> None:
        self._sessions: dict[bytes, Session] = {}
        self._places: Places[bytes] = Places(most)
        """By the address that the offer was asked for from."""

    def offer(
        self, peer_id: PeerId, host: str | None, *, now: float, valid_s: float, purpose: str = ""
    ) -> tuple[bytes, bytes]:
        """A session and its secret, for one peer, seen at this address; its earlier ones for this purpose end.

        When there are too many, one ends of those from the address that has asked for the most.
        """
        for session in [
            known
            for known, of in self._sessions.items()
            if (of.peer_id, of.purpose) == (peer_id, purpose) or of.ends_at < now
        ]:
            self._end(session)
        session, secret = secrets.token_bytes(SESSION_BYTES), secrets.token_bytes(SECRET_BYTES)
        self._sessions[session] = Session(peer_id, secret, now + valid_s, purpose)
        lost = self._places.take(session, network_of(host))
        if lost is not None:
            self._end(lost)
        return session, secret

    def valid(self, session: bytes, *, now: float) -> Session | None:
        """None for what was not offered, or is over."""
        known = self._sessions.get(session)
        return known if known is not None and known.ends_at >= now else None

    def use(self, session: bytes, *, until: float) -> None:
        """It is valid, and lasts until then; others of the same address are given up before it."""
        self._places.use(session)
        self._sessions[session].ends_at = until

    def _end(self, session: bytes) -> None:
        self._sessions.pop(session, None)
        self._places.leave(session)
