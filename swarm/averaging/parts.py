"""A stage's flattened parameters cut into parts, the unit of commitment and reduction."""

from collections.abc import Sequence
from typing import overload

from swarm.core.settings import PART_VALUES, RunSettings

LARGEST_PART_VALUES = 1 << 20
PARTS_OF_A_REDUCER = 8
"""Fewer, and a round's first and last part, for which others wait, would be too much of it."""


class Parts(Sequence[slice]):
    """Where each part lies in a vector of `num_values`; all have `part_values`, but the last may be shorter."""

    def __init__(self, num_values: int, part_values: int = PART_VALUES) -> None:
        self.num_values, self.part_values = num_values, part_values
        self._slices = tuple(
            slice(start, min(start + part_values, num_values)) for start in range(0, num_values, part_values)
        )

    @classmethod
    def of(cls, settings: RunSettings, num_values: int) -> "Parts":
        """Those of a stage in a run: 2^18 values, or up to 2^20 where that leaves every peer some to reduce.

        Each part costs every peer a signature, a digest and a place in messages; in a run for a few peers, whose links
        may be fast, that was a sixth of a round.
        """
        wanted = PARTS_OF_A_REDUCER * settings.limits.max_peers_per_stage
        size = PART_VALUES
        while size < LARGEST_PART_VALUES and -(-num_values // (2 * size)) >= wanted:
            size *= 2
        return cls(num_values, size)

    def __len__(self) -> int:
        return len(self._slices)

    @overload
    def __getitem__(self, index: int) -> slice: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[slice, ...]: ...
    def __getitem__(self, index: int | slice) -> slice | tuple[slice, ...]:
        return self._slices[index]

    def touching(self, where: slice) -> range:
        """Parts that hold some of these values."""
        return range(where.start // self.part_values, -(-where.stop // self.part_values))
