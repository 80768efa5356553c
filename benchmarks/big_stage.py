"""A stage of any size on home lines: rounds, a newcomer, a line that is cut, a line much slower than the others.

    python -m benchmarks.big_stage --params 100000000 --peers 3 --uplink-mbit 20 --json [--slow-line 0.1]

The last stage of two, each of its peers in a network namespace, joined by `benchmarks.homes.router`; down five times as
fast as up, 40 ms from home to home. The first stage's one peer and the host have fast lines. Deadlines are the
defaults. After two rounds one more peer joins, and in the middle of a round the last founder's line is dead for
`--cut-s`; with `--slow-line` it has that share of the others' rate instead, once all are members. Counted from the
certified results on the peers' disks, the router's lines and the host's events; the newcomer's time from its admission
to the roster that names it; until it comes rounds are undisturbed, and from then on beside it. Sent twice is what went
over the uplinks to the stage's peers, but for bare acknowledgements, beyond contributions, results, also those that
somebody catches up with, the newcomer's state and, as many as the plan expects, audits' inputs. A figure whose name
begins with `plan_` is what `swarm plan` says, told how long a step took here beside its round; the newcomer's that of
a stage with one peer more, in which rounds go on, and that of rounds beside it what the plan has of a line that
somebody's state shares. Needs root and `ip`.
"""

import contextlib
import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import psutil

from benchmarks.homes.disks import are_equal, members_on, results_on
from benchmarks.homes.emulated import Paths, routing
from benchmarks.homes.namespaces import Namespaces, begin_with_namespaces
from benchmarks.owner.memory import held_with_started
from benchmarks.training_throughput import Events, running
from swarm.core.ids import PeerId
from swarm.core.plan import CONTRIBUTION_BYTES, HEADERS, RESULT_BYTES, Assumptions, beside_a_joiner
from swarm.core.round.contribution import Result
from swarm.network.identity_file import load_identity

READY_S = 600.0
LOOK_EVERY_S = 0.5
QUIET_S, QUIET_BYTES = 5.0, 100_000
"""A line over which no more than that comes in that time brings no state."""
LEAST_WORK_S = 0.01
"""As if computing took no time at all."""
ROUNDS_BEFORE, ROUNDS_AFTER = 2, 2
"""That are counted before the newcomer comes, and after it is a member."""
DOWN_TIMES = 5.0
SESSION_HOURS = 1000.0
SOURCE, NEWCOMER = "source", "newcomer"
HIDDEN_SIZE = 256
STATE_BYTES, WEIGHT_BYTES = 12, 4
"""Of a parameter in a state: weight and moments in fp32; and in what a run begins with."""

MANIFEST = """\
[run]
name = "big-stage"
[model]
config = {{ model_type = "llama", vocab_size = 256, hidden_size = {hidden}, intermediate_size = {mlp}, \
num_hidden_layers = 2, num_attention_heads = 4, num_key_value_heads = 4, max_position_embeddings = 64, \
tie_word_embeddings = false }}
stages = 2
[data]
max_text_mb = 1
sequence_length = 16
[batch]
microbatch_size = 1
target_tokens = 96
[optimizer]
total_steps = 100000
[checkpoint]
every_steps = 80000
snapshot_every = {snapshot_every}
"""


_FETCHED = re.compile(
    r"^([-\d]+ [:\d]+),(\d+) INFO peer\.state\.catch_up: (\d+) parts of step (\d+)'s result came in (\S+) s"
)
"""Of a peer's log."""


@dataclass(frozen=True)
class Fetched:
    """Parts of a result that somebody has caught up with. Times are seconds of the calendar."""

    peer: PeerId
    step: int
    num_parts: int
    began: float
    ended: float

    def within(self, began: float, ended: float) -> float:
        """Parts that came meanwhile, had they come evenly."""
        both_s = min(ended, self.ended) - max(began, self.began)
        return self.num_parts * min(1.0, max(0.0, both_s) / max(1e-9, self.ended - self.began))


