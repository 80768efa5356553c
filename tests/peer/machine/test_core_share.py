"""A daemon's threads are shared out among its peers, and those that go leave theirs to the others."""

from peer.machine.core_share import DaemonThreads, shared_out


def test_each_has_as_many_as_the_others_and_one_at_least() -> None:
    assert shared_out(5, 2) == [3, 2]
    assert shared_out(1, 3) == [1, 1, 1]


def test_who_goes_leaves_its_threads_to_the_others() -> None:
    threads = DaemonThreads(5, 2)
    first, second = threads.of
    assert (first.number, first.exact.count, second.number) == (3, 3, 2)
    threads.without(first)
    assert (second.number, second.exact.count) == (5, 5)
    threads.without(second)
