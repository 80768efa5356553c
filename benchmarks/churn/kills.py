"""What it costs a real swarm in training that peers are killed and started.

    python -m benchmarks.churn.kills [--minutes 5] [--every 20] [--json]      # about seven minutes

Two stages of three peers, processes of their own, whose compute is emulated at a fixed rate
(`benchmarks.homes.paced_peer`). They train undisturbed for a minute; then every 20 seconds one of them, drawn from the
seed, from the stages by turns, is killed (SIGKILL) and another is started, which goes where the daemon thinks best.
Goals: at least 80 % of the undisturbed throughput for each live peer, the rate that the living allow within 5 s of a
kill, no round lost, replicas equal at the end. A kill may cost the dead peer's unaveraged sum and, of a source, what it
had in flight: a step in which one died is short of these microbatches.
"""

import contextlib
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
from pathlib import Path
from typing import Any, Protocol

import click

from benchmarks.churn.recovery import Story
from benchmarks.programs import end_when_told
from benchmarks.training_throughput import Events, running
from swarm.network.identity_file import load_or_create_identity

SHARE_GOAL = 0.8
BACK_GOAL_S = 5.0
FORWARD_S = 0.08
SETTLED_VERSION = 5
PACED_PEER = (sys.executable, "-m", "benchmarks.homes.paced_peer")
READY_S = 120.0

MANIFEST = """\
[run]
name = "churn"
[model]
config = {{ model_type = "llama", vocab_size = 256, hidden_size = 32, intermediate_size = 64, \
num_hidden_layers = {layers}, num_attention_heads = 2, num_key_value_heads = 2, \
max_position_embeddings = 64, tie_word_embeddings = false }}
stages = {stages}
[data]
max_text_mb = 1
sequence_length = 32
[batch]
microbatch_size = 1
target_tokens = {target_tokens}
[optimizer]
total_steps = 100000
[checkpoint]
every_steps = 80000
snapshot_every = 4
[limits]
founders_per_stage = {peers}
max_in_flight = {max_in_flight}
"""


@dataclass(frozen=True)
class Setting:
    """Of a swarm whose compute is emulated."""

    forward_s: float = FORWARD_S
    """What a forward pass takes a peer of power 1; a backward pass takes twice as long."""
    stages: int = 2
    powers: tuple[float, ...] = (1.0, 1.0, 1.0)
    """Of the peers of each stage."""
    microbatches: int = 24
    """Of a step: two seconds of three peers that need 0.24 s for each."""
    max_in_flight: int = 4

    @property
    def num_peers(self) -> int:
        return self.stages * len(self.powers)

    def manifest(self) -> str:
        return MANIFEST.format(
            layers=max(2, self.stages),
            stages=self.stages,
            target_tokens=32 * self.microbatches,
            peers=len(self.powers),
            max_in_flight=self.max_in_flight,
        )


class Process(Protocol):
    """Of a peer."""

    def send_signal(self, sig: int, /) -> None: ...

    def wait(self, timeout: float | None = None) -> int: ...


@dataclass(frozen=True)
class Forked:
    """A process that another one waits for."""

    pid: int

    def send_signal(self, sig: int, /) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, sig)

    def wait(self, timeout: float | None = None) -> int:
        give_up_at = time.monotonic() + (timeout or READY_S)
        while Path(f"/proc/{self.pid}").exists():
            if time.monotonic() > give_up_at:
                raise click.ClickException(f"process {self.pid} does not end")
            time.sleep(0.002)
        return 0


class Nursery:
    """Forks peers, all of which begin with everything imported."""

    def __init__(self, stack: ExitStack, log_path: Path) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = stack.enter_context(running([*PACED_PEER, "--nursery"], log_path, **pipes))
        stack.callback(self._close)

    def _close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)

    def fork(self, arguments: list[str], log_path: Path) -> Forked:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"arguments": arguments, "log": str(log_path)}) + "\n")
        self._process.stdin.flush()
        pid = self._process.stdout.readline()
        if not pid:
            raise click.ClickException("the process that forks peers ended; see its log")
        return Forked(int(pid))


