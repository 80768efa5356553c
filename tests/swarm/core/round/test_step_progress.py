"""Grants and the closing of a step, of windows too, under any order of reports, losses and changes of the leader."""

import random
from dataclasses import dataclass

import pytest

from swarm.core.ids import PeerId, Step
from swarm.core.pipeline.allowances import Allowances
from swarm.core.round.step_progress import MemberReport, StepProgress, WindowProgress

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
STEP_S, STRAGGLER_S = 120.0, 2.0


def _progress(target: int = 8, *, is_source: bool = True) -> StepProgress:
    return StepProgress(Step(3), is_source, target, STEP_S, STRAGGLER_S)


@dataclass
class Source:
    """A member of stage 0 with a few slots."""

    slots: int
    granted: int = 0
    in_flight: int = 0
    done: int = 0

    def report(self) -> MemberReport:
        return MemberReport(self.done, self.in_flight, num_wanted=self.slots - self.in_flight)


def test_grants_never_exceed_the_target_in_any_interleaving() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        target = rng.randint(1, 24)
        progress = _progress(target)
        members = {peer: Source(rng.randint(1, 6)) for peer in (A, B, C)[: rng.randint(1, 3)]}
        answers: list[tuple[PeerId, int]] = []
        for moment in range(400):
            peer = rng.choice(sorted(members))
            member = members[peer]
            action = rng.randrange(4)
            if action == 0:
                granted = progress.report(peer, member.report(), now=float(moment))
                assert granted >= member.in_flight + member.done
                if rng.random() < 0.8:  # else the answer is lost
                    answers.append((peer, granted))
            elif action == 1 and answers:
                to, granted = answers.pop(rng.randrange(len(answers)))  # answers may overtake one another
                members[to].granted = max(members[to].granted, granted)
            elif action == 2 and member.done + member.in_flight < member.granted and member.in_flight < member.slots:
                member.in_flight += 1
            elif action == 3 and member.in_flight:
                member.in_flight -= 1
                member.done += 1
            assert sum(m.done + m.in_flight for m in members.values()) <= target, f"seed {seed}"
        for moment in range(400, 460):  # now everyone works on: the step fills to the last microbatch
            for peer, member in members.items():
                member.granted = progress.report(peer, member.report(), now=float(moment))
                while member.in_flight < member.slots and member.done + member.in_flight < member.granted:
                    member.in_flight += 1
                member.done, member.in_flight = member.done + member.in_flight, 0
        assert sum(m.done for m in members.values()) == target, f"seed {seed}"
        assert progress.is_exhausted
        closing = progress.closing(now=0.0)
        assert closing is not None
        assert "all of" in closing.reason


@pytest.mark.parametrize(("done", "passed_on", "again"), [(0, 0, 5), (2, 0, 3), (2, 1, 2), (2, 3, 5), (0, 9, 5)])
def test_what_a_lost_source_had_not_passed_on_is_granted_again_unless_half_the_step_would_be_missing(
    done: int, passed_on: int, again: int
) -> None:
    progress = _progress(8)
    assert progress.report(A, MemberReport(0, 0, num_wanted=5), now=0.0) == 5
    assert progress.report(B, MemberReport(0, 0, num_wanted=5), now=0.0) == 3
    assert progress.report(C, MemberReport(0, 0, num_wanted=5), now=0.0) == 0
    progress.report(A, MemberReport(done, 5 - done, num_wanted=0, num_passed_on=passed_on), now=1.0)
    assert progress.is_exhausted
    progress.lost(A)
    assert progress.is_exhausted == (again == 0)
    assert progress.report(C, MemberReport(0, 0, num_wanted=9), now=2.0) == again
    assert progress.report(B, MemberReport(0, 3, num_wanted=9), now=2.0) == 3
    assert progress.is_exhausted
    progress.report(C, MemberReport(again, 0), now=3.0)
    assert progress.closing(now=3.0) is None
    progress.report(B, MemberReport(3, 0), now=3.0)
    closing = progress.closing(now=3.0)
    assert closing is not None
    assert closing.reason == f"all of {again + 3} microbatches are in"


