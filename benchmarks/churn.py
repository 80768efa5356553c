"""This is where peers are killed and started while a real swarm trains, and what that costs is measured.

    python -m benchmarks.churn [--minutes 5] [--every 20] [--json]      # about seven minutes

Two stages of three peers, processes of their own, whose compute is emulated at a fixed rate (`benchmarks.paced_peer`).
They train undisturbed for a minute; then every 20 seconds one of them, drawn from the seed, from the stages by turns,
is killed (SIGKILL) and another is started, which goes where the daemon thinks best. Goals: at least 80 % of the
undisturbed throughput for each live peer, the rate that the living allow within 5 s of a kill, no round lost, replicas
equal at the end. A kill may cost the dead peer's unaveraged sum and, of a source, what it had in flight: a step in
which one died is short of these microbatches.
"""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from benchmarks.training_throughput import Events, running
from swarm.network.identity_file import load_or_create_identity

SHARE_GOAL = 0.8
BACK_GOAL_S = 5.0
NEAR = 0.8
"""Share of the rate that the living allow at which the swarm is back: a step's rate is off by one of its microbatches
in three."""
STAGES, PEERS = 2, 3
FORWARD_S = 0.08
MICROBATCHES = 24
"""Of a step: two seconds of three peers that need 0.24 s for each."""
SETTLED_VERSION = 5
READY_S = 120.0

MANIFEST = f"""\
[run]
name = "churn"
[model]
config = {{ model_type = "llama", vocab_size = 256, hidden_size = 32, intermediate_size = 64, num_hidden_layers = 2, \
num_attention_heads = 2, num_key_value_heads = 2, max_position_embeddings = 64, tie_word_embeddings = false }}
stages = {STAGES}
[data]
max_text_mb = 1
sequence_length = 32
[batch]
microbatch_size = 1
target_tokens = {32 * MICROBATCHES}
[optimizer]
total_steps = 100000
[checkpoint]
every_steps = 80000
snapshot_every = 4
[limits]
founders_per_stage = {PEERS}
"""


@dataclass
class Life:
    """One peer: when it was a member, and of which stage."""

    stage: int
    process: "subprocess.Popen[str]"
    joined_at: float
    ended_at: float | None = None


