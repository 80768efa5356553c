"""A member's word, under its signature, on which state its stage has at a version.

Replicas are exact, so whoever states another digest than the certified results lead to is broken or lies, and a few
chunks prove it: the root that it signs commits it to every one.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from swarm.checkpoint.state import CHUNK_BYTES
from swarm.core.errors import RemoteError
from swarm.core.forms import Digest, Integer, StageNumber
from swarm.core.ids import PeerId, Version
from swarm.identity.signed_record import SignedRecord

MAX_CHUNKS = 1 << 20
"""Of a state: their hashes are 32 MiB."""
MAX_STATED = 4
"""Of those who state something else, the host shows so many at once."""


@dataclass(frozen=True, kw_only=True)
class StateStatement(SignedRecord):
    """A member's word for a state."""

    DOMAIN: ClassVar[str] = "state"
    run_id: str
    stage: StageNumber
    version: Version
    name: Digest
    """Of the version."""
    peer_id: PeerId
    state_digest: Digest
    """Root over the chunks' hashes."""
    total_bytes: Annotated[int, Integer(low=1, high=MAX_CHUNKS * CHUNK_BYTES)]

    def check(self, *, run_id: str) -> None:
        """Raises RemoteError unless the peer signed it in this run."""
        if self.run_id != run_id:
            raise RemoteError("protocol", f"state of run {self.run_id[:12]}, not {run_id[:12]}", self.peer_id)
        if not self.is_signed_by(self.peer_id):
            raise RemoteError("signature", f"the state of version {self.version} is not signed by it", self.peer_id)
