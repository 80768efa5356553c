"""A microbatch's way to the next stage: to the peer expected to finish it soonest, or to another.

Whoever sends work keeps it until it is answered.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from peer.pipeline.compute import Urgency, WorkThread
from peer.pipeline.stage_pass import Activation, StagePass
from swarm.core.errors import RemoteError, TransientError, UnreachableError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId
from swarm.core.pipeline.deadlines import AdaptiveDeadline
from swarm.core.pipeline.quickest import Quickest
from swarm.core.pipeline.wiring import EarliestFinishWiring, NoPeerAvailable
from swarm.host_protocol import MOST_NATS
from swarm.network.loop import happened
from swarm.network.transport import Message, Transport
from verification.kinds.protocol_violation import ProtocolViolation, ViolationError
from verification.pipeline.exchanges import Exchange
from verification.pipeline.headers import HopHeader

log = logging.getLogger(__name__)

METHOD = "forward"
ROOM = "room"
"""{birth, step | None} -> {waits_s, is_held}: how long a microbatch would wait, of the step if it is to train."""
ASK_S = 0.5
"""Whoever has not said by then how long work would wait there is not waited for."""
MAX_HOP_ATTEMPTS = 12
MOST_CLOSED, CLOSED_S = 2, 2.0
"""So many peers have to say that a step is over, if there are as many; for so long the second one is looked for."""


class Refused(TransientError):
    """The peer is well but does not take the microbatch now. `status` is busy, behind, or closed (the step is over)."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass
class HopCounters:
    """What happened at this peer; for status and reports."""

    microbatches: int = 0
    evaluated: int = 0
    reassigned: int = 0
    refused: int = 0
    stragglers: int = 0
    adopted: int = 0
    """Answers to one who brought what another had brought before."""
    bad_messages: dict[str, int] = field(default_factory=dict)
    answered: Quickest = field(default_factory=Quickest)
    """From a microbatch's arrival here to its answer; at the first stage from where it begins to where it ends."""
    waited: Quickest = field(default_factory=Quickest)
    """From where a microbatch was sent on to its answer."""


@dataclass(frozen=True)
class Answer:
    """What came back for an activation."""

    loss_sum: float
    """NaN if it was not finite: then the gradient is zero."""
    num_targets: int
    grad_y: torch.Tensor | None
    header: HopHeader | None
    """Of the gradient."""


