"""One peer's part in one microbatch, laid on the table: its papers, and the bytes they stand for.

All of it is bound to what the peer signed before anyone could know of an audit: its contribution names the digests of
the first and the last of these papers, and each of them names the one it was made from.
"""

import hashlib
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from swarm.bulk_digest import bulk_digest
from swarm.core.errors import RemoteError
from swarm.core.ids import PeerId, StageIndex, Version
from swarm.core.record import Record
from swarm.core.round.contribution import Work
from verification.pipeline.headers import (
    BirthRecord,
    HopHeader,
    Parents,
    check_birth,
    document_bounds,
    forward_parents,
    gradient_parents,
    is_made_from,
)

Bytes: TypeAlias = bytes | bytearray | memoryview

NO_HEADER = bytes(32)
"""Stands in a contribution for the gradient header that the last stage does not get."""


@dataclass(frozen=True, kw_only=True)
class Papers(Record):
    """What was signed on a microbatch's way through one peer, in the order of its making."""

    birth: BirthRecord
    input_header: HopHeader | None
    """Of x, signed by a peer of the stage before; None at stage 0."""
    forward_header: HopHeader | None
    """Of y, signed by the peer; None at the last stage."""
    gradient_in: HopHeader | None
    """Of the gradient of y, signed by a peer of the next stage; None at the last stage."""
    gradient_out: HopHeader | None
    """Of the gradient of x, signed by the peer; None at stage 0."""

    @classmethod
    def received(
        cls,
        birth: BirthRecord,
        input_header: HopHeader | None,
        forward_header: HopHeader | None = None,
        gradient_in: HopHeader | None = None,
    ) -> "Papers":
        """What a contribution's entry is given for: all but the peer's own last word, which is nobody's receipt."""
        return cls(
            birth=birth,
            input_header=input_header,
            forward_header=forward_header,
            gradient_in=gradient_in,
            gradient_out=None,
        )

    @property
    def input_digest(self) -> bytes:
        """What a contribution's `Work.input_header` holds for this microbatch."""
        return self.input_header.digest() if self.input_header is not None else self.birth.digest()

    @property
    def output_digest(self) -> bytes:
        """What a contribution's `Work.output_header` holds for this microbatch."""
        return self.gradient_in.digest() if self.gradient_in is not None else NO_HEADER


