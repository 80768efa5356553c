"""This is where a peer keeps states on disk: for joiners, for evaluation, for checkpoints."""

import asyncio
import logging
import os
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
    state_chunks,
)
from swarm.core.errors import TransientError
from swarm.core.ids import StageIndex
from swarm.core.stage_chain import StageChain

log = logging.getLogger(__name__)

KEPT = 3
"""Snapshots on disk: a transfer of one may last while two more are made."""


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

    def weights(self) -> NDArray[np.float32]:
        """The weights, mapped from disk and read-only."""
        with self.path.open("rb") as file:
            header_bytes = 4 + int(struct.unpack("<I", file.read(4))[0])
        offset = -(-header_bytes // HEADER_ALIGNMENT_BYTES) * HEADER_ALIGNMENT_BYTES
        return np.memmap(self.path, dtype="<f4", mode="r", offset=offset, shape=(self.num_values,))


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
        for left_over in folder.glob(f"stage-{stage}-*"):  # their chain died with the process that made them
            left_over.unlink()

    def versions(self) -> list[int]:
        return sorted(self._held)

    def get(self, version: int) -> Snapshot | None:
        return self._held.get(version)

    def drop(self, version: int) -> None:
        """What is held of this version and later ones is wrong."""
        for held in [held for held in self._held if held >= version]:
            self._held.pop(held).path.unlink(missing_ok=True)
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
            snapshot.path.unlink(missing_ok=True)
            return
        self._held[state.version] = snapshot
        while len(self._held) > KEPT:
            self._held.pop(min(self._held)).path.unlink(missing_ok=True)

    def _write(self, state: StageState, chain: StageChain) -> Snapshot:
        path = self._folder / f"stage-{self._stage}-{state.version:08d}.state"
        partial = path.with_suffix(".partial")
        hashes, total = [], 0
        with partial.open("wb") as file:
            for chunk in state_chunks(state):
                hashes.append(chunk_hash(chunk))
                total += file.write(chunk)
        os.replace(partial, path)
        digest = merkle_root(hashes, total)
        return Snapshot(path, chain, digest, tuple(hashes), total, state.layout.num_values)
