"""This is where a step's averaging round is carried out on this peer: messages, votes, encoding, aggregation.

`swarm.core.averaging_round` decides; this does what it says. Heavy work runs on the exact thread. Handlers and tasks
all run on one event loop, so decisions never interleave.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from peer.compute import Urgency
from peer.outbox import Outbox
from peer.receive_rates import ReceiveRates
from peer.replica import NewVersion
from peer.result_decoder import ResultDecoder
from peer.round_work import encode_contribution, reduce_part
from peer.step_state import Bytes, StepState
from swarm.averaging.encoded_mean import check_encoded
from swarm.core import averaging_round as act
from swarm.core.averaging_round import AveragingRound, Instruction
from swarm.core.canonical import Value, digest
from swarm.core.contribution import Contribution, ReducedPart, Result, Roster
from swarm.core.errors import RemoteError, TransientError, UnreachableError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId, Step
from swarm.core.round_ballots import Proposal
from swarm.core.voting import Promise, Vote
from swarm.network.loop import happened
from swarm.network.transport import Message
from swarm.witness_service import ask_witness

if TYPE_CHECKING:
    from peer.rounds import StageRounds

log = logging.getLogger(__name__)

ROUND, PART_BYTES = "round", "part_bytes"
RESEND_S = 0.2


class RoundDriver:
    """What the stage's rounds send, receive and compute here."""

    def __init__(self, stage: "StageRounds") -> None:
        self._stage = stage
        self._outbox = Outbox(stage.spawn)
        self._rates = ReceiveRates()
        self._counted: tuple[Roster, dict[PeerId, int]] | None = None

    def serve(self) -> None:
        """Begin to answer."""
        replica, transport = self._stage.replica, self._stage.transport
        part_bytes = max(replica.codec.encoded_bytes(part.stop - part.start) for part in replica.parts())
        transport.serve(ROUND, self._on_round, max_body_bytes=part_bytes)
        transport.serve(PART_BYTES, self._on_part_bytes, max_body_bytes=0)

    async def _on_round(self, sender: PeerId, request: Message) -> Message:
        fields = Fields("round message", request.meta)
        kind, step = fields.text("kind"), Step(fields.integer("step"))
        if int(step) < self._stage.chain.version:
            return Message({"status": "over"})
        state = await self._stage.step_state(step, with_round=True)
        machine = state.round
        assert machine is not None
        now = time.monotonic()
        if kind == "close":
            out = machine.on_close(sender, fields.integer("view", high=1 << 20), now=now)
        elif kind == "commit":
            view = fields.integer("view", high=1 << 20)
            contribution = Contribution.from_value(fields.message("contribution"))
            roster = Roster.from_value(fields.message("roster")) if fields.optional("roster") else None
            result = Result.from_value(fields.message("result")) if fields.optional("result") else None
            promise = Promise.from_value(fields.message("promise")) if fields.optional("promise") else None
            out = machine.on_commit(sender, view, contribution, promise, roster, result, now=now)
        elif kind == "ballot":
            proposal = Proposal.from_value(fields.message("proposal"))
            self._check_neighbours(proposal)
            out = machine.on_ballot(sender, proposal, now=now)
        elif kind == "vote":
            view, phase, value = (
                fields.integer("view", high=1 << 20),
                fields.text("phase"),
                fields.octets("value", length=32),
            )
            out = machine.on_vote(sender, view, phase, value, Vote.from_value(fields.message("vote")), now=now)
        elif kind == "roster":
            out = machine.on_roster(sender, Roster.from_value(fields.message("roster")), now=now)
            state.notify()
        elif kind == "part":
            part, view = fields.integer("part", high=1 << 20), fields.integer("view", high=1 << 20)
            out = await self._receive_part(state, machine, sender, part, view, request.body)
        elif kind == "reduced":
            reduced = ReducedPart.from_value(fields.message("reduced"))
            out = await self._receive_reduced(state, machine, sender, reduced, request.body)
        elif kind == "result":
            out = machine.on_result(Result.from_value(fields.message("result")), now=now)
            state.notify()
        else:
            raise RemoteError("protocol", f"round message of kind {kind[:20]!r}", sender)
        self.carry_out(state, out)
        return Message({"status": "ok"})

    async def _receive_part(
        self,
        state: StepState,
        machine: AveragingRound,
        sender: PeerId,
        part: int,
        view: int,
        body: Bytes,
    ) -> list[Instruction]:
        await self._roster_known(state, machine, view)
        expected = machine.expected_digest(part, sender)
        if await self._stage.exact.run(Urgency.ROUND, lambda: hashlib.sha256(body).digest()) != expected:
            raise RemoteError("digest", f"part {part} of {sender} differs from its commitment", sender)
        self._rates.arrived(sender, len(body), now=time.monotonic())
        where = self._stage.replica.parts()[part]
        codec, size = self._stage.replica.contribution_codec, where.stop - where.start
        try:
            await self._stage.exact.run(Urgency.ROUND, lambda: check_encoded(codec, body, num_values=size))
        except RemoteError as error:
            log.warning("stage %d part %d of %s: %s", self._stage.chain.stage, part, sender[-6:], error)
            self.carry_out(state, machine.on_bad_part(sender, part, str(error), now=time.monotonic()))
            raise RemoteError("malformed", f"part {part}: {error}", sender) from error
        state.received[part, sender] = body
        return machine.on_part(sender, part, now=time.monotonic())

    async def _receive_reduced(
        self,
        state: StepState,
        machine: AveragingRound,
        sender: PeerId,
        reduced: ReducedPart,
        body: Bytes,
    ) -> list[Instruction]:
        await self._roster_known(state, machine, 0)
        machine.facts.check_member(sender)
        if await self._take_reduced(state, reduced.part, body) != reduced.digest:
            raise RemoteError("digest", f"reduced part {reduced.part} of {sender} differs from its digest", sender)
        state.reduced[reduced.part, reduced.digest] = body
        return machine.on_reduced(sender, reduced, now=time.monotonic())

    async def _take_reduced(self, state: StepState, part: int, body: Bytes) -> bytes:
        """The digest of a reduced part, which is decoded while it is in cache."""
        if self._stage.open_step(state.step) is not state:
            raise TransientError(f"step {state.step} is over")

        def take() -> bytes:
            found = hashlib.sha256(body).digest()
            if part < self._stage.replica.num_parts:
                self._decoder(state).take(part, found, body)
            return found

        return await self._stage.exact.run(Urgency.ROUND, take)

    def _decoder(self, state: StepState) -> ResultDecoder:
        """(exact)"""
        if state.decoder is None:
            state.decoder = self._stage.replica.result_decoder()
        return state.decoder

    async def next_version(self, state: StepState, result: Result, bodies: list[Bytes], name: bytes) -> NewVersion:
        """The version that this certified result makes."""
        self._rates.end_round()
        replica = self._stage.replica

        def make() -> NewVersion:
            found = self._decoder(state).gradient(result.parts, bodies)
            gradient, norm = found if found is not None else (None, None)
            return replica.next_version(gradient, name, gradient_norm=norm)

        return await self._stage.exact.run(Urgency.ROUND, make)

    async def _roster_known(self, state: StepState, machine: AveragingRound, view: int) -> None:
        """Wait for a roster of the view or a later one; what was sent under it may be ahead of it."""
        give_up_at = time.monotonic() + self._stage.settings.deadlines.call_s / 2
        while machine.result is None and (machine.roster is None or machine.roster.view < view):
            left_s = give_up_at - time.monotonic()
            if left_s <= 0:
                raise TransientError(f"no roster of step {state.step} here yet")
            await happened(state.changed, within_s=left_s)

    def carry_out(self, state: StepState, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
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
                        "contribution": contribution.to_value(),
                        "promise": promise.to_value() if promise is not None else None,
                        "roster": roster.to_value() if roster is not None else None,
                        "result": result.to_value() if result is not None else None,
                    }
                    self._send_all(state, (leader,), meta)
                case act.AskPromise(to, view):
                    for peer in to:
                        self._ask_outside(state, peer, instruction, (peer, "promise", view))
                case act.SendBallot(to, proposal):
                    inside = [peer for peer in to if peer in self._stage.chain.members]
                    if inside:
                        self._send_all(state, inside, {"kind": "ballot", "proposal": proposal.to_value()})
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
                    self._send_all(state, to, {"kind": "roster", "roster": roster.to_value()})
                case act.SendPart(reducer, part, view):
                    own: dict[str, Value] = {"kind": "part", "part": part, "view": view}
                    self._send_bulk(state, (reducer,), own, state.own_parts[part])
                case act.AggregatePart():
                    assert state.round is not None
                    assert state.round.roster is not None
                    self._stage.spawn(self._aggregate(state, state.round.roster, instruction))
                case act.SendReduced(to, reduced):
                    body = state.reduced[reduced.part, reduced.digest]
                    self._send_bulk(state, to, {"kind": "reduced", "reduced": reduced.to_value()}, body)
                case act.SendResult(to, result):
                    state.notify()
                    inside = [peer for peer in to if peer in self._stage.chain.members]
                    self._send_all(state, inside, {"kind": "result", "result": result.to_value()})
                case act.FetchPart(part, wanted, holders):
                    if (part, wanted) not in state.fetching:
                        state.fetching.add((part, wanted))
                        self._stage.spawn(self._fetch(state, part, wanted, holders))
                case act.Finish(result):
                    self._stage.spawn(self._stage.finish(state, result))

    def _send_all(self, state: StepState, to: Iterable[PeerId], meta: dict[str, Value]) -> None:
        for peer in to:
            self._stage.spawn(self._send(state, peer, {**meta, "step": state.step}, b""))

    def _send_bulk(self, state: StepState, to: Iterable[PeerId], meta: dict[str, Value], body: Bytes) -> None:
        for peer in to:
            self._outbox.put(peer, partial(self._send, state, peer, {**meta, "step": state.step}, body))

    async def _send(self, state: StepState, peer: PeerId, meta: dict[str, Value], body: Bytes) -> None:
        deadlines = self._stage.settings.deadlines
        what = f"stage {self._stage.chain.stage} step {state.step}: {meta.get('kind')!s} to {peer[-6:]}"
        await asyncio.shield(state.logged)
        while self._stage.open_step(state.step) is state:
            try:
                reply = await self._stage.transport.call(
                    peer,
                    ROUND,
                    Message(meta, body),
                    timeout_s=max(deadlines.call_s, deadlines.round_phase_s),
                    max_body_bytes=0,
                )
            except RemoteError as error:
                log.warning("%s: refused: %s", what, error)
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
                state.sent_bytes += len(body)
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
        if not stage.signing_log.may_sign(chain.lineage, step):
            log.warning("step %d: this peer may have signed before it was restarted, and stays silent", step)
            return
        seed_facts: list[Value] = [stage.run_id, chain.stage, chain.version, stage.me]
        parts, digests = await stage.exact.run(
            Urgency.ROUND, lambda: encode_contribution(replica, accumulation, seed_facts)
        )
        work = tuple(accumulation.work[key] for key in sorted(accumulation.work)) if parts else ()
        rates = self._rates.of(chain.members, me=stage.me)
        unsigned = Contribution(stage.run_id, chain.stage, step, chain.name, stage.me, work, tuple(digests), rates)
        await asyncio.to_thread(stage.signing_log.record, chain.lineage, step, unsigned.signed_bytes())
        state.own_parts = parts
        for index, part in enumerate(parts):
            state.received[index, self._stage.me] = part
        contribution = replace(unsigned, signature=self._stage.identity.sign(unsigned.signed_bytes()))
        self.carry_out(state, state.round.contributed(contribution, now=time.monotonic()))

    async def _aggregate(self, state: StepState, roster: Roster, asked: act.AggregatePart) -> None:
        part, contributors = asked.part, asked.contributors
        machine, replica, chain = state.round, self._stage.replica, self._stage.chain
        assert machine is not None
        if self._counted is None or self._counted[0] is not roster:
            self._counted = (roster, chain.weights_of(Result(roster, (), self._stage.me)))
        counted = self._counted[1]
        bodies = [(counted[peer], state.received[part, peer]) for peer in contributors if counted[peer] > 0]
        cap, rule = replica.norm_cap(), self._stage.settings.averaging.rule
        seed = digest("reduced-seed", [self._stage.run_id, chain.stage, chain.version, part])

        def reduce() -> tuple[Bytes, bytes]:
            encoded, found = reduce_part(replica, part, bodies, rule=rule, norm_cap=cap, seed=seed)
            self._decoder(state).take(part, found, encoded)
            return encoded, found

        encoded, encoded_digest = await self._stage.exact.run(Urgency.ROUND, reduce)
        state.reduced[part, encoded_digest] = encoded
        reduced = ReducedPart(part, encoded_digest, contributors, asked.excluded)
        self.carry_out(state, machine.aggregated(reduced, now=time.monotonic()))

    async def _fetch(self, state: StepState, part: int, wanted: bytes, holders: tuple[PeerId, ...]) -> None:
        where = self._stage.replica.parts()[part]
        size = self._stage.replica.codec.encoded_bytes(where.stop - where.start)
        meta: dict[str, Value] = {"step": state.step, "part": part, "digest": wanted}
        call_s = self._stage.settings.deadlines.call_s
        for holder in holders:
            try:
                reply = await self._stage.transport.call(
                    holder, PART_BYTES, Message(meta), timeout_s=call_s, max_body_bytes=size
                )
            except (TransientError, RemoteError) as error:
                log.info("step %d part %d from %s: %s", state.step, part, holder[-6:], error)
                continue
            if await self._take_reduced(state, part, reply.body) == wanted:
                state.reduced[part, wanted] = reply.body
                assert state.round is not None
                self.carry_out(state, state.round.part_fetched(part, wanted, now=time.monotonic()))
                return
        state.fetching.discard((part, wanted))
        log.warning("step %d: nobody has part %d of the result", state.step, part)
        for holder in holders[:1]:
            self._stage.on_behind(holder)

    async def _on_part_bytes(self, sender: PeerId, request: Message) -> Message:
        fields = Fields("part request", request.meta)
        step, part = fields.integer("step"), fields.integer("part", high=1 << 20)
        wanted = fields.octets("digest", length=32)
        state = self._stage.open_step(Step(step))
        if state is not None and (part, wanted) in state.reduced:
            return Message({}, state.reduced[part, wanted])
        held = self._stage.results.get(step)
        if held is not None and part < len(held[1]) and held[0].parts[part].digest == wanted:
            return Message({}, held[1][part])
        raise TransientError(f"part {part} of step {step} is not here")
