"""Everybody of a run in one process leaves, dies and comes back as a seed has it; and the run goes on, one history.

    python -m tests.comings_and_goings --seed 7 [--seeds 20] [--windows]

Peers, whole stages, the host and all of them together, at any moment; each life is begun again from what is on disk,
as `swarm join` and `swarm host` do. In every schedule there is a time at which nobody of some stage is there. In the
end all are back, and nobody does anything more: a new version must come in time, all replicas must take part again and
hold the same bytes, and the ledger must tell of one run. The schedule is printed when it is not so.
"""

import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import click

from swarm.core.errors import TransientError
from tests.branches import Branches, breaches_on_disk, common_versions, data_order
from tests.swarm_in_process import InProcessSwarm, manifest_of, swarm_in_process

Kind = Literal["leave", "die", "return"]

STAGES = 2
LOCAL_STEPS = 6
"""Of a run of one stage in windows."""
HOST = "host"
LEASE_S = 1.0
GOES_ON_WITHIN_S = 60.0
"""From the return of the last to a new version that all replicas have made."""
LOOK_S = 0.1


@dataclass(frozen=True)
class Act:
    """Some go, or come back, so long after the act before."""

    pause_s: float
    kind: Kind
    who: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.pause_s:.2f} s later {self.kind}: {' '.join(self.who)}"


@dataclass(frozen=True)
class Schedule:
    """What happens to a run."""

    seed: int
    replicas: int
    acts: tuple[Act, ...]
    stages: int = STAGES

    @property
    def has_windows(self) -> bool:
        return self.stages == 1

    @property
    def min_replicas(self) -> int:
        return min(2, self.replicas)

    def __str__(self) -> str:
        of = "of whole models in windows" if self.has_windows else "a stage"
        return "\n".join([f"seed {self.seed}: {self.replicas} replicas {of}", *map(str, self.acts)])


def name_of(stage: int, index: int) -> str:
    """Of a peer."""
    return f"p{stage}{'abc'[index]}"


def schedule(seed: int, num_stages: int = STAGES) -> Schedule:
    """Who goes and comes back when. The last act brings everybody back; before it a whole stage was away.

    A run of one stage trains in windows of local steps.
    """
    rng = random.Random(f"{seed}/comings and goings")
    replicas = rng.choice([1, 2, 2, 3])
    stages = [[name_of(stage, index) for index in range(replicas)] for stage in range(num_stages)]
    everybody = [HOST, *(name for stage in stages for name in stage)]
    here, leaving = set(everybody), set[str]()
    acts: list[Act] = []

    def act(kind: Kind, who: Iterable[str]) -> None:
        nonlocal here, leaving
        if kind == "return":
            concerned = set(who) - here
            here, leaving = here | concerned, leaving - concerned
        elif kind == "leave":  # only peers do: a host that is stopped is to the others as one that has died
            concerned = set(who) & here - {HOST}
            here, leaving = here - concerned, leaving | concerned
        else:  # also who has not left quite yet
            concerned = set(who) & (here | leaving)
            here, leaving = here - concerned, leaving - concerned
        if concerned:
            pause_s = rng.choice([0.0, rng.uniform(0.0, 0.4), rng.uniform(0.4, 2.0 * LEASE_S)])
            acts.append(Act(round(pause_s, 2), kind, tuple(sorted(concerned))))

    def some() -> list[str]:
        groups = [*stages, everybody, [HOST], rng.sample(everybody, rng.randint(1, len(everybody)))]
        return rng.choice(groups)

    for _ in range(rng.randint(0, 2)):
        act(rng.choice(["leave", "die", "return"]), some())
    act(rng.choice(["leave", "die"]), rng.choice([*stages, everybody]))
    for _ in range(rng.randint(0, 2)):
        act(rng.choice(["leave", "die", "return"]), some())
    act("return", everybody)
    return Schedule(seed, replicas, tuple(acts), num_stages)


class Threads(ThreadPoolExecutor):
    """Those of all lives of the one process. A life that is over leaves nothing running, as where each is a process."""

    def __init__(self) -> None:
        super().__init__(thread_name_prefix="comings-and-goings")
        self._running: set[Future[Any]] = set()

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        future = super().submit(work, *arguments, **options)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    async def until_done(self) -> None:
        """Until all that runs by now has ended, however it does."""
        running = [asyncio.wrap_future(future) for future in list(self._running)]
        await asyncio.gather(*running, return_exceptions=True)


