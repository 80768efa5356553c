"""The table of who may write what, held against what is declared: it names every record and every field, once."""

import re
from collections import Counter

from benchmarks.red_team.records import declared, slots_of
from tests import ROOT

HEADING = "## 11. Who may write what"


def tables() -> dict[str, list[str]]:
    """Fields by record, as the docs have them."""
    text = (ROOT / "docs" / "verification.md").read_text().split(HEADING, 1)[1]
    found: dict[str, list[str]] = {}
    record = ""
    for line in text.splitlines():
        if heading := re.match(r"#### `(\w+)`", line):
            record = heading[1]
            found[record] = []
        elif line.startswith("| `") and record:
            found[record] += re.findall(r"`(\w+)`", line.split("|")[1])
    return found


def test_the_table_names_every_declared_record_and_no_other() -> None:
    assert sorted(tables()) == sorted(kind.__name__ for kind in declared())


def test_the_table_names_every_field_of_a_record_once_and_no_other() -> None:
    found = tables()
    for kind in declared():
        named = Counter(name for name, _, _ in slots_of(kind))
        assert Counter(found[kind.__name__]) == named, kind.__name__


def test_every_row_has_an_answer() -> None:
    text = (ROOT / "docs" / "verification.md").read_text().split(HEADING, 1)[1]
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) > len(declared())
    assert not [row for row in rows if len(row) != 3 or not all(cell.strip() for cell in row)]
