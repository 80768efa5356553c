"""This is where the run key says which state a stage has at a version: what replays and joiners may begin from."""

from dataclasses import dataclass
from typing import ClassVar

from swarm.core.canonical import Value
from swarm.core.errors import RemoteError
from swarm.core.ids import PeerId, StageIndex, Version
from swarm.core.stage_chain import StageChain
from swarm.signed_record import SignedRecord, opened


@dataclass(frozen=True)
class Anchor(SignedRecord):
    """The digest of a stage's state at a version, and what is certified of that version."""

    DOMAIN: ClassVar[str] = "anchor"
    run_id: str
    stage: StageIndex
    version: Version
    name: bytes
    """Of the version; the state bears it too."""
    state_digest: bytes
    chain: StageChain

    @classmethod
    def of_chain(cls, chain: StageChain, state_digest: bytes) -> "Anchor":
        """Not signed yet."""
        return cls(chain.run_id, chain.stage, chain.version, chain.name, state_digest, chain)

    def signed_value(self) -> Value:
        return {
            "run_id": self.run_id,
            "stage": self.stage,
            "version": self.version,
            "name": self.name,
            "state_digest": self.state_digest,
            "chain": self.chain.to_value(),
        }

    def check(self, *, run_id: str, run_key: PeerId) -> None:
        """Raises RemoteError unless the run key of this run signed it."""
        if (self.run_id, self.chain.run_key) != (run_id, run_key):
            raise RemoteError("anchor", f"anchor of run {self.run_id[:12]}, not {run_id[:12]}, or of another run key")
        if not self.is_signed_by(run_key):
            raise RemoteError("anchor", f"anchor of stage {self.stage} at {self.version} is not signed by the run key")

    @classmethod
    def from_value(cls, value: Value) -> "Anchor":
        """Raises RemoteError("malformed")."""
        outer, fields = opened("anchor", value)
        made = cls(
            fields.text("run_id"),
            StageIndex(fields.integer("stage", high=1 << 16)),
            Version(fields.integer("version")),
            fields.octets("name", length=32),
            fields.octets("state_digest", length=32),
            StageChain.from_value(fields.message("chain")),
            signature=outer.octets("signature", length=64),
        )
        fields.done()
        outer.done()
        chain = made.chain
        if (made.run_id, made.stage, made.version, made.name) != (
            chain.run_id,
            chain.stage,
            chain.version,
            chain.name,
        ):
            raise RemoteError("malformed", f"anchor of version {made.version} holds the chain of another version")
        return made
