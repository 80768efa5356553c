"""Grants go by certified work: who ends nothing, or whose work does not count, costs a run less and less of it.

Steps of a stage 0 in virtual time: its leader's counts, its members' reports, and what results certify of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from swarm.core.ids import PeerId, Step
from swarm.core.pipeline.allowances import LONGEST_WAIT, Allowances
from swarm.core.round.step_progress import MemberReport, StepProgress
from swarm.core.state.recent_work import RecentWork, founded, worked

TOKENS = 512
"""Of a microbatch."""
STEP_S, STRAGGLER_S = 120.0, 2.0
TICK_S = 0.05
SLOTS = 8


@dataclass
class Source:
    """One that ends a microbatch every so many ticks, if it ends any, and whose work counts or does not."""

    ticks: int = 2
    ends: bool = True
    counts: bool = True
    boasts: bool = False
    """It says that it has done all, and more is under way."""
    away: range = range(0)
    """Steps in which its process is not there."""


@dataclass
class Run:
    seconds: list[float] = field(default_factory=list)
    """Of each step."""
    certified: list[dict[PeerId, int]] = field(default_factory=list)
    """Microbatches."""

    @property
    def num_certified(self) -> int:
        return sum(sum(of.values()) for of in self.certified)

    def of(self, peer: str) -> list[int]:
        return [of.get(PeerId(peer), 0) for of in self.certified]


def run(sources: Mapping[str, Source], *, target: int, steps: int, bounded: bool = True, late: str = "") -> Run:
    """Steps with these members, of which `late` comes with the tenth."""
    found = Run()
    everyone = {PeerId(name): source for name, source in sources.items()}
    founders = sorted(peer for peer in everyone if peer != late)
    recent = founded(founders, [16 * max(1, target // len(founders)) * TOKENS] * len(founders))
    for step in range(steps):
        members = sorted(peer for peer in everyone if peer != late or step >= 10)
        present = {peer: source for peer, source in everyone.items() if peer in members and step not in source.away}
        recent = worked(recent, {}, members)
        allowed = Allowances.of_work(recent, microbatches_per_step=target, microbatch_targets=TOKENS, of_sources=True)
        done, seconds = _step(present, target, allowed if bounded else None, first=step % len(present))
        found.seconds.append(seconds)
        counted = {peer: number for peer, number in done.items() if everyone[peer].counts and number}
        found.certified.append(counted)
        recent = worked(recent, {peer: number * TOKENS for peer, number in counted.items()}, members)
    return found


def _step(
    present: Mapping[PeerId, Source], target: int, allowances: Allowances | None, *, first: int
) -> tuple[dict[PeerId, int], float]:
    """What each ended, and how long the step took."""
    progress = StepProgress(Step(3), True, target, STEP_S, STRAGGLER_S, allowances=allowances)
    progress.reserve(present, now=0.0)
    order = [*present][first:] + [*present][:first]
    granted, done, busy = (dict.fromkeys(present, 0) for _ in range(3))
    tick = 0
    while (closing := progress.closing(now=tick * TICK_S)) is None:
        for peer in order:
            source, started = present[peer], granted[peer]
            held = min(SLOTS, started - done[peer])
            if source.ends and held > 0:
                busy[peer] += 1
                if busy[peer] >= source.ticks:
                    busy[peer], done[peer] = 0, done[peer] + 1
            held = min(SLOTS, granted[peer] - done[peer])
            said = MemberReport(done[peer], max(0, held), num_wanted=SLOTS - max(0, held))
            if source.boasts:
                said = MemberReport(target, target, num_wanted=SLOTS)
            granted[peer] = progress.report(peer, said, now=tick * TICK_S)
        tick += 1
    assert closing.reason
    return done, tick * TICK_S


HONEST = Source()
STEPS = 240


def _beside(liar: Source, **settings: bool) -> tuple[Run, Run]:
    """A run with one honest source and a liar, and one with two honest ones; 4 microbatches a step, as in the demo."""
    return (
        run({"honest": HONEST, "liar": liar}, target=4, steps=STEPS, **settings),
        run({"honest": HONEST, "other": HONEST}, target=4, steps=STEPS, **settings),
    )


def test_without_the_rule_half_of_the_tokens_go_with_one_whose_work_does_not_count() -> None:
    attacked, honest = _beside(Source(counts=False), bounded=False)
    assert honest.num_certified == 4 * STEPS
    assert attacked.num_certified == honest.num_certified / 2


def test_whose_work_does_not_count_costs_a_hundredth_of_the_tokens() -> None:
    attacked, honest = _beside(Source(counts=False))
    lost = 1 - attacked.num_certified / honest.num_certified
    assert 0 < lost < 0.015
    assert sum(sum(of.values()) < 4 for of in attacked.certified[64:]) <= 3, "and less and less"
    assert sum(attacked.seconds) < 2.1 * sum(honest.seconds), "one does the work of two"


def test_without_the_rule_each_step_waits_for_one_that_ends_nothing() -> None:
    attacked, _ = _beside(Source(ends=False), bounded=False)
    assert min(attacked.seconds) > STRAGGLER_S


def test_who_ends_nothing_is_waited_for_in_a_few_steps_only() -> None:
    attacked, honest = _beside(Source(ends=False))
    assert attacked.num_certified == honest.num_certified
    waits = [step for step, seconds in enumerate(attacked.seconds) if seconds > STRAGGLER_S]
    assert len(waits) <= 12
    assert len([step for step in waits if step >= 64]) <= 3
    alone = run({"honest": HONEST}, target=4, steps=STEPS)
    assert sum(attacked.seconds) < 1.3 * sum(alone.seconds), "0.4 s a step, 2 s a wait"


def test_long_steps_are_hardly_longer_for_one_that_ends_nothing() -> None:
    honest = Source(ticks=40)
    attacked = run({"honest": honest, "liar": Source(ends=False)}, target=4, steps=STEPS)
    alone = run({"honest": honest}, target=4, steps=STEPS)
    assert attacked.num_certified == alone.num_certified
    assert sum(attacked.seconds) < 1.05 * sum(alone.seconds)


def test_who_says_that_it_did_all_closes_few_steps_short() -> None:
    boaster = Source(ends=False, boasts=True)
    attacked, honest = _beside(boaster, bounded=False)
    assert attacked.num_certified <= honest.num_certified / 4
    attacked, honest = _beside(boaster)
    assert attacked.num_certified > 0.98 * honest.num_certified


def test_one_that_is_ten_times_slower_goes_on_getting_work() -> None:
    found = run({"quick": HONEST, "slow": Source(ticks=20)}, target=24, steps=60)
    assert found.num_certified == 24 * 60
    assert min(found.of("slow")) >= 1
    assert max(found.seconds) < 24 * 2 * TICK_S + 20 * TICK_S * SLOTS


@pytest.mark.parametrize("num_away", [1, 5, 40])
def test_who_was_killed_and_comes_back_has_its_share_again_before_as_long_has_passed(num_away: int) -> None:
    sources = {"honest": HONEST, "back": Source(away=range(20, 20 + num_away))}
    found = run(sources, target=8, steps=200)
    back = found.of("back")[20 + num_away :]
    assert next(steps for steps, number in enumerate(back) if number) <= max(1, num_away)
    assert next(steps for steps, number in enumerate(back) if number >= 3) <= max(2, num_away + 3)


def test_a_newcomer_has_its_share_after_few_steps() -> None:
    found = run({"a": HONEST, "b": HONEST, "new": HONEST}, target=48, steps=30, late="new")
    of_new = found.of("new")
    assert of_new[10] in (1, 2)
    assert of_new[15] >= 14


def test_those_who_are_left_when_most_go_share_the_whole_step() -> None:
    sources = {f"gone {number}": Source(away=range(20, 40)) for number in range(8)} | {"a": HONEST, "b": HONEST}
    found = run(sources, target=40, steps=40)
    assert {sum(of.values()) for of in found.certified} == {40}
    assert max(found.seconds) < 40 * 2 * TICK_S


def test_whom_no_work_of_small_steps_reached_by_chance_has_a_chance_again_soon() -> None:
    sources = {f"peer {number}": HONEST for number in range(12)}
    found = run(sources, target=4, steps=200)
    assert {sum(of.values()) for of in found.certified} == {4}
    for name in sources:
        assert sum(found.of(name)[100:]) >= 5


def test_what_is_lent_follows_from_the_versions_and_not_from_their_order_of_coming() -> None:
    def lent(*tokens: int, idle: int = 0, target: int = 64) -> int:
        recent = [RecentWork(PeerId("a"), tokens, idle), *founded([PeerId("b"), PeerId("c")], [1600 * TOKENS] * 2)]
        found = Allowances.of_work(recent, microbatches_per_step=target, microbatch_targets=TOKENS, of_sources=True)
        assert found.of(PeerId("unknown")) == found.newcomers
        return found.of(PeerId("a"))

    assert lent() == 2
    assert lent(5 * TOKENS) == 10
    assert lent(5 * TOKENS, 0, idle=1) == 5
    assert lent(5 * TOKENS, 1, 0, idle=1) == 2
    assert lent(100, 0, idle=1) == 1, "a microbatch with few targets is one"
    assert lent(8 * TOKENS, 0, 0, 0, 0, idle=4) == 1
    chances = [idle for idle in range(1, 200) if lent(*(0,) * 16, idle=idle)]
    assert chances == [1, 2, 4, 8, 16, 32, LONGEST_WAIT, 2 * LONGEST_WAIT, 3 * LONGEST_WAIT]


def test_at_later_stages_a_word_counts_for_as_much_as_its_speaker_may_have_done() -> None:
    honest, liar = PeerId("honest"), PeerId("liar")
    recent = founded([honest, liar], [16 * 2 * TOKENS] * 2)
    closed: dict[bool, list[int]] = {}
    for bounded in (False, True):
        closed[bounded], known = [], recent
        for step in range(40):
            lent = Allowances.of_work(known, microbatches_per_step=4, microbatch_targets=TOKENS, of_sources=False)
            progress = StepProgress(Step(step), False, 4, STEP_S, STRAGGLER_S, allowances=lent if bounded else None)
            progress.reserve([honest, liar], now=0.0)
            progress.report(liar, MemberReport(4), now=0.0)
            done = 0
            while progress.closing(now=0.1 * done) is None:
                done += 1
                progress.report(honest, MemberReport(done), now=0.1 * done)
            closed[bounded].append(done)
            known = worked(known, {honest: done * TOKENS}, [honest, liar])
    assert sum(closed[False]) == 0
    assert sum(closed[True]) >= 0.9 * 4 * 40, closed[True]
    assert closed[True][-7:] == [4] * 7
