"""What the peers of one daemon have together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from peer.directory.line import Line
from peer.owner.limits import VolunteerSettings
from peer.owner.permit import Permit
from peer.owner.room import Room
from peer.state.downloads import Downloads
from swarm.core.ids import PeerId


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Of their owner's leave and means, and of what came to this machine for any of them."""

    permit: Permit
    """To begin."""
    line: Line
    """Whose rates may be limited."""
    room: Room
    """Memory and disk."""
    downloads: Downloads
    """The run's files."""

    @classmethod
    def of(cls, volunteer: VolunteerSettings, peers: Sequence[PeerId]) -> Self:
        """`volunteer`: what the first of the peers is allowed; what is the daemon's is the same for all."""
        return cls(
            permit=Permit(),
            line=Line(upload_mbit=volunteer.upload_mbit, download_mbit=volunteer.download_mbit, num_peers=len(peers)),
            room=Room(
                volunteer.folder,
                memory_bytes=volunteer.memory_bytes,
                disk_bytes=volunteer.disk_bytes,
                num_p2pd=len(peers) + (1 if volunteer.relay_listen else 0),
            ),
            downloads=Downloads(peers),
        )

    def left(self, peer: PeerId) -> None:
        """The peer's session has ended: it has no place and no files any more."""
        self.room.leave(peer)
        self.downloads.leave(peer)

    def without_one(self) -> None:
        """One peer will never come back: its part of the line is the others'."""
        self.line.num_peers -= 1
