"""This is where a member says which state its stage has at a version, under its signature.

Replicas are exact, so whoever states another digest than the certified results lead to is broken or lies, and a few
chunks prove it: the root that it signs commits it to every one.
"""

from dataclasses import dataclass
from typing import ClassVar

from swarm.checkpoint.state import CHUNK_BYTES
from swarm.core.canonical import Value
from swarm.core.errors import RemoteError
from swarm.core.ids import PeerId, StageIndex, Version
from swarm.signed_record import SignedRecord, opened

MAX_CHUNKS = 1 << 20
"""Of a state: their hashes are 32 MiB."""
MAX_STATED = 4
"""Of those who state something else, the host shows so many at once."""


@dataclass(frozen=True, kw_only=True)
class StateStatement(SignedRecord):
    """A member's word for a state."""

    DOMAIN: ClassVar[str] = "state"
    run_id: str
    stage: StageIndex
    version: Version
    name: bytes
    """Of the version."""
    peer_id: PeerId
    state_digest: bytes
    """Root over the chunks' hashes."""
    total_bytes: int

    def signed_value(self) -> Value:
        return {
            "run_id": self.run_id,
            "stage": self.stage,
            "version": self.version,
            "name": self.name,
            "peer_id": self.peer_id,
            "state_digest": self.state_digest,
            "total_bytes": self.total_bytes,
        }

    def check(self, *, run_id: str) -> None:
        """Raises RemoteError unless the peer signed it in this run."""
        if self.run_id != run_id:
            raise RemoteError("protocol", f"state of run {self.run_id[:12]}, not {run_id[:12]}", self.peer_id)
        if not self.is_signed_by(self.peer_id):
            raise RemoteError("signature", f"the state of version {self.version} is not signed by it", self.peer_id)

    @classmethod
    def from_value(cls, value: Value) -> "StateStatement":
        """Raises RemoteError("malformed")."""
        outer, fields = opened("state statement", value)
        made = cls(
            run_id=fields.text("run_id"),
            stage=StageIndex(fields.integer("stage", high=1 << 16)),
            version=Version(fields.integer("version")),
            name=fields.octets("name", length=32),
            peer_id=fields.peer("peer_id"),
            state_digest=fields.octets("state_digest", length=32),
            total_bytes=fields.integer("total_bytes", low=1, high=MAX_CHUNKS * CHUNK_BYTES),
            signature=outer.octets("signature", length=64),
        )
        fields.done()
        outer.done()
        return made
