"""What the ledger says of a step: once, when all stages have ended it, and with the tokens of its branch."""

from pathlib import Path

import pytest

from bootstrap.program.ledger import Ledger
from bootstrap.tracking.rows import Rows
from bootstrap.tracking.tracker import Row
from tests.bootstrap.tracking.told import TOKENS, begin, evaluate, loss_of, train


def rows_of(ledger: Ledger) -> list[Row]:
    rows = Rows()
    return [row for event in ledger.events() if (row := rows.take(event)) is not None]


def test_a_step_has_its_figures_once(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    begin(ledger)
    train(ledger, 0, 1)
    evaluate(ledger, 2, 4.5)
    made = rows_of(ledger)
    ledger.close()
    series = [(name, row.step) for row in made for name in row.figures]
    assert len(series) == len(set(series))
    told: dict[tuple[str, int], float] = {(name, row.step): v for row in made for name, v in row.figures.items()}
    assert told["training_loss", 1] == loss_of(1)
    assert told["tokens", 1] == 2 * TOKENS
    assert told["peers", 0] == 2
    assert told["held_out_loss", 2] == 4.5
    assert told["stale_share", 0] == pytest.approx(0.25)
    assert told["tokens_per_second", 1] > 0
    assert ("tokens_per_second", 0) not in told  # nothing ended before it
    assert [row.event for row in made] == sorted(row.event for row in made)


def test_tokens_after_a_rollback_are_those_of_the_version_gone_back_to(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    begin(ledger)
    train(ledger, 0, 1, 2, 3)
    begin(ledger, 10, from_version=1)
    train(ledger, 10)
    made = rows_of(ledger)
    ledger.close()
    told = [(row.step, row.figures["tokens"]) for row in made if "tokens" in row.figures]
    assert told == [(0, TOKENS), (1, 2 * TOKENS), (2, 3 * TOKENS), (3, 4 * TOKENS), (10, 2 * TOKENS)]
