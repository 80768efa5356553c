"""Shares of a line, from made-up counts of bytes."""

import pytest

from benchmarks.homes.uplink_share import Window, uplink_share

TIMES = [0.1 * n for n in range(101)]


def counts_of(busy: list[tuple[float, float]], bytes_per_s: float) -> list[int]:
    """A line that is full between these times, and still otherwise."""
    return [round(sum(bytes_per_s * max(0.0, min(time, stop) - start) for start, stop in busy)) for time in TIMES]


def test_a_full_line_is_used_whole_and_votes_before_it_do_not_count_against_it() -> None:
    share = uplink_share(TIMES, counts_of([(2.0, 4.0)], 1000.0), [Window(1.0, 5.0)], bytes_per_s=1000.0)
    assert share.moving == pytest.approx(1.0, abs=0.06)
    assert share.rounds == pytest.approx(0.5, abs=0.03)
    assert share.moving_s == pytest.approx(2.0, abs=0.11)


def test_stalls_between_bytes_count() -> None:
    counts = counts_of([(1.0, 2.0), (3.0, 4.0)], 1000.0)
    share = uplink_share(TIMES, counts, [Window(0.5, 5.0)], bytes_per_s=1000.0)
    assert share.moving == pytest.approx(2 / 3, abs=0.03)


def test_time_between_rounds_counts_in_the_run_alone() -> None:
    counts = counts_of([(1.0, 2.0), (7.0, 8.0)], 1000.0)
    share = uplink_share(TIMES, counts, [Window(1.0, 2.0), Window(7.0, 8.0)], bytes_per_s=1000.0)
    assert share.rounds == pytest.approx(1.0, abs=0.11)
    assert share.run == pytest.approx(2 / 7, abs=0.03)


def test_rounds_without_bytes_have_no_share() -> None:
    with pytest.raises(ValueError, match="no bytes moved"):
        uplink_share(TIMES, [0] * len(TIMES), [Window(1.0, 2.0)], bytes_per_s=1000.0)