def test_a_source_that_was_taken_for_lost_is_waited_for_again() -> None:
    progress = _progress(8)
    progress.report(A, MemberReport(1, 2, num_passed_on=2), now=0.0)
    progress.lost(A)
    assert progress.report(B, MemberReport(0, 0, num_wanted=9), now=0.0) == 5
    progress.report(B, MemberReport(5, 0), now=1.0)
    progress.report(A, MemberReport(1, 2, num_passed_on=2), now=1.0)
    assert progress.closing(now=1.0) is None
    progress.report(A, MemberReport(3, 0), now=2.0)
    assert progress.closing(now=2.0) is not None


@pytest.mark.parametrize("ended", [0, 3])
def test_who_does_not_end_what_it_was_granted_keeps_no_step_open(ended: int) -> None:
    progress = _progress(8)
    progress.reserve((A, B, C), now=0.0)
    held = MemberReport(ended, 4 - ended, num_passed_on=4 - ended)
    assert progress.report(A, MemberReport(0, 0, num_wanted=4), now=1.0) == 4
    assert progress.report(B, MemberReport(0, 0, num_wanted=4), now=1.0) == 4
    progress.report(A, held, now=1.5)
    assert progress.report(B, MemberReport(3, 1, num_wanted=3), now=2.0) == 4
    assert progress.report(B, MemberReport(3, 1, num_wanted=3), now=60.0) == 4, "B still has one to end"
    assert progress.report(B, MemberReport(4, 0, num_wanted=4), now=61.0) == 4
    assert progress.report(B, MemberReport(4, 0, num_wanted=4), now=61.0 + 4 * 60) == 4, "less than four times as long"
    assert progress.report(B, MemberReport(4, 0, num_wanted=4), now=61.0 + 4 * 61) == 8 - ended
    assert progress.report(A, held, now=306.0) == ended
    progress.report(B, MemberReport(8 - ended, 0), now=307.0)
    closing = progress.closing(now=307.0)
    assert closing is not None
    assert "all of 8" in closing.reason


def test_one_that_is_quick_takes_nothing_from_two_who_have_not_ended_any() -> None:
    progress = _progress(9)
    progress.reserve((A, B, C), now=0.0)
    for peer in (A, B, C):
        progress.report(peer, MemberReport(0, 0, num_wanted=3), now=0.0)
    progress.report(A, MemberReport(3, 0, num_wanted=3), now=0.1)
    assert progress.report(A, MemberReport(3, 0, num_wanted=3), now=50.0) == 3
    progress.report(B, MemberReport(3, 0), now=51.0)
    assert progress.report(A, MemberReport(3, 0, num_wanted=3), now=51.0 + 4 * 51) == 6


def test_what_comes_late_of_who_was_passed_over_counts() -> None:
    progress = _progress(8)
    progress.reserve((A, B), now=0.0)
    for peer in (A, B):
        progress.report(peer, MemberReport(0, 0, num_wanted=4), now=0.0)
    progress.report(A, MemberReport(0, 4), now=0.1)
    progress.report(B, MemberReport(4, 0, num_wanted=4), now=0.2)
    assert progress.report(B, MemberReport(4, 0, num_wanted=4), now=0.3 + STRAGGLER_S) == 8
    progress.report(A, MemberReport(4, 0, num_wanted=4), now=3.0)
    assert progress.num_done == 8
    assert progress.is_exhausted
    assert progress.report(A, MemberReport(4, 0, num_wanted=4), now=3.1) == 4, "it gets no more in this step"


def test_a_repeated_report_changes_nothing() -> None:
    progress = _progress(8)
    report = MemberReport(1, 2, num_wanted=2)
    first = progress.report(A, report, now=0.0)
    before = repr(progress)
    assert [progress.report(A, report, now=float(moment)) for moment in range(1, 6)] == [first] * 5
    assert repr(progress) == before


def test_a_pausing_members_unused_grants_go_to_others() -> None:
    progress = _progress(4)
    assert progress.report(A, MemberReport(0, 0, num_wanted=4), now=0.0) == 4
    assert progress.report(B, MemberReport(0, 0, num_wanted=4), now=0.0) == 0
    assert progress.report(A, MemberReport(1, 0, num_wanted=0), now=1.0) == 1
    assert progress.report(B, MemberReport(0, 0, num_wanted=4), now=1.0) == 3


