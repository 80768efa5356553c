"""Strangers at home: eight peers behind eight routers, a liar among them, and two that come and go.

    python -m benchmarks.homes.end [--mode pipeline|windows] [--minutes 10] [--json]      # root and iproute2

A public run of a real host and real peers, each in a network namespace behind a router that lets nobody in
(`benchmarks.homes.translation`), on lines of `--uplink-mbit` up and five times as much down, 40 ms from home to home.
`pipeline`: four stages of two, hops in a subspace. `windows`: the whole model on each, in windows of local steps. From
the first version that counts on, one peer lies, and two leave in good order and come back, by turns.

Counted are the host's events, the router's bytes, the relay's, and the snapshots on the disks of all but the liar.
`of_plan` is the time that `swarm plan`'s arithmetic has for the versions that were made, of as many peers of each stage
as had work in each version, over the time they took; it is told how long computing and the exact work took, and who
joined which stage. Goals: the liar out, replicas equal, `of_plan` within 0.85 to 1.15, and at most 1 % of the homes'
bytes relayed.
"""

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.homes.disks import are_equal
from benchmarks.homes.emulated import Paths, routing
from benchmarks.homes.namespaces import PUBLIC_SUBNET, Namespaces, begin_with_namespaces
from benchmarks.homes.punching import KINDS
from benchmarks.programs import Program
from benchmarks.training_throughput import Events, running
from swarm.attacks import DEVELOPER_VARIABLE
from swarm.core.plan import (
    Assumptions,
    StagePlan,
    beside_a_joiner,
    plan_run,
    step_seconds,
    steps_beside_s,
    with_joins_s,
)
from swarm.core.settings import RunSettings
from swarm.manifest.file import assumed_data, freeze, read_manifest
from swarm.manifest.model import hidden_size, stage_num_parameters
from swarm.network.identity_file import load_or_create_identity

PLAN_GOAL, RELAYED_GOAL = 0.15, 0.01
HOME_KINDS = (
    "full cone",
    "port-restricted",
    "restricted",
    "symmetric",
    "port-restricted",
    "double",
    "port-restricted",
    "full cone",
)
"""Of the peers' routers, in their order. Any two can be punched through."""
DOWN_TIMES = 5.0
PATHS = Paths(40.0, 0.0)
READY_S = 400.0
STUCK_S = 240.0
"""Longer than any deadline of the run."""
STAYS_S, AWAY_S, LEAVING_S = 60.0, 60.0, 300.0
"""When one of the two has come back, the other leaves so long after that, and stays away; it ends its round first."""
ENDS_S = 60.0

MANIFEST = """\
[run]
name = "homes"
trust = "public"
[model]
config = {{ model_type = "llama", vocab_size = 256, hidden_size = 256, intermediate_size = {mlp}, \
num_hidden_layers = {layers}, num_attention_heads = 4, num_key_value_heads = 4, max_position_embeddings = 64, \
tie_word_embeddings = false }}
stages = {stages}
subspace = {subspace}
[data]
max_text_mb = 1
sequence_length = 64
[batch]
microbatch_size = 2
target_tokens = {tokens}
[optimizer]
total_steps = 100000
[codecs]
averaging = "{codec}"
[averaging]
local_steps = {local_steps}
[audits]
agreements_to_promote = 0
contribution_budget = {contribution_budget}
[checkpoint]
every_steps = 80000
snapshot_every = 4
[limits]
founders_per_stage = {founders}
"""


@dataclass(frozen=True)
class Mode:
    """How the eight train together."""

    stages: int
    attack: str
    """Of the second peer."""
    values: Mapping[str, Any]
    """Of the manifest."""

    @property
    def stage_of(self) -> dict[str, int]:
        """Of each peer."""
        return {f"home{number}": number % self.stages for number in range(len(HOME_KINDS))}


MODES = {
    "pipeline": Mode(
        4,
        "activation_negate@6",
        {
            "mlp": 1664,
            "layers": 4,
            "subspace": 8,
            "tokens": 4096,
            "codec": "int8",
            "local_steps": 1,
            "contribution_budget": 0.07,
        },
    ),
    # Windows are audited by their contributions alone, and few are made in ten minutes.
    "windows": Mode(
        1,
        "lazy_window_90@4",
        {
            "mlp": 1664,
            "layers": 2,
            "subspace": 1,
            "tokens": 128,
            "codec": "int2",
            "local_steps": 10,
            "contribution_budget": 0.25,
        },
    ),
}
LIAR, COMING_AND_GOING = "home1", ("home2", "home7")


