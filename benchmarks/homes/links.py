"""A swarm that trains over emulated home links, held against the link and against `swarm plan`.

    python -m benchmarks.homes.links [--json] [--codec int8] ...

Two stages of two peers and the host, each in a network namespace, joined by `benchmarks.homes.router`: 20 Mbit/s
up and 100 down, lines that queue 200 ms; 40 ms from home to home and no loss unless told otherwise. The lines become
slow when the run has begun: nobody's first download is measured. Few tokens and many parameters, so that the round is
bound by the link. The goals: at least 85 % of the uplink used while a round moves bytes, tokens/s within 15 % of the
plan's. Needs root and `ip`.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.homes.emulated import DOWNLINK_MBIT, UPLINK_MBIT, Paths, routing
from benchmarks.homes.namespaces import Namespaces, begin_with_namespaces
from benchmarks.homes.uplink_share import Window, uplink_share
from benchmarks.programs import Program
from benchmarks.training_throughput import Events, running
from swarm.network.identity_file import load_or_create_identity

SHARE_GOAL, PLAN_GOAL = 0.85, 0.15
READY_S = 300.0
LEAST_STEPS = 2
"""Of each peer, however few seconds are asked for."""
PEERS = ("a0", "b0", "a1", "b1")
"""Their stage is the digit."""
HIDDEN_SIZE = 512
MILLION_PARAMETERS = {"fp32": 3, "bf16": 6, "int8": 12, "int4": 24, "topk": 30}
"""Of a stage, so that a round takes about 5 s with every codec."""
SMOKE_MILLION_PARAMETERS = 1.5
TARGET_TOKENS = 128
"""Two microbatches of each source in a step: every peer has a contribution."""

MANIFEST = """\
[run]
name = "home-links"
[model]
config = {{ model_type = "llama", vocab_size = 256, hidden_size = {hidden}, intermediate_size = {mlp}, \
num_hidden_layers = 2, num_attention_heads = 8, num_key_value_heads = 8, max_position_embeddings = 64, \
tie_word_embeddings = false }}
stages = 2
[data]
max_text_mb = 1
sequence_length = 32
[batch]
microbatch_size = 1
target_tokens = {tokens}
[optimizer]
total_steps = 100000
[codecs]
averaging = "{codec}"
[averaging]
delay = {delay}
sync_steps = 1
[checkpoint]
every_steps = 80000
snapshot_every = 200
[limits]
founders_per_stage = 2
[deadlines]
call_s = 20.0
"""


@dataclass(frozen=True)
class Trained:
    """What was seen of a run on slow lines."""

    events: list[dict[str, Any]]
    """The host's, each with the time `at` which it was read."""
    lines: list[dict[str, Any]]
    """The router's."""
    first: dict[str, Any]
    """Event of the version from which on things count."""
    last: dict[str, Any]
    addresses: dict[str, str]
    """By peer id."""


class TimedEnough:
    """Whether an event, of all in order, is the version at which to stop.

    `seconds` after the first it is, and once every peer has told of `LEAST_STEPS` steps between: what computing took is
    the difference of what its reports have added up.
    """

    def __init__(self, first: dict[str, Any], seconds: float) -> None:
        self._first = first
        self._seconds = seconds
        self._steps: dict[str, set[int]] = defaultdict(set)

    def __call__(self, event: dict[str, Any]) -> bool:
        if event["event"] == "step" and event["step"] >= self._first["version"]:
            self._steps[event["peer_id"]].add(event["step"])
        if event["event"] != "version" or event["at"] < self._first["at"] + self._seconds:
            return False
        told = [sum(step < event["version"] for step in steps) for steps in self._steps.values()]
        return len(told) == len(PEERS) and min(told) >= LEAST_STEPS


