"""What work is worth in votes: a third of them costs a third of the work, and idle identities have none."""

import random
from collections.abc import Mapping
from statistics import median

import pytest

from swarm.core.ids import PeerId
from swarm.core.round.voting import FEW_MEMBERS, electorate, quorum
from swarm.core.seats import LARGEST_SHARE, drawn, hangs_on_few, seats, spread, weight_of

HOST = PeerId("host")


def work_of(name: str, *tokens: int) -> dict[PeerId, int]:
    return {PeerId(f"{name} {number:03}"): done for number, done in enumerate(tokens)}


def share(weights: Mapping[PeerId, int], whose: Mapping[PeerId, int]) -> float:
    return weight_of(weights, whose) / sum(weights.values())


def capped_at_the_median(work: Mapping[PeerId, int]) -> dict[PeerId, int]:
    """The rule that was thought of first."""
    limit = int(median(sorted(done for done in work.values() if done)))
    return {peer: min(done, limit) for peer, done in work.items() if done}


@pytest.mark.parametrize("num_idle", [1, 9, 240])
def test_by_heads_idle_members_held_the_stage_and_by_work_they_have_no_vote(num_idle: int) -> None:
    honest, idle = work_of("honest", *[4096] * 8), work_of("idle", *[0] * num_idle)
    by_heads = dict.fromkeys(honest | idle, 1)
    assert (3 * weight_of(by_heads, idle) >= sum(by_heads.values())) == (num_idle >= 4)
    assert electorate(honest | idle, (), HOST, bytes(32)) == electorate(honest, (), HOST, bytes(32))


def test_a_cap_at_the_median_of_heads_is_for_sale() -> None:
    """Nine identities, a microbatch each, take more than half of a stage of eight. By the rule: a hundredth."""
    honest, crumbs = work_of("honest", *[100] * 8), work_of("crumb", *[1] * 9)
    assert share(capped_at_the_median(honest | crumbs), crumbs) > 1 / 2
    assert share(seats(honest | crumbs), crumbs) < 0.012


def test_a_third_of_the_votes_costs_a_third_of_the_work_however_it_is_split() -> None:
    """Whatever honest members have done, if none of them has done more than a third of it all."""
    rng = random.Random(4)
    for _ in range(2000):
        speeds = [rng.lognormvariate(0.0, 0.7) for _ in range(rng.randint(4, 64))]
        honest = work_of("honest", *(1 + int(1000 * speed) for speed in speeds))
        total = sum(honest.values())
        bought = rng.randint(1, total // 2)
        pieces = sorted(rng.sample(range(bought + 1), min(bought, rng.randint(1, 64))))
        liars = work_of("liar", *(end - start for start, end in zip([0, *pieces], [*pieces, bought], strict=True)))
        everyone = honest | liars
        if LARGEST_SHARE * max(everyone.values()) > sum(everyone.values()):
            continue
        assert share(seats(everyone), liars) == bought / (bought + total)
        if 3 * bought < bought + total:
            weights = electorate(everyone, (), HOST, bytes(32))
            assert 3 * weight_of(weights, liars) < sum(weights.values())
            assert weight_of(weights, weights.keys() - liars.keys()) >= quorum(sum(weights.values()))


def test_nobody_weighs_more_than_a_third_and_the_cut_is_the_least_that_does_it() -> None:
    rng = random.Random(5)
    for _ in range(2000):
        work = work_of("member", *(rng.randrange(1, 10 ** rng.randint(1, 6)) for _ in range(rng.randint(1, 12))))
        found = seats(work)
        assert found.keys() == work.keys()
        parts, limit, total = min(LARGEST_SHARE, len(work)), max(found.values()), sum(found.values())
        assert parts * limit <= total
        assert found == {peer: min(done, limit) for peer, done in work.items()}
        if limit < max(work.values()):
            assert parts * (limit + 1) > sum(min(done, limit + 1) for done in work.values())


def test_where_nobody_has_done_anything_all_are_equals_and_others_vote_too() -> None:
    nothing, beside = work_of("newcomer", 0, 0, 0, 0, 0), [PeerId("beside 0"), PeerId("beside 1")]
    assert seats(nothing) == dict.fromkeys(nothing, 1)
    assert electorate(nothing, beside, HOST, bytes(32)) == dict.fromkeys(sorted([*nothing, *beside, HOST]), 1)


@pytest.mark.parametrize(
    ("tokens", "hangs"),
    [((5, 5, 5, 5), False), ((5, 5, 5), True), ((5, 5, 5, 0), True), ((9, 9, 9, 1), False), ((90, 5, 5, 5, 5), True)],
)
def test_neighbours_vote_where_the_work_hangs_on_few(tokens: tuple[int, ...], hangs: bool) -> None:
    work, beside = work_of("member", *tokens), {PeerId(f"beside {number}") for number in range(6)}
    assert hangs_on_few(work, FEW_MEMBERS) == hangs
    weights = electorate({peer: 600 * done for peer, done in work.items()}, beside, HOST, bytes(32))
    assert (beside <= weights.keys()) == hangs
    of_members = [weights[peer] for peer in work if peer in weights]
    assert weights[HOST] == (max(of_members) if hangs else min(of_members))
    if hangs:
        assert weight_of(weights, beside) == 3 * weights[HOST]
        assert weight_of(weights, beside) < quorum(sum(weights.values())), "they decide nothing by themselves"


@pytest.mark.parametrize("num_members", range(4, 13))
def test_a_stage_of_equals_survives_as_many_deaths_as_by_heads(num_members: int) -> None:
    weights = electorate(work_of("member", *[4096 * 31] * num_members), (), HOST, bytes(32))
    by_heads = num_members + 1 - quorum(num_members + 1)
    dead = 0
    while weight_of(weights, [*weights][dead + 1 :]) >= quorum(sum(weights.values())):
        dead += 1
    assert dead == by_heads


def test_what_is_drawn_goes_by_weight_and_who_weighs_nothing_comes_last() -> None:
    weights = work_of("member", 3, 1, 0, 6)
    first = [drawn(weights, "test", number)[0] for number in range(2000)]
    counts = [first.count(peer) / 2000 for peer in weights]
    assert counts == pytest.approx([0.3, 0.1, 0.0, 0.6], abs=0.04)
    order = drawn(weights, "test", 7)
    assert sorted(order) == sorted(weights)
    assert order[-1] == PeerId("member 002")
    assert order == drawn(dict(reversed(weights.items())), "test", 7)


def test_seats_are_spread_within_one_of_each_members_share() -> None:
    rng = random.Random(6)
    for number in range(200):
        weights = work_of("member", *(rng.randrange(1, 1000) for _ in range(rng.randint(1, 200))))
        found = spread(weights, 127, "test", number)
        assert sum(found.values()) == 127
        exact = {peer: 127 * weight / sum(weights.values()) for peer, weight in weights.items()}
        assert all(abs(found.get(peer, 0) - exact[peer]) < 1 for peer in weights)
