"""Who does not show what was drawn shows it through the host, or owes it; and what a replay comes to."""

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from peer.audit.inquiry import OTHER_CLASSES, AuditCounters, Inquiry
from peer.pipeline.screens import KnownStanding
from swarm.core.audit.hash_chain import HashChain
from swarm.core.audit.honest_audits import MAX_CLASSES, Agreed, HonestAudits
from swarm.core.audit.ticket import Ticket
from swarm.core.canonical import Value
from swarm.core.errors import LocalError, RemoteError, TransientError
from swarm.core.ids import PeerId, StageIndex, Step
from swarm.core.settings import AuditSettings
from swarm.host_protocol import EXHIBIT, OWED
from swarm.identity.key import Identity
from swarm.network.transport import Message
from verification.audit.owed import OwedAudit
from verification.audit.tolerance import Bounds, compare

ME, TARGET, HOST = (Identity.from_seed(bytes([number]) * 32) for number in range(3))
CHAIN = HashChain(bytes(32), 8)
CHAIN_OF_STAGE = SimpleNamespace(stage=StageIndex(1))
TICKET = Ticket("run", ME.peer_id, StageIndex(1), CHAIN.end).signed_by(HOST)


@dataclass(frozen=True)
class Due:
    step: Step
    reveal: bytes


DUE = Due(Step(3), CHAIN.reveal(3))


NEVER = Message({"answer": "drips"})


@dataclass
class Line:
    """Answers in place of the target and of the host."""

    answers: dict[PeerId, Message | Exception]
    asked: list[tuple[PeerId, str, dict[str, Value]]] = field(default_factory=list)

    async def call(self, peer: PeerId, method: str, request: Message, **limits: Any) -> Message:
        self.asked.append((peer, method, cast(dict[str, Value], request.meta)))
        answer = self.answers[peer]
        if answer is NEVER:
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        return answer