@dataclass(frozen=True)
class Watched:
    """What was seen of a run."""

    events: list[dict[str, Any]]
    lines: list[dict[str, Any]]
    begun: dict[str, Any]
    """The event from which on things count: lines are slow."""
    ended: dict[str, Any]
    newcomer_s: float | None
    """From its admission to the roster that names it; None where none came in time."""
    results: list[Result]
    fetched: list[Fetched]
    peak_bytes: Sequence[int]
    """Of memory, the most that each of the founders held with its p2pd."""
    replicas_equal: bool
    addresses: dict[str, str]


def watch(
    manifest: Path,
    folder: Path,
    *,
    num_parameters: int,
    peers: int,
    uplink_mbit: float,
    slow_line: float | None,
    longest_s: float,
    with_newcomer: bool,
    cut_s: float,
) -> Watched:
    """A run from its start until the newcomer has been a member for a while, or `longest_s` is over."""
    founders = tuple(f"peer{number}" for number in range(peers))
    paths = Paths(40.0, 0.0)
    program = str(Path(sys.executable).parent / "swarm")
    with ExitStack() as stack:
        everyone = ("host", SOURCE, *founders, NEWCOMER)
        network = stack.enter_context(Namespaces(everyone, bridged=False))
        router = stack.enter_context(routing(network, everyone))
        addresses = {name: network.address(name) for name in (*founders, NEWCOMER)}

        def start(name: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
            command = network.daemon(name, folder, program, *arguments)
            return stack.enter_context(running(command, folder / f"{name}.log", **options))

        def join(name: str) -> subprocess.Popen[str]:
            stage = "0" if name == SOURCE else "1"
            return start(name, "join", address, "--stage", stage, "--threads", "1", "--yes", "--verbose")

        hosting = start("host", "host", str(manifest), "--json", "--evaluate-tokens", "1", stdout=subprocess.PIPE)
        events = Events(hosting)
        address = events.wait_for(lambda event: event["event"] == "listening", timeout_s=READY_S)["addresses"][0]
        homes = list(addresses.values())
        router.limit(paths, up_mbit=uplink_mbit, down_mbit=DOWN_TIMES * uplink_mbit, only=homes)
        router.count_apart(network.address("host"), network.address(SOURCE))
        held = stack.enter_context(watching([join(name).pid for name in founders]))
        begin_by = time.monotonic() + READY_S

        def came() -> list[int]:
            return [router.seen[-1]["down_bytes"][addresses[name]] for name in founders]

        before = [0] * peers  # what broke off comes twice: so their lines must be quiet, too
        while min(now := came()) < WEIGHT_BYTES * num_parameters or any(
            new - old > QUIET_BYTES for new, old in zip(now, before, strict=True)
        ):
            if time.monotonic() > begin_by:
                raise click.ClickException(f"{peers} peers do not have what the run begins with after {READY_S:g} s")
            before = now
            time.sleep(QUIET_S)
        join(SOURCE)  # it is awaited: so all of them are founders
        begin_by = time.monotonic() + READY_S
        while min(members_on(folder / name) for name in founders) < peers:  # who joined last still fetches its first
            if time.monotonic() > begin_by:
                raise click.ClickException(f"{peers} peers are not members of the stage after {READY_S:g} s")
            time.sleep(1.0)
        if slow_line is not None:
            slow = addresses[founders[-1]]
            up = slow_line * uplink_mbit
            router.limit(paths, up_mbit=up, down_mbit=DOWN_TIMES * up, only=[slow])
        give_up_at = time.monotonic() + longest_s

        def left_s() -> float:
            return max(1.0, give_up_at - time.monotonic())

        now_at = max((event["version"] for event in list(events.seen) if event["event"] == "version"), default=0)
        begun = events.wait_for(lambda event: event.get("version", 0) >= now_at + 1, timeout_s=left_s())
        wanted = begun["version"] + ROUNDS_BEFORE
        newcomer_s = None
        try:
            ended = events.wait_for(lambda event: event.get("version", 0) >= wanted, timeout_s=left_s())
            if with_newcomer:
                came_at = time.time()
                join(NEWCOMER)
                if cut_s:
                    per_round_s = (ended["at"] - begun["at"]) / ROUNDS_BEFORE
                    time.sleep(per_round_s / 2)
                    router.cut(addresses[founders[-1]])
                    time.sleep(cut_s)
                    router.cut()

                admitted = events.wait_for(
                    lambda event: event["event"] == "admitted" and event["at"] > came_at, timeout_s=left_s()
                )
                # Who was cut off may join again, too.
                joined = events.wait_for(
                    lambda event: event["event"] == "joined" and event["peer_id"] == admitted["peer_id"],
                    timeout_s=left_s(),
                )
                newcomer_s = joined["at"] - admitted["at"]
            versions = [event["version"] for event in events.seen if event["event"] == "version"]
            wanted = max(versions) + ROUNDS_AFTER
            ended = events.wait_for(lambda event: event.get("version", 0) >= wanted, timeout_s=left_s())
        except click.ClickException:
            ended = {**events.seen[-1], "at": time.time()}
        seen, lines = list(events.seen), list(router.seen)
        for name, told in (("events", seen), ("lines", lines)):
            (folder / f"{name}.json").write_text(json.dumps(told))
    return Watched(
        seen,
        lines,
        begun,
        ended,
        newcomer_s,
        results_on(folder / founders[0]),
        [one for name in (*founders, NEWCOMER) for one in fetched_by(folder, name)],
        held.most_bytes,
        are_equal([folder / name for name in (*founders, NEWCOMER)]),
        addresses,
    )


class Held:
    """The most memory that each of several processes held, with all that it started: what the kernel cannot take from
    them."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.most_bytes = [0] * len(pids)
        self._processes = [psutil.Process(pid) for pid in pids]

    def look(self) -> None:
        for number, process in enumerate(self._processes):
            with contextlib.suppress(psutil.Error):
                self.most_bytes[number] = max(self.most_bytes[number], sum(held_with_started(process)))


@contextlib.contextmanager
def watching(pids: Sequence[int]) -> Iterator[Held]:
    """They are looked at every half second."""
    held, is_over = Held(pids), threading.Event()

    def look() -> None:
        while not is_over.wait(LOOK_EVERY_S):
            held.look()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield held
    finally:
        is_over.set()
        thread.join()


def fetched_by(folder: Path, name: str) -> Iterator[Fetched]:
    """By its log."""
    if not (folder / name / "identity.key").exists():
        return
    me = load_identity(folder / name / "identity.key").peer_id
    for line in (folder / f"{name}.log").read_text(encoding="utf-8", errors="replace").splitlines():
        if (found := _FETCHED.match(line)) is not None:
            day, milliseconds, parts, step, took_s = found.groups()
            ended = time.mktime(time.strptime(day, "%Y-%m-%d %H:%M:%S")) + int(milliseconds) / 1000
            yield Fetched(me, int(step), int(parts), ended - float(took_s), ended)


def work_s(watched: Watched) -> float:
    """Of a step, beside its round; in the median of those before the newcomer."""
    rounds: dict[int, list[float]] = {}
    for event in watched.events:
        if event["event"] == "step" and event["stage"] == 1 and event["round_s"] > 0:
            rounds.setdefault(event["step"], []).append(event["round_s"])
    versions = [event for event in watched.events if event["event"] == "version"]
    versions = [event for event in versions if 0 <= event["version"] - watched.begun["version"] <= ROUNDS_BEFORE]
    beside = [
        after["at"] - before["at"] - statistics.median(rounds[before["version"]])
        for before, after in pairwise(versions)
        if before["version"] in rounds
    ]
    return max(LEAST_WORK_S, statistics.median(beside)) if beside else LEAST_WORK_S


def due_bytes(made: Result) -> float:
    """Of a round, a parameter: of each part the contributions of all but its reducer, and its result to all others."""
    num_parts, num_members = len(made.parts), len(made.roster.members)
    if not num_parts:  # nobody had done anything
        return 0.0
    contributors = [one.peer_id for one in made.roster.contributions]
    reducers = [made.roster.combiner_of(part) for part in range(num_parts)]
    num_sent = sum(1 for reducer in reducers for peer in contributors if peer != reducer) / num_parts
    return num_sent * CONTRIBUTION_BYTES["int8"] + (num_members - 1) * RESULT_BYTES["int8"]


def figures(
    watched: Watched, stage: dict[str, Any], stage_of_more: dict[str, Any], stage_beside: dict[str, Any]
) -> dict[str, Any]:
    """What the run came to, beside the plan of the stage, of one with a peer more, and of one beside a joiner."""
    begun, ended, lines = watched.begun, watched.ended, watched.lines
    versions = [event for event in watched.events if event["event"] == "version" and event["at"] <= ended["at"]]
    versions = [event for event in versions if event["at"] >= begun["at"]]
    gaps = [after["at"] - before["at"] for before, after in pairwise(versions)]
    num_parameters = stage["num_parameters"]
    usual_s = statistics.median(gaps) if gaps else 0.0
    last = versions[-1] if versions else begun
    gaps.append(ended["at"] - last["at"])
    results = [made for made in watched.results if begun["version"] <= int(made.roster.step) < last["version"]]
    num_members = [len(made.roster.members) for made in results]
    due = num_parameters * sum(map(due_bytes, results))
    members = {int(made.roster.step): made.roster.members for made in results}
    for one in watched.fetched if results else ():
        if one.peer not in members.get(one.step, ()):  # what members have of it is due with its round
            share = one.within(begun["at"], ended["at"]) / len(results[0].parts)
            due += share * num_parameters * RESULT_BYTES["int8"]
    due += sum(num_members) * stage["audit_up_bytes"]
    if watched.newcomer_s is not None:
        due += num_parameters * STATE_BYTES
    at = [line for line in lines if begun["at"] <= line["at"] <= ended["at"]]
    up, acknowledged, to_others = (
        sum(at[-1][name][address] - at[0][name][address] for address in watched.addresses.values())
        for name in ("up_bytes", "up_ack_bytes", "up_apart_bytes")
    )
    dropped = Counter[str]()
    left_out = Counter[str]()
    offered = 0
    for result in results:
        offered += len(result.roster.contributions) * len(result.parts)
        for part in result.parts:
            missing = [made.peer_id for made in result.roster.contributions] if part.is_empty else []
            dropped.update(str(peer)[-6:] for peer in (*missing, *(one.peer_id for one in part.excluded)))
        left_out.update(str(one.peer_id)[-6:] for one in result.roster.left_out)
    steps = [event for event in watched.events if event["event"] == "step" and event["stage"] == 1]
    counted = [event for event in steps if event["step"] >= begun["version"]]
    rounds = [event["round_s"] for event in counted]
    came = (event["at"] for event in watched.events if event["event"] == "admitted" and event["at"] > begun["at"])
    came_at = next(came, math.inf)
    undisturbed = [event["round_s"] for event in counted if event["at"] < came_at]
    is_member_at = came_at + (math.inf if watched.newcomer_s is None else watched.newcomer_s)
    beside = [event["round_s"] for event in counted if came_at <= event["at"] - event["round_s"] < is_member_at]
    return {
        "contributions_dropped": dropped.total(),
        "part_contributions": offered,
        "dropped_by": dict(dropped),
        "left_out_whole": dict(left_out),
        "rounds": len(results),
        "bytes_sent_twice_share": max(0.0, (up - acknowledged - to_others) / HEADERS / due - 1.0) if due else None,
        "acknowledgements_share": acknowledged / up if up else None,
        "to_host_and_source_share": to_others / up if up else None,
        "round_seconds": statistics.median(rounds) if rounds else None,
        "undisturbed_round_seconds": statistics.median(undisturbed) if undisturbed else None,
        "plan_round_seconds": stage["round_s"],
        "beside_round_seconds": statistics.median(beside) if beside else None,
        "plan_beside_round_seconds": stage_beside["round_s"],
        "step_seconds": usual_s,
        "newcomer_ready_s": watched.newcomer_s,
        "plan_newcomer_s": stage_of_more["join_s"],
        "longest_standstill_s": max(gaps) - usual_s,
        "host_bytes_per_parameter": max(watched.peak_bytes) / num_parameters,
        "host_bytes_per_parameter_each": [peak / num_parameters for peak in watched.peak_bytes],
        "plan_host_bytes_per_parameter": sum(
            size for name, size in stage["memory_bytes"].items() if name.startswith("host.")
        )
        / num_parameters,
        "replicas_equal": watched.replicas_equal,
    }


def write_manifest(path: Path, *, params: int, snapshot_every: int) -> None:
    """A model of about so many parameters in one layer."""
    mlp = max(64, round((params - 2 * 256 * HIDDEN_SIZE - 4 * HIDDEN_SIZE**2) / (3 * HIDDEN_SIZE) / 64) * 64)
    path.write_text(MANIFEST.format(hidden=HIDDEN_SIZE, mlp=mlp, snapshot_every=snapshot_every))


def planned(manifest: Path, *, peers: int, uplink_mbit: float, tflops: float = 1.0) -> dict[str, Any]:
    """What `swarm plan` says."""
    command = [str(Path(sys.executable).parent / "swarm"), "plan", str(manifest), "--json", "--peers", str(peers)]
    command += ["--uplink-mbit", str(uplink_mbit), "--downlink-mbit", str(DOWN_TIMES * uplink_mbit)]
    command += ["--tflops", str(tflops), "--session-hours", str(SESSION_HOURS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    plan: dict[str, Any] = json.loads(done.stdout)  # also where the plan refuses the run
    return plan


@click.command()
@click.option("--params", type=click.IntRange(min=1_000_000), default=10_000_000, show_default=True)
@click.option("--peers", type=click.IntRange(min=2), default=3, show_default=True)
@click.option("--uplink-mbit", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True)
@click.option("--slow-line", type=click.FloatRange(0, 1), help="The last founder's share of the others' rate.")
@click.option(
    "--cut-s", type=click.FloatRange(min=0), default=60.0, show_default=True, help="How long a founder's line is dead."
)
@click.option("--snapshot-every", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--longest-s", type=click.FloatRange(min=1), default=1800.0, show_default=True)
@click.option("--keep", type=click.Path(path_type=Path), help="Leave logs and disks in this new folder.")
@click.option("--smoke", is_flag=True, help="Two peers, a small stage, no newcomer and no cut: does it run?")
@click.option("--json", "as_json", is_flag=True)
def main(
    params: int,
    peers: int,
    uplink_mbit: float,
    slow_line: float | None,
    cut_s: float,
    snapshot_every: int,
    longest_s: float,
    keep: Path | None,
    smoke: bool,
    as_json: bool,
) -> None:
    """Rounds, a newcomer and a dead or slow line, of one stage on home lines."""
    begin_with_namespaces()
    if smoke:
        params, peers, uplink_mbit, slow_line = 1_000_000, 2, 20.0, None
    with tempfile.TemporaryDirectory() as scratch:
        folder = keep or Path(scratch)
        folder.mkdir(exist_ok=True)
        manifest = folder / "run.toml"
        write_manifest(manifest, params=params, snapshot_every=snapshot_every)
        supposed = planned(manifest, peers=peers, uplink_mbit=uplink_mbit)["stages"][1]
        watched = watch(
            manifest,
            folder,
            num_parameters=supposed["num_parameters"],
            peers=peers,
            uplink_mbit=uplink_mbit,
            slow_line=slow_line,
            longest_s=longest_s,
            with_newcomer=slow_line is None and not smoke,
            cut_s=cut_s,
        )
        beside_s = work_s(watched)
        tflops = supposed["compute_s"] / beside_s
        lines = Assumptions(
            uplink_mbit=uplink_mbit,
            downlink_mbit=DOWN_TIMES * uplink_mbit,
            peers_per_stage=peers,
            tflops=tflops,
            session_hours=SESSION_HOURS,
        )
        beside_mbit = beside_a_joiner(lines).uplink_mbit
        plan, of_more, beside = (
            planned(manifest, peers=number, uplink_mbit=mbit, tflops=tflops)
            for number, mbit in ((peers, uplink_mbit), (peers + 1, uplink_mbit), (peers, beside_mbit))
        )
        found = figures(watched, *(one["stages"][1] for one in (plan, of_more, beside))) | {"work_seconds": beside_s}
        found["plan_refusals"] = plan["refusals"]
    if as_json:
        click.echo(json.dumps(found))
    else:
        for name, value in found.items():
            click.echo(f"{name}: {value}")


if __name__ == "__main__":
    main()
