"""Whole models in windows on home lines: what a swarm of paced peers trains, over what one of them does alone.

    python -m benchmarks.outer_steps --params 100000000 --peers 4 --uplink-mbit 20 --json

A real host and real peers, each in a network namespace joined by `benchmarks.homes.router`; down five times as fast as
up, 40 ms from home to home; rounds in int2, among strangers, with audits. With `--ahead` among friends, and the next
window is computed while the round of the one before goes on. Emulated is the time of computing alone
(`benchmarks.windows.paced_peer`): the layers are computed on 16 tokens, and each window of 10 inner steps takes
`--window-s`, as it would with batches that need so long. One alone computes without a pause and has no rounds, audits
or host. From the second window on, `--windows` are counted: `utilisation` is the certified microbatches' time over all
peers' time, and `tokens_per_s_over_one` that times the peers. `speedup_over_one` is that times a token's worth, which
`benchmarks.local_steps_loss` measured (`swarm/core/planning/token_worth.py`).

What a peer does not compute is told apart: `pause_seconds` from a window's last pass to the next one's first, of which
its line is full for at least `line_seconds` (its bytes up at its rate), and in which the process has
`pause_cpu_seconds` of this machine's cores. `utilisation_of_line` is what would be left if pauses were as long as the
line is full.

With `--newcomer` one more peer joins then: seconds from its `swarm join` to its admission, to the roster that names it,
and to the first result that its window is in. Needs root and `ip`.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from benchmarks.homes.disks import are_equal, members_on, results_on
from benchmarks.homes.emulated import Paths, routing
from benchmarks.homes.namespaces import Namespaces, begin_with_namespaces
from benchmarks.training_throughput import Events, running
from swarm.core.planning.token_worth import worth_of_token
from swarm.core.round.contribution import Result
from swarm.manifest.file import read_manifest
from swarm.manifest.model import stage_num_parameters

NEWCOMER = "newcomer"
READY_S = 600.0
DOWN_TIMES = 5.0
ROUND_TRIP_MS = 40.0
LOCAL_STEPS = 10
HIDDEN_SIZE = 256

MANIFEST = """\
[run]
name = "outer-steps"
trust = "{trust}"
[model]
config = {{ model_type = "llama", vocab_size = 256, hidden_size = {hidden}, intermediate_size = {mlp}, \
num_hidden_layers = 2, num_attention_heads = 4, num_key_value_heads = 4, max_position_embeddings = 64, \
tie_word_embeddings = false }}
stages = 1
[data]
max_text_mb = 1
sequence_length = 16
[batch]
microbatch_size = 1
target_tokens = 16
[optimizer]
total_steps = 10000
[codecs]
averaging = "int2"
[averaging]
rule = "{rule}"
local_steps = {local_steps}
delay = {delay}
sync_steps = 1
[audits]
agreements_to_promote = 0
[checkpoint]
every_steps = 8000
snapshot_every = {snapshot_every}
[limits]
founders_per_stage = {peers}
"""


@dataclass(frozen=True)
class Watched:
    """What was seen of a run."""

    passes: dict[str, list[dict[str, Any]]]
    """By peer: the lines that it wrote of passes."""
    lines: list[dict[str, Any]]
    """Of the router."""
    steps: list[dict[str, Any]]
    """The host's events of steps."""
    began: float
    """When the first window that counts began, seconds since the epoch."""
    ended: float
    first: int
    """Version that the first window that counts begins from."""
    end: int
    """That the last one makes."""
    results: list[Result]
    replicas_equal: bool
    addresses: dict[str, str]
    newcomer_s: dict[str, float] | None = None
    """From its start; None without one."""


