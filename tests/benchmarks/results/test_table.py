"""README's table is what docs/results.json says."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.results.entry import Command, Entry, NotAsStatedError, Row, object_of, passed
from benchmarks.results.record import Machine, Record, minutes, read_records, write_records
from benchmarks.results.table import ENTRIES, README, render, rendered_into
from benchmarks.results.trust import TRUST
from swarm.core.errors import LocalError

ENTRY = Entry(
    name="speed",
    commands=(Command("python -m one"), Command("python -m other --seed 2")),
    read=lambda answers: {},
    measures=(),
    minutes=1,
    rows=(Row("of {peers:.0f} peers", "{rate:.2f} a second"),),
)
RECORD = Record(
    figures={"peers": 3, "rate": 1.239},
    commands=("python -m one", "python -m other --seed 2"),
    commit="abc1234",
    date="2026-11-02",
    machine=Machine(2),
    seconds=None,
)


def test_the_readme_has_the_table_that_the_records_give() -> None:
    text = README.read_text(encoding="utf-8")
    again = rendered_into(text, render(ENTRIES, read_records()))
    assert again == text, "`python -m benchmarks.results --render` writes it"


def test_every_record_is_of_an_entry_and_names_are_unique() -> None:
    names = [entry.name for entry in ENTRIES]
    assert len(names) == len(set(names))
    assert read_records().keys() <= set(names)


def test_records_name_no_host_and_no_path() -> None:
    for record in read_records().values():
        assert "/" not in json.dumps(record.to_json()["machine"])


def test_a_row_has_its_figures_commands_and_commit() -> None:
    *_, row = render([ENTRY], {"speed": RECORD}).splitlines()
    assert row == (
        "| of 3 peers | 1.24 a second | `python -m one`, `python -m other --seed 2` | `abc1234`, 2 Nov 2026 |"
    )


def test_rows_stand_as_they_were_measured_until_they_are_with_the_commands_of_now() -> None:
    before = replace(RECORD, commands=("python -m one --seed 7",), lines=("| of 7 peers | ... |",), figures={})
    assert render([ENTRY], {"speed": before}).splitlines()[-1] == "| of 7 peers | ... |"


def test_the_time_that_is_told_is_the_time_it_took() -> None:
    assert minutes(ENTRY, None) == minutes(ENTRY, RECORD) == 1
    assert minutes(ENTRY, replace(RECORD, seconds=90.0)) == 1.5
    assert minutes(ENTRY, replace(RECORD, seconds=90.0, commands=("python -m one",))) == 1


def test_cores_stand_with_each_row_where_machines_differ() -> None:
    large = replace(RECORD, machine=Machine(64))
    table = render([ENTRY, replace(ENTRY, name="more")], {"speed": RECORD, "more": large})
    assert "All on" not in table
    assert table.endswith("`abc1234`, 2 Nov 2026, 64 cores |")


def test_a_row_without_figures_is_refused_by_name() -> None:
    with pytest.raises(LocalError, match="not measured: speed"):
        render([ENTRY], {})


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(LocalError, match="no place for the table"):
        rendered_into("# a page", "| table |")


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write_records({"speed": RECORD}, path)
    assert read_records(path) == {"speed": RECORD}
    assert Machine.here().cores > 0


def test_figures_are_read_after_lines_of_progress() -> None:
    assert object_of('1 of 2 {done}\n{"a": [1]}\n') == {"a": [1]}
    assert passed(["3 passed, 2 deselected in 1.0s"]) == {"passed": 3}
    with pytest.raises(NotAsStatedError, match="no test passed"):
        passed(["5 deselected"])
    with pytest.raises(NotAsStatedError, match="no JSON"):
        object_of("Traceback")


def test_words_that_do_not_hold_are_no_figure() -> None:
    (cost,) = (entry for entry in TRUST if entry.name == "honest audits")
    found = {"accused": 1, "equal_to_the_bit": True, "audits": 9, "largest_honest_share": 0.1}
    with pytest.raises(NotAsStatedError, match="not as stated: nobody is accused"):
        cost.read([json.dumps({"all": found, "scenes": [], "wires": {}})])