class Downstream:
    """Sends activations to the next stage, wherever they finish soonest, and brings their gradients back."""

    def __init__(
        self,
        stage_pass: StagePass,
        transport: Transport,
        copies: WorkThread,
        wiring: EarliestFinishWiring,
        counters: HopCounters,
        era: Callable[[], int],
        keep: Callable[[Exchange], bool],
        on_violation: Callable[[ProtocolViolation], None],
    ) -> None:
        """`era`: of this peer's stage now. What was born in an earlier one is sent to nobody any more.

        `keep` is told of each training microbatch before it goes to a peer, and again with the answer: whether it may
        go. `on_violation` is told of answers that no honest program gives.
        """
        self._settings = stage_pass.settings
        self._pass = stage_pass
        self._era = era
        self._transport = transport
        self._copies = copies
        self._wiring = wiring
        self._counters = counters
        self._keep = keep
        self._on_violation = on_violation
        self._deadline = AdaptiveDeadline(limit_s=stage_pass.longest_s, floor_s=3.0, factor=10.0)
        self._routes_changed = asyncio.Event()

    def update_peers(self, peers: set[PeerId]) -> None:
        """The next stage's live peers."""
        self._wiring.update(peers)
        self._routes_changed.set()

    async def send(self, activation: Activation) -> Answer:
        """The answer to an activation, from whichever peer gives it.

        Raises Refused: "closed" when the step is over downstream, "behind" when the stages have begun again;
        TransientError when nobody answers.
        """
        birth, birth_digest = activation.birth, activation.birth.digest()
        birth_is_training = birth.kind == "train"
        request = Message({"birth": birth_digest, "step": birth.step if birth_is_training else None})
        last = "no attempt"
        closed: dict[PeerId, Refused] = {}  # who says that the step is over: one alone may lie
        give_up_at = time.monotonic() + self._pass.longest_s
        attempts = 0
        while attempts < MAX_HOP_ATTEMPTS and time.monotonic() < give_up_at:
            if birth.era != self._era():
                raise Refused("behind", f"microbatch of era {birth.era}, this is {self._era()}")
            asked = self._wiring.worth_asking(birth_digest, now=time.monotonic())
            await asyncio.gather(*(self._ask(peer, request, birth_digest) for peer in asked))
            try:
                route = self._wiring.choose(birth_digest, but_not=closed, now=time.monotonic())
            except NoPeerAvailable as missing:
                last = str(missing)
                retry_at = missing.retry_at
                wait_s = 0.25 if retry_at is None else max(0.005, min(0.5, retry_at - time.monotonic()))
                self._routes_changed.clear()
                await happened(self._routes_changed, within_s=wait_s)
                continue
            started, waited_s = time.monotonic(), self._deadline.seconds
            try:
                answer = await self._send_to(route.peer_id, activation)
            except Refused as refusal:
                took_s = time.monotonic() - started if refusal.status == "busy" else 0.0
                self._wiring.refused(route.peer_id, took_s=took_s, now=time.monotonic())
                if refusal.status == "closed":
                    closed[route.peer_id] = refusal
                    if len(closed) >= MOST_CLOSED or closed.keys() >= set(self._wiring.peers()):
                        raise
                    give_up_at = min(give_up_at, time.monotonic() + CLOSED_S)
                last = str(refusal)
            except (UnreachableError, RemoteError) as failure:
                attempts += 1
                if birth_is_training and time.monotonic() - started >= waited_s:
                    self._deadline.missed()
                self._wiring.failed(route.peer_id, took_s=time.monotonic() - started, now=time.monotonic())
                self._counters.reassigned += 1
                if isinstance(failure, RemoteError):
                    self._counters.bad_messages[failure.kind] = self._counters.bad_messages.get(failure.kind, 0) + 1
                    if isinstance(failure, ViolationError):
                        self._on_violation(failure.case)
                last = f"{route.peer_id[-6:]}: {failure}"
                log.info("microbatch %d leaves %s: %s", activation.birth.microbatch_id, route.peer_id[-6:], failure)
            except TransientError as not_now:
                self._wiring.refused(route.peer_id, took_s=time.monotonic() - started, now=time.monotonic())
                last = str(not_now)
            except BaseException:
                self._wiring.cancelled(route.peer_id)
                raise
            else:
                if birth_is_training:
                    took_s = time.monotonic() - started
                    self._wiring.finished(route.peer_id, took_s, was_held=route.is_held)
                    if not route.is_held:
                        self._deadline.observe(took_s)
                        self._counters.waited.observe(took_s)
                else:  # forward only: says nothing of how long training takes
                    self._wiring.cancelled(route.peer_id)
                return answer
        for word in closed.values():
            raise word
        raise TransientError(f"microbatch {activation.birth.microbatch_id} found no peer: {last}")

    async def _ask(self, peer: PeerId, request: Message, birth_digest: bytes) -> None:
        """How long the microbatch would wait there; who does not say so now is not chosen while others do."""
        with contextlib.suppress(TransientError, RemoteError):
            reply = await self._transport.call(peer, ROOM, request, timeout_s=ASK_S, max_body_bytes=0)
            fields = Fields("room answer", reply.meta)
            waits_s, is_held = fields.number("waits_s"), fields.boolean("is_held")
            fields.done()
            self._wiring.told(peer, waits_s, holds=birth_digest if is_held else b"", now=time.monotonic())

    async def _send_to(self, peer: PeerId, activation: Activation) -> Answer:
        birth, tensors = activation.birth, self._pass.tensors
        header = self._pass.forward_header(activation, peer)
        exchange = activation.call(header)
        if birth.kind == "train" and not self._keep(exchange):
            raise TransientError(f"microbatch {birth.microbatch_id} was sent on more often than can be shown")
        request = Message({"birth": birth.to_value(), "header": header.to_value()}, activation.body)
        reply = await self._transport.call(
            peer,
            METHOD,
            request,
            timeout_s=self._deadline.seconds if birth.kind == "train" else self._pass.longest_s,
            max_body_bytes=tensors.gradient_codec.encoded_bytes(tensors.shape),
        )
        fields = Fields("hop answer", reply.meta)
        status = fields.text("status")
        if status != "ok":
            raise Refused(status, f"{peer[-6:]} is {status}: {fields.text('reason')}")
        loss_sum = fields.number("loss_sum") if fields.optional("loss_sum") else math.nan
        num_targets = fields.integer("num_targets")
        if not (math.isnan(loss_sum) or 0 <= loss_sum <= MOST_NATS * birth.num_targets):
            raise RemoteError("malformed", f"a loss of {loss_sum:g} nats, of {birth.num_targets} targets", peer)
        if birth.kind != "train":
            return Answer(loss_sum, num_targets, None, None)
        answer_header = HopHeader.from_value(fields.message("header"))
        answered = replace(exchange, gradient=answer_header, answer=reply.body)

        def check_and_decode() -> torch.Tensor:
            return self._pass.gradient_came(answered, peer)

        grad_y = await self._copies.run(Urgency.CODEC, check_and_decode, step=birth.step)
        self._keep(answered)
        return Answer(loss_sum, num_targets, grad_y, answer_header)