@dataclass(frozen=True, kw_only=True)
class Exhibit:
    """The papers of one microbatch at one peer with the bytes they name."""

    papers: Papers
    version: Version
    """Weights it was computed on, as its maker's contribution says; where its maker signed headers, they say the
    same."""
    x: Bytes
    """The encoded activation that came in; at stage 0 the input ids as little-endian int32."""
    targets: Bytes
    """Little-endian int32; then the input ids, where activations need them (`ModelSettings.sends_ids`)."""
    y: Bytes
    """As sent on; empty at the last stage."""
    grad_y: Bytes
    """As it came back; empty at the last stage."""
    grad_x: Bytes
    """As answered; empty at stage 0."""

    @property
    def bodies(self) -> tuple[Bytes, ...]:
        return (self.x, self.targets, self.y, self.grad_y, self.grad_x)

    @classmethod
    def of_bodies(cls, papers: Papers, version: Version, bodies: tuple[Bytes, ...]) -> "Exhibit":
        """Raises RemoteError("malformed") if they are not five."""
        if len(bodies) != 5:
            raise RemoteError("malformed", f"an exhibit has five bodies, not {len(bodies)}")
        x, targets, y, grad_y, grad_x = bodies
        return cls(papers=papers, version=version, x=x, targets=targets, y=y, grad_y=grad_y, grad_x=grad_x)

    def check(self, peer: PeerId, *, run_id: str, stage: StageIndex, num_stages: int) -> None:
        """Raises RemoteError unless all is there, signed by whom it must be, and one made from the other."""
        papers = self.papers
        birth = papers.birth
        check_birth(birth, run_id=run_id)
        first, last = stage == 0, stage == num_stages - 1
        for name, found, wanted in (
            ("input_header", papers.input_header, not first),
            ("forward_header", papers.forward_header, not last),
            ("gradient_in", papers.gradient_in, not last),
            ("gradient_out", papers.gradient_out, not first),
        ):
            if (found is not None) != wanted:
                raise RemoteError("papers", f"{name} is {'missing' if wanted else 'not of this stage'}", peer)
        unlike = birth.unlike(self.targets)
        if unlike is not None:
            raise RemoteError("papers", unlike, peer)
        targets = memoryview(self.targets)[: birth.targets_bytes]
        if document_bounds(np.frombuffer(targets, "<i4").reshape(birth.shape)) != birth.document_bounds:
            raise RemoteError("papers", "documents begin elsewhere than the targets say", peer)
        if first and birth.source != peer:
            raise RemoteError("papers", f"a source shows the birth record of {birth.source}", peer)
        if first and hashlib.sha256(self.x).digest() != birth.tokens_digest:
            raise RemoteError("papers", "input ids differ from the birth record", peer)
        if papers.input_header is not None:
            came_from = forward_parents(birth.digest(), stage - 1)
            _check_header(papers.input_header, birth, self.x, StageIndex(stage - 1), "forward", came_from)
            _check_names(papers.input_header, consumer=peer)
        if papers.forward_header is not None:
            sent = forward_parents(birth.digest(), stage, papers.input_digest)
            _check_header(papers.forward_header, birth, self.y, stage, "forward", sent)
            _check_names(papers.forward_header, producer=peer)
        if papers.gradient_in is not None and papers.forward_header is not None:
            back = gradient_parents(papers.forward_header.digest(), stage + 1, num_stages)
            _check_header(papers.gradient_in, birth, self.grad_y, StageIndex(stage + 1), "gradient", back)
            _check_names(papers.gradient_in, producer=papers.forward_header.consumer, consumer=peer)
        if papers.gradient_out is not None and papers.input_header is not None:
            answer = papers.gradient_in.digest() if papers.gradient_in is not None else None
            made_from = gradient_parents(papers.input_header.digest(), stage, num_stages, answer)
            _check_header(papers.gradient_out, birth, self.grad_x, stage, "gradient", made_from)
            _check_names(papers.gradient_out, producer=peer, consumer=papers.input_header.producer)

    def check_work(self, work: Work, peer: PeerId) -> None:
        """Raises RemoteError unless the exhibit is of this entry of the peer's contribution."""
        birth = self.papers.birth
        for name, found, wanted in (
            ("microbatch_id", birth.microbatch_id, work.microbatch_id),
            ("attempt", birth.attempt, work.attempt),
            ("num_tokens", birth.num_targets, work.num_tokens),
            ("input_header", self.papers.input_digest, work.input_header),
            ("output_header", self.papers.output_digest, work.output_header),
        ):
            if found != wanted:
                raise RemoteError("papers", f"{name} of the papers is not the contribution's", peer)
        signed = [header.version for header in (self.papers.forward_header, self.papers.gradient_out) if header]
        for version in (self.version, *signed):
            if version != work.version:
                raise RemoteError("papers", f"computed on version {version}, contributed {work.version}", peer)


def _check_names(header: HopHeader, *, producer: PeerId | None = None, consumer: PeerId | None = None) -> None:
    if producer is not None and header.producer != producer:
        raise RemoteError("papers", f"header was made by {header.producer}, not {producer}", header.producer)
    if consumer is not None and header.consumer != consumer:
        raise RemoteError("papers", f"header was made for {header.consumer}, not {consumer}", header.producer)


def _check_header(
    header: HopHeader, birth: BirthRecord, body: Bytes, stage: StageIndex, direction: str, parents: Parents
) -> None:
    """Raises RemoteError unless the header is of this hop of the microbatch and over these bytes."""
    for name, found, wanted in (
        ("run_id", header.run_id, birth.run_id),
        ("stage", header.stage, stage),
        ("direction", header.direction, direction),
        ("microbatch_id", header.microbatch_id, birth.microbatch_id),
        ("attempt", header.attempt, birth.attempt),
    ):
        if found != wanted:
            raise RemoteError("papers", f"header's {name} is {found}, not {wanted}", header.producer)
    if not is_made_from(header, parents):
        raise RemoteError("papers", "header does not name what it was made from, or more", header.producer)
    if bulk_digest(body) != header.body_digest:
        raise RemoteError("papers", "bytes differ from the header's digest", header.producer)
    if not header.is_signed_by(header.producer):
        raise RemoteError("papers", f"header is not signed by {header.producer}", header.producer)