@dataclass
class ComingsAndGoings:
    """A run and its schedule."""

    plan: Schedule
    swarm: InProcessSwarm
    threads: Threads
    numbers: dict[str, int] = field(default_factory=dict)
    """By name, a peer's number in the swarm."""
    _leaving: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _host_is_here: bool = True

    async def run(self) -> Branches:
        """All of it. Raises AssertionError for what must not be."""
        await self._begin()
        tending = asyncio.ensure_future(self._tend())
        acting = asyncio.ensure_future(self._act())
        try:
            await asyncio.wait({tending, acting}, return_when=asyncio.FIRST_COMPLETED)
            if tending.done():
                tending.result()
            return acting.result()
        finally:
            for task in (tending, acting, *self._leaving.values()):
                task.cancel()
            await asyncio.gather(tending, acting, *self._leaving.values(), return_exceptions=True)

    async def _begin(self) -> None:
        for stage in range(self.plan.stages):
            for index in range(self.plan.replicas):
                self.numbers[name_of(stage, index)] = len(self.swarm.peers)
                await self.swarm.add_peer(stage)
        await self.swarm.until_version(2)

    async def _act(self) -> Branches:
        for act in self.plan.acts:
            await asyncio.sleep(act.pause_s)
            await self._do(act)
        await asyncio.gather(*self._leaving.values())
        return await self._check()

    async def _do(self, act: Act) -> None:
        if act.kind == "return":
            await asyncio.gather(*(self._leaving.pop(name) for name in act.who if name in self._leaving))
            ended = [self.swarm.peers[self.numbers[name]].task for name in act.who if name != HOST]
            if ended:
                await asyncio.wait(ended)
            await self.threads.until_done()
        if act.kind == "return" and HOST in act.who:
            await self.swarm.restart_host()
            self._host_is_here = True
        for name in act.who:
            if name == HOST:
                continue
            peer = self.swarm.peers[self.numbers[name]]
            if act.kind == "leave":
                self._leaving[name] = asyncio.ensure_future(self._leave(name))
            elif act.kind == "die":
                await self.swarm.kill(peer)
            else:
                await self.swarm.restart(self.swarm.peers[self.numbers[name]])
        if act.kind == "die" and HOST in act.who:
            self._host_is_here = False
            await self.swarm.kill_host()

    async def _leave(self, name: str) -> None:
        """As a daemon does: it does not mind, leaving, whom it cannot reach."""
        with contextlib.suppress(TransientError, asyncio.CancelledError):
            await self.swarm.leave(self.swarm.peers[self.numbers[name]])

    async def _tend(self) -> None:
        """What `Life` does: a session that breaks for want of others is begun again. Raises what breaks otherwise."""
        while True:
            await asyncio.sleep(LOOK_S)
            for peer in list(self.swarm.peers):
                if peer.killed or peer.stop.is_set() or not peer.task.done():
                    continue
                assert peer.task.exception() is not None, f"peer {self._name(peer.identity.peer_id)} left by itself"
                with contextlib.suppress(TransientError):
                    peer.task.result()
                peer.killed = True
                await self.threads.until_done()
                await self.swarm.restart(peer)
            if self._host_is_here and self.swarm.has_ended():
                raise AssertionError("the host has ended")

    def _name(self, peer_id: str) -> str:
        return next(name for name, number in self.numbers.items() if self.swarm.peers[number].peer_id == peer_id)

    async def _check(self) -> Branches:
        folder, began = self.swarm.folder, time.monotonic()
        ledger = self.swarm.run.folder.ledger
        before = Branches.read(ledger)
        stages = [
            [f"peer{self.numbers[name_of(stage, index)]}" for index in range(self.plan.replicas)]
            for stage in range(self.plan.stages)
        ]
        while True:
            found = Branches.read(ledger)
            floor = max(before.highest() + 1, found.starts[-1].version)
            common = common_versions(folder, stages, above=floor)
            if found.version() > floor and all(common):
                break
            now = f"{found.starts}, stages at {found.versions()}, all replicas of them at {common}"
            assert time.monotonic() - began < GOES_ON_WITHIN_S, (
                f"no new version of all: before {before.versions()}, {now}"
            )
            await asyncio.sleep(LOOK_S)
        for peer in self.swarm.peers:
            await self.swarm.kill(peer)
        await asyncio.wait([peer.task for peer in self.swarm.peers])
        found = Branches.read(ledger)
        names = [name for stage in stages for name in stage]
        breaches = found.breaches() + breaches_on_disk(folder, names, found, data_order(self.swarm.run.folder))
        assert not breaches, breaches
        said = {event["event"] for event in self.swarm.events}
        assert not {"banned", "quarantined"} & said
        return found


async def come_and_go(plan: Schedule, folder: Path) -> Branches:
    """What the run's ledger says at the end. Raises for whatever is not as it must be."""
    manifest = manifest_of(
        model={"stages": plan.stages},
        optimizer={"total_steps": 100_000},
        batch={"target_tokens": 64 * (1 if plan.has_windows else plan.replicas)},
        averaging={"local_steps": LOCAL_STEPS if plan.has_windows else 1},
        checkpoint={"every_steps": 12, "snapshot_every": 2},
        limits={"founders_per_stage": plan.replicas, "min_replicas": plan.min_replicas},
        deadlines={"lease_s": LEASE_S, "call_s": 2.0, "straggler_s": 0.2, "step_s": 5.0},
    )
    threads = Threads()
    asyncio.get_running_loop().set_default_executor(threads)
    async with swarm_in_process(manifest, folder, peers=(), seed=plan.seed, evaluate_tokens=64) as swarm:
        return await ComingsAndGoings(plan, swarm, threads).run()


def endure(seed: int, folder: Path, *, num_stages: int = STAGES) -> Branches:
    """The seed's run in `folder`. What it does not endure is raised, with the schedule."""
    plan = schedule(seed, num_stages)
    try:
        return asyncio.run(come_and_go(plan, folder))
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}\n{plan}") from error


@click.command()
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--seeds", type=click.IntRange(1), default=1, show_default=True, help="So many, from SEED on.")
@click.option("--windows", is_flag=True, help="Whole models on each peer, in windows of local steps.")
def main(seed: int, seeds: int, windows: bool) -> None:
    """Put runs through the comings and goings of SEED and those after it."""
    failed = []
    for number in range(seed, seed + seeds):
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="hs-comings-", ignore_cleanup_errors=True) as folder:
            try:
                found = endure(number, Path(folder), num_stages=1 if windows else STAGES)
                starts = ", ".join(f"{start.to} as {start.version}" for start in found.starts[1:])
                verdict = f"version {found.version()}, begun again from {starts or 'nowhere'}"
            except AssertionError as error:
                failed.append(number)
                verdict = str(error)
        click.echo(f"seed {number}, {time.monotonic() - began:.1f} s: {verdict}")
    if failed:
        click.echo(f"{len(failed)} of {seeds} seeds failed: {' '.join(map(str, failed))}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
