"""A real run put through faults drawn from a seed, which must come out with one history.

    python -m tests.chaos --seed 1 --minutes 2 [--json]

A host and six peers in two stages, `swarm host` and `swarm join` as anybody starts them. Processes are killed and
started again, or stand still; clocks go wrong by a minute; where root may, in network namespaces, lines are cut and
thinned (`tc`: delay, rate and loss at once), and disks of their own fill up. What cannot be done here is said and left
out of the schedule. When all is well again every peer must take part again within two minutes, the host must catch up
within two more, and then what is on disk must be one history: see `end_with_one_history`. The seed and the schedule are
printed when it is not.
"""

import contextlib
import dataclasses
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from benchmarks.homes import namespaces
from benchmarks.homes.namespaces import Namespaces
from tests.peer.owner import small_disks
from tests.peer.owner.small_disks import fill, small_disk
from tests.process_swarm import ProcessSwarm, Zygote
from tests.verification.histories import end_with_one_history, wait_until_it_votes, wait_until_recorded

PEERS = tuple(f"p{stage}{letter}" for stage in (0, 1) for letter in "abc")
MEMBERS = ("host", *PEERS)
NETWORK = "network"
KINDS = ("kill", "stop", "clock", "cut", "thin", "disk")
NEED_NAMESPACES, NEED_DISKS = frozenset({"cut", "thin"}), frozenset({"disk"})
LONGEST_PAUSE_S = 8.0
SHORTEST_S, LONGEST_S = 3.0, 25.0
RECOVERED_WITHIN_S = 120.0
THIN_MBIT, THIN_QUEUE_MS = 1.0, 200


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong, and when it is over."""

    at_s: float
    until_s: float
    kind: str
    who: tuple[str, ...]
    """Of a cut: one of the sides."""
    ahead_s: float = 0.0
    """Of a clock."""


def schedule(seed: int, *, seconds: float, kinds: Sequence[str]) -> tuple[Fault, ...]:
    """Faults that begin within the time, by their beginning. They overlap, but nobody has two of his own at once."""
    rng = random.Random(seed)
    faults: list[Fault] = []
    busy_until = dict.fromkeys((*MEMBERS, NETWORK), 0.0)
    at_s = rng.uniform(0.0, LONGEST_PAUSE_S)
    while at_s < seconds:
        kind, until_s = rng.choice(kinds), at_s + rng.uniform(SHORTEST_S, LONGEST_S)
        candidates = PEERS if kind in ("clock", "disk") else MEMBERS  # the host's clock is the swarm's
        count = rng.randint(1, len(MEMBERS) // 2) if kind == "cut" else 1
        who = tuple(sorted(rng.sample(candidates, count)))
        ahead_s = rng.choice([-60.0, 60.0]) if kind == "clock" else 0.0
        concerned = NETWORK if kind == "cut" else who[0]
        if busy_until[concerned] < at_s:
            busy_until[concerned] = until_s
            faults.append(Fault(round(at_s, 1), round(until_s, 1), kind, who, ahead_s))
        at_s += rng.uniform(0.0, LONGEST_PAUSE_S)
    return tuple(faults)


@dataclass
class Chaos:
    """A swarm, and what is done to it."""

    swarm: ProcessSwarm
    say: Callable[[str], None]
    ballast: dict[str, Path] = field(default_factory=dict)

    def begin(self, fault: Fault) -> None:
        self.say(f"{fault.at_s:6.1f} s {fault.kind} {' '.join(fault.who)} until {fault.until_s:.1f} s")
        swarm, network, name = self.swarm, self.swarm.network, fault.who[0]
        match fault.kind:
            case "kill":
                os.kill(self._pid(name), signal.SIGKILL)
                swarm.zygote.exit_code(self._pid(name), timeout_s=30)
            case "stop":
                os.kill(self._pid(name), signal.SIGSTOP)
            case "clock":
                swarm.set_clock(name, ahead_s=fault.ahead_s)
            case "cut":
                assert network is not None
                network.cut(fault.who, [member for member in MEMBERS if member not in fault.who])
            case "thin":
                assert network is not None
                network.thin(name, mbit=THIN_MBIT, queue_ms=THIN_QUEUE_MS)
            case "disk":
                self.ballast[name] = fill(swarm.root / name)

    def end(self, fault: Fault) -> None:
        swarm, network, name = self.swarm, self.swarm.network, fault.who[0]
        match fault.kind:
            case "kill" if name == "host":
                swarm.start_host()
                swarm.wait_for("listening", timeout_s=30)
            case "kill":
                swarm.start_peer(name, int(name[1]))
            case "stop":
                os.kill(self._pid(name), signal.SIGCONT)
            case "clock":
                swarm.set_clock(name, ahead_s=0.0)
            case "cut":
                assert network is not None
                network.heal()
            case "thin":
                assert network is not None
                network.widen(name)
            case "disk":
                self.ballast.pop(name).unlink()

    def run(self, faults: Sequence[Fault]) -> None:
        """Begin and end them all, each at its time."""
        ends = [(fault.until_s, number, self.end, fault) for number, fault in enumerate(faults)]
        begins = [(fault.at_s, number, self.begin, fault) for number, fault in enumerate(faults)]
        began = time.monotonic()
        for at_s, _, act, fault in sorted([*ends, *begins], key=lambda moment: moment[:2]):
            time.sleep(max(0.0, began + at_s - time.monotonic()))
            act(fault)

    def _pid(self, name: str) -> int:
        return self.swarm.host if name == "host" else self.swarm.peers[name]


@dataclass
class Outcome:
    """What came of a seed."""

    seed: int
    faults: tuple[Fault, ...]
    left_out: dict[str, str]
    """Kinds that cannot be done here, and why."""
    versions: int = 0
    recovered_s: float = 0.0
    """From the last fault's end until every peer took part again."""
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def endure(
    zygote: Zygote, root: Path, *, seed: int, seconds: float, say: Callable[[str], None] = lambda text: None
) -> Outcome:
    """A run in `root` under the seed's schedule. What it does not endure is in the outcome's `problem`."""
    left_out: dict[str, str] = {}
    for needing, reason in ((NEED_NAMESPACES, namespaces.why_not()), (NEED_DISKS, small_disks.why_not(root / "probe"))):
        left_out |= {kind: reason for kind in sorted(needing) if reason is not None}
    kinds = [kind for kind in KINDS if kind not in left_out]
    outcome = Outcome(seed, schedule(seed, seconds=seconds, kinds=kinds), left_out)
    with contextlib.ExitStack() as stack:
        if "disk" in kinds:
            for name in PEERS:
                stack.enter_context(small_disk(root / name))
        network = stack.enter_context(Namespaces(MEMBERS)) if "cut" in kinds else None
        swarm = ProcessSwarm(zygote, root, founders=3, steps=100_000, every=100_000, network=network)
        try:
            with swarm:
                _endure(swarm, outcome, say)
            left = zygote.leftovers()
            assert not left, f"left behind: {left}"
        except Exception as error:  # noqa: BLE001 - whatever it is, the seed belongs with it
            outcome.problem = f"{type(error).__name__}: {error}"
    return outcome


