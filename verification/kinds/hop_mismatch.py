"""A signed hop, laid beside all that it is replayed from: what it names as its parents, and weights.

The weights are rebuilt from a state that the run key vouches for and the certified results since, up to the version
that the header says; the birth record says in which era of the run.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from swarm.core.canonical import Value
from swarm.core.errors import RemoteError
from swarm.core.fields import Fields, integer_item, value_or_none
from swarm.core.ids import PeerId, Version
from swarm.manifest.signed_run import SignedRun
from verification.audit.evidence import MAX_BLOBS, Bytes, Evidence, Kind, check_head
from verification.pipeline.hop_claim import HopClaim
from verification.state.past import MAX_RESULTS, Past

NUM_BODIES = 4
"""Of a hop claim."""


@dataclass(frozen=True, kw_only=True)
class HopMismatch:
    """What a replay of one hop needs."""

    KIND: ClassVar[Kind] = "hop_mismatch"
    claim: HopClaim
    past: Past | None = None
    """Up to the version that the claim's header names; None before a jury, whose members hold it."""
    state_chunks: tuple[Bytes, ...] = ()
    """Of the state at the past's beginning."""
    bodies: tuple[tuple[Bytes, ...], ...] = ()
    """Of each result of the past, its encoded parts; empty ones for parts without contributors."""

    @property
    def accused(self) -> PeerId:
        return self.claim.peer_id

    @property
    def numeric_class(self) -> str:
        """By the word of the accused."""
        return self.claim.header.numeric_class

    @property
    def versions(self) -> tuple[int, int]:
        """The oldest version that a replay needs, and the one it stands at."""
        version = int(self.claim.header.version)
        return version, version

    def without_past(self) -> "HopMismatch":
        """The case as it goes before a jury: each juror holds the stage's past itself."""
        return HopMismatch(claim=self.claim)

    def to_evidence(self, run: SignedRun) -> Evidence:
        blobs: list[Bytes] = [*self.state_chunks]
        for bodies in self.bodies:
            blobs += bodies
        blobs += self.claim.bodies
        facts: Value = {
            "claim": self.claim.to_value(),
            "past": value_or_none(self.past),
            "num_chunks": len(self.state_chunks),
            "num_bodies": [len(bodies) for bodies in self.bodies],
        }
        return Evidence(
            kind=self.KIND,
            accused=self.accused,
            stage=self.claim.header.stage,
            version=Version(int(self.claim.birth.step)),
            run=run,
            facts=facts,
            blobs=tuple(blobs),
        )

    @classmethod
    def from_evidence(cls, evidence: Evidence) -> "HopMismatch":
        """Raises RemoteError if it is malformed."""
        fields = Fields("hop mismatch", evidence.facts)
        claim, past = fields.message("claim"), fields.maybe("past", Past.from_value)
        num_chunks = fields.integer("num_chunks", high=MAX_BLOBS)
        num_bodies = fields.items("num_bodies", integer_item, max_items=MAX_RESULTS)
        fields.done()
        wanted = num_chunks + sum(num_bodies) + NUM_BODIES
        num_results = len(past.results) if past is not None else 0
        if len(evidence.blobs) != wanted or len(num_bodies) != num_results or (past is None and num_chunks):
            raise RemoteError("malformed", f"{len(evidence.blobs)} blobs where the facts name {wanted}")
        blobs = iter(evidence.blobs)
        chunks = _next(blobs, num_chunks)
        bodies = tuple(_next(blobs, count) for count in num_bodies)
        made = cls(
            claim=HopClaim.of_value(claim, _next(blobs, NUM_BODIES)),
            past=past,
            state_chunks=chunks,
            bodies=bodies,
        )
        header, version = made.claim.header, Version(int(made.claim.birth.step))
        check_head(evidence, cls.KIND, accused=made.accused, stage=header.stage, version=version)
        return made


def _next(blobs: Iterator[Bytes], count: int) -> tuple[Bytes, ...]:
    return tuple(islice(blobs, count))
