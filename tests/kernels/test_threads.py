"""Ranges cover everything once, whoever runs them; failures surface; forks and busy pools do not hang."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kernels.threads import SMALLEST_RANGE_VALUES, Threads


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("num_values", [0, 1, SMALLEST_RANGE_VALUES, 5 * SMALLEST_RANGE_VALUES + 77])
def test_ranges_cover_all_values_once_when_split(count: int, num_values: int) -> None:
    ranges = Threads(count).over(num_values, lambda start, stop: (start, stop), grain=384)
    assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges)][: len(ranges)]
    assert [stop for _, stop in ranges][-1:] == ([num_values] if num_values else [])
    assert all(start % 384 == 0 for start, _ in ranges)
    assert len(ranges) > 1 or count == 1 or num_values <= SMALLEST_RANGE_VALUES


def test_results_keep_the_order_of_items_when_threads_finish_in_another() -> None:
    last_is_done = threading.Event()

    def work(item: int) -> int:
        if item == 3:
            last_is_done.set()
        elif item == 0:
            assert last_is_done.wait(20), "one thread was to go on with the other items"
        return item * item

    assert Threads(2).map(work, range(4)) == [0, 1, 4, 9]


@pytest.mark.parametrize("error", [ValueError, IndexError, KeyboardInterrupt])
@pytest.mark.parametrize("bad", [0, 1, 7])
def test_an_exception_reaches_the_caller_when_any_item_fails(bad: int, error: type[BaseException]) -> None:
    def work(item: int) -> int:
        if item == bad:
            raise error(f"item {item}")
        return item

    threads = Threads(3)
    with pytest.raises(error, match=f"item {bad}"):
        threads.map(work, range(8))
    assert threads.map(str, [1, 2]) == ["1", "2"], "the pool goes on"


def test_more_threads_work_from_the_next_call_on_when_the_count_grows() -> None:
    threads = Threads(1)
    assert threads.map(str, [1, 2]) == ["1", "2"]
    for count in (2, 5, 3):
        threads.count = count
        meeting = threading.Barrier(count)
        assert len(threads.map(lambda _, meeting=meeting: meeting.wait(20), range(count))) == count


def test_callers_do_not_wait_for_each_other_when_the_pool_is_busy() -> None:
    threads = Threads(2)
    release = threading.Event()
    with ThreadPoolExecutor(1) as outside:
        slow = outside.submit(threads.map, lambda item: release.wait(20), range(2))
        assert threads.map(lambda item: item + 1, range(100)) == list(range(1, 101))
        assert not slow.done()
        release.set()
        assert slow.result(20) == [True, True]


def test_a_forked_child_starts_threads_of_its_own_when_the_pool_was_in_use() -> None:
    threads = Threads(2)
    assert threads.map(str, range(9)) == list("012345678")
    child = os.fork()
    if child == 0:  # pragma: no cover
        os._exit(0 if threads.map(str, range(9)) == list("012345678") else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
