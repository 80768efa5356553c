"""A peer's calls with a peer beside it, or its own, shown to an auditor that has drawn them.

What an audited peer sent on and sent back is with its neighbours. They show it, so that it needs neither the audited
peer nor what that one lists.
"""

from collections import Counter
from collections.abc import Sequence

from peer.audit.reveals import Reveals
from peer.pipeline.exchange_store import ExchangeStore
from peer.round.stage_steps import StageSteps
from peer.stage.events import Applied
from swarm.core.canonical import Value
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields, digest_item
from swarm.core.ids import MicrobatchId, PeerId, Step
from swarm.core.round.contribution import Contribution
from swarm.host_protocol import HOP
from swarm.identity.key import verify
from swarm.network.transport import Message, Transport
from verification.audit.draws import AuditBudget, contribution_rate, draw, hop_draw, microbatch_rate
from verification.audit.standing import SUSPICION_FACTOR
from verification.pipeline.exchanges import Exchange

PASSED = "audit_passed"
"""{step, ticket, reveal} -> {passed: [[peer, microbatch_id], ...]}: what passed between this peer and those of the
auditor's stage, as far as the draw may hit it."""
MOST_TIMES = 2
"""Answers to one auditor for one thing."""
MAX_PASSED = 1 << 12


class HopDesk:
    """Answers auditors of the stages beside this peer's, and of its own."""

    def __init__(self, steps: StageSteps, exchanges: ExchangeStore, reveals: Reveals) -> None:
        self._steps = steps
        self._exchanges = exchanges
        self._reveals = reveals
        # How many replicas the auditor's stage has is not known here, nor whom it suspects: at least two, or nobody
        # would audit.
        self._rate = microbatch_rate(2, AuditBudget.of_run(steps.context.settings.audits), factor=SUSPICION_FACTOR)
        self._whole_rate = contribution_rate(
            2, AuditBudget.of_run(steps.context.settings.audits), factor=SUSPICION_FACTOR
        )
        self._served: Counter[tuple[Step, PeerId, PeerId, PeerId, MicrobatchId, bytes | None]] = Counter()
        self.num_served = 0
        """Microbatches of this peer's own that it showed an auditor."""

    def serve(self, transport: Transport) -> None:
        """Begin to answer."""
        transport.serve(PASSED, self._on_passed, max_body_bytes=0)
        transport.serve(HOP, self._on_hop, max_body_bytes=0)

    def applied(self, applied: Applied) -> None:
        """A step is over: what is too old to be asked for goes."""
        version = int(applied.chain.version)
        self._exchanges.forget(version)
        oldest = version - 1 - self._steps.context.settings.audits.retained_versions
        for item in [item for item in self._served if int(item[0]) < oldest]:
            del self._served[item]

    async def _on_passed(self, sender: PeerId, request: Message) -> Message:
        step, auditor, reveal, side = self._asked(sender, Fields("request of what passed", request.meta))
        if not side:
            raise RemoteError("ticket", f"{auditor} audits this peer's own stage", sender)
        drawn: list[Value] = [
            [peer, number]
            for peer, number in self._exchanges.partners(step, came=side < 0)
            if peer != auditor and hop_draw(reveal, number, auditor=auditor, target=peer).hits_hop(self._rate)
        ]
        return Message({"passed": drawn[:MAX_PASSED]})

    async def _on_hop(self, sender: PeerId, request: Message) -> Message:
        fields = Fields("hop request", request.meta)
        target, number = fields.peer("target"), MicrobatchId(fields.integer("microbatch_id"))
        contribution = fields.maybe("contribution", Contribution.from_value)
        header = fields.maybe("header", digest_item)
        step, auditor, reveal, side = self._asked(sender, fields)
        if contribution is not None:
            is_drawn = self._is_drawn(contribution, number, step, auditor, target, reveal, side)
        else:
            is_drawn = hop_draw(reveal, number, auditor=auditor, target=target).hits_hop(self._rate)
        if not is_drawn:
            raise RemoteError("draw", f"microbatch {number} of step {step} was not drawn", sender)
        if side:
            found = self._exchanges.with_partner(step, number, target)
        elif target == self._steps.context.me and header is not None:
            found = self._exchanges.own(number, header)
        else:
            raise RemoteError("draw", f"{target} is not this peer, or no header is named", sender)
        if not found:
            raise TransientError(f"microbatch {number} of step {step} with {target} is not here")
        item = (step, sender, auditor, target, number, header)
        if self._served[item] >= MOST_TIMES:
            raise RemoteError("served", f"microbatch {number} went to {sender} {MOST_TIMES} times", sender)
        self._served[item] += 1
        self.num_served += target == self._steps.context.me and self._served[item] == 1
        return message_of(found)

    def _is_drawn(
        self,
        made: Contribution,
        number: MicrobatchId,
        step: Step,
        auditor: PeerId,
        target: PeerId,
        reveal: bytes,
        side: int,
    ) -> bool:
        """Whether the draw hits the target's contribution, and the microbatch is in it."""
        chain = self._steps.chain
        if (made.run_id, made.stage, made.step, made.peer_id) != (chain.run_id, chain.stage + side, step, target):
            return False
        if not any(work.microbatch_id == number for work in made.work):
            return False
        if not verify(target, made.signed_bytes(), made.signature):
            return False
        return draw(reveal, made.digest(), auditor=auditor, target=target).hits_contribution(self._whole_rate)

    def _asked(self, sender: PeerId, fields: Fields) -> tuple[Step, PeerId, bytes, int]:
        """Step, auditor, what it reveals, and where its stage lies: 1 after this peer's, -1 before, 0 the same."""
        ticket, step, reveal = self._reveals.read(sender, fields)
        side = int(ticket.stage) - int(self._steps.chain.stage)
        if abs(side) > 1:
            raise RemoteError("ticket", f"a ticket of {ticket.peer_id} for stage {ticket.stage}", sender)
        return step, ticket.peer_id, reveal, side


def message_of(exchanges: Sequence[Exchange]) -> Message:
    """As `verification.pipeline.exchanges.read_exchanges` reads it."""
    listed: list[Value] = [exchange.to_value() for exchange in exchanges]
    return Message({"exchanges": listed}, b"".join(body for exchange in exchanges for body in exchange.bodies))
