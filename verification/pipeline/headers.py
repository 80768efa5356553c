"""A microbatch's papers, made and checked: its birth record and the header of each hop.

A birth record is signed by the microbatch's source and travels unchanged. A hop header is signed by whoever
produced the tensor and names who consumes it, what it was made from, and the digest of the bytes on the wire.
"""

import hashlib
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, ClassVar, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from swarm.bulk_digest import bulk_digest
from swarm.core.canonical import digest
from swarm.core.errors import RemoteError
from swarm.core.forms import Digest, Integer, Text
from swarm.core.ids import MicrobatchId, PeerId, StageIndex, Step, Version
from swarm.core.layout import AtMost
from swarm.core.pipeline.targets import DOCUMENT_BEGINS, MAX_BOUNDS
from swarm.core.round.contribution import MAX_ATTEMPTS
from swarm.identity.signed_record import SignedRecord

Bytes: TypeAlias = bytes | bytearray | memoryview
MAX_TOKENS = 1 << 32
"""Of a microbatch."""
Kind = Literal["train", "evaluate", "generate"]
Direction = Literal["forward", "gradient"]


def ids_bytes(ids_BL: NDArray[np.int64]) -> bytes:
    """Token or target ids as they are hashed and sent: little-endian int32."""
    return ids_BL.astype("<i4").tobytes()


def document_bounds(targets_BL: NDArray[np.signedinteger]) -> tuple[int, ...]:
    """Where documents begin, by the marks among a microbatch's targets. What is not one token long each, as padding
    is, is one document."""
    begins_BL = np.zeros(targets_BL.shape, dtype=bool)
    begins_BL[:, 1:] = targets_BL[:, :-1] == DOCUMENT_BEGINS
    again_BL = np.zeros_like(begins_BL)
    again_BL[:, 1:] = begins_BL[:, :-1]
    return tuple(np.flatnonzero(begins_BL & ~again_BL).tolist())


@dataclass(frozen=True, kw_only=True)
class BirthRecord(SignedRecord):
    """What a microbatch holds and counts for; no stage after the source can change it."""

    DOMAIN: ClassVar[str] = "birth"
    run_id: str
    source: PeerId
    kind: Kind
    microbatch_id: MicrobatchId
    """Position in the training order; for kind `evaluate`, position in the held-out order."""
    attempt: Annotated[int, Integer(high=MAX_ATTEMPTS - 1)]
    step: Step
    """Step it counts in; for kind `evaluate`, the version to evaluate."""
    shape: Annotated[tuple[int, ...], AtMost(2)]
    """(samples, tokens a sample): none is empty, and no more than arrays can have, for whoever audits makes some."""
    num_targets: Annotated[int, Integer(high=MAX_TOKENS)]
    """Target tokens that count in the loss."""
    tokens_digest: Digest
    """SHA-256 of the input ids as little-endian int32."""
    targets_digest: Digest
    """SHA-256 of the target ids as little-endian int32, -100 where masked."""
    prefix_length: Annotated[int, Integer(high=1 << 24)] = 0
    """Tokens of each sample that are context only (kind `generate`)."""
    document_bounds: Annotated[tuple[int, ...], AtMost(MAX_BOUNDS)] = ()
    """Where documents begin inside samples, as places among the microbatch's tokens, rising: every stage's attention
    stays within a document, and positions count from its beginning. Empty: each sample is one."""
    era: int = 0
    """Of the run, as its geneses have it: a version's number names other weights in another era."""

    @classmethod
    def of_batch(
        cls,
        run_id: str,
        source: PeerId,
        kind: Kind,
        microbatch_id: MicrobatchId,
        *,
        attempt: int,
        step: Step,
        era: int = 0,
        tokens_BL: NDArray[np.int64],
        targets_BL: NDArray[np.int64],
    ) -> "BirthRecord":
        """Of a microbatch as it was read; not signed yet."""
        return cls(
            run_id=run_id,
            source=source,
            kind=kind,
            microbatch_id=microbatch_id,
            attempt=attempt,
            step=step,
            era=era,
            shape=tokens_BL.shape,
            num_targets=int((targets_BL >= 0).sum()),
            tokens_digest=hashlib.sha256(ids_bytes(tokens_BL)).digest(),
            targets_digest=hashlib.sha256(ids_bytes(targets_BL)).digest(),
            document_bounds=document_bounds(targets_BL),
        )

    def _check_fields(self) -> None:
        if len(self.shape) != 2 or not max(1, self.num_targets) <= self.shape[0] * self.shape[1] <= MAX_TOKENS:
            raise RemoteError("malformed", f"{self.num_targets} targets in a microbatch of shape {self.shape}")
        if self.prefix_length > self.shape[1]:
            raise RemoteError("malformed", f"prefix past the {self.shape[1]} tokens of a sample")
        bounds, (num_samples, num_tokens) = self.document_bounds, self.shape
        rises = all(before < after for before, after in pairwise((0, *bounds, num_samples * num_tokens)))
        if bounds and not (rises and all(bound % num_tokens for bound in bounds)):
            raise RemoteError("malformed", f"documents begin at {bounds[:5]}... in samples of {num_tokens} tokens")

    @property
    def targets_bytes(self) -> int:
        """Of the target ids as they are sent. In runs whose activations need their input ids, these come after."""
        return 4 * self.shape[0] * self.shape[1]

    def unlike(self, targets: Bytes) -> str | None:
        """What is not the microbatch's of its target ids and the input ids after them, if these are there; None if all
        is."""
        size = self.targets_bytes
        if len(targets) not in (size, 2 * size):
            return f"{len(targets)} bytes of targets for shape {self.shape}"
        if hashlib.sha256(memoryview(targets)[:size]).digest() != self.targets_digest:
            return "targets differ from the birth record"
        if len(targets) > size and hashlib.sha256(memoryview(targets)[size:]).digest() != self.tokens_digest:
            return "input ids differ from the birth record"
        return None

    def check_documents(self, targets_BL: NDArray[np.int64]) -> None:
        """Raises RemoteError unless documents begin where the targets say."""
        if document_bounds(targets_BL) != self.document_bounds:
            raise RemoteError("protocol", "documents begin elsewhere than the targets say", self.source)

    def check_num_targets(self, num_targets: int) -> None:
        """Raises RemoteError unless so many of the targets count."""
        if num_targets != self.num_targets:
            raise RemoteError("protocol", f"{num_targets} targets, birth record says {self.num_targets}", self.source)

    def digest(self) -> bytes:
        return digest(self.DOMAIN, self.shallow_value())


