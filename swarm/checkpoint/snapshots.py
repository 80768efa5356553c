"""States of a stage on disk: for joiners, for evaluation, for checkpoints, and for a peer's own return."""

import asyncio
import logging
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kernels.threads import ONE_THREAD, Threads
from swarm.checkpoint.state import (
    CHUNK_BYTES,
    HEADER_ALIGNMENT_BYTES,
    StageState,
    chunk_hash,
    merkle_root,
    state_chunks,
    state_from_chunks,
)
from swarm.core.canonical import pack, unpack
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import StageIndex
from swarm.core.settings import KEPT_SNAPSHOTS
from swarm.core.state.stage_chain import StageChain
from swarm.disk.mapped_file import mapped
from swarm.disk.whole_file import whole_file
from swarm.model.layout import ParameterLayout

log = logging.getLogger(__name__)

HASHED_AT_ONCE = 64
"""Chunks, before they are written: several threads share them."""
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
            return _chunks(mapped(self.path))
        except OSError as error:
            raise TransientError(f"snapshot of version {self.chain.version} is gone") from error

    def weights(self) -> NDArray[np.float32]:
        """The weights, mapped from disk and read-only."""
        with self.path.open("rb") as file:
            header_bytes = 4 + int(struct.unpack("<I", file.read(4))[0])
        offset = -(-header_bytes // HEADER_ALIGNMENT_BYTES) * HEADER_ALIGNMENT_BYTES
        return np.memmap(self.path, dtype="<f4", mode="r", offset=offset, shape=(self.num_values,))


@dataclass(frozen=True)
class KeptState:
    """A state that an earlier process left on disk, and what is certified of its version."""

    path: Path
    chain: StageChain
    digest: bytes

    def load(self, layout: ParameterLayout) -> StageState | None:
        """The state, if all of it is still there."""
        try:
            held = mapped(self.path)
            state = state_from_chunks(layout, _chunks(held), self.digest, whole=lambda chunks: held)
        except (OSError, RemoteError) as error:
            log.warning("%s: not used: %s", self.path, error)
            return None
        return state if (state.version, state.name) == (self.chain.version, self.chain.name) else None


def kept_states(folder: Path, stage: StageIndex) -> list[KeptState]:
    """Those of the stage in `folder`, newest first; of whatever lineage."""
    found = []
    for path in folder.glob(f"stage-{stage}-*.facts"):
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
        if kept.chain.stage == stage and path.name == file_name(kept.chain) + ".facts":
            found.append(kept)
    return sorted(found, key=lambda kept: (kept.chain.era, kept.chain.version), reverse=True)


def file_name(chain: StageChain) -> str:
    """Of what is kept of the chain's version, without its suffix: no two lineages share a file."""
    return f"stage-{chain.stage}-{chain.lineage.hex()[:16]}-{int(chain.version):08d}"


class SnapshotStore:
    """The last snapshots of one stage, in a folder of this process."""

    def __init__(self, folder: Path, *, kept: int = KEPT_SNAPSHOTS, threads: Threads = ONE_THREAD) -> None:
        """What earlier processes left in `folder` stays until a newer state of the stage is whole there."""
        self.folder = folder
        self._kept = kept
        self._threads = threads
        self._lineage = b""
        """Of the snapshots that are held."""
        self._held: dict[int, Snapshot] = {}
        self._num_loaded = 0
        self._saving = asyncio.Lock()
        self.is_wrong = False
        """The state is, and so whatever would be saved of it; until `begin_anew`."""
        self.is_to_take_back = False
        """What was stated of dropped ones, and perhaps of older ones that are not here any more, is wrong."""
        folder.mkdir(parents=True, exist_ok=True)
        for torn in folder.glob("stage-*.partial"):
            torn.unlink(missing_ok=True)

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
        async with self._saving:  # a peer that leaves may want what is being written
            held = self._held.get(state.version)
            if held is not None and held.chain.name == chain.name:
                return
            loaded = self._num_loaded
            snapshot = await asyncio.to_thread(self._write, state, chain)
            if self.is_wrong or self._num_loaded != loaded:
                _remove(snapshot)
                return
            if chain.lineage != self._lineage:
                self._held.clear()
                self._lineage = chain.lineage
            self._held[state.version] = snapshot
            while len(self._held) > self._kept:
                _remove(self._held.pop(min(self._held)))
            await asyncio.to_thread(self._forget_what_went_before, snapshot)

    def _forget_what_went_before(self, newest: Snapshot) -> None:
        """Only now that a newer state is whole on disk: what was kept of other lineages and stages, and the oldest."""
        lineage = file_name(newest.chain).rpartition("-")[0]
        kept = {path.stem for path in sorted(self.folder.glob(f"{lineage}-*.state"))[-self._kept :]}
        for path in self.folder.glob("stage-*"):
            if path.suffix in (".state", ".facts") and path.stem not in kept:
                path.unlink(missing_ok=True)

    def _write(self, state: StageState, chain: StageChain) -> Snapshot:
        path = self.folder / (file_name(chain) + ".state")
        hashes: list[bytes] = []
        total = 0
        with whole_file(path) as partial, partial.open("wb") as file:
            chunks = state_chunks(state)
            for at in range(0, len(chunks), HASHED_AT_ONCE):
                some = chunks[at : at + HASHED_AT_ONCE]
                hashes += self._threads.map(chunk_hash, some)
                total += sum(map(file.write, some))
        digest = merkle_root(hashes, total)
        with whole_file(path.with_suffix(".facts")) as partial:
            partial.write_bytes(pack({"digest": digest, "chain": chain.to_value()}))
        return Snapshot(path, chain, digest, tuple(hashes), total, state.layout.num_values)


def _chunks(whole: memoryview) -> tuple[memoryview, ...]:
    return tuple(whole[at : at + CHUNK_BYTES] for at in range(0, len(whole), CHUNK_BYTES))


def _remove(snapshot: Snapshot) -> None:
    snapshot.path.with_suffix(".facts").unlink(missing_ok=True)
    snapshot.path.unlink(missing_ok=True)
