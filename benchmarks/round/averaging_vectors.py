"""The vectors that a benchmark averages, made once, in files that all its programs map."""

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


def write_vectors(folder: Path, *, peers: int, params: int) -> None:
    """A seeded normal vector for each peer, fp32, and their mean in fp64."""
    mean = np.zeros(params, dtype=np.float64)
    for number in range(peers):
        vector = np.random.default_rng(number).standard_normal(params, dtype=np.float32)
        np.save(_path(folder, number), vector)
        mean += vector
    np.save(_path(folder, "mean"), mean / peers)


def vector_of(folder: Path, number: int) -> NDArray[np.float32]:
    """Read-only; mapped."""
    vector: NDArray[np.float32] = np.load(_path(folder, number), mmap_mode="r")
    return vector


def check(folder: Path, averaged: NDArray[np.float32]) -> dict[str, object]:
    """What a replica holds: its digest, and its L2 distance from the true mean relative to the mean's norm."""
    mean = np.load(_path(folder, "mean"), mmap_mode="r")
    missed = squares = 0.0
    for start in range(0, mean.size, 1 << 20):
        part = mean[start : start + (1 << 20)]
        missed += float(np.square(averaged[start : start + (1 << 20)] - part).sum())
        squares += float(np.square(part).sum())
    return {
        "digest": hashlib.sha256(np.ascontiguousarray(averaged).data).hexdigest(),
        "relative_error": (missed / squares) ** 0.5,
    }


def _path(folder: Path, name: object) -> Path:
    return folder / f"{name}.npy"
