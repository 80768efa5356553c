"""What of a text was left out, by reason: how much, and the first names."""

from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_NAMED = 20


@dataclass(frozen=True)
class Skipped:
    """Files, or rows of files, left out for one reason."""

    reason: str
    count: int
    named: tuple[str, ...]
    """The first files; of rows, the files that they are in."""

    def __str__(self) -> str:
        more = ", ..." if self.count > len(self.named) else ""
        return f"skipped {self.count}, {self.reason}: {', '.join(self.named)}{more}"


@dataclass
class SkippedCount:
    """Counts as a text is read."""

    _counts: dict[str, int] = field(default_factory=dict)
    _named: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, known: Sequence[Skipped]) -> "SkippedCount":
        """That goes on from what is known."""
        return cls({one.reason: one.count for one in known}, {one.reason: list(one.named) for one in known})

    def add(self, reason: str, name: str) -> None:
        self._counts[reason] = self._counts.get(reason, 0) + 1
        named = self._named.setdefault(reason, [])
        if name not in named and len(named) < MAX_NAMED:
            named.append(name)

    def found(self) -> tuple[Skipped, ...]:
        """By reason, sorted."""
        counts = sorted(self._counts.items())
        return tuple(Skipped(reason, count, tuple(self._named[reason])) for reason, count in counts)
