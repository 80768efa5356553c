"""A file of evidence: how large a run's can be, opened, and fetched for what a verdict names.

A host's page serves evidence over plain HTTP. What is fetched counts only if its SHA-256 is the one in a verdict that
the run key has signed, and no more of it is taken than evidence of that run, whose settings the key signed too, can
hold.
"""

import hashlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from swarm.checkpoint.transfer import MAX_STATE_BYTES_PER_VALUE
from swarm.core.canonical import pack, unpack
from swarm.core.errors import RemoteError
from swarm.core.forms import Either
from swarm.core.ids import PeerId, StageIndex
from swarm.core.record import Record
from swarm.core.settings import LARGEST_PART_VALUES, RunSettings
from swarm.disk.mapped_file import mapped
from swarm.host_protocol import max_exhibit_bytes
from swarm.manifest.signed_run import MAX_SIGNED_RUN_BYTES, SignedRun
from swarm.model.families import validate_config
from swarm.model.stack import stage_layout
from verification.audit.evidence import MAX_EVIDENCE_BYTES, MAX_HEAD_BYTES, Evidence
from verification.audit.verdicts import Ban, Quarantine

MAX_BYTES_PER_VALUE = 5
"""Of an encoded gradient."""
MAX_WORD_BYTES = MAX_SIGNED_RUN_BYTES + (64 << 10)
DIGEST_BYTES = 32
"""The closing SHA-256, by which a file is known."""


def evidence_in(path: Path) -> Evidence:
    """What the file holds, read as it is needed. Raises RemoteError("evidence") if it is not whole, or malformed;
    OSError where it cannot be read."""
    return Evidence.from_bytes(mapped(path), max_bytes=MAX_EVIDENCE_BYTES)


def largest_evidence_bytes(settings: RunSettings) -> int:
    """What evidence of the run may hold: a stage's state, results since, a contribution, what a part was reduced
    from, and a step's activations."""
    stages = [StageIndex(stage) for stage in range(settings.model.num_stages)]
    num_values = max(stage_layout(settings.model, stage).num_values for stage in stages)
    vectors = (settings.retained_results + 1) * MAX_BYTES_PER_VALUE * settings.round_values
    inputs = settings.limits.max_peers_per_stage * MAX_BYTES_PER_VALUE * min(num_values, LARGEST_PART_VALUES)
    hidden_size = validate_config(settings.model.config_json).hidden_size
    exhibits = 2 * settings.microbatches_of_one * max_exhibit_bytes(settings, hidden_size)
    whole = (MAX_STATE_BYTES_PER_VALUE + vectors) * num_values + inputs + exhibits + MAX_HEAD_BYTES
    return min(MAX_EVIDENCE_BYTES, whole)


@dataclass(frozen=True)
class SignedVerdict(Record, kind="verdict of a run"):
    """A verdict, beside the settings of its run: both signed by the run key."""

    run: SignedRun
    verdict: Annotated[Ban | Quarantine, Either({"ban": Ban, "quarantine": Quarantine})]

    def to_bytes(self) -> bytes:
        return pack(self.to_value())

    @classmethod
    def from_bytes(cls, data: bytes, *, peer: PeerId, run_key: PeerId) -> Self:
        """Raises RemoteError unless this run key has signed both, and the verdict is on this peer, of this run."""
        made = cls.from_value(unpack(data, max_bytes=MAX_WORD_BYTES))
        run, verdict = made.run, made.verdict
        if verdict.peer_id != peer:
            raise RemoteError("verdict", f"a verdict on {verdict.peer_id}, not on {peer}")
        if run.run_key != run_key:
            raise RemoteError("verdict", f"a run under key {run.run_key}, not {run_key}")
        verdict.check(run.run_id, run_key)
        return made

    @property
    def largest_bytes(self) -> int:
        """Of the evidence, at most."""
        run = self.run
        return max(largest_evidence_bytes(run.under(number).in_force) for number in range(len(run.amendments) + 1))


async def write_evidence(pieces: AsyncIterator[bytes], path: Path, *, digest: bytes, max_bytes: int) -> int:
    """Write what comes to `path`, once all of it is there and ends with the SHA-256 of what came before, `digest`.

    Returns its bytes. Raises RemoteError for anything else, as soon as it is known, and what `pieces` raises; then
    there is no file.
    """
    partial, found, size, tail = path.with_name(f".{path.name}.part"), hashlib.sha256(), 0, b""
    try:
        with partial.open("wb") as file:
            async for piece in pieces:
                size += len(piece)
                if size > max_bytes:
                    raise RemoteError("too_large", f"evidence of more than {max_bytes} bytes")
                file.write(piece)
                held = tail + piece
                found.update(held[:-DIGEST_BYTES])
                tail = held[-DIGEST_BYTES:]
            file.flush()
            os.fsync(file.fileno())
        if tail != digest or found.digest() != digest:
            raise RemoteError("digest", f"what came has SHA-256 {found.hexdigest()[:16]}, not {digest.hex()[:16]}")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return size
