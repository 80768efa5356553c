"""A daemon takes its share of the free cores: fewer threads at once, more only when they have long been free."""

import itertools

import pytest

from swarm.core.owner.core_share import MORE_AFTER_S, Cores, CoreShare, share_of


@pytest.mark.parametrize(
    ("cores", "most", "number"),
    [
        (Cores(usable=2), 2, 2),
        (Cores(usable=2), 1, 1),
        (Cores(usable=2, others_use=0.3), 2, 2),
        (Cores(usable=2, others_use=1.0), 2, 1),
        (Cores(usable=2, others_use=2.0), 2, 1),
        (Cores(usable=2, others_use=9.0), 2, 1),
        (Cores(usable=8, claimed=3), 8, 5),
        (Cores(usable=8, claimed=3, others_use=2.2, daemons=2), 8, 2),
        (Cores(usable=8, claimed=3, others_use=2.2, daemons=2, rank=1), 8, 1),
        (Cores(usable=2, daemons=3, rank=2), 2, 1),
    ],
)
def test_share_of_what_is_free(cores: Cores, most: int, number: int) -> None:
    assert share_of(cores, most).number == number


@pytest.mark.parametrize(("usable", "daemons"), [(2, 2), (8, 3), (16, 5), (7, 7)])
def test_daemons_together_take_all_cores_and_no_more(usable: int, daemons: int) -> None:
    shares = [share_of(Cores(usable=usable, daemons=daemons, rank=rank), usable).number for rank in range(daemons)]
    assert sum(shares) == usable
    assert max(shares) - min(shares) <= 1


def test_fewer_threads_are_taken_at_once_and_more_after_a_while() -> None:
    share = CoreShare(4)
    assert share.decide(Cores(usable=4), now=0.0).number == 4
    fewer = share.decide(Cores(usable=4, others_use=2.0), now=1.0)
    assert fewer.number == 2
    assert fewer.reason.startswith("2 of 4 cores are free: others use 2.0")
    assert share.decide(Cores(usable=4), now=2.0).number == 2
    assert share.decide(Cores(usable=4), now=1.9 + MORE_AFTER_S).number == 2
    assert share.decide(Cores(usable=4), now=2.0 + MORE_AFTER_S).number == 4


def test_a_load_that_comes_and_goes_changes_the_number_once() -> None:
    share = CoreShare(2)
    numbers = [
        share.decide(Cores(usable=2, others_use=second % 10 / 10), now=float(second)).number for second in range(200)
    ]
    assert sum(1 for before, after in itertools.pairwise(numbers) if before != after) == 1
    assert numbers[-1] == 1


def test_more_threads_are_as_many_as_were_free_all_the_while() -> None:
    share = CoreShare(8)
    share.decide(Cores(usable=8, others_use=7.0), now=0.0)
    share.decide(Cores(usable=8), now=1.0)
    share.decide(Cores(usable=8, others_use=5.0), now=2.0)
    assert share.decide(Cores(usable=8), now=1.0 + MORE_AFTER_S).number == 3
