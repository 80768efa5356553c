"""A peer's signed word for a state, beside what one chunk of it must be.

The optimizer is elementwise, or turns a matrix by itself, and the gradient's norm is certified. So a chunk follows from
a few chunks of an older state that the run key vouches for and from some parts of the certified results since. The
chunk that the accused claims is not needed: its hash lies under the root that it signed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from swarm.core.canonical import Value
from swarm.core.errors import RemoteError
from swarm.core.fields import Fields, digest_item, integer_item
from swarm.core.ids import PeerId
from swarm.core.round.contribution import MAX_PARTS
from swarm.manifest.signed_run import SignedRun
from verification.audit.evidence import MAX_BLOBS, Bytes, Evidence, Kind, check_head
from verification.state.past import Past
from verification.state.state_statement import MAX_CHUNKS, StateStatement

MAX_PATH = 32
"""Nodes beside the way from a chunk's hash to the root."""


@dataclass(frozen=True, kw_only=True)
class OldChunk:
    """A chunk of the state at the past's beginning, and what shows it to be under the root that the run key signed."""

    index: int
    path: tuple[bytes, ...]
    body: Bytes


@dataclass(frozen=True, kw_only=True)
class StepFraud:
    """What one chunk of a stated state is computed again from."""

    KIND: ClassVar[Kind] = "step_fraud"
    statement: StateStatement
    chunk: int
    """Of the stated state: the one that is wrong."""
    leaf: bytes
    """Its hash as the accused has it."""
    path: tuple[bytes, ...]
    """What shows the hash to be under the stated root."""
    past: Past
    """Up to the version of the statement."""
    old_chunks: tuple[OldChunk, ...]
    """The first one, which holds what is not in arrays, and all that the chunk's values are in; by index."""
    parts: tuple[int, ...]
    """Those that the chunk's values are in; sorted."""
    bodies: tuple[tuple[Bytes, ...], ...]
    """Of each result of the past, those parts encoded; empty ones for parts without contributors."""

    @property
    def accused(self) -> PeerId:
        return self.statement.peer_id

    def to_evidence(self, run: SignedRun) -> Evidence:
        made = self.statement
        facts: Value = {
            "statement": made.to_value(),
            "chunk": self.chunk,
            "leaf": self.leaf,
            "path": list(self.path),
            "past": self.past.to_value(),
            "old_chunks": [[old.index, list(old.path)] for old in self.old_chunks],
            "parts": list(self.parts),
        }
        blobs = [old.body for old in self.old_chunks] + [body for bodies in self.bodies for body in bodies]
        return Evidence(
            kind=self.KIND,
            accused=self.accused,
            stage=made.stage,
            version=made.version,
            run=run,
            facts=facts,
            blobs=tuple(blobs),
        )

    @classmethod
    def from_evidence(cls, evidence: Evidence) -> "StepFraud":
        """Raises RemoteError if it is malformed."""
        fields = Fields("step fraud", evidence.facts)
        statement = StateStatement.from_value(fields.message("statement"))
        chunk, leaf = fields.integer("chunk", high=MAX_CHUNKS), fields.octets("leaf", length=32)
        path = fields.items("path", digest_item, max_items=MAX_PATH)
        past = Past.from_value(fields.message("past"))
        listed = fields.items("old_chunks", _index_and_path, max_items=MAX_BLOBS)
        parts = fields.items("parts", integer_item, max_items=MAX_PARTS)
        fields.done()
        indices = [index for index, _ in listed]
        if list(parts) != sorted(set(parts)) or indices != sorted(set(indices)):
            raise RemoteError("malformed", "parts or chunks are not in order, each once")
        if len(evidence.blobs) != len(listed) + len(past.results) * len(parts):
            raise RemoteError("malformed", f"{len(evidence.blobs)} blobs of {len(listed)} chunks and the parts' bodies")
        blobs = iter(evidence.blobs)
        made = cls(
            statement=statement,
            chunk=chunk,
            leaf=leaf,
            path=path,
            past=past,
            old_chunks=tuple(OldChunk(index=index, path=beside, body=next(blobs)) for index, beside in listed),
            parts=parts,
            bodies=tuple(_next(blobs, len(parts)) for _ in past.results),
        )
        check_head(evidence, cls.KIND, accused=made.accused, stage=statement.stage, version=statement.version)
        return made


def _index_and_path(value: Value) -> tuple[int, tuple[bytes, ...]]:
    fields = Fields.of_list("old chunk", value, "index", "path")
    return fields.integer("index", high=MAX_CHUNKS), fields.items("path", digest_item, max_items=MAX_PATH)


def _next(blobs: Iterator[Bytes], count: int) -> tuple[Bytes, ...]:
    return tuple(islice(blobs, count))
