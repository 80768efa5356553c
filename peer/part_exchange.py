"""This is where the parts of a round move: contributions to their reducers, reduced parts to everyone.

Parts travel several to a message; all of a message are hashed, checked and decoded in one job of the exact thread. A
reduced part goes with the signature of whoever reduced it, whoever hands it on: nobody votes for a part without.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import accumulate, repeat
from typing import TYPE_CHECKING, Protocol, TypeAlias

from peer.compute import Urgency
from peer.fragments import Fragment
from peer.outbox import MESSAGE_BYTES, Outbox, Parcel
from peer.receive_rates import ReceiveRates
from peer.reductions import ReductionStore, SignedPart
from peer.replica import NewVersion
from peer.round_work import reduce_part
from peer.step_state import Bytes, StepState
from swarm.averaging.encoded import VectorCodec
from swarm.averaging.encoded_mean import check_encoded
from swarm.averaging.reduce import read_and_written
from swarm.averaging.result_decoder import ResultDecoder, squares_of
from swarm.averaging.seeds import reduced_seed
from swarm.bulk_digest import bulk_digest
from swarm.core import averaging_round as act
from swarm.core.averaging_round import AveragingRound, Instruction
from swarm.core.canonical import Value, pack
from swarm.core.contribution import EMPTY_DIGEST, ReducedPart, Result, Roster
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields, integer_item, value_or_none
from swarm.core.ids import PeerId, Step
from swarm.network.loop import happened
from swarm.network.transport import Message
from verification.kinds.protocol_violation import ProtocolViolation, ViolationError
from verification.reduction import Reduction

if TYPE_CHECKING:
    from peer.rounds import StageRounds

log = logging.getLogger(__name__)

PART_BYTES = "part_bytes"
MAX_PARCELS = 1 << 12

Taken: TypeAlias = dict[ReducedPart, Reduction]
"""What was signed for a part that came, and for the shares in it."""


class Driver(Protocol):
    """Carries out what a round says, and brings members its messages."""

    def carry_out(self, state: StepState, instructions: Sequence[Instruction]) -> None: ...

    async def send(
        self, state: StepState, peer: PeerId, meta: dict[str, Value], bodies: tuple[Bytes, ...] = ()
    ) -> None: ...


class PartExchange:
    """What the stage's rounds send, receive and compute of parts on this peer."""

    def __init__(self, stage: "StageRounds", driver: Driver) -> None:
        self._stage = stage
        self._driver = driver
        self._outbox = Outbox(stage.spawn, self._send)
        self._counted: tuple[Roster, dict[PeerId, int]] | None = None
        self.rates = ReceiveRates()
        self.reductions = ReductionStore(stage.settings.audits.retained_versions)

    @cached_property
    def max_message_bytes(self) -> int:
        return max(MESSAGE_BYTES, *(self._encoded_bytes(part) for part in range(self._stage.replica.num_parts)))

    def serve(self) -> None:
        """Begin to answer who asks for parts."""
        self._stage.transport.serve(PART_BYTES, self._on_part_bytes, max_body_bytes=0)

    # -- out ----------------------------------------------------------------------------------------------

    def send_part(self, state: StepState, reducer: PeerId, part: int, view: int) -> None:
        """The own contribution's part."""
        head: dict[str, Value] = {"part": part, "view": view}
        self._outbox.put(reducer, Parcel(state, "contributed", head, state.own_parts[part]))

    def send_reduced(self, state: StepState, to: Sequence[PeerId], reduced: ReducedPart) -> None:
        """A part or share that was aggregated here, or that is handed on."""
        assert state.round is not None
        roster = state.round.roster_of(reduced)
        assert roster is not None, f"part {reduced.part} of step {state.step} is of no roster"
        head = SignedPart.of(reduced, roster, state.reductions).to_value()
        parcel = Parcel(state, "reduced", head, state.reduced[reduced.part, reduced.digest])
        for place, peer in enumerate(to):
            self._outbox.put(peer, self._said_to(place, parcel, reduced, roster))

    def _said_to(self, place: int, parcel: Parcel, reduced: ReducedPart, roster: Roster) -> Parcel:
        """The parcel; from an adversary perhaps another, for the member at this place."""
        stage, made = self._stage, parcel.state.reductions[reduced]
        if made.reducer != stage.me or reduced.cohort is not None:
            return parcel
        where, codec, step = stage.replica.parts()[reduced.part], stage.replica.codec, parcel.state.step
        body = stage.adversary.reduced_for(step, place, parcel.body, codec, num_values=where.stop - where.start)
        if body is parcel.body:
            return parcel
        squares = squares_of(codec, body, where.stop - where.start)
        other = replace(reduced, digest=bulk_digest(body), squares=squares)
        signed = replace(made, digest=other.digest, squares=squares).signed_by(stage.identity)
        head = SignedPart.of(other, roster, {**parcel.state.reductions, other: signed}).to_value()
        return replace(parcel, head=head, body=body)

    async def _send(self, peer: PeerId, parcels: list[Parcel]) -> None:
        meta: dict[str, Value] = {
            "kind": "parts",
            "of": parcels[0].kind,
            "heads": [parcel.head for parcel in parcels],
            "sizes": [len(parcel.body) for parcel in parcels],
            "fragment": value_or_none(parcels[0].fragment),
        }
        await self._driver.send(parcels[0].state, peer, meta, tuple(parcel.body for parcel in parcels))

    # -- in -----------------------------------------------------------------------------------------------

    async def receive(
        self, state: StepState, machine: AveragingRound, sender: PeerId, fields: Fields, body: memoryview
    ) -> None:
        """Parts that came in one message, or a fragment of one. Raises RemoteError if one is no good, when the others
        are taken."""
        kind = fields.text("of")
        heads = fields.items("heads", lambda head: head, max_items=MAX_PARCELS)
        bodies = _cut(body, fields.items("sizes", integer_item, max_items=MAX_PARCELS), sender)
        fragment = fields.maybe("fragment", Fragment.from_value)
        if len(heads) != len(bodies) or (fragment is not None and len(heads) != 1):
            of_what = "a fragment of " if fragment is not None else ""
            raise RemoteError("malformed", f"{of_what}{len(heads)} heads of {len(bodies)} parts", sender)
        if fragment is None:
            await self._receive_whole(state, machine, sender, kind, heads, bodies)
            return
        machine.facts.check_member(sender)
        part = bulk_digest(pack([kind, heads[0]]))
        whole = state.fragments.put(sender, part, fragment, bodies[0], max_bytes=self.max_message_bytes)
        if whole is None:
            return
        try:
            await self._receive_whole(state, machine, sender, kind, heads, [whole])
        except RemoteError:
            state.fragments.drop(sender, part, fragment)
            raise
        state.fragments.drop(sender, part, fragment)

    async def _receive_whole(
        self,
        state: StepState,
        machine: AveragingRound,
        sender: PeerId,
        kind: str,
        said: Sequence[Value],
        bodies: list[memoryview],
    ) -> None:
        heads = [Fields("head of a part", head) for head in said]
        if kind == "contributed":
            parts = [(head.integer("part", high=1 << 20), head.integer("view", high=1 << 20)) for head in heads]
            await self._receive_contributed(state, machine, sender, parts, bodies)
        elif kind == "reduced":
            await self._receive_reduced(state, machine, sender, list(map(SignedPart.from_fields, heads)), bodies)
        else:
            raise RemoteError("protocol", f"parts of kind {kind[:20]!r}", sender)

    async def _receive_contributed(
        self,
        state: StepState,
        machine: AveragingRound,
        sender: PeerId,
        parts: list[tuple[int, int]],
        bodies: list[memoryview],
    ) -> None:
        view = max((view for _, view in parts), default=0)
        await self._roster_known(state, machine, lambda: machine.roster is not None and machine.roster.view >= view)
        if machine.result is None and (machine.roster is None or machine.roster.view < view):
            raise TransientError(f"no roster of step {state.step} here yet")
        expected = [machine.expected_digest(part, sender) for part, _ in parts]
        wrong = await self._stage.exact.run(
            Urgency.ROUND,
            lambda: [
                self._what_is_wrong(sender, part, body, wanted)
                for (part, _), body, wanted in zip(parts, bodies, expected, strict=True)
            ],
        )
        now = time.monotonic()
        self.rates.arrived(sender, sum(map(len, bodies)), now=now)

        def came(part: int, body: memoryview, error: RemoteError | None) -> list[Instruction]:
            if error is None:
                state.received[part, sender] = body
                return machine.on_part(sender, part, now=now)
            log.warning("stage %d part %d of %s: %s", self._stage.chain.stage, part, sender[-6:], error)
            contribution = machine.roster.contribution_of(sender) if machine.roster is not None else None
            if error.kind != "digest" and contribution is not None:
                self._stage.on_violation(ProtocolViolation(message=contribution, part=part, body=body))
            self._driver.carry_out(state, machine.on_bad_part(sender, part, str(error), now=now))
            raise RemoteError(error.kind, f"part {part}: {error}", sender)

        numbers = [part for part, _ in parts]
        self._carry_out_each(state, map(partial, repeat(came), numbers, bodies, wrong))

    def _what_is_wrong(self, sender: PeerId, part: int, body: memoryview, expected: bytes) -> RemoteError | None:
        """(exact) With a contribution's part."""
        if bulk_digest(body) != expected:
            return RemoteError("digest", "its bytes differ from its commitment")
        where, codec = self._stage.replica.parts()[part], self._stage.replica.contribution_codec
        try:
            check_encoded(codec, body, num_values=where.stop - where.start)
        except RemoteError as error:
            return error
        self._stage.screening.check_part(sender, part, codec, body, num_values=where.stop - where.start)
        return None

    async def _receive_reduced(
        self,
        state: StepState,
        machine: AveragingRound,
        sender: PeerId,
        said: list[SignedPart],
        bodies: list[memoryview],
    ) -> None:
        machine.facts.check_member(sender)
        await self._roster_known(state, machine, lambda: all(machine.roster_of(one.reduced) for one in said))
        if machine.result is None and machine.roster is None:
            raise TransientError(f"no roster of step {state.step} here yet")
        rosters = [machine.roster_of(one.reduced) for one in said]
        taken = await self._take_signed(state, said, rosters, bodies)

        def came(reduced: ReducedPart, body: memoryview, found: Taken | RemoteError) -> list[Instruction]:
            if isinstance(found, RemoteError):
                self._accuse_if_proved(found)
                raise RemoteError(found.kind, f"reduced part {reduced.part} from {sender}: {found}", sender)
            out = machine.on_reduced(sender, reduced, now=time.monotonic())
            state.reduced[reduced.part, reduced.digest] = body
            self._keep_words(state, found)
            return out

        self._carry_out_each(state, map(partial, repeat(came), [one.reduced for one in said], bodies, taken))

    def _carry_out_each(self, state: StepState, stimuli: Iterable[Callable[[], list[Instruction]]]) -> None:
        """What all of them lead to, together. Raises the first RemoteError once the others have been heard."""
        out: list[Instruction] = []
        failure: RemoteError | None = None
        for stimulus in stimuli:
            try:
                out += stimulus()
            except RemoteError as error:
                failure = failure or error
        self._driver.carry_out(state, out)
        if failure is not None:
            raise failure

    async def _take_signed(
        self,
        state: StepState,
        said: Sequence[SignedPart],
        rosters: Sequence[Roster | None],
        bodies: Sequence[Bytes],
    ) -> list[Taken | RemoteError]:
        """What was signed for each part, or what is wrong with it; each good one is decoded while it is in cache."""
        self._check_open(state)
        weights = [self._weights(roster) if roster is not None else {} for roster in rosters]
        cap = self._stage.replica.norm_cap()

        def take() -> list[Taken | RemoteError]:
            found: list[Taken | RemoteError] = []
            for one, roster, counted, body in zip(said, rosters, weights, bodies, strict=True):
                try:
                    made = one.checked(roster, counted, body, norm_cap=cap)
                    squares = self._read(state, one.reduced, body)
                    found.append(self._violation(made[one.reduced], squares, body) or made)
                except RemoteError as error:
                    found.append(error)
            return found

        return await self._stage.exact.run(Urgency.ROUND, take)

    def _read(self, state: StepState, reduced: ReducedPart, body: Bytes) -> float | RemoteError:
        """(exact) The sum of squares of a part, which is decoded; 0 of a cohort's share; or what is wrong with it."""
        if reduced.cohort is None:
            return self._decoder(state).take(reduced.part, reduced.digest, body)
        where, codec = self._stage.replica.parts()[reduced.part], self._share_codec
        try:
            if not reduced.is_empty:
                check_encoded(codec, body, num_values=where.stop - where.start)
        except RemoteError as error:
            return error
        return 0.0

    @property
    def _share_codec(self) -> VectorCodec:
        return read_and_written("cohort", self._stage.settings.codecs.averaging)[1]

    def _violation(self, made: Reduction, squares: float | RemoteError, body: Bytes) -> ViolationError | None:
        """(exact) What is wrong with a part that its reducer signed, seen from its bytes alone."""
        if squares == made.squares:
            return None
        reason = f"squares sum to {squares}, not {made.squares}" if isinstance(squares, float) else str(squares)
        error = RemoteError("malformed", f"part {made.part}: {reason}", made.reducer)
        return ViolationError(ProtocolViolation(message=made, part=0, body=body), error)

    def _accuse_if_proved(self, error: RemoteError) -> None:
        if isinstance(error, ViolationError):
            self._stage.on_violation(error.case)

    def _keep_words(self, state: StepState, found: Taken) -> None:
        """What reducers signed: for the auditors, and in case one of them has signed something else."""
        for reduced, made in found.items():
            for known, held in state.reductions.items():
                if known.part == reduced.part and held.reducer == made.reducer and held.digest != made.digest:
                    self._stage.on_equivocation(held, made)
            state.reductions.setdefault(reduced, made)

    async def _take_certified(self, state: StepState, part: int, wanted: bytes, body: Bytes) -> bool:
        """Whether these are the bytes of the outcome's part, which are decoded, whoever reduced it."""
        self._check_open(state)

        def take() -> bool:
            if bulk_digest(body) != wanted:
                return False
            self._decoder(state).take(part, wanted, body)
            return True

        return await self._stage.exact.run(Urgency.ROUND, take)

    def _check_open(self, state: StepState) -> None:
        stage = self._stage
        if stage.open_step(state.step) is not state or int(stage.chain.version) != int(state.step):
            raise TransientError(f"step {state.step} is over")

    async def _roster_known(self, state: StepState, machine: AveragingRound, is_known: Callable[[], bool]) -> None:
        """Wait for a roster for some time: what was sent under it may be ahead of it."""
        give_up_at = time.monotonic() + self._stage.settings.deadlines.call_s / 2
        while machine.result is None and not is_known() and (left_s := give_up_at - time.monotonic()) > 0:
            await happened(state.changed, within_s=left_s)

    # -- computed -----------------------------------------------------------------------------------------

    async def aggregate(
        self, state: StepState, roster: Roster, asked: list[act.AggregatePart | act.CombineShares]
    ) -> None:
        """Aggregate and encode these parts, of which this peer is the roster's reducer."""
        stage, replica, chain, machine = self._stage, self._stage.replica, self._stage.chain, state.round
        assert machine is not None
        self._check_open(state)  # of a step that is over, it would be signed by the wrong seed
        counted = self._weights(roster)
        wanted = [_wanted(one) for one in asked]
        bodies = [self._inputs(state, roster, one) for one in wanted]
        cap, rule = replica.norm_cap(), stage.settings.averaging.rule

        def reduce() -> list[tuple[ReducedPart, Reduction, Bytes]]:
            made: list[tuple[ReducedPart, Reduction, Bytes]] = []
            for one, held in zip(wanted, bodies, strict=True):
                reduced, encoded = one, memoryview(b"")
                if one.contributors:
                    seed = reduced_seed(stage.run_id, chain.stage, chain.version, one.part)
                    right = reduce_part(replica, one.part, held, rule=rule, norm_cap=cap, seed=seed, level=one.level)
                    codec = self._share_codec if one.cohort is not None else replica.codec
                    where = replica.parts()[one.part]
                    encoded, found = stage.adversary.reduced(
                        state.step, right, codec, num_values=where.stop - where.start, seed=seed
                    )
                    reduced = replace(one, digest=found)
                    squares = self._read(state, reduced, encoded)
                    reduced = replace(reduced, squares=squares if isinstance(squares, float) else 0.0)
                reduction = Reduction.of(roster, reduced, counted, norm_cap=cap, reducer=stage.me)
                made.append((reduced, reduction.signed_by(stage.identity), encoded))
            return made

        out: list[Instruction] = []
        made = await stage.exact.run(Urgency.ROUND, reduce)
        for reduced, reduction, encoded in made:
            state.reduced[reduced.part, reduced.digest] = encoded
            state.reductions[reduced] = reduction
            out += machine.aggregated(reduced, now=time.monotonic())
        self._driver.carry_out(state, out)

    def _inputs(self, state: StepState, roster: Roster, one: ReducedPart) -> list[tuple[int, Bytes]]:
        """Weight and bytes of what goes into a part or a share."""
        counted = self._weights(roster)
        if one.shares:
            heard = [(sum(counted[peer] for peer in share.contributors), share) for share in one.shares_of(roster)]
            return [(tokens, state.reduced[one.part, share.digest]) for tokens, share in heard if tokens > 0]
        return [(counted[peer], state.received[one.part, peer]) for peer in one.contributors if counted[peer] > 0]

    def _weights(self, roster: Roster) -> Mapping[PeerId, int]:
        """Of the contributions to the present step."""
        if self._counted is None or self._counted[0] is not roster:
            self._counted = (roster, self._stage.chain.weights_of(Result(roster, (), self._stage.me)))
        return self._counted[1]

    def _decoder(self, state: StepState) -> ResultDecoder:
        """(exact)"""
        if state.decoder is None:
            state.decoder = self._stage.replica.result_decoder()
        return state.decoder

    async def next_version(self, state: StepState, result: Result, bodies: list[Bytes], name: bytes) -> NewVersion:
        """The version that this certified result makes."""
        self.rates.end_round()
        self._outbox.keep(self._stage.chain.members)
        replica = self._stage.replica
        weights, cap = self._weights(result.roster), replica.norm_cap()

        def make() -> NewVersion:
            self.reductions.keep(state, result, weights, norm_cap=cap, me=self._stage.me)
            found = self._decoder(state).gradient(result.parts, bodies)
            gradient, norm = found if found is not None else (None, None)
            return replica.next_version(gradient, name, gradient_norm=norm)

        return await self._stage.exact.run(Urgency.ROUND, make)

    # -- fetched ------------------------------------------------------------------------------------------

    def fetch(self, state: StepState, asked: act.FetchPart) -> None:
        """Get a part of the result from whoever holds it."""
        if (asked.part, asked.digest) not in state.fetching:
            state.fetching.add((asked.part, asked.digest))
            self._stage.spawn(self._fetch(state, asked))

    async def _fetch(self, state: StepState, asked: act.FetchPart) -> None:
        part, wanted, holders = asked.part, asked.digest, asked.holders
        meta: dict[str, Value] = {"step": state.step, "part": part, "digest": wanted}
        call_s = self._stage.settings.deadlines.call_s
        for holder in holders:
            try:
                reply = await self._stage.transport.call(
                    holder, PART_BYTES, Message(meta), timeout_s=call_s, max_body_bytes=self._encoded_bytes(part)
                )
            except (TransientError, RemoteError) as error:
                log.info("step %d part %d from %s: %s", state.step, part, holder[-6:], error)
                continue
            if await self._is_fetched(state, asked, holder, reply):
                state.reduced[part, wanted] = reply.body
                assert state.round is not None
                self._driver.carry_out(state, state.round.part_fetched(part, wanted, now=time.monotonic()))
                return
        state.fetching.discard((part, wanted))
        log.warning("step %d: nobody has part %d of the result", state.step, part)
        for holder in holders[:1]:
            self._stage.on_behind(holder)

    async def _is_fetched(self, state: StepState, asked: act.FetchPart, holder: PeerId, reply: Message) -> bool:
        """Whether a part came that counts. Before the outcome is certified it must come with its reducer's word."""
        try:
            said = SignedPart.from_answer(asked.reduced, reply.meta)
        except RemoteError as error:
            log.info("step %d part %d from %s: %s", state.step, asked.part, holder[-6:], error)
            return False
        if said is not None:
            (found,) = await self._take_signed(state, [said], [asked.roster], [reply.body])
            if not isinstance(found, RemoteError):
                self._keep_words(state, found)
                return True
            self._accuse_if_proved(found)
            log.warning("step %d part %d from %s: %s", state.step, asked.part, holder[-6:], found)
        is_certified = state.round is not None and state.round.result is not None
        return is_certified and await self._take_certified(state, asked.part, asked.digest, reply.body)

    async def _on_part_bytes(self, sender: PeerId, request: Message) -> Message:
        fields = Fields("part request", request.meta)
        step, part = fields.integer("step"), fields.integer("part", high=1 << 20)
        wanted = fields.octets("digest", length=32)
        state = self._stage.open_step(Step(step))
        if state is not None and (part, wanted) in state.reduced:
            known = (made for made in state.reductions if (made.slot, made.digest) == ((part, None), wanted))
            said = self._said(state, next(known, None))
            return Message(said.answer() if said is not None else {}, state.reduced[part, wanted])
        held = self._stage.results.get(step)
        if held is not None and part < len(held[1]) and held[0].parts[part].digest == wanted:
            said = self.reductions.said(Step(step), held[0].parts[part], held[0].roster)
            return Message(said.answer() if said is not None else {}, held[1][part])
        raise TransientError(f"part {part} of step {step} is not here")

    def _said(self, state: StepState, reduced: ReducedPart | None) -> SignedPart | None:
        roster = state.round.roster_of(reduced) if state.round is not None and reduced is not None else None
        return SignedPart.of(reduced, roster, state.reductions) if reduced is not None and roster is not None else None

    def _encoded_bytes(self, part: int) -> int:
        """Of the longest a part can be: no contribution is longer than the longest result."""
        where = self._stage.replica.parts()[part]
        return self._stage.replica.codec.encoded_bytes(where.stop - where.start)


def _wanted(asked: act.AggregatePart | act.CombineShares) -> ReducedPart:
    """What is to be made, without its digest."""
    named = (asked.part, EMPTY_DIGEST, asked.contributors, asked.excluded)
    if isinstance(asked, act.CombineShares):
        return ReducedPart(*named, shares=asked.shares)
    return ReducedPart(*named, cohort=asked.cohort)


def _cut(body: memoryview, sizes: Sequence[int], sender: PeerId) -> list[memoryview]:
    """The bodies of several parts. Raises RemoteError if they do not make up the whole."""
    if sum(sizes) != len(body):
        raise RemoteError("malformed", f"parts of {sum(sizes)} bytes in a message of {len(body)}", sender)
    return [body[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
