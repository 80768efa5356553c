"""This is where a microbatch is computed at this peer's stage: forward, what comes back, and the papers of both."""

import hashlib
import logging
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from peer.adversary import HONEST, Adversary, At
from peer.compute import Urgency, WorkThread
from peer.downstream import Activation, Answer, Downstream, HopCounters, Refused
from peer.exchange_store import ExchangeStore
from peer.exhibits import ExhibitStore
from peer.passages import Arrival, Passed
from peer.permit import Permit
from peer.replica import StageReplica
from peer.screening import Screening
from swarm.averaging.activations import ActivationCodec, activation_codec
from swarm.bulk_digest import bulk_digest
from swarm.core.contribution import Work
from swarm.core.errors import LocalError, RemoteError, TransientError
from swarm.core.ids import PeerId, StageIndex, Step, Version
from swarm.core.settings import RunSettings
from swarm.identity import Identity
from swarm.model.stage import Saved, Weights
from verification.headers import BirthRecord, HopHeader, check_hop, signed
from verification.kinds.protocol_violation import ProtocolViolation, ViolationError
from verification.papers import Bytes, Exhibit, Papers

log = logging.getLogger(__name__)


class StepGate(Protocol):
    """What the pipeline asks of the stage's rounds."""

    @property
    def version(self) -> Version: ...

    @property
    def era(self) -> int:
        """Of the run."""

    def may_work_for(self, step: Step) -> bool:
        """Whether what this peer computes for the step can count."""

    async def wait_for_version(self, version: int, *, timeout_s: float) -> bool:
        """Whether the stage reached `version` within the time."""

    def saw_step(self, step: Step) -> None:
        """A microbatch of `step` arrived."""

    def work_done(self, step: Step) -> None:
        """The step's sum has grown."""

    def evaluation_weights(self, version: int) -> Weights | None:
        """Weights of a version that is still held, for evaluation."""