@dataclass
class Swarm:
    """Host, peers, and who of them lives."""

    folder: Path
    stack: ExitStack
    forward_s: float
    lives: dict[str, Life] = field(default_factory=dict)
    """By peer id."""
    _processes: dict[str, "subprocess.Popen[str]"] = field(default_factory=dict)
    _read: int = 0

    def begin(self) -> None:
        manifest = self.folder / "run.toml"
        manifest.write_text(MANIFEST)
        swarm = str(Path(sys.executable).parent / "swarm")
        command = [swarm, "host", str(manifest), "--dir", str(self.folder / "host"), "--listen", "127.0.0.1:0"]
        command += ["--json", "--evaluate-tokens", "1", "--report", str(self.folder / "report.json")]
        hosting = running(command, self.folder / "host.log", stdout=subprocess.PIPE)
        self.host = self.stack.enter_context(hosting)
        self.events = Events(self.host)
        listening = self.events.wait_for(lambda event: event["event"] == "listening", timeout_s=READY_S)
        self._address = listening["addresses"][0]
        for number in range(STAGES * PEERS):
            self.start("--stage", str(number % STAGES))
        began = self.events.wait_for(lambda event: event["event"] == "genesis", timeout_s=READY_S)
        for number, (peer, process) in enumerate(self._processes.items()):
            self.lives[peer] = Life(number % STAGES, process, began["at"])

    def start(self, *options: str) -> None:
        """One more peer; which stage it goes to is its own affair if no option says so."""
        name = f"peer{len(self._processes)}"
        home = self.folder / name
        home.mkdir()
        peer = str(load_or_create_identity(home / "identity.key").peer_id)
        command = [sys.executable, "-m", "benchmarks.paced_peer", str(self.forward_s), self._address, "--yes"]
        command += ["--dir", str(home), "--listen", "127.0.0.1:0", *options]
        process = self.stack.enter_context(running(command, self.folder / f"{name}.log"))
        self._processes[peer] = process

    def follow(self, until: float) -> None:
        """Take note of who joins and leaves, until a time."""
        while (left_s := until - time.time()) > 0:
            if self.host.poll() is not None:
                raise click.ClickException(f"the host ended; see {self.folder / 'host.log'}")
            time.sleep(min(0.2, left_s))
            self._take_note()

    def _take_note(self) -> None:
        seen = self.events.seen[self._read :]
        self._read += len(seen)
        for event in seen:
            peer = event.get("peer_id", "")
            if event["event"] == "joined" and peer in self._processes and peer not in self.lives:
                self.lives[peer] = Life(event["stage"], self._processes[peer], event["at"])
            elif event["event"] == "left" and peer in self.lives and self.lives[peer].ended_at is None:
                self.lives[peer].ended_at = event["at"]

    def kill(self, stage: int, rng: random.Random) -> dict[str, Any]:
        """A member of the stage dies without a word."""
        living = sorted(peer for peer, life in self.lives.items() if life.stage == stage and life.ended_at is None)
        if not living:
            raise click.ClickException(f"nobody of stage {stage} is left to be killed")
        life = self.lives[rng.choice(living)]
        life.process.send_signal(signal.SIGKILL)
        life.process.wait(5)
        life.ended_at = time.time()
        return {"at": life.ended_at, "stage": stage}

    def dismiss(self) -> None:
        """Nobody is needed any more."""
        for process in self._processes.values():
            process.kill()

    def living(self, stage: int, at: float) -> int:
        ends = [(life.joined_at, life.ended_at) for life in self.lives.values() if life.stage == stage]
        return sum(joined <= at and (ended is None or ended > at) for joined, ended in ends)

    def live_seconds(self, start: float, stop: float) -> float:
        """Of all members together."""
        return sum(
            max(0.0, min(stop, stop if life.ended_at is None else life.ended_at) - max(start, life.joined_at))
            for life in self.lives.values()
        )


def versions_of(events: list[dict[str, Any]]) -> list[tuple[float, int]]:
    """When each version was there."""
    return [(event["at"], event["version"]) for event in events if event["event"] == "version"]


def rate_between(versions: list[tuple[float, int]], start: float, stop: float) -> float:
    """Steps a second, between the first and the last version in that time."""
    inside = [(at, version) for at, version in versions if start <= at <= stop]
    if len(inside) < 2:
        return 0.0
    return (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])


def back_after_s(swarm: Swarm, versions: list[tuple[float, int]], killed_at: float, full: float) -> float | None:
    """Seconds from the kill to the beginning of the first step that goes at `NEAR` of the rate that the living allow.

    `full` is the undisturbed rate; the living allow the share of it that the smaller stage has of its peers.
    """
    for (start, first), (stop, last) in pairwise(versions):
        if start >= killed_at:
            allowed = full * min(swarm.living(stage, start) for stage in range(STAGES)) / PEERS
            if (last - first) / (stop - start) >= NEAR * min(allowed, full):
                return start - killed_at
    return None


