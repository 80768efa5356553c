"""This is where a microbatch's papers are made and checked: its birth record and the header of each hop.

A birth record is signed by the microbatch's source and travels unchanged. A hop header is signed by whoever
produced the tensor and names who consumes it, what it was made from, and the digest of the bytes on the wire.
"""

import hashlib
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from swarm.bulk_digest import bulk_digest
from swarm.core.canonical import Value, digest, signed_bytes
from swarm.core.errors import RemoteError
from swarm.core.fields import Fields, digest_item, integer_item
from swarm.core.ids import MicrobatchId, PeerId, StageIndex, Step, Version
from swarm.identity import Identity, verify

Kind = Literal["train", "evaluate", "generate"]
Direction = Literal["forward", "gradient"]

KINDS = ("train", "evaluate", "generate")
DIRECTIONS = ("forward", "gradient")


def ids_bytes(ids_BL: NDArray[np.int64]) -> bytes:
    """Token or target ids as they are hashed and sent: little-endian int32."""
    return ids_BL.astype("<i4").tobytes()


@dataclass(frozen=True, kw_only=True)
class BirthRecord:
    """What a microbatch holds and counts for; no stage after the source can change it."""

    DOMAIN: ClassVar[str] = "birth"
    run_id: str
    source: PeerId
    kind: Kind
    microbatch_id: MicrobatchId
    """Position in the training order; for kind `evaluate`, position in the held-out order."""
    attempt: int
    step: Step
    """Step it counts in; for kind `evaluate`, the version to evaluate."""
    shape: tuple[int, ...]
    """(samples, tokens a sample)."""
    num_targets: int
    """Target tokens that count in the loss."""
    tokens_digest: bytes
    """SHA-256 of the input ids as little-endian int32."""
    targets_digest: bytes
    """SHA-256 of the target ids as little-endian int32, -100 where masked."""
    prefix_length: int = 0
    """Tokens of each sample that are context only (kind `generate`)."""
    document_bounds: tuple[int, ...] = ()
    """Where documents begin inside a sample; positions count from there. Empty: one document."""
    era: int = 0
    """Of the run, as its geneses have it: a version's number names other weights in another era."""
    signature: bytes = b""

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
        )

    def signed_value(self) -> Value:
        return {
            "run_id": self.run_id,
            "source": self.source,
            "kind": self.kind,
            "microbatch_id": self.microbatch_id,
            "attempt": self.attempt,
            "step": self.step,
            "shape": list(self.shape),
            "num_targets": self.num_targets,
            "tokens_digest": self.tokens_digest,
            "targets_digest": self.targets_digest,
            "prefix_length": self.prefix_length,
            "document_bounds": list(self.document_bounds),
            "era": self.era,
        }

    @classmethod
    def from_value(cls, value: Value) -> "BirthRecord":
        outer = Fields("birth record", value)
        fields = Fields("birth record", outer.message("value"))
        made = cls(
            run_id=fields.text("run_id"),
            source=fields.peer("source"),
            kind=cast(Kind, _one_of("kind", fields.text("kind"), KINDS)),
            microbatch_id=MicrobatchId(fields.integer("microbatch_id")),
            attempt=fields.integer("attempt", high=1 << 20),
            step=Step(fields.integer("step")),
            shape=fields.items("shape", integer_item, max_items=2),
            num_targets=fields.integer("num_targets", high=1 << 32),
            tokens_digest=fields.octets("tokens_digest", length=32),
            targets_digest=fields.octets("targets_digest", length=32),
            prefix_length=fields.integer("prefix_length", high=1 << 24),
            document_bounds=fields.items("document_bounds", integer_item, max_items=4096),
            era=fields.integer("era"),
            signature=outer.octets("signature", length=64),
        )
        fields.done()
        outer.done()
        if len(made.shape) != 2 or not made.num_targets <= made.shape[0] * made.shape[1]:
            raise RemoteError("malformed", f"{made.num_targets} targets in a microbatch of shape {made.shape}")
        if made.prefix_length > made.shape[1] or any(bound >= made.shape[1] for bound in made.document_bounds):
            raise RemoteError("malformed", f"prefix or documents past the {made.shape[1]} tokens of a sample")
        return made

    def digest(self) -> bytes:
        return digest(self.DOMAIN, self.signed_value())

    def to_value(self) -> Value:
        return {"value": self.signed_value(), "signature": self.signature}


