"""A peer's admission on paper: signed by the run key, with the hash chain its draws come from.

A peer has one chain in a run, named before it knows whose work it will be near: so its draws are its own, and none. An
amendment of the run begins another, for the steps to come may be more.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from swarm.core.errors import RemoteError
from swarm.core.forms import Digest, StageNumber
from swarm.core.ids import PeerId
from swarm.core.record import SignedValue

Verify: TypeAlias = Callable[[PeerId, bytes, bytes], bool]
"""Whether the signature (last) is the peer's over the data; pure."""


@dataclass(frozen=True)
class Ticket(SignedValue):
    """The run key's word that a peer may serve a stage."""

    DOMAIN: ClassVar[str] = "ticket"
    run_id: str
    peer_id: PeerId
    stage: StageNumber
    chain_end: Digest
    """End of the peer's hash chain (`swarm.core.audit.hash_chain`)."""
    amendments: int = 0
    """Of the run, that were in force."""

    def check(self, *, run_id: str, run_key: PeerId, amendments: int, verify: Verify) -> None:
        """Raises RemoteError unless the run key of this run signed it since its last amendment."""
        if self.run_id != run_id:
            raise RemoteError("ticket", f"ticket of run {self.run_id[:12]}, not {run_id[:12]}", self.peer_id)
        if self.amendments != amendments:
            raise RemoteError("ticket", f"a ticket under {self.amendments} amendments, not {amendments}", self.peer_id)
        if not verify(run_key, self.signed_bytes(), self.signature):
            raise RemoteError("ticket", f"the ticket of {self.peer_id} is not signed by the run key", self.peer_id)
