"""This is where a peer keeps states on disk: for joiners, for evaluation, for checkpoints, and for its own return."""

import asyncio
import logging
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from swarm.checkpoint.state import (
    CHUNK_BYTES,
    HEADER_ALIGNMENT_BYTES,
    StageState,
    chunk_hash,
    merkle_root,
    num_chunks_of,
    state_chunks,
    state_from_chunks,
)
from swarm.core.canonical import pack, unpack
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import StageIndex
from swarm.core.stage_chain import StageChain
from swarm.mapped_file import mapped
from swarm.model.layout import ParameterLayout
from swarm.whole_file import whole_file

log = logging.getLogger(__name__)

KEPT = 3
"""Snapshots on disk: a transfer of one may last while two more are made."""
MAX_FACTS_BYTES = 16 << 20
"""Of what is certified of a snapshot."""


@dataclass(frozen=True)
class Snapshot:
    """A state on disk, and what is certified of its version."""

    path: Path
    chain: StageChain
    digest: bytes
    hashes: tuple[bytes, ...]
    total_bytes: int
    num_values: int

    def chunk(self, index: int) -> bytes:
        """1 MiB of the state (the last chunk may be shorter). Raises TransientError when it is gone."""
        try:
            with self.path.open("rb") as file:
                file.seek(index * CHUNK_BYTES)
                return file.read(CHUNK_BYTES)
        except OSError as error:
            raise TransientError(f"snapshot of version {self.chain.version} is gone") from error

    def chunks(self) -> tuple[memoryview, ...]:
        """All of them, mapped from disk: they stay readable when the file is removed. Raises TransientError."""
        try:
            whole = mapped(self.path)
        except OSError as error:
            raise TransientError(f"snapshot of version {self.chain.version} is gone") from error
        return tuple(whole[at : at + CHUNK_BYTES] for at in range(0, self.total_bytes, CHUNK_BYTES))

    def weights(self) -> NDArray[np.float32]:
        """The weights, mapped from disk and read-only."""
        with self.path.open("rb") as file:
            header_bytes = 4 + int(struct.unpack("<I", file.read(4))[0])
        offset = -(-header_bytes // HEADER_ALIGNMENT_BYTES) * HEADER_ALIGNMENT_BYTES
        return np.memmap(self.path, dtype="<f4", mode="r", offset=offset, shape=(self.num_values,))


@dataclass(frozen=True)
class KeptState:
    """A state that an earlier process of this peer left on disk, and what is certified of its version."""

    path: Path
    chain: StageChain
    digest: bytes

    def load(self, layout: ParameterLayout) -> StageState | None:
        """The state, if all of it is still there."""
        try:
            with self.path.open("rb") as file:
                chunks = [file.read(CHUNK_BYTES) for _ in range(num_chunks_of(self.path.stat().st_size))]
            state = state_from_chunks(layout, chunks, self.digest)
        except (OSError, RemoteError) as error:
            log.warning("%s: not used: %s", self.path, error)
            return None
        return state if (state.version, state.name) == (self.chain.version, self.chain.name) else None


def kept_states(folder: Path, beginning: StageChain) -> list[KeptState]:
    """Those in `folder` that follow from the stage's `beginning`, newest first."""
    found = []
    for path in sorted(folder.glob(f"stage-{beginning.stage}-*.facts"), reverse=True):
        try:
            fields = Fields("snapshot's facts", unpack(path.read_bytes(), max_bytes=MAX_FACTS_BYTES))
            kept = KeptState(
                path.with_suffix(".state"),
                StageChain.from_value(fields.message("chain")),
                fields.octets("digest", length=32),
            )
            fields.done()
        except (OSError, RemoteError) as error:
            log.warning("%s: not used: %s", path, error)
            continue
        if (kept.chain.stage, kept.chain.lineage) == (beginning.stage, beginning.lineage):
            found.append(kept)
    return found


class SnapshotStore:
    """The last snapshots of one stage, in a folder of this process."""

    def __init__(self, folder: Path, stage: StageIndex) -> None:
        self._folder = folder
        self._stage = stage
        self._held: dict[int, Snapshot] = {}
        self._num_loaded = 0
        self.is_wrong = False
        """The state is, and so whatever would be saved of it; until `begin_anew`."""
        self.is_to_take_back = False
        """What was stated of dropped ones, and perhaps of older ones that are not here any more, is wrong."""
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("stage-*"):  # an earlier process's: see `kept_states`
            old.unlink()

    def versions(self) -> list[int]:
        return sorted(self._held)

    def get(self, version: int) -> Snapshot | None:
        return self._held.get(version)

    def drop(self, version: int) -> None:
        """What is held of this version and later ones is wrong."""
        for held in [held for held in self._held if held >= version]:
            _remove(self._held.pop(held))
        self.is_wrong = self.is_to_take_back = True

    def begin_anew(self) -> None:
        """Another state was loaded in the place of the wrong one."""
        self.is_wrong = False
        self._num_loaded += 1

    def latest(self) -> Snapshot | None:
        return self._held[max(self._held)] if self._held else None

    async def save(self, state: StageState, chain: StageChain) -> None:
        """Write a state that nothing will change any more; not one that turns out to be wrong meanwhile."""
        loaded = self._num_loaded
        snapshot = await asyncio.to_thread(self._write, state, chain)
        if self.is_wrong or self._num_loaded != loaded:
            _remove(snapshot)
            return
        self._held[state.version] = snapshot
        while len(self._held) > KEPT:
            _remove(self._held.pop(min(self._held)))

    def _write(self, state: StageState, chain: StageChain) -> Snapshot:
        path = self._folder / f"stage-{self._stage}-{state.version:08d}.state"
        hashes, total = [], 0
        with whole_file(path) as partial, partial.open("wb") as file:
            for chunk in state_chunks(state):
                hashes.append(chunk_hash(chunk))
                total += file.write(chunk)
        digest = merkle_root(hashes, total)
        with whole_file(path.with_suffix(".facts")) as partial:
            partial.write_bytes(pack({"digest": digest, "chain": chain.to_value()}))
        return Snapshot(path, chain, digest, tuple(hashes), total, state.layout.num_values)


def _remove(snapshot: Snapshot) -> None:
    snapshot.path.with_suffix(".facts").unlink(missing_ok=True)
    snapshot.path.unlink(missing_ok=True)
