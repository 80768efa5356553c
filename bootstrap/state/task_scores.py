"""How the host has its checkpoints tried at lm-eval's tasks: by processes of their own, which it never waits for."""

import asyncio
import contextlib
import importlib.util
import json
import logging
import math
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bootstrap.program.ledger import Ledger
from bootstrap.state.run_folder import PreparedRun
from swarm.checkpoint.archive import checkpoint_path
from swarm.checkpoint.record import MAX_NAME, MAX_SCORES, CheckpointScores, Score
from swarm.core.errors import LocalError, SettingsError
from swarm.local.tied_program import tied
from swarm.network.loop import happened

log = logging.getLogger(__name__)

LONGEST_S = 6 * 3600.0
"""A trial that has not ended by then is given up."""
LOOK_S = 60.0
LAST_LINES = 12
SAID_BYTES = 4096
FOLDER = "tasks"
"""In the run's folder: the model that is being tried, what lm-eval says of it, and what it prints."""


def checked_tasks(text: str | None) -> tuple[str, ...]:
    """Of `a,b`; none for None. Raises SettingsError if there is none in it, or lm-eval is not installed."""
    if text is None:
        return ()
    tasks = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not tasks:
        raise SettingsError(f"--eval-tasks {text!r}: name lm-eval's tasks, as in arc_easy,hellaswag")
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or spec.origin is None:
        raise SettingsError("--eval-tasks: lm-eval is not installed here; pip install 'homeswarm[lm-eval]'")
    return tasks


class TaskScores:
    """Tries the newest checkpoint that is there and has no scores, one at a time; what lies between is passed over."""

    def __init__(
        self,
        tasks: Sequence[str],
        run: PreparedRun,
        ledger: Ledger,
        newest: Callable[[], int | None],
        emit: Callable[[dict[str, Any]], None],
    ) -> None:
        """`newest`: the version of the newest checkpoint, if it has no scores."""
        self._tasks = tasks
        self._run = run
        self._ledger = ledger
        self._newest = newest
        self._emit = emit
        self._more = asyncio.Event()
        self._failed: set[int] = set()
        self._work = run.folder.root / FOLDER

    def wake(self) -> None:
        """There is a new checkpoint."""
        self._more.set()

    async def run_for_ever(self) -> None:
        while True:
            self._more.clear()
            await self.finish()
            await happened(self._more, within_s=LOOK_S)

    async def finish(self) -> None:
        """Until there is no checkpoint to try."""
        while (version := self._newest()) is not None and version not in self._failed:
            try:
                async with asyncio.timeout(LONGEST_S):
                    scores = await self._scores(version)
            except (LocalError, TimeoutError) as error:
                self._failed.add(version)
                reason = str(error) or f"not done within {LONGEST_S / 3600:g} hours"
                log.warning("tasks at version %d: %s", version, reason)
                self._emit({"event": "not_scored", "version": version, "reason": reason})
                continue
            record = CheckpointScores(self._run.run_id, version, scores).signed_by(self._run.run_key)
            self._ledger.append("scores", record.to_value())
            told = [[score.task, score.metric, score.value] for score in scores]
            self._emit({"event": "scores", "version": version, "scores": told})

    async def _scores(self, version: int) -> tuple[Score, ...]:
        """Raises LocalError if they cannot be had."""
        await asyncio.to_thread(shutil.rmtree, self._work, ignore_errors=True)
        await asyncio.to_thread(self._work.mkdir)
        model, results = self._work / "model", self._work / "results"
        checkpoint = checkpoint_path(self._run.folder.checkpoints, version)
        await self._does("swarm", "export", str(checkpoint), str(model))
        of_model = ("--model", "hf", "--model_args", f"pretrained={model}")
        await self._does("lm_eval", *of_model, "--tasks", ",".join(self._tasks), "--output_path", str(results))
        scores = await asyncio.to_thread(read_scores, results)
        await asyncio.to_thread(shutil.rmtree, model, ignore_errors=True)
        return scores

    async def _does(self, module: str, *arguments: str) -> None:
        """Have a program of its own do it, tied to this one's life. Raises LocalError if it ends badly."""
        said = self._work / "said.log"
        with said.open("ab") as file:
            process = await asyncio.create_subprocess_exec(
                *tied(module, *arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        try:
            code = await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if code:
            last = said.read_bytes()[-SAID_BYTES:].decode(errors="replace").splitlines()[-LAST_LINES:]
            raise LocalError(f"{module} ended with {code}:\n" + "\n".join(last))


def read_scores(results: Path) -> tuple[Score, ...]:
    """Of the file that lm-eval has written below the folder, all numbers. Raises LocalError if there is no such file.

    lm-eval calls them `metric,filter`: the filter is named only where it is another than `none`.
    """
    paths = sorted(results.rglob("results*.json"))
    if not paths:
        raise LocalError("lm-eval has written no results")
    said: dict[str, dict[str, Any]] = json.loads(paths[-1].read_text(encoding="utf-8"))["results"]
    found = [
        Score(task[:MAX_NAME], name.removesuffix(",none")[:MAX_NAME], float(value))
        for task, metrics in said.items()
        for name, value in metrics.items()
        if "," in name and isinstance(value, int | float) and math.isfinite(value)
    ]
    return tuple(sorted(found, key=lambda score: (score.task, score.metric))[:MAX_SCORES])
