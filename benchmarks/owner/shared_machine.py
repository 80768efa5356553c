"""A new user's run on a machine that its peers share: with each other, and with their owner's programs.

    python -m benchmarks.owner.shared_machine [--json] [--smoke]

The run is `swarm init`'s: two stages of the preset "tiny". `swarm host` and the daemons are real processes on loopback,
each daemon in a session of its own, as `--detach` starts it. Cases:

one_thread_each         two daemons with `--threads 1`
defaults                two daemons with default settings
three_daemons           three daemons with default settings: two of one stage, one of the other
beside_two_busy_threads `defaults`, while a program of the owner keeps two threads busy at nice 0
alone                   the same as `defaults`

A case's tokens/s are the run's, over `--seconds` once all its daemons contribute; cases take turns over `--rounds`, and
medians count. The owner's slowdown is how much longer a fixed work of the busy program takes beside the daemons than on
the quiet machine.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import psutil

from benchmarks.programs import end_when_told
from benchmarks.training_throughput import Events, running
from swarm.manifest.default import default_manifest_text

READY_S = 180.0
DEFAULTS_BAR, THREE_BAR, BUSY_BAR, SLOWDOWN_BAR = 0.85, 0.75, 0.3, 0.15
STEPS = 100_000
DATA_MB = 4

BUSY = """\
import os, sys, time
if os.fork() == 0: sys.argv[1] += ".2"
parent, rest, units = os.getppid(), list(range(50_000)), 0
with open(sys.argv[1], "w", buffering=1) as file:
    while os.getppid() == parent:
        sum(number * number for number in rest)
        file.write(f"{time.time()}\\n")
"""
"""A program of two processes; each writes down the time after every piece of work, some milliseconds of a core."""


@dataclass(frozen=True)
class Case:
    """Daemons, each with the options it is started with beside the defaults."""

    daemons: tuple[tuple[str, ...], ...]
    busy: bool = False


ONE = ("--threads", "1")
CASES = {
    "one_thread_each": Case((ONE, ONE)),
    "defaults": Case(((), ())),
    "three_daemons": Case(((), (), ())),
    "beside_two_busy_threads": Case(((), ()), busy=True),
}
SHOWN_ALSO = {"two_threads_each": Case((("--threads", "2"),) * 2)}
"""Not in the goals' cases; measured when named."""


@dataclass
class Found:
    """What the rounds of a case came to."""

    tokens_per_s: list[float] = field(default_factory=list)
    busy_pieces_per_s: list[float] = field(default_factory=list)
    """Of both threads of the busy program, summed."""
    cores_used: list[dict[str, float]] = field(default_factory=list)
    """By the host, the daemons, the busy program, and all others: those disturb, and should be none."""


@contextmanager
def busy_program(root: Path) -> Iterator[tuple[subprocess.Popen[str], list[Path]]]:
    """Two busy threads, and the files in which they note their pieces."""
    files = [root / "busy", root / "busy.2"]
    for file in files:
        file.unlink(missing_ok=True)
    command = [sys.executable, "-c", BUSY, str(files[0])]
    with running(command, root / "busy.log", start_new_session=True) as process:
        yield process, files


def pieces_per_s(files: Sequence[Path], start: float, stop: float) -> float:
    """Of all the files, between two times."""
    times = [float(line) for file in files for line in file.read_text().split("\n")[:-1]]
    return sum(1 for at in times if start < at <= stop) / (stop - start)


