"""A tracker has each row once, however often the host or the tracker ends; read back by TensorBoard's own reader."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

from bootstrap.program.ledger import Ledger
from bootstrap.tracking import places
from bootstrap.tracking.feeding import ALL_GIVEN, Job, feed
from bootstrap.tracking.places import TrackerPlace
from bootstrap.tracking.tensorboard import TensorBoard, last_steps
from bootstrap.tracking.tracking import Tracking
from swarm.core.errors import SettingsError
from tests.bootstrap.tracking.told import RUN_ID, begin, evaluate, loss_of, tracked, train

SOON_S = 60.0


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    made = Ledger(tmp_path / "ledger.sqlite")
    begin(made)
    yield made
    made.close()


def held(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """All points of all event files, as TensorBoard's reader gives them."""
    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted((folder / RUN_ID[:12]).glob("events*")):
        event: Any
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def feeding_processes() -> list[psutil.Process]:
    """Of this process."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # and zombies, which others have left here
            if "bootstrap.tracking.feeding" in child.cmdline():
                found.append(child)
    return found


def feed_once(ledger: Ledger, folder: Path) -> None:
    """What a host's process that ends at once feeds."""
    ended = threading.Event()
    ended.set()
    feed(ledger, TensorBoard(str(folder), tracked(folder)), ended, lambda: None)


def test_a_host_that_is_started_again_neither_repeats_nor_leaves_out_a_step(ledger: Ledger, tmp_path: Path) -> None:
    train(ledger, 0, 1, 2)
    feed_once(ledger, tmp_path)
    train(ledger, 3)
    evaluate(ledger, 2, 4.5)  # late, of a version before the last step
    feed_once(ledger, tmp_path)
    feed_once(ledger, tmp_path)
    found = held(tmp_path)
    assert found["training_loss"] == [(step, loss_of(step)) for step in range(4)]
    assert found["held_out_loss"] == [(2, 4.5)]
    assert [step for step, _ in found["tokens"]] == [0, 1, 2, 3]


def test_what_a_killed_process_left_half_written_is_written_again(ledger: Ledger, tmp_path: Path) -> None:
    train(ledger, 0, 1, 2)
    feed_once(ledger, tmp_path)
    (path,) = (tmp_path / RUN_ID[:12]).glob("events*")
    path.write_bytes(path.read_bytes()[:-5])  # of the last row, training_loss of step 2
    assert last_steps(path.parent)["training_loss"] == 1
    feed_once(ledger, tmp_path)
    assert held(tmp_path)["training_loss"] == [(step, loss_of(step)) for step in range(3)]


def test_the_process_of_a_host_that_is_killed_writes_what_is_left_and_ends(ledger: Ledger, tmp_path: Path) -> None:
    train(ledger, 0, 1)
    job = Job(TrackerPlace.of(f"tensorboard:{tmp_path}"), tmp_path / "ledger.sqlite", tracked(tmp_path))
    assert Job.from_line(job.to_line()) == job
    done = subprocess.run(
        [sys.executable, "-P", "-m", "bootstrap.tracking.feeding"],
        input=job.to_line() + "\n",  # and then its end
        capture_output=True,
        text=True,
        timeout=SOON_S,
        check=True,
    )
    assert json.loads(done.stdout) == ALL_GIVEN
    assert held(tmp_path)["training_loss"] == [(step, loss_of(step)) for step in range(2)]


@pytest.mark.processes
def test_a_feeding_process_that_is_killed_is_started_again_beside_a_host_that_does_not_notice(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bootstrap.tracking.tracking.START_AGAIN_S", 0.05)
    told: list[dict[str, Any]] = []

    async def until_held(num_steps: int) -> None:
        give_up_at = time.monotonic() + SOON_S
        while len(held(tmp_path).get("training_loss", [])) < num_steps:
            assert time.monotonic() < give_up_at, told
            await asyncio.sleep(0.05)

    async def host() -> None:
        job = Job(TrackerPlace.of(f"tensorboard:{tmp_path}"), tmp_path / "ledger.sqlite", tracked(tmp_path))
        async with Tracking([job], told.append):
            train(ledger, 0, 1)
            await until_held(2)
            for child in feeding_processes():
                os.kill(child.pid, signal.SIGKILL)
            train(ledger, 2)
            await until_held(3)
            train(ledger, 3)  # written at the end, if not before

    asyncio.run(host())
    assert held(tmp_path)["training_loss"] == [(step, loss_of(step)) for step in range(4)]
    assert [event["event"] for event in told] == ["not_tracked", "tracked_again"]
    assert not feeding_processes()


@pytest.mark.processes
def test_a_tracker_that_fails_is_said_once_and_has_everything_later(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bootstrap.tracking.tracking.START_AGAIN_S", 0.05)
    told: list[dict[str, Any]] = []
    in_the_way = tmp_path / RUN_ID[:12]
    in_the_way.write_text("no folder")

    async def until_told(num_events: int) -> None:
        give_up_at = time.monotonic() + SOON_S
        while len(told) < num_events:
            assert time.monotonic() < give_up_at, told
            await asyncio.sleep(0.05)

    async def host() -> None:
        job = Job(TrackerPlace.of(f"tensorboard:{tmp_path}"), tmp_path / "ledger.sqlite", tracked(tmp_path))
        async with Tracking([job], told.append):
            train(ledger, 0, 1)
            await until_told(1)
            in_the_way.unlink()
            await until_told(2)

    asyncio.run(host())
    assert "FileExistsError" in told[0]["reason"]
    assert [event["event"] for event in told] == ["not_tracked", "tracked_again"]
    assert held(tmp_path)["training_loss"] == [(step, loss_of(step)) for step in range(2)]


@pytest.mark.parametrize("text", ["tensorboard", "tensorboard:", "aim:here", ":here"])
def test_another_place_is_refused_with_those_that_there_are(text: str) -> None:
    with pytest.raises(SettingsError, match="tensorboard:DIR, trackio:PROJECT, wandb:PROJECT"):
        TrackerPlace.of(text)


def test_a_tracker_that_is_not_installed_is_refused_with_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(places.ADAPTERS, "tracker_of_nobody", TensorBoard)
    with pytest.raises(SettingsError, match=r"pip install 'homeswarm\[tracker_of_nobody\]'"):
        TrackerPlace.of("tracker_of_nobody:place")
