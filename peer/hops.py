"""This is where a microbatch passes through this peer: in by one open call, on by another, and its gradient back.

Whoever sends work keeps it until it is answered, and sends it to another peer if this one fails.
"""

import hashlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from peer.adversary import HONEST, Adversary, At
from peer.compute import Urgency, WorkThread
from peer.downstream import METHOD, ROOM, Activation, Answer, Downstream, HopCounters, Refused
from peer.exchange_store import ExchangeStore
from peer.exhibits import ExhibitStore
from peer.passages import Arrival, Passage, Passages, Passed
from peer.permit import Permit
from peer.replica import StageReplica
from peer.screening import Screening
from peer.step_state import Applied
from swarm.averaging.activations import ActivationCodec, activation_codec
from swarm.bulk_digest import bulk_digest
from swarm.core.canonical import Value
from swarm.core.contribution import Work
from swarm.core.errors import LocalError, RemoteError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import MicrobatchId, PeerId, StageIndex, Step, Version
from swarm.core.room import Room
from swarm.core.settings import RunSettings
from swarm.identity import Identity
from swarm.model.stage import Saved, Weights
from swarm.network.transport import Message, Transport
from verification.headers import BirthRecord, HopHeader, check_birth, check_hop, signed
from verification.kinds.protocol_violation import ProtocolViolation, ViolationError
from verification.papers import Bytes, Exhibit, Papers
from verification.replay.compared import stands_for

log = logging.getLogger(__name__)

PARK_S = 1.0
"""How long a microbatch that is ahead of this peer's version waits here before it is sent away."""


class StepGate(Protocol):
    """What the pipeline asks of the stage's rounds."""

    @property
    def version(self) -> Version: ...

    @property
    def era(self) -> int:
        """Of the run."""

    @property
    def is_member(self) -> bool: ...

    async def wait_for_version(self, version: int, *, timeout_s: float) -> bool:
        """Whether the stage reached `version` within the time."""

    def saw_step(self, step: Step) -> None:
        """A microbatch of `step` arrived."""

    def work_done(self, step: Step) -> None:
        """The step's sum has grown."""

    def evaluation_weights(self, version: int) -> Weights | None:
        """Weights of a version that is still held, for evaluation."""


