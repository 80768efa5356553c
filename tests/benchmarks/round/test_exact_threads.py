"""A pair of runs counts where no thread waited for a core."""

import time
from collections.abc import Iterator

import pytest

from benchmarks.round import exact_threads
from benchmarks.round.exact_threads import TRIES, Pairs
from kernels.threads import Threads


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that are waited in each run to come; none past the last."""
    coming, total = list[float](), 0.0

    def marks() -> Iterator[float]:
        nonlocal total
        while True:
            yield total
            total += coming.pop(0) if coming else 0.0
            yield total

    found = marks()
    monkeypatch.setattr(exact_threads, "waited_s", lambda: next(found))
    return coming


def test_a_disturbed_pair_is_made_again_and_counted(waited: list[float]) -> None:
    waited += [0.0, 1.0, 1.0, 0.0]
    pairs, threads, counts = Pairs(), Threads(1), list[int]()

    def work() -> None:
        counts.append(threads.count)
        time.sleep(0.001)

    pairs.run(threads, 2, work, many_first=True)
    assert counts == [2, 1] * 3
    found = pairs.figures(8e6)
    assert (found["pairs"], found["disturbed_pairs"]) == (1, 2)
    assert found["ratio_lowest"] == found["ratio_median"] == found["ratio_best"] > 0
    assert found["one_thread_gb_per_s"] == pytest.approx(8 / found["one_thread_ms"])


def test_nothing_is_said_where_every_pair_was_disturbed(waited: list[float]) -> None:
    waited += [1.0] * 2 * TRIES
    pairs = Pairs()
    pairs.run(Threads(1), 2, lambda: None, many_first=False)
    assert pairs.figures(1.0) == {"pairs": 0, "disturbed_pairs": TRIES}
