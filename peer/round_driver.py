"""This is where a step's averaging round is carried out on this peer: messages, votes, encoding, aggregation.

`swarm.core.averaging_round` decides; this does what it says. Heavy work runs on the exact thread. Handlers and tasks
all run on one event loop, so decisions never interleave.
"""

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from peer.adversary import HONEST
from peer.compute import Urgency
from peer.part_exchange import PartExchange
from peer.round_work import encode_contribution
from peer.step_state import Bytes, StepState
from swarm.averaging.seeds import part_seeds
from swarm.core import averaging_round as act
from swarm.core.averaging_round import Instruction
from swarm.core.canonical import Value
from swarm.core.contribution import MAX_CHARGES, Contribution, Result, Roster
from swarm.core.errors import RemoteError, TransientError, UnreachableError
from swarm.core.fields import Fields, packed_or_none, value_or_none
from swarm.core.ids import PeerId, Step
from swarm.core.round_ballots import Proposal
from swarm.core.round_facts import EquivocationError
from swarm.core.voting import MAX_VOTERS, PHASES, Phase, Promise, Vote, phase_of
from swarm.identity import verify
from swarm.network.transport import Message
from swarm.witness_service import ask_witness, check_joins
from verification.kinds.equivocation import CastVote

if TYPE_CHECKING:
    from peer.rounds import StageRounds

log = logging.getLogger(__name__)

ROUND = "round"
RESEND_S = 0.2
MAX_VOTES = MAX_VOTERS * len(PHASES)
"""Kept of a step to be compared with what else their voters sign."""


