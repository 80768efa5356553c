"""A microbatch's way through this peer: in by one open call, on by another, and its gradient back.

Whoever sends work keeps it until it is answered, and sends it to another peer if this one fails.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from peer.directory.limited_transport import LimitedTransport
from peer.pipeline.compute import Urgency
from peer.pipeline.downstream import METHOD, ROOM, Downstream, Refused
from peer.pipeline.passages import Arrival, Passage, Passages, Passed
from peer.pipeline.stage_work import StageWork
from peer.stage.events import Applied
from swarm.core.canonical import Value
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import MicrobatchId, PeerId, Step
from swarm.core.pipeline.room import Room
from swarm.network.transport import Message, Transport
from verification.kinds.protocol_violation import ProtocolViolation, ViolationError
from verification.pipeline.headers import BirthRecord, HopHeader, check_birth
from verification.replay.compared import stands_for

log = logging.getLogger(__name__)

PARK_S = 1.0
"""How long a microbatch that is ahead of this peer's version waits here before it is sent away."""


class HopServer:
    """Takes microbatches from the stage before, computes them, and answers with gradients."""

    def __init__(
        self,
        work: StageWork,
        downstream: Downstream | None,
        line: LimitedTransport,
        is_before: Callable[[PeerId], bool],
        begun: Callable[[PeerId, Step], None],
        on_violation: Callable[[ProtocolViolation], None],
    ) -> None:
        """Without `downstream` this is the last stage. `line`: the owner's, whose rate may be limited.

        `is_before`: whether a peer is there and of the stage before, as far as is known: of others' word on steps
        nothing follows, and what they bring does not outlive their calls. `begun` is told who of them has
        come to which step, where steps do not overlap. `on_violation` is told of activations that no honest program
        sends.
        """
        self._work = work
        self._line = line
        self._settings = work.settings
        self._replica = work.replica
        self._compute = work.compute
        self._gate = work.gate
        self._counters = work.counters
        self._downstream = downstream
        self._num_calls = 0
        tensors = work.stage_pass.tensors
        self._shape = tensors.shape
        self._activation_bytes = tensors.codec.encoded_bytes(tensors.shape)
        self._beside_bytes = tensors.beside_bytes
        limits = work.settings.limits
        self._passages = Passages(
            longest_s=work.stage_pass.longest_s,
            most_orphans=limits.max_in_flight,
            most_done=limits.max_in_flight,
            lives=is_before,
        )
        self._room = Room()
        self._under_way: Counter[MicrobatchId] = Counter()
        """Of these a call comes to what is kept, once it is computed."""
        self._on_violation = on_violation
        self._is_before = is_before
        self._begun = begun
        self.draining = False

    def serve(self, transport: Transport) -> None:
        """Begin to take microbatches."""
        transport.serve(ROOM, self.on_room, max_body_bytes=0)
        transport.serve(METHOD, self.on_forward, max_body_bytes=self._activation_bytes + self._beside_bytes)

    async def on_room(self, sender: PeerId, request: Message) -> Message:
        """How long a microbatch would wait here, and whether it is held here already."""
        fields = Fields("room call", request.meta)
        birth_digest = fields.octets("birth", length=32)
        step = Step(fields.integer("step")) if fields.optional("step") else None
        fields.done()
        is_held = self._held(sender, birth_digest) is not None
        if not is_held:
            self._check_room()
            if step is not None:
                self._check_may_work(step)
        waits_s = 0.0 if is_held else self._room.waits_s(self._compute.backlog_s, now=time.monotonic())
        return Message({"waits_s": waits_s, "is_held": is_held})

    @property
    def in_flight(self) -> int:
        return self._num_calls + self._passages.num_orphans

    def applied(self, applied: Applied) -> None:
        """A step is over: nobody asks for its microbatches any more."""
        self._passages.forget(int(applied.chain.version))

    async def stop(self) -> None:
        """End what is under way."""
        await self._passages.stop()

    async def on_forward(self, sender: PeerId, request: Message) -> Message:
        """Answer one microbatch: its gradient, or why it is not taken now."""
        try:
            fields = Fields("forward call", request.meta)
            birth = BirthRecord.from_value(fields.message("birth"))
            header = HopHeader.from_value(fields.message("header"))
            fields.done()
            check_birth(birth, run_id=self._work.run_id)
            held = self._held(sender, birth.digest())
            if held is None:
                await self._admit(sender, birth)
        except Refused as refusal:
            self._counters.refused += 1
            return Message({"status": refusal.status, "reason": str(refusal)})
        self._num_calls += 1
        try:
            with self._blaming():
                arrival = self._arrival(sender, birth, header, request.body)
                if birth.kind == "evaluate":
                    return Message(_said(*await self._work.evaluate(arrival, self._downstream)))
            return await self._train(arrival, held)
        except Refused as refusal:
            return Message({"status": refusal.status, "reason": str(refusal)})
        finally:
            self._num_calls -= 1

    @contextmanager
    def _blaming(self) -> Iterator[None]:
        """Whose message is not as it must be is counted, and accused if it signed for it."""
        try:
            yield
        except RemoteError as error:
            self._counters.bad_messages[error.kind] = self._counters.bad_messages.get(error.kind, 0) + 1
            if isinstance(error, ViolationError):
                self._on_violation(error.case)
            raise

    async def _admit(self, sender: PeerId, birth: BirthRecord) -> None:
        gate, step = self._gate, birth.step
        if birth.era != gate.era:  # the stages have begun again, of which one of the two does not know yet
            raise Refused("behind", f"microbatch of era {birth.era}, this is {gate.era}")
        self._check_room()
        if birth.shape[0:2] != self._shape[:2]:
            raise RemoteError("protocol", f"microbatch of shape {birth.shape}, not {self._shape[:2]}", birth.source)
        if birth.kind == "evaluate":
            if gate.evaluation_weights(int(step)) is None and not await gate.wait_for_version(
                int(step), timeout_s=PARK_S
            ):
                raise Refused("behind", f"version {gate.version}, evaluation of {step}")
            return
        if birth.kind != "train":
            raise RemoteError("protocol", f"kind {birth.kind} is not served", birth.source)
        if self._is_before(sender) and not self._settings.delay_at(step):
            self._begun(sender, step)
        if int(step) < gate.version:
            raise Refused("closed", f"step {step} is over here: version {gate.version}")
        oldest = int(step) - self._settings.delay_at(step)
        if gate.version < oldest and not await gate.wait_for_version(oldest, timeout_s=PARK_S):
            raise Refused("behind", f"version {gate.version} here, step {step} needs {oldest}")
        self._check_may_work(step)
        if not self._replica.accepts(step, birth.era):
            raise Refused("closed", f"step {step} is closed here")
        number = birth.microbatch_id
        under_way = self._under_way
        if not self._work.exchanges.has_room(step, number, coming=len(under_way), calls=under_way[number]):
            raise Refused("busy", "the papers of more microbatches, or of this one once more, cannot be kept")
        if not self._replica.can_compute(step):
            raise Refused("behind", f"version {gate.version} was loaded here: step {step} needs the next one")

    def _check_room(self) -> None:
        if self.draining:
            raise Refused("busy", "this peer is leaving")
        self._work.check_permit()
        if self.in_flight >= 2 * self._settings.limits.max_in_flight:
            raise Refused("busy", f"{self.in_flight} microbatches in flight")

    def _check_may_work(self, step: Step) -> None:
        if not self._gate.may_work_for(step):
            raise Refused("busy", f"this peer is not a member of its stage yet, nor will be for step {step}")

    def _arrival(
        self, sender: PeerId, birth: BirthRecord, header: HopHeader, body: bytes | bytearray | memoryview
    ) -> Arrival:
        view = memoryview(body)
        activation_bytes = self._activation_bytes
        if len(view) != activation_bytes + self._beside_bytes:
            raise RemoteError("malformed", f"forward body of {len(view)} bytes", sender)
        return Arrival(sender, birth, header, view[:activation_bytes], view[activation_bytes:])

    # -- whose call it is, and whether it goes on without it ----------------------------------------------

    def _sends_s(self) -> float:
        """Of the owner's uplink, for one microbatch: its activation, and the gradient of it."""
        num_bodies = 1 if self._downstream is None else 2
        return self._line.sends_s(num_bodies * self._activation_bytes)

    def _held(self, sender: PeerId, birth_digest: bytes) -> Passage | None:
        """What a peer of the stage before may take up."""
        return self._passages.of(birth_digest) if self._is_before(sender) else None

    async def _train(self, arrival: Arrival, held: Passage | None) -> Message:
        """Compute the microbatch, or answer with what another has brought before and is gone."""
        sender, birth = arrival.sender, arrival.birth
        if held is not None:
            passed = await self._adopted(arrival, held)
            if passed is not None:
                self._counters.adopted += 1
                return self._answer(arrival, passed)
            await self._admit(sender, birth)
        self._room.taken(self._compute.visit_s, self._sends_s(), now=time.monotonic())
        self._under_way[birth.microbatch_id] += 1
        came_at = time.monotonic()
        # Nobody takes a lost source's place, but what it has sent counts in all stages after it.
        if not self._is_before(sender) or self._passages.of(birth.digest()) is not None:
            passed = await self._pass(arrival)
            self._counters.answered.observe(time.monotonic() - came_at)
            return self._answer(arrival, passed)
        passage = self._passages.begin(arrival, self._pass(arrival))
        passed = await self._passages.wait(passage, sender)
        if passed is None:
            raise TransientError("this peer is shutting down")
        self._counters.answered.observe(time.monotonic() - came_at)
        return self._answer(arrival, passed)

    async def _adopted(self, arrival: Arrival, held: Passage) -> Passed | None:
        """What comes of the passage, for one who brings the same again; None if it is not the same, or came to
        nothing."""
        step, first = arrival.birth.step, held.arrival

        def is_same() -> bool:
            self._work.opened(arrival)
            if first.header.body_digest == arrival.header.body_digest:
                return True
            try:
                return stands_for(self._settings, first.activation, arrival.activation, self._shape)
            except RemoteError:  # what came first waits for the thread yet, and is not even an activation
                return False

        with self._blaming():
            same = await self._compute.run(Urgency.CODEC, is_same, step=step)
        if not same:
            count = self._counters.bad_messages
            count["other_activation"] = count.get("other_activation", 0) + 1
            number = arrival.birth.microbatch_id
            log.warning("%s and %s computed microbatch %d differently", first.sender, arrival.sender, number)
            self._passages.give_up(held)
            return None
        try:
            return await self._passages.wait(held, arrival.sender)
        except RemoteError:  # of what the other had sent
            return None

    async def _pass(self, arrival: Arrival) -> Passed:
        try:
            with self._blaming():
                if self._downstream is None:
                    return await self._work.last_stage(arrival)
                return await self._work.middle_stage(arrival, self._downstream)
        finally:
            self._under_way -= Counter([arrival.birth.microbatch_id])  # and what comes to nothing goes

    def _answer(self, arrival: Arrival, passed: Passed) -> Message:
        """The gradient under a header to whoever brought the microbatch, which names what that one brought."""
        header = passed.header
        if header.parents[0] != arrival.header.digest():
            header = self._work.stage_pass.gradient_header_to(arrival.header, header)
            if not self._work.exchanges.keep(arrival.exchange(header, passed.gradient)):
                raise Refused("busy", "this microbatch came more often than can be shown")
        said = _said(passed.loss_sum, passed.num_targets)
        return Message(said | {"header": header.to_value()}, passed.gradient)

    # -- the work -----------------------------------------------------------------------------------------


def _said(loss_sum: float, num_targets: int) -> dict[str, Value]:
    """A loss that is not finite goes as None."""
    said = loss_sum if math.isfinite(loss_sum) else None
    return {"status": "ok", "loss_sum": said, "num_targets": num_targets}
