"""The benchmark of averaging rounds, run once, small, for its form and for what it leaves behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.round.averaging import Cell, goals
from benchmarks.round.orders import OrderFailed, Program, together
from tests import ROOT

SMALL = ["--peers", "2", "--params", "300000", "--rounds", "1", "--passes", "1", "--hivemind", "", "--gloo", ""]


@pytest.mark.soak
def test_small_round_of_ours_has_the_agreed_form_and_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.round.averaging", *SMALL, "--ours", "int8", "--json"]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path / "x"), "TMPDIR": str(tmp_path)}
    (tmp_path / "x").mkdir(mode=0o700)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    cell = json.loads(done.stdout)["ours"]["int8"]
    assert 0 < cell["seconds"] < 20
    assert cell["replicas_equal"] is True
    assert 0.005 < cell["relative_error"] < 0.03
    assert 600_000 < cell["bytes"] < 1_200_000, "each of two peers sends half of its parts, and half of the result"
    assert set(cell["pieces"]) == {"encode", "hash", "wire", "decode"}
    busy = cell["busy_seconds"]
    # Medians of rounds, each for itself: together the two kinds need not come to as much as all.
    assert 0 < max(busy["compute"], busy["wire"]) <= busy["all"]
    assert cell["round_to_busy"] > 1
    assert min(busy[piece] for piece in ("encode", "hash", "wire", "decode")) > 0
    assert busy["encode"] + busy["hash"] + busy["decode"] <= busy["compute"]
    left = [path for path in tmp_path.rglob("*") if path.name not in ("x", "homeswarm")]
    assert left == []
    assert _programs_in(str(tmp_path)) == []


@pytest.mark.soak
def test_benchmark_that_is_told_to_end_ends_its_programs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.round.averaging", *SMALL, "--rounds", "100", "--ours", "fp32"]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": str(tmp_path)}
    tmp_path.chmod(0o700)
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    pause = threading.Event()
    give_up_at = time.monotonic() + 200  # three programs import torch, beside other tests
    while len(_programs_in(str(tmp_path))) < 3:  # it and two of its programs
        assert time.monotonic() < give_up_at
        pause.wait(0.1)
    process.send_signal(signal.SIGTERM)
    process.wait(30)
    assert _programs_in(str(tmp_path)) == []


def _programs_in(runtime: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("TMPDIR") == runtime and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def test_program_that_is_late_or_refuses_costs_one_order(tmp_path: Path) -> None:
    script = (
        "import time\n"
        "from benchmarks.round.orders import obey\n"
        "def do(order):\n"
        "    time.sleep(order.get('s', 0))\n"
        "    return {'n': 1 // order['by']}\n"
        "obey(do)\n"
    )
    program = Program(["-c", script], tmp_path / "log", {"PYTHONPATH": str(ROOT)})
    try:
        assert together([program], "divide", timeout_s=200, by=1) == [{"n": 1}]
        with pytest.raises(OrderFailed, match="ZeroDivisionError"):
            together([program], "divide", timeout_s=200, by=0)
        with pytest.raises(OrderFailed, match="no answer in time"):
            together([program], "divide", timeout_s=0.05, by=1, s=0.5)
    finally:
        program.end()
    assert not psutil.pid_exists(program.pid)


def test_goals_compare_with_the_fastest_codec_that_works() -> None:
    def cell(seconds: float, error: float) -> dict[str, object]:
        return {"seconds": seconds, "relative_error": error}

    result = {
        "ours": {"int8": cell(0.25, 0.01), "bf16": {**cell(0.5, 0.001), "round_to_pieces": 1.2}},
        "hivemind": {
            "NONE": cell(9.0, 0.0),
            "FLOAT16": cell(1.0, 0.001),
            "UNIFORM_8BIT": cell(1.1, 0.02),
            "BLOCKWISE_8BIT": cell(1.0, 0.02),
            "QUANTILE_8BIT": Cell(error="broken").figures(),
        },
    }
    assert [(round(reached, 3), met) for _, reached, _, met in goals(result)] == [
        (4.0, True),
        (0.5, True),
        (2.0, False),
        (1.2, True),
    ]
