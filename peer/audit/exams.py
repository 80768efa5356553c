"""Newcomers' exams: a member shows what went into its work, the newcomer what came out of it.

The newcomer answers before it sees what the member has; who is examined by whom in a version is drawn
(`verification.audit.probation`). In a run of one stage, where nothing is sent on, the member computes what it compares
with itself (`verification.replay.exam_answer`).
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from peer.pipeline.compute import Urgency
from peer.pipeline.exchange_store import ExchangeStore
from peer.round.stage_steps import StageSteps
from peer.stage.bases import RecentBases
from peer.stage.beacon import StageBeacon
from peer.stage.events import Applied
from peer.state.past_weights import PastVersion, standing_on
from swarm.core.audit.chance import HostWord
from swarm.core.audit.ticket import Ticket
from swarm.core.canonical import Value
from swarm.core.errors import LocalError, RemoteError, TransientError
from swarm.core.fields import Fields, integer_item
from swarm.core.ids import PeerId, Step
from swarm.core.round.contribution import Roster, Work
from swarm.host_protocol import AGREED, max_exhibit_bytes
from swarm.identity.key import verify
from swarm.network.transport import Message, Transport
from verification.audit.probation import NUM_PIECES, PIECE_VALUES, Agreement, Exam, exam_of, exam_pieces
from verification.audit.verdicts import Promotion
from verification.replay.exam_answer import Pieces, compared_answers, exam_answer, sends_nothing
from verification.replay.stage_replay import StageReplay
from verification.round.papers import Bytes, Exhibit, Papers

log = logging.getLogger(__name__)

EXAM = "exam"
"""To a member: {step, ticket, said} -> {papers, sizes}, bodies: a drawn exhibit without y and the gradient of x."""
EXAM_ANSWER = "exam_answer"
"""To the same: {step, size}, bodies: y and the gradient of x, replayed, or pieces of the gradient -> {agreement}.
Once."""
EXAMS_A_STEP = 2
"""Newcomers that one member examines about one of its contributions: whoever comes first."""
NEAR_ENOUGH = 6.0
"""Fraud bounds within which a newcomer's work is its examiner's: nobody is convicted by an exam, nobody measures what
rounding does to the work, and who did not do it is further off."""
MOST_TIMES = 2
"""An exhibit is shown, for lines break."""


class Examiner:
    """Examines newcomers about this member's own work."""

    def __init__(self, steps: StageSteps, exchanges: ExchangeStore, bases: RecentBases, beacon: StageBeacon) -> None:
        self._steps = steps
        self._beacon = beacon
        self._exchanges = exchanges
        self._bases = bases
        self._shown: dict[Step, Counter[PeerId]] = {}
        self._answered: set[tuple[Step, PeerId]] = set()
        self._drawn: dict[tuple[Step, PeerId], tuple[Work, tuple[slice, ...]]] = {}
        """What a newcomer is to replay, and where in the gradient its answer lies."""
        is_alone = steps.replica.model.is_first and steps.replica.model.is_last
        self._replay = (
            StageReplay(steps.context.settings, steps.chain.stage, model=steps.replica.model_of_replays())
            if is_alone
            else None
        )
        """Where nothing is sent on."""

    def serve(self, transport: Transport) -> None:
        """Begin to answer."""
        settings = self._steps.context.settings
        transport.serve(EXAM, self._on_exam, max_body_bytes=0)
        largest = max_exhibit_bytes(settings, self._steps.replica.model.hidden_size)
        pieces = 4 * NUM_PIECES * PIECE_VALUES
        transport.serve(EXAM_ANSWER, self._on_answer, max_body_bytes=pieces if self._replay else largest)

    def applied(self, applied: Applied) -> None:
        """A step is over: what is too old is forgotten."""
        if self._replay is not None:
            step = int(applied.result.roster.step)
            self._steps.replica.past.want(range(step - 2, step + 1), by="examiner")
        oldest = int(applied.chain.version) - 1 - self._steps.context.settings.audits.retained_versions
        self._shown = {step: shown for step, shown in self._shown.items() if int(step) >= oldest}
        self._answered = {one for one in self._answered if int(one[0]) >= oldest}
        self._drawn = {one: drawn for one, drawn in self._drawn.items() if int(one[0]) >= oldest}

    async def _on_exam(self, sender: PeerId, request: Message) -> Message:
        steps, fields = self._steps, Fields("exam request", request.meta)
        step, ticket = Step(fields.integer("step")), Ticket.from_value(fields.message("ticket"))
        said = HostWord.from_value(fields.message("said"))
        fields.done()
        held = steps.context.results.get(int(step))
        if held is None:
            raise TransientError(f"the result of step {step} is not here")
        shown = self._shown.setdefault(step, Counter())
        if sender not in shown and len(shown) >= EXAMS_A_STEP:
            raise TransientError(f"{EXAMS_A_STEP} newcomers are examined about step {step} here")
        if shown[sender] >= MOST_TIMES:
            raise RemoteError("served", f"the exam of step {step} went to {sender} {MOST_TIMES} times", sender)
        ticket.check(
            run_id=steps.context.run_id,
            run_key=steps.chain.run_key,
            amendments=steps.chain.amendments,
            verify=verify,
        )
        if (ticket.peer_id, ticket.stage) != (sender, steps.chain.stage):
            raise RemoteError("ticket", f"a ticket of {ticket.peer_id} for stage {ticket.stage}", sender)
        self._beacon.hear(said)
        roster = held[0].roster
        exam = exam_of(roster, self._bases.at(int(step)), self._beacon.of(roster), sender)
        if exam is None or exam.examiner != steps.context.me:
            raise RemoteError("draw", f"{steps.context.me} does not examine {sender} about step {step}", sender)
        exhibit = self._exchanges.exhibit(step, exam.work)
        if exhibit is None:
            raise TransientError(f"microbatch {exam.work.microbatch_id} of step {step} is not here any more")
        shown[sender] += 1
        num_values = steps.replica.layout.num_values
        self._drawn[step, sender] = exam.work, exam_pieces(self._beacon.of(roster), sender, num_values=num_values)
        bodies = (exhibit.x, exhibit.targets, exhibit.grad_y)
        sizes: list[Value] = [len(body) for body in bodies]
        return Message({"papers": exhibit.papers.to_value(), "sizes": sizes}, b"".join(bodies))

    async def _on_answer(self, sender: PeerId, request: Message) -> Message:
        steps, fields = self._steps, Fields("exam answer", request.meta)
        step, size = Step(fields.integer("step")), fields.integer("size")
        fields.done()
        drawn = self._drawn.get((step, sender))
        exhibit = self._exchanges.exhibit(step, drawn[0]) if drawn is not None else None
        if drawn is None or exhibit is None or (step, sender) in self._answered:
            raise RemoteError("draw", f"{sender} owes no answer about step {step}", sender)
        self._answered.add((step, sender))
        bodies = memoryview(request.body)[:size], memoryview(request.body)[size:]
        mine = await self._own_answer(exhibit, step, drawn[1])
        await steps.context.exact.run(Urgency.AUDIT, lambda: self._check(mine, bodies, sender))
        agreement = Agreement(
            run_id=steps.context.run_id,
            stage=steps.chain.stage,
            step=step,
            newcomer=sender,
            examiner=steps.context.me,
        ).signed_by(steps.context.identity)
        return Message({"agreement": agreement.to_value()})

    async def _own_answer(self, exhibit: Exhibit, step: Step, pieces: Pieces) -> tuple[Bytes, Bytes]:
        """What this member has sent, or what it comes to now. Raises LocalError if it has the weights no more."""
        replay = self._replay
        if replay is None:
            return exhibit.y, exhibit.grad_x
        past = self._steps.replica.past.get(int(exhibit.version))

        def again() -> tuple[Bytes, Bytes]:
            with standing_on(replay, {exhibit.version: past}):
                return exam_answer(replay, exhibit, step, pieces)

        return await self._steps.context.replays.run(Urgency.AUDIT, again)

    def _check(self, mine: Sequence[Bytes], bodies: Sequence[Bytes], sender: PeerId) -> None:
        """(exact) Raises RemoteError unless the newcomer came to the same as this member."""
        settings, width = self._steps.context.settings, self._steps.replica.model.hop_width
        shape = (settings.batch.microbatch_size, settings.data.sequence_length, width)
        for found in compared_answers(settings, shape, mine, bodies):
            if found.measured > NEAR_ENOUGH * found.fraud:
                raise RemoteError("exam", f"the replay is another: {found.reason}", sender)


