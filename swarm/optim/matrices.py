"""Which of a stage's values lie in matrices that Muon turns; the others, which AdamW steps, lie packed in its moments.

Turned are the tensors of two dimensions within layers, not embeddings and heads: as whoever uses `torch.optim.Muon` is
told to choose.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from kernels import orthogonal
from swarm.core.plan import Turned
from swarm.model.layout import ParameterLayout

_WITHIN_LAYER = re.compile(r"\.\d+\.")
"""In a tensor's name: "model.layers.3.mlp.up_proj.weight"."""


@dataclass(frozen=True)
class Matrix:
    """One that is turned as a whole."""

    start: int
    """Of its values among the stage's; they are row-major."""
    rows: int
    columns: int

    @property
    def where(self) -> slice:
        return slice(self.start, self.start + self.rows * self.columns)


@dataclass(frozen=True)
class Run:
    """Consecutive values of one kind."""

    where: slice
    is_turned: bool


class Matrices:
    """Those of a stage, in order."""

    def __init__(self, places: tuple[Matrix, ...], num_values: int) -> None:
        self.places = places
        bounds = [0, *(bound for one in places for bound in (one.where.start, one.where.stop)), num_values]
        assert bounds == sorted(bounds), f"matrices {places} of {num_values} values"
        self._runs = [Run(slice(*pair), number % 2 == 1) for number, pair in enumerate(pairwise(bounds))]
        """Of either kind by turns; some are empty."""
        self._starts = bounds[:-1]
        self._packed = [0, *accumulate(0 if run.is_turned else size_of(run.where) for run in self._runs)]
        """Before each run: values that are not turned."""

    @classmethod
    def of(cls, layout: ParameterLayout) -> "Matrices":
        tensors = zip(layout.names, layout.shapes, layout.offsets, strict=True)
        places = tuple(
            Matrix(start, *shape)
            for name, shape, start in tensors
            if len(shape) == 2 and min(shape) > 0 and _WITHIN_LAYER.search(name)
        )
        return cls(places, layout.num_values)

    @property
    def num_packed(self) -> int:
        """Values that are not turned."""
        return self._packed[-1]

    def runs(self, where: slice) -> Iterator[Run]:
        """What lies in there, in order, cut at its ends."""
        for number in range(max(0, bisect_right(self._starts, where.start) - 1), len(self._runs)):
            run = self._runs[number]
            start, stop = max(run.where.start, where.start), min(run.where.stop, where.stop)
            if start < stop:
                yield Run(slice(start, stop), run.is_turned)
            elif run.where.start >= where.stop:
                return

    def packed(self, where: slice) -> slice:
        """Where those lie, packed, that are not turned."""
        return slice(self._before(where.start), self._before(where.stop))

    def unpacked(self, packed: slice) -> Iterator[slice]:
        """The runs of values that lie there when packed."""
        for run, before in zip(self._runs, self._packed, strict=False):
            size = 0 if run.is_turned else size_of(run.where)
            start, stop = max(packed.start, before), min(packed.stop, before + size)
            if start < stop:
                yield slice(run.where.start + start - before, run.where.start + stop - before)

    def widened(self, where: slice) -> slice:
        """With all of each matrix that lies in it in part."""
        touched = [one.where for one in self.places if one.where.start < where.stop and where.start < one.where.stop]
        return slice(
            min([where.start, *(one.start for one in touched)]), max([where.stop, *(one.stop for one in touched)])
        )

    def within(self, window: slice) -> tuple[Matrix, ...]:
        """Those that lie in it as a whole."""
        return tuple(one for one in self.places if window.start <= one.where.start and one.where.stop <= window.stop)

    def _before(self, value: int) -> int:
        number = max(0, bisect_right(self._starts, value) - 1)
        run = self._runs[number]
        return self._packed[number] + (0 if run.is_turned else min(value, run.where.stop) - run.where.start)


def turned_of(layout: ParameterLayout) -> Turned:
    """What it takes to turn a stage's."""
    places = Matrices.of(layout).places
    return Turned(
        values=sum(size_of(one.where) for one in places),
        products=sum(orthogonal.products_of(one.rows, one.columns) for one in places),
        scratch_bytes=max((orthogonal.scratch_bytes(one.rows, one.columns) for one in places), default=0),
    )


def are_of_muon(moments: Mapping[str, Any]) -> bool:
    """Whether these are Muon's by their names: then `second` is packed."""
    return "momentum" in moments and "second" in moments


def size_of(where: slice) -> int:
    """Values in a run."""
    return int(where.stop - where.start)