def test_a_new_leader_grants_only_what_is_missing() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        peers = (A, B, C)
        members = {peer: Source(4, in_flight=rng.randint(0, 4), done=rng.randint(0, 3)) for peer in peers}
        started = sum(member.in_flight + member.done for member in members.values())
        target = started + rng.randint(0, 5)
        progress = _progress(target)
        progress.expect(peers, now=0.0)
        order = rng.sample(peers, 3)
        granted = {peer: progress.report(peer, members[peer].report(), now=0.1) for peer in [*order, *order]}
        assert sum(granted.values()) <= target
        assert all(granted[peer] >= members[peer].in_flight + members[peer].done for peer in peers)


def test_a_new_leader_does_not_wait_for_ever() -> None:
    progress = _progress(8)
    progress.expect((A, B), now=0.0)
    assert progress.report(A, MemberReport(0, 1, num_wanted=3), now=0.1) == 1
    assert progress.report(A, MemberReport(0, 1, num_wanted=3), now=STRAGGLER_S) == 4
    other = _progress(8)
    other.expect((A, B), now=0.0)
    other.lost(B)
    assert other.report(A, MemberReport(0, 0, num_wanted=3), now=0.1) == 3


def test_a_full_step_waits_for_stragglers_a_bounded_time() -> None:
    progress = _progress(4)
    progress.report(A, MemberReport(0, 0, num_wanted=2), now=0.0)
    progress.report(B, MemberReport(4, 1), now=5.0)  # as a leader after another would see it
    assert progress.closing(now=5.0) is None
    assert progress.next_deadline() == 5.0 + STRAGGLER_S
    closing = progress.closing(now=5.0 + STRAGGLER_S)
    assert closing is not None
    assert closing.reason == "3 stragglers are late by 2.0 s"


def test_a_step_that_is_full_no_more_forgets_its_stragglers() -> None:
    progress = _progress(4)
    progress.report(A, MemberReport(1, 0, num_wanted=1), now=0.0)
    progress.report(B, MemberReport(3, 0, num_wanted=1), now=0.0)
    progress.report(C, MemberReport(0, 1), now=0.0)
    progress.lost(B)
    progress.report(C, MemberReport(3, 0, num_wanted=1), now=50.0)
    progress.report(B, MemberReport(0, 1), now=50.0)
    assert progress.closing(now=50.5) is None
    assert progress.closing(now=50.0 + STRAGGLER_S) is not None


@pytest.mark.parametrize("is_source", [False, True])
def test_nothing_closes_without_microbatches_before_the_stage_beside_it_closes_the_step(is_source: bool) -> None:
    progress = _progress(is_source=is_source)
    for now in (0.0, 10.0, 1e6):
        assert progress.closing(now=now) is None
        progress.report(A, MemberReport(0, 1, num_wanted=1), now=now)
        assert progress.closing(now=now) is None
    if is_source:
        progress.report(A, MemberReport(0, 0, is_over=True), now=1e6)
    else:
        progress.closed_before(now=1e6 - STRAGGLER_S)
    closing = progress.closing(now=1e6)
    assert closing is not None
    assert "0 microbatches in" in closing.reason


def test_a_step_closes_with_what_it_holds_when_none_was_added_for_long() -> None:
    progress = _progress(is_source=False)
    assert progress.next_deadline() is None
    progress.report(A, MemberReport(2), now=0.0)
    progress.report(A, MemberReport(3), now=10.0)
    progress.report(A, MemberReport(3), now=20.0)
    assert progress.next_deadline() == 10.0 + STEP_S
    assert progress.closing(now=10.0 + STEP_S - 0.1) is None
    closing = progress.closing(now=10.0 + STEP_S)
    assert closing is not None
    assert closing.reason == "3 microbatches, and none for 120 s"


def test_a_step_that_the_stage_before_has_closed_waits_for_what_is_under_way() -> None:
    progress = _progress(is_source=False)
    progress.report(A, MemberReport(3), now=0.0)
    progress.closed_before(now=1.0)
    progress.report(B, MemberReport(2), now=2.0)
    progress.closed_before(now=2.5)
    assert progress.closing(now=2.5) is None
    assert progress.next_deadline() == 2.0 + STRAGGLER_S
    closing = progress.closing(now=2.0 + STRAGGLER_S)
    assert closing is not None
    assert "5 microbatches in" in closing.reason