def figures(swarm: Swarm, calm: tuple[float, float], churn: tuple[float, float], kills: list[dict[str, Any]]) -> Any:
    report = json.loads((swarm.folder / "report.json").read_text())
    versions = versions_of(swarm.events.seen)
    full = rate_between(versions, *calm)
    rate = rate_between(versions, *churn)
    per_peer = full / (STAGES * PEERS)
    live = swarm.live_seconds(*churn) / (churn[1] - churn[0])
    backs = [back_after_s(swarm, versions, kill["at"], full) for kill in kills]
    found = sorted(back for back in backs if back is not None)
    short = [step for step, ids in report["microbatches"].items() if len(ids) != MICROBATCHES]
    return {
        "goals": {"of_undisturbed_per_live_peer": SHARE_GOAL, "back_after_s": BACK_GOAL_S},
        "undisturbed_microbatches_per_s": full * MICROBATCHES,
        "microbatches_per_s": rate * MICROBATCHES,
        "mean_live_peers": live,
        "of_undisturbed": rate / full,
        "of_undisturbed_per_live_peer": rate / live / per_peer,
        "kills": len(kills),
        "started": len(swarm.lives) - STAGES * PEERS,
        "back_after_s": {"median": statistics.median(found) if found else None, "worst": max(found, default=None)},
        "not_back": backs.count(None),
        "steps": report["steps"],
        "lost_rounds": report["steps"] - len(report["microbatches"]),
        "steps_short_of_microbatches": len(short),
        "microbatches_short": sum(MICROBATCHES - len(report["microbatches"][step]) for step in short),
        "reassigned_microbatches": report["reassigned_microbatches"],
        "lost_microbatches": report["lost_microbatches"],
        "lost_contributions": report["lost_contributions"],
        "replicas_equal": all(len(set(digests.values())) == 1 for digests in report["state_digests"].values()),
        "replicas": {stage: len(digests) for stage, digests in report["state_digests"].items()},
        "load_average": os.getloadavg()[0],
    }


def measure(folder: Path, *, seed: int, calm_s: float, churn_s: float, every_s: float, forward_s: float) -> Any:
    rng = random.Random(seed)
    with ExitStack() as stack:
        swarm = Swarm(folder, stack, forward_s)
        swarm.begin()
        swarm.events.wait_for(lambda event: event.get("version", 0) >= SETTLED_VERSION, timeout_s=READY_S)
        calm = (time.time(), time.time() + calm_s)
        swarm.follow(calm[1])
        churn = (time.time(), time.time() + churn_s)
        kills = []
        for number in range(int(churn_s // every_s)):
            kills.append(swarm.kill(number % STAGES, rng))
            swarm.start()
            click.echo(f"kill {number + 1}: {churn[1] - time.time():.0f} s left", err=True)
            swarm.follow(churn[0] + (number + 1) * every_s)
        # The last to come have their snapshot too.
        with_all = versions_of(swarm.events.seen)[-1][1] + 8
        swarm.events.wait_for(lambda event: event.get("version", 0) >= with_all, timeout_s=READY_S)
        swarm.host.send_signal(signal.SIGINT)
        swarm.host.wait(20)
        swarm.dismiss()
    return figures(swarm, calm, churn, kills)


@click.command()
@click.option("--minutes", type=click.FloatRange(min=0.3), default=5.0, show_default=True, help="Of churn.")
@click.option("--calm-s", type=click.FloatRange(min=5), default=60.0, show_default=True, help="Undisturbed, before.")
@click.option(
    "--every", type=click.FloatRange(min=1), default=20.0, show_default=True, help="Seconds from kill to kill."
)
@click.option("--forward-s", type=click.FloatRange(min=0), default=FORWARD_S, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--keep", type=click.Path(path_type=Path), help="Leave logs in this new folder.")
@click.option("--json", "as_json", is_flag=True)
def main(
    minutes: float, calm_s: float, every: float, forward_s: float, seed: int, keep: Path | None, as_json: bool
) -> None:
    """Throughput of a real swarm of which a peer dies and another comes every so often."""
    # Told to end, it ends its programs too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as scratch:
        folder = keep or Path(scratch)
        folder.mkdir(exist_ok=True)
        found = measure(folder, seed=seed, calm_s=calm_s, churn_s=60 * minutes, every_s=every, forward_s=forward_s)
    if as_json:
        click.echo(json.dumps(found))
        return
    for name, value in found.items():
        click.echo(f"{name.replace('_', ' ')}: {value}")


if __name__ == "__main__":
    main()