def watch(
    manifest: Path,
    folder: Path,
    *,
    peers: int,
    uplink_mbit: float,
    window_s: float,
    windows: int,
    with_newcomer: bool,
    longest_s: float,
) -> Watched:
    """A run from its start until so many windows have been counted."""
    names = tuple(f"peer{number}" for number in range(peers))
    with ExitStack() as stack:
        everyone = ("host", *names, NEWCOMER)
        network = stack.enter_context(Namespaces(everyone, bridged=False))
        router = stack.enter_context(routing(network, everyone))
        addresses = {name: network.address(name) for name in (*names, NEWCOMER)}

        def start(name: str, command: list[str], **options: Any) -> subprocess.Popen[str]:
            inside = network.daemon(name, folder, *command)
            return stack.enter_context(running(inside, folder / f"{name}.log", **options))

        swarm = str(Path(sys.executable).parent / "swarm")
        hosting = start(
            "host", [swarm, "host", str(manifest), "--json", "--evaluate-tokens", "1"], stdout=subprocess.PIPE
        )
        events = Events(hosting)
        address = events.wait_for(lambda event: event["event"] == "listening", timeout_s=READY_S)["addresses"][0]
        paced = [sys.executable, "-m", "benchmarks.windows.paced_peer", str(window_s / LOCAL_STEPS)]

        def join(name: str) -> None:
            start(name, [*paced, str(folder / f"{name}.passes"), address, "--stage", "0", "--yes", "--verbose"])

        for name in names:
            join(name)
        begin_by = time.monotonic() + READY_S
        while members_on(folder / names[0]) < peers:
            if time.monotonic() > begin_by:
                raise click.ClickException(f"{peers} peers are not members of the stage after {READY_S:g} s")
            time.sleep(0.5)
        router.limit(
            Paths(ROUND_TRIP_MS, 0.0),
            up_mbit=uplink_mbit,
            down_mbit=DOWN_TIMES * uplink_mbit,
            only=[*addresses.values()],
        )

        def version(number: int) -> dict[str, Any]:
            return events.wait_for(
                lambda event: event["event"] == "version" and event["version"] >= number, timeout_s=longest_s
            )

        now_at = max((event["version"] for event in list(events.seen) if event["event"] == "version"), default=0)
        first = version(now_at + 1)
        last = version(first["version"] + windows)
        newcomer_s = None
        if with_newcomer:
            known, came_at = {event["peer_id"] for event in events.seen if event["event"] == "step"}, time.time()
            join(NEWCOMER)
            newcomer_s = {}
            for what in ("admitted", "joined", "step"):
                told = events.wait_for(partial(_is_of_newcomer, what, came_at, known), timeout_s=longest_s)
                newcomer_s[what] = told["at"] - came_at
        seen, lines = list(events.seen), list(router.seen)
    (folder / "events.json").write_text(json.dumps(seen))
    return Watched(
        {name: [json.loads(line) for line in (folder / f"{name}.passes").read_text().splitlines()] for name in names},
        lines,
        [event for event in seen if event["event"] == "step"],
        first["at"],
        last["at"],
        first["version"],
        last["version"],
        results_on(folder / names[0]),
        are_equal([folder / name for name in (*names, NEWCOMER)]),
        {name: addresses[name] for name in names},
        newcomer_s,
    )


def _is_of_newcomer(what: str, came_at: float, known: set[str], event: dict[str, Any]) -> bool:
    """Whether the host says so of a peer that nobody knew; of a step, that its work is in it."""
    is_new = bool(event["event"] == what and event["at"] > came_at and event["peer_id"] not in known)
    return is_new and (what != "step" or event["counted"] > 0)


@dataclass(frozen=True)
class Pause:
    """Between the last pass of a peer's window and the first of its next."""

    seconds: float
    cpu_s: float
    line_s: float
    """As long as the bytes that it sent meanwhile take at its line's rate."""


def pauses(watched: Watched, *, uplink_mbit: float, longest_inside_s: float) -> list[Pause]:
    """Of all peers, among the windows that count; a pause is longer than any between two passes of a window."""
    found = []
    for name, passes in watched.passes.items():
        inside = [one for one in passes if watched.began - longest_inside_s <= one["began"] <= watched.ended]
        for before, after in pairwise(inside):
            seconds = after["began"] - before["ended"]
            if seconds > longest_inside_s:
                sent = _sent(watched, watched.addresses[name], before["ended"], after["began"])
                line_s = sent * 8 / (uplink_mbit * 1e6)
                found.append(Pause(seconds, after["cpu_s"] - before["cpu_s"], line_s))
    return found


def _sent(watched: Watched, address: str, began: float, ended: float) -> int:
    """Bytes up between two times."""
    at = [line["up_bytes"][address] for line in watched.lines if began <= line["at"] <= ended]
    return int(at[-1] - at[0]) if at else 0


