"""Microbatches born at stage 0: read, signed, sent through the stages, and brought home; or done here, where the
first stage is the last."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from peer.pipeline.compute import Urgency
from peer.pipeline.downstream import Downstream, Refused
from peer.pipeline.grants import Turn
from peer.pipeline.leased_tokens import LeasedTokens
from peer.pipeline.stage_pass import Activation, Born
from peer.pipeline.stage_work import StageWork
from peer.pipeline.turns import Turns
from peer.round.stage_steps import StageSteps
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import MicrobatchId, PeerId, Step
from swarm.core.round.contribution import MAX_ATTEMPTS
from swarm.model.stage import Saved
from swarm.network.transport import Message, Transport
from verification.pipeline.headers import Kind

log = logging.getLogger(__name__)

EVALUATE = "evaluate"
RETRY_S = 0.25


@dataclass
class StepLoss:
    """Training loss of one step, over this source's microbatches."""

    loss_sum: float = 0.0
    num_targets: int = 0


@dataclass
class Source:
    """Keeps this peer's share of microbatches in flight, and answers the host's evaluations."""

    work: StageWork
    steps: StageSteps
    turns: Turns
    downstream: Downstream | None
    """None in a run of one stage: what begins here ends here."""
    tokens: LeasedTokens
    losses: dict[Step, StepLoss] = field(default_factory=dict)
    in_flight: int = 0

    def __post_init__(self) -> None:
        self.settings = self.work.settings

    def serve(self, transport: Transport) -> None:
        transport.serve(EVALUATE, self._on_evaluate, max_body_bytes=0)

    def leave(self, transport: Transport) -> None:
        """This peer is no source of the run any more, though it may serve another stage."""

        async def has_left(sender: PeerId, request: Message) -> Message:
            raise TransientError("this peer has left the first stage")

        transport.serve(EVALUATE, has_left, max_body_bytes=0)

    async def run(self, stop: asyncio.Event) -> None:
        """Start microbatches as they are granted and permitted, until `stop`; then wait for those in flight."""
        slots = self.settings.limits.max_in_flight
        running: set[asyncio.Task[None]] = set()
        stopping = asyncio.ensure_future(stop.wait())
        awaited: set[asyncio.Task[Any]] = {stopping}
        try:
            while not stop.is_set():
                permit = self.work.permit
                free = 0 if permit.withheld else slots - len(running)
                self.turns.want(free)
                turning = asyncio.ensure_future(permit.changed.wait())
                awaited = {stopping, turning}
                if free <= 0:
                    await asyncio.wait({*running, *awaited}, return_when=asyncio.FIRST_COMPLETED)
                else:
                    turn = asyncio.ensure_future(self.turns.next())
                    awaited.add(turn)
                    await asyncio.wait({*running, *awaited}, return_when=asyncio.FIRST_COMPLETED)
                    if turn.done():
                        running.add(asyncio.ensure_future(self._one(turn.result())))
                    else:
                        turn.cancel()
                        with contextlib.suppress(asyncio.CancelledError):
                            await turn
                turning.cancel()
                for task in [task for task in running if task.done()]:
                    running.discard(task)
                    task.result()
                self.in_flight = len(running)
        finally:
            self.turns.want(0)
            for task in awaited:
                task.cancel()
            if running:
                _, late = await asyncio.wait(running, timeout=self.settings.deadlines.drain_s)
                for task in late:
                    task.cancel()
            self.in_flight = 0

    async def _one(self, turn: Turn) -> None:
        attempt = turn.attempt
        for _ in range(self.settings.limits.max_microbatch_attempts):
            try:
                await self._attempt(turn, attempt)
            except Refused as refusal:
                log.info("microbatch %d: %s", turn.microbatch_id, refusal)
                self.turns.failed(turn, step_is_over=refusal.status == "closed")
                return
            except (TransientError, RemoteError) as error:
                log.info("microbatch %d of step %d again: %s", turn.microbatch_id, turn.step, error)
                attempt = min(attempt + 1, MAX_ATTEMPTS - 1)
                await asyncio.sleep(RETRY_S)
            else:
                self.turns.done(turn)
                return
            if int(turn.step) < self.steps.version:
                break
        self.turns.failed(turn, step_is_over=int(turn.step) < self.steps.version)

    async def _attempt(self, turn: Turn, attempt: int) -> None:
        work, replica, step = self.work, self.work.replica, turn.step
        tokens_BL, targets_BL = await self.tokens.batch(turn.microbatch_id, born_for=step)
        born = self._born("train", turn.microbatch_id, attempt, step, tokens_BL, targets_BL)

        def check_open() -> None:
            if work.permit.withheld:
                raise Refused("busy", "this peer's owner has paused it")
            if not replica.accepts(step, born.birth.era):
                raise Refused("closed", f"step {step} is closed here")
            if not replica.can_compute(step):
                raise TransientError(f"version {replica.version} was loaded here: step {step} needs the next")

        def forward(opened: None) -> Callable[[], tuple[Activation, Saved]]:
            check_open()
            return work.stage_pass.forward_begun(born.birth, torch.from_numpy(born.tokens_BL), born.targets, None)

        if self.downstream is None:
            loss_sum = await work.only_stage(born, check_open)
        else:
            began_at = time.monotonic()
            activation, saved = await work.in_turns(Urgency.BIRTH, lambda: None, forward, step=step)
            self.turns.passed_on(turn)
            answer = await self.downstream.send(activation)
            await work.backward(activation, saved, answer)
            work.counters.answered.observe(time.monotonic() - began_at)
            loss_sum = answer.loss_sum
        loss = self.losses.setdefault(turn.step, StepLoss())
        if math.isfinite(loss_sum):
            loss.loss_sum += loss_sum
            loss.num_targets += born.birth.num_targets
        for old in [step for step in self.losses if int(step) < int(turn.step) - 8]:
            del self.losses[old]

    def _born(
        self,
        kind: Kind,
        microbatch_id: MicrobatchId,
        attempt: int,
        step: Step,
        tokens_BL: NDArray[np.int64],
        targets_BL: NDArray[np.int64],
    ) -> Born:
        return self.work.stage_pass.born(
            kind,
            microbatch_id,
            attempt=attempt,
            step=step,
            era=self.steps.era,
            tokens_BL=tokens_BL,
            targets_BL=targets_BL,
        )

    async def _on_evaluate(self, sender: PeerId, request: Message) -> Message:
        """Held-out loss of one microbatch at a version: forward only, through all stages."""
        fields = Fields("evaluation", request.meta)
        version, index = fields.integer("version"), fields.integer("index", high=1 << 32)
        fields.done()
        try:
            tokens_BL, targets_BL = await self.tokens.held_out_batch(index)
        except IndexError as error:
            raise RemoteError("protocol", str(error), sender) from error
        if self.work.permit.withheld:
            raise TransientError("this peer's owner has paused it")
        weights = self.steps.evaluation_weights(version)
        if weights is None:
            raise TransientError(f"version {version} is not held here, {self.steps.version} is")
        full = self.settings.batch.microbatch_size
        if len(tokens_BL) < full:  # the last one: padded with samples that do not count
            missing = full - len(tokens_BL)
            tokens_BL = np.concatenate([tokens_BL, np.zeros((missing, tokens_BL.shape[1]), np.int64)])
            targets_BL = np.concatenate([targets_BL, np.full((missing, targets_BL.shape[1]), -100, np.int64)])
        born = self._born("evaluate", MicrobatchId(index), 0, Step(version), tokens_BL, targets_BL)
        x = torch.from_numpy(born.tokens_BL)
        if self.downstream is None:
            both = x, torch.from_numpy(born.targets_BL)
            loss_sum, num_targets = await self.work.held_out_loss(born.birth, weights, lambda: both)
        else:
            stage_pass = self.work.stage_pass
            activation = await self.work.compute.run(
                Urgency.EVALUATE, lambda: stage_pass.forward_only(born.birth, weights, x, born.targets, None)
            )
            answer = await self.downstream.send(activation)
            loss_sum, num_targets = answer.loss_sum, answer.num_targets
        if not math.isfinite(loss_sum):
            raise TransientError(f"the held-out loss at version {version} is {loss_sum}")
        return Message({"loss_sum": loss_sum, "num_targets": num_targets})
