"""This is where the certified results of a stage stay longer than their bytes: a host that was away follows by them.

Without bodies a result is some kilobytes, and who has followed a stage so far can go on through them, step by step.
"""

from collections import OrderedDict

from swarm.core.canonical import Packed
from swarm.core.contribution import Result

MOST_BYTES = 64 << 20
"""Of the stage's last results; the oldest go first."""
MOST_AT_ONCE_BYTES = 2 << 20
"""In one answer, but for a single result that is longer."""


class BareResults:
    """The last results by step, in canonical bytes."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._results: OrderedDict[int, Packed] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._results)

    def keep(self, result: Result) -> None:
        packed = result.packed
        self._results[int(result.roster.step)] = packed
        self._bytes += len(packed.data)
        while self._bytes > self._most_bytes and len(self._results) > 1:
            _, oldest = self._results.popitem(last=False)
            self._bytes -= len(oldest.data)

    def clear(self) -> None:
        """The stage begins again, at another version."""
        self._results.clear()
        self._bytes = 0

    def since(self, step: int, *, at_most: int) -> list[Packed]:
        """Those of `step` and the steps after it, as far as they are here without a gap and fit one answer."""
        found: list[Packed] = []
        left = MOST_AT_ONCE_BYTES
        while len(found) < at_most and (packed := self._results.get(step + len(found))) is not None:
            left -= len(packed.data)
            if left < 0 and found:
                break
            found.append(packed)
        return found
