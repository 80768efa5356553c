"""Records that are signed, and checked by the signer's peer id."""

from dataclasses import dataclass

from swarm.core.ids import PeerId
from swarm.core.record import SignedValue
from swarm.identity.key import verify


@dataclass(frozen=True)
class SignedRecord(SignedValue):
    """Whose signature makes it count is the subclass's own."""

    def is_signed_by(self, peer_id: PeerId) -> bool:
        return verify(peer_id, self.signed_bytes(), self.signature)
