"""What the peers of the stages beside this one show of what passed between them and those of this stage.

They hold the same as the audited does: so neither silence nor a crash nor an omission of the audited changes anything.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from peer.audit.hop_desk import MAX_PASSED, PASSED
from peer.audit.inquiry import Drawn, Inquiry
from swarm.bulk_digest import bulk_digest
from swarm.core.canonical import Value
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields, value_or_none
from swarm.core.ids import MicrobatchId, PeerId
from swarm.core.round.contribution import Contribution, Work
from swarm.host_protocol import HOP
from swarm.model.tensor_pass import TensorPass
from swarm.network.transport import Message
from verification.pipeline.exchanges import MAX_EXCHANGES, Exchange, exhibit_of, read_exchanges
from verification.pipeline.headers import check_birth, ids_bytes
from verification.round.papers import Exhibit

log = logging.getLogger(__name__)

SIDES = (-1, 1)
"""Stages, from this one on."""


class Beside:
    """The live peers on both sides."""

    def __init__(self, inquiry: Inquiry, of_stage: Callable[[int], set[PeerId]]) -> None:
        """`of_stage`: live peers."""
        self._inquiry = inquiry
        self._of_stage = of_stage
        tensors = TensorPass(inquiry.steps.context.settings, inquiry.steps.replica.model)
        hops = sum(codec.encoded_bytes(tensors.shape) for codec in (tensors.codec, tensors.gradient_codec))
        self.largest = MAX_EXCHANGES * (hops + tensors.beside_bytes)
        """Bytes of an answer."""
        self.show_nothing: set[PeerId] = set()
        """Who was asked last for a microbatch of which it had no exchange."""

    def on(self, side: int) -> list[PeerId]:
        """The peers on one side."""
        return sorted(self._of_stage(self._inquiry.steps.chain.stage + side))

    async def input_ids(self, number: MicrobatchId) -> bytes | None:
        """At stage 0, where nobody is before: what is in the data instead, if it can be had."""
        batch = await self._inquiry.batch(number)
        return ids_bytes(batch[0]) if batch is not None else None

    async def passed(self, peer: PeerId, due: Drawn) -> tuple[tuple[PeerId, MicrobatchId], ...]:
        """What the peer says passed between it and this stage; nothing if it says nothing."""
        try:
            reply = await self._inquiry.ask(peer, PASSED, due, {}, max_body_bytes=0)
            fields = Fields("what passed", reply.meta)
            return fields.items("passed", _passed_item, max_items=MAX_PASSED)
        except (TransientError, RemoteError) as error:
            log.debug("what passed at step %d by %s: %s", due.step, peer[-6:], error)
            return ()

    async def exchanges(
        self, peer: PeerId, due: Drawn, target: PeerId, number: MicrobatchId, contribution: Contribution | None = None
    ) -> tuple[Exchange, ...]:
        """What the peer holds of a target's microbatch, as signed; `contribution`: if that was drawn.
        Nothing if it shows none, and what is of something else or was signed by nobody is not there."""
        meta: dict[str, Value] = {
            "target": target,
            "microbatch_id": number,
            "contribution": value_or_none(contribution),
            "header": None,
        }
        try:
            reply = await self._inquiry.ask(peer, HOP, due, meta, max_body_bytes=self.largest)
            shown = await self._inquiry.exact(lambda: self._read(reply, target, number))
        except (TransientError, RemoteError) as error:
            log.info("microbatch %d of %s by %s: %s", number, target, peer[-6:], error)
            shown = ()
        (self.show_nothing.discard if shown else self.show_nothing.add)(peer)
        return shown

    def _read(self, reply: Message, target: PeerId, number: MicrobatchId) -> tuple[Exchange, ...]:
        """(exact) What is as it must be: the rest may be forged, and nothing follows from it."""
        run_id = self._inquiry.steps.context.run_id
        shown = read_exchanges(reply.meta, reply.body)
        return tuple(one for one in shown if _is_between(one, target, number) and _is_signed(one, run_id))

    async def exhibit(self, due: Drawn, made: Contribution, work: Work) -> Exhibit:
        """An entry of a contribution that was drawn. Raises TransientError, RemoteError."""
        target, number, steps = made.peer_id, work.microbatch_id, self._inquiry.steps

        async def shown(side: int) -> Sequence[Exchange]:
            found = await asyncio.gather(*(self.exchanges(peer, due, target, number, made) for peer in self.on(side)))
            return [exchange for one in found for exchange in one]

        if steps.context.settings.model.num_stages == 1:
            raise TransientError(f"microbatch {number} of {target} passed nobody else")
        before, after = await shown(-1), await shown(1)
        ids = await self.input_ids(number) or b""

        def put_together() -> Exhibit:
            found = exhibit_of(work, before, after, ids=ids)
            if found is None:
                raise TransientError(f"microbatch {number} of {target} is not with its neighbours")
            num_stages = steps.context.settings.model.num_stages
            found.check(target, run_id=steps.context.run_id, stage=made.stage, num_stages=num_stages)
            found.check_work(work, target)
            return found

        return await self._inquiry.exact(put_together)


def _is_between(exchange: Exchange, target: PeerId, number: MicrobatchId) -> bool:
    """Whether it is the target's with another, of that microbatch."""
    forward, gradient = exchange.forward, exchange.gradient
    is_back = gradient is None or (gradient.producer, gradient.consumer) == (forward.consumer, forward.producer)
    return is_back and target in (forward.producer, forward.consumer) and exchange.birth.microbatch_id == number


def _is_signed(exchange: Exchange, run_id: str) -> bool:
    """Whether the source signed for the birth record, and each header's producer for what is shown under it."""
    birth, header = exchange.birth, exchange.gradient
    signed = [(exchange.forward, exchange.activation), *([(header, exchange.answer)] if header is not None else ())]
    try:
        check_birth(birth, run_id=run_id)
    except RemoteError:
        return False
    of_it = run_id, birth.microbatch_id, birth.attempt
    return all(
        (header.run_id, header.microbatch_id, header.attempt) == of_it
        and header.is_signed_by(header.producer)
        and bulk_digest(body) == header.body_digest
        for header, body in signed
    )


def _passed_item(value: Value) -> tuple[PeerId, MicrobatchId]:
    fields = Fields.of_list("what passed", value, "peer", "microbatch_id")
    return fields.peer("peer"), MicrobatchId(fields.integer("microbatch_id"))
