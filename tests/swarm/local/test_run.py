"""A swarm from a script: what it is asked for is checked before anything starts, and the example runs to its end."""

import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

import swarm
from swarm import Manifest, Run
from swarm.core.errors import LocalError, SettingsError
from swarm.local.run import RunStatus
from tests import ROOT

EXAMPLE = ROOT / "examples" / "train_locally.py"


def test_manifest_is_written_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    written = Manifest.write(
        path,
        run={"name": "a.b"},
        model={"stages": 2, "recompute": True},
        data={"text": [tmp_path]},
        optimizer={"learning_rate": 1e-05},
    )
    assert written.data.text == (str(tmp_path),)
    assert Manifest.read(path) == written
    assert (written.tables.run.name, written.tables.optimizer.learning_rate, written.model.recompute) == (
        "a.b",
        1e-05,
        True,
    )
    with pytest.raises(SettingsError, match=r"model\.stages"):
        Manifest.write(tmp_path / "other.toml", model={"stages": 99})
    with pytest.raises(SettingsError, match=r"data\.text is a set; give text"):
        Manifest.write(tmp_path / "other.toml", data={"text": {"a.txt"}})
    assert not (tmp_path / "other.toml").exists()


def test_peers_that_do_not_suit_the_manifest_are_refused(tmp_path: Path) -> None:
    manifest = Manifest.write(tmp_path / "run.toml", limits={"founders_per_stage": 2})
    for peers in ((2,), (2, 1), (2, 2, 2)):
        with pytest.raises(SettingsError, match=r"the manifest has 2 stages, each of which begins with .* = 2 peers"):
            Run(manifest, peers=peers)


class RunThatIsAhead:
    """Of a run that has gone on to its end while the script was busy: events wait, its status is the last."""

    web, invite = "http://127.0.0.1/", "swarm://127.0.0.1"
    status = RunStatus(version=4, loss=1.25, finished=True)

    def __init__(self, manifest: Manifest, peers: tuple[int, ...], evaluate_tokens: int) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def events(self, *, timeout_s: float) -> Iterator[dict[str, Any]]:
        for step in range(4):
            for num_targets in (512, 0):
                yield {
                    "event": "step",
                    "step": step,
                    "loss_sum": num_targets * (5.0 - step),
                    "num_targets": num_targets,
                }
            yield {"event": "version", "version": step + 1}

    def wait(self, *, timeout_s: float) -> dict[str, Any]:
        return {"held_out_by_tokens": [[0, 5.0], [2048, 1.25]], "tokens": 2048}


def test_example_tells_of_each_step_once_and_with_its_own_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(swarm, "Run", RunThatIsAhead)
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), str(tmp_path)])
    runpy.run_path(str(EXAMPLE))
    steps = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("step", "version"))]
    assert steps == ["step 0: loss 5.000", "step 1: loss 4.000", "step 2: loss 3.000", "step 3: loss 2.000"]


@pytest.mark.soak
def test_host_that_ends_early_is_said_with_its_last_words(tmp_path: Path) -> None:
    manifest = Manifest.write(tmp_path / "run.toml", data={"max_text_mb": 1})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.key").write_text("no key")
    with pytest.raises(LocalError, match=r"(?s)the host ended before the run did:.*identity file"):
        Run(manifest).start()


@pytest.mark.soak
def test_example_trains_pulls_and_leaves_nothing_running(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = next(line for line in done.stdout.splitlines() if line.startswith("held-out loss"))
    start, end = float(said.split()[2]), float(said.split()[4])
    assert end < start
    steps = [line.split(":")[0] for line in done.stdout.splitlines() if line.startswith("step ")]
    assert steps == sorted(set(steps), key=steps.index)
    assert len(steps) >= 8
    assert (tmp_path / "out" / "model" / "model.safetensors").is_file()
    left = [p.pid for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]
    assert left == []
