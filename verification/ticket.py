"""This is where a peer's admission is on paper: signed by the run key, with the hash chain its audits are drawn by.

A peer has one chain in a run, named before it knows whose work it will be near: so its draws are its own, and none.
"""

from dataclasses import dataclass
from typing import ClassVar

from swarm.core.canonical import Value
from swarm.core.errors import RemoteError
from swarm.core.ids import PeerId, StageIndex
from swarm.signed_record import SignedRecord, opened


@dataclass(frozen=True)
class Ticket(SignedRecord):
    """The run key's word that a peer may serve a stage."""

    DOMAIN: ClassVar[str] = "ticket"
    run_id: str
    peer_id: PeerId
    stage: StageIndex
    chain_end: bytes
    """End of the peer's hash chain (verification/draws.py)."""

    def signed_value(self) -> Value:
        return {
            "run_id": self.run_id,
            "peer_id": self.peer_id,
            "stage": self.stage,
            "chain_end": self.chain_end,
        }

    def check(self, *, run_id: str, run_key: PeerId) -> None:
        """Raises RemoteError unless the run key of this run signed it."""
        if self.run_id != run_id:
            raise RemoteError("ticket", f"ticket of run {self.run_id[:12]}, not {run_id[:12]}", self.peer_id)
        if not self.is_signed_by(run_key):
            raise RemoteError("ticket", f"the ticket of {self.peer_id} is not signed by the run key", self.peer_id)

    @classmethod
    def from_value(cls, value: Value) -> "Ticket":
        """Raises RemoteError("malformed")."""
        outer, fields = opened("ticket", value)
        made = cls(
            fields.text("run_id"),
            fields.peer("peer_id"),
            StageIndex(fields.integer("stage", high=1 << 16)),
            fields.octets("chain_end", length=32),
            signature=outer.octets("signature", length=64),
        )
        fields.done()
        outer.done()
        return made
