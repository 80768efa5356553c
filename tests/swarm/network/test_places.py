"""Places are shared by holder: who holds the most gives one up first."""

import pytest

from swarm.network.places import Places, caller_of, network_of


def test_the_least_lately_used_of_who_holds_the_most_is_lost() -> None:
    places: Places[int] = Places(4)
    for key, who in ((1, "a"), (2, "b"), (3, "b"), (4, "b")):
        assert places.take(key, who) is None
    places.use(2)
    assert places.take(5, "c") == 3
    assert places.take(6, "c") == 4
    assert [key for key in range(1, 7) if key in places] == [1, 2, 5, 6]
    places.leave(6)
    assert places.take(7, "b") is None
    assert places.of("b") == [2, 7]


def test_who_holds_the_most_loses_to_itself() -> None:
    places: Places[int] = Places(2)
    places.take(1, "a")
    places.take(2, "b")
    assert places.take(3, "b") == 2
    assert places.take(4, "b") == 3
    assert len(places) == 2


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("192.0.2.1", "192.0.2.254", True),
        ("192.0.2.1", "192.0.3.1", False),
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:192.0.2.1", "::ffff:198.51.100.1", False),
        ("::ffff:192.0.2.1", "192.0.2.254", True),
        (None, "no address", True),
    ],
)
def test_a_small_network_is_taken_for_one(one: str | None, other: str | None, same: bool) -> None:
    assert (network_of(one) == network_of(other)) is same


def test_who_has_a_network_of_ipv6_is_one_caller_and_neighbours_of_ipv4_are_two() -> None:
    assert caller_of("2001:db8::1") == caller_of("2001:db8::2") != caller_of("2001:db8:0:1::1")
    assert caller_of("5.0.0.1") != caller_of("5.0.0.2")
    assert caller_of("::ffff:5.0.0.1") == caller_of("5.0.0.1")
    assert caller_of(None) == ""
