"""Entries measured one after another; what is newer than its code is left as it is."""

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.results.entry import ANSWER, Command, Entry
from benchmarks.results.reach import Sources
from benchmarks.results.record import ROOT, Machine, Record, minutes, read_records, today, write_records
from benchmarks.results.staleness import Code, git, stale, uncommitted
from benchmarks.results.table import lines_of
from swarm.core.errors import LocalError

LEFT = ROOT / "results-out"
"""A folder for each entry until it is measured: what it has so far, if it is broken off."""


def program(line: str) -> list[str]:
    """The command line without a shell, with this Python and without an installation."""
    words = shlex.split(line)
    match words:
        case ["python", *rest]:
            return [sys.executable, *rest]
        case ["swarm", *rest]:
            return [sys.executable, "-m", "swarm", *rest]
        case ["make", "demo", *rest]:
            return [sys.executable, "-m", "swarm", "demo", *rest]
        case ["make", ("test" | "soak") as kind, tests]:
            marked = ["not soak"] if kind == "test" else ["soak", "--timeout", "3600"]
            return [sys.executable, "-m", "pytest", "-m", *marked, *shlex.split(tests.removeprefix("TESTS="))]
    raise LocalError(f"{line}: nobody knows how to run this; see {__name__}.program")


def measure(entries: Sequence[Entry], *, force: bool, say: Callable[[str], None]) -> list[str]:
    """Measure what is old, or all with `force`, and write it down each time; what failed, as lines."""
    records = read_records()
    old = stale(entries, records, ROOT)
    waiting = [entry for entry in entries if force or entry.name in old]
    failed = []
    for number, entry in enumerate(waiting):
        each = [minutes(one, records.get(one.name)) for one in waiting[number:]]
        say(f"{number + 1} of {len(waiting)}: {entry.name}, about {each[0]:g} min; {sum(each):.1f} min left in all")
        try:
            record = measured(entry)
        except LocalError as error:
            failed.append(f"{entry.name}: {error}")
            say(failed[-1])
            continue
        write_records({**read_records(), entry.name: record})
        say(", ".join(f"{name} {value:g}" for name, value in record.figures.items()))
    return failed


def measured(entry: Entry) -> Record:
    """The entry's commands, run to their end. Raises LocalError when one fails or its words do not hold."""
    code = Code(entry, Sources(ROOT))
    if dirty := uncommitted(code.files(), ROOT):
        raise LocalError(f"{dirty}: commit first, for figures are of a commit")
    commit, of_code = str(git(ROOT, "log", "-1", "--format=%h")), code.digest()
    folder = LEFT / f"{entry.name.replace(' ', '-')}-{of_code}"
    folder.mkdir(parents=True, exist_ok=True)
    machine, began = Machine.here(), time.monotonic()
    figures = entry.read([answer(command, folder) for command in entry.commands])
    seconds = round(time.monotonic() - began, 1)
    shutil.rmtree(folder)
    record = Record(
        figures=figures,
        commands=entry.lines_given,
        commit=commit,
        date=today(),
        machine=machine,
        seconds=seconds,
        code=of_code,
    )
    return replace(record, lines=lines_of(entry, record))


def answer(command: Command, folder: Path) -> str:
    """What the command says, on its output or in the file that it was asked to write."""
    arguments = program(f"{command.line} {command.to_read}")
    is_test = "pytest" in arguments
    words = [arguments[0]]
    for word in arguments[1:]:
        words += sorted(map(str, folder.glob(word))) if "*" in word else [word]
    done = subprocess.run(
        words,
        cwd=ROOT if is_test else _with_examples(folder),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise LocalError(f"`{command.line}` ended with exit code {done.returncode}: {done.stdout[-1000:]}")
    return (folder / ANSWER).read_text(encoding="utf-8") if ANSWER in words else done.stdout


def _with_examples(folder: Path) -> Path:
    link = folder / "examples"
    if not link.is_symlink():
        link.symlink_to(ROOT / "examples")
    return folder
