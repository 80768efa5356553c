"""The way back of a peer that was found to compute wrongly: it shows that it can do better.

Asked by the host, it does the work again that it is accused of: who now gets what everybody gets had a fault, and is
no liar. It tests itself, loads its state anew, and is a newcomer again.
"""

import asyncio
import hashlib
import logging
from collections.abc import Sequence

import torch

from peer.audit.verdicts import Verdicts
from peer.pipeline.compute import Urgency
from peer.round.stage_steps import StageSteps
from peer.state.rebuilding import rebuilt
from swarm.bulk_digest import bulk_digest
from swarm.core.canonical import Value
from swarm.core.errors import LocalError, RemoteError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId, Version
from swarm.host_protocol import MAX_CASE_BYTES, PAST_IS_GONE, PLEA, RETURN
from swarm.model.subspace import StageInput, given_on
from swarm.network.transport import Message, Transport
from verification.audit.evidence import Evidence
from verification.audit.verdicts import Pardon, Plea
from verification.kinds.hop_mismatch import HopMismatch
from verification.kinds.mismatch import Mismatch, mismatch_of
from verification.replay.exam_answer import encoded_hop
from verification.replay.rebuilt import rebuilt_for
from verification.round.papers import Bytes

log = logging.getLogger(__name__)

SELF_TESTS = 8
"""Times one computation must give the same bits: on one machine it does."""
ASK_AGAIN_S = 2.0


class Mending:
    """What a peer does about its own faults."""

    def __init__(self, steps: StageSteps, verdicts: Verdicts, host: PeerId) -> None:
        self._steps = steps
        self._verdicts = verdicts
        self._host = host
        self._faulty = asyncio.Event()

    def serve(self, transport: Transport) -> None:
        """Begin to answer the host."""
        transport.serve(PLEA, self._on_plea, max_body_bytes=MAX_CASE_BYTES)

    def fault(self) -> None:
        """The run key says that this peer had one."""
        self._faulty.set()

    async def run(self) -> None:
        """Come back after every fault, for ever. Raises LocalError if this machine cannot, or may not."""
        steps = self._steps
        while True:
            await self._faulty.wait()
            self._faulty.clear()
            log.warning("this machine has computed wrongly and is out of the run; it tests itself and comes back")
            await steps.context.compute.run(Urgency.ROUND, lambda: self_test(steps))
            self._verdicts.take(await self._pardon())  # and with it the state is loaded anew

    async def _pardon(self) -> Pardon:
        steps = self._steps
        while True:
            try:
                reply = await steps.context.transport.call(
                    self._host,
                    RETURN,
                    Message({}),
                    timeout_s=steps.context.settings.deadlines.call_s,
                    max_body_bytes=0,
                )
                return Pardon.from_value(Fields("return answer", reply.meta).message("pardon"))
            except TransientError as error:
                log.info("the host: %s", error)
                await asyncio.sleep(ASK_AGAIN_S)
            except RemoteError as error:
                raise LocalError(
                    f"this machine may not come back: {error}; test its memory, take back overclocking, and join with "
                    "a new identity"
                ) from error

    async def _on_plea(self, sender: PeerId, request: Message) -> Message:
        """Do the accused work again. Nothing that the host sends says what should come of it."""
        steps = self._steps
        if sender != self._host:
            raise RemoteError("standing", "only the host asks for a plea", sender)
        evidence = await asyncio.to_thread(Evidence.from_bytes, request.body, max_bytes=MAX_CASE_BYTES)
        case = mismatch_of(evidence)
        if (case.accused, evidence.run_id, evidence.stage) != (
            steps.context.me,
            steps.context.run_id,
            steps.chain.stage,
        ):
            raise RemoteError("evidence", f"evidence about {case.accused} of stage {evidence.stage}", sender)
        try:
            bodies = await steps.context.judging.run(Urgency.AUDIT, lambda: self._again(case, evidence))
        except LocalError as error:
            raise RemoteError(PAST_IS_GONE, f"this peer cannot do it again by itself: {error}", sender) from error
        found = await asyncio.to_thread(lambda: tuple(bulk_digest(body) for body in bodies))
        plea = Plea(
            steps.context.run_id, steps.context.me, evidence.stage, Version(evidence.version), evidence.digest(), found
        )
        sizes: list[Value] = [len(body) for body in bodies]
        return Message({"plea": plea.signed_by(steps.context.identity).to_value(), "sizes": sizes}, b"".join(bodies))

    def _again(self, case: Mismatch, evidence: Evidence) -> Sequence[Bytes]:
        """(judging) Raises LocalError where the weights are here no more, and not in the evidence either."""
        steps = self._steps
        oldest, version = case.versions
        try:
            replay = rebuilt(steps, version, oldest)
        except LocalError:
            if case.past is None:
                raise
            replay = rebuilt_for(case, evidence, steps.replica.model_of_replays())
        if isinstance(case, HopMismatch):
            case.claim.check(steps.context.settings, run_id=steps.context.run_id)
            return (replay.hop(case.claim).body,)
        step = case.contribution.step
        if case.parts:
            return replay.encoded_contribution(case.exhibits, step)
        return encoded_hop(replay.microbatch(case.exhibits[0], step, None))


def self_test(steps: StageSteps) -> None:
    """(compute) Raises LocalError if this machine computes the same thing in two ways."""
    model, settings = steps.replica.model, steps.context.settings
    shape = (settings.batch.microbatch_size, settings.data.sequence_length)
    chance = torch.Generator().manual_seed(0)
    tokens_BL = torch.randint(settings.data.vocab_size, shape, generator=chance)
    x: StageInput = tokens_BL
    if not model.is_first:
        x = given_on(settings.model, torch.randn((*shape, model.hop_width), generator=chance), tokens_BL)
    weights, found = model.weights(steps.replica.state.weights), set()
    for _ in range(SELF_TESTS):
        into = torch.zeros(steps.replica.layout.num_values, dtype=torch.float32, device=model.device)
        if model.is_last:
            _, _, saved = model.loss(weights, x, tokens_BL, keep=True)
            assert saved is not None
            model.loss_backward(saved, into)
        else:
            y_BLD, kept = model.forward(weights, x, keep=True)
            assert kept is not None
            model.backward(kept, y_BLD, into)
        found.add(hashlib.sha256(into.cpu().numpy().tobytes()).digest())
    if len(found) > 1:
        raise LocalError(
            f"{SELF_TESTS} times the same computation came to {len(found)} results: this machine is broken (memory, "
            "overclocking, heat); it leaves the run"
        )