@dataclass
class Newcomer:
    """Takes the exams that a newcomer draws, until the run key promotes it."""

    steps: StageSteps
    bases: RecentBases
    ticket: Ticket
    beacon: StageBeacon
    host: PeerId
    may_train: Callable[[], bool]
    """Whether this peer is past its probation."""
    agreements: int = 0
    """Exams that were passed."""
    _due: Roster | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._replay = StageReplay(
            self.steps.context.settings, self.steps.chain.stage, model=self.steps.replica.model_of_replays()
        )

    def applied(self, applied: Applied) -> None:
        """A round is over that this peer had no part in: what it is examined about."""
        step = applied.result.roster.step
        self._due = None if self.may_train() else applied.result.roster
        # Which it is known when the host has spoken of the step: by then the stage may be a version further.
        self.steps.replica.past.want(() if self._due is None else (step - 1, step), by="exam")

    async def until_promoted(self) -> Promotion:
        """Take exams, one a version at most, while this peer is on probation and until its promotion comes."""
        while True:
            await self.steps.wait_for_version(self.steps.version + 1, timeout_s=1.0)
            if self.may_train():
                continue
            try:
                promotion = await self.take_one()
            except (TransientError, RemoteError, LocalError, TimeoutError) as error:
                log.info("exam at version %d: %s", self.steps.version, error)
                continue
            if promotion is not None:
                return promotion

    async def take_one(self) -> Promotion | None:
        """The exam of the present version, if there is one that was not taken; the promotion, if it is earned.

        Raises TransientError or RemoteError where it is not passed, or while the host does not speak.
        """
        roster = self._due
        if roster is None:
            return None
        await self.beacon.spoken(roster.step, timeout_s=self.steps.context.settings.deadlines.call_s)
        if self._due is roster:
            self._due = None
        basis = self.bases.at(int(roster.step))
        exam = exam_of(roster, basis, self.beacon.of(roster), self.steps.context.me)
        if exam is None:
            return None
        agreement = await self._examined(exam, roster, self.steps.replica.past.get(int(exam.work.version)))
        self.agreements += 1
        reply = await self.steps.context.transport.call(
            self.host,
            AGREED,
            Message({"agreement": agreement.to_value()}),
            timeout_s=self.steps.context.settings.deadlines.call_s,
            max_body_bytes=0,
        )
        promotion = Fields("promotion answer", reply.meta).maybe("promotion", Promotion.from_value)
        if promotion is not None:
            promotion.check(self.steps.context.run_id, self.steps.chain.run_key)
        return promotion

    async def _examined(self, exam: Exam, roster: Roster, past: PastVersion) -> Agreement:
        steps, step = self.steps, exam.contribution.step
        call_s = steps.context.settings.deadlines.call_s
        meta: dict[str, Value] = {
            "step": step,
            "ticket": self.ticket.to_value(),
            "said": self.beacon.said.to_value(),
        }
        largest = max_exhibit_bytes(steps.context.settings, steps.replica.model.hidden_size)
        shown = await steps.context.transport.call(
            exam.examiner, EXAM, Message(meta), timeout_s=call_s, max_body_bytes=largest
        )
        num_values = steps.replica.layout.num_values
        pieces = exam_pieces(self.beacon.of(roster), steps.context.me, num_values=num_values)
        y, grad_x = await steps.context.replays.run(Urgency.AUDIT, lambda: self._answer(exam, past, shown, pieces))
        replays_s = steps.context.settings.deadlines.step_s if sends_nothing(self._replay) else 0.0
        reply = await steps.context.transport.call(
            exam.examiner,
            EXAM_ANSWER,
            Message({"step": step, "size": len(y)}, b"".join((y, grad_x))),
            timeout_s=call_s + replays_s,  # where the examiner has sent nothing, it computes the answer now
            max_body_bytes=0,
        )
        return Agreement.from_value(Fields("exam result", reply.meta).message("agreement"))

    def _answer(self, exam: Exam, past: PastVersion, shown: Message, pieces: Pieces) -> tuple[Bytes, Bytes]:
        """(replays) What the examiner must have come to, encoded."""
        fields = Fields("exam", shown.meta)
        papers, sizes = Papers.from_value(fields.message("papers")), fields.items("sizes", integer_item, max_items=3)
        fields.done()
        if len(sizes) != 3 or sum(sizes) != len(shown.body):
            raise RemoteError("malformed", f"an exam of {len(shown.body)} bytes, {sizes} stated", exam.examiner)
        view = memoryview(shown.body)
        x, targets, grad_y = view[: sizes[0]], view[sizes[0] : sum(sizes[:2])], view[sum(sizes[:2]) :]
        bodies = (x, targets, b"", grad_y, b"")
        exhibit = Exhibit.of_bodies(papers, exam.work.version, bodies)
        replay = self._replay
        with standing_on(replay, {exam.work.version: past}):
            return exam_answer(replay, exhibit, exam.contribution.step, pieces)
