"""A swarm's speed against that of one process that has the same cores.

    python -m benchmarks.training_throughput [--settings one-thread] [--json] [--smoke]

The preset "small" (22.8 M parameters, sequences of 128). One side: `swarm host` and two `swarm join`, a stage each,
with default settings or with a thread each, in steady state: from the `--skip-steps`th version on. The other: plain
PyTorch with two threads that wait as PyTorch has them wait, on the same and on four times the microbatch, the better
counts. Sides alternate, the goal is held against the median of the pairs' ratios, and the swarm's CPU seconds are shown
by process, thread and call.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from benchmarks.programs import Program, end_when_told, told_afterwards
from swarm.local.compute_pools import ASLEEP, AWAKE

GOAL = 0.95
SETTINGS = {"defaults": (), "one-thread": ("--threads", "1")}
"""Options of `swarm join`, by name."""
SMOKE_S = 1.0
READY_S = 180.0
"""Host and peers must be training by then."""
LOOK_S = 1.0
"""Between two looks at whether programs still run."""

MANIFEST = """\
[run]
name = "throughput"
[model]
preset = "{preset}"
stages = 2
[data]
max_text_mb = 8
[batch]
microbatch_size = {microbatch_size}
target_tokens = {target_tokens}
[optimizer]
total_steps = 100000
[codecs]
activations = "{codec}"
activation_gradients = "{codec}"
averaging = "{codec}"
[averaging]
delay = {delay}
sync_steps = 1
[checkpoint]
every_steps = 80000
snapshot_every = 8
[limits]
max_in_flight = {in_flight}
"""


def measure_single(manifest: Path, *, threads: int, seconds: float) -> dict[str, Any]:
    """Figures of `benchmarks.single_process` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.single_process", "--manifest", str(manifest), "--json"]
    command += ["--threads", str(threads), "--together", "1", "--together", "4", "--evaluate-tokens", "0"]
    command += ["--skip-steps", "1", "--time-limit", str(seconds)]
    plain = {name: value for name, value in os.environ.items() if name not in ASLEEP} | AWAKE
    done = subprocess.run(
        command, env=plain, check=True, capture_output=True, text=True, timeout=READY_S + 20 * seconds
    )
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


