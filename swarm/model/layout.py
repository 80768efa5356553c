"""A stage's parameters as one flat vector, in one order for all peers.

Parts, state digests and gradients are over this vector: tensors by Hugging Face name, sorted, each
row-major, with nothing between them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from swarm.core.kept import once

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ParameterLayout:
    """Where each tensor of a stage lies in its flat fp32 vector."""

    names: tuple[str, ...]
    """Hugging Face names in the whole model ("model.layers.3.mlp.up_proj.weight"), sorted."""
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    """First value of each tensor."""

    @classmethod
    def of(cls, shapes: Mapping[str, Sequence[int]]) -> "ParameterLayout":
        """Layout of tensors given by name."""
        names = tuple(sorted(shapes))
        ordered = tuple(tuple(int(size) for size in shapes[name]) for name in names)
        offsets = tuple(accumulate((prod(shape) for shape in ordered), initial=0))[:-1]
        return cls(names, ordered, offsets)

    @once
    def sizes(self) -> tuple[int, ...]:
        """Number of values of each tensor."""
        return tuple(prod(shape) for shape in self.shapes)

    @once
    def num_values(self) -> int:
        return sum(self.sizes)

    @property
    def decay_ranges(self) -> tuple[tuple[int, int], ...]:
        """Ranges [start, stop) under weight decay: tensors of two or more dimensions, neighbours merged."""
        ranges: list[tuple[int, int]] = []
        for shape, start, size in zip(self.shapes, self.offsets, self.sizes, strict=True):
            if len(shape) < 2:
                continue
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], start + size)
            else:
                ranges.append((start, start + size))
        return tuple(ranges)

    @overload
    def views(self, flat: "torch.Tensor") -> "dict[str, torch.Tensor]": ...
    @overload
    def views(self, flat: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]: ...
    def views(self, flat: Any) -> Any:
        """Tensors of `flat` (1-D, `num_values` long) by name; they share its memory."""
        if tuple(flat.shape) != (self.num_values,):
            raise ValueError(f"a flat vector of {self.num_values} values is needed, got shape {tuple(flat.shape)}")
        return {
            name: flat[start : start + size].reshape(shape)
            for name, shape, start, size in zip(self.names, self.shapes, self.offsets, self.sizes, strict=True)
        }