def figures(
    watched: Watched, num_parameters: int, *, uplink_mbit: float, window_s: float, is_ahead: bool
) -> dict[str, Any]:
    """What the run came to."""
    num_peers, seconds = len(watched.passes), watched.ended - watched.began
    counted = [made for made in watched.results if watched.first <= int(made.roster.step) < watched.end]
    num_microbatches = sum(len(one.work) for made in counted for one in made.roster.contributions)
    utilisation = num_microbatches * window_s / LOCAL_STEPS / (num_peers * seconds)
    sent = sum(_sent(watched, address, watched.began, watched.ended) for address in watched.addresses.values())
    rounds = [event["round_s"] for event in watched.steps if watched.first <= event["step"] < watched.end]
    between = pauses(watched, uplink_mbit=uplink_mbit, longest_inside_s=window_s / LOCAL_STEPS / 2)
    line_s = statistics.median(one.line_s for one in between) if between else 0.0
    windows_s = seconds / max(1, len(counted))
    beside = min(1.0, statistics.median(rounds) / windows_s) if is_ahead and rounds else 0.0
    worth = worth_of_token(num_peers, LOCAL_STEPS, beside=beside)
    return {
        "tokens_per_s_over_one": num_peers * utilisation,
        "speedup_over_one": num_peers * utilisation * worth,
        "bytes_up_per_parameter_per_window": sent / num_peers / max(1, len(counted)) / num_parameters,
        "round_seconds": statistics.median(rounds) if rounds else None,
        "utilisation": utilisation,
        "replicas_equal": watched.replicas_equal,
        "windows": len(counted),
        "parameters": num_parameters,
        "worth_of_token": worth,
        "computed_beside_rounds": beside,
        "pause_seconds": statistics.median(one.seconds for one in between) if between else None,
        "pause_cpu_seconds": statistics.median(one.cpu_s for one in between) if between else None,
        "line_seconds": line_s,
        "utilisation_of_line": window_s / (window_s + line_s),
        "newcomer_admitted_s": _newcomer(watched, "admitted"),
        "newcomer_member_s": _newcomer(watched, "joined"),
        "newcomer_first_window_s": _newcomer(watched, "step"),
        "replays": sum(one["of"] == "loss_backward" for passes in watched.passes.values() for one in passes)
        - sum(len(one.work) for made in watched.results for one in made.roster.contributions),
    }


def _newcomer(watched: Watched, what: str) -> float | None:
    return None if watched.newcomer_s is None else watched.newcomer_s[what]


def write_manifest(path: Path, *, params: int, peers: int, rule: str, snapshot_every: int, is_ahead: bool) -> None:
    """A model of about so many parameters in one stage of two layers."""
    mlp = max(64, round((params - 2 * 256 * HIDDEN_SIZE - 8 * HIDDEN_SIZE**2) / (6 * HIDDEN_SIZE) / 64) * 64)
    given = {"hidden": HIDDEN_SIZE, "mlp": mlp, "peers": peers, "local_steps": LOCAL_STEPS, "rule": rule}
    given |= {"trust": "friends", "delay": 1} if is_ahead else {"trust": "public", "delay": 0}
    path.write_text(MANIFEST.format(**given, snapshot_every=snapshot_every))


@click.command()
@click.option("--params", type=click.IntRange(min=1_000_000), default=10_000_000, show_default=True)
@click.option("--peers", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--uplink-mbit", type=click.FloatRange(min=0, min_open=True), default=2.0, show_default=True)
@click.option("--window-s", type=click.FloatRange(min=0, min_open=True), default=60.0, show_default=True)
@click.option("--windows", type=click.IntRange(min=1), default=3, show_default=True, help="That are counted.")
@click.option("--rule", type=click.Choice(["mean", "centered_clip"]), default="mean", show_default=True)
@click.option("--snapshot-every", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--ahead", "is_ahead", is_flag=True, help="Among friends; windows go on while rounds do.")
@click.option("--newcomer", is_flag=True, help="Then one more peer joins.")
@click.option("--longest-s", type=click.FloatRange(min=1), default=1800.0, show_default=True)
@click.option("--keep", type=click.Path(path_type=Path), help="Leave logs and disks in this new folder.")
@click.option("--smoke", is_flag=True, help="Two peers, a small model, short windows: does it run?")
@click.option("--json", "as_json", is_flag=True)
def main(
    params: int,
    peers: int,
    uplink_mbit: float,
    window_s: float,
    windows: int,
    rule: str,
    snapshot_every: int,
    is_ahead: bool,
    newcomer: bool,
    longest_s: float,
    keep: Path | None,
    smoke: bool,
    as_json: bool,
) -> None:
    """Tokens a second of a swarm in windows, over those of one of its members alone."""
    begin_with_namespaces()
    if smoke:
        params, peers, uplink_mbit, window_s, windows = 1_000_000, 2, 20.0, 2.0, 1
    with tempfile.TemporaryDirectory() as scratch:
        folder = keep or Path(scratch)
        folder.mkdir(exist_ok=True)
        manifest = folder / "run.toml"
        write_manifest(
            manifest, params=params, peers=peers, rule=rule, snapshot_every=snapshot_every, is_ahead=is_ahead
        )
        num_parameters = sum(stage_num_parameters(read_manifest(manifest).model))
        watched = watch(
            manifest,
            folder,
            peers=peers,
            uplink_mbit=uplink_mbit,
            window_s=window_s,
            windows=windows,
            with_newcomer=newcomer,
            longest_s=longest_s,
        )
        found = figures(watched, num_parameters, uplink_mbit=uplink_mbit, window_s=window_s, is_ahead=is_ahead)
    if as_json:
        click.echo(json.dumps(found))
    else:
        for name, value in found.items():
            click.echo(f"{name}: {value}")


if __name__ == "__main__":
    main()
