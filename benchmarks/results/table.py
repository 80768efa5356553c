"""README's table of results, as the records have it."""

import re
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

from benchmarks.results.churn import CHURN
from benchmarks.results.entry import Entry, Row
from benchmarks.results.fleets import FLEETS
from benchmarks.results.homes import HOMES
from benchmarks.results.record import ROOT, Record
from benchmarks.results.training import TRAINING
from benchmarks.results.trust import TRUST
from swarm.core.errors import LocalError

README = ROOT / "README.md"
ENTRIES: Sequence[Entry] = (*TRAINING, *HOMES, *CHURN, *TRUST, *FLEETS)
BEGIN, END = "<!-- what `make results` writes begins -->", "<!-- and ends -->"
BETWEEN = re.compile(f"{re.escape(BEGIN)}\n.*?{re.escape(END)}", re.DOTALL)
ABOUT = (
    "The last column names the commit that was measured. `make results` measures all that is older than its code again;"
    " `python -m benchmarks.results --stale` says what that is, and how long it takes. Where a row has few seeds or "
    "cases, the page that it names has many, with the command for them."
)


def render(entries: Sequence[Entry], records: Mapping[str, Record]) -> str:
    """The table and what to know of it. Raises LocalError for a row without figures."""
    if missing := [entry.name for entry in entries if entry.name not in records]:
        raise LocalError(f"not measured: {', '.join(missing)}; `python -m benchmarks.results NAME` does")
    cores = {records[entry.name].machine.cores for entry in entries}
    machine = f"All on {cores.pop()} cores. " if len(cores) == 1 else ""
    lines = [f"{machine}{ABOUT}", "", "| what | measured | with | at |", "|---|---|---|---|"]
    for entry in entries:
        record = records[entry.name]
        lines += (
            lines_of(entry, record, with_cores=not machine) if record.commands == entry.lines_given else record.lines
        )
    return "\n".join(lines)


def rendered_into(text: str, table: str) -> str:
    """The page with the table between its two marks."""
    if not BETWEEN.search(text):
        raise LocalError(f"{README.name} has no place for the table: no line {BEGIN}")
    return BETWEEN.sub(lambda _: f"{BEGIN}\n{table}\n{END}", text)


def write_readme(records: Mapping[str, Record], path: Path = README) -> None:
    path.write_text(rendered_into(path.read_text(encoding="utf-8"), render(ENTRIES, records)), encoding="utf-8")


def lines_of(entry: Entry, record: Record, *, with_cores: bool = False) -> tuple[str, ...]:
    """The entry's rows with the figures of what was measured with its commands."""
    return tuple(_line(entry, row, record, with_cores=with_cores) for row in entry.rows)


def _line(entry: Entry, row: Row, record: Record, *, with_cores: bool) -> str:
    shown = row.shown or ", ".join(f"`{command.line}`" for command in entry.commands)
    day = date.fromisoformat(record.date)
    at = f"`{record.commit}`, {day.day} {day:%b %Y}" + (f", {record.machine.cores} cores" if with_cores else "")
    words = (text.format(**record.figures) for text in (row.what, row.says))
    return f"| {' | '.join((*words, shown, at))} |"