class RoundDriver:
    """What the stage's rounds send, receive and compute here."""

    def __init__(self, stage: "StageRounds") -> None:
        self._stage = stage
        self.parts = PartExchange(stage, self)

    def serve(self) -> None:
        """Begin to answer."""
        self._stage.transport.serve(ROUND, self._on_round, max_body_bytes=self.parts.max_message_bytes)
        self.parts.serve()

    async def _on_round(self, sender: PeerId, request: Message) -> Message:
        fields = Fields("round message", request.meta)
        self._stage.check_stage(sender, fields.integer("stage"))
        kind, step = fields.text("kind"), Step(fields.integer("step"))
        if int(step) < self._stage.chain.version:
            return Message({"status": "over"})
        state = await self._stage.step_state(step, with_round=True)
        machine = state.round
        assert machine is not None
        now = time.monotonic()
        if kind == "close":
            out = machine.on_close(sender, fields.integer("view", high=1 << 20), now=now)
        elif kind == "commit" and self._stage.adversary.ignores(machine.facts, sender, me=self._stage.me):
            out = []
        elif kind == "commit":
            view = fields.integer("view", high=1 << 20)
            contribution = fields.maybe("contribution", Contribution.from_value)
            roster = fields.maybe("roster", Roster.from_value)
            result = fields.maybe("result", Result.from_value)
            promise = fields.maybe("promise", Promise.from_value)
            try:
                out = machine.on_commit(sender, view, contribution, promise, roster, result, now=now)
            except EquivocationError as error:
                self._stage.on_equivocation(error.one, error.other)
                raise
        elif kind == "ballot":
            proposal = Proposal.from_value(fields.message("proposal"))
            self._check_neighbours(proposal)
            check_joins(proposal, self._stage.may_join)
            out = machine.on_ballot(sender, proposal, now=now)
        elif kind == "vote":
            view, phase, value = (
                fields.integer("view", high=1 << 20),
                fields.text("phase"),
                fields.octets("value", length=32),
            )
            vote = Vote.from_value(fields.message("vote"))
            self._compare_votes(state, view, phase_of(phase), value, vote)
            out = machine.on_vote(sender, view, phase, value, vote, now=now)
        elif kind == "roster":
            out = machine.on_roster(sender, Roster.from_value(fields.message("roster")), now=now)
            state.notify()
        elif kind == "parts":
            await self.parts.receive(state, machine, sender, fields, memoryview(request.body))
            out = []
        elif kind == "made":
            part, cohort = fields.integer("part", high=1 << 20), fields.integer("cohort", high=1 << 10)
            out = machine.on_announced(sender, part, cohort, now=now)
        elif kind == "result":
            out = machine.on_result(Result.from_value(fields.message("result")), now=now)
            state.notify()
        else:
            raise RemoteError("protocol", f"round message of kind {kind[:20]!r}", sender)
        self.carry_out(state, out)
        return Message({"status": "ok"})

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
            self._stage.on_equivocation(one, other)

    def carry_out(self, state: StepState, instructions: Iterable[Instruction]) -> None:
        if state.round is not None and state.round.changed is not state.logged_under:
            self._stage.log_round(state)
        if state.round is not None and state.round.roster is not None:
            self.parts.rates.begin(state.round.roster, now=time.monotonic())
        to_aggregate: list[act.AggregatePart | act.CombineShares] = []
        for instruction in self._instructed(state, instructions):
            match instruction:
                case act.MakeContribution():
                    if state.closed_at is None:
                        state.closed_at, state.busy_s_at_close = time.monotonic(), self._stage.compute.busy_s
                    self._stage.spawn(self._contribute(state))
                case act.SendClose(to, view, reason):
                    self._send_all(state, to, {"kind": "close", "view": view, "reason": reason[:200]})
                case act.SendCommit(leader, view, contribution, promise, roster, result):
                    meta: dict[str, Value] = {
                        "kind": "commit",
                        "view": view,
                        "contribution": packed_or_none(contribution),
                        "promise": value_or_none(promise),
                        "roster": packed_or_none(roster),
                        "result": packed_or_none(result),
                    }
                    self._send_all(state, (leader,), meta)
                case act.AskPromise(to, view):
                    for peer in to:
                        self._ask_outside(state, peer, instruction, (peer, "promise", view))
                case act.SendBallot(to, proposal):
                    inside = [peer for peer in to if peer in self._stage.chain.members]
                    if inside:
                        self._send_all(state, inside, {"kind": "ballot", "proposal": proposal.packed})
                    for peer in to:
                        if peer not in inside:
                            self._ask_outside(state, peer, instruction, (peer, proposal.phase, proposal.view))
                case act.SendVote(leader, proposal, vote):
                    asked: dict[str, Value] = {
                        "kind": "vote",
                        "view": proposal.view,
                        "phase": proposal.phase,
                        "value": proposal.value,
                        "vote": vote.to_value(),
                    }
                    self._send_all(state, (leader,), asked)
                case act.SendRoster(to, roster):
                    state.notify()
                    self._send_all(state, to, {"kind": "roster", "roster": roster.packed})
                case act.SendPart(reducer, part, view):
                    self.parts.send_part(state, reducer, part, view)
                case act.AggregatePart() | act.CombineShares():
                    to_aggregate.append(instruction)
                case act.AnnounceShare(leader, part, cohort):
                    self._send_all(state, (leader,), {"kind": "made", "part": part, "cohort": cohort})
                case act.SendReduced(to, reduced):
                    self.parts.send_reduced(state, to, reduced)
                case act.SendResult(to, result):
                    state.notify()
                    inside = [peer for peer in to if peer in self._stage.chain.members]
                    self._send_all(state, inside, {"kind": "result", "result": result.packed})
                case act.FetchPart():
                    self.parts.fetch(state, instruction)
                case act.Accuse(one, other):
                    self._stage.on_equivocation(one, other)
                case act.Finish(result):
                    self._stage.spawn(self._stage.finish(state, result))
        if to_aggregate:
            assert state.round is not None
            assert state.round.roster is not None
            self._stage.spawn(self.parts.aggregate(state, state.round.roster, to_aggregate))

    def _instructed(self, state: StepState, instructions: Iterable[Instruction]) -> Iterable[Instruction]:
        """What this peer does where the round says so."""
        stage = self._stage
        for instruction in instructions:
            assert state.round is not None
            yield from stage.adversary.instructed(state.round.facts, instruction, stage.identity)

    def _send_all(self, state: StepState, to: Iterable[PeerId], meta: dict[str, Value]) -> None:
        for peer in to:
            self._stage.spawn(self.send(state, peer, meta))

    async def send(
        self, state: StepState, peer: PeerId, meta: dict[str, Value], bodies: tuple[Bytes, ...] = ()
    ) -> None:
        """Bring a member a message of the open step, however often it takes, or find it gone."""
        deadlines = self._stage.settings.deadlines
        what = f"stage {self._stage.chain.stage} step {state.step}: {meta.get('kind')!s} to {peer[-6:]}"
        await asyncio.shield(state.logged)
        while self._stage.open_step(state.step) is state:
            try:
                reply = await self._stage.transport.call(
                    peer,
                    ROUND,
                    Message({**meta, "stage": self._stage.chain.stage, "step": state.step}, more=bodies),
                    timeout_s=max(deadlines.call_s, deadlines.round_phase_s),
                    max_body_bytes=0,
                )
            except RemoteError as error:
                log.warning("%s: refused: %s", what, error)
                if await self._stage.is_gone(peer):
                    self._stage.unreachable(state, peer)
            except UnreachableError as error:
                log.info("%s: %s", what, error)
                if not await self._stage.is_gone(peer):
                    continue
                self._stage.unreachable(state, peer)
            except TransientError as error:  # alive, but not there yet: the round's own deadlines end this
                log.debug("%s: %s", what, error)
                await asyncio.sleep(RESEND_S)
                continue
            else:
                state.sent_bytes += sum(map(len, bodies))
                if reply.meta.get("status") == "over":
                    self._stage.on_behind(peer)
            return

    def _check_neighbours(self, proposal: Proposal) -> None:
        """A leader must not make up voters: whom it names as a neighbour is known here, or not yet voted for."""
        if proposal.roster is not None:
            known = {*self._stage.neighbours(), *self._stage.chain.basis.neighbours}
            strange = [peer for peer in proposal.roster.neighbours if peer not in known]
            if strange:
                raise TransientError(f"{strange[0][-6:]} is not known here as a neighbour")

    def _ask_outside(
        self, state: StepState, peer: PeerId, what: act.AskPromise | act.SendBallot, key: tuple[PeerId, str, int]
    ) -> None:
        if key not in state.asking:
            state.asking.add(key)
            self._stage.spawn(self._until_answered(state, peer, what, key))

    async def _until_answered(
        self, state: StepState, peer: PeerId, what: act.AskPromise | act.SendBallot, key: tuple[PeerId, str, int]
    ) -> None:
        """Ask a voter outside the stage until it answers or nobody wants to know any more."""
        machine, facts = state.round, state.facts
        assert machine is not None
        assert facts is not None
        await asyncio.shield(state.logged)
        basis, call_s = self._stage.chain.basis, self._stage.settings.deadlines.call_s
        try:
            while self._stage.open_step(state.step) is state and machine.wants(what):
                try:
                    answer = await ask_witness(self._stage.transport, peer, facts, basis, what, timeout_s=call_s)
                except TransientError as error:
                    log.debug("stage %d step %d: voter %s: %s", facts.stage, state.step, peer[-6:], error)
                    await asyncio.sleep(RESEND_S)
                    continue
                now = time.monotonic()
                if isinstance(answer, Vote) and isinstance(what, act.SendBallot):
                    asked = what.proposal
                    out = machine.on_vote(peer, asked.view, asked.phase, asked.value, answer, now=now)
                    self.carry_out(state, out)
                elif isinstance(answer, tuple):
                    self.carry_out(state, machine.on_promise(peer, *answer, now=now))
                return
        finally:
            state.asking.discard(key)

    async def _contribute(self, state: StepState) -> None:
        stage, step = self._stage, state.step
        replica, chain = stage.replica, stage.chain
        assert state.round is not None
        accumulation = await stage.compute.run(Urgency.ROUND, lambda: replica.close(step))
        state.accumulation = accumulation
        if not stage.signing_log.may_sign(chain.lineage, step):
            log.warning("step %d: this peer may have contributed before it was restarted, and does not again", step)
            self.carry_out(state, state.round.contributed(None, now=time.monotonic()))
            return
        seeds = part_seeds(stage.run_id, chain.stage, chain.version, stage.me, num_parts=replica.num_parts)
        said = None if stage.adversary is HONEST else partial(stage.adversary.mean, step)
        parts, digests = await stage.exact.run(
            Urgency.ROUND, lambda: encode_contribution(replica, accumulation, seeds, said)
        )
        work = tuple(accumulation.work[key] for key in sorted(accumulation.work)) if parts else ()
        rates = self.parts.rates.of(chain.members, me=stage.me)
        unsigned = Contribution(stage.run_id, chain.stage, step, chain.name, stage.me, work, tuple(digests), rates)
        unsigned = replace(unsigned, charges=stage.charges()[:MAX_CHARGES] if work else ())
        await asyncio.to_thread(stage.signing_log.record, chain.lineage, step, unsigned.signed_bytes())
        state.own_parts = parts
        stage.on_contributed(step, parts)
        for index, part in enumerate(parts):
            state.received[index, self._stage.me] = part
        contribution = replace(unsigned, signature=self._stage.identity.sign(unsigned.signed_bytes()))
        self.carry_out(state, state.round.contributed(contribution, now=time.monotonic()))
