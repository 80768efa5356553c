"""A microbatch computed at this peer's stage: forward, what comes back, and the papers of both."""

import hashlib
import logging
from typing import Protocol

import torch

from peer.owner.permit import Permit
from peer.pipeline.compute import Urgency, WorkThread
from peer.pipeline.downstream import Answer, Downstream, HopCounters, Refused
from peer.pipeline.exchange_store import ExchangeStore
from peer.pipeline.passages import Arrival, Passed
from peer.pipeline.screens import Screens
from peer.pipeline.stage_pass import Activation, LossPass, StagePass
from swarm.core.errors import RemoteError
from swarm.core.ids import StageIndex, Step, Version
from swarm.model.stage import Saved, Weights
from verification.kinds.protocol_violation import ProtocolViolation, ViolationError
from verification.pipeline.headers import BirthRecord, check_hop, forward_parents

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
        stage_pass: StagePass,
        compute: WorkThread,
        gate: StepGate,
        counters: HopCounters,
        exchanges: ExchangeStore,
        screens: Screens,
        *,
        permit: Permit | None = None,
    ) -> None:
        """`permit`: the owner's, to begin."""
        self.stage_pass = stage_pass
        self.settings = stage_pass.settings
        self.run_id = stage_pass.run_id
        self.replica = stage_pass.replica
        self.compute = compute
        self.gate = gate
        self.counters = counters
        self.exchanges = exchanges
        self._screens = screens
        self.permit = permit or Permit()

    def check_permit(self) -> None:
        """Raises Refused."""
        if self.permit.withheld:
            raise Refused("busy", "this peer's owner has paused it")

    def opened(self, arrival: Arrival) -> tuple[torch.Tensor, torch.Tensor]:
        """(compute) The activation and the targets, once all about them is as it must be."""
        self.check_permit()  # it may have waited long for the thread
        sender, birth, header = arrival.sender, arrival.birth, arrival.header
        tensors = self.stage_pass.tensors
        check_hop(
            header,
            birth,
            arrival.activation,
            sender=sender,
            consumer=self.stage_pass.identity.peer_id,
            stage=StageIndex(self.replica.stage - 1),
            direction="forward",
            shape=tensors.shape,
            codec=tensors.codec.name,
            parents=forward_parents(birth.digest(), self.replica.stage - 1),
            delay=self.settings.delay_at(birth.step),
        )
        if hashlib.sha256(arrival.targets).digest() != birth.targets_digest:
            raise RemoteError("digest", "targets differ from the birth record", sender)
        targets_BL = tensors.ids(arrival.targets)
        try:
            x = tensors.x(arrival.activation)
        except RemoteError as error:
            case = ProtocolViolation(message=header, part=0, body=arrival.activation)
            raise ViolationError(case, error) from error
        self._screens.check("activation_norm", sender, tensors.norm(x))
        return x, targets_BL

    def _check_open(self, birth: BirthRecord) -> None:
        """(compute) Raises Refused if the step's sum takes no more; "closed" tells a source that the step is over."""
        if birth.era != self.replica.era:
            raise Refused("behind", f"microbatch of era {birth.era}, this is {self.replica.era}")
        if not self.replica.accepts(birth.step, birth.era):
            raise Refused("closed", f"step {birth.step} closed meanwhile")

    async def last_stage(self, arrival: Arrival) -> Passed:
        """Loss and gradient of a microbatch that has come all the way."""
        birth, step = arrival.birth, arrival.birth.step

        def compute() -> LossPass:
            x, targets_BL = self.opened(arrival)
            self._check_open(birth)
            return self.stage_pass.loss(birth, x, targets_BL, arrival.header)

        made = await self.compute.run(Urgency.FORWARD, compute, step=step)
        self.counters.microbatches += 1
        self.gate.work_done(step)
        own = self.stage_pass.gradient_header(birth, made.version, made.gradient, arrival.header)
        self.exchanges.keep(arrival.exchange(own, made.gradient))
        return Passed(made.loss_sum, birth.num_targets, made.gradient, own)

    async def middle_stage(self, arrival: Arrival, downstream: Downstream) -> Passed:
        """Send a microbatch on, and take its gradient back."""
        birth, step = arrival.birth, arrival.birth.step

        def forward() -> tuple[Activation, Saved]:
            x, _ = self.opened(arrival)
            self._check_open(birth)
            return self.stage_pass.forward(birth, x, arrival.targets, arrival.header)

        activation, saved = await self.compute.run(Urgency.FORWARD, forward, step=step)
        self.exchanges.keep(arrival.exchange())
        answer = await downstream.send(activation)
        grad_x = await self.backward(activation, saved, answer)
        assert grad_x is not None
        gradient = await self.compute.run(Urgency.CODEC, lambda: self.stage_pass.answered(grad_x), step=step)
        own = self.stage_pass.gradient_header(birth, activation.version, gradient, arrival.header, answer.header)
        self.exchanges.keep(arrival.exchange(own, gradient))
        return Passed(answer.loss_sum, answer.num_targets, gradient, own)

    async def backward(self, activation: Activation, saved: Saved, answer: Answer) -> torch.Tensor | None:
        """`StagePass.backward` with the answer, if the step's sum is still open."""
        birth = activation.birth
        assert answer.grad_y is not None
        assert answer.header is not None
        grad_y, header = answer.grad_y, answer.header

        def compute() -> torch.Tensor | None:
            try:
                self._check_open(birth)
            except Refused:
                self.counters.stragglers += 1
                raise
            self._screens.check("gradient_norm", header.producer, self.stage_pass.tensors.norm(grad_y))
            return self.stage_pass.backward(activation, saved, grad_y, header)

        made = await self.compute.run(Urgency.BACKWARD, compute, step=birth.step)
        self.counters.microbatches += 1
        self.gate.work_done(birth.step)
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
                return self.stage_pass.forward_only(birth, weights, x, arrival.targets, arrival.header)

            activation = await self.compute.run(Urgency.EVALUATE, forward)
            answer = await downstream.send(activation)
            loss_sum, num_targets = answer.loss_sum, answer.num_targets
        self.counters.evaluated += 1
        return loss_sum, num_targets
