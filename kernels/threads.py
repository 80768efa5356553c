"""A kernel's work spread over threads: ranges of whole blocks or runs, whose bits no count can change.

Kernels run without the GIL, so plain threads serve. Not numba's `parallel`: its threading layers abort on concurrent
calls or die in forked children.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

SMALLEST_RANGE_VALUES = 1 << 18
"""Handing a range to another thread costs about as much as a kernel takes for this many values."""
RANGES_PER_THREAD = 4
"""More ranges than threads: a thread whose core is busy elsewhere takes fewer of them."""


class Threads:
    """`count` threads, the caller's among them; may be shared by callers and outlives a fork. They sleep while idle."""

    def __init__(self, count: int) -> None:
        assert count >= 1, f"{count} threads"
        self.count = count
        """May be changed at any time, from any thread; what is called from then on keeps to it."""
        self._pool: ThreadPoolExecutor | None = None
        self._pool_process = self._pool_size = 0
        self._starting = threading.Lock()

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """`function` of each item, in order of the items. The first exception is raised once no thread works on."""
        count = min(self.count, len(items))
        if count < 2:
            return [function(item) for item in items]
        places = deque(range(len(items)))
        results: dict[int, Result] = {}

        def work() -> None:
            while True:
                try:
                    place = places.popleft()
                except IndexError:
                    return
                try:
                    results[place] = function(items[place])
                except BaseException:
                    places.clear()
                    raise

        pool = self._started_pool(count - 1)
        others = [pool.submit(work) for _ in range(count - 1)]
        try:
            work()
        finally:
            # What has not begun has nothing left to do: a pool that is busy with another caller delays nobody.
            failures = [other.exception() for other in others if not other.cancel()]
        for failure in failures:
            if failure is not None:
                raise failure
        return [results[place] for place in range(len(items))]

    def over(
        self, num_values: int, function: Callable[[int, int], Result], *, grain: int, num_rows: int = 1
    ) -> list[Result]:
        """`function(start, stop)` of ranges that cover [0, num_values); each but the last has a multiple of `grain`.

        `num_rows`: how many values the function works on for each of the `num_values`.
        """
        count, smallest = self.count, max(1, SMALLEST_RANGE_VALUES // num_rows)
        if count == 1 or num_values <= smallest:
            return [function(0, num_values)] if num_values else []
        share = max(smallest, -(-num_values // (RANGES_PER_THREAD * count)))
        step = -(-share // grain) * grain
        return self.map(lambda start: function(start, min(start + step, num_values)), range(0, num_values, step))

    def _started_pool(self, size: int) -> ThreadPoolExecutor:
        """Of so many threads at least. A smaller one goes when those who hold it are done with it."""
        with self._starting:
            if self._pool is None or self._pool_process != os.getpid():  # a fork copies the pool, not its threads
                self._pool_size = 0
            if self._pool is None or self._pool_size < size:
                self._pool = ThreadPoolExecutor(size, thread_name_prefix="kernels")
                self._pool_process, self._pool_size = os.getpid(), size
            return self._pool


ONE_THREAD = Threads(1)
