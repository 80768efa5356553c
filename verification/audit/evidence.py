"""Proof of misbehaviour in one file: what is needed to judge it again, and nothing to be believed.

    "homeswarm evidence\\n" | length of the head, 4 bytes, little endian | head | blobs, end to end | SHA-256 of it all

The head is canonical (`swarm.core.canonical`): {format, kind, accused, stage, version, run, facts, blobs}. `facts` are
the kind's own (`verification.kinds`); `blobs` lists size and BLAKE3 of each blob. The closing SHA-256 names the file.
"""

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from swarm.bulk_digest import bulk_digest
from swarm.core.canonical import Value, pack, unpack
from swarm.core.errors import RemoteError
from swarm.core.forms import Digest, Form, Integer, StageNumber
from swarm.core.ids import PeerId, StageIndex, Version
from swarm.core.kept import once
from swarm.core.layout import AtMost
from swarm.core.record import Record, Row
from swarm.core.settings import RunSettings
from swarm.manifest.signed_run import SignedRun

Bytes: TypeAlias = bytes | bytearray | memoryview
Kind = Literal[
    "equivocation",
    "protocol_violation",
    "false_work",
    "reducer_fraud",
    "step_fraud",
    "data_fraud",
    "replay_mismatch",
    "bias",
    "hop_mismatch",
]

MAGIC = b"homeswarm evidence\n"
FORMAT = 1
SUFFIX = ".evidence"
"""Of the files' names."""
MAX_HEAD_BYTES = 64 << 20
MAX_BLOBS = 1 << 19
MAX_EVIDENCE_BYTES = 16 << 30
"""A stage's snapshot with its moments, the results since, and a step's activations."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What one file holds. Nothing in it is checked yet but that it is whole and that the run key signed the run."""

    kind: Kind
    accused: PeerId
    stage: StageIndex
    version: Version
    """Of the stage, that the accused's work was on or for."""
    run: SignedRun
    facts: Value
    blobs: tuple[Bytes, ...] = ()

    @once
    def settings(self) -> RunSettings:
        """Under the amendments that the evidence names. Raises RemoteError if they cannot be read."""
        return self.run.in_force

    @once
    def run_id(self) -> str:
        return self.run.run_id

    @once
    def blob_digests(self) -> tuple[bytes, ...]:
        """BLAKE3 of each blob."""
        return tuple(bulk_digest(blob) for blob in self.blobs)

    def digest(self) -> bytes:
        """The closing SHA-256: what this evidence is known by."""
        return self._digest

    def chunks(self) -> Iterator[Bytes]:
        """The file, piece by piece; blobs are not copied."""
        yield from self._open_chunks()
        yield self._digest

    def to_bytes(self) -> bytes:
        return b"".join(self.chunks())

    @classmethod
    def from_bytes(cls, data: Bytes, *, max_bytes: int) -> "Evidence":
        """Evidence whose blobs are views of `data`. Raises RemoteError("evidence") if it is not whole or malformed."""
        view = memoryview(data).cast("B")
        if len(view) > max_bytes:
            raise _unfit(f"file of {len(view)} bytes is over the limit of {max_bytes}")
        if view[: len(MAGIC)] != MAGIC or len(view) < len(MAGIC) + 4 + 32:
            raise _unfit(f"file of {len(view)} bytes is no evidence of homeswarm")
        if hashlib.sha256(view[:-32]).digest() != view[-32:]:
            raise _unfit("file has been changed: its closing SHA-256 is not that of its bytes")
        end = head_end(view)
        if end is None or end > len(view) - 32:
            raise _unfit(f"head to byte {end} in a file of {len(view)}")
        try:
            made = cls._of_head(EvidenceHead.from_bytes(view[:end]), view[end:-32])
        except RemoteError as error:
            raise _unfit(str(error)) from error
        return made

    @classmethod
    def _of_head(cls, head: "EvidenceHead", body: memoryview) -> "Evidence":
        blobs: list[Bytes] = []
        at = 0
        for entry in head.blobs:
            if entry.size > len(body) - at:
                raise _unfit(f"blob {len(blobs)} of {entry.size} bytes, {len(body) - at} left")
            blobs.append(body[at : at + entry.size])
            at += entry.size
        if at != len(body):
            raise _unfit(f"{len(body) - at} bytes after the last blob")
        made = cls(
            kind=head.kind,
            accused=head.accused,
            stage=head.stage,
            version=head.version,
            run=head.run,
            facts=head.facts,
            blobs=tuple(blobs),
        )
        for number, (entry, found) in enumerate(zip(head.blobs, made.blob_digests, strict=True)):
            if found != entry.digest:
                raise _unfit(f"blob {number} differs from its BLAKE3")
        return made

    @once
    def _digest(self) -> bytes:
        found = hashlib.sha256()
        for chunk in self._open_chunks():
            found.update(chunk)
        return found.digest()

    def _open_chunks(self) -> Iterator[Bytes]:
        """All but the closing SHA-256."""
        head = EvidenceHead(
            format=FORMAT,
            kind=self.kind,
            accused=self.accused,
            stage=self.stage,
            version=self.version,
            run=self.run,
            facts=self.facts,
            blobs=tuple(Blob(len(blob), found) for blob, found in zip(self.blobs, self.blob_digests, strict=True)),
        )
        packed = pack(head.to_value())
        yield MAGIC + struct.pack("<I", len(packed)) + packed
        yield from self.blobs


def check_head(evidence: Evidence, kind: Kind, *, accused: PeerId, stage: StageIndex, version: Version) -> None:
    """Raises RemoteError unless the head says what the facts do."""
    for name, found, wanted in (
        ("kind", evidence.kind, kind),
        ("accused", evidence.accused, accused),
        ("stage", evidence.stage, stage),
        ("version", evidence.version, version),
    ):
        if found != wanted:
            raise _unfit(f"head's {name} is {found}, its facts say {wanted}")


@dataclass(frozen=True)
class Blob(Row, kind="blob"):
    size: Annotated[int, Integer(high=MAX_EVIDENCE_BYTES)]
    digest: Digest


@dataclass(frozen=True, kw_only=True)
class EvidenceHead(Record, kind="evidence"):
    """A file's, as it is written: what it is about, and what its blobs are."""

    format: int
    kind: Kind
    accused: PeerId
    stage: StageNumber
    version: Version
    run: SignedRun
    facts: Annotated[Any, Form()]
    blobs: Annotated[tuple[Blob, ...], AtMost(MAX_BLOBS)]

    @classmethod
    def from_bytes(cls, data: Bytes) -> "EvidenceHead":
        """Of the file's bytes up to its `head_end`. Raises RemoteError if they are malformed."""
        head = cls.from_value(unpack(memoryview(data)[len(MAGIC) + 4 :], max_bytes=MAX_HEAD_BYTES))
        if head.format != FORMAT:
            raise _unfit(f"another format than {FORMAT}, which this program reads")
        return head


def head_end(data: Bytes) -> int | None:
    """Where in a file that begins so its head ends; None where it is too short to say, or no head is so long."""
    if len(data) < len(MAGIC) + 4:
        return None
    (head_bytes,) = struct.unpack_from("<I", data, len(MAGIC))
    return len(MAGIC) + 4 + int(head_bytes) if head_bytes <= MAX_HEAD_BYTES else None


def _unfit(message: str) -> RemoteError:
    return RemoteError("evidence", message)