@contextmanager
def running(command: list[str], log_path: Path, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A program that is told to stop at the end, and killed if it does not."""
    with log_path.open("w") as log_file:
        process: subprocess.Popen[str] | None = None
        try:
            with told_afterwards():
                process = subprocess.Popen(command, stderr=log_file, text=True, **options)
            yield process
        finally:
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def measure_swarm(manifest: Path, folder: Path, *, settings: str, skip_steps: int, seconds: float) -> dict[str, Any]:
    """Host and two peers from their start until `seconds` after version `skip_steps`."""
    folder.mkdir()
    host = [
        sys.executable,
        "-m",
        "swarm",
        "host",
        str(manifest),
        "--dir",
        str(folder / "host"),
        "--listen",
        "127.0.0.1:0",
        "--json",
    ]
    host += ["--evaluate-tokens", "1"]
    with running(host, folder / "host.log", stdout=subprocess.PIPE) as hosting:
        events = Events(hosting)
        address = events.wait_for(lambda event: event["event"] == "listening", timeout_s=READY_S)["addresses"][0]
        peer = [sys.executable, "-m", "benchmarks.fleet.timed_peer"]
        options = ["--yes", "--listen", "127.0.0.1:0", *SETTINGS[settings]]
        with (
            running(
                [*peer, str(folder / "0.jsonl"), address, "--stage", "0", "--dir", str(folder / "0"), *options],
                folder / "0.log",
            ),
            running(
                [*peer, str(folder / "1.jsonl"), address, "--stage", "1", "--dir", str(folder / "1"), *options],
                folder / "1.log",
            ),
        ):
            first = events.wait_for(lambda event: event.get("version", -1) >= skip_steps, timeout_s=READY_S)
            last = events.wait_for(
                lambda event: event["event"] == "version" and event["at"] >= first["at"] + seconds,
                timeout_s=READY_S + seconds,
            )
            time.sleep(1.0)  # the stopwatches' last line
    return _swarm_figures(events.seen, first, last, folder)


class Events:
    """The host's events as they come, each with the time `at` which it was read."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.seen: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._ended = False
        self._process = process
        threading.Thread(target=self._read, args=(process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with self._changed:
                self.seen.append({**json.loads(line), "at": time.time()})
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait_for(self, wanted: Any, *, timeout_s: float, programs: Sequence[Program] = ()) -> dict[str, Any]:
        """The first of all events that is wanted. Raises ClickException after `timeout_s`, where the host has ended, or
        any of the `programs`."""
        give_up_at = time.monotonic() + timeout_s
        at = 0
        with self._changed:
            while True:
                for event in self.seen[at:]:
                    if wanted(event):
                        return event
                at = len(self.seen)
                if self._ended:  # it has closed its output: soon there is an exit code to tell
                    with suppress(subprocess.TimeoutExpired):
                        self._process.wait(LOOK_S)
                for program in programs:
                    program.check()
                left_s = give_up_at - time.monotonic()
                if self._ended or left_s <= 0:
                    raise click.ClickException(f"the swarm did not get on: {self.seen[-3:]}")
                self._changed.wait(min(left_s, LOOK_S) if programs else left_s)


def _swarm_figures(
    events: list[dict[str, Any]], first: dict[str, Any], last: dict[str, Any], folder: Path
) -> dict[str, Any]:
    start, stop = first["at"], last["at"]
    wall_s = stop - start
    steps = [event for event in events if event["event"] == "step" and start < event["at"] <= stop + 0.5]
    of_source = [
        event for event in steps if event["stage"] == 0 and first["version"] <= event["step"] < last["version"]
    ]
    tokens = sum(event["num_targets"] for event in of_source)
    peers = [_between(folder / f"{stage}.jsonl", start, stop) for stage in (0, 1)]
    cpu_s = sum(peer["process"] + peer["p2pd"] for peer in peers)
    busy = {}
    for stage in (0, 1):
        own = [event for event in steps if event["stage"] == stage]
        if len(own) > 1:
            busy[stage] = (own[-1]["busy_s"] - own[0]["busy_s"]) / (own[-1]["at"] - own[0]["at"])
    return {
        "tokens_per_s": tokens / wall_s,
        "cpu_s_per_token": cpu_s / tokens,
        "seconds": wall_s,
        "versions": last["version"] - first["version"],
        "round_s": statistics.median(event["round_s"] for event in steps),
        "stale_share": sum(event["stale"] for event in steps) / max(1, sum(event["counted"] for event in steps)),
        "compute_busy_share": busy,
        "peers": peers,
    }


def _between(path: Path, start: float, stop: float) -> dict[str, Any]:
    """CPU seconds a second of a peer between two times, from its stopwatch's lines."""
    lines = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]  # the last is being written
    inside = [line for line in lines if start - 0.5 <= line["at"] <= stop + 1.0]
    before, after = inside[0], inside[-1]
    share = (stop - start) / (after["at"] - before["at"])

    def difference(new: dict[str, float], old: dict[str, float]) -> dict[str, float]:
        return {name: (new[name] - old.get(name, 0.0)) * share for name in sorted(new)}

    return {
        "process": (after["process"] - before["process"]) * share,
        "p2pd": (after["p2pd"] - before["p2pd"]) * share,
        "threads": difference(after["threads"], before["threads"]),
        "calls": difference(after["calls"], before["calls"]),
    }


def _show(pairs: list[dict[str, Any]], result: dict[str, Any]) -> None:
    for pair in pairs:
        click.echo(
            f"swarm {pair['swarm']['tokens_per_s']:7.0f} tokens/s  one process {pair['single']['tokens_per_s']:7.0f} "
            f"(x{pair['single']['microbatches_together']})  ratio {pair['ratio']:.3f}"
        )
    click.echo(f"median ratio {result['ratio']:.3f} (goal {GOAL}) with {result['settings']}")
    click.echo(
        f"CPU us a token: swarm {result['swarm_cpu_s_per_token'] * 1e6:.0f}, "
        f"one process {result['single_cpu_s_per_token'] * 1e6:.0f}"
    )
    median = pairs[len(pairs) // 2]["swarm"]
    click.echo(
        f"compute threads busy {median['compute_busy_share']}, rounds {median['round_s']:.3f} s, "
        f"stale share {median['stale_share']:.2f}"
    )
    for stage, peer in enumerate(median["peers"]):
        shares = {name: peer[name] / median["seconds"] for name in ("process", "p2pd")}
        click.echo(f"stage {stage}, CPU seconds a second: process {shares['process']:.3f}, p2pd {shares['p2pd']:.3f}")
        for kind in ("threads", "calls"):
            items = sorted(peer[kind].items(), key=lambda item: -item[1])
            parts = [f"{name} {value / median['seconds']:.3f}" for name, value in items]
            click.echo(f"  {kind}: " + ", ".join(part for part in parts if not part.endswith("0.000")))


@click.command()
@click.option("--pairs", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--seconds", type=click.FloatRange(min=1), default=10.0, show_default=True, help="Timed, of each side.")
@click.option("--preset", default="small", show_default=True)
@click.option("--microbatch-size", default=4, show_default=True)
@click.option("--target-tokens", default=4096, show_default=True)
@click.option("--delay", type=click.IntRange(0, 1), default=1, show_default=True)
@click.option("--codec", type=click.Choice(["fp32", "bf16", "int8"]), default="int8", show_default=True)
@click.option("--in-flight", default=4, show_default=True)
@click.option("--skip-steps", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--threads", default=2, show_default=True, help="Of the one process.")
@click.option("--settings", type=click.Choice([*SETTINGS]), default="defaults", show_default=True, help="Of the peers.")
@click.option("--smoke", is_flag=True, help="One short pair of the smallest preset: does it run?")
@click.option("--json", "as_json", is_flag=True)
def main(
    pairs: int,
    seconds: float,
    preset: str,
    microbatch_size: int,
    target_tokens: int,
    delay: int,
    codec: str,
    in_flight: int,
    skip_steps: int,
    threads: int,
    settings: str,
    smoke: bool,
    as_json: bool,
) -> None:
    """Tokens/s of two peers on two cores against one process of two threads."""
    if smoke:
        pairs, seconds, preset = 1, SMOKE_S, "tiny"
    end_when_told()
    measured: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        manifest = Path(scratch) / "run.toml"
        manifest.write_text(
            MANIFEST.format(
                preset=preset,
                microbatch_size=microbatch_size,
                target_tokens=target_tokens,
                codec=codec,
                delay=delay,
                in_flight=in_flight,
            )
        )
        for number in range(pairs):
            # An even pair begins with the swarm, an odd one with the single process: a slow trend favours neither.
            sides: dict[str, Any] = defaultdict(list)
            for side in ("swarm", "single") if number % 2 == 0 else ("single", "swarm"):
                if side == "swarm":
                    folder = Path(scratch) / f"swarm{number}"
                    sides["swarm"] = measure_swarm(
                        manifest, folder, settings=settings, skip_steps=skip_steps, seconds=seconds
                    )
                else:
                    sides["single"] = measure_single(manifest, threads=threads, seconds=seconds)
            sides["ratio"] = sides["swarm"]["tokens_per_s"] / sides["single"]["tokens_per_s"]
            measured.append(dict(sides))
            if not as_json:
                click.echo(f"pair {number + 1} of {pairs}: ratio {sides['ratio']:.3f}", err=True)
    result = {
        "ratio": statistics.median(pair["ratio"] for pair in measured),
        "goal": GOAL,
        "settings": settings,
        "ratios": [pair["ratio"] for pair in measured],
        "swarm_tokens_per_s": statistics.median(pair["swarm"]["tokens_per_s"] for pair in measured),
        "single_tokens_per_s": statistics.median(pair["single"]["tokens_per_s"] for pair in measured),
        "swarm_cpu_s_per_token": statistics.median(pair["swarm"]["cpu_s_per_token"] for pair in measured),
        "single_cpu_s_per_token": statistics.median(pair["single"]["cpu_s_per_token"] for pair in measured),
        "load_average": os.getloadavg(),
    }
    if as_json:
        click.echo(json.dumps({**result, "pairs": measured}))
    else:
        _show(measured, result)


if __name__ == "__main__":
    main()