def test_a_later_stage_takes_no_members_word_that_its_step_is_over() -> None:
    progress = _progress(is_source=False)
    progress.reserve((A, B), now=0.0)
    progress.report(B, MemberReport(0, is_over=True), now=0.1)
    progress.report(A, MemberReport(7), now=45.0)
    assert progress.closing(now=45.0 + STEP_S - 1) is None
    progress.report(A, MemberReport(8), now=50.0)
    closing = progress.closing(now=50.0)
    assert closing is not None
    assert "all of 8" in closing.reason


@pytest.mark.parametrize("says", [0, 5])
def test_work_that_is_not_believed_or_not_said_keeps_no_step_open_that_the_stage_before_has_closed(says: int) -> None:
    """Who brought nothing of late did half of the step's work: as much as it says is believed of it no more."""
    honest, liar = PeerId("honest"), PeerId("liar")
    progress = StepProgress(Step(3), False, 10, STEP_S, STRAGGLER_S, allowances=Allowances({honest: 17, liar: 1}, 2))
    progress.reserve((honest, liar), now=0.0)
    progress.report(honest, MemberReport(5), now=30.0)
    progress.report(liar, MemberReport(says), now=30.0)
    assert progress.num_done < 10
    assert progress.closing(now=31.0) is None
    progress.closed_before(now=31.0)
    assert progress.closing(now=31.0 + STRAGGLER_S) is not None, "it stood still for a step's time"


def test_sources_close_what_downstream_has_closed_for_all_of_them() -> None:
    progress = _progress()
    progress.report(A, MemberReport(2, 1, num_wanted=1), now=0.0)
    assert progress.report(B, MemberReport(1, 0, num_wanted=3, is_over=True), now=1.0) == 1
    assert progress.closing(now=1.0) is None
    assert progress.report(A, MemberReport(3, 0, num_wanted=2), now=1.5) == 5, "it tries"
    assert not progress.is_exhausted
    assert progress.closing(now=100.0) is None
    progress.report(A, MemberReport(3, 0, num_wanted=2, is_over=True), now=101.0)
    assert progress.is_exhausted
    assert progress.closing(now=101.0) is not None


@pytest.mark.parametrize("holds", [0, 3])
def test_one_source_that_says_the_step_is_over_ends_it_for_itself_alone(holds: int) -> None:
    progress = _progress()
    progress.reserve((A, B), now=0.0)
    assert progress.report(B, MemberReport(0, 0, num_wanted=4, is_over=True), now=0.0) == 0
    assert progress.report(A, MemberReport(0, 0, num_wanted=8), now=0.0) == 8
    progress.report(A, MemberReport(8 - holds, holds), now=1.0)
    closing = progress.closing(now=1.0)
    assert (closing is None) == bool(holds)
    assert closing is None or "all of 8" in closing.reason


def test_one_that_never_says_so_keeps_no_closed_step_open() -> None:
    progress = _progress()
    progress.reserve((A, B), now=0.0)
    progress.report(A, MemberReport(0, 0, num_wanted=4), now=0.0)
    progress.report(A, MemberReport(0, 4), now=0.0)
    progress.report(B, MemberReport(2, 0, num_wanted=2), now=1.0)
    progress.report(B, MemberReport(2, 0, num_wanted=2, is_over=True), now=1.0)
    progress.report(A, MemberReport(0, 4), now=2.0)
    assert progress.closing(now=2.0) is None
    progress.report(A, MemberReport(0, 4), now=1.0 + 4.0)
    closing = progress.closing(now=5.0)
    assert closing is not None
    assert "2 microbatches in" in closing.reason


def test_a_vanished_source_does_not_hold_the_step_open() -> None:
    progress = _progress(4)
    progress.report(A, MemberReport(0, 4), now=0.0)
    progress.lost(A)
    assert progress.report(B, MemberReport(0, 0, num_wanted=4), now=1.0) == 4
    progress.report(B, MemberReport(4, 0), now=2.0)
    assert progress.closing(now=2.0) is not None


