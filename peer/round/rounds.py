"""A stage's steps on this peer: they open, are averaged, and make the new version.

`swarm.core` decides (StepProgress, AveragingRound, StageChain); this room carries out: messages, encoding on the exact
thread, deadlines on the event loop. Handlers and tasks all run on one event loop, so decisions never interleave.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from peer.pipeline.receipts import PapersDesk
from peer.pipeline.screens import Screens
from peer.pipeline.turns import Turns
from peer.round.driver import RoundDriver
from peer.round.joiners import Joiners
from peer.round.mail.mail import RoundMail
from peer.round.mail.pace import SHORTEST_BYTES
from peer.round.part_exchange import PartExchange
from peer.round.presence import Presence
from peer.round.signing_log import SigningLog
from peer.round.stage_steps import StageSteps
from peer.round.step_progress import ProgressCalls
from peer.round.step_state import StepSheets, StepState
from peer.round.taking import StepTaking
from peer.stage.context import StageContext
from peer.stage.events import MemberBack, MemberGone, PeerLost, VersionTurned
from swarm.core.audit.chance import Chance
from swarm.core.fields import Fields
from swarm.core.ids import PeerId, Step
from swarm.core.plan import longest_round_s
from swarm.core.round import averaging_round as act
from swarm.core.round.averaging_round import AveragingRound
from swarm.core.round.contribution import Charge, Result
from swarm.core.round.mail.desk import Desk
from swarm.core.round.patience import Waits
from swarm.core.round.voting import Reconfiguration
from swarm.core.state.stage_chain import StageChain
from swarm.core.transfers import SHARED_BY, bytes_per_s, expected_s, work_s
from swarm.drawn_papers import DrawnPapers
from swarm.host_protocol import RECONFIGURE, STANDING
from swarm.identity.key import verify
from swarm.network.loop import happened
from swarm.network.transport import MAX_META_BYTES, Message
from swarm.witness_service import VoteLog
from verification.round.papers import Bytes

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
SAY_EVERY_S = 60.0
"""What a round waits for that takes longer."""


@dataclass(kw_only=True)
class StageRounds:
    """The stage's steps as one of its peers takes part in them: put together, opened one after another, and ended."""

    context: StageContext
    steps: StageSteps
    screens: Screens
    """Of the norms of what others contribute."""
    signing_log: SigningLog
    """In which steps this identity has contributed."""
    vote_log: VoteLog
    """In which rounds this identity has signed."""
    neighbours: Callable[[], set[PeerId]]
    """Live peers of the stages beside this one."""
    is_closed_before: Callable[[Step], bool]
    """Whether the stage before takes no more of a step."""
    charges: Callable[[], tuple[Charge, ...]]
    """What this peer brings before juries with its next contribution."""
    chance: Callable[[StageChain], Chance]
    """What its contribution to the round that starts from a version reveals."""
    drawn: DrawnPapers
    """What it looks at of others' contributions before it votes."""
    make_part_exchange: Callable[[StageSteps, RoundMail, Screens], PartExchange] = PartExchange
    make_driver: Callable[..., RoundDriver] = RoundDriver
    """Called as `RoundDriver` is."""

    def __post_init__(self) -> None:
        steps, events = self.steps, self.context.events
        replica = steps.replica
        self.turns = Turns(steps.open, steps.leased, lambda step: replica.accepts(step, steps.era), replica.can_compute)
        self.presence = Presence(steps)
        mail = RoundMail(steps, self.presence)
        self._parts = parts = self.make_part_exchange(steps, mail, self.screens)
        self.taking = StepTaking(steps, self.presence, self.turns)
        self._driver = self.make_driver(
            steps,
            mail,
            parts,
            self.taking,
            signing_log=self.signing_log,
            vote_log=self.vote_log,
            neighbours=self.neighbours,
            charges=self.charges,
            chance=self.chance,
            drawn=self.drawn,
            said=self.turns.look_again,
        )
        self._desk = PapersDesk(steps, self.drawn, self._driver.leave_out)
        self._reports = ProgressCalls(
            steps,
            self.presence,
            self._driver,
            self.turns,
            self.neighbours,
            self.is_closed_before,
            parts.joiners.back_in_s,
        )
        events.hear(PeerLost, self.presence.lost)
        events.hear(MemberGone, self._driver.member_gone)
        events.hear(MemberBack, parts.member_back, self._driver.member_back)
        events.hear(VersionTurned, parts.turned, self._turned)

    # -- life ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Serve the stage's rounds from the chain's version on."""
        transport = self.context.transport
        self._reports.serve()
        transport.serve(STANDING, self._on_standing, max_body_bytes=0)
        transport.serve(RECONFIGURE, self._on_reconfigure, max_body_bytes=0)
        self._driver.serve()
        self._desk.serve(transport)
        self._open_steps()

    async def stop(self) -> None:
        """End all work; nothing is begun after it."""
        await self.context.tasks.stop()

    def moved(self) -> tuple[tuple[int, ...], ...]:
        """Of each round to which this peer has contributed, numbers that change as long as something of it moves."""
        return tuple(
            (state.step, state.round.view, state.sent_bytes, state.came_bytes, len(state.parts.reduced))
            for state in self.steps.open.values()
            if state.closed_at is not None and state.round is not None
        )

    @property
    def num_given(self) -> int:
        """Parts that others were given on asking."""
        return self._parts.num_given

    @property
    def joiners(self) -> Joiners:
        """Who is sent states and results."""
        return self._parts.joiners

    def end_at(self, version: int) -> None:
        """The era ends at this version; a later word may name a higher one."""
        was_over = self.steps.is_over
        for over in self.steps.end_at(version):
            self.turns.step_is_over(over.grants)
        if was_over and not self.steps.is_over:
            self._open_steps()
            self.steps.announce_version()
        self.turns.look_again()

    # -- steps --------------------------------------------------------------------------------------------

    def _turned(self, event: VersionTurned) -> None:
        """Open the steps of the version."""
        self._open_steps()
        self.steps.announce_version()
        self.turns.look_again()

    def _open_steps(self) -> None:
        steps = self.steps
        for over in steps.close_those_over():
            self.turns.step_is_over(over.grants)
        for state in steps.open_those_due():
            state.progress.reserve(self.presence.present(), now=time.monotonic())
            self.context.tasks.spawn(self._reports.report_while_open(state))
        if not steps.is_over:
            self._begin_round(steps.open[Step(steps.version)])

    def _begin_round(self, state: StepState) -> None:
        steps, settings, me = self.steps, self.context.settings, self.context.me
        state.facts = steps.chain.facts(
            settings,
            num_parts=steps.replica.num_parts,
            phase_s=self.taking.phase.seconds,
        )
        if steps.is_member:
            name = state.facts.name
            # Whoever votes alone cannot contradict another.
            votes = self.vote_log.may_vote(name) or state.facts.voters == (me,)
            state.round = AveragingRound(
                state.facts,
                me,
                self.context.identity.sign,
                verify,
                view=state.view,
                waits=self._waits(),
                votes=votes,
                signed_under=self.vote_log.signed_under(name),
            )
            state.sheets = StepSheets(Desk(state.facts, me, settings.deadlines.call_s, MAX_META_BYTES))
            self._driver.log_round(state)
            state.notify()
            state.dirty.set()
            self.context.tasks.spawn(self._watch_deadlines(state))

    def _waits(self) -> Waits:
        settings, steps = self.context.settings, self.steps
        return Waits(
            opened_at=time.monotonic(),
            straggler_share=settings.averaging.straggler_share,
            silence_s=settings.deadlines.call_s
            + expected_s(SHORTEST_BYTES, bytes_per_s(settings.deadlines.least_mbit) / SHARED_BY),
            longest_s=longest_round_s(settings, steps.replica.layout.num_values, len(steps.chain.members)),
            not_waited_for=self.presence.not_waited_for() | self._parts.rates.slow(),
        )

    async def _watch_deadlines(self, state: StepState) -> None:
        said_at = -math.inf
        while self.steps.is_open(state) and state.round is not None:
            now = time.monotonic()
            times = [t for t in (state.round.deadline, state.progress.next_deadline()) if t is not None and t > now]
            await happened(state.changed, within_s=max(0.01, min([LOOK_EVERY_S, *(t - now for t in times)])))
            if not self.steps.is_open(state):
                return
            self._reports.close_if_due(state)
            self._reports.look_for_the_silent(state)
            self._reports.pass_over_the_idle(state)
            self._driver.carry_out(state, state.round.tick(now=time.monotonic()))
            since = max(said_at, state.closed_at) if state.closed_at is not None else now
            if now >= since + SAY_EVERY_S:
                said_at = now
                log.info("step %d, view %d: waits for %s", state.step, state.round.view, state.round.waits_for)

    async def adopt(self, result: Result, bodies: Sequence[Bytes]) -> None:
        """Take the present step's result from another peer's store; each of its bytes has the digest that it names.
        Raises RemoteError if it is not genuine."""
        version = self.steps.version
        state = self.steps.open_step(Step(version))
        if state is None or state.facts is None or int(result.roster.step) != version:
            return
        if state.round is None:
            state.facts.check_result(result, verify, certified=True)
        self._parts.take_results(state, result, bodies)
        if state.round is None:
            self.context.tasks.spawn(self.taking.finish(state, result))
        else:
            out = state.round.on_result(result, now=time.monotonic())
            out = [instruction for instruction in out if not isinstance(instruction, act.FetchPart)]
            for reduced in result.parts:
                out += state.round.part_fetched(reduced, now=time.monotonic())
            self._driver.carry_out(state, out)
        values = self.steps.replica.layout.num_values
        await self.steps.wait_for_version(
            version + 1, timeout_s=self.context.settings.deadlines.call_s + work_s(values)
        )

    async def version_of(self, peer: PeerId) -> int:
        """Where another peer has the stage. Raises TransientError or RemoteError."""
        context = self.context
        meant, call_s = Message({"stage": self.steps.chain.stage}), context.settings.deadlines.call_s
        reply = await context.transport.call(peer, STANDING, meant, timeout_s=call_s, max_body_bytes=0)
        return Fields("standing", reply.meta).integer("version")

    # -- what others ask ----------------------------------------------------------------------------------

    async def _on_standing(self, sender: PeerId, request: Message) -> Message:
        """Where the stage is, for whoever finds it silent; `stage`, if given: the one that is meant."""
        steps, fields = self.steps, Fields("standing request", request.meta)
        if fields.optional("stage"):
            steps.check_stage(sender, fields.integer("stage"))
        fields.done()
        state = steps.open_step(Step(steps.version))
        # A reconfiguration under which this identity has voted is over: the next must begin past it.
        view = max(state.leading_view if state is not None else 0, self.vote_log.signed_under(steps.chain.round_name))
        closing = state is not None and state.round is not None and state.round.is_closing
        basis = steps.chain.basis.to_value()
        return Message({"version": steps.version, "view": view, "closing": closing, "basis": basis})

    async def _on_reconfigure(self, sender: PeerId, request: Message) -> Message:
        """The run key names other voters for the present round. Whoever brings its word does not matter."""
        changed = Reconfiguration.from_value(Fields("reconfiguration call", request.meta).message("reconfiguration"))
        state = await self.steps.step_state(changed.step, with_round=True)
        assert state.round is not None
        log.warning("stage %d step %d: %d voters decide from now on", changed.stage, changed.step, len(changed.voters))
        self._driver.carry_out(state, state.round.reconfigure(changed, now=time.monotonic()))
        return Message()
