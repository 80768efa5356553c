"""The mutating adversary finds holes that were closed, once the rule that closes each is taken out again."""

from dataclasses import replace

import pytest

from benchmarks.red_team.__main__ import FIRST, KitMaker
from benchmarks.red_team.__main__ import run as run_attack
from benchmarks.red_team.invariants import broken
from benchmarks.red_team.plan import Plan, Rule
from benchmarks.red_team.reversals import REVERSALS, unsworn_result, written_result
from benchmarks.red_team.trial import run
from swarm.attacks import Attack

FIRST_STAGE, LAST_STAGE = "one of 5, the first stage", "one of 5, the last stage"
TWO_LIARS, TWO_IN_THE_LAST = "two of 8, the first stage", "two of 8, the last stage"

SHRUNK: dict[str, tuple[int, str, Rule, str]] = {
    "framing": (432, FIRST_STAGE, Rule(0, "made", "HopHeader", "parents", "sibling", to_step=9), "stopped"),
    "claimed_ids": (299, LAST_STAGE, Rule(0, "made", "Contribution", "work", "inner", to_step=6), "claims"),
    "written_result": (5, TWO_IN_THE_LAST, Rule(0, "made", "Result", "parts", "inner", to_step=8), "written"),
    "long_contributions": (116, TWO_LIARS, Rule(0, "made", "Contribution", "work", "longest", to_step=3), "ended"),
}
"""Seed, setting, what is left of its plan when it is made smaller, and the invariant that breaks."""


@pytest.mark.parametrize(
    "name", ["framing", *(pytest.param(name, marks=pytest.mark.soak) for name in SHRUNK if name != "framing")]
)
def test_a_hole_that_is_open_again_is_found(name: str) -> None:
    seed, setting, rule, what = SHRUNK[name]
    with REVERSALS[name]():
        trial = run(seed, plan=Plan(seed, (rule,)), setting=setting)
    assert what in {one.what for one in trial.fails}, trial


@pytest.mark.soak
def test_a_written_result_is_seen_where_voters_look_at_digests_alone() -> None:
    setting, attack = replace(FIRST, steps=8), Attack("written_result", 1)
    with written_result():
        swarm = run_attack(setting, KitMaker(attack))
    assert "written" in {one.what for one in broken(swarm, honest_loss=3.9)}


STAGE_OF_TWO = replace(FIRST, peers=(2, 2), liars=((0, 1),), steps=6)
WRITTEN = Attack("written_result", 1)


@pytest.mark.soak
def test_in_a_stage_of_two_neighbours_and_host_certified_what_a_leader_wrote_when_they_saw_no_words() -> None:
    with unsworn_result():
        swarm = run_attack(STAGE_OF_TWO, KitMaker(WRITTEN))
    assert "written" in {one.what for one in broken(swarm, honest_loss=3.9)}


def test_in_a_stage_of_two_nothing_that_a_leader_wrote_is_certified() -> None:
    swarm = run_attack(STAGE_OF_TWO, KitMaker(WRITTEN))
    assert not broken(swarm, honest_loss=3.9)
