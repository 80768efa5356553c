"""Checkpoints are tried at tasks beside the host: what comes of it is signed, shown, tracked; a failure is only said.

lm-eval itself is not installed for tests: a module of its name takes its arguments and writes a file as it does.
"""

import asyncio
import json
from pathlib import Path

import pytest

from bootstrap.program.dashboard import Dashboard
from bootstrap.program.hosting import _newest_untried
from bootstrap.state.task_scores import TaskScores, checked_tasks, read_scores
from bootstrap.tracking.rows import Rows
from swarm.checkpoint.record import CheckpointScores, Score
from swarm.core.errors import LocalError, SettingsError
from tests import ROOT
from tests.bootstrap.state.hosted import Hosted, hosted

LM_EVAL = """
import json, pathlib, sys
told = dict(zip(sys.argv[1::2], sys.argv[2::2]))
model = pathlib.Path(told["--model_args"].removeprefix("pretrained="))
assert json.loads((model / "config.json").read_text())["model_type"], model
assert told["--tasks"] != "no_task", "there is no such task"
out = pathlib.Path(told["--output_path"]) / "model"
out.mkdir(parents=True)
found = {"alias": "small", "acc,none": 0.25, "acc_stderr,none": 0.125, "f1,strict": "N/A", "acc,strict": 1}
(out / "results_2026.json").write_text(json.dumps({"results": {told["--tasks"]: found}}))
"""


@pytest.fixture
def _lm_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "lm_eval.py").write_text(LM_EVAL)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'modules'}:{ROOT}")
    monkeypatch.syspath_prepend(tmp_path / "modules")


def scoring(host: Hosted, tasks: str) -> TaskScores:
    newest = lambda: _newest_untried(host.itself)  # noqa: E731
    return TaskScores(checked_tasks(tasks), host.run, host.ledger, newest, host.events.append)


@pytest.mark.soak
@pytest.mark.usefixtures("_lm_eval")
def test_the_newest_checkpoint_is_tried_and_its_scores_are_signed_shown_and_tracked(tmp_path: Path) -> None:
    async def trial() -> None:
        async with hosted(tmp_path / "run") as host:
            for version in (4, 8):
                host.archive(version)
            failing = scoring(host, "no_task")
            await failing.finish()
            assert [event["version"] for event in host.events if event["event"] == "not_scored"] == [8]
            assert "there is no such task" in host.events[-1]["reason"]
            assert _newest_untried(host.itself) == 8  # which another host's process may try again
            await scoring(host, "small").finish()
            assert host.events[-1]["event"] == "scores", host.events[-1]
            record = CheckpointScores.from_value(host.itself.books.scores[8])
            assert record.is_signed_by(host.run.run_key.peer_id)
            assert (record.run_id, record.version) == (host.run.run_id, 8)
            expected = (
                Score("small", "acc", 0.25),
                Score("small", "acc,strict", 1.0),
                Score("small", "acc_stderr", 0.125),
            )
            assert record.scores == expected
            assert _newest_untried(host.itself) is None
            shown = Dashboard(host.itself).state()["scores"]
            assert shown[0] == {"version": 8, "task": "small", "metric": "acc", "value": 0.25}
            rows = Rows()
            made = [row for event in host.ledger.events() if (row := rows.take(event)) is not None]
            assert made[-1].step == 8
            assert made[-1].figures["small/acc"] == 0.25

    asyncio.run(trial())


def test_results_that_are_not_there_are_said(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="no results"):
        read_scores(tmp_path)


def test_other_figures_than_numbers_are_left_out(tmp_path: Path) -> None:
    said = {"results": {"t": {"alias": "t", "ppl,none": float("inf"), "acc,none": 0.5}}}
    (tmp_path / "results_1.json").write_text(json.dumps(said))
    assert read_scores(tmp_path) == (Score("t", "acc", 0.5),)


def test_without_lm_eval_the_line_that_installs_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"pip install 'homeswarm\[lm-eval\]'"):
        checked_tasks("arc_easy")
    assert checked_tasks(None) == ()
    with pytest.raises(SettingsError, match="arc_easy,hellaswag"):
        checked_tasks(" , ")