def test_a_share_is_kept_for_a_member_that_has_not_reported_yet() -> None:
    progress = _progress(4)
    progress.reserve((A, B), now=0.0)
    assert progress.report(A, MemberReport(0, 0, num_wanted=4), now=0.01) == 2
    assert not progress.is_exhausted
    assert progress.report(B, MemberReport(0, 0, num_wanted=4), now=0.02) == 2
    assert progress.is_exhausted


def test_what_a_reporting_member_leaves_is_granted_to_others() -> None:
    progress = _progress(4)
    progress.reserve((A, B), now=0.0)
    assert progress.report(B, MemberReport(0, 0, num_wanted=1), now=0.01) == 1
    assert progress.report(A, MemberReport(0, 0, num_wanted=4), now=0.02) == 3


@pytest.mark.parametrize("lost", [False, True])
def test_a_share_is_not_kept_for_long_nor_for_the_dead(lost: bool) -> None:
    progress = _progress(4)
    progress.reserve((A, B), now=0.0)
    if lost:
        progress.lost(B)
    assert progress.report(A, MemberReport(0, 0, num_wanted=4), now=0.1 if lost else 0.6) == 4


def test_where_the_first_stage_is_the_last_all_that_a_lost_member_did_is_granted_again() -> None:
    progress = StepProgress(Step(3), True, 8, STEP_S, STRAGGLER_S, is_last=True)
    progress.report(A, MemberReport(0, 0, num_wanted=4), now=0.0)
    progress.report(A, MemberReport(3, 1, num_wanted=0), now=1.0)
    progress.lost(A)
    assert progress.report(B, MemberReport(0, 0, num_wanted=8), now=2.0) == 8


def test_nobody_is_granted_more_than_counts_of_it() -> None:
    progress = StepProgress(Step(3), True, 8, STEP_S, STRAGGLER_S, is_last=True, most_of={A: 3, B: 6}.__getitem__)
    assert progress.report(A, MemberReport(0, 0, num_wanted=8), now=0.0) == 3
    assert progress.report(B, MemberReport(0, 0, num_wanted=8), now=0.0) == 5
    assert progress.report(A, MemberReport(3, 0, num_wanted=8), now=0.0) == 3


EACH = 8


def _windows(*members: PeerId) -> WindowProgress:
    progress = WindowProgress(Step(3), EACH, STEP_S, STRAGGLER_S)
    progress.reserve(members, now=0.0)
    return progress


def _why(progress: WindowProgress, now: float) -> str:
    closing = progress.closing(now=now)
    return "" if closing is None else closing.reason


def test_everybody_may_do_its_window_and_the_round_closes_when_all_have() -> None:
    progress = _windows(A, B)
    assert progress.report(A, MemberReport(0, 1, num_wanted=3), now=1.0) == EACH
    progress.report(A, MemberReport(EACH), now=50.0)
    progress.report(B, MemberReport(EACH), now=50.5)
    assert "all of 2" in _why(progress, 50.5)


def test_who_is_slower_than_half_brings_what_it_has() -> None:
    progress = _windows(A, B, C)
    progress.report(A, MemberReport(EACH), now=50.0)
    progress.report(C, MemberReport(1), now=50.0)
    assert not _why(progress, 60.0)
    progress.report(B, MemberReport(EACH), now=60.0)
    assert not _why(progress, 60.0)
    assert progress.next_deadline() == 60.0 + STRAGGLER_S
    progress.report(C, MemberReport(2), now=61.0)
    assert "1 of 3 windows are cut short" in _why(progress, 60.0 + STRAGGLER_S)


def test_a_lost_member_is_not_waited_for_and_one_that_comes_back_is() -> None:
    progress = _windows(A, B, C)
    progress.report(A, MemberReport(EACH), now=50.0)
    progress.lost(B)
    progress.lost(C)
    assert "all of 1" in _why(progress, 50.0)
    progress.report(B, MemberReport(2), now=51.0)
    assert not _why(progress, 51.0)


def test_a_step_in_which_nothing_is_done_any_more_ends_with_what_there_is() -> None:
    progress = _windows(A, B, C)
    assert not _why(progress, 1000.0), "nobody has begun"
    for number in range(1, 5):
        progress.report(A, MemberReport(number, 1), now=100.0 * number)
        assert not _why(progress, 100.0 * number + 99.0)
    assert "0 of 3 windows are done, and nothing for 120 s" in _why(progress, 400.0 + STEP_S)
