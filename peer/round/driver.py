"""A step's averaging round carried out on this peer: messages, votes, encoding, aggregation.

`swarm.core.round.averaging_round` decides; this does what it says. Heavy work runs on the exact thread. Handlers and
tasks all run on one event loop, so decisions never interleave.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from peer.pipeline.compute import Urgency
from peer.pipeline.receipts import papers_s
from peer.round.mail.mail import ROUND, RoundMail, resend_pauses_s
from peer.round.mail.ropes import HANDED_ON, RoundRopes
from peer.round.part_exchange import Heard, PartExchange
from peer.round.signing_log import SigningLog
from peer.round.stage_steps import StageSteps
from peer.round.step_state import StepState
from peer.round.taking import StepTaking
from peer.stage.events import MemberBack, MemberGone, OffChain, StepClosed
from peer.state.replica import Accumulation
from swarm.averaging.seeds import part_seeds
from swarm.core.audit.chance import Chance, OffChainError
from swarm.core.canonical import Value, unpack
from swarm.core.cohorts import MAX_MEMBERS
from swarm.core.errors import MemoryFullError, RemoteError, TransientError
from swarm.core.fields import Fields, integer_item, packed_or_none, peer_item, signature_item, value_or_none
from swarm.core.forms import as_map
from swarm.core.ids import PeerId, Step
from swarm.core.round import averaging_round as act
from swarm.core.round.averaging_round import AveragingRound, Instruction
from swarm.core.round.ballots import Proposal
from swarm.core.round.contribution import Charge, Contribution, Result, Roster, Work
from swarm.core.round.facts import EquivocationError, RoundFacts
from swarm.core.round.mail import sheets
from swarm.core.round.voting import (
    MAX_VOTERS,
    MOST_VIEWS,
    PHASES,
    Phase,
    Promise,
    Proof,
    Reconfiguration,
    Vote,
    phase_of,
)
from swarm.core.round.words import Words
from swarm.core.state.stage_chain import StageChain
from swarm.drawn_papers import DRAWN, DrawnPapers, WithheldError
from swarm.identity.key import verify
from swarm.left_without import LEFT_WITHOUT, LeftWithout
from swarm.network.transport import MAX_META_BYTES, Message
from swarm.witness_service import AreThere, VoteLog, ask_witness, check_joins
from verification.kinds.equivocation import CastVote, Equivocation, Statement
from verification.round.papers import Papers

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_VOTES = MAX_VOTERS * len(PHASES)
"""Kept of a step to be compared with what else their voters sign."""


class RoundDriver:
    """What the stage's rounds send, receive and compute here."""

    def __init__(
        self,
        steps: StageSteps,
        mail: RoundMail,
        parts: PartExchange,
        taking: StepTaking,
        *,
        signing_log: SigningLog,
        vote_log: VoteLog,
        neighbours: Callable[[], set[PeerId]],
        charges: Callable[[], tuple[Charge, ...]],
        chance: Callable[[StageChain], Chance],
        drawn: DrawnPapers,
        said: Callable[[], None],
    ) -> None:
        """`neighbours`: live peers of the stages beside this one; `charges`: what this peer brings before juries with
        its next contribution; `chance`: what it reveals there; `drawn`: what it looks at of others' before it votes;
        `said`: told that a contribution is, after which a window may begin."""
        self._steps = steps
        self._context = steps.context
        self._mail = mail
        self._parts = parts
        self._taking = taking
        self._signing_log = signing_log
        self._vote_log = vote_log
        self._neighbours = neighbours
        self._ropes = RoundRopes(mail, steps.context)
        self._charges = charges
        self._chance = chance
        self._drawn = drawn
        self._said = said
        call_s = steps.context.settings.deadlines.call_s
        self._left_without = LeftWithout(steps.context.transport, drawn, steps.may_join, call_s=call_s)

    def serve(self) -> None:
        """Begin to answer."""
        self._context.transport.serve(ROUND, self._on_round, max_body_bytes=self._parts.max_message_bytes)
        self._context.transport.serve(LEFT_WITHOUT, self._on_left_without, max_body_bytes=0)
        self._parts.serve()

    async def _on_round(self, sender: PeerId, request: Message) -> Message:
        return await self._watched(self._take(sender, request))

    async def _watched(self, taken: Coroutine[Any, Any, T]) -> T:
        """Tells of what a message proves of its maker."""
        try:
            return await taken
        except EquivocationError as error:
            self._suspect(error.one, error.other)
            raise
        except OffChainError as error:
            self._context.events.publish(OffChain(error.maker, error.step))
            raise

    async def _on_left_without(self, sender: PeerId, request: Message) -> Message:
        """A voter asks what this peer contributes, of which it has seen nothing on a roster."""
        fields = Fields("roster without this peer", request.meta)
        self._steps.check_stage(sender, fields.integer("stage"))
        step = Step(fields.integer("step"))
        state = self._steps.open_step(step)
        machine = state.round if state is not None else None
        if state is None or machine is None:  # behind, or past it
            return Message({"brings_nothing": int(step) < self._steps.chain.version, "made": None})
        if sender not in machine.facts.voters:
            raise RemoteError("standing", f"{sender} has no vote on step {step}", sender)
        proposal = fields.maybe("proposal", Proposal.from_value)
        fields.done()
        if proposal is not None:
            self.carry_out(state, machine.on_left_without(proposal, now=time.monotonic()))
        made = packed_or_none(machine.contribution)
        return Message({"brings_nothing": machine.brings_nothing, "made": made})

    async def _take(self, sender: PeerId, request: Message) -> Message:
        fields = Fields("round message", request.meta)
        self._steps.check_stage(sender, fields.integer("stage"))
        kind, step = fields.text("kind"), Step(fields.integer("step"))
        if int(step) < self._steps.chain.version:
            return Message({"status": "over"})
        state = await self._steps.step_state(step, with_round=True)
        machine = state.round
        assert machine is not None
        if sender in machine.facts.members:
            self._mail.heard(sender)
            self.carry_out(state, machine.is_back(sender, now=time.monotonic()))
        now, heard = time.monotonic(), Heard([])
        if kind == HANDED_ON:
            return self._ropes.handed_on(state, sender, fields)
        if fields.optional("rope"):
            return await self._on_rope(state, sender, kind, fields)
        if kind == "close":
            view, shown = fields.integer("view", high=MOST_VIEWS), Proof.from_value(fields.message("proof"))
            out = machine.on_close(sender, view, shown, now=now)
        elif kind == "turned":
            out = machine.on_turned(sender, fields.integer("view", high=MOST_VIEWS), now=now)
            state.waits_since = now if state.waits_since is None else state.waits_since
        elif kind == "commit":
            view = fields.integer("view", high=MOST_VIEWS)
            contribution = fields.maybe("contribution", Contribution.from_value)
            roster = fields.maybe("roster", Roster.from_value)
            result = fields.maybe("result", Result.from_value)
            promise = fields.maybe("promise", Promise.from_value)
            if contribution is not None and machine.facts.leader_of(view) == self._context.me:
                await self._look_at(machine, contribution, sender)
            out = machine.on_commit(sender, view, contribution, promise, roster, result, now=time.monotonic())
            self._ropes.came(state, sender, sheets.of_contribution(contribution))
        elif kind == "contribution":
            shown_to_all = Contribution.from_value(fields.message("contribution"))
            out = machine.on_contribution(sender, shown_to_all)
            self._ropes.came(state, sender, sheets.of_contribution(shown_to_all))
        elif kind == "ballot":
            proposal = Proposal.from_value(fields.message("proposal"))
            words = fields.maybe("words", Words.from_value)
            out, heard = await self._asked(state, machine, sender, proposal, words)
        elif kind == "vote":
            view, phase, value = (
                fields.integer("view", high=MOST_VIEWS),
                fields.text("phase"),
                fields.octets("value", length=32),
            )
            vote = Vote.from_value(fields.message("vote"))
            self._compare_votes(state, view, phase_of(phase), value, vote)
            out = machine.on_vote(sender, view, phase, value, vote, now=now)
        elif kind == "there":
            named, is_checked = Contribution.from_value(fields.message("contribution")), fields.boolean("checked")
            lacks = () if is_checked else self._drawn.lacks(named)
            if not lacks and self._steps.may_join(named.peer_id):
                self.carry_out(state, machine.on_named(sender, named, now=now))
            return Message({"status": "ok", "lacks": [*lacks]})
        elif kind == "roster":
            out = machine.on_roster(sender, Roster.from_value(fields.message("roster")), now=now)
            state.notify()
        elif kind == "parts":
            heard = await self._parts.receive(state, machine, sender, fields, memoryview(request.body))
            out = heard.instructions
        elif kind == "held":
            return Message({"status": "held" if self._parts.holds(state, sender, fields) else "lacked"})
        elif kind == "missing":
            view = fields.integer("view", high=MOST_VIEWS)
            missing = fields.items("missing", peer_item, max_items=MAX_MEMBERS)
            given_up = fields.items("given_up", peer_item, max_items=MAX_MEMBERS)
            signatures = fields.items("signatures", signature_item, max_items=MAX_MEMBERS)
            if len(signatures) != len(given_up):
                raise RemoteError("malformed", f"{len(signatures)} signatures about {len(given_up)} members", sender)
            out = machine.on_missing(sender, view, missing, [*zip(given_up, signatures, strict=True)], now=now)
        elif kind == "made":
            part, cohort = fields.integer("part", high=1 << 20), fields.integer("cohort", high=1 << 10)
            out = machine.on_announced(sender, part, cohort, now=now)
        elif kind == "result":
            out = machine.on_result(Result.from_value(fields.message("result")), now=now)
            state.notify()
        else:
            raise RemoteError("protocol", f"round message of kind {kind[:20]!r}", sender)
        self.carry_out(state, out)
        if heard.failure is not None:
            raise heard.failure
        return Message({"status": "ok"})

    async def _asked(
        self, state: StepState, machine: AveragingRound, sender: PeerId, proposal: Proposal, words: Words | None
    ) -> tuple[list[Instruction], Heard]:
        """A leader asks for this peer's vote."""
        self._check_neighbours(proposal)
        check_joins(proposal, self._steps.may_join)
        machine.facts.check_view(sender, proposal.view)
        there: tuple[Contribution, ...] = ()
        if not machine.is_past(proposal.view):
            facts = machine.facts
            num_members, within_s = len(facts.members), self._papers_s(facts)
            try:
                await self._drawn.check(proposal, sender, num_members=num_members, within_s=within_s)
            except WithheldError:
                self.carry_out(state, machine.pass_over(sender, proposal.view, now=time.monotonic()))
                raise
            there = await self._left_without.are_there(machine, proposal, papers_s=within_s)
        out = machine.on_ballot(sender, proposal, there=there, now=time.monotonic())
        try:
            await self._parts.compare(state, proposal, words)
        except RemoteError as error:  # nobody votes for it: the next leader is turned to at once
            return out + machine.pass_over(sender, proposal.view, now=time.monotonic()), Heard([], error)
        return out, Heard([])

    async def _say_there(self, state: StepState, named: act.SayThere) -> None:
        """The leader says for which entries it has no papers, if that is why it is without the member."""
        machine = state.round
        assert machine is not None
        meta: dict[str, Value] = {"kind": "there", "contribution": named.made.packed}
        reply = await self._mail.send(state, named.to, {**meta, "checked": False})
        if reply is None or reply.meta.get("status") != "ok":
            return
        entries = sorted(set(Fields("answer", reply.meta).items("lacks", integer_item, max_items=DRAWN)))
        if not entries:
            return
        if await self._left_without.shows(named, tuple(entries), within_s=self._papers_s(machine.facts)):
            await self._mail.send(state, named.to, {**meta, "checked": True})
        elif self._steps.is_open(state) and not machine.is_past(named.proposal.view) and machine.roster is None:
            out, _ = await self._watched(self._asked(state, machine, named.to, named.proposal, None))
            self.carry_out(state, out)

    async def _on_rope(self, state: StepState, sender: PeerId, kind: str, fields: Fields) -> Message:
        found = await self._ropes.restored(state, sender, fields)
        if found.lacking:
            return Message({"status": "lacks", "names": [*found.lacking]})
        meta = as_map("round message", unpack(found.data, max_bytes=MAX_META_BYTES))
        if meta.get("kind") != kind or "rope" in meta:
            raise RemoteError("malformed", f"a rope of kind {kind[:20]!r} holds something else", sender)
        reply = await self._take(sender, Message(meta))
        self._ropes.taken(state, sender, found)
        return reply

    async def _look_at(self, machine: AveragingRound, made: Contribution, sender: PeerId) -> None:
        """As who leads: what is not shown here need not be proposed."""
        if made.peer_id == sender and sender in machine.facts.members:
            num_members, within_s = len(machine.facts.members), self._papers_s(machine.facts)
            if await self._drawn.lack(made, num_members=num_members, within_s=within_s) is not None:
                machine.leave_out(sender, now=time.monotonic())

    def _papers_s(self, facts: RoundFacts) -> float:
        """How long papers are waited for: on a line that a round keeps full, longer than a short phase."""
        return papers_s(self._context.settings.deadlines.call_s, facts)

    def leave_out(self, state: StepState, peer: PeerId) -> None:
        """A voter lacks a member's papers, and this peer, who leads, gets none either."""
        if state.round is not None:
            self.carry_out(state, state.round.leave_out(peer, now=time.monotonic()))

    def _compare_votes(self, state: StepState, view: int, phase: Phase, value: bytes, vote: Vote) -> None:
        """Accuse a voter of two votes in one phase. Those of a reconfigured round are not compared."""
        assert state.round is not None
        election = state.round.facts.election
        if vote.voter not in election.voters or view != state.round.view:
            return
        if len(state.votes) >= MAX_VOTES:
            state.votes.clear()
        earlier, earlier_vote = state.votes.setdefault((vote.voter, phase, view), (value, vote))
        if earlier == value:
            return
        one = CastVote.of(election, phase, view, earlier, earlier_vote, None)
        other = CastVote.of(election, phase, view, value, vote, None)
        if all(verify(vote.voter, cast.signed_bytes(), cast.vote.signature) for cast in (one, other)):
            self._suspect(one, other)

    def _suspect(self, one: Statement, other: Statement) -> None:
        """Two statements that one peer has signed may contradict each other."""
        self._context.events.publish(Equivocation(one=one, other=other))

    def carry_out(self, state: StepState, instructions: Iterable[Instruction]) -> None:
        """Do what the step's round says."""
        if state.round is not None and state.round.changed is not state.logged_under:
            self.log_round(state)
        if state.round is not None and state.round.roster is not None:
            self._parts.rates.begin(state.round.roster, now=time.monotonic())
        to_aggregate: list[act.AggregatePart | act.CombineShares] = []
        for instruction in instructions:
            match instruction:
                case act.MakeContribution():
                    if state.closed_at is None:
                        state.closed_at, state.busy_s_at_close = time.monotonic(), self._context.compute.busy_s
                        self._context.events.publish(StepClosed(state.step))
                    self._context.tasks.spawn(self._contribute(state))
                case act.SendClose(to, view, reason):
                    assert state.round is not None
                    close: dict[str, Value] = {"kind": "close", "view": view, "reason": reason[:200]}
                    self._mail.send_all(state, to, {**close, "proof": state.round.turned.to_value()})
                case act.SendTurned(to, view):
                    self._mail.send_all(state, to, {"kind": "turned", "view": view})
                case act.SendCommit(leader, view, contribution, promise, roster, result):
                    meta: dict[str, Value] = {
                        "kind": "commit",
                        "view": view,
                        "contribution": packed_or_none(contribution),
                        "promise": value_or_none(promise),
                        "roster": packed_or_none(roster),
                        "result": packed_or_none(result),
                    }
                    if roster is None and result is None:  # the first: who leads does not have the contribution
                        self._mail.send_all(state, (leader,), meta)
                    else:
                        certified = (*sheets.of_result(result), *sheets.of_roster(roster))
                        inner = (*sheets.of_contribution(contribution), *certified)
                        self._ropes.send(state, (leader,), meta, inner)
                case act.AskPromise(to, view):
                    for peer in to:
                        self._ask_outside(state, peer, instruction, (peer, "promise", view))
                case act.SendBallot(to, proposal):
                    inside = [peer for peer in to if peer in self._steps.chain.members]
                    words = self._parts.words(state, proposal)
                    if inside:
                        ballot: dict[str, Value] = {"proposal": proposal.packed, "words": value_or_none(words)}
                        self._ropes.send(state, inside, {"kind": "ballot", **ballot}, sheets.of_proposal(proposal))
                    for peer in to:
                        if peer not in inside:
                            key = (peer, proposal.phase, proposal.view)
                            self._ask_outside(state, peer, instruction, key)
                case act.SendVote(leader, proposal, vote):
                    asked: dict[str, Value] = {
                        "kind": "vote",
                        "view": proposal.view,
                        "phase": proposal.phase,
                        "value": proposal.value,
                        "vote": vote.to_value(),
                    }
                    self._mail.send_all(state, (leader,), asked)
                case act.SayThere():
                    self._context.tasks.spawn(self._say_there(state, instruction))
                case act.SendRoster(to, roster):
                    state.notify()
                    meta = {"kind": "roster", "roster": roster.packed}
                    self._ropes.send(state, to, meta, sheets.of_roster(roster))
                case act.SendPart(reducer, part, view):
                    self._parts.send_part(state, reducer, part, view)
                case act.AggregatePart() | act.CombineShares():
                    to_aggregate.append(instruction)
                case act.SayMissing(leader, view, missing, given_up):
                    peers, signatures = [peer for peer, _ in given_up], [signature for _, signature in given_up]
                    lacks: dict[str, Value] = {"missing": [*missing], "given_up": [*peers], "signatures": [*signatures]}
                    self._mail.send_all(state, (leader,), {"kind": "missing", "view": view, **lacks})
                case act.AnnounceShare(leader, part, cohort):
                    self._mail.send_all(state, (leader,), {"kind": "made", "part": part, "cohort": cohort})
                case act.SendReduced(to, reduced):
                    self._parts.send_reduced(state, to, reduced)
                case act.SendResult(to, result):
                    state.notify()
                    inside = [peer for peer in to if peer in self._steps.chain.members]
                    meta = {"kind": "result", "result": result.packed}
                    self._ropes.send(state, inside, meta, sheets.of_result(result))
                case act.FetchPart():
                    self._context.tasks.spawn(self._fetch(state, instruction))
                case act.Accuse(one, other):
                    self._suspect(one, other)
                case act.Finish(result):
                    assert state.round is not None
                    self._left_without.ended(state.round, result)
                    self._context.tasks.spawn(self._taking.finish(state, result))
        if to_aggregate:
            assert state.round is not None
            assert state.round.roster is not None
            self._context.tasks.spawn(self._aggregate(state, state.round.roster, to_aggregate))

    async def _fetch(self, state: StepState, asked: act.FetchPart) -> None:
        self.carry_out(state, await self._parts.fetch(state, asked))

    async def _aggregate(
        self, state: StepState, roster: Roster, asked: list[act.AggregatePart | act.CombineShares]
    ) -> None:
        self.carry_out(state, await self._parts.aggregate(state, roster, asked))

    def member_gone(self, event: MemberGone) -> None:
        """An open step's round goes on without the member."""
        state = self._steps.open_step(event.step)
        if state is not None and state.round is not None:
            self.carry_out(state, state.round.unreachable(event.peer, now=time.monotonic()))

    def member_back(self, event: MemberBack) -> None:
        """It is told how open steps' rounds stand, by who leads them."""
        for state in list(self._steps.open.values()):
            if state.round is not None:
                self.carry_out(state, state.round.is_back(event.peer, now=time.monotonic()))

    def log_round(self, state: StepState) -> None:
        """Nothing that is signed from now on leaves before the round and its reconfiguration are on disk."""
        machine = state.round
        assert machine is not None
        state.logged, state.logged_under = asyncio.get_running_loop().create_future(), machine.changed
        self._context.tasks.spawn(self._log_round(machine.facts.name, machine.changed, state.logged))

    async def _log_round(self, name: bytes, changed: Reconfiguration | None, logged: asyncio.Future[None]) -> None:
        await self._vote_log.begin(name, changed)
        logged.set_result(None)

    def _check_neighbours(self, proposal: Proposal) -> None:
        """A leader must not make up voters: whom it names as a neighbour is known here, or not yet voted for."""
        if proposal.roster is not None:
            known = {*self._neighbours(), *self._steps.chain.basis.neighbours}
            strange = [peer for peer in proposal.roster.neighbours if peer not in known]
            if strange:
                raise TransientError(f"{strange[0][-6:]} is not known here as a neighbour")

    def _ask_outside(
        self, state: StepState, peer: PeerId, what: act.AskPromise | act.SendBallot, key: tuple[PeerId, str, int]
    ) -> None:
        if key not in state.asking:
            state.asking.add(key)
            self._context.tasks.spawn(self._until_answered(state, peer, what, key))

    async def _until_answered(
        self, state: StepState, peer: PeerId, what: act.AskPromise | act.SendBallot, key: tuple[PeerId, str, int]
    ) -> None:
        """Ask a voter outside the stage until it answers or nobody wants to know any more."""
        machine, facts = state.round, state.facts
        assert machine is not None
        assert facts is not None
        await asyncio.shield(state.logged)
        basis, call_s = self._steps.chain.basis, self._context.settings.deadlines.call_s
        pauses_s = resend_pauses_s()
        try:
            while self._steps.is_open(state) and machine.wants(what):
                # Of members' votes for it there may be more by now.
                words = self._parts.words(state, what.proposal) if isinstance(what, act.SendBallot) else None
                try:
                    shown = machine.turned if isinstance(what, act.AskPromise) else None
                    answer = await ask_witness(
                        self._context.transport, peer, facts, basis, what, words=words, shown=shown, timeout_s=call_s
                    )
                except TransientError as error:
                    log.debug("stage %d step %d: voter %s: %s", facts.stage, state.step, peer[-6:], error)
                    await asyncio.sleep(next(pauses_s))
                    continue
                now = time.monotonic()
                if isinstance(answer, Vote) and isinstance(what, act.SendBallot):
                    asked = what.proposal
                    out = machine.on_vote(peer, asked.view, asked.phase, asked.value, answer, now=now)
                    self.carry_out(state, out)
                elif isinstance(answer, AreThere):
                    there = [one for one in answer.made if self._steps.may_join(one.peer_id)]
                    self.carry_out(state, machine.on_there(there, now=now))
                elif isinstance(answer, tuple):
                    self.carry_out(state, machine.on_promise(peer, *answer, now=now))
                return
        finally:
            state.asking.discard(key)

    def listed(
        self, state: StepState, accumulation: Accumulation
    ) -> tuple[tuple[Work, ...], tuple[Papers | None, ...]]:
        """The work that this peer says is in its contribution, and what it shows for each entry."""
        work = accumulation.listed()
        return work, tuple(accumulation.papers.get(item.microbatch_id) for item in work)

    async def _contribute(self, state: StepState) -> None:
        context, step = self._context, state.step
        replica, chain = self._steps.replica, self._steps.chain
        assert state.round is not None
        try:
            accumulation = await context.compute.run(Urgency.ROUND, lambda: replica.close(step))
        except MemoryFullError as error:  # of a step in which it has done nothing, else the sum is there
            log.warning("step %d: this peer contributes nothing: %s", step, error)
            self.carry_out(state, state.round.contributed(None, now=time.monotonic()))
            return
        state.accumulation = accumulation
        if not self._signing_log.may_sign(chain.lineage, step):
            log.warning("step %d: this peer may have contributed before it was restarted, and does not again", step)
            self._has_said(accumulation, ())
            self.carry_out(state, state.round.contributed(None, now=time.monotonic()))
            return
        seeds = part_seeds(context.run_id, chain.stage, chain.version, context.me, num_parts=replica.num_parts)
        try:
            parts, digests = await self._parts.encoded(step, accumulation, seeds)
        except MemoryFullError as error:
            log.warning("step %d: this peer contributes nothing: %s", step, error)
            self._has_said(accumulation, ())
            self.carry_out(state, state.round.contributed(None, now=time.monotonic()))
            return
        work, state.papers = self.listed(state, accumulation) if parts else ((), ())
        rates = self._parts.rates.of(chain.members, me=context.me)
        unsigned = Contribution(
            context.run_id,
            chain.stage,
            step,
            chain.name,
            context.me,
            work,
            tuple(digests),
            self._chance(chain),
            rates,
            self._charges() if work else (),
        )
        await asyncio.to_thread(self._signing_log.record, chain.lineage, step, unsigned.signed_bytes())
        self._parts.commit(state, parts, digests)
        self._has_said(accumulation, parts)
        contribution = replace(unsigned, signature=context.identity.sign(unsigned.signed_bytes()))
        self._show_all(state, contribution)
        self.carry_out(state, state.round.contributed(contribution, now=time.monotonic()))

    def _has_said(self, accumulation: Accumulation, parts: Sequence[memoryview]) -> None:
        """Nothing more than these: where it is a window, the next may begin."""
        accumulation.said = parts
        self._said()

    def _show_all(self, state: StepState, contribution: Contribution) -> None:
        """Everybody gets from its maker what the leader will name; the leader gets it with what is committed to it."""
        machine = state.round
        assert machine is not None
        self._ropes.came(state, machine.me, sheets.of_contribution(contribution))
        others = [peer for peer in machine.facts.members if peer not in (machine.me, machine.leader)]
        self._mail.send_all(state, others, {"kind": "contribution", "contribution": contribution.packed})
