"""What a peer's contributions were made of, shown to whoever has drawn them, and to nobody else."""

import logging
from collections import Counter

from peer.audit.reveals import Reveals
from peer.pipeline.exchange_store import ExchangeStore
from peer.round.stage_steps import StageSteps
from peer.stage.events import Applied
from swarm.core.canonical import Value
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields, integer_item
from swarm.core.ids import MicrobatchId, PeerId, Step
from swarm.core.round.contribution import Contribution, Roster
from swarm.host_protocol import EXHIBIT, PART
from swarm.network.transport import Message, Transport
from verification.audit.draws import AuditBudget, contribution_rate, draw, reducer_rate
from verification.audit.standing import SUSPICION_FACTOR

log = logging.getLogger(__name__)

INPUT = "audit_input"
"""{step, ticket, reveal, part, cohort, digest} -> body: of the part's inputs, or of those to the cohort's share of it,
the one with this digest."""
MOST_TIMES = 2
"""Answers to one auditor for one thing."""


class AuditDesk:
    """Answers auditors."""

    def __init__(self, steps: StageSteps, exchanges: ExchangeStore, reveals: Reveals) -> None:
        self._reveals = reveals
        self._steps = steps
        self._exchanges = exchanges
        self._budget = AuditBudget.of_run(steps.context.settings.audits)
        self._served: Counter[tuple[int, PeerId, str, int]] = Counter()
        self._shown_to: set[tuple[int, PeerId]] = set()
        self.num_served = 0
        """Audits of this peer's work: an auditor that asked for one step's, however much of it."""

    def serve(self, transport: Transport) -> None:
        """Begin to answer."""
        transport.serve(EXHIBIT, self._on_exhibit, max_body_bytes=0)
        transport.serve(PART, self._on_part, max_body_bytes=0)
        transport.serve(INPUT, self._on_input, max_body_bytes=0)

    def applied(self, applied: Applied) -> None:
        """A step is over: what is too old to be asked for goes."""
        version = int(applied.chain.version)
        oldest = version - 1 - self._steps.context.settings.audits.retained_versions
        for item in [item for item in self._served if item[0] < oldest]:
            del self._served[item]
        self._shown_to = {item for item in self._shown_to if item[0] >= oldest}

    async def _on_exhibit(self, sender: PeerId, request: Message) -> Message:
        fields = Fields("exhibit request", request.meta)
        number = MicrobatchId(fields.integer("microbatch_id"))
        step, contribution, auditor = self._drawn(sender, fields)
        work = next((item for item in contribution.work if item.microbatch_id == number), None)
        if work is None:
            raise RemoteError("draw", f"microbatch {number} of step {step} was not drawn", sender)
        exhibit = self._exchanges.exhibit(step, work)
        if exhibit is None:
            raise TransientError(f"microbatch {number} of step {step} is not here any more")
        self._count(step, sender, f"exhibit for {auditor}", number)
        sizes: list[Value] = [len(body) for body in exhibit.bodies]
        return Message({"papers": exhibit.papers.to_value(), "sizes": sizes}, b"".join(exhibit.bodies))

    async def _on_part(self, sender: PeerId, request: Message) -> Message:
        fields = Fields("part request", request.meta)
        index, of = fields.integer("part", high=1 << 20), fields.peer("of")
        step, made, auditor = self._drawn(sender, fields, of=of)
        if index >= len(made.part_digests):
            raise RemoteError("draw", f"part {index} of the contribution to step {step} was not drawn", sender)
        part = self._steps.context.reductions.input(step, index, made.part_digests[index])
        if part is None:
            raise TransientError(f"part {index} of {of} at step {step} is not here")
        self._count(step, sender, f"part of {of} for {auditor}", index)
        return Message({}, part)

    async def _on_input(self, sender: PeerId, request: Message) -> Message:
        """What went into a reduced part: this peer's own, or others' if this peer reduced it."""
        fields = Fields("input request", request.meta)
        index, cohort = fields.integer("part", high=1 << 20), fields.maybe("cohort", integer_item)
        wanted = fields.octets("digest", length=32)
        step, auditor, reveal = self._revealed_by(sender, fields)
        steps, roster = self._steps, self._roster(step, auditor)
        store = steps.context.reductions
        made = store.reduction(step, (index, cohort))
        if made is None:
            raise TransientError(f"who reduced part {index} of step {step} is not known here")
        drawn = draw(reveal, made.statement_digest, auditor=auditor, target=made.reducer)
        replicas, parts = len(roster.members), roster.num_parts
        if not drawn.hits_part(index, reducer_rate(replicas, self._budget, num_parts=parts, factor=SUSPICION_FACTOR)):
            raise RemoteError("draw", f"part {index} of step {step} was not drawn", sender)
        if wanted not in [one.digest for one in made.inputs]:
            raise RemoteError("draw", f"nothing of that digest went into part {index} of step {step}", sender)
        body = store.input(step, index, wanted)
        if body is None:
            raise TransientError(f"an input of part {index} at step {step} is not here")
        self._count(step, sender, f"input {wanted.hex()} for {auditor}", index)
        return Message({}, body)

    def _drawn(self, sender: PeerId, fields: Fields, *, of: PeerId | None = None) -> tuple[Step, Contribution, PeerId]:
        """Step, contribution (this peer's, or another's of the stage) and auditor that has drawn it. Raises RemoteError
        if it has not."""
        step, auditor, reveal = self._revealed_by(sender, fields)
        steps, roster = self._steps, self._roster(step, auditor)
        target = steps.context.me if of is None else of
        contribution = roster.contribution_of(target)
        if contribution is None:
            raise TransientError(f"{target} is not in the roster of step {step}")
        drawn = draw(reveal, contribution.digest(), auditor=auditor, target=target)
        # Whoever is suspicious is audited more often; the audited cannot know, and answers up to that.
        rate = contribution_rate(len(roster.members), self._budget, factor=SUSPICION_FACTOR)
        if not drawn.hits_contribution(rate):
            raise RemoteError("draw", f"the contribution of {target} to step {step} was not drawn", sender)
        return step, contribution, auditor

    def _revealed_by(self, sender: PeerId, fields: Fields) -> tuple[Step, PeerId, bytes]:
        """Step, auditor of this stage and what it reveals of its hash chain: all else has been read."""
        ticket, step, reveal = self._reveals.read(sender, fields)
        if ticket.stage != self._steps.chain.stage:
            raise RemoteError("ticket", f"a ticket of {ticket.peer_id} for stage {ticket.stage}", sender)
        return step, ticket.peer_id, reveal

    def _roster(self, step: Step, auditor: PeerId) -> Roster:
        held = self._steps.context.results.get(int(step))
        if held is None:
            raise TransientError(f"the result of step {step} is not here")
        if auditor not in held[0].roster.members:
            raise RemoteError("standing", f"{auditor} was no member at step {step}", auditor)
        return held[0].roster

    def _count(self, step: Step, sender: PeerId, what: str, number: int) -> None:
        """Bytes leave twice at most for an auditor, whose line may break: more would be an attack on this uplink."""
        item = (int(step), sender, what, number)
        if self._served[item] >= MOST_TIMES:
            raise RemoteError("served", f"{what} {number} of step {step} went to {sender} {MOST_TIMES} times", sender)
        self._served[item] += 1
        if (int(step), sender) not in self._shown_to:
            self._shown_to.add((int(step), sender))
            self.num_served += 1
