"""The owner's limits on a peer: their names, meanings and written forms.

One spelling everywhere: `swarm join --upload-mbit 10`, `swarm config upload-mbit 10`, `{"upload-mbit": "10"}` on disk.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from swarm.core.errors import SettingsError

NONE = "none"
"""Written for a limit that is not set."""
DAY_MINUTES = 24 * 60
GPU_WORDS = ("auto", "cpu", "all")
"""That stand for a GPU's number."""


@dataclass(frozen=True)
class Hours:
    """Times of the day, as minutes from midnight [start, stop); a span may pass midnight."""

    spans: tuple[tuple[int, int], ...]

    def include(self, minute: int) -> bool:
        return any(
            start <= minute < stop if start < stop else minute >= start or minute < stop for start, stop in self.spans
        )

    def next_start(self, minute: int) -> int:
        """The minute of the day at which the next span begins."""
        return min((start for start, _ in self.spans), key=lambda start: (start - minute) % DAY_MINUTES)

    def __str__(self) -> str:
        return ",".join(f"{clock(start)}-{clock(stop)}" for start, stop in self.spans)


def clock(minute: int) -> str:
    """A minute of the day as people write it: 07:30."""
    return f"{minute // 60:02d}:{minute % 60:02d}"


@dataclass(frozen=True, kw_only=True)
class OwnerLimits:
    """What the owner of a machine allows its peer. None: no limit. See `LIMITS` for what each means."""

    threads: int | None = None
    memory_gib: float | None = None
    gpu: str = "auto"
    gpu_memory_gib: float | None = None
    disk_gib: float | None = None
    disk_writes_gib: float | None = None
    upload_mbit: float | None = None
    download_mbit: float | None = None
    month_gb: float | None = None
    relay_gb: float | None = None
    router_ports: str = "ask"
    hours: Hours | None = None
    on_battery: str = "pause"
    nice: int = 12
    busy_cpu: float | None = None
    busy_gpu: float | None = None

    def get(self, name: str) -> str:
        """The limit as written."""
        value = getattr(self, limit_named(name).field)
        return NONE if value is None else f"{value:g}" if isinstance(value, float) else str(value)

    def with_value(self, name: str, text: str) -> "OwnerLimits":
        """The limits with one changed to what `text` says. Raises SettingsError with the name and the remedy."""
        limit = limit_named(name)
        try:
            value = _unset(limit) if text == NONE else limit.parse(text)
        except ValueError as error:
            raise SettingsError(f"{name} {text}: {error}; for example `swarm config {name} {limit.example}`") from error
        return replace(self, **{limit.field: value})

    def changed(self, values: Mapping[str, str]) -> "OwnerLimits":
        """The limits with these written ones changed."""
        made = self
        for name, text in values.items():
            made = made.with_value(name, text)
        return made

    def written(self) -> dict[str, str]:
        """Those that are not as they are by default."""
        default = OwnerLimits()
        return {limit.name: self.get(limit.name) for limit in LIMITS if self.get(limit.name) != default.get(limit.name)}


@dataclass(frozen=True)
class Limit:
    """One of the owner's limits: how it is written and what it means."""

    name: str
    parse: Callable[[str], Any]
    example: str
    meaning: str
    at_next_start: bool = False
    """A change waits for the daemon's next start."""

    @property
    def field(self) -> str:
        return self.name.replace("-", "_")


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("give a number") from None
    if not 0.001 <= value <= 1e9:
        raise ValueError("give a number from 0.001 up, or none")
    return value


def _percent(text: str) -> float:
    value = _number(text.removesuffix("%"))
    if value > 100:
        raise ValueError("give a percentage")
    return value


