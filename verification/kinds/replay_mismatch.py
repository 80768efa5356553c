"""A contribution, laid beside all that it is replayed from: weights, papers, activations.

The accused's signed contribution names the digests of everything that it was made of, and by the name of the version
its round starts from also the weights: they are rebuilt from a state that the run key vouches for and the certified
results since. With `parts` the whole contribution is accused; without, what it sent on of one microbatch in it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import ClassVar

from swarm.core.canonical import Value
from swarm.core.errors import RemoteError
from swarm.core.fields import Fields, integer_item, value_or_none
from swarm.core.ids import PeerId, Version
from swarm.core.round.contribution import MAX_WORK, Contribution
from swarm.manifest.signed_run import SignedRun
from verification.audit.evidence import MAX_BLOBS, Bytes, Evidence, Kind, check_head
from verification.round.papers import Exhibit, Papers
from verification.state.past import MAX_RESULTS, Past

NUM_BODIES = 5
"""Of an exhibit."""


@dataclass(frozen=True, kw_only=True)
class ReplayMismatch:
    """What a replay of a contribution needs."""

    KIND: ClassVar[Kind] = "replay_mismatch"
    contribution: Contribution
    parts: tuple[Bytes, ...]
    """Its encoded parts, empty where nobody has one any more; none if one microbatch's activations are wrong."""
    exhibits: tuple[Exhibit, ...]
    """Of all its work, in order; of one microbatch if there are no parts."""
    past: Past | None = None
    """Up to the version that the contribution's round starts from; None before a jury, whose members hold it."""
    state_chunks: tuple[Bytes, ...] = ()
    """Of the state at the past's beginning."""
    bodies: tuple[tuple[Bytes, ...], ...] = ()
    """Of each result of the past, its encoded parts; empty ones for parts without contributors."""

    @property
    def accused(self) -> PeerId:
        return self.contribution.peer_id

    @property
    def numeric_class(self) -> str:
        """By the word of the accused; empty in a run of one stage, where nobody signs headers, and without work."""
        for exhibit in self.exhibits:
            header = exhibit.papers.forward_header or exhibit.papers.gradient_out
            if header is not None:
                return header.numeric_class
        return ""

    @property
    def versions(self) -> tuple[int, int]:
        """The oldest version that a replay needs, and the one it stands at."""
        step = int(self.contribution.step)
        return min((int(work.version) for work in self.contribution.work), default=step), step

    def without_past(self) -> "ReplayMismatch":
        """The case as it goes before a jury: each juror holds the stage's past itself."""
        return replace(self, past=None, state_chunks=(), bodies=())

    def to_evidence(self, run: SignedRun) -> Evidence:
        blobs: list[Bytes] = [*self.state_chunks]
        for bodies in self.bodies:
            blobs += bodies
        blobs += self.parts
        for exhibit in self.exhibits:
            blobs += exhibit.bodies
        facts: Value = {
            "contribution": self.contribution.to_value(),
            "num_parts": len(self.parts),
            "papers": [exhibit.papers.to_value() for exhibit in self.exhibits],
            "past": value_or_none(self.past),
            "num_chunks": len(self.state_chunks),
            "num_bodies": [len(bodies) for bodies in self.bodies],
        }
        return Evidence(
            kind=self.KIND,
            accused=self.accused,
            stage=self.contribution.stage,
            version=Version(self.contribution.step),
            run=run,
            facts=facts,
            blobs=tuple(blobs),
        )

    @classmethod
    def from_evidence(cls, evidence: Evidence) -> "ReplayMismatch":
        """Raises RemoteError if it is malformed."""
        fields = Fields("replay mismatch", evidence.facts)
        blobs = iter(evidence.blobs)
        contribution = Contribution.from_value(fields.message("contribution"))
        num_parts = fields.integer("num_parts", high=MAX_BLOBS)
        papers = fields.items("papers", Papers.from_value, max_items=MAX_WORK)
        past = fields.maybe("past", Past.from_value)
        num_chunks = fields.integer("num_chunks", high=MAX_BLOBS)
        num_bodies = fields.items("num_bodies", integer_item, max_items=MAX_RESULTS)
        fields.done()
        _check_count(evidence.blobs, num_chunks + sum(num_bodies) + num_parts + NUM_BODIES * len(papers))
        made = cls(
            contribution=contribution,
            state_chunks=_next(blobs, num_chunks),
            bodies=tuple(_next(blobs, count) for count in num_bodies),
            parts=_next(blobs, num_parts),
            exhibits=tuple(
                Exhibit.of_bodies(of, _version_of(of, contribution), _next(blobs, NUM_BODIES)) for of in papers
            ),
            past=past,
        )
        num_results = len(past.results) if past is not None else 0
        if len(made.bodies) != num_results or (past is None and num_chunks):
            raise RemoteError("malformed", f"bodies of {len(made.bodies)} results, not of {num_results}")
        version = Version(contribution.step)
        check_head(evidence, cls.KIND, accused=made.accused, stage=contribution.stage, version=version)
        return made


def _version_of(papers: Papers, made: Contribution) -> Version:
    """That the contribution says the microbatch was computed on. Raises RemoteError if it lists none such."""
    number = papers.birth.microbatch_id
    for work in made.work:
        if work.microbatch_id == number:
            return work.version
    raise RemoteError("papers", f"papers of microbatch {number}, which is not in the contribution", made.peer_id)


def _check_count(blobs: Sequence[Bytes], wanted: int) -> None:
    if len(blobs) != wanted:
        raise RemoteError("malformed", f"{len(blobs)} blobs where the facts name {wanted}")


def _next(blobs: Iterator[Bytes], count: int) -> tuple[Bytes, ...]:
    return tuple(islice(blobs, count))
