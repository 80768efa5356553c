"""A microbatch computed at this peer's stage: forward, what comes back, and the papers of both."""

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from peer.owner.permit import Permit
from peer.pipeline.compute import Urgency, WorkThread
from peer.pipeline.downstream import Answer, Downstream, HopCounters, Refused
from peer.pipeline.exchange_store import ExchangeStore
from peer.pipeline.memory_pressure import MemoryPressure
from peer.pipeline.passages import Arrival, Passed
from peer.pipeline.screens import Screens
from peer.pipeline.stage_pass import Activation, Born, LossPass, StagePass
from swarm.core.errors import MemoryFullError, TransientError
from swarm.core.ids import Step, Version
from swarm.model.stage import Saved, Weights
from swarm.model.subspace import StageInput
from verification.pipeline.headers import BirthRecord

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

AHEAD = 2
"""Microbatches whose way through the stage a GPU has been given and has not finished."""


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
        copies: WorkThread | None = None,
        permit: Permit | None = None,
        memory: MemoryPressure | None = None,
    ) -> None:
        """`permit`: the owner's, to begin. `copies` as in `StageContext`; None: `compute`.

        `memory`: what is known of it; None: it never gives out.
        """
        self.stage_pass = stage_pass
        self.settings = stage_pass.settings
        self.run_id = stage_pass.run_id
        self.replica = stage_pass.replica
        self.compute = compute
        self._copies = copies or compute
        self._begun: deque[Any] = deque()
        """Marks of what the device was given to compute last."""
        self.gate = gate
        self.counters = counters
        self.exchanges = exchanges
        self._screens = screens
        self.permit = permit or Permit()
        self._memory = memory

    def check_permit(self) -> None:
        """Raises Refused."""
        if self.permit.withheld:
            raise Refused("busy", "this peer's owner has paused it")
        if self._memory is not None and self._memory.rests:
            raise Refused("busy", "this peer is out of memory")

    async def in_turns(
        self, urgency: Urgency, opened: Callable[[], T], begun: Callable[[T], Callable[[], R]], *, step: int = 0
    ) -> R:
        """What comes of three pieces of work: open what came, have it computed, take what comes of it.

        On a CPU they are one job. On a GPU another thread opens and takes, while the one that computes has the next
        microbatch computed.
        """
        if self._copies is self.compute:

            def all_of_it() -> R:
                return begun(opened())()

            return await self.compute.run(urgency, all_of_it, step=step)
        ready = await self._copies.run(Urgency.CODEC, opened, step=step)
        taking = await self.compute.run(urgency, lambda: self._not_far_ahead(lambda: begun(ready)), step=step)
        return await self._copies.run(Urgency.CODEC, taking, step=step)

    def _not_far_ahead(self, begin: Callable[[], R]) -> R:
        """(compute) Begin when the device is done with all but the last: what is urgent does not wait for many."""
        link = self.replica.model.link
        if len(self._begun) >= AHEAD:
            link.wait(self._begun.popleft())
        begun = begin()
        self._begun.append(link.mark())
        return begun

    def opened(self, arrival: Arrival) -> tuple[StageInput, torch.Tensor]:
        """(copies) The activation and the targets, once all about them is as it must be."""
        self.check_permit()  # it may have waited long for the thread
        x, targets_BL = self.stage_pass.opened(arrival.exchange(), arrival.sender)
        self._screens.check("activation_norm", arrival.sender, self.stage_pass.tensors.norm(x))
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

        def compute(opened: tuple[StageInput, torch.Tensor]) -> Callable[[], LossPass]:
            self._check_open(birth)
            return self.stage_pass.loss_begun(birth, *opened, arrival.header)

        made = await self.in_turns(Urgency.FORWARD, lambda: self.opened(arrival), compute, step=step)
        assert made.gradient is not None, f"what comes to stage {self.replica.stage} comes from the one before"
        self.counters.microbatches += 1
        self.gate.work_done(step)
        own = self.stage_pass.gradient_header(birth, made.version, made.gradient, arrival.header)
        self.exchanges.keep(arrival.exchange(own, made.gradient))
        return Passed(made.loss_sum, birth.num_targets, made.gradient, own)

    async def only_stage(self, born: Born, check_open: Callable[[], None]) -> float:
        """The loss sum of a microbatch that begins and ends here: a source's, in a run of one stage.

        `check_open` (compute) raises what forbids it, once its turn has come.
        """
        birth, tensors = born.birth, self.stage_pass.tensors

        def compute(targets_BL: torch.Tensor) -> Callable[[], LossPass]:
            check_open()
            return self.stage_pass.loss_begun(birth, torch.from_numpy(born.tokens_BL), targets_BL, None)

        if not self.exchanges.keep_born(birth, born.targets):
            raise TransientError(f"microbatch {birth.microbatch_id} was begun more often than can be shown")
        made = await self.in_turns(Urgency.BIRTH, lambda: tensors.targets(born.targets), compute, step=birth.step)
        self.counters.microbatches += 1
        self.gate.work_done(birth.step)
        return made.loss_sum

    async def middle_stage(self, arrival: Arrival, downstream: Downstream) -> Passed:
        """Send a microbatch on, and take its gradient back."""
        birth, step = arrival.birth, arrival.birth.step

        def forward(opened: tuple[StageInput, torch.Tensor]) -> Callable[[], tuple[Activation, Saved]]:
            self._check_open(birth)
            return self.stage_pass.forward_begun(birth, opened[0], arrival.targets, arrival.header)

        activation, saved = await self.in_turns(Urgency.FORWARD, lambda: self.opened(arrival), forward, step=step)
        self.exchanges.keep(arrival.exchange())
        answer = await downstream.send(activation)
        gradient = await self.backward(activation, saved, answer)
        assert gradient is not None
        own = self.stage_pass.gradient_header(birth, activation.version, gradient, arrival.header, answer.header)
        self.exchanges.keep(arrival.exchange(own, gradient))
        return Passed(answer.loss_sum, answer.num_targets, gradient, own)

    async def backward(self, activation: Activation, saved: Saved, answer: Answer) -> memoryview | None:
        """`StagePass.backward` with the answer, if the step's sum is still open: the gradient of x, encoded."""
        birth = activation.birth
        assert answer.grad_y is not None
        assert answer.header is not None
        grad_y, header = answer.grad_y, answer.header

        def screen() -> None:
            self._screens.check("gradient_norm", header.producer, self.stage_pass.tensors.norm(grad_y))

        def compute(screened: None) -> Callable[[], memoryview | None]:
            try:
                self._check_open(birth)
            except Refused:
                self.counters.stragglers += 1
                raise
            grad_x = self.stage_pass.backward(activation, saved, grad_y, header)
            return self.stage_pass.answering(grad_x) if grad_x is not None else lambda: None

        made = await self._in_any_mode(screen, compute, saved, step=birth.step)
        self.counters.microbatches += 1
        self.gate.work_done(birth.step)
        return made

    async def _in_any_mode(
        self,
        screen: Callable[[], None],
        backward: Callable[[None], Callable[[], memoryview | None]],
        saved: Saved,
        *,
        step: Step,
    ) -> memoryview | None:
        """A backward pass, in a smaller mode each time memory gives out: later stages have the microbatch already.

        Raises MemoryFullError where there is none smaller: the microbatch goes elsewhere.
        """
        while True:
            try:
                return await self.in_turns(Urgency.BACKWARD, screen, backward, step=step)
            except MemoryFullError:
                screen = _nothing  # what came was screened
                saved.y_BLD = None  # its graph is half gone
                if self._memory is None or self._memory.rests:
                    raise

    async def evaluate(self, arrival: Arrival, downstream: Downstream | None) -> tuple[float, int]:
        """Loss sum and targets of a held-out microbatch: forward only."""
        birth = arrival.birth
        weights = self.gate.evaluation_weights(int(birth.step))
        if weights is None:
            raise Refused("behind", f"version {birth.step} is not held here")

        if downstream is None:
            loss_sum, num_targets = await self.held_out_loss(birth, weights, lambda: self.opened(arrival))
        else:

            def forward() -> Activation:
                x, _ = self.opened(arrival)
                return self.stage_pass.forward_only(birth, weights, x, arrival.targets, arrival.header)

            activation = await self.compute.run(Urgency.EVALUATE, forward)
            answer = await downstream.send(activation)
            loss_sum, num_targets = answer.loss_sum, answer.num_targets
        self.counters.evaluated += 1
        return loss_sum, num_targets

    async def held_out_loss(
        self, birth: BirthRecord, weights: Weights, opened: Callable[[], tuple[StageInput, torch.Tensor]]
    ) -> tuple[float, int]:
        """At the last stage: loss sum and number of targets of x and targets as `opened` has them."""

        def loss() -> tuple[float, int]:
            x, targets_BL = opened()
            bounds = birth.document_bounds
            loss_sum, num_targets, _ = self.replica.model.loss(weights, x, targets_BL, keep=False, bounds=bounds)
            return loss_sum, num_targets

        return await self.compute.run(Urgency.EVALUATE, loss)


def _nothing() -> None:
    """To be done."""