def _whole(lowest: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or len(text) > 6 or int(text) < lowest:
            raise ValueError(f"give a whole number from {lowest} up, or none")
        return int(text)

    return parse


def _gpu(text: str) -> str:
    """Numbers ascending, each once."""
    if text in GPU_WORDS:
        return text
    numbers = text.split(",")
    if not all(number.strip().isdecimal() and len(number.strip()) <= 2 for number in numbers):
        raise ValueError("give auto, cpu, all, or the numbers of GPUs, counted from 0, with a comma between two")
    named = sorted(int(number) for number in numbers)
    if len(set(named)) < len(named):
        raise ValueError("a GPU is named twice; one peer computes on each")
    return ",".join(map(str, named))


def _nice(text: str) -> int:
    if not text.isdecimal() or len(text) > 2 or int(text) > 19:
        raise ValueError("give a whole number from 0, as other programs run, to 19, when nothing else runs")
    return int(text)


def _word(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(f"give {' or '.join(words)}")
        return text

    return parse


def _hours(text: str) -> Hours:
    spans = []
    for span in text.split(","):
        start, _, stop = span.strip().partition("-")
        spans.append((_minute(start), _minute(stop)))
    if any(start == stop for start, stop in spans) or len(spans) > 16:
        raise ValueError("give spans such as 22:00-07:00, with a comma between two")
    return Hours(tuple(spans))


def _minute(text: str) -> int:
    hour, _, minute = text.strip().partition(":")
    if not (hour.isdecimal() and minute.isdecimal() and len(hour) <= 2 and len(minute) == 2):
        raise ValueError("give spans such as 22:00-07:00")
    if int(hour) > 23 or int(minute) > 59:
        raise ValueError("a day has times from 00:00 to 23:59")
    return int(hour) * 60 + int(minute)


LIMITS = (
    Limit("threads", _whole(1), "2", "processor cores to use; none: all", at_next_start=True),
    Limit("memory-gib", _number, "8", "most memory, in GiB; none: what is free at the start", at_next_start=True),
    Limit(
        "gpu",
        _gpu,
        "0,1",
        "GPUs to use, one peer on each: auto, the first that there is; numbers such as 0,1; all; or cpu",
        at_next_start=True,
    ),
    Limit("gpu-memory-gib", _number, "6", "most memory of each GPU, in GiB", at_next_start=True),
    Limit("disk-gib", _number, "20", "most disk space of the state folder, in GiB"),
    Limit("disk-writes-gib", _number, "50", "most written to disk in a day, in GiB"),
    Limit("upload-mbit", _number, "10", "most upload, in Mbit/s"),
    Limit("download-mbit", _number, "50", "most download, in Mbit/s"),
    Limit("month-gb", _number, "500", "most traffic of a calendar month, up and down, in GB"),
    Limit(
        "relay-gb",
        _number,
        "20",
        "GB a month to carry peers that cannot be dialled; none: no",
        at_next_start=True,
    ),
    Limit(
        "router-ports",
        _word("ask", "leave"),
        "leave",
        "ask the router to forward this peer's ports when it cannot be dialled, or leave it alone",
        at_next_start=True,
    ),
    Limit("hours", _hours, "22:00-07:00", "times of the day to work in"),
    Limit("on-battery", _word("pause", "work"), "pause", "what to do on battery: pause or work"),
    Limit("nice", _nice, "15", "how far it gives way to other programs: 0, not at all, to 19", at_next_start=True),
    Limit("busy-cpu", _percent, "40", "pause while other programs use more of the processor, in %"),
    Limit("busy-gpu", _percent, "10", "pause while other programs use more of a GPU, in %"),
)
_BY_NAME = {limit.name: limit for limit in LIMITS}
assert {limit.field for limit in LIMITS} == {field.name for field in fields(OwnerLimits)}


def limit_named(name: str) -> Limit:
    """Raises SettingsError that lists the names there are."""
    limit = _BY_NAME.get(name)
    if limit is None:
        raise SettingsError(f"{name}: there is no such limit; there are {', '.join(_names(LIMITS))}")
    return limit


def _names(limits: Iterable[Limit]) -> list[str]:
    return [limit.name for limit in limits]


def _unset(limit: Limit) -> Any:
    if limit.name == "on-battery":
        raise ValueError("give pause or work")
    if limit.name == "router-ports":
        raise ValueError("give ask or leave")
    if limit.name == "nice":
        raise ValueError("give a whole number from 0 to 19")
    return "auto" if limit.name == "gpu" else None