def train(
    manifest: Path, folder: Path, paths: Paths, *, congestion: str | None, skip_steps: int, seconds: float
) -> Trained:
    """A swarm trains on slow lines until enough is timed after its `skip_steps`th version."""
    folder.mkdir()
    swarm = str(Path(sys.executable).parent / "swarm")
    with ExitStack() as stack:
        network = stack.enter_context(Namespaces(("host", *PEERS), bridged=False))
        if congestion is not None:
            network.control_congestion(congestion)
        router = stack.enter_context(routing(network, ("host", *PEERS)))
        programs: list[Program] = []

        def start(name: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
            command = network.daemon(name, folder, swarm, *arguments)
            log = folder / f"{name}.log"
            programs.append(Program(name, stack.enter_context(running(command, log, **options)), log))
            return programs[-1].process

        def wait_for(wanted: Callable[[dict[str, Any]], bool], *, timeout_s: float) -> dict[str, Any]:
            return events.wait_for(wanted, timeout_s=timeout_s, programs=programs)

        hosting = start(
            "host", "host", str(manifest), "--json", "--ends-with-run", "--evaluate-tokens", "1", stdout=subprocess.PIPE
        )
        events = Events(hosting)
        address = wait_for(lambda event: event["event"] == "listening", timeout_s=READY_S)["addresses"][0]
        for name in PEERS:
            start(name, "join", address, "--stage", name[1], "--threads", "1", "--yes", "--verbose")
        # Before the first round: a connection that has once been fast keeps a send buffer of megabytes.
        wait_for(lambda event: event["event"] == "genesis", timeout_s=READY_S)
        router.limit(paths)
        first = wait_for(lambda event: event.get("version", 0) >= skip_steps, timeout_s=READY_S)
        last = wait_for(TimedEnough(first, seconds), timeout_s=READY_S + seconds)
        ids = {name: load_or_create_identity(folder / name / "identity.key").peer_id for name in PEERS}
        addresses = {str(ids[name]): network.address(name) for name in PEERS}
        return Trained(list(events.seen), list(router.seen), first, last, addresses)


def planned(manifest: Path, paths: Paths, tflops: float, exact_ns: float) -> dict[str, Any]:
    """What `swarm plan` says of the manifest on these links."""
    command = [str(Path(sys.executable).parent / "swarm"), "plan", str(manifest), "--json", "--peers", "2"]
    command += ["--uplink-mbit", str(UPLINK_MBIT), "--downlink-mbit", str(DOWNLINK_MBIT)]
    command += ["--round-trip-ms", str(paths.round_trip_ms)]
    command += ["--tflops", f"{tflops:.6f}", "--exact-ns", f"{exact_ns:.3f}", "--session-hours", "1000"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    plan: dict[str, Any] = json.loads(done.stdout)
    return plan


def figures(trained: Trained, manifest: Path, paths: Paths) -> dict[str, Any]:
    """What counts between the first and the last version, beside the plan's."""
    first, last, lines = trained.first, trained.last, trained.lines
    seconds, versions = last["at"] - first["at"], last["version"] - first["version"]
    steps = [
        event
        for event in trained.events
        if event["event"] == "step" and first["version"] <= event["step"] < last["version"]
    ]
    times, bytes_per_s = [line["at"] for line in lines], UPLINK_MBIT * 1e6 / 8
    shares, busy_s, exact_s = [], {}, {}
    for peer, address in trained.addresses.items():
        own = [event for event in steps if event["peer_id"] == peer]
        windows = [Window(event["at"] - event["round_s"], event["at"]) for event in own]
        counts = [line["up_bytes"][address] for line in lines]
        shares.append(uplink_share(times, counts, windows, bytes_per_s=bytes_per_s))
        stage = own[0]["stage"]
        busy_s[stage] = (own[-1]["busy_s"] - own[0]["busy_s"]) / (len(own) - 1)
        exact_s[stage] = (own[-1]["exact_s"] - own[0]["exact_s"]) / (len(own) - 1)
    # The plan is asked what these links allow, not how fast this machine is: it is told what computing took.
    unit = planned(manifest, paths, 1.0, 1.0)["stages"]
    plan = planned(
        manifest,
        paths,
        min(unit[stage]["compute_s"] / busy_s[stage] for stage in busy_s),
        max(exact_s[stage] / unit[stage]["exact_s"] for stage in exact_s),
    )
    tokens_per_s = sum(event["num_targets"] for event in steps if event["stage"] == 0) / seconds
    begun, ended = (lines[bisect_left(times, event["at"]) - 1] for event in (first, last))
    return {
        "uplink_share": statistics.mean(share.moving for share in shares),
        "uplink_share_in_rounds": statistics.mean(share.rounds for share in shares),
        "uplink_share_in_all": statistics.mean(share.run for share in shares),
        "tokens_per_s": tokens_per_s,
        "planned_tokens_per_s": plan["tokens_per_s"],
        "of_plan": tokens_per_s / plan["tokens_per_s"],
        "round_s": statistics.median(event["round_s"] for event in steps),
        "moving_s": statistics.mean(share.moving_s for share in shares),
        "planned_round_s": max(stage["round_s"] for stage in plan["stages"]),
        "step_s": seconds / versions,
        "planned_step_s": plan["step_s"],
        "compute_s": max(busy_s.values()),
        "exact_s": max(exact_s.values()),
        "sent_bytes": statistics.mean(
            (ended["up_bytes"][a] - begun["up_bytes"][a]) / versions for a in trained.addresses.values()
        ),
        "planned_sent_bytes": plan["stages"][0]["round_up_bytes"] + plan["stages"][0]["activation_up_bytes"],
        "steps": versions,
        "dropped_packets": sum(ended["dropped"].values()) - sum(begun["dropped"].values()),
        "lost_packets": ended["lost"] - begun["lost"],
        "router_busy": (ended["busy_s"] - begun["busy_s"]) / (ended["at"] - begun["at"]),
    }


def write_manifest(path: Path, *, codec: str, delay: int, million_parameters: float) -> None:
    """A model whose layer, one a stage, has about so many parameters."""
    mlp = round((million_parameters * 1e6 - 4 * HIDDEN_SIZE**2) / (3 * HIDDEN_SIZE) / 64) * 64
    path.write_text(MANIFEST.format(hidden=HIDDEN_SIZE, mlp=mlp, codec=codec, delay=delay, tokens=TARGET_TOKENS))


@click.command()
@click.option("--codec", "codecs", multiple=True, type=click.Choice([*MILLION_PARAMETERS]), help="Averaging; repeat.")
@click.option("--round-trip-ms", type=click.FloatRange(min=0), default=40.0, show_default=True)
@click.option("--loss", type=click.FloatRange(0, 0.5), default=0.0, show_default=True, help="Probability of a packet.")
@click.option("--congestion", help="TCP's control in the homes; by default the system's own.")
@click.option("--delay", type=click.IntRange(0, 1), default=0, show_default=True)
@click.option("--million-parameters", type=float, help="Of a stage; by default by codec, for rounds of about 5 s.")
@click.option("--skip-steps", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--seconds", type=click.FloatRange(min=1), default=45.0, show_default=True, help="Timed, or longer.")
@click.option("--keep", type=click.Path(path_type=Path), help="Leave logs and counts in this new folder.")
@click.option("--smoke", is_flag=True, help="A small model for two steps: does it run?")
@click.option("--json", "as_json", is_flag=True)
def main(
    codecs: tuple[str, ...],
    round_trip_ms: float,
    loss: float,
    congestion: str | None,
    delay: int,
    million_parameters: float | None,
    skip_steps: int,
    seconds: float,
    keep: Path | None,
    smoke: bool,
    as_json: bool,
) -> None:
    """Train over emulated home links: share of the uplink used, tokens/s against `swarm plan`."""
    begin_with_namespaces()
    if smoke:
        codecs, million_parameters, skip_steps, seconds = ("int8",), SMOKE_MILLION_PARAMETERS, 1, 1.0
    paths = Paths(round_trip_ms, loss)
    result: dict[str, Any] = {"goals": {"uplink_share": SHARE_GOAL, "of_plan": [1 - PLAN_GOAL, 1 + PLAN_GOAL]}}
    with tempfile.TemporaryDirectory() as scratch:
        folder = keep or Path(scratch)
        folder.mkdir(exist_ok=True)
        for codec in codecs or ("int8", "int4", "topk"):
            manifest = folder / f"{codec}.toml"
            size = million_parameters or MILLION_PARAMETERS[codec]
            write_manifest(manifest, codec=codec, delay=delay, million_parameters=size)
            trained = train(
                manifest, folder / codec, paths, congestion=congestion, skip_steps=skip_steps, seconds=seconds
            )
            if keep is not None:
                (folder / f"{codec}.json").write_text(json.dumps(asdict(trained)))
            result[codec] = {**figures(trained, manifest, paths), "load_average": os.getloadavg()[0]}
            if not as_json:
                _show(codec, result[codec])
    if as_json:
        click.echo(json.dumps(result))


def _show(codec: str, found: dict[str, Any]) -> None:
    click.echo(
        f"{codec}: uplink used {found['uplink_share']:.2f} while bytes move (goal {SHARE_GOAL}), "
        f"{found['uplink_share_in_rounds']:.2f} of rounds, {found['uplink_share_in_all']:.2f} of all time; "
        f"{found['tokens_per_s']:.1f} tokens/s, {found['of_plan']:.2f} of planned {found['planned_tokens_per_s']:.1f}"
    )
    click.echo(
        f"    round {found['round_s']:.2f} s ({found['moving_s']:.2f} s moving bytes; planned "
        f"{found['planned_round_s']:.2f}), step {found['step_s']:.2f} s (planned {found['planned_step_s']:.2f}, "
        f"compute {found['compute_s']:.2f}, exact work {found['exact_s']:.2f}), "
        f"sent {found['sent_bytes'] / 1e6:.2f} MB a step (planned "
        f"{found['planned_sent_bytes'] / 1e6:.2f}), {found['dropped_packets']} packets dropped, "
        f"{found['lost_packets']} lost, router busy {found['router_busy']:.2f}"
    )


if __name__ == "__main__":
    main()