@dataclass
class Life:
    """One peer: when it was a member, and of which stage."""

    stage: int
    power: float
    process: "Process"
    joined_at: float
    ended_at: float | None = None


@dataclass
class Swarm:
    """Host, peers, and who of them lives."""

    folder: Path
    stack: ExitStack
    setting: Setting
    lives: dict[str, Life] = field(default_factory=dict)
    """By peer id."""
    _nursery: "Nursery | None" = None
    _processes: dict[str, "Process"] = field(default_factory=dict)
    _powers: dict[str, float] = field(default_factory=dict)
    _read: int = 0

    def begin(self, *, forks: bool = False) -> None:
        """`forks`: peers begin with everything imported, so that their starts do not take a core's time from others."""
        if forks:
            self._nursery = Nursery(self.stack, self.folder / "nursery.log")
        manifest = self.folder / "run.toml"
        manifest.write_text(self.setting.manifest())
        swarm = str(Path(sys.executable).parent / "swarm")
        command = [swarm, "host", str(manifest), "--dir", str(self.folder / "host"), "--listen", "127.0.0.1:0"]
        command += ["--json", "--ends-with-run", "--evaluate-tokens", "1", "--report", str(self.folder / "report.json")]
        hosting = running(command, self.folder / "host.log", stdout=subprocess.PIPE)
        self.host = self.stack.enter_context(hosting)
        self.events = Events(self.host)
        listening = self.events.wait_for(lambda event: event["event"] == "listening", timeout_s=READY_S)
        self._address = listening["addresses"][0]
        stages = self.setting.stages
        for number in range(self.setting.num_peers):
            self.start(self.setting.powers[number // stages], "--stage", str(number % stages))
        began = self.events.wait_for(lambda event: event["event"] == "genesis", timeout_s=READY_S)
        for number, peer in enumerate(self._processes):
            self.lives[peer] = self._life(peer, number % stages, began["at"])

    def _life(self, peer: str, stage: int, joined_at: float) -> Life:
        return Life(stage, self._powers[peer], self._processes[peer], joined_at)

    def start(self, power: float, *options: str) -> None:
        """One more peer; which stage it goes to is its own affair if no option says so."""
        name = f"peer{len(self._processes)}"
        home, log = self.folder / name, self.folder / f"{name}.log"
        home.mkdir()
        peer = str(load_or_create_identity(home / "identity.key").peer_id)
        arguments = [str(self.setting.forward_s / power), self._address, "--yes"]
        arguments += ["--dir", str(home), "--listen", "127.0.0.1:0", *options]
        if self._nursery is not None:
            process: Process = self._nursery.fork(arguments, log)
        else:
            process = self.stack.enter_context(running([*PACED_PEER, *arguments], log))
        self._processes[peer], self._powers[peer] = process, power

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
                self.lives[peer] = self._life(peer, event["stage"], event["at"])
            elif event["event"] == "left" and peer in self.lives and self.lives[peer].ended_at is None:
                self.lives[peer].ended_at = event["at"]

    def kill(self, stage: int, rng: random.Random) -> Life:
        """A member of the stage dies without a word."""
        living = sorted(peer for peer, life in self.lives.items() if life.stage == stage and life.ended_at is None)
        if not living:
            raise click.ClickException(f"nobody of stage {stage} is left to be killed")
        life = self.lives[rng.choice(living)]
        life.process.send_signal(signal.SIGKILL)
        life.process.wait(5)
        life.ended_at = time.time()
        return life

    def end(self) -> dict[str, Any]:
        """The host's report."""
        self.host.send_signal(signal.SIGINT)
        self.host.wait(20)
        for process in self._processes.values():
            process.send_signal(signal.SIGKILL)
        report: dict[str, Any] = json.loads((self.folder / "report.json").read_text())
        return report


def versions_of(events: list[dict[str, Any]]) -> list[tuple[float, int]]:
    """When each version was there."""
    return [(event["at"], event["version"]) for event in events if event["event"] == "version"]


def story(
    swarm: Swarm,
    report: dict[str, Any],
    calm: tuple[float, float],
    churn: tuple[float, float],
    kills: list[float],
) -> Story:
    came_home = report["microbatches"]
    versions = [
        (at, len(came_home.get(str(version - 1), ()))) for at, version in versions_of(swarm.events.seen) if version > 0
    ]
    return Story(versions, list(swarm.lives.values()), kills, calm, churn)


def figures(setting: Setting, report: dict[str, Any], story: Story, num_started: int) -> Any:
    full, rate = story.rate_between(*story.calm), story.rate_between(*story.churn)
    live = story.mean_living(*story.churn)
    backs = story.backs_s()
    found = sorted(back for back in backs if back is not None)
    short = [step for step, ids in report["microbatches"].items() if len(ids) != setting.microbatches]
    return {
        "goals": {"of_undisturbed_per_live_peer": SHARE_GOAL, "back_after_s": BACK_GOAL_S},
        "undisturbed_microbatches_per_s": full,
        "microbatches_per_s": rate,
        "mean_live_peers": live,
        "of_undisturbed": rate / full,
        "of_undisturbed_per_live_peer": rate / live / (full / setting.num_peers),
        "kills": len(story.kills),
        "started": num_started,
        "back_after_s": {"median": statistics.median(found) if found else None, "worst": max(found, default=None)},
        "not_back": backs.count(None),
        "steps": report["steps"],
        "lost_rounds": report["steps"] - len(report["microbatches"]),
        "steps_short_of_microbatches": len(short),
        "microbatches_short": sum(setting.microbatches - len(report["microbatches"][step]) for step in short),
        "reassigned_microbatches": report["reassigned_microbatches"],
        "lost_microbatches": report["lost_microbatches"],
        "lost_contributions": report["lost_contributions"],
        "replicas_equal": all(len(set(digests.values())) == 1 for digests in report["state_digests"].values()),
        "replicas": {stage: len(digests) for stage, digests in report["state_digests"].items()},
        "load_average": os.getloadavg()[0],
    }


def measure(folder: Path, *, seed: int, calm_s: float, churn_s: float, every_s: float, forward_s: float) -> Any:
    rng, setting = random.Random(seed), Setting(forward_s=forward_s)
    with ExitStack() as stack:
        swarm = Swarm(folder, stack, setting)
        swarm.begin()
        swarm.events.wait_for(lambda event: event.get("version", 0) >= SETTLED_VERSION, timeout_s=READY_S)
        calm = (time.time(), time.time() + calm_s)
        swarm.follow(calm[1])
        churn = (time.time(), time.time() + churn_s)
        kills = []
        for number in range(int(churn_s // every_s)):
            killed = swarm.kill(number % setting.stages, rng)
            kills.append(time.time())
            swarm.start(killed.power)
            click.echo(f"kill {number + 1}: {churn[1] - time.time():.0f} s left", err=True)
            swarm.follow(churn[0] + (number + 1) * every_s)
        # The last to come have their snapshot too.
        with_all = versions_of(swarm.events.seen)[-1][1] + 8
        swarm.events.wait_for(lambda event: event.get("version", 0) >= with_all, timeout_s=READY_S)
        report = swarm.end()
    started = len(swarm.lives) - setting.num_peers
    return figures(setting, report, story(swarm, report, calm, churn, kills), started)


@click.command()
@click.option("--minutes", type=click.FloatRange(min=0.3), default=5.0, show_default=True, help="Of churn.")
@click.option("--calm-s", type=click.FloatRange(min=5), default=60.0, show_default=True, help="Undisturbed, before.")
@click.option(
    "--every", type=click.FloatRange(min=1), default=20.0, show_default=True, help="Seconds from kill to kill."
)
@click.option("--forward-s", type=click.FloatRange(min=0), default=FORWARD_S, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--keep", type=click.Path(path_type=Path), help="Leave logs in this new folder.")
@click.option("--smoke", is_flag=True, help="One kill: does it run?")
@click.option("--json", "as_json", is_flag=True)
def main(
    minutes: float,
    calm_s: float,
    every: float,
    forward_s: float,
    seed: int,
    keep: Path | None,
    smoke: bool,
    as_json: bool,
) -> None:
    """Throughput of a real swarm of which a peer dies and another comes every so often."""
    end_when_told()
    if smoke:
        minutes, calm_s, every = 0.3, 15.0, 18.0
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