@dataclass(frozen=True)
class Watched:
    """What was seen of a run."""

    events: list[dict[str, Any]]
    """The host's, each with the time `at` which it was read."""
    lines: list[dict[str, Any]]
    """The router's."""
    first: dict[str, Any]
    """The version from which on things count."""
    last: dict[str, Any]
    peers: dict[str, str]
    """Their ids, by name."""
    addresses: list[str]
    relayed_bytes: int
    """From the run's start to its end."""
    replicas_equal: bool
    moves: list[str]
    """Who left and came back, and when."""


def watch(mode: Mode, manifest: Path, folder: Path, *, uplink_mbit: float, seconds: float, skip_steps: int) -> Watched:
    """A run from its start until it has been counted for so long."""
    homes = [*mode.stage_of]
    behind = {home: KINDS[kind] for home, kind in zip(homes, HOME_KINDS, strict=True)}
    swarm = [sys.executable, "-m", "swarm"]
    with ExitStack() as stack:
        everyone = ["host", *homes]
        network = stack.enter_context(Namespaces(everyone, bridged=False, subnet=PUBLIC_SUBNET, routed=homes))
        router = stack.enter_context(routing(network, everyone, behind))
        programs: dict[str, Program] = {}

        def start(name: str, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
            inside = [*network.daemon(name, folder, *command), "--verbose"]
            log = folder / f"{name}.{sum(path.name.startswith(f'{name}.') for path in folder.iterdir())}.log"
            programs[name] = Program(name, stack.enter_context(running(inside, log, **options)), log)
            return programs[name].process

        def wait_for(wanted: Any, *, timeout_s: float) -> dict[str, Any]:
            honest = [program for name, program in programs.items() if name != LIAR]
            return events.wait_for(wanted, timeout_s=timeout_s, programs=honest)

        report = folder / "report.json"
        hosting = [*swarm, "host", str(manifest), "--json", "--evaluate-tokens", "1", "--relay-gb", "20"]
        host = start("host", [*hosting, "--report", str(report)], stdout=subprocess.PIPE)
        events = Events(host)
        address = wait_for(lambda event: event["event"] == "listening", timeout_s=READY_S)["addresses"][0]

        def join(name: str) -> None:
            lies = name == LIAR
            program = [sys.executable, "-m", "peer.adversary", mode.attack] if lies else swarm
            options = ["join", address, "--stage", str(mode.stage_of[name]), "--threads", "1", "--yes", "--nice", "0"]
            start(name, [*program, *options], env={**os.environ, **({DEVELOPER_VARIABLE: "1"} if lies else {})})

        for home in homes:
            join(home)
        wait_for(lambda event: event["event"] == "genesis", timeout_s=READY_S)
        addresses = [network.outside(home) for home in homes]
        router.limit(PATHS, up_mbit=uplink_mbit, down_mbit=DOWN_TIMES * uplink_mbit, only=addresses)
        first = wait_for(lambda event: event.get("version", 0) >= skip_steps, timeout_s=READY_S)
        moves = []

        def move(what: str) -> None:
            moves.append(f"{time.time() - first['at']:.0f} s: {what}")

        turns = itertools.cycle(COMING_AND_GOING)
        while (left_s := first["at"] + seconds - time.time()) > 0:
            time.sleep(min(STAYS_S, left_s))
            if left_s <= STAYS_S:
                break
            turn = next(turns)
            move(f"{turn} is told to leave")
            leaver = programs.pop(turn).process
            leaver.send_signal(signal.SIGINT)
            leaver.wait(LEAVING_S)
            move(f"{turn} has left")
            time.sleep(AWAY_S)
            move(f"{turn} comes back")
            join(turn)
            wait_for(lambda event: event["event"] == "version", timeout_s=STUCK_S)
        enough_at = time.time()
        last = wait_for(lambda event: event["event"] == "version" and event["at"] >= enough_at, timeout_s=STUCK_S)
        host.send_signal(signal.SIGINT)
        host.wait(ENDS_S)
        relayed_bytes = json.loads(report.read_text())["relay"]["carried_bytes"]
        seen, lines = list(events.seen), list(router.seen)
    (folder / "events.json").write_text(json.dumps(seen))
    of_stage = defaultdict(list)
    for name, stage in mode.stage_of.items():
        if name != LIAR:
            of_stage[stage].append(folder / name)
    return Watched(
        seen,
        lines,
        first,
        last,
        {name: str(load_or_create_identity(folder / name / "identity.key").peer_id) for name in homes},
        addresses,
        relayed_bytes,
        all(are_equal(folders) for folders in of_stage.values()),
        moves,
    )


class PlanOfThose:
    """What `swarm plan` has for a version, of the peers that had work in it."""

    def __init__(self, settings: RunSettings, parameters: Sequence[int], width: int, *, uplink_mbit: float) -> None:
        self._run = (settings, parameters, width)
        self._supposed = Assumptions(
            uplink_mbit=uplink_mbit,
            downlink_mbit=DOWN_TIMES * uplink_mbit,
            peers_per_stage=1,
            tflops=1.0,
            session_hours=1e9,
            round_trip_ms=PATHS.round_trip_ms,
            exact_ns=1.0,
        )

    def stage(self, stage: int, peers: int, **supposed: float) -> StagePlan:
        """A stage of so many."""
        return self._stage(stage, self._links(peers, supposed))

    def step_s(self, peers: Sequence[int], joins_per_s: Sequence[float], **supposed: float) -> float:
        """Of a version, with so many peers in each stage, on average over a time in which so many joined each."""
        links = [self._links(number, supposed) for number in peers]
        stages = [self._stage(stage, those) for stage, those in enumerate(links)]
        slowed = [self._stage(stage, beside_a_joiner(those)) for stage, those in enumerate(links)]
        joined = [self.stage(stage, number + 1, **supposed) for stage, number in enumerate(peers)]
        shares = [min(1.0, per_s * part.join_s) for part, per_s in zip(joined, joins_per_s, strict=True)]
        beside_s = steps_beside_s(self._run[0], stages, slowed, self._supposed)
        return with_joins_s(step_seconds(self._run[0], stages, self._supposed), zip(shares, beside_s, strict=True))

    def _links(self, peers: int, supposed: Mapping[str, float]) -> Assumptions:
        return Assumptions(**{**vars(self._supposed), **supposed, "peers_per_stage": peers})

    def _stage(self, stage: int, links: Assumptions) -> StagePlan:
        return plan_run(*self._run, links).stages[stage]


def figures(watched: Watched, plan: PlanOfThose, num_stages: int) -> dict[str, Any]:
    """What the run came to."""
    first, last = watched.first, watched.last
    seconds, versions = last["at"] - first["at"], last["version"] - first["version"]
    counted = range(first["version"], last["version"])
    told = [event for event in watched.events if event["event"] == "step"]
    steps = [event for event in told if event["step"] in counted]
    at_work = defaultdict[int, list[set[str]]](lambda: [set() for _ in range(num_stages)])
    for event in steps:
        if event["counted"]:
            at_work[event["step"]][event["stage"]].add(event["peer_id"])
    fleets = [[max(1, len(peers)) for peers in at_work[step]] for step in counted]
    took = _took(told, plan, dict(zip(counted, fleets, strict=True)))
    tokens = sum(event["num_targets"] for event in steps if event["stage"] == 0)
    came = [event for event in watched.events if event["event"] == "admitted" and event["at"] > first["at"]]
    joins = [sum(event["stage"] == stage for event in came) for stage in range(num_stages)]
    planned_s = sum(plan.step_s(fleet, [number / seconds for number in joins], **took) for fleet in fleets)
    out = [event for event in watched.events if event["event"] in ("banned", "quarantined")]
    outs = [event for event in out if event["peer_id"] == watched.peers[LIAR]]
    others = [f"{event['event']} for {event['kind']}" for event in out if event not in outs]
    at = [event["at"] for event in watched.events if event["event"] == "version" and event["at"] >= first["at"]]
    sent = sum(int(watched.lines[-1]["up_bytes"][address]) for address in watched.addresses)
    return {
        "minutes": seconds / 60,
        "versions": versions,
        "liar_out": {"how": outs[0]["event"], "for": outs[0]["kind"], "step": outs[0]["step"]} if outs else None,
        "others_out": others,
        "replicas_equal": watched.replicas_equal,
        "tokens_per_s": tokens / seconds,
        "planned_tokens_per_s": tokens / planned_s,
        "of_plan": planned_s / seconds,
        "step_s": statistics.median(after - before for before, after in itertools.pairwise(at)),
        "longest_gap_s": max(after - before for before, after in itertools.pairwise(at)),
        "planned_step_s": planned_s / versions,
        "round_s": statistics.median(event["round_s"] for event in steps),
        "joins": joins,
        "peers_at_work": [statistics.mean(fleet[stage] for fleet in fleets) for stage in range(num_stages)],
        **took,
        "sent_bytes": sent,
        "relayed_share": watched.relayed_bytes / sent,
        "moves": watched.moves,
    }


def _took(told: Sequence[dict[str, Any]], plan: PlanOfThose, fleets: Mapping[int, Sequence[int]]) -> dict[str, float]:
    """How fast peers computed, and did the exact work, in the steps whose fleets these are: of the slowest stage."""
    compute, exact = defaultdict[int, list[float]](list), defaultdict[int, list[float]](list)
    before: dict[str, dict[str, Any]] = {}
    for event in told:
        earlier, step, stage = before.get(event["peer_id"]), event["step"], event["stage"]
        before[event["peer_id"]] = event
        # Who has come back counts from nothing again.
        if earlier is None or earlier["step"] != step - 1 or event["busy_s"] < earlier["busy_s"] or step not in fleets:
            continue
        unit = plan.stage(stage, fleets[step][stage])
        compute[stage].append((event["busy_s"] - earlier["busy_s"]) / unit.compute_s)
        exact[stage].append((event["exact_s"] - earlier["exact_s"]) / unit.exact_s)
    return {
        "tflops": 1 / max(statistics.mean(one) for one in compute.values()),
        "exact_ns": max(statistics.mean(one) for one in exact.values()),
    }


@click.command()
@click.option("--mode", "modes", type=click.Choice([*MODES]), multiple=True, help="By default both.")
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), default=10.0, show_default=True)
@click.option("--uplink-mbit", type=click.FloatRange(min=0, min_open=True), default=2.0, show_default=True)
@click.option("--skip-steps", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--keep", type=click.Path(path_type=Path), help="Leave logs and disks in this new folder.")
@click.option("--smoke", is_flag=True, help="A few versions in windows on fast lines: does it run?")
@click.option("--json", "as_json", is_flag=True)
def main(
    modes: tuple[str, ...],
    minutes: float,
    uplink_mbit: float,
    skip_steps: int,
    keep: Path | None,
    *,
    smoke: bool,
    as_json: bool,
) -> None:
    """Strangers behind routers train together: who is out, whether replicas are equal, and tokens/s over the plan's."""
    begin_with_namespaces()
    if smoke:
        modes, minutes, uplink_mbit, skip_steps = ("windows",), 0.1, 20.0, 1
    result: dict[str, Any] = {"goals": {"of_plan": [1 - PLAN_GOAL, 1 + PLAN_GOAL], "relayed_share": RELAYED_GOAL}}
    with tempfile.TemporaryDirectory() as scratch:
        for name in modes or MODES:
            mode, folder = MODES[name], (keep or Path(scratch)) / name
            folder.mkdir(parents=True)
            manifest = folder / "run.toml"
            founders = len(HOME_KINDS) // mode.stages
            manifest.write_text(MANIFEST.format(**mode.values, stages=mode.stages, founders=founders))
            read = read_manifest(manifest)
            settings = freeze(read, assumed_data(read), ())
            model = settings.model
            plan = PlanOfThose(settings, stage_num_parameters(model), hidden_size(model), uplink_mbit=uplink_mbit)
            watched = watch(
                mode, manifest, folder, uplink_mbit=uplink_mbit, seconds=60 * minutes, skip_steps=skip_steps
            )
            result[name] = {**figures(watched, plan, mode.stages), "load_average": os.getloadavg()[0]}
            if not as_json:
                for figure, value in result[name].items():
                    click.echo(f"{name}: {figure}: {value}")
    if as_json:
        click.echo(json.dumps(result))


if __name__ == "__main__":
    main()
