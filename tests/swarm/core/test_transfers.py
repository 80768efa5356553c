"""Transfers live while they progress, and end in any case; nothing else bounds them."""

import pytest

from swarm.core.transfers import (
    ALIVE_SHARE,
    LEAST_BYTES_PER_S,
    LONGEST_WINDOWS,
    LOOKS,
    MOST_TIMES,
    SHARED_BY,
    WINDOW_S,
    Transfer,
    expected_s,
    longest_s,
    longest_way_s,
    shared_longest_s,
    straggler_s,
    work_s,
)


def drip(transfer: Transfer, rate: float, *, every_s: float, for_s: float) -> float:
    """Bytes come at `rate` for so long, or until it is given up; when that was."""
    now = transfer.began
    while now < transfer.began + for_s and transfer.came < transfer.num_bytes:
        if now + every_s > transfer.due:
            return transfer.due
        now += every_s
        transfer.progress(min(transfer.num_bytes, int((now - transfer.began) * rate)), now=now)
    return now


def test_time_is_in_proportion_to_bytes() -> None:
    assert expected_s(250_000_000, 2_500_000) == 100.0
    assert longest_s(250_000_000, 2_500_000, floor_s=10.0) == 10.0 + MOST_TIMES * 100.0
    assert shared_longest_s(125_000, floor_s=1.0) == 1.0 + MOST_TIMES * SHARED_BY
    assert straggler_s(0.25, 400.0) == 100.0
    assert work_s(1_000_000_000) == pytest.approx(MOST_TIMES * 32.0)


@pytest.mark.parametrize("rate", [LEAST_BYTES_PER_S * 20, LEAST_BYTES_PER_S, LEAST_BYTES_PER_S / SHARED_BY])
def test_what_keeps_coming_is_never_given_up(rate: float) -> None:
    transfer = Transfer(num_bytes=int(rate * 600), began=1000.0)
    assert drip(transfer, rate, every_s=0.1, for_s=700.0) == pytest.approx(1600.0, abs=1.0)
    assert transfer.came == transfer.num_bytes


def test_it_is_given_up_a_window_after_the_last_bytes() -> None:
    transfer = Transfer(num_bytes=100_000_000, began=0.0)
    drip(transfer, LEAST_BYTES_PER_S, every_s=0.5, for_s=60.0)
    before = transfer.due
    assert before == pytest.approx(60.0 + WINDOW_S, abs=0.6)
    transfer.progress(transfer.came + 1, now=60.5)
    assert transfer.due - before < 0.6  # one byte buys next to nothing


def test_what_began_on_an_idle_line_is_not_given_up_because_others_share_it_since() -> None:
    """Of 266 KB of a result that came at 40 KB/s, and then at 4 as others' did, all was thrown away at the end, nine
    times."""
    transfer = Transfer(num_bytes=266_000, began=0.0)
    drip(transfer, 40_000.0, every_s=0.25, for_s=5.0)
    now = 5.0
    while transfer.came < transfer.num_bytes:
        assert now + 1.5 < transfer.due
        now += 1.5
        transfer.progress(transfer.came + 6_000, now=now)


def test_a_slow_one_may_be_silent_for_longer() -> None:
    """By a connection of 8 KB/s a round trip takes seconds: what is lost there is sent again after twice as long."""
    silent_s = {}
    for rate in (100_000.0, 20_000.0, 8_000.0, 2_500.0):
        transfer = Transfer(num_bytes=10_000_000, began=0.0)
        now = drip(transfer, rate, every_s=0.5, for_s=30.0)
        silent_s[rate] = round(transfer.due - now, 1)
    assert silent_s[100_000.0] <= WINDOW_S < silent_s[20_000.0] < silent_s[8_000.0] <= LONGEST_WINDOWS * WINDOW_S
    assert silent_s[2_500.0] < silent_s[8_000.0], "of which less comes than must"


def test_a_line_that_was_slow_from_its_start_is_held_to_what_it_brought() -> None:
    slow = LEAST_BYTES_PER_S / 8
    transfer = Transfer(num_bytes=10_000_000, began=0.0)
    drip(transfer, slow, every_s=0.5, for_s=30.0)
    assert transfer.rate == pytest.approx(slow, rel=0.1)
    ends = drip(Transfer(num_bytes=10_000_000, began=0.0), slow * 0.9, every_s=0.5, for_s=1e6)
    assert ends == pytest.approx(10_000_000 / (slow * 0.9), rel=0.01)


def test_who_is_silent_after_the_first_bytes_is_given_up_as_soon_as_who_was_fast() -> None:
    transfer = Transfer(num_bytes=1_000_000, began=0.0)
    for now in (0.1, 1.0, 2.0, 3.0, 4.0):
        transfer.progress(4_000, now=now)
    assert transfer.due <= WINDOW_S + 0.1


def test_who_drips_is_cut_off_within_a_bound() -> None:
    transfer = Transfer(num_bytes=1_000_000, began=0.0)
    assert drip(transfer, 100.0, every_s=0.5, for_s=1e6) <= LONGEST_WINDOWS * WINDOW_S
    least = transfer.least * ALIVE_SHARE * 1.05  # just alive, for ever
    long = Transfer(num_bytes=1_000_000, began=0.0)
    ended = drip(long, least, every_s=0.1, for_s=1e6)
    assert ended <= longest_s(1_000_000, long.least, floor_s=long.floor_s) + 0.1


def test_a_call_is_not_given_up_before_its_own_floor() -> None:
    transfer = Transfer(num_bytes=1_000_000, began=0.0, floor_s=30.0)
    assert transfer.due == 30.0
    transfer.progress(10, now=29.0)
    assert transfer.due == pytest.approx(30.0, abs=WINDOW_S)


def test_looks_are_few_however_often_bytes_come() -> None:
    transfer = Transfer(num_bytes=1 << 40, began=0.0)
    for tick in range(100_000):
        transfer.progress(tick * 32_768, now=tick * 0.0005)
    assert len(transfer._looks) < LONGEST_WINDOWS * LOOKS + 10


def test_a_microbatch_has_longer_the_more_hops_are_before_it() -> None:
    ways = [longest_way_s(125_000.0, num_hops, floor_s=60.0, least_mbit=1.0) for num_hops in range(3)]
    assert ways == [60.0, 64.0, 68.0]
