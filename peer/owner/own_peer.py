"""One of a daemon's peers as its owner has it: from the daemon's start on, over all its sessions."""

from pathlib import Path
from typing import TYPE_CHECKING

from peer.machine.core_share import ComputeThreads
from peer.owner.limits import VolunteerSettings
from swarm.identity.key import Identity
from swarm.network.transport import Transport

if TYPE_CHECKING:  # torch takes seconds to import, and the daemon answers its owner before that
    from peer.directory.reachability import Reachability
    from peer.program.daemon import PeerDaemon


ENDED = "ended"
"""The last phase of a peer's."""


class OwnPeer:
    """Who it is, what it is to compute on, and what became of it."""

    def __init__(
        self, name: str, identity: Identity, volunteer: VolunteerSettings, folder: Path, threads: ComputeThreads
    ) -> None:
        """`name`: of its device, for the owner; empty where it is the only one. `folder`: of what is its own alone."""
        self.name = name
        self.identity = identity
        self.volunteer = volunteer
        self.folder = folder
        self.threads = threads
        self.phase, self.waits_for = "starting", ""
        """Until it has joined: starting, looking, joining; and for what. At its end: ended, and why."""
        self.daemon: PeerDaemon | None = None
        """Of the present session; None between two."""
        self.reachability: Reachability | None = None
        self.transport: Transport | None = None
        self._counted = (0, 0)
        self._uncounted = (0, 0)

    def attach(self, transport: Transport) -> None:
        """A session begins: its traffic counts from now on."""
        self.transport, self._counted = transport, (0, 0)

    def joins(self, daemon: "PeerDaemon", reachability: "Reachability") -> None:
        """The peer that lives now."""
        self.daemon, self.reachability = daemon, reachability

    def detach(self) -> None:
        """The session's transport is about to close, and its peer is gone."""
        self._count()
        self.transport = self.daemon = self.reachability = None

    def end(self, why: str) -> None:
        """There will be no other session."""
        self.phase, self.waits_for = ENDED, why

    @property
    def has_ended(self) -> bool:
        return self.phase == ENDED

    def new_traffic(self) -> tuple[int, int]:
        """Bytes sent and received since the last call."""
        self._count()
        new, self._uncounted = self._uncounted, (0, 0)
        return new

    def _count(self) -> None:
        counts = self.daemon.limited if self.daemon is not None else self.transport
        if counts is None:
            return
        total, before, waiting = counts.traffic(), self._counted, self._uncounted
        self._counted = total
        self._uncounted = (
            waiting[0] + max(0, total[0] - before[0]),
            waiting[1] + max(0, total[1] - before[1]),
        )
