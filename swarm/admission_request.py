"""This is where a request for a ticket is on paper, for doors that do not know by themselves who knocks."""

from dataclasses import dataclass
from typing import ClassVar

from swarm.core.canonical import Value
from swarm.core.errors import RemoteError
from swarm.core.fields import stage_item
from swarm.core.ids import PeerId
from swarm.signed_record import SignedRecord, opened

MAX_REQUEST_BYTES = 4096
MAX_CLOCK_SKEW_S = 300.0


@dataclass(frozen=True)
class AdmissionRequest(SignedRecord):
    """A peer asks for its ticket. It is good once: the next one must be of a later time."""

    DOMAIN: ClassVar[str] = "admission-request"
    run_id: str
    peer_id: PeerId
    stage: int | None
    """The one wished for; None: where the run needs a peer most."""
    chain_end: bytes
    """End of the peer's hash chain (verification/draws.py)."""
    voucher: str
    asked_at_ms: int
    """Milliseconds since 1970 by the peer's clock."""

    def signed_value(self) -> Value:
        return {
            "run_id": self.run_id,
            "peer_id": self.peer_id,
            "stage": self.stage,
            "chain_end": self.chain_end,
            "voucher": self.voucher,
            "asked_at_ms": self.asked_at_ms,
        }

    def check(self, *, run_id: str, now: float) -> None:
        """Raises RemoteError unless the peer signed it for this run, just now."""
        if self.run_id != run_id:
            raise RemoteError("protocol", f"a request to run {self.run_id[:12]}, not {run_id[:12]}", self.peer_id)
        if not self.is_signed_by(self.peer_id):
            raise RemoteError("signature", f"the admission request is not signed by {self.peer_id}", self.peer_id)
        late_s = now - self.asked_at_ms / 1000
        if abs(late_s) > MAX_CLOCK_SKEW_S:
            raise RemoteError(
                "replay", f"the request is {late_s:.0f} s old by this clock; set yours, and ask anew", self.peer_id
            )

    @classmethod
    def from_value(cls, value: Value) -> "AdmissionRequest":
        """Raises RemoteError("malformed")."""
        outer, fields = opened("admission request", value)
        made = cls(
            fields.text("run_id"),
            fields.peer("peer_id"),
            fields.maybe("stage", stage_item),
            fields.octets("chain_end", length=32),
            fields.text("voucher", max_length=128),
            fields.integer("asked_at_ms", high=1 << 53),
            signature=outer.octets("signature", length=64),
        )
        fields.done()
        outer.done()
        return made
