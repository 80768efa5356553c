"""This is where the parts of a round move: contributions to their reducers, reduced parts to everyone.

Parts travel several to a message; all of a message are hashed, checked and decoded in one job of the exact thread.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate, repeat
from typing import TYPE_CHECKING, Protocol

from peer.compute import Urgency
from peer.outbox import MESSAGE_BYTES, Outbox, Parcel
from peer.receive_rates import ReceiveRates
from peer.replica import NewVersion
from peer.round_work import reduce_part
from peer.step_state import Bytes, StepState
from swarm.averaging.encoded_mean import check_encoded
from swarm.averaging.result_decoder import ResultDecoder
from swarm.averaging.seeds import reduced_seed
from swarm.core import averaging_round as act
from swarm.core.averaging_round import AveragingRound, Instruction
from swarm.core.canonical import Value
from swarm.core.contribution import ReducedPart, Result, Roster
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields, integer_item
from swarm.core.ids import PeerId, Step
from swarm.network.loop import happened
from swarm.network.transport import Message

if TYPE_CHECKING:
    from peer.rounds import StageRounds

log = logging.getLogger(__name__)

PART_BYTES = "part_bytes"
MAX_PARCELS = 1 << 12


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

    @property
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
        """A part that was aggregated here."""
        parcel = Parcel(state, "reduced", {"reduced": reduced.to_value()}, state.reduced[reduced.part, reduced.digest])
        for peer in to:
            self._outbox.put(peer, parcel)

    async def _send(self, peer: PeerId, parcels: list[Parcel]) -> None:
        meta: dict[str, Value] = {
            "kind": "parts",
            "of": parcels[0].kind,
            "heads": [parcel.head for parcel in parcels],
            "sizes": [len(parcel.body) for parcel in parcels],
        }
        await self._driver.send(parcels[0].state, peer, meta, tuple(parcel.body for parcel in parcels))

    # -- in -----------------------------------------------------------------------------------------------

    async def receive(
        self, state: StepState, machine: AveragingRound, sender: PeerId, fields: Fields, body: memoryview
    ) -> None:
        """Parts that came in one message. Raises RemoteError if one is no good, when the others are taken."""
        kind = fields.text("of")
        heads = fields.items("heads", lambda head: Fields("head of a part", head), max_items=MAX_PARCELS)
        bodies = _cut(body, fields.items("sizes", integer_item, max_items=MAX_PARCELS), sender)
        if len(heads) != len(bodies):
            raise RemoteError("malformed", f"{len(heads)} heads of {len(bodies)} parts", sender)
        if kind == "contributed":
            parts = [(head.integer("part", high=1 << 20), head.integer("view", high=1 << 20)) for head in heads]
            await self._receive_contributed(state, machine, sender, parts, bodies)
        elif kind == "reduced":
            reduced = [ReducedPart.from_value(head.message("reduced")) for head in heads]
            await self._receive_reduced(state, machine, sender, reduced, bodies)
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
        await self._roster_known(state, machine, max((view for _, view in parts), default=0))
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
            self._driver.carry_out(state, machine.on_bad_part(sender, part, str(error), now=now))
            raise RemoteError(error.kind, f"part {part}: {error}", sender)

        numbers = [part for part, _ in parts]
        self._carry_out_each(state, map(partial, repeat(came), numbers, bodies, wrong))

    def _what_is_wrong(self, sender: PeerId, part: int, body: memoryview, expected: bytes) -> RemoteError | None:
        """(exact) With a contribution's part."""
        if hashlib.sha256(body).digest() != expected:
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
        reduced: list[ReducedPart],
        bodies: list[memoryview],
    ) -> None:
        await self._roster_known(state, machine, 0)
        machine.facts.check_member(sender)
        digests = await self._take_reduced(state, [part.part for part in reduced], bodies)

        def came(part: ReducedPart, body: memoryview, found: bytes) -> list[Instruction]:
            if found != part.digest:
                raise RemoteError("digest", f"reduced part {part.part} of {sender} differs from its digest", sender)
            state.reduced[part.part, found] = body
            return machine.on_reduced(sender, part, now=time.monotonic())

        self._carry_out_each(state, map(partial, repeat(came), reduced, bodies, digests))

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

    async def _take_reduced(self, state: StepState, parts: Sequence[int], bodies: Sequence[memoryview]) -> list[bytes]:
        """The digests of reduced parts, each of which is decoded while it is in cache."""
        if self._stage.open_step(state.step) is not state:
            raise TransientError(f"step {state.step} is over")

        def take() -> list[bytes]:
            digests = []
            for part, body in zip(parts, bodies, strict=True):
                digests.append(hashlib.sha256(body).digest())
                if part < self._stage.replica.num_parts:
                    self._decoder(state).take(part, digests[-1], body)
            return digests

        return await self._stage.exact.run(Urgency.ROUND, take)

    async def _roster_known(self, state: StepState, machine: AveragingRound, view: int) -> None:
        """Wait for a roster of the view or a later one; what was sent under it may be ahead of it."""
        give_up_at = time.monotonic() + self._stage.settings.deadlines.call_s / 2
        while machine.result is None and (machine.roster is None or machine.roster.view < view):
            left_s = give_up_at - time.monotonic()
            if left_s <= 0:
                raise TransientError(f"no roster of step {state.step} here yet")
            await happened(state.changed, within_s=left_s)

    # -- computed -----------------------------------------------------------------------------------------

    async def aggregate(self, state: StepState, roster: Roster, asked: list[act.AggregatePart]) -> None:
        """Aggregate and encode these parts, of which this peer is the roster's reducer."""
        stage, replica, chain, machine = self._stage, self._stage.replica, self._stage.chain, state.round
        assert machine is not None
        if self._counted is None or self._counted[0] is not roster:
            self._counted = (roster, chain.weights_of(Result(roster, (), stage.me)))
        counted = self._counted[1]
        bodies = [
            [(counted[peer], state.received[one.part, peer]) for peer in one.contributors if counted[peer] > 0]
            for one in asked
        ]
        cap, rule = replica.norm_cap(), stage.settings.averaging.rule

        def reduce() -> list[tuple[Bytes, bytes]]:
            made: list[tuple[Bytes, bytes]] = []
            for one, held in zip(asked, bodies, strict=True):
                seed = reduced_seed(stage.run_id, chain.stage, chain.version, one.part)
                right = reduce_part(replica, one.part, held, rule=rule, norm_cap=cap, seed=seed)
                where = replica.parts()[one.part]
                encoded, found = stage.adversary.reduced(
                    state.step, right, replica.codec, num_values=where.stop - where.start, seed=seed
                )
                self._decoder(state).take(one.part, found, encoded)
                made.append((encoded, found))
            return made

        out: list[Instruction] = []
        made = await stage.exact.run(Urgency.ROUND, reduce)
        for one, (encoded, found) in zip(asked, made, strict=True):
            state.reduced[one.part, found] = encoded
            reduced = ReducedPart(one.part, found, one.contributors, one.excluded)
            out += machine.aggregated(reduced, now=time.monotonic())
        self._driver.carry_out(state, out)

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

        def make() -> NewVersion:
            found = self._decoder(state).gradient(result.parts, bodies)
            gradient, norm = found if found is not None else (None, None)
            return replica.next_version(gradient, name, gradient_norm=norm)

        return await self._stage.exact.run(Urgency.ROUND, make)

    # -- fetched ------------------------------------------------------------------------------------------

    def fetch(self, state: StepState, asked: act.FetchPart) -> None:
        """Get a part of the result from whoever holds it."""
        if (asked.part, asked.digest) not in state.fetching:
            state.fetching.add((asked.part, asked.digest))
            self._stage.spawn(self._fetch(state, asked.part, asked.digest, asked.holders))

    async def _fetch(self, state: StepState, part: int, wanted: bytes, holders: tuple[PeerId, ...]) -> None:
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
            if await self._take_reduced(state, [part], [memoryview(reply.body)]) == [wanted]:
                state.reduced[part, wanted] = reply.body
                assert state.round is not None
                self._driver.carry_out(state, state.round.part_fetched(part, wanted, now=time.monotonic()))
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

    def _encoded_bytes(self, part: int) -> int:
        """Of the longest a part can be: no contribution is longer than the longest result."""
        where = self._stage.replica.parts()[part]
        return self._stage.replica.codec.encoded_bytes(where.stop - where.start)


def _cut(body: memoryview, sizes: Sequence[int], sender: PeerId) -> list[memoryview]:
    """The bodies of several parts. Raises RemoteError if they do not make up the whole."""
    if sum(sizes) != len(body):
        raise RemoteError("malformed", f"parts of {sum(sizes)} bytes in a message of {len(body)}", sender)
    return [body[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