def measure(
    case: Case, root: Path, *, seconds: float, settle_s: float, found: Found, extra: Sequence[str] = ()
) -> None:
    """One round of a case, from the host's start to its end."""
    root.mkdir()
    manifest = root / "run.toml"
    text = default_manifest_text()
    for field_name, value in (("total_steps", STEPS), ("max_text_mb", DATA_MB), ("every_steps", 80_000)):
        (line,) = [line for line in text.splitlines() if line.startswith(f"{field_name} =")]
        text = text.replace(line, f"{field_name} = {value}")
    manifest.write_text(text)
    program = [sys.executable, "-m", "swarm"]
    host = [
        *program,
        "host",
        str(manifest),
        "--dir",
        str(root / "host"),
        "--listen",
        "127.0.0.1:0",
        "--json",
        "--ends-with-run",
    ]
    with ExitStack() as stack:
        hosting = stack.enter_context(
            running([*host, "--evaluate-tokens", "1"], root / "host.log", stdout=subprocess.PIPE)
        )
        events = Events(hosting)
        invite = events.wait_for(lambda event: event["event"] == "listening", timeout_s=READY_S)["invite"]
        programs = {"host": [hosting], "daemons": []}
        for number, options in enumerate(case.daemons):
            join = [*program, "join", invite, "--yes", "--dir", str(root / f"{number}"), "--listen", "127.0.0.1:0"]
            # The third is a replica of the second stage.
            join += ["--stage", str(min(number, 1)), *options, *extra]
            programs["daemons"].append(
                stack.enter_context(
                    running(join, root / f"{number}.log", stdout=subprocess.DEVNULL, start_new_session=True)
                )
            )
        working: set[str] = set()

        def all_work(event: dict[str, Any]) -> bool:
            if event["event"] == "step" and event["microbatches"]:
                working.add(event["peer_id"])
            return event["event"] == "version" and len(working) == len(case.daemons)

        events.wait_for(all_work, timeout_s=READY_S)
        files: list[Path] = []
        if case.busy:
            busy, files = stack.enter_context(busy_program(root))
            programs["busy"] = [busy]
        settled_at = time.time() + settle_s  # what adapts to the machine has this long for it
        first = events.wait_for(lambda event: _is_version(event, settled_at), timeout_s=READY_S)
        before = _cpu_s(programs)
        last = events.wait_for(lambda event: _is_version(event, first["at"] + seconds), timeout_s=READY_S)
        after, wall_s = _cpu_s(programs), last["at"] - first["at"]
        used = {name: (after[name] - before[name]) / wall_s for name in after}
        total = used.pop("all")
        found.cores_used.append({**used, "others": total - sum(used.values())})
        found.tokens_per_s.append(_tokens_per_s(events.seen, first, last))
        if files:
            found.busy_pieces_per_s.append(pieces_per_s(files, first["at"], last["at"]))


def _cpu_s(programs: Mapping[str, Sequence[subprocess.Popen[str]]]) -> dict[str, float]:
    """Of programs with what they started, by name, and of all there are, so far."""
    machine = psutil.cpu_times()
    found = {"all": sum(machine) - machine.idle - machine.iowait - machine.guest - machine.guest_nice}
    for name, group in programs.items():
        tops = [psutil.Process(program.pid) for program in group]
        times = [one.cpu_times() for top in tops for one in (top, *top.children(recursive=True))]
        found[name] = sum(one.user + one.system for one in times)
    return found


def _is_version(event: dict[str, Any], at: float) -> bool:
    return bool(event["event"] == "version" and event["at"] >= at)


def _tokens_per_s(events: Sequence[dict[str, Any]], first: dict[str, Any], last: dict[str, Any]) -> float:
    """Of the steps between two versions, as the peers of the first stage told them."""
    tokens = sum(
        event["num_targets"]
        for event in list(events)
        if event["event"] == "step" and event["stage"] == 0 and first["version"] <= event["step"] < last["version"]
    )
    return float(tokens / (last["at"] - first["at"]))


def measure_busy_alone(root: Path, *, seconds: float) -> float:
    """Pieces a second of the busy program on the quiet machine."""
    root.mkdir()
    with busy_program(root) as (_, files):
        time.sleep(1.0)
        start = time.time()
        time.sleep(seconds)
        return pieces_per_s(files, start, time.time())


