"""Who moves where: only what raises the throughput by more than chance, never below the minimum, the same for all."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.core.directory.rebalancing import Placement, RebalancingSettings, best_stage, plan_moves
from swarm.core.ids import PeerId, StageIndex

SETTINGS = RebalancingSettings()


def fleet(*counts: int, power: float = 1.0) -> list[Placement]:
    return [
        Placement(PeerId(f"s{stage}-{number:04d}"), StageIndex(stage), power)
        for stage, count in enumerate(counts)
        for number in range(count)
    ]


def moved(peers: list[Placement], plan_of: list[Placement] | None = None, **how: object) -> list[Placement]:
    """The peers after the moves planned for them, or planned as if they were `plan_of`."""
    num_stages = 1 + max(peer.stage for peer in peers)
    given: dict[str, object] = {"costs": [1.0] * num_stages, "move_s": [10.0] * num_stages, "settings": SETTINGS}
    moves = plan_moves(plan_of or peers, **{**given, **how})  # type: ignore[arg-type]
    to = {move.peer_id: move.target for move in moves}
    return [replace(peer, stage=to.get(peer.peer_id, peer.stage)) for peer in peers]


def at_rest(peers: list[Placement], **how: object) -> list[Placement]:
    """After as many plans as there are to make."""
    while (after := moved(peers, **how)) != peers:  # type: ignore[arg-type]
        peers = after
    return peers


def counts(peers: list[Placement], num_stages: int) -> list[int]:
    return [sum(peer.stage == stage for peer in peers) for stage in range(num_stages)]


def throughput(peers: list[Placement], costs: list[float]) -> float:
    return min(sum(p.power for p in peers if p.stage == stage) / cost for stage, cost in enumerate(costs))


@st.composite
def fleets(draw: st.DrawFn) -> tuple[list[Placement], list[float]]:
    num_stages = draw(st.integers(1, 6))
    costs = draw(st.lists(st.floats(0.5, 4), min_size=num_stages, max_size=num_stages))
    drawn = draw(
        st.lists(st.tuples(st.integers(0, num_stages - 1), st.floats(0.05, 20), st.booleans()), min_size=1, max_size=60)
    )
    return [Placement(PeerId(f"p{i}"), StageIndex(s), power, may) for i, (s, power, may) in enumerate(drawn)], costs


rules = st.builds(
    RebalancingSettings,
    min_replicas=st.integers(1, 4),
    hysteresis=st.floats(0, 0.3),
    power_noise=st.floats(0, 0.3),
    payback_s=st.floats(10, 1e5),
)


def test_five_and_one_become_three_and_three() -> None:
    assert counts(at_rest(fleet(5, 1)), 2) == [3, 3]


def test_stages_of_unequal_cost_get_unequal_numbers() -> None:
    assert counts(at_rest(fleet(6, 6), costs=[1.0, 2.0]), 2) == [4, 8]


def test_lost_stage_is_filled_from_the_others_at_once() -> None:
    assert counts(at_rest(fleet(40, 40, 1, 40)), 4) == pytest.approx([30, 30, 30, 31], abs=1)


def test_moves_that_would_pay_back_too_late_are_not_made() -> None:
    peers = fleet(5, 1)
    assert counts(at_rest(peers, move_s=[400.0] * 2), 2) == [3, 3]
    assert counts(at_rest(peers, move_s=[1200.0] * 2), 2)[1] == 2  # but for the second replica, whatever it costs
    patient = replace(SETTINGS, payback_s=10_000.0)
    assert counts(at_rest(peers, move_s=[1200.0] * 2, settings=patient), 2) == [3, 3]


def test_stage_gives_so_few_at_once_that_a_quorum_stays() -> None:
    for members in range(2, 70):
        given = len(plan_moves(fleet(members, 1), [1.0, 1.0], [0.0, 0.0], replace(SETTINGS, min_replicas=1)))
        voters = members + 1  # the host is one
        quorum = (voters + (voters - 1) // 3) // 2 + 1
        assert voters - given >= quorum


def test_whoever_may_not_move_stays() -> None:
    peers = [replace(peer, may_move=False) for peer in fleet(5, 1)]
    assert moved(peers) == peers


@settings(deadline=None, max_examples=60)
@given(fleets(), rules)
def test_no_stage_falls_below_its_minimum(
    drawn: tuple[list[Placement], list[float]], rules: RebalancingSettings
) -> None:
    peers, costs = drawn
    before = counts(peers, len(costs))
    after = counts(moved(peers, costs=costs, move_s=[5.0] * len(costs), settings=rules), len(costs))
    for one, other in zip(before, after, strict=True):
        assert other >= min(one, rules.min_replicas)


@settings(deadline=None, max_examples=60)
@given(fleets(), rules, st.floats(0, 500))
def test_throughput_is_never_lower_and_pays_within_the_time(
    drawn: tuple[list[Placement], list[float]], rules: RebalancingSettings, move_s: float
) -> None:
    peers, costs = drawn
    moves = plan_moves(peers, costs, [move_s] * len(costs), rules)
    to = {move.peer_id: move.target for move in moves}
    refills = [move for move in moves if "replicas" in move.reason]
    after = [replace(peer, stage=to.get(peer.peer_id, peer.stage)) for peer in peers]
    on_the_way = [peer for peer in peers if peer.peer_id not in to]
    start = throughput(peers, costs)
    if not refills and moves:
        end, meanwhile = throughput(after, costs), throughput(on_the_way, costs)
        assert meanwhile >= start * (1 - 1e-6)  # who leaves is missed by a stage that has more than enough
        assert end > start * (1 + rules.hysteresis)
        assert meanwhile * move_s + end * (rules.payback_s - move_s) >= start * rules.payback_s * (1 - 1e-6)


@settings(deadline=None, max_examples=60)
@given(fleets(), rules, st.randoms(use_true_random=False))
def test_all_who_decide_at_once_decide_the_same(
    drawn: tuple[list[Placement], list[float]], rules: RebalancingSettings, rng: random.Random
) -> None:
    peers, costs = drawn
    heard = list(peers)
    rng.shuffle(heard)
    plans = {plan_moves(order, costs, [5.0] * len(costs), rules) for order in (peers, heard, heard[::-1])}
    assert len(plans) == 1


@settings(deadline=None, max_examples=60)
@given(fleets(), rules)
def test_planning_again_changes_nothing(drawn: tuple[list[Placement], list[float]], rules: RebalancingSettings) -> None:
    peers, costs = drawn
    for _ in range(8):
        after = moved(peers, costs=costs, move_s=[1.0] * len(costs), settings=rules)
        if after == peers:
            return
        peers = after
    pytest.fail("the plan does not come to rest")


@pytest.mark.parametrize("sizes", [(3, 2), (3, 3), (5, 4, 4), (2, 2), (9, 8, 8, 8), (60, 56, 64)])
def test_noise_moves_nobody_back_and_forth(sizes: tuple[int, ...]) -> None:
    peers, rng, num_moves = fleet(*sizes), random.Random(7), 0
    for _ in range(300):
        heard = [replace(peer, power=peer.power * rng.gauss(1.0, SETTINGS.power_noise / 2)) for peer in peers]
        after = moved(peers, plan_of=heard)
        num_moves += sum(one.stage != other.stage for one, other in zip(peers, after, strict=True))
        peers = after
    assert num_moves == 0


def test_noise_does_not_keep_an_uneven_swarm_from_coming_to_rest() -> None:
    peers, rng, last_change = fleet(20, 5, 5), random.Random(3), -1
    for turn in range(200):
        heard = [replace(peer, power=peer.power * rng.gauss(1.0, SETTINGS.power_noise)) for peer in peers]
        after = moved(peers, plan_of=heard)
        if after != peers:
            last_change, peers = turn, after
    assert last_change <= 6
    assert sorted(counts(peers, 3)) == [10, 10, 10]


def test_joiners_go_where_they_help_most() -> None:
    assert best_stage([5, 3, 4], [5.0, 3.0, 4.0]).stage == 1
    assert best_stage([5, 3, 4], [5.0, 3.0, 4.0 / 3]).stage == 2
    assert best_stage([1, 9], [1.0, 0.5], min_replicas=2).stage == 0
    assert best_stage([0, 0], [0.0, 0.0]).stage == 0


@settings(deadline=None, max_examples=60)
@given(fleets(), st.floats(0.1, 5))
def test_no_other_stage_would_help_more(drawn: tuple[list[Placement], list[float]], power: float) -> None:
    peers, costs = drawn
    stages = range(len(costs))
    capacity = [sum(p.power for p in peers if p.stage == stage) / costs[stage] for stage in stages]
    chosen = best_stage(counts(peers, len(costs)), capacity).stage
    reached = [throughput([*peers, Placement(PeerId("new"), StageIndex(stage), power)], costs) for stage in stages]
    assert reached[chosen] >= max(reached) * (1 - 1e-9) or min(counts(peers, len(costs))) == 0


def test_crowd_of_joiners_who_count_each_other_spreads_evenly() -> None:
    num = [1, 1, 1]
    for _ in range(30):
        num[best_stage(num, [float(one) for one in num]).stage] += 1
    assert num == [11, 11, 11]
