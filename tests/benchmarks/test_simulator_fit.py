"""Holding the simulator against a real swarm: what both are measured by, and that a fit finds what it is to find.

The real side is `python -m benchmarks.fleet.fit`; here the simulator stands in for it.
"""

import random
from dataclasses import asdict, replace
from itertools import pairwise

import pytest

from benchmarks.churn.recovery import LATEST_PHASE, Story
from benchmarks.fleet.fit import CASES, CHURN_S, FITTED_ON, Fitted, figures, fit, phases, scenario, simulated
from peer.fleet.fleet import Stay, simulate
from peer.fleet.scenario import Scenario
from swarm.core.errors import SettingsError
from swarm.core.tables import read_table

CASE = CASES[FITTED_ON]


def test_swarm_is_back_when_a_step_goes_at_the_rate_that_the_living_allow() -> None:
    stays = [Stay(stage, 1.0, -9.0) for stage in (0, 0, 1, 1)]
    stays[3].ended_at = 10.5
    # A step of 4 takes 2 s with all; 4 s are what half the stage allows.
    versions = [(2.0 * number, 4) for number in range(6)] + [(15.0, 2), (19.5, 4), (24.0, 4)]
    told = Story(versions, stays, [10.5], (0.0, 10.0), (10.0, 30.0))
    assert told.rate_between(0.0, 10.0) == 2.0
    assert told.power(10.0) == 2.0
    assert told.power(11.0) == 1.0
    assert told.backs_s() == [4.5]
    assert told.mean_living(10.0, 11.0) == 3.5


def test_swarm_that_is_slow_up_to_the_next_kill_is_not_back_after_the_first() -> None:
    stays = [Stay(0, 1.0, -9.0)]
    versions = [(2.0 * number, 4) for number in range(6)] + [(20.0, 4), (30.0, 4), (32.0, 4)]
    assert Story(versions, stays, [11.0, 25.0], (0.0, 10.0), (10.0, 40.0)).backs_s() == [None, 5.0]


def test_kills_are_spread_over_a_step() -> None:
    found = sorted(phases(8, random.Random(0)))
    assert [int(8 * phase / LATEST_PHASE) for phase in found] == list(range(8))


def test_phase_of_a_kill_is_of_the_step_that_there_would_have_been() -> None:
    stays = [Stay(0, 1.0, -9.0), Stay(0, 1.0, -9.0, 9.0), Stay(0, 1.0, 20.0)]
    versions = [(0.0, 4), (2.0, 4), (4.0, 4), (6.0, 4), (8.0, 4), (12.0, 4), (16.0, 4), (20.0, 4), (22.0, 4), (24.0, 4)]
    told = Story(versions, stays, [9.0, 22.5], (0.0, 8.0), (8.0, 30.0))
    assert told.expected_step_s(16.0) == 4.0
    assert told.expected_step_s(20.0) == 2.0  # all are there again: as before the kill
    assert told.phases() == [0.5, 0.25]
    assert told.moment(19.0, 0.25) == 20.5
    assert told.killed() == [1.0, 1.0]


@pytest.mark.parametrize("name", CASES)
def test_killed_peers_are_replaced_and_their_work_is_granted_again(name: str) -> None:
    case = CASES[name]
    kills = [(number * case.every_s, 1.0) for number in range(case.num_kills)]
    outcome = simulate(scenario(case, Fitted(), 0, kills, until_s=CHURN_S))
    assert sum(stay.ended_at is not None for stay in outcome.stays) == case.num_kills
    living = [stay for stay in outcome.stays if stay.ended_at is None]
    assert len(living) in (5, 6)  # the last to come may be on its way
    came_home = [num for _, num in outcome.versions]
    assert max(came_home) == case.setting.microbatches
    # Only a step in which a source was killed may be short, of what the next stage had from that one already.
    assert sum(num < case.setting.microbatches for num in came_home) <= case.num_kills
    assert outcome.counts["stragglers"] == outcome.counts["steps_cut_short"] == 0


def test_stage_that_lost_a_sum_closes_when_the_next_step_begins() -> None:
    setting = replace(CASE.setting, microbatches=12)
    read = scenario(replace(CASE, setting=setting), Fitted(), 0, [(1.0, 1.0)], until_s=CHURN_S)
    crash = replace(read.events[0], stage=1)
    versions = simulate(replace(read, events=(crash,))).versions
    steps_s = [stop - start for (start, _), (stop, _) in pairwise(versions)]
    assert len(versions) > 20
    assert max(steps_s) < 3 * min(steps_s)


def test_what_is_begun_again_is_refused_where_the_next_stage_has_closed_the_step() -> None:
    quiet = simulate(scenario(CASE, Fitted(), 0, [], until_s=CHURN_S)).versions
    (before, _), (start, _) = next(pair for pair in pairwise(quiet) if pair[0][0] > 0)
    kill_at = start + 0.86 * (start - before)
    versions = simulate(scenario(CASE, Fitted(), 0, [(kill_at, 1.0)], until_s=CHURN_S)).versions
    came_at, num = next(version for version in versions if version[0] > kill_at)
    assert num < CASE.setting.microbatches
    assert came_at < kill_at + 1.0


def test_fit_finds_what_the_fitted_were_made_from() -> None:
    made_from = Fitted(hop_s=0.03, round_s=0.3, start_s=3.0, notice_s=0.6)
    case = replace(CASE, every_s=CHURN_S / 2)
    drawn = Story(
        [(at, 1) for at in (-2.0, 0.0, 60.0)], [Stay(0, 1.0, -9.0, 0.5)], [0.5, 61.5], (-9.0, 0.0), (0.0, CHURN_S)
    )
    stories = simulated(case, made_from, [drawn], num=1)
    assert stories[0].phases() == pytest.approx(drawn.phases(), abs=0.01)
    real, fitted = figures(stories), fit(stories, made_from.round_s, case, num=1)
    assert fitted.round_s == made_from.round_s
    assert fitted.hop_s == pytest.approx(made_from.hop_s, abs=0.003)
    found = figures(simulated(case, fitted, stories, num=1))
    assert found.per_s == pytest.approx(real.per_s, rel=0.05)
    assert found.joined_s == pytest.approx(real.joined_s, rel=0.1)


def test_powers_must_be_of_all_peers() -> None:
    read = scenario(CASE, Fitted(), 0, [], until_s=CHURN_S)
    value = asdict(replace(read, fleet=replace(read.fleet, powers=(1.0, 2.0))))
    with pytest.raises(SettingsError, match=r"fleet.powers has 2 powers for fleet.peers = 6"):
        read_table(Scenario, value)
