"""The vector that a stage's round averages, cut into parts, the unit of commitment and reduction.

It is the stage's gradient, parameters flattened. In a run of windows AdamW's moments at the windows' ends come behind
it: the first ones in the same order and codec, then the second ones as means of rows and columns, in bf16.
"""

import itertools
from collections.abc import Sequence
from typing import overload

from swarm.averaging.codecs import result_codec, vector_codec
from swarm.averaging.encoded import VectorCodec
from swarm.core.settings import PART_VALUES, AveragingCodecName, RunSettings
from swarm.model.layout import ParameterLayout
from swarm.optim.factored_moments import num_means

CODEC_OF_MEANS: AveragingCodecName = "bf16"
"""Of second moments: their range is wide, and they are few."""


class Parts(Sequence[slice]):
    """Where each part lies in the vector. All have `part_values`, but the last one of each range may be shorter; none
    holds values of two ranges."""

    def __init__(
        self,
        num_values: int,
        part_values: int = PART_VALUES,
        codec: AveragingCodecName = "int8",
        *,
        means: int = 0,
    ) -> None:
        """Of a gradient of `num_values` in the codec of that name; with `means` of second moments, also of moments."""
        self.num_values, self.part_values = num_values, part_values
        """Of the gradient; of a whole part."""
        self.gradient = _cut(slice(0, num_values), part_values)
        """The first parts."""
        self.first = _cut(slice(num_values, 2 * num_values if means else num_values), part_values)
        """Then those of first moments."""
        self.second = _cut(slice(2 * num_values, 2 * num_values + means), part_values) if means else ()
        """The last: of second moments' means."""
        self._slices = (*self.gradient, *self.first, *self.second)
        self._codecs = (codec,) * (len(self.gradient) + len(self.first)) + (CODEC_OF_MEANS,) * len(self.second)

    @classmethod
    def of(cls, settings: RunSettings, layout: ParameterLayout) -> "Parts":
        """Those of a stage in a run."""
        num_values, means = layout.num_values, num_means(layout) if settings.has_windows else 0
        return cls(num_values, settings.part_values(num_values), settings.codecs.averaging, means=means)

    def __len__(self) -> int:
        return len(self._slices)

    @overload
    def __getitem__(self, index: int) -> slice: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[slice, ...]: ...
    def __getitem__(self, index: int | slice) -> slice | tuple[slice, ...]:
        return self._slices[index]

    def touching(self, where: slice) -> range:
        """Parts of the gradient that hold some of these values."""
        return range(where.start // self.part_values, -(-where.stop // self.part_values))

    def runs(self, num_values: int) -> list[range]:
        """All parts in order, at least one and no more than of so many values together, which follow each other."""
        most = max(1, num_values // self.part_values)
        starts = itertools.accumulate(map(len, (self.gradient, self.first, self.second)), initial=0)
        return [
            range(first, min(first + most, stop))
            for start, stop in itertools.pairwise(starts)
            for first in range(start, stop, most)
        ]

    @property
    def moments(self) -> range:
        """Which parts are of moments."""
        return range(len(self.gradient), len(self))

    def size(self, part: int) -> int:
        """Its values."""
        where = self._slices[part]
        return int(where.stop - where.start)

    def codec_name(self, part: int) -> AveragingCodecName:
        """That contributions to it are in."""
        return self._codecs[part]

    def contribution_codec(self, part: int) -> VectorCodec:
        return vector_codec(self._codecs[part])

    def result_codec(self, part: int) -> VectorCodec:
        """No contribution is longer than a result."""
        return result_codec(self._codecs[part])

    def result_bytes(self, part: int) -> int:
        """Of a result's part."""
        return self.result_codec(part).encoded_bytes(self.size(part))

    @property
    def all_result_bytes(self) -> int:
        """Of a whole result."""
        return sum(self.result_bytes(part) for part in range(len(self)))

    def norm_cap(self, part: int, cap: float | None) -> float | None:
        """`swarm.averaging.reduce.norm_cap` where it is the norm of such values: of a gradient's."""
        return cap if part < len(self.gradient) else None


def _cut(whole: slice, part_values: int) -> tuple[slice, ...]:
    starts = range(whole.start, whole.stop, part_values)
    return tuple(slice(start, min(start + part_values, whole.stop)) for start in starts)