class HopServer:
    """Takes microbatches from the stage before, computes them, and answers with gradients."""

    def __init__(
        self,
        settings: RunSettings,
        run_id: str,
        identity: Identity,
        replica: StageReplica,
        compute: WorkThread,
        gate: StepGate,
        downstream: Downstream | None,
        counters: HopCounters,
        numeric_class: str,
        exhibits: ExhibitStore,
        exchanges: ExchangeStore,
        screening: Screening,
        *,
        adversary: Adversary = HONEST,
    ) -> None:
        self._settings = settings
        self._run_id = run_id
        self._identity = identity
        self._replica = replica
        self._compute = compute
        self._gate = gate
        self._downstream = downstream
        self._counters = counters
        self._numeric_class = numeric_class
        self._exhibits = exhibits
        self._exchanges = exchanges
        self._screening = screening
        self.adversary = adversary
        self._codec: ActivationCodec = activation_codec(settings.codecs.activations)
        self._gradient_codec: ActivationCodec = activation_codec(settings.codecs.activation_gradients)
        self._shape = (settings.batch.microbatch_size, settings.data.sequence_length, replica.model.hidden_size)
        self._num_calls = 0
        limits = settings.limits
        self._passages = Passages(
            longest_s=settings.deadlines.hop_s,
            most_orphans=limits.max_in_flight,
            most_done=limits.max_in_flight,
            lives=self._lives,
        )
        self._room = Room()
        self._under_way: Counter[MicrobatchId] = Counter()
        """Of these a call comes to what is kept, once it is computed."""
        self.on_violation: Callable[[ProtocolViolation], None] = lambda case: None
        """Told of activations that no honest program sends."""
        self.draining = False
        self.permit = Permit()
        """Of the owner, to begin."""
        self.is_before: Callable[[PeerId], bool] = lambda peer: True
        """Whether a peer is there and of the stage before, as far as is known: of others' word on steps nothing
        follows, and what they bring does not outlive their calls."""

    def serve(self, transport: Transport) -> None:
        """Begin to take microbatches."""
        self._codec_bytes = self._codec.encoded_bytes(self._shape)
        transport.serve(ROOM, self.on_room, max_body_bytes=0)
        transport.serve(METHOD, self.on_forward, max_body_bytes=self._codec_bytes + 4 * self._shape[0] * self._shape[1])

    async def on_room(self, sender: PeerId, request: Message) -> Message:
        """How long a microbatch would wait here, and whether it is held here already."""
        fields = Fields("room call", request.meta)
        birth_digest = fields.octets("birth", length=32)
        fields.done()
        is_held = self._held(sender, birth_digest) is not None
        if not is_held:
            self._check_room()
        waits_s = 0.0 if is_held else self._room.waits_s(self._compute.backlog_s, now=time.monotonic())
        waits_s = self.adversary.says_waits_s(Step(self._gate.version), waits_s)
        return Message({"waits_s": waits_s, "is_held": is_held})

    @property
    def in_flight(self) -> int:
        return self._num_calls + self._passages.num_orphans

    async def applied(self, applied: Applied) -> None:
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
            check_birth(birth, run_id=self._run_id)
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
                    return await self._evaluate(arrival)
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
                self.on_violation(error.case)
            raise

    async def _admit(self, sender: PeerId, birth: BirthRecord) -> None:
        gate, step = self._gate, birth.step
        if birth.era != gate.era:  # the run was rolled back, of which one of the two does not know yet
            status = "behind" if birth.era > gate.era else "closed"
            raise Refused(status, f"microbatch of era {birth.era}, this is {gate.era}")
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
        if self.is_before(sender):
            gate.saw_step(step)
        if int(step) < gate.version:
            raise Refused("closed", f"step {step} is over here: version {gate.version}")
        oldest = int(step) - self._settings.delay_at(step)
        if gate.version < oldest and not await gate.wait_for_version(oldest, timeout_s=PARK_S):
            raise Refused("behind", f"version {gate.version} here, step {step} needs {oldest}")
        if not gate.is_member:
            raise Refused("busy", "this peer is not a member of its stage yet")
        if not self._replica.accepts(step):
            raise Refused("closed", f"step {step} is closed here")
        number = birth.microbatch_id
        under_way = self._under_way
        if not self._exchanges.has_room(step, number, coming=len(under_way), calls=under_way[number]):
            raise Refused("busy", "the papers of more microbatches, or of this one once more, cannot be kept")
        if not self._replica.can_compute(step):
            raise Refused("behind", f"version {gate.version} was loaded here: step {step} needs the next one")

    def _check_room(self) -> None:
        if self.draining:
            raise Refused("busy", "this peer is leaving")
        self._check_permit()
        if self.in_flight >= 2 * self._settings.limits.max_in_flight:
            raise Refused("busy", f"{self.in_flight} microbatches in flight")

    def _check_permit(self) -> None:
        if self.permit.withheld:
            raise Refused("busy", "this peer's owner has paused it")

    def _arrival(
        self, sender: PeerId, birth: BirthRecord, header: HopHeader, body: bytes | bytearray | memoryview
    ) -> Arrival:
        view = memoryview(body)
        activation_bytes = self._codec.encoded_bytes(self._shape)
        if len(view) != activation_bytes + 4 * self._shape[0] * self._shape[1]:
            raise RemoteError("malformed", f"forward body of {len(view)} bytes", sender)
        return Arrival(sender, birth, header, view[:activation_bytes], view[activation_bytes:])

    def _opened(self, arrival: Arrival) -> tuple[torch.Tensor, torch.Tensor]:
        """(compute) The activation and the targets, once all about them is as it must be."""
        self._check_permit()  # it may have waited long for the thread
        sender, birth, header = arrival.sender, arrival.birth, arrival.header
        check_hop(
            header,
            birth,
            arrival.activation,
            sender=sender,
            consumer=self._identity.peer_id,
            stage=StageIndex(self._replica.stage - 1),
            direction="forward",
            shape=self._shape,
            codec=self._codec.name,
            parent=birth.digest(),
            delay=self._settings.delay_at(birth.step),
        )
        if hashlib.sha256(arrival.targets).digest() != birth.targets_digest:
            raise RemoteError("digest", "targets differ from the birth record", sender)
        targets = np.frombuffer(arrival.targets, dtype="<i4").astype(np.int64).reshape(self._shape[:2])
        try:
            x = self._codec.decode(arrival.activation, self._shape)
        except RemoteError as error:
            case = ProtocolViolation(message=header, part=0, body=arrival.activation)
            raise ViolationError(case, error) from error
        self._screening.check("activation_norm", sender, float(torch.linalg.vector_norm(x)))
        return x, torch.from_numpy(targets)

    # -- whose call it is, and whether it goes on without it ----------------------------------------------

    def _lives(self, peer: PeerId) -> bool:
        return self.is_before(peer)

    def _held(self, sender: PeerId, birth_digest: bytes) -> Passage | None:
        """What a peer of the stage before may take up."""
        return self._passages.of(birth_digest) if self.is_before(sender) else None

    async def _train(self, arrival: Arrival, held: Passage | None) -> Message:
        """Compute the microbatch, or answer with what another has brought before and is gone."""
        sender, birth = arrival.sender, arrival.birth
        if held is not None:
            passed = await self._adopted(arrival, held)
            if passed is not None:
                self._counters.adopted += 1
                return self._answer(arrival, passed)
            await self._admit(sender, birth)
        self._room.taken(self._compute.visit_s, now=time.monotonic())
        self._under_way[birth.microbatch_id] += 1
        # Nobody takes a lost source's place: what it has sent itself is not kept for anybody.
        if sender == birth.source or not self.is_before(sender) or self._passages.of(birth.digest()) is not None:
            return self._answer(arrival, await self._pass(arrival))
        passage = self._passages.begin(arrival, self._pass(arrival))
        passed = await self._passages.wait(passage, sender)
        if passed is None:
            raise TransientError("this peer is shutting down")
        return self._answer(arrival, passed)

    async def _adopted(self, arrival: Arrival, held: Passage) -> Passed | None:
        """What comes of the passage, for one who brings the same again; None if it is not the same, or came to
        nothing."""
        step, first = arrival.birth.step, held.arrival

        def is_same() -> bool:
            self._opened(arrival)
            if first.header.body_digest == arrival.header.body_digest:
                return True
            try:
                return stands_for(self._settings, first.activation, arrival.activation, self._shape)
            except RemoteError:  # what came first waits for the thread yet, and is not even an activation
                return False

        with self._blaming():
            same = await self._compute.run(Urgency.BACKWARD, is_same, step=step)
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
                    return await self._last_stage(arrival)
                return await self._middle_stage(arrival, self._downstream)
        finally:
            self._under_way -= Counter([arrival.birth.microbatch_id])  # and what comes to nothing goes

    def _answer(self, arrival: Arrival, passed: Passed) -> Message:
        """The gradient under a header to whoever brought the microbatch, which names what that one brought."""
        header = passed.header
        if header.parents[0] != arrival.header.digest():
            parents = (arrival.header.digest(), *header.parents[1:])
            header = signed(replace(header, consumer=arrival.sender, parents=parents), self._identity)
            if not self._exchanges.keep(arrival.exchange(header, passed.gradient)):
                raise Refused("busy", "this microbatch came more often than can be shown")
        said = _said(passed.loss_sum, passed.num_targets)
        return Message(said | {"header": header.to_value()}, passed.gradient)

    # -- the work -----------------------------------------------------------------------------------------

    async def _last_stage(self, arrival: Arrival) -> Passed:
        replica, birth, step = self._replica, arrival.birth, arrival.birth.step
        adversary, at = self.adversary, At(step, birth.microbatch_id)

        def compute() -> tuple[float, int, memoryview, Version, bool]:
            x, targets = self._opened(arrival)
            if not replica.accepts(step):
                raise Refused("closed", f"step {step} closed while the microbatch waited")
            version, weights = replica.weights_for(step)
            weights = adversary.weights(at, replica.model, version, weights)
            targets = adversary.targets(at, targets, vocab_size=replica.model.vocab_size)
            loss_sum, num_targets, saved = replica.model.loss(weights, x, targets, keep=True)
            assert saved is not None
            if num_targets != birth.num_targets:
                raise RemoteError(
                    "protocol", f"{num_targets} targets, birth record says {birth.num_targets}", birth.source
                )
            known = replica.has_done(step, birth.microbatch_id) or not adversary.lists(at)
            into = replica.scratch() if known else replica.sum_of(step).gradient.flat
            grad_y = saved.grad_y_BLD
            adversary.adding(at, into)
            grad_x = replica.model.loss_backward(replace(saved, grad_y_BLD=adversary.output_gradient(at, grad_y)), into)
            assert grad_x is not None
            adversary.added(at, into, num_tokens=num_targets)
            grad_x = adversary.activation_gradient(at, grad_x, grad_y)
            if not known:
                replica.record(step, _work(birth, version, arrival.header.digest(), bytes(32)))
            if not saved.is_finite:
                log.warning("step %d: the loss of microbatch %d is not finite", step, birth.microbatch_id)
                replica.sum_of(step).not_finite.add(birth.microbatch_id)
            return loss_sum, num_targets, _encoded(self._gradient_codec, grad_x), version, not known

        loss_sum, num_targets, encoded, version, counted = await self._compute.run(Urgency.FORWARD, compute, step=step)
        self._counters.microbatches += 1
        self._gate.work_done(step)
        own = self._gradient_header(arrival.sender, birth, (arrival.header.digest(),), encoded, version)
        self._exchanges.keep(arrival.exchange(own, encoded))
        if counted:
            papers = Papers(
                birth=birth, input_header=arrival.header, forward_header=None, gradient_in=None, gradient_out=own
            )
            x, targets = arrival.activation, arrival.targets
            self._exhibits.keep(step, Exhibit(papers=papers, x=x, targets=targets, y=b"", grad_y=b"", grad_x=encoded))
        return Passed(loss_sum, num_targets, encoded, own)

    async def _middle_stage(self, arrival: Arrival, downstream: Downstream) -> Passed:
        replica, birth, step = self._replica, arrival.birth, arrival.birth.step
        at, input_header = At(step, birth.microbatch_id), arrival.header.digest()

        def forward() -> tuple[Activation, Saved]:
            x, _ = self._opened(arrival)
            if not replica.accepts(step):
                raise Refused("closed", f"step {step} closed while the microbatch waited")
            version, weights = replica.weights_for(step)
            weights = self.adversary.weights(at, replica.model, version, weights)
            y, saved = replica.model.forward(weights, x, keep=True)
            assert saved is not None
            y = self.adversary.activation(at, weights, x, y)
            return self.pack(birth, version, (birth.digest(), input_header), y, arrival.targets), saved

        activation, saved = await self._compute.run(Urgency.FORWARD, forward, step=step)
        self._exchanges.keep(arrival.exchange())
        answer = await downstream.send(activation, replica.stage, run_id=self._run_id)
        grad_x, counted = await self.backward(birth, activation, saved, answer, input_header)
        assert grad_x is not None
        encoded = await self._compute.run(Urgency.BACKWARD, lambda: _encoded(self._gradient_codec, grad_x), step=step)
        assert answer.header is not None
        parents = (input_header, answer.header.digest())
        own = self._gradient_header(arrival.sender, birth, parents, encoded, activation.version)
        self._exchanges.keep(arrival.exchange(own, encoded))
        if counted:
            x = arrival.activation
            self.keep_exhibit(activation, answer, x=x, header=arrival.header, own=own, grad_x=encoded)
        return Passed(answer.loss_sum, answer.num_targets, encoded, own)

    def keep_exhibit(
        self,
        activation: Activation,
        answer: Answer,
        *,
        x: Bytes,
        header: HopHeader | None = None,
        own: HopHeader | None = None,
        grad_x: Bytes = b"",
    ) -> None:
        """Keep all there is of a microbatch that was sent on and came home; `header` of x and `own` of its gradient."""
        papers = Papers(
            birth=activation.birth,
            input_header=header,
            forward_header=answer.forward_header,
            gradient_in=answer.header,
            gradient_out=own,
        )
        body = memoryview(activation.body)
        y, targets = body[: activation.num_activation_bytes], body[activation.num_activation_bytes :]
        exhibit = Exhibit(papers=papers, x=x, targets=targets, y=y, grad_y=answer.body, grad_x=grad_x)
        self._exhibits.keep(activation.birth.step, exhibit)

    async def backward(
        self, birth: BirthRecord, activation: Activation, saved: Saved, answer: Answer, input_header: bytes
    ) -> tuple[torch.Tensor | None, bool]:
        """Run backward with the gradient that came back and add to the step's sum: the gradient of x, and whether the
        microbatch counts here (it is in the sum once only)."""
        replica, step = self._replica, birth.step
        assert answer.grad_y is not None
        assert answer.header is not None
        grad_y, output_header, downstream = answer.grad_y, answer.header.digest(), answer.header.producer
        adversary, at = self.adversary, At(step, birth.microbatch_id)

        def compute() -> tuple[torch.Tensor | None, bool]:
            if not replica.accepts(step):
                self._counters.stragglers += 1
                raise Refused("closed", f"step {step} closed before the gradient came back")
            self._screening.check("gradient_norm", downstream, float(torch.linalg.vector_norm(grad_y)))
            known = replica.has_done(step, birth.microbatch_id) or not adversary.lists(at)
            into = replica.scratch() if known else replica.sum_of(step).gradient.flat
            adversary.adding(at, into)
            grad_x = replica.model.backward(saved, adversary.output_gradient(at, grad_y), into)
            adversary.added(at, into, num_tokens=birth.num_targets)
            if grad_x is not None:
                grad_x = adversary.activation_gradient(at, grad_x, grad_y)
            if not known:
                replica.record(step, _work(birth, activation.version, input_header, output_header))
            return grad_x, not known

        made = await self._compute.run(Urgency.BACKWARD, compute, step=step)
        self._counters.microbatches += 1
        self._gate.work_done(step)
        return made

    async def _evaluate(self, arrival: Arrival) -> Message:
        replica, birth = self._replica, arrival.birth
        weights = self._gate.evaluation_weights(int(birth.step))
        if weights is None:
            raise Refused("behind", f"version {birth.step} is not held here")

        if self._downstream is None:

            def loss() -> tuple[float, int]:
                x, targets = self._opened(arrival)
                loss_sum, num_targets, _ = replica.model.loss(weights, x, targets, keep=False)
                return loss_sum, num_targets

            loss_sum, num_targets = await self._compute.run(Urgency.EVALUATE, loss)
        else:

            def forward() -> Activation:
                x, _ = self._opened(arrival)
                y, _ = replica.model.forward(weights, x, keep=False)
                parents = (birth.digest(), arrival.header.digest())
                return self.pack(birth, Version(int(birth.step)), parents, y, arrival.targets)

            activation = await self._compute.run(Urgency.EVALUATE, forward)
            answer = await self._downstream.send(activation, replica.stage, run_id=self._run_id)
            loss_sum, num_targets = answer.loss_sum, answer.num_targets
        self._counters.evaluated += 1
        return Message(_said(loss_sum, num_targets))

    def pack(
        self,
        birth: BirthRecord,
        version: Version,
        parents: tuple[bytes, ...],
        y: torch.Tensor,
        targets: bytes | memoryview,
    ) -> Activation:
        """(compute) The activation as it goes out: encoded, then the targets."""
        encoded = _encoded(self._codec, y.cpu())
        digest = bulk_digest(encoded)
        body = memoryview(b"".join((encoded, targets)))
        return Activation(birth, version, parents, self._shape, body, len(encoded), digest)

    def _gradient_header(
        self, consumer: PeerId, birth: BirthRecord, parents: tuple[bytes, ...], encoded: memoryview, version: Version
    ) -> HopHeader:
        return signed(
            HopHeader(
                run_id=self._run_id,
                stage=self._replica.stage,
                version=version,
                microbatch_id=birth.microbatch_id,
                attempt=birth.attempt,
                direction="gradient",
                producer=self._identity.peer_id,
                consumer=consumer,
                parents=parents,
                shape=self._shape,
                dtype="fp32",
                codec=self._gradient_codec.name,
                numeric_class=self._numeric_class,
                body_digest=bulk_digest(encoded),
            ),
            self._identity,
        )


def _encoded(codec: ActivationCodec, tensor_BLD: torch.Tensor) -> memoryview:
    """Raises TransientError for a tensor that is not finite: no codec carries it, and no other peer need be asked."""
    try:
        return codec.encode(tensor_BLD)
    except LocalError as error:
        log.warning("a microbatch ends here: %s", error)
        raise TransientError(f"what this peer computed is not finite: {error}") from error


def _said(loss_sum: float, num_targets: int) -> dict[str, Value]:
    """A loss that is not finite goes as None."""
    said = loss_sum if math.isfinite(loss_sum) else None
    return {"status": "ok", "loss_sum": said, "num_targets": num_targets}


def _work(birth: BirthRecord, version: Version, input_header: bytes, output_header: bytes) -> Work:
    return Work(birth.microbatch_id, birth.attempt, version, birth.num_targets, input_header, output_header)