def goals(tokens_per_s: Mapping[str, float], owner_slowdown: float | None) -> list[dict[str, Any]]:
    """Those whose figures there are, each with its bar and whether it holds."""
    best = max((rate for name, rate in tokens_per_s.items() if name != "beside_two_busy_threads"), default=0.0)
    alone = tokens_per_s.get("alone", 0.0)
    stated = [
        (name, tokens_per_s[name] / best, bar)
        for name, bar in (("defaults", DEFAULTS_BAR), ("three_daemons", THREE_BAR))
        if name in tokens_per_s
    ]
    found = [
        {"what": f"{name} / the best setting tried", "measured": share, "at_least": bar, "holds": share >= bar}
        for name, share, bar in stated
    ]
    if alone and "beside_two_busy_threads" in tokens_per_s:
        share = tokens_per_s["beside_two_busy_threads"] / alone
        found.append(
            {
                "what": "beside two busy threads / alone",
                "measured": share,
                "at_least": BUSY_BAR,
                "holds": share >= BUSY_BAR,
            }
        )
    if owner_slowdown is not None:
        found.append(
            {
                "what": "the busy program's loss",
                "measured": owner_slowdown,
                "at_most": SLOWDOWN_BAR,
                "holds": owner_slowdown <= SLOWDOWN_BAR,
            }
        )
    return found


@click.command(help=__doc__)
@click.option("--case", "named", multiple=True, type=click.Choice([*CASES, *SHOWN_ALSO]), help="[default: the first 4]")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--seconds", type=click.FloatRange(min=0.1), default=10.0, show_default=True, help="Timed, of each case.")
@click.option("--settle", type=click.FloatRange(min=0), default=8.0, show_default=True, help="Seconds before those.")
@click.option("--join-option", "extra", multiple=True, help="Given to every daemon, such as --nice=10.")
@click.option("--smoke", is_flag=True, help="One short round of the default case: does it run?")
@click.option("--json", "as_json", is_flag=True)
def main(
    named: tuple[str, ...],
    rounds: int,
    seconds: float,
    settle: float,
    extra: tuple[str, ...],
    smoke: bool,
    as_json: bool,
) -> None:
    """Tokens/s of a run whose peers share one machine."""
    end_when_told()
    names = list(named) or list(CASES)
    if smoke:
        names, rounds, seconds, settle = list(named) or ["defaults"], 1, 1.0, 0.0
    found = {name: Found() for name in names}
    alone: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(rounds):
            for name in names if number % 2 == 0 else reversed(names):
                case, root = (CASES | SHOWN_ALSO)[name], Path(scratch) / f"{name}-{number}"
                measure(case, root, seconds=seconds, settle_s=settle, found=found[name], extra=extra)
                if case.busy:
                    alone.append(measure_busy_alone(Path(scratch) / f"busy-{number}", seconds=min(5.0, seconds)))
                if not as_json:
                    click.echo(f"round {number + 1}: {name} {found[name].tokens_per_s[-1]:.0f} tokens/s", err=True)
    tokens_per_s = {name: statistics.median(case.tokens_per_s) for name, case in found.items()}
    if "defaults" in tokens_per_s:
        tokens_per_s["alone"] = tokens_per_s["defaults"]  # two daemons, default settings, the quiet machine
    slowed = [rate for case in found.values() for rate in case.busy_pieces_per_s]
    owner_slowdown = statistics.median(alone) / statistics.median(slowed) - 1 if slowed else None
    stated = goals(tokens_per_s, owner_slowdown)
    result = {
        "tokens_per_s": tokens_per_s,
        "owner_slowdown": owner_slowdown,
        "goals": stated,
        "rounds": {name: asdict(case) for name, case in found.items()},
        "busy_alone_pieces_per_s": alone,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
    }
    if as_json:
        click.echo(json.dumps(result))
        return
    for name, rate in tokens_per_s.items():
        click.echo(f"{name:24} {rate:9.0f} tokens/s")
    for goal in stated:
        bar = f"at least {goal['at_least']}" if "at_least" in goal else f"at most {goal['at_most']}"
        click.echo(f"{'holds' if goal['holds'] else 'MISSED'}: {goal['what']} {goal['measured']:.3f}, {bar}")


if __name__ == "__main__":
    main()
