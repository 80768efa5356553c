"""Which ranges of an address space are free: best fit, neighbours joined."""

from bisect import bisect_left, insort


class FreeExtents:
    """Free ranges of whole numbers, none of which overlap or touch."""

    def __init__(self) -> None:
        self.total = 0
        self._by_size: list[tuple[int, int]] = []
        """(size, start), sorted."""
        self._size_at: dict[int, int] = {}
        self._start_before: dict[int, int] = {}
        """Start by end."""

    def add(self, start: int, size: int) -> None:
        """The range is free from now on; no part of it was."""
        self.total += size
        before = self._start_before.get(start)
        if before is not None:
            size += self._remove(before)
            start = before
        if start + size in self._size_at:
            size += self._remove(start + size)
        insort(self._by_size, (size, start))
        self._size_at[start] = size
        self._start_before[start + size] = start

    def take(self, size: int) -> int | None:
        """Where `size` of them lie together that are free no longer: in the smallest range that has so many."""
        place = bisect_left(self._by_size, (size, 0))
        if place == len(self._by_size):
            return None
        found, start = self._by_size[place]
        self._remove(start)
        self.total -= found
        if found > size:
            self.add(start + size, found - size)
        return start

    def take_largest(self) -> tuple[int, int]:
        """Start and size of the largest range, which is free no longer. There is one."""
        size, start = self._by_size[-1]
        self._remove(start)
        self.total -= size
        return start, size

    def _remove(self, start: int) -> int:
        size = self._size_at.pop(start)
        del self._start_before[start + size]
        del self._by_size[bisect_left(self._by_size, (size, start))]
        return size