class StageWork:
    """What a peer computes of microbatches; its results are signed, and kept for audits."""

    def __init__(
        self,
        settings: RunSettings,
        run_id: str,
        identity: Identity,
        replica: StageReplica,
        compute: WorkThread,
        gate: StepGate,
        counters: HopCounters,
        numeric_class: str,
        exhibits: ExhibitStore,
        exchanges: ExchangeStore,
        screening: Screening,
        *,
        permit: Permit | None = None,
        adversary: Adversary = HONEST,
    ) -> None:
        """`permit`: the owner's, to begin."""
        self.settings = settings
        self.run_id = run_id
        self.identity = identity
        self.replica = replica
        self.compute = compute
        self.gate = gate
        self.counters = counters
        self._numeric_class = numeric_class
        self._exhibits = exhibits
        self.exchanges = exchanges
        self._screening = screening
        self.permit = permit or Permit()
        self.adversary = adversary
        self.codec: ActivationCodec = activation_codec(settings.codecs.activations)
        self._gradient_codec: ActivationCodec = activation_codec(settings.codecs.activation_gradients)
        self.shape = (settings.batch.microbatch_size, settings.data.sequence_length, replica.model.hidden_size)

    def check_permit(self) -> None:
        """Raises Refused."""
        if self.permit.withheld:
            raise Refused("busy", "this peer's owner has paused it")

    def opened(self, arrival: Arrival) -> tuple[torch.Tensor, torch.Tensor]:
        """(compute) The activation and the targets, once all about them is as it must be."""
        self.check_permit()  # it may have waited long for the thread
        sender, birth, header = arrival.sender, arrival.birth, arrival.header
        check_hop(
            header,
            birth,
            arrival.activation,
            sender=sender,
            consumer=self.identity.peer_id,
            stage=StageIndex(self.replica.stage - 1),
            direction="forward",
            shape=self.shape,
            codec=self.codec.name,
            parent=birth.digest(),
            delay=self.settings.delay_at(birth.step),
        )
        if hashlib.sha256(arrival.targets).digest() != birth.targets_digest:
            raise RemoteError("digest", "targets differ from the birth record", sender)
        targets = np.frombuffer(arrival.targets, dtype="<i4").astype(np.int64).reshape(self.shape[:2])
        try:
            x = self.codec.decode(arrival.activation, self.shape)
        except RemoteError as error:
            case = ProtocolViolation(message=header, part=0, body=arrival.activation)
            raise ViolationError(case, error) from error
        self._screening.check("activation_norm", sender, float(torch.linalg.vector_norm(x)))
        return x, torch.from_numpy(targets)

    async def last_stage(self, arrival: Arrival) -> Passed:
        """Loss and gradient of a microbatch that has come all the way."""
        replica, birth, step = self.replica, arrival.birth, arrival.birth.step
        adversary, at = self.adversary, At(step, birth.microbatch_id)

        def compute() -> tuple[float, int, memoryview, Version, bool]:
            x, targets = self.opened(arrival)
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

        loss_sum, num_targets, encoded, version, counted = await self.compute.run(Urgency.FORWARD, compute, step=step)
        self.counters.microbatches += 1
        self.gate.work_done(step)
        own = self._gradient_header(arrival.sender, birth, (arrival.header.digest(),), encoded, version)
        self.exchanges.keep(arrival.exchange(own, encoded))
        if counted:
            papers = Papers(
                birth=birth, input_header=arrival.header, forward_header=None, gradient_in=None, gradient_out=own
            )
            x, targets = arrival.activation, arrival.targets
            self._exhibits.keep(step, Exhibit(papers=papers, x=x, targets=targets, y=b"", grad_y=b"", grad_x=encoded))
        return Passed(loss_sum, num_targets, encoded, own)

    async def middle_stage(self, arrival: Arrival, downstream: Downstream) -> Passed:
        """Send a microbatch on, and take its gradient back."""
        replica, birth, step = self.replica, arrival.birth, arrival.birth.step
        at, input_header = At(step, birth.microbatch_id), arrival.header.digest()

        def forward() -> tuple[Activation, Saved]:
            x, _ = self.opened(arrival)
            if not replica.accepts(step):
                raise Refused("closed", f"step {step} closed while the microbatch waited")
            version, weights = replica.weights_for(step)
            weights = self.adversary.weights(at, replica.model, version, weights)
            y, saved = replica.model.forward(weights, x, keep=True)
            assert saved is not None
            y = self.adversary.activation(at, weights, x, y)
            return self.pack(birth, version, (birth.digest(), input_header), y, arrival.targets), saved

        activation, saved = await self.compute.run(Urgency.FORWARD, forward, step=step)
        self.exchanges.keep(arrival.exchange())
        answer = await downstream.send(activation, replica.stage, run_id=self.run_id)
        grad_x, counted = await self.backward(birth, activation, saved, answer, input_header)
        assert grad_x is not None
        encoded = await self.compute.run(Urgency.CODEC, lambda: _encoded(self._gradient_codec, grad_x), step=step)
        assert answer.header is not None
        parents = (input_header, answer.header.digest())
        own = self._gradient_header(arrival.sender, birth, parents, encoded, activation.version)
        self.exchanges.keep(arrival.exchange(own, encoded))
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
        replica, step = self.replica, birth.step
        assert answer.grad_y is not None
        assert answer.header is not None
        grad_y, output_header, downstream = answer.grad_y, answer.header.digest(), answer.header.producer
        adversary, at = self.adversary, At(step, birth.microbatch_id)

        def compute() -> tuple[torch.Tensor | None, bool]:
            if not replica.accepts(step):
                self.counters.stragglers += 1
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

        made = await self.compute.run(Urgency.BACKWARD, compute, step=step)
        self.counters.microbatches += 1
        self.gate.work_done(step)
        return made

    async def evaluate(self, arrival: Arrival, downstream: Downstream | None) -> tuple[float, int]:
        """Loss sum and targets of a held-out microbatch: forward only."""
        replica, birth = self.replica, arrival.birth
        weights = self.gate.evaluation_weights(int(birth.step))
        if weights is None:
            raise Refused("behind", f"version {birth.step} is not held here")

        if downstream is None:

            def loss() -> tuple[float, int]:
                x, targets = self.opened(arrival)
                loss_sum, num_targets, _ = replica.model.loss(weights, x, targets, keep=False)
                return loss_sum, num_targets

            loss_sum, num_targets = await self.compute.run(Urgency.EVALUATE, loss)
        else:

            def forward() -> Activation:
                x, _ = self.opened(arrival)
                y, _ = replica.model.forward(weights, x, keep=False)
                parents = (birth.digest(), arrival.header.digest())
                return self.pack(birth, Version(int(birth.step)), parents, y, arrival.targets)

            activation = await self.compute.run(Urgency.EVALUATE, forward)
            answer = await downstream.send(activation, replica.stage, run_id=self.run_id)
            loss_sum, num_targets = answer.loss_sum, answer.num_targets
        self.counters.evaluated += 1
        return loss_sum, num_targets

    def pack(
        self,
        birth: BirthRecord,
        version: Version,
        parents: tuple[bytes, ...],
        y: torch.Tensor,
        targets: bytes | memoryview,
    ) -> Activation:
        """(compute) The activation as it goes out: encoded, then the targets."""
        encoded = _encoded(self.codec, y.cpu())
        digest = bulk_digest(encoded)
        body = memoryview(b"".join((encoded, targets)))
        return Activation(birth, version, parents, self.shape, body, len(encoded), digest)

    def _gradient_header(
        self, consumer: PeerId, birth: BirthRecord, parents: tuple[bytes, ...], encoded: memoryview, version: Version
    ) -> HopHeader:
        return signed(
            HopHeader(
                run_id=self.run_id,
                stage=self.replica.stage,
                version=version,
                microbatch_id=birth.microbatch_id,
                attempt=birth.attempt,
                direction="gradient",
                producer=self.identity.peer_id,
                consumer=consumer,
                parents=parents,
                shape=self.shape,
                dtype="fp32",
                codec=self._gradient_codec.name,
                numeric_class=self._numeric_class,
                body_digest=bulk_digest(encoded),
            ),
            self.identity,
        )


def _encoded(codec: ActivationCodec, tensor_BLD: torch.Tensor) -> memoryview:
    """Raises TransientError for a tensor that is not finite: no codec carries it, and no other peer need be asked."""
    try:
        return codec.encode(tensor_BLD)
    except LocalError as error:
        log.warning("a microbatch ends here: %s", error)
        raise TransientError(f"what this peer computed is not finite: {error}") from error


def _work(birth: BirthRecord, version: Version, input_header: bytes, output_header: bytes) -> Work:
    return Work(birth.microbatch_id, birth.attempt, version, birth.num_targets, input_header, output_header)
