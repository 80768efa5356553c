"""A model's states of one cut into stages made into those of another: every tensor keeps its weights and moments.

What a stage has as a whole is made anew, by a rule: running products are those of the old stage that gives most of
the values, norms are taken to be spread evenly over a stage's values. Moments of one byte share a scale in blocks,
which lie otherwise in the new stage: their roots are coded again, to the nearest code.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.int8_moments import BLOCK_VALUES, num_blocks
from swarm.checkpoint.state import Array, StageState
from swarm.model.layout import ParameterLayout
from swarm.optim.matrices import Matrices, are_of_muon

Floats = NDArray[np.float32]

FIRST, SECOND, SCALE = "first", "second", "second_scale"
LARGEST_CODE = 255


@dataclass(frozen=True)
class _Piece:
    """A tensor in an old stage."""

    stage: int
    within: slice


def recut(states: Sequence[StageState], layouts: Sequence[ParameterLayout]) -> list[StageState]:
    """The states of the stages with these layouts, which hold the same tensors as the old ones together."""
    where: dict[str, _Piece] = {}
    for stage, state in enumerate(states):
        old = state.layout
        for name, offset, size in zip(old.names, old.offsets, old.sizes, strict=True):
            where[name] = _Piece(stage, slice(offset, offset + size))
    assert sorted(where) == sorted(name for layout in layouts for name in layout.names), "other tensors than there were"
    values = [_of_each_value(state) for state in states]
    return [_made(states, values, [where[name] for name in layout.names], layout) for layout in layouts]


def _made(
    states: Sequence[StageState],
    values: Sequence[dict[str, Array]],
    pieces: Sequence[_Piece],
    layout: ParameterLayout,
) -> StageState:
    taken = [0] * len(states)
    for piece in pieces:
        taken[piece.stage] += piece.within.stop - piece.within.start
    most = states[taken.index(max(taken))]
    arrays: dict[str, Array] = {
        kind: np.concatenate([values[piece.stage][kind][piece.within] for piece in pieces]) for kind in values[0]
    }
    weights = arrays.pop("weights")
    assert weights.dtype == np.float32
    return StageState(
        version=most.version,
        layout=layout,
        weights=weights.astype(np.float32, copy=False),
        moments=_as_kept(arrays, layout, most),
        scalars=dict(most.scalars),
        certified_norms=_norms(states, taken),
    )


def _of_each_value(state: StageState) -> dict[str, Array]:
    """Weights and moments by name, each one for every value: in place of codes of second moments their roots, and zeros
    where Muon has none."""
    found: dict[str, Array] = {"weights": state.weights, **state.moments}
    if SCALE in found:
        scales = np.repeat(found.pop(SCALE).astype(np.float32), BLOCK_VALUES)[: state.layout.num_values]
        codes = found[SECOND].astype(np.float32)
        found[SECOND] = (codes * codes * scales).astype(np.float32)
    if are_of_muon(state.moments):
        found[SECOND] = np.zeros(state.layout.num_values, np.float32)
        matrices = Matrices.of(state.layout)
        for where in matrices.unpacked(slice(0, matrices.num_packed)):
            found[SECOND][where] = state.moments[SECOND][matrices.packed(where)]
    for name, array in found.items():
        assert array.size == state.layout.num_values, f"{name}: {array.size} for {state.layout.num_values} values"
    return found


def _as_kept(arrays: dict[str, Array], layout: ParameterLayout, like: StageState) -> dict[str, Array]:
    """Moments as the optimizer of that state keeps them."""
    if SCALE in like.moments:
        return _coded(arrays)
    if are_of_muon(like.moments):
        matrices, second = Matrices.of(layout), arrays[SECOND]
        packed = [second[where] for where in matrices.unpacked(slice(0, matrices.num_packed))]
        return arrays | {SECOND: np.concatenate([second[:0], *packed])}
    return arrays


def _coded(arrays: dict[str, Array]) -> dict[str, Array]:
    """With codes and scales of the blocks in place of the roots; see `kernels.int8_moments`."""
    roots = arrays[SECOND].astype(np.float32)
    blocks = num_blocks(roots.size)
    padded = np.zeros(blocks * BLOCK_VALUES, np.float32)
    padded[: roots.size] = roots
    largest = padded.reshape(blocks, BLOCK_VALUES).max(axis=1)
    scales = (largest / np.float32(LARGEST_CODE**2)).astype(np.float32)
    of_each = np.repeat(scales, BLOCK_VALUES)[: roots.size]
    shares = np.divide(roots, of_each, out=np.zeros_like(roots), where=of_each > 0)
    codes = np.minimum(np.rint(np.sqrt(shares)), LARGEST_CODE).astype(np.uint8)
    # The first moment is kept as its ratio to the root: without a root there is none.
    first = np.where(codes > 0, arrays[FIRST], 0).astype(np.int8)
    return {FIRST: first, SECOND: codes, SCALE: scales}


def _norms(states: Sequence[StageState], taken: Sequence[int]) -> list[float]:
    """Of the last certified gradients, as if each old stage's had been spread evenly over its values."""
    givers = [(state, count / state.layout.num_values) for state, count in zip(states, taken, strict=True) if count]
    num = min(len(state.certified_norms) for state, _ in givers)
    return [
        math.sqrt(sum(share * state.certified_norms[-at] ** 2 for state, share in givers)) for at in range(num, 0, -1)
    ]
