"""Commands of README's table are run as they stand there, and what fails is no figure."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.results import measuring
from benchmarks.results.entry import Command, Entry, Row, object_of
from benchmarks.results.measuring import measure, program
from benchmarks.results.record import read_records, write_records
from benchmarks.results.table import ENTRIES
from swarm.core.errors import LocalError


def entry(name: str, code: str) -> Entry:
    """One whose command prints what the code says."""
    return Entry(
        name=name,
        commands=(Command(f"python -c '{code}'", ""),),
        read=lambda answers: object_of(answers[0]),
        measures=("swarm.core.errors",),
        minutes=1,
        rows=(Row("speed", "1"),),
    )


@pytest.fixture
def own_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Results of this test alone, of code that nobody has touched."""
    path = tmp_path / "results.json"
    write_records({}, path)
    monkeypatch.setattr(measuring, "LEFT", tmp_path / "left")
    monkeypatch.setattr(measuring, "read_records", lambda: read_records(path))
    monkeypatch.setattr(measuring, "write_records", lambda records: write_records(records, path))
    monkeypatch.setattr(measuring, "uncommitted", lambda files, root: None)
    monkeypatch.setattr(
        measuring, "stale", lambda entries, records, root: {one.name for one in entries} - records.keys()
    )
    return path


def test_what_is_measured_is_written_down_and_not_measured_again(own_results: Path, tmp_path: Path) -> None:
    said = list[str]()
    code = f'print(1, file=open("{tmp_path}/runs", "a")); print(dict())'
    good, bad = entry("good", code), entry("bad", "raise SystemExit(3)")
    failed = measure([bad, good], force=False, say=said.append)
    assert len(failed) == 1
    assert "ended with exit code 3" in failed[0]
    assert said[0] == "1 of 2: bad, about 1 min; 2.0 min left in all"
    (record,) = read_records(own_results).values()
    assert record.machine.cores > 0
    assert record.seconds is not None
    assert record.code is not None
    assert [line.startswith("| speed | 1 | `python -c ") for line in record.lines] == [True]
    measure([good], force=False, say=said.append)
    assert (tmp_path / "runs").read_text() == "1\n"
    measure([good], force=True, say=said.append)
    assert (tmp_path / "runs").read_text() == "1\n1\n"
    assert [path.name.partition("-")[0] for path in (tmp_path / "left").iterdir()] == ["bad"]


def test_an_answer_is_read_from_the_file_that_was_asked_for(own_results: Path) -> None:
    told = entry("told", "import sys; print(dict(), file=open(sys.argv[2], chr(119))); print(1)")
    told = replace(told, commands=(replace(told.commands[0], to_read="--report answer.json"),))
    assert measure([told], force=False, say=lambda line: None) == []


def test_nothing_is_measured_of_code_that_is_not_committed(own_results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "uncommitted", lambda files, root: "changed")
    (failed,) = measure([entry("one", "print(dict())")], force=False, say=lambda line: None)
    assert "commit first" in failed


def test_every_command_of_the_table_can_be_run_without_a_shell() -> None:
    for command in (command for one in ENTRIES for command in one.commands):
        assert program(f"{command.line} {command.to_read}")[0] == sys.executable
    assert program('make soak TESTS="-rP a.py"')[-2:] == ["-rP", "a.py"]
    with pytest.raises(LocalError, match="nobody knows"):
        program("rm file")