@dataclass(frozen=True, kw_only=True)
class HopHeader(SignedRecord):
    """What a tensor on the wire is, who made it for whom, and from what."""

    DOMAIN: ClassVar[str] = "hop"
    run_id: str
    stage: StageIndex
    """Stage of the producer."""
    version: Version
    """Weights the producer used."""
    microbatch_id: MicrobatchId
    attempt: Annotated[int, Integer(high=MAX_ATTEMPTS - 1)]
    direction: Direction
    producer: PeerId
    consumer: PeerId
    parents: Annotated[tuple[Digest, ...], AtMost(2)]
    """Digests of what this was made from, as `forward_parents` and `gradient_parents` say, in their order."""
    shape: Annotated[tuple[int, ...], AtMost(3)]
    dtype: Annotated[str, Text(16)]
    codec: Annotated[str, Text(16)]
    numeric_class: Annotated[str, Text(64)]
    """Device class, library and dtype of the computation: what a replay is compared within."""
    body_digest: Digest
    """BLAKE3 of the bytes on the wire."""

    def digest(self) -> bytes:
        return digest(self.DOMAIN, self.shallow_value())


def check_birth(birth: BirthRecord, *, run_id: str) -> None:
    """Raises RemoteError unless the record belongs to the run and is signed by its source."""
    if birth.run_id != run_id:
        raise RemoteError("protocol", f"birth record of run {birth.run_id[:12]}, not {run_id[:12]}", birth.source)
    if not birth.is_signed_by(birth.source):
        raise RemoteError("signature", f"birth record is not signed by {birth.source}", birth.source)


Parents = tuple[bytes | None, ...]
"""What a header must name, in order; None stands for what only its maker knows."""


def forward_parents(birth: bytes, stage: int, came: bytes | None = None) -> Parents:
    """An activation's: the birth record first, the one and only, and then, past stage 0, the header of what came in."""
    return (birth, came) if stage > 0 else (birth,)


def gradient_parents(forward: bytes, stage: int, num_stages: int, answer: bytes | None = None) -> Parents:
    """A gradient's: the forward header of what it is the gradient of, and then, before the last stage, the header of
    the gradient that came in."""
    return (forward, answer) if stage < num_stages - 1 else (forward,)


def is_made_from(header: HopHeader, parents: Parents) -> bool:
    """Whether it names these, and nothing else: what a header could be over besides, its reader might be held to."""
    return len(header.parents) == len(parents) and all(
        wanted in (None, found) for wanted, found in zip(parents, header.parents, strict=True)
    )


def check_hop(
    header: HopHeader,
    birth: BirthRecord,
    body: bytes | bytearray | memoryview,
    *,
    sender: PeerId,
    consumer: PeerId,
    stage: StageIndex,
    direction: Direction,
    shape: tuple[int, ...],
    codec: str,
    parents: Parents,
    delay: int,
) -> None:
    """Raises RemoteError unless the header is what this hop must carry, signed by `sender`, over these bytes.

    `stage` is the producer's; `delay` is how many versions before the step's own it may be computed on.
    """
    wanted: tuple[tuple[str, object, object], ...] = (
        ("run_id", header.run_id, birth.run_id),
        ("producer", header.producer, sender),
        ("consumer", header.consumer, consumer),
        ("stage", header.stage, stage),
        ("direction", header.direction, direction),
        ("microbatch_id", header.microbatch_id, birth.microbatch_id),
        ("attempt", header.attempt, birth.attempt),
        ("shape", header.shape, shape),
        ("codec", header.codec, codec),
    )
    for name, got, expected in wanted:
        if got != expected:
            raise RemoteError("protocol", f"hop header's {name} is {got}, not {expected}", sender)
    if not birth.step - (delay if birth.kind == "train" else 0) <= header.version <= birth.step:
        raise RemoteError("protocol", f"computed on version {header.version} for step {birth.step}", sender)
    if not is_made_from(header, parents):
        raise RemoteError("protocol", "hop header does not name what it was made from, or more", sender)
    if bulk_digest(body) != header.body_digest:
        raise RemoteError("digest", "bytes differ from the header's digest", sender)
    if not header.is_signed_by(sender):
        raise RemoteError("signature", f"hop header is not signed by {sender}", sender)
