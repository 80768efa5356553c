"""This is where a peer that was found to compute wrongly shows that it can do better, and comes back.

Asked by the host, it does the work again that it is accused of: who now gets what everybody gets had a fault, and is
no liar. It tests itself, loads its state anew, and is a newcomer again.
"""

import asyncio
import hashlib
import logging
from collections.abc import Sequence

import torch

from peer.compute import Urgency
from peer.exams import encoded_hop
from peer.rebuilding import rebuilt
from peer.rounds import StageRounds
from peer.verdicts import Verdicts
from swarm.averaging.activations import activation_codec
from swarm.bulk_digest import bulk_digest
from swarm.core.canonical import Value
from swarm.core.errors import LocalError, RemoteError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId, Version
from swarm.host_protocol import MAX_CASE_BYTES, PLEA, RETURN
from swarm.network.transport import Message, Transport
from verification.evidence import Evidence
from verification.kinds.hop_mismatch import HopMismatch
from verification.kinds.mismatch import Mismatch, mismatch_of
from verification.papers import Bytes
from verification.verdicts import Pardon, Plea

log = logging.getLogger(__name__)

SELF_TESTS = 8
"""Times one computation must give the same bits: on one machine it does."""
ASK_AGAIN_S = 2.0


class Mending:
    """What a peer does about its own faults."""

    def __init__(self, rounds: StageRounds, verdicts: Verdicts, coordinator: PeerId) -> None:
        self._rounds = rounds
        self._verdicts = verdicts
        self._coordinator = coordinator
        self._faulty = asyncio.Event()

    def serve(self, transport: Transport) -> None:
        """Begin to answer the host."""
        transport.serve(PLEA, self._on_plea, max_body_bytes=MAX_CASE_BYTES)

    def fault(self) -> None:
        """The run key says that this peer had one."""
        self._faulty.set()

    async def run(self) -> None:
        """Come back after every fault, for ever. Raises LocalError if this machine cannot, or may not."""
        rounds = self._rounds
        while True:
            await self._faulty.wait()
            self._faulty.clear()
            log.warning("this machine has computed wrongly and is out of the run; it tests itself and comes back")
            await rounds.compute.run(Urgency.ROUND, lambda: self_test(rounds))
            self._verdicts.take(await self._pardon())  # and with it the state is loaded anew

    async def _pardon(self) -> Pardon:
        rounds = self._rounds
        while True:
            try:
                reply = await rounds.transport.call(
                    self._coordinator, RETURN, Message({}), timeout_s=rounds.settings.deadlines.call_s, max_body_bytes=0
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
        rounds = self._rounds
        if sender != self._coordinator:
            raise RemoteError("standing", "only the host asks for a plea", sender)
        evidence = await asyncio.to_thread(Evidence.from_bytes, request.body, max_bytes=MAX_CASE_BYTES)
        case = mismatch_of(evidence)
        if (case.accused, evidence.run_id, evidence.stage) != (rounds.me, rounds.run_id, rounds.chain.stage):
            raise RemoteError("evidence", f"evidence about {case.accused} of stage {evidence.stage}", sender)
        try:
            bodies = await rounds.exact.run(Urgency.AUDIT, lambda: self._again(case))
        except LocalError as error:
            raise TransientError(f"this peer cannot do it again: {error}") from error
        found = await asyncio.to_thread(lambda: tuple(bulk_digest(body) for body in bodies))
        plea = Plea(rounds.run_id, rounds.me, evidence.stage, Version(evidence.version), evidence.digest(), found)
        sizes: list[Value] = [len(body) for body in bodies]
        return Message({"plea": plea.signed_by(rounds.identity).to_value(), "sizes": sizes}, b"".join(bodies))

    def _again(self, case: Mismatch) -> Sequence[Bytes]:
        """(exact)"""
        rounds = self._rounds
        if rounds.adversary.stands_by_its_work:
            return _claimed(case)
        oldest, version = case.versions
        replay = rebuilt(rounds, version, oldest)
        into = torch.zeros(replay.layout.num_values, dtype=torch.float32)
        if isinstance(case, HopMismatch):
            case.claim.check(rounds.settings, run_id=rounds.run_id)
            _, found = replay.hop(case.claim, into)
            is_forward, codecs = case.claim.header.direction == "forward", rounds.settings.codecs
            codec = activation_codec(codecs.activations if is_forward else codecs.activation_gradients)
            return (codec.encode(torch.from_numpy(found)),)
        step = case.contribution.step
        if case.parts:
            return replay.encoded_contribution(case.exhibits, step)
        return encoded_hop(rounds.settings, replay.microbatch(case.exhibits[0], step, into))


def _claimed(case: Mismatch) -> Sequence[Bytes]:
    """What the accused had sent."""
    if isinstance(case, HopMismatch):
        return (case.claim.claimed,)
    return case.parts or (case.exhibits[0].y, case.exhibits[0].grad_x)


def self_test(rounds: StageRounds) -> None:
    """(compute) Raises LocalError if this machine computes the same thing in two ways."""
    model, settings = rounds.replica.model, rounds.settings
    shape = (settings.batch.microbatch_size, settings.data.sequence_length)
    chance = torch.Generator().manual_seed(0)
    tokens_BL = torch.randint(settings.data.vocab_size, shape, generator=chance)
    x = tokens_BL if model.is_first else torch.randn((*shape, model.hidden_size), generator=chance)
    weights, found = model.weights(rounds.replica.state.weights), set()
    for _ in range(SELF_TESTS):
        into = torch.zeros(rounds.replica.layout.num_values, dtype=torch.float32, device=model.device)
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
