"""This is where microbatches are born at stage 0: read, signed, sent through the stages, and brought home."""

import asyncio
import contextlib
import logging
import math
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from peer.adversary import At
from peer.compute import Urgency
from peer.downstream import Activation, Downstream, Refused
from peer.grants import Ticket
from peer.rounds import StageRounds
from peer.stage_work import StageWork
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import MicrobatchId, PeerId, Step, Version
from swarm.data.batches import BatchReader, held_out_batches
from swarm.data.token_file import TokenFile
from swarm.model.stage import Saved
from swarm.network.transport import Message, Transport
from verification.headers import BirthRecord, Kind, ids_bytes, signed

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
    rounds: StageRounds
    downstream: Downstream
    train: TokenFile
    held_out: TokenFile
    losses: dict[Step, StepLoss] = field(default_factory=dict)
    in_flight: int = 0

    def __post_init__(self) -> None:
        self.settings = self.work.settings
        self._reader = BatchReader(self.settings, self.train)
        self._held_out = held_out_batches(self.settings, self.held_out, limit_tokens=len(self.held_out))

    def serve(self, transport: Transport) -> None:
        transport.serve(EVALUATE, self._on_evaluate, max_body_bytes=0)

    async def run(self, stop: asyncio.Event) -> None:
        """Start microbatches as they are granted and permitted, until `stop`; then wait for those in flight."""
        slots = self.settings.limits.max_in_flight
        running: set[asyncio.Task[None]] = set()
        stopping = asyncio.ensure_future(stop.wait())
        try:
            while not stop.is_set():
                permit = self.work.permit
                free = 0 if permit.withheld else slots - len(running)
                self.rounds.tickets.want(free)
                turning = asyncio.ensure_future(permit.changed.wait())
                if free <= 0:
                    await asyncio.wait({*running, stopping, turning}, return_when=asyncio.FIRST_COMPLETED)
                else:
                    ticket = asyncio.ensure_future(self.rounds.tickets.next())
                    await asyncio.wait({*running, stopping, turning, ticket}, return_when=asyncio.FIRST_COMPLETED)
                    if ticket.done():
                        running.add(asyncio.ensure_future(self._one(ticket.result())))
                    else:
                        ticket.cancel()
                        with contextlib.suppress(asyncio.CancelledError):
                            await ticket
                turning.cancel()
                for task in [task for task in running if task.done()]:
                    running.discard(task)
                    task.result()
                self.in_flight = len(running)
        finally:
            self.rounds.tickets.want(0)
            stopping.cancel()
            if running:
                _, late = await asyncio.wait(running, timeout=self.settings.deadlines.drain_s)
                for task in late:
                    task.cancel()
            self.in_flight = 0

    async def _one(self, ticket: Ticket) -> None:
        attempt = ticket.attempt
        for _ in range(self.settings.limits.max_microbatch_attempts):
            try:
                await self._attempt(ticket, attempt)
            except Refused as refusal:
                log.info("microbatch %d: %s", ticket.microbatch_id, refusal)
                self.rounds.tickets.failed(ticket, step_is_over=refusal.status == "closed")
                return
            except (TransientError, RemoteError) as error:
                log.info("microbatch %d of step %d again: %s", ticket.microbatch_id, ticket.step, error)
                attempt += 1
                await asyncio.sleep(RETRY_S)
            else:
                self.rounds.tickets.done(ticket)
                return
            if int(ticket.step) < self.rounds.version:
                break
        self.rounds.tickets.failed(ticket, step_is_over=int(ticket.step) < self.rounds.version)

    async def _attempt(self, ticket: Ticket, attempt: int) -> None:
        tokens_BL, targets_BL = self._reader.batch(ticket.microbatch_id)
        replica, adversary, at = self.work.replica, self.work.adversary, At(ticket.step, ticket.microbatch_id)
        vocab_size = replica.model.vocab_size
        targets_BL = adversary.targets(at, torch.from_numpy(targets_BL), vocab_size=vocab_size).numpy()
        birth = self._birth("train", ticket.microbatch_id, attempt, ticket.step, tokens_BL, targets_BL)

        def forward() -> tuple[Activation, Saved]:
            if self.work.permit.withheld:
                raise Refused("busy", "this peer's owner has paused it")
            if not replica.accepts(ticket.step):
                raise Refused("closed", f"step {ticket.step} is closed here")
            if not replica.can_compute(ticket.step):
                raise TransientError(f"version {replica.version} was loaded here: step {ticket.step} needs the next")
            version, weights = replica.weights_for(ticket.step)
            weights = adversary.weights(at, replica.model, version, weights)
            tokens = torch.from_numpy(tokens_BL)
            y, saved = replica.model.forward(weights, tokens, keep=True)
            assert saved is not None
            y = adversary.activation(at, weights, tokens, y)
            return self.work.pack(birth, version, (birth.digest(),), y, ids_bytes(targets_BL)), saved

        activation, saved = await self.work.compute.run(Urgency.BIRTH, forward, step=ticket.step)
        self.rounds.tickets.passed_on(ticket)
        answer = await self.downstream.send(activation, replica.stage, run_id=self.work.run_id)
        _, counted = await self.work.backward(birth, activation, saved, answer, birth.digest())
        if counted:
            self.work.keep_exhibit(activation, answer, x=ids_bytes(tokens_BL))
        loss = self.losses.setdefault(ticket.step, StepLoss())
        if math.isfinite(answer.loss_sum):
            loss.loss_sum += answer.loss_sum
            loss.num_targets += answer.num_targets
        for old in [step for step in self.losses if int(step) < int(ticket.step) - 8]:
            del self.losses[old]

    def _birth(
        self,
        kind: Kind,
        microbatch_id: MicrobatchId,
        attempt: int,
        step: Step,
        tokens_BL: NDArray[np.int64],
        targets_BL: NDArray[np.int64],
    ) -> BirthRecord:
        return signed(
            BirthRecord.of_batch(
                self.work.run_id,
                self.work.identity.peer_id,
                kind,
                microbatch_id,
                attempt=attempt,
                step=step,
                era=self.rounds.era,
                tokens_BL=tokens_BL,
                targets_BL=targets_BL,
            ),
            self.work.identity,
        )

    async def _on_evaluate(self, sender: PeerId, request: Message) -> Message:
        """Held-out loss of one microbatch at a version: forward only, through all stages."""
        fields = Fields("evaluation", request.meta)
        version, index = fields.integer("version"), fields.integer("index", high=1 << 32)
        fields.done()
        if index >= len(self._held_out):
            raise RemoteError("protocol", f"held-out microbatch {index} of {len(self._held_out)}", sender)
        tokens_BL, targets_BL = self._held_out[index]
        if self.work.permit.withheld:
            raise TransientError("this peer's owner has paused it")
        weights = self.rounds.evaluation_weights(version)
        if weights is None:
            raise TransientError(f"version {version} is not held here, {self.rounds.version} is")
        full = self.settings.batch.microbatch_size
        if len(tokens_BL) < full:  # the last one: padded with samples that do not count
            missing = full - len(tokens_BL)
            tokens_BL = np.concatenate([tokens_BL, np.zeros((missing, tokens_BL.shape[1]), np.int64)])
            targets_BL = np.concatenate([targets_BL, np.full((missing, targets_BL.shape[1]), -100, np.int64)])
        birth = self._birth("evaluate", MicrobatchId(index), 0, Step(version), tokens_BL, targets_BL)

        def forward() -> Activation:
            y, _ = self.work.replica.model.forward(weights, torch.from_numpy(tokens_BL), keep=False)
            return self.work.pack(birth, Version(version), (birth.digest(),), y, ids_bytes(targets_BL))

        activation = await self.work.compute.run(Urgency.EVALUATE, forward)
        answer = await self.downstream.send(activation, self.work.replica.stage, run_id=self.work.run_id)
        if not math.isfinite(answer.loss_sum):
            raise TransientError(f"the held-out loss at version {version} is {answer.loss_sum}")
        return Message({"loss_sum": answer.loss_sum, "num_targets": answer.num_targets})
