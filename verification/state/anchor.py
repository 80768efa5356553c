"""The run key's word on a stage's state at a version: what replays and joiners may begin from."""

from dataclasses import dataclass
from typing import ClassVar

from swarm.core.errors import RemoteError
from swarm.core.forms import Digest, StageNumber
from swarm.core.ids import PeerId, Version
from swarm.core.state.stage_chain import StageChain
from swarm.identity.signed_record import SignedRecord


@dataclass(frozen=True)
class Anchor(SignedRecord):
    """The digest of a stage's state at a version, and what is certified of that version."""

    DOMAIN: ClassVar[str] = "anchor"
    run_id: str
    stage: StageNumber
    version: Version
    name: Digest
    """Of the version; the state bears it too."""
    state_digest: Digest
    chain: StageChain

    @classmethod
    def of_chain(cls, chain: StageChain, state_digest: bytes) -> "Anchor":
        """Not signed yet."""
        return cls(chain.run_id, chain.stage, chain.version, chain.name, state_digest, chain)

    def check(self, *, run_id: str, run_key: PeerId) -> None:
        """Raises RemoteError unless the run key of this run signed it."""
        if (self.run_id, self.chain.run_key) != (run_id, run_key):
            raise RemoteError("anchor", f"anchor of run {self.run_id[:12]}, not {run_id[:12]}, or of another run key")
        if not self.is_signed_by(run_key):
            raise RemoteError("anchor", f"anchor of stage {self.stage} at {self.version} is not signed by the run key")

    def _check_fields(self) -> None:
        chain = self.chain
        if (self.run_id, self.stage, self.version, self.name) != (chain.run_id, chain.stage, chain.version, chain.name):
            raise RemoteError("malformed", f"anchor of version {self.version} holds the chain of another version")
