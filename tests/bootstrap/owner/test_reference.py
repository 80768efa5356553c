"""A run that stays above another's held-out loss at equal tokens is noticed: once, and not for a single checkpoint."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bootstrap.owner.reference import MARGIN, RUNNING, Reference, read_reference
from swarm.core.errors import SettingsError
from tests.bootstrap.program.test_dashboard import train, watched

CURVE = Reference((0, 100, 1000), (5.0, 4.0, 2.0))


def measured(*losses: float) -> list[tuple[int, float]]:
    return [(100 * number, loss) for number, loss in enumerate(losses)]


def far_above(num_checkpoints: int) -> list[float]:
    return [(1 + 2 * MARGIN) * (CURVE.loss_at(100 * number) or 0.0) for number in range(num_checkpoints)]


def test_between_two_points_it_is_a_straight_line_and_beyond_them_nothing_is_known() -> None:
    assert [CURVE.loss_at(tokens) for tokens in (0, 50, 100, 550, 1000)] == [5.0, 4.5, 4.0, 3.0, 2.0]
    assert CURVE.loss_at(1001) is None
    assert Reference((10, 20), (2.0, 1.0)).loss_at(9) is None


def test_what_stays_above_is_noticed_once_and_again_after_it_was_well() -> None:
    losses = far_above(3 * RUNNING)
    losses[RUNNING + 1] = 1.0
    noticed = [n for n in range(1, len(losses) + 1) if CURVE.why_behind(measured(*losses[:n])) is not None]
    assert noticed == [RUNNING, 2 * RUNNING + 2]


def test_about_the_same_is_no_trouble() -> None:
    losses = [(1 + MARGIN / 2) * (CURVE.loss_at(100 * number) or 0.0) for number in range(2 * RUNNING)]
    assert CURVE.why_behind(measured(*losses)) is None
    assert CURVE.why_behind([(10**6, 99.0)] * RUNNING) is None  # beyond its end


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("curve.csv", "tokens,loss\n0,5.0\n1000,2.0\n100,4.0\n"),
        ("curve.json", "[[0, 5.0], [100, 4.0], [1000, 2.0]]"),
        ("report.json", json.dumps({"steps": 3, "held_out_by_tokens": [[0, 5.0], [100, 4.0], [1000, 2.0]]})),
    ],
)
def test_it_is_read_from_a_table_a_list_or_another_runs_report(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert read_reference(tmp_path / name) == CURVE


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("curve.csv", "tokens,perplexity\n0,5.0\n100,4.0\n"),
        ("curve.csv", "tokens,loss\n0,nan\n100,4.0\n"),
        ("curve.csv", "tokens,loss\n0,5.0\n"),
        ("curve.json", "{}"),
        ("curve.json", "not JSON"),
        ("curve.json", "[[0, null], [1, 2]]"),
        ("curve.json", "[1, 2]"),
    ],
)
def test_another_file_is_refused_by_its_name(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SettingsError, match=f"--reference .*{name}"):
        read_reference(tmp_path / name)


def test_the_host_says_so_and_draws_the_curve_beside_its_own(tmp_path: Path) -> None:
    async def look() -> None:
        async with watched(tmp_path) as (host, session):
            itself = host.itself
            itself.settings = replace(itself.settings, reference=Reference((0, 64 * 20), (4.0, 2.0)))
            train(host, range(6))  # of 64 tokens each
            for version in range(1, 6):
                host.ledger.append("evaluation", {"version": version, "held_out_loss": 4.1})
                itself._compare(version)
            async with session.get("/state.json") as answer:
                state: dict[str, Any] = await answer.json()
            assert [(notice["kind"], notice["step"]) for notice in state["notices"]] == [("behind_reference", RUNNING)]
            assert state["reference"] == [[version, 4.0 - version / 10] for version in range(1, 7)]
            assert itself.report()["held_out_by_tokens"] == [(64 * version, 4.1) for version in range(1, 6)]

    asyncio.run(look())