def _endure(swarm: ProcessSwarm, outcome: Outcome, say: Callable[[str], None]) -> None:
    for name in PEERS:
        swarm.set_clock(name, ahead_s=0.0)
    chaos = Chaos(swarm, say)
    swarm.start_host()
    swarm.start_founders()
    swarm.wait_for("version", version=5)
    chaos.run(outcome.faults)
    healed_at = time.monotonic()
    for name in PEERS:
        left_s = healed_at + RECOVERED_WITHIN_S - time.monotonic()
        wait_until_it_votes(swarm, name, timeout_s=max(1.0, left_s))
    outcome.recovered_s = round(time.monotonic() - healed_at, 1)
    say(f"all take part again {outcome.recovered_s:.1f} s after the last fault's end")
    before = len(swarm.events())
    swarm.wait_for_more("version", after=before, count=10, timeout_s=RECOVERED_WITHIN_S)
    wait_until_recorded(swarm, timeout_s=RECOVERED_WITHIN_S)
    end_with_one_history(swarm)
    outcome.versions = max(event["version"] for event in swarm.events() if event["event"] == "version")


@click.command()
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--minutes", type=click.FloatRange(0.1, 600.0), default=2.0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object at the end.")
def main(seed: int, minutes: float, as_json: bool) -> None:
    """Put a run through the faults of SEED."""
    say = (lambda text: None) if as_json else click.echo
    zygote = Zygote()
    try:
        with tempfile.TemporaryDirectory(prefix="hs-chaos-", ignore_cleanup_errors=True) as folder:
            outcome = endure(zygote, Path(folder), seed=seed, seconds=60.0 * minutes, say=say)
    finally:
        zygote.close()
    if as_json:
        click.echo(json.dumps(outcome.to_json()))
    else:
        for kind, reason in outcome.left_out.items():
            click.echo(f"left out: {kind}: {reason}")
        verdict = outcome.problem or f"one history of {outcome.versions} versions, nobody blamed, nothing left behind"
        click.echo(f"seed {seed}, {minutes:g} minutes, {len(outcome.faults)} faults: {verdict}")
    if outcome.problem:
        for fault in outcome.faults:
            click.echo(f"seed {seed}: {fault}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
