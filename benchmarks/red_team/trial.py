"""One run with a mutating liar or two: a function of its seed, and what of it can be left out."""

import asyncio
import contextlib
import gc
import random
import resource
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.red_team.charges import Charging
from benchmarks.red_team.invariants import OPEN, Broken, broken
from benchmarks.red_team.mutant import MutantMaker, Mutation
from benchmarks.red_team.plan import Plan, Rule
from benchmarks.red_team.virtual_swarm import FORWARD, PeerMaker, Setting, VirtualPeer, VirtualSwarm
from swarm.core.ids import PeerId
from swarm.network.transport import Message

SETTINGS: Mapping[str, Setting] = {
    "one of 5, the first stage": Setting((5, 1), ((0, 1),)),
    "one of 5, the last stage": Setting((1, 5), ((1, 1),)),
    "two of 8, the first stage": Setting((8, 1), ((0, 1), (0, 4))),
    "two of 8, the last stage": Setting((1, 8), ((1, 1), (1, 4))),
}
HONEST_LOSS: Mapping[str, float] = {
    "one of 5, the first stage": 3.817,
    "one of 5, the last stage": 3.814,
    "two of 8, the first stage": 3.812,
    "two of 8, the last stage": 3.818,
}
"""Held-out loss of the same runs where nobody lies; `run_honestly` finds it."""
LIFE_S = 0.1
"""How often a liar thinks of what else it might do."""
MOST_AWAY_S = 4.0
COLLECTED_AFTER = 200_000
"""Objects more than there were, after which those that nothing holds are looked for: a run is over before it is worth
much, but for one with lists as long as they may be."""


@dataclass(frozen=True)
class Trial:
    """What came of one seed."""

    seed: int
    setting: str
    plan: Plan
    broken: tuple[Broken, ...]
    applied: Mapping[int, int] = field(default_factory=dict)
    """How often each rule was."""
    peak_mib: float = 0.0
    """Of the process, so far."""
    cpu_s: float = 0.0
    """Of the process, for this run."""

    @property
    def fails(self) -> tuple[Broken, ...]:
        """But for what is known to be open."""
        return tuple(one for one in self.broken if one.what not in OPEN)

    def __str__(self) -> str:
        rules = "; ".join(f"{rule} x{self.applied.get(rule.number, 0)}" for rule in self.plan.rules)
        return f"seed {self.seed}, {self.setting}: {' | '.join(map(str, self.broken)) or 'all held'}. Rules: {rules}"


class LyingSwarm(VirtualSwarm):
    """A virtual swarm whose liars also rejoin, and bring charges."""

    def __init__(self, setting: Setting, mutation: Mutation, *, rng: random.Random) -> None:
        super().__init__(setting, MutantMaker(mutation), rng=rng)
        self.mutation = mutation
        self._charging = Charging(mutation)

    def overhear(
        self, caller: PeerId, callee: PeerId, method: str, request: Message, answer: tuple[bytes, memoryview]
    ) -> None:
        super().overhear(caller, callee, method, request, answer)
        if method == FORWARD:
            self._charging.overheard(caller, callee, request, answer, list(self.mutation.liars))

    async def live(self, folder: Path) -> None:
        """What liars do beside talking, for ever."""
        done: set[tuple[int, PeerId, int]] = set()
        while True:
            await asyncio.sleep(LIFE_S)
            for liar in [peer for peer in self.peers if peer.is_liar]:
                step = self.mutation.step_of(liar.peer_id)
                for rule in self.mutation.plan.rules:
                    key = (rule.number, liar.peer_id, step)
                    if rule.where == "life" and rule.acts_at(step) and key not in done:
                        done.add(key)
                        await self._do(rule, liar, folder)
                if (-2, liar.peer_id, step) not in done and self._charging.has_odd:
                    done.add((-2, liar.peer_id, step))
                    await self._charging.bring(self, liar, self.rng)
                ended = liar.task.done() and not liar.killed
                if ended and step < self.setting.steps and (-1, liar.peer_id, 0) not in done:
                    done.add((-1, liar.peer_id, 0))
                    await self.rejoin(liar, folder, away_s=1.0)

    async def _do(self, rule: Rule, liar: VirtualPeer, folder: Path) -> None:
        rng = self.mutation.rng(rule)
        if rng.random() >= rule.share:
            return
        if rule.deed == "rejoin" and self.mutation.applied.get(rule.number, 0) < 2:
            self.mutation.did(rule)
            await self.rejoin(liar, folder, away_s=rng.random() * MOST_AWAY_S)
        elif rule.deed == "charge" and await self._charging.bring(self, liar, rng):
            self.mutation.did(rule)


def run_honestly(setting: Setting) -> VirtualSwarm:
    """The same where nobody lies."""
    swarm = VirtualSwarm(setting.honest(), PeerMaker(), rng=random.Random(0))
    swarm.go()
    return swarm


def run(seed: int, *, plan: Plan | None = None, setting: str = "") -> Trial:
    """The seed's run, or that of a plan that was made smaller, in the seed's setting."""
    setting = setting or random.Random(f"setting {seed}").choice(list(SETTINGS))
    plan = plan or Plan.of_seed(seed, made=MADE, methods=METHODS)
    began = time.process_time()
    with _collected():
        found, applied = _found(seed, plan, setting)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Trial(seed, setting, plan, found, applied, peak, time.process_time() - began)


def _found(seed: int, plan: Plan, setting: str) -> tuple[tuple[Broken, ...], dict[int, int]]:
    """What did not hold, and how often each rule was applied. Of the swarm nothing stays."""
    mutation = Mutation(plan)
    swarm = LyingSwarm(SETTINGS[setting], mutation, rng=random.Random(seed))
    with mutation.making():
        swarm.go()
    return tuple(broken(swarm, honest_loss=HONEST_LOSS[setting])), dict(mutation.applied)


@contextlib.contextmanager
def _collected() -> Iterator[None]:
    """What is made within is given back at the end, files that are mapped with it, and seldom before. What was there
    before is not gone through for it."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(COLLECTED_AFTER, 5, 10)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.collect()
        gc.unfreeze()


MADE = (
    "BirthRecord",
    "Certificate",
    "Contribution",
    "HopHeader",
    "Outcome",
    "Promise",
    "Proof",
    "Proposal",
    "Rate",
    "ReducedPart",
    "Reduction",
    "ReductionInput",
    "Result",
    "Roster",
    "StateStatement",
    "StepReport",
    "Vote",
    "Work",
)
METHODS = ("forward", "round", "witness", "results", "report", "result", "state", "admit", "genesis")


__all__ = ["SETTINGS", "LyingSwarm", "Trial", "run", "run_honestly"]
