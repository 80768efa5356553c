"""When the round of a step of windows closes, as its leader sees it."""

from swarm.core.ids import PeerId, Step
from swarm.core.round.step_progress import MemberReport
from swarm.core.round.window_progress import WindowProgress

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
EACH, STEP_S, STRAGGLER_S = 8, 120.0, 2.0


def _progress(*members: PeerId) -> WindowProgress:
    progress = WindowProgress(Step(3), EACH, STEP_S, STRAGGLER_S)
    progress.reserve(members, now=0.0)
    return progress


def _why(progress: WindowProgress, now: float) -> str:
    closing = progress.closing(now=now, synchronous=True)
    return "" if closing is None else closing.reason


def test_everybody_may_do_its_window_and_the_round_closes_when_all_have() -> None:
    progress = _progress(A, B)
    assert progress.report(A, MemberReport(0, 1, num_wanted=3), now=1.0) == EACH
    progress.report(A, MemberReport(EACH), now=50.0)
    progress.report(B, MemberReport(EACH), now=50.5)
    assert "all of 2" in _why(progress, 50.5)


def test_who_is_slower_than_half_brings_what_it_has() -> None:
    progress = _progress(A, B, C)
    progress.report(A, MemberReport(EACH), now=50.0)
    progress.report(C, MemberReport(1), now=50.0)
    assert not _why(progress, 60.0)
    progress.report(B, MemberReport(EACH), now=60.0)
    assert not _why(progress, 60.0)
    assert progress.next_deadline() == 60.0 + STRAGGLER_S
    progress.report(C, MemberReport(2), now=61.0)
    assert "1 of 3 windows are cut short" in _why(progress, 60.0 + STRAGGLER_S)


def test_a_lost_member_is_not_waited_for_and_one_that_comes_back_is() -> None:
    progress = _progress(A, B, C)
    progress.report(A, MemberReport(EACH), now=50.0)
    progress.lost(B)
    progress.lost(C)
    assert "all of 1" in _why(progress, 50.0)
    progress.report(B, MemberReport(2), now=51.0)
    assert not _why(progress, 51.0)


def test_a_step_in_which_nothing_is_done_any_more_ends_with_what_there_is() -> None:
    progress = _progress(A, B, C)
    assert not _why(progress, 1000.0), "nobody has begun"
    for number in range(1, 5):
        progress.report(A, MemberReport(number, 1), now=100.0 * number)
        assert not _why(progress, 100.0 * number + 99.0)
    assert "0 of 3 windows are done, and nothing for 120 s" in _why(progress, 400.0 + STEP_S)
