"""What is due: when it is audited, what stays here for it, and what becomes of what cannot be audited."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peer.audit.inquiry import Inquiry
from peer.audit.queue import AuditQueue
from swarm.core.errors import LocalError, RemoteError, TransientError
from swarm.core.ids import PeerId, Step

ME = PeerId("me")
RETAINED = 4


class Over(Exception):
    """The stage has come as far as the test goes."""


@dataclass
class Stage:
    """A stage that takes a step whenever somebody waits for one, up to `last`."""

    last: int
    version: int = 0
    me: PeerId = ME
    wanted: set[int] = field(default_factory=set)

    @property
    def settings(self) -> Any:
        audits, deadlines = SimpleNamespace(retained_versions=RETAINED), SimpleNamespace(step_s=1.0)
        return SimpleNamespace(audits=audits, deadlines=deadlines)

    @property
    def context(self) -> "Stage":
        return self

    @property
    def replica(self) -> Any:
        return SimpleNamespace(past=self)

    def want(self, versions: set[int], *, by: str) -> None:
        assert by == "all"
        self.wanted = versions

    async def wait_for_version(self, version: int, *, timeout_s: float) -> bool:
        if self.version < version and self.version == self.last:
            raise Over
        self.version += self.version < version
        return self.version >= version


@dataclass(frozen=True)
class Due:
    step: Step
    reveal: bytes


@dataclass
class All:
    """Every step is due, and its audit comes to what `outcomes` say."""

    stage: Stage
    outcomes: dict[int, Exception] = field(default_factory=dict)
    name: str = "all"
    most_due: int = 3
    made: list[tuple[int, int]] = field(default_factory=list)
    """Steps, and the versions at which they were audited."""

    def drawn(self, applied: Any, reveal: bytes) -> Iterable[Due]:
        yield Due(applied.result.roster.step, reveal)

    def computed_on(self, due: Due) -> Iterable[int]:
        return [int(due.step)]

    async def audit(self, due: Due) -> None:
        self.made.append((int(due.step), self.stage.version))
        assert due.reveal == bytes([due.step])
        if int(due.step) in self.outcomes:
            raise self.outcomes[int(due.step)]


def queue_of(audits: All) -> AuditQueue[Due]:
    inquiry = Inquiry(
        steps=cast(Any, audits.stage),
        ticket=cast(Any, None),
        draws=cast(Any, SimpleNamespace(reveal=lambda step: bytes([step]))),
        accuser=cast(Any, None),
        host=PeerId("host"),
        standing=cast(Any, None),
        jury=None,
        tokens=None,
    )
    return AuditQueue(inquiry, audits)


def over(step: int, *members: PeerId) -> Any:
    """The end of a step."""
    return SimpleNamespace(result=SimpleNamespace(roster=SimpleNamespace(step=Step(step), members=members)))


def run(queue: AuditQueue[Due], *ends: Any) -> None:
    async def main() -> None:
        for end in ends:
            queue.applied(end)
        await queue.run()

    with pytest.raises(Over):
        asyncio.run(main())


def test_a_draw_is_audited_two_versions_later_and_its_weights_stay_until_then() -> None:
    audits = All(Stage(last=3))
    queue = queue_of(audits)
    run(queue, over(0, ME), over(1, ME), over(2, ME))
    assert audits.made == [(0, 2), (1, 3)]
    assert audits.stage.wanted == {2}
    assert queue.counters.skipped == queue.counters.debts == 0


def test_who_was_no_member_draws_nothing() -> None:
    audits = All(Stage(last=3))
    run(queue_of(audits), over(0, PeerId("other")))
    assert audits.made == []


def test_what_nobody_shows_is_a_debt_and_what_cannot_be_made_here_is_left_out() -> None:
    outcomes = {0: TransientError("gone"), 1: RemoteError("debt", "owes it"), 2: LocalError("no weights")}
    audits = All(Stage(last=4), outcomes)
    queue = queue_of(audits)
    run(queue, over(0, ME), over(1, ME), over(2, ME))
    assert [step for step, _ in audits.made] == [0, 1, 2]
    assert (queue.counters.debts, queue.counters.skipped) == (2, 1)


def test_what_an_audit_breaks_on_costs_that_audit_alone() -> None:
    audits = All(Stage(last=3), {0: ValueError("array is too big")})
    queue = queue_of(audits)
    run(queue, over(0, ME), over(1, ME))
    assert [step for step, _ in audits.made] == [0, 1]
    assert (queue.counters.debts, queue.counters.skipped) == (0, 1)


def test_what_need_not_be_held_any_more_is_not_asked_for() -> None:
    audits = All(Stage(last=RETAINED + 1, version=RETAINED + 1))
    queue = queue_of(audits)
    run(queue, over(0, ME), over(1, ME))
    assert [step for step, _ in audits.made] == [1]
    assert queue.counters.skipped == 1


def test_of_too_many_the_oldest_go() -> None:
    audits = All(Stage(last=5))
    run(queue_of(audits), *(over(step, ME) for step in range(5)))
    assert [step for step, _ in audits.made] == [2, 3]
