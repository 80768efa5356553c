"""Untrue accusations, counted: who brings three in a hundred versions is kept out."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from swarm.core.ids import PeerId, Version

STRIKES_TO_QUARANTINE = 3
STRIKE_VERSIONS = 100


@dataclass(frozen=True)
class Strikes:
    """The last strikes of each accuser: one for each piece of evidence that the run key's own replay contradicted."""

    held: Mapping[PeerId, tuple[tuple[Version, bytes], ...]] = field(default_factory=dict)
    """(version of the accuser's stage, digest of the evidence), sorted; no more than it takes."""

    def after(self, accuser: PeerId, version: Version, evidence_digest: bytes) -> "Strikes":
        """With one more; the same evidence counts once."""
        before = self.held.get(accuser, ())
        if self.has(accuser, evidence_digest):
            return self
        newest = sorted([*before, (version, evidence_digest)])[-STRIKES_TO_QUARANTINE:]
        return replace(self, held={**self.held, accuser: tuple(newest)})

    def has(self, accuser: PeerId, evidence_digest: bytes) -> bool:
        """Whether it has one for this evidence, of those that count."""
        return any(found == evidence_digest for _, found in self.held.get(accuser, ()))

    def are_too_many(self, accuser: PeerId, *, pardoned_at: int = -1) -> bool:
        """Whether the accuser is to be kept out; what is not younger than its pardon counts no more."""
        unpaid = [version for version, _ in self.held.get(accuser, ()) if version > pardoned_at]
        return len(unpaid) >= STRIKES_TO_QUARANTINE and unpaid[-1] - unpaid[0] < STRIKE_VERSIONS
