"""A peer's admission on paper: signed by the run key, with the hash chain its audits are drawn by.

A peer has one chain in a run, named before it knows whose work it will be near: so its draws are its own, and none.
"""

from dataclasses import dataclass
from typing import ClassVar

from swarm.core.errors import RemoteError
from swarm.core.forms import Digest, StageNumber
from swarm.core.ids import PeerId
from swarm.identity.signed_record import SignedRecord


@dataclass(frozen=True)
class Ticket(SignedRecord):
    """The run key's word that a peer may serve a stage."""

    DOMAIN: ClassVar[str] = "ticket"
    run_id: str
    peer_id: PeerId
    stage: StageNumber
    chain_end: Digest
    """End of the peer's hash chain (verification/audit/draws.py)."""

    def check(self, *, run_id: str, run_key: PeerId) -> None:
        """Raises RemoteError unless the run key of this run signed it."""
        if self.run_id != run_id:
            raise RemoteError("ticket", f"ticket of run {self.run_id[:12]}, not {run_id[:12]}", self.peer_id)
        if not self.is_signed_by(run_key):
            raise RemoteError("ticket", f"the ticket of {self.peer_id} is not signed by the run key", self.peer_id)