@dataclass
class Stage:
    """Where the auditor's stage is; it stays there until `turn`."""

    context: Any
    chain: Any
    replica: Any
    era: int = 0
    version: int = int(DUE.step) + 2
    usual_s: float | None = 60.0
    turned_at: float = field(default_factory=time.monotonic)
    _turned: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def turn(self) -> None:
        async with self._turned:
            self.version += 1
            self._turned.notify_all()

    async def wait_for_version(self, version: int, *, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._turned:
                await self._turned.wait_for(lambda: self.version >= version)
        return self.version >= version


class Here:
    """A thread that is this one."""

    async def run(self, urgency: object, work: Any) -> Any:
        return work()


def inquiry_of(
    line: Line,
    *,
    accused: bool = False,
    tokens: Any = None,
    chain: Any = CHAIN_OF_STAGE,
    replica: Any = None,
    **others: Any,
) -> Inquiry:
    """`others`: of the stage's context."""
    context: dict[str, Any] = {
        "settings": SimpleNamespace(deadlines=SimpleNamespace(call_s=1.0, step_s=60.0), audits=AuditSettings()),
        "run_id": "run",
        "identity": ME,
        "me": ME.peer_id,
        "transport": line,
        "exact": Here(),
        "replays": Here(),
    }
    return Inquiry(
        steps=cast(Any, Stage(SimpleNamespace(**context | others), chain, replica)),
        ticket=TICKET,
        draws=CHAIN,
        accuser=cast(Any, SimpleNamespace(has_accused=lambda peer: accused)),
        host=HOST.peer_id,
        standing=KnownStanding(),
        jury=None,
        tokens=tokens,
    )


def read(reply: Message) -> bytes:
    if not reply.body:
        raise RemoteError("papers", "nothing in it", TARGET.peer_id)
    return bytes(reply.body)


def shown(inquiry: Inquiry) -> bytes:
    asked = inquiry.shown(
        *(DUE, TARGET.peer_id, EXHIBIT, {"microbatch_id": 7}, read), what="exhibit", number=7, max_body_bytes=8
    )
    return asyncio.run(cast(Any, asked))


def test_what_the_target_shows_is_asked_of_nobody_else() -> None:
    line = Line({TARGET.peer_id: Message({}, b"shown")})
    inquiry = inquiry_of(line)
    assert shown(inquiry) == b"shown"
    asked = {"step": 3, "ticket": TICKET.to_value(), "reveal": DUE.reveal, "microbatch_id": 7}
    assert line.asked == [(TARGET.peer_id, EXHIBIT, asked)]
    assert inquiry.counters.bytes == 5


@pytest.mark.parametrize("answer", [TransientError("not now"), RemoteError("draw", "no"), Message({}, b"")])
def test_what_the_target_does_not_show_comes_through_the_host(answer: Message | Exception) -> None:
    line = Line({TARGET.peer_id: answer, HOST.peer_id: Message({}, b"relayed")})
    assert shown(inquiry_of(line)) == b"relayed"
    peer, method, meta = line.asked[-1]
    owed = OwedAudit.from_value(meta["owed"])
    owed.check(run_id="run")
    assert (peer, method, owed.auditor, owed.target) == (HOST.peer_id, OWED, ME.peer_id, TARGET.peer_id)
    assert (owed.what, owed.number, owed.step, owed.reveal) == ("exhibit", 7, 3, DUE.reveal)
    assert owed.reason == (str(answer) if isinstance(answer, Exception) else "nothing in it")


def test_what_the_host_is_refused_too_is_owed() -> None:
    with pytest.raises(RemoteError, match="owes it"):
        shown(inquiry_of(Line({TARGET.peer_id: TransientError("no"), HOST.peer_id: RemoteError("debt", "owes it")})))


def owed_of(line: Line) -> list[PeerId]:
    """Whom the host was told of."""
    return [OwedAudit.from_value(meta["owed"]).target for _, method, meta in line.asked if method == OWED]


async def stage_at(inquiry: Inquiry, version: int) -> None:
    """The stage goes on, and whoever waits for it hears of that."""
    while inquiry.steps.version < version:
        await cast(Any, inquiry.steps).turn()
        await asyncio.sleep(0.01)


def asked_of(inquiry: Inquiry, number: int) -> Any:
    return asyncio.ensure_future(
        inquiry.shown(
            *(DUE, TARGET.peer_id, EXHIBIT, {"microbatch_id": number}, read),
            what="exhibit",
            number=number,
            max_body_bytes=8,
        )
    )


def test_who_lets_bytes_drip_is_left_for_the_host_before_the_last_version_and_not_asked_again() -> None:
    async def main() -> None:
        line = Line({TARGET.peer_id: NEVER, HOST.peer_id: Message({}, b"relayed")})
        inquiry = inquiry_of(line)
        asking, last = asked_of(inquiry, 7), int(DUE.step) + AuditSettings().retained_versions
        await stage_at(inquiry, last - 1)
        assert not asking.done()
        await stage_at(inquiry, last)
        assert await asking == b"relayed"
        assert await asked_of(inquiry, 8) == b"relayed"
        assert [peer for peer, method, _ in line.asked if method == EXHIBIT] == [TARGET.peer_id]
        assert owed_of(line) == [TARGET.peer_id] * 2

    asyncio.run(main())


@pytest.mark.parametrize(("usual_s", "already"), [(0.01, 0), (2.0, 2)])
def test_who_lets_bytes_drip_has_half_of_the_time_that_is_left(usual_s: float, already: int) -> None:
    async def main() -> None:
        line = Line({TARGET.peer_id: NEVER, HOST.peer_id: Message({}, b"relayed")})
        inquiry = inquiry_of(line)
        steps = cast(Any, inquiry.steps)
        steps.usual_s, steps.version = usual_s, steps.version + already
        async with asyncio.timeout(30.0):
            assert await asked_of(inquiry, 7) == b"relayed"

    asyncio.run(main())


@pytest.mark.parametrize("slow", [TARGET.peer_id, HOST.peer_id])
def test_an_audit_ends_when_nobody_need_hold_what_it_is_of(slow: PeerId) -> None:
    async def main() -> None:
        line = Line({TARGET.peer_id: TransientError("no"), HOST.peer_id: TransientError("no")} | {slow: NEVER})
        inquiry = inquiry_of(line)
        steps, last = cast(Any, inquiry.steps), int(DUE.step) + AuditSettings().retained_versions
        steps.version = last
        asking = asked_of(inquiry, 7)
        await asyncio.sleep(0.05)
        assert not asking.done()
        await stage_at(inquiry, last + 1)
        with pytest.raises(LocalError, match="need not hold it"):
            await asking

    asyncio.run(main())


def test_small_answers_have_the_time_of_a_call() -> None:
    async def main() -> None:
        inquiry = inquiry_of(Line({TARGET.peer_id: NEVER}))
        async with asyncio.timeout(30.0):
            with pytest.raises(TransientError, match="within 1"):
                await inquiry.ask(TARGET.peer_id, "audit_passed", DUE, {}, max_body_bytes=0)

    asyncio.run(main())


def test_honest_work_is_measured_and_what_is_short_of_fraud_raises_suspicion() -> None:
    inquiry = inquiry_of(Line({}))
    case = cast(Any, SimpleNamespace(accused=TARGET.peer_id, numeric_class="torch-2.13.0/cpu-avx2/fp32"))
    bounds = Bounds(floor=0.1, fraud=0.5)
    near = compare(np.float32([1.0, 1.0]), np.float32([1.0, 1.05]), bounds)
    asyncio.run(inquiry.conclude(Step(3), "contribution", near, case))
    assert inquiry.counters.largest_honest_share == pytest.approx(near.measured / 0.5)
    assert inquiry.counters.suspicious == 0
    (told,) = inquiry.counters.by_class.values()
    assert told == HonestAudits(numeric_class=case.numeric_class, contribution=Agreed(1, near.share))
    before = inquiry.rate(lambda num, budget, *, factor: factor, 3, TARGET.peer_id, 4)
    far = compare(np.float32([1.0, 1.0]), np.float32([1.0, 1.3]), bounds)
    asyncio.run(inquiry.conclude(Step(3), "contribution", far, case))
    assert (inquiry.counters.suspicious, inquiry.counters.frauds) == (1, 0)
    assert inquiry.rate(lambda num, budget, *, factor: factor, 3, TARGET.peer_id, 4) > before


def test_whatever_classes_are_named_no_more_are_told_of_than_a_report_holds() -> None:
    counters = AuditCounters()
    for number in range(100):
        counters.honest(f"class {number % 50}", "gradient", number / 1000)
    assert len(counters.by_class) == MAX_CLASSES
    assert sum(told.gradient.num_audits for told in counters.by_class.values()) == 100
    assert counters.by_class["class 3"].gradient == Agreed(2, 0.053)
    assert counters.by_class[OTHER_CLASSES].gradient.largest_share == counters.largest_honest_share == 0.099


def test_whoever_stands_accused_is_not_audited_on() -> None:
    inquiry_of(Line({})).check_not_accused(TARGET.peer_id)
    with pytest.raises(LocalError, match="stands accused"):
        inquiry_of(Line({}), accused=True).check_not_accused(TARGET.peer_id)