@dataclass(frozen=True, kw_only=True)
class HopHeader:
    """What a tensor on the wire is, who made it for whom, and from what."""

    DOMAIN: ClassVar[str] = "hop"
    run_id: str
    stage: StageIndex
    """Stage of the producer."""
    version: Version
    """Weights the producer used."""
    microbatch_id: MicrobatchId
    attempt: int
    direction: Direction
    producer: PeerId
    consumer: PeerId
    parents: tuple[bytes, ...]
    """Digests of what this was made from: forward: the birth record and upstream's header (if any); gradient: the
    forward header of the activation it is the gradient of, and the header of the gradient that came in (if any)."""
    shape: tuple[int, ...]
    dtype: str
    codec: str
    numeric_class: str
    """Device class, library and dtype of the computation: what a replay is compared within."""
    body_digest: bytes
    """BLAKE3 of the bytes on the wire."""
    signature: bytes = b""

    def signed_value(self) -> Value:
        return {
            "run_id": self.run_id,
            "stage": self.stage,
            "version": self.version,
            "microbatch_id": self.microbatch_id,
            "attempt": self.attempt,
            "direction": self.direction,
            "producer": self.producer,
            "consumer": self.consumer,
            "parents": list(self.parents),
            "shape": list(self.shape),
            "dtype": self.dtype,
            "codec": self.codec,
            "numeric_class": self.numeric_class,
            "body_digest": self.body_digest,
        }

    @classmethod
    def from_value(cls, value: Value) -> "HopHeader":
        outer = Fields("hop header", value)
        fields = Fields("hop header", outer.message("value"))
        made = cls(
            run_id=fields.text("run_id"),
            stage=StageIndex(fields.integer("stage")),
            version=Version(fields.integer("version")),
            microbatch_id=MicrobatchId(fields.integer("microbatch_id")),
            attempt=fields.integer("attempt", high=1 << 20),
            direction=cast(Direction, _one_of("direction", fields.text("direction"), DIRECTIONS)),
            producer=fields.peer("producer"),
            consumer=fields.peer("consumer"),
            parents=fields.items("parents", digest_item, max_items=2),
            shape=fields.items("shape", integer_item, max_items=3),
            dtype=fields.text("dtype", max_length=16),
            codec=fields.text("codec", max_length=16),
            numeric_class=fields.text("numeric_class", max_length=64),
            body_digest=fields.octets("body_digest", length=32),
            signature=outer.octets("signature", length=64),
        )
        fields.done()
        outer.done()
        return made

    def digest(self) -> bytes:
        return digest(self.DOMAIN, self.signed_value())

    def to_value(self) -> Value:
        return {"value": self.signed_value(), "signature": self.signature}


Record = TypeVar("Record", BirthRecord, HopHeader)


def signed(record: Record, identity: Identity) -> Record:
    """The record with its maker's signature."""
    return replace(record, signature=identity.sign(signed_bytes(record.DOMAIN, record.signed_value())))


def check_birth(birth: BirthRecord, *, run_id: str) -> None:
    """Raises RemoteError unless the record belongs to the run and is signed by its source."""
    if birth.run_id != run_id:
        raise RemoteError("protocol", f"birth record of run {birth.run_id[:12]}, not {run_id[:12]}", birth.source)
    if not verify(birth.source, signed_bytes(birth.DOMAIN, birth.signed_value()), birth.signature):
        raise RemoteError("signature", f"birth record is not signed by {birth.source}", birth.source)


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
    parent: bytes,
    delay: int,
) -> None:
    """Raises RemoteError unless the header is what this hop must carry, signed by `sender`, over these bytes.

    `stage` is the producer's; `parent` is the digest of a header that must be among its parents; `delay` is how many
    versions before the step's own it may be computed on.
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
    if parent not in header.parents:
        raise RemoteError("protocol", "hop header does not name what it was made from", sender)
    if bulk_digest(body) != header.body_digest:
        raise RemoteError("digest", "bytes differ from the header's digest", sender)
    if not verify(sender, signed_bytes(header.DOMAIN, header.signed_value()), header.signature):
        raise RemoteError("signature", f"hop header is not signed by {sender}", sender)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise RemoteError("malformed", f"{name} is {value[:20]!r}, not one of {', '.join(allowed)}")
    return value
