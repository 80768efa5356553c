"""A microbatch computed at this peer's stage: forward, what comes back, and the papers of both."""

import asyncio
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Coroutine
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
TRIES, RETRY_S = 5, 0.5
"""Of a gradient's bytes for which there is no memory, though the microbatch is in the sum."""


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


class Beginning:
    """Which comes first: that a microbatch is computed into a step's sum, or that nobody waits for it any more."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._has_begun: bool | None = None
        """None until one of the two has come."""

    def begin(self) -> None:
        """(compute) It is computed now. Raises TransientError if nobody waits."""
        with self._changing:
            if self._has_begun is None:
                self._has_begun = True
            if not self._has_begun:
                raise TransientError("nobody waits for this microbatch any more")

    def let_go(self) -> bool:
        """Nobody waits: whether it is not computed then."""
        with self._changing:
            if self._has_begun is None:
                self._has_begun = False
            return not self._has_begun


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
        return await _to_its_end(lambda beginning: self._lost(arrival, beginning))

    async def _lost(self, arrival: Arrival, beginning: Beginning) -> Passed:
        birth, step = arrival.birth, arrival.birth.step
        is_counted = False

        def compute(opened: tuple[StageInput, torch.Tensor]) -> Callable[[], LossPass]:
            nonlocal is_counted
            beginning.begin()
            self._check_open(birth)
            counts = self.stage_pass.counts(birth)
            try:
                return self.stage_pass.loss_begun(birth, *opened, arrival.header)
            finally:
                is_counted = counts and not self.stage_pass.counts(birth)

        try:
            made = await self.in_turns(Urgency.FORWARD, lambda: self.opened(arrival), compute, step=step)
        except TransientError:
            if is_counted:
                await self._void(birth)
            raise
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
        return await _to_its_end(lambda beginning: self._answered(arrival, activation, saved, answer, beginning))

    async def _answered(
        self, arrival: Arrival, activation: Activation, saved: Saved, answer: Answer, beginning: Beginning
    ) -> Passed:
        birth, gradient = arrival.birth, await self._backward(activation, saved, answer, beginning)
        assert gradient is not None
        own = self.stage_pass.gradient_header(birth, activation.version, gradient, arrival.header, answer.header)
        self.exchanges.keep(arrival.exchange(own, gradient))
        return Passed(answer.loss_sum, answer.num_targets, gradient, own)

    async def backward(self, activation: Activation, saved: Saved, answer: Answer) -> None:
        """At stage 0, as in a middle one: `StagePass.backward` with the answer, if the step's sum is still open."""
        await _to_its_end(lambda beginning: self._backward(activation, saved, answer, beginning))

    async def _backward(
        self, activation: Activation, saved: Saved, answer: Answer, beginning: Beginning
    ) -> memoryview | None:
        """The gradient of x, encoded; None at stage 0."""
        birth = activation.birth
        assert answer.grad_y is not None
        assert answer.header is not None
        grad_y, header = answer.grad_y, answer.header
        made: list[torch.Tensor | None] = []
        """The gradient of x, once that of the parameters is in the sum: neither is made twice."""

        def screen() -> None:
            if not made:
                self._screens.check("gradient_norm", header.producer, self.stage_pass.tensors.norm(grad_y))

        def compute(screened: None) -> Callable[[], memoryview | None]:
            if not made:
                beginning.begin()
                try:
                    self._check_open(birth)
                except Refused:
                    self.counters.stragglers += 1
                    raise
                made.append(self.stage_pass.backward(activation, saved, grad_y, header))
            (grad_x,) = made
            return self.stage_pass.answering(grad_x) if grad_x is not None else lambda: None

        try:
            answered = await self._in_any_mode(screen, compute, saved, made, step=birth.step)
        except TransientError:
            if made:
                await self._void(birth)
            raise
        self.counters.microbatches += 1
        self.gate.work_done(birth.step)
        return answered

    async def _in_any_mode(
        self,
        screen: Callable[[], None],
        backward: Callable[[None], Callable[[], memoryview | None]],
        saved: Saved,
        made: list[torch.Tensor | None],
        *,
        step: Step,
    ) -> memoryview | None:
        """A backward pass, in a smaller mode each time memory gives out: later stages have the microbatch already.

        Raises MemoryFullError where there is none smaller: the microbatch goes elsewhere. Once it is `made`, and in the
        sum, only after some tries more.
        """
        tries_left = TRIES
        while True:
            try:
                return await self.in_turns(Urgency.BACKWARD, screen, backward, step=step)
            except MemoryFullError:
                screen = _nothing  # what came was screened
                saved.y_BLD = None  # its graph is half gone
                if made:
                    tries_left -= 1
                    if not tries_left:
                        raise
                    await asyncio.sleep(RETRY_S)
                elif self._memory is None or self._memory.rests:
                    raise

    async def _void(self, birth: BirthRecord) -> None:
        """What a microbatch added to its step's sum cannot be shown: the sum is not to be contributed, as one that is
        not finite is not."""

        def void() -> None:
            if self.replica.accepts(birth.step, birth.era):
                self.replica.sum_of(birth.step).gradient.flat.fill_(math.nan)

        log.warning("step %d: microbatch %d cannot be shown: the sum is left out", birth.step, birth.microbatch_id)
        await self.compute.run(Urgency.ROUND, void)

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


async def _to_its_end(work: Callable[[Beginning], Coroutine[Any, Any, R]]) -> R:
    """What comes of work that computes a microbatch into a step's sum and keeps what shows it: both or neither.

    Whoever lets go of it after the first has begun waits for the second: else an honest peer owes what it cannot show.
    """
    beginning = Beginning()
    task = asyncio.ensure_future(work(beginning))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if beginning.let_go():
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise


def _nothing() -> None:
    """To be done."""
