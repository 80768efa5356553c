"""What was measured, at which commit, when and on which machine: docs/results.json."""

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import psutil

from benchmarks.results.entry import Entry, Figures
from swarm.disk.whole_file import whole_file

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "docs" / "results.json"


@dataclass(frozen=True)
class Machine:
    """What a figure depends on of the machine; no names. None where nobody wrote it down."""

    cores: int
    memory_gib: float | None = None
    cpu: str | None = None
    load: float | None = None
    """Of other programs, when the measuring began."""

    @classmethod
    def here(cls) -> Self:
        memory_gib = round(psutil.virtual_memory().total / (1 << 30), 1)
        return cls(os.cpu_count() or 1, memory_gib, _cpu(), round(os.getloadavg()[0], 1))


@dataclass(frozen=True, kw_only=True)
class Record:
    """An entry's figures and where they come from."""

    figures: Figures
    commands: tuple[str, ...]
    """As they were given."""
    commit: str
    date: str
    machine: Machine
    seconds: float | None
    """That the commands took; None where nobody wrote it down."""
    code: str | None = None
    """Digest of the code that was measured (`staleness.Code`), which outlives a commit; None as above."""
    lines: tuple[str, ...] = ()
    """Of README's table, as they were written then: they stand while the entry's commands are others than these."""

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> Self:
        listed = {name: tuple(value.get(name, ())) for name in ("commands", "lines")}
        return cls(**{**value, **listed, "machine": Machine(**value["machine"])})

    def to_json(self) -> dict[str, Any]:
        value = asdict(self)
        value["machine"] = {name: one for name, one in value["machine"].items() if one is not None}
        value["figures"] = {name: float(f"{one:.6g}") for name, one in self.figures.items()}
        return value


def minutes(entry: Entry, record: Record | None) -> float:
    """That its commands take: what they took when they were measured, else what the entry supposes."""
    if record is None or record.seconds is None or record.commands != entry.lines_given:
        return entry.minutes
    return round(record.seconds / 60, 1)


def today() -> str:
    return datetime.now(UTC).date().isoformat()


def read_records(path: Path = RESULTS) -> dict[str, Record]:
    """By the entries' names."""
    return {name: Record.of_json(value) for name, value in json.loads(path.read_text(encoding="utf-8")).items()}


def write_records(records: Mapping[str, Record], path: Path = RESULTS) -> None:
    text = json.dumps({name: record.to_json() for name, record in sorted(records.items())}, indent=1)
    with whole_file(path) as partial:
        partial.write_text(f"{text}\n", encoding="utf-8")


def _cpu() -> str:
    """The processor's name, as Linux has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
