"""This is where a peer shows what its contributions were made of: to whoever has drawn them, and to nobody else."""

import logging
from collections import Counter

from peer.adversary import HONEST, Adversary
from peer.exhibits import ExhibitStore
from peer.rounds import StageRounds
from peer.step_state import Applied
from swarm.core.canonical import Value
from swarm.core.contribution import Contribution, Roster
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import MicrobatchId, PeerId, Step
from swarm.core.settings import AuditSettings
from swarm.host_protocol import EXHIBIT, PART
from swarm.network.transport import Message, Transport
from verification.draws import AuditBudget, Draw, check_reveal, contribution_rate, draw, hop_rate
from verification.ticket import Ticket

log = logging.getLogger(__name__)

MOST_TIMES = 2
LARGEST_FACTOR = 5.0
"""Whoever is suspicious is audited at five times the rate; the audited cannot know, and answers up to that."""


def audit_budget(audits: AuditSettings) -> AuditBudget:
    """What the run's manifest allows."""
    return AuditBudget(hop=audits.hop_budget, contribution=audits.contribution_budget, reducer=audits.reducer_share)


class AuditDesk:
    """Answers auditors."""

    def __init__(self, rounds: StageRounds, exhibits: ExhibitStore, *, adversary: Adversary = HONEST) -> None:
        self._adversary = adversary
        self._rounds = rounds
        self._exhibits = exhibits
        self._budget = audit_budget(rounds.settings.audits)
        self._served: Counter[tuple[int, PeerId, str, int]] = Counter()
        self._revealed: dict[PeerId, tuple[bytes, int, bytes]] = {}
        """Of each auditor: the chain's end, and the last value that was checked."""

    def serve(self, transport: Transport) -> None:
        """Begin to answer."""
        transport.serve(EXHIBIT, self._on_exhibit, max_body_bytes=0)
        transport.serve(PART, self._on_part, max_body_bytes=0)

    async def applied(self, applied: Applied) -> None:
        """A step is over: what is too old to be asked for goes."""
        version = int(applied.chain.version)
        self._exhibits.forget(version)
        oldest = version - 1 - self._rounds.settings.audits.retained_versions
        for item in [item for item in self._served if item[0] < oldest]:
            del self._served[item]

    async def _on_exhibit(self, sender: PeerId, request: Message) -> Message:
        fields = Fields("exhibit request", request.meta)
        number = MicrobatchId(fields.integer("microbatch_id"))
        step, contribution, drawn, whole, hop = self._drawn(sender, fields)
        ids = [item.microbatch_id for item in contribution.work]
        if not whole and not (hop and number == ids[drawn.microbatch(len(ids))]):
            raise RemoteError("draw", f"microbatch {number} of step {step} was not drawn", sender)
        exhibit = self._exhibits.exhibit(step, number)
        if exhibit is None:
            raise TransientError(f"microbatch {number} of step {step} is not here any more")
        self._count(step, sender, f"exhibit for {drawn.auditor}", number)
        sizes: list[Value] = [len(body) for body in exhibit.bodies]
        return Message({"papers": exhibit.papers.to_value(), "sizes": sizes}, b"".join(exhibit.bodies))

    async def _on_part(self, sender: PeerId, request: Message) -> Message:
        fields = Fields("part request", request.meta)
        index = fields.integer("part", high=1 << 20)
        step, _, drawn, whole, _ = self._drawn(sender, fields)
        if not whole:
            raise RemoteError("draw", f"the contribution to step {step} was not drawn", sender)
        part = self._exhibits.part(step, index)
        if part is None:
            raise TransientError(f"part {index} of step {step} is not here any more")
        self._count(step, sender, f"part for {drawn.auditor}", index)
        return Message({}, part)

    def _drawn(self, sender: PeerId, fields: Fields) -> tuple[Step, Contribution, Draw, bool, bool]:
        """The draw that the request rests on, and whether it hits the contribution, or one microbatch of it.

        An auditor that this peer did not answer comes through the host, which brings the auditor's ticket.
        """
        if self._adversary.withholds:
            raise TransientError("not now")
        rounds = self._rounds
        step, reveal = Step(fields.integer("step")), fields.octets("reveal", length=32)
        ticket = Ticket.from_value(fields.message("ticket"))
        fields.done()
        ticket.check(run_id=rounds.run_id, run_key=rounds.chain.run_key)
        auditor = ticket.peer_id
        if sender not in (auditor, rounds.chain.coordinator) or ticket.stage != rounds.chain.stage:
            raise RemoteError("ticket", f"a ticket of {ticket.peer_id} for stage {ticket.stage}", sender)
        self._check_reveal(ticket, int(step), reveal)
        roster, contribution = self._contributed(step)
        if auditor not in roster.members:
            raise RemoteError("standing", f"{auditor} was no member at step {step}", auditor)
        drawn = draw(reveal, contribution.digest(), auditor=auditor, target=rounds.me)
        replicas, budget = len(roster.members), self._budget
        whole = drawn.hits_contribution(contribution_rate(replicas, budget, factor=LARGEST_FACTOR))
        hop = drawn.hits_hop(hop_rate(replicas, len(contribution.work), budget, factor=LARGEST_FACTOR))
        return step, contribution, drawn, whole, hop

    def _contributed(self, step: Step) -> tuple[Roster, Contribution]:
        held = self._rounds.results.get(int(step))
        if held is None:
            raise TransientError(f"the result of step {step} is not here")
        contribution = held[0].roster.contribution_of(self._rounds.me)
        if contribution is None:
            raise TransientError(f"this peer is not in the roster of step {step}")
        return held[0].roster, contribution

    def _check_reveal(self, ticket: Ticket, version: int, reveal: bytes) -> None:
        end, known = ticket.chain_end, self._revealed.get(ticket.peer_id)
        before = known[1:] if known is not None and known[0] == end else None
        check_reveal(end, version, reveal, known=before)
        self._revealed[ticket.peer_id] = (end, version, reveal)

    def _count(self, step: Step, sender: PeerId, what: str, number: int) -> None:
        """Bytes leave twice at most for an auditor, whose line may break: more would be an attack on this uplink."""
        item = (int(step), sender, what, number)
        if self._served[item] >= MOST_TIMES:
            raise RemoteError("served", f"{what} {number} of step {step} went to {sender} {MOST_TIMES} times", sender)
        self._served[item] += 1
