"""An audit that was not served, put in writing; and what is served, held to its commitment.

An auditor that a target does not serve asks through the host. The host asks the target itself and hands on the answer:
so a target that serves its judge serves its auditors, and an auditor that lies about an honest target gets what it says
it did not get. Only what the host is refused too is a debt.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypeAlias

from swarm.bulk_digest import bulk_digest
from swarm.core.audit.hash_chain import check_reveal
from swarm.core.audit.ticket import Ticket
from swarm.core.canonical import Value
from swarm.core.errors import RemoteError
from swarm.core.fields import Fields, integer_item
from swarm.core.forms import Digest, StageNumber, Text
from swarm.core.ids import PeerId, Step
from swarm.core.round.contribution import Contribution, Roster, Work
from swarm.core.settings import AuditSettings, RunSettings
from swarm.identity.signed_record import SignedRecord
from verification.audit.draws import AuditBudget, contribution_rate, draw, hop_draw, microbatch_rate
from verification.audit.standing import SUSPICION_FACTOR
from verification.pipeline.exchanges import read_exchanges
from verification.pipeline.headers import BirthRecord, HopHeader, check_birth
from verification.pipeline.hop_claim import HopClaim, claims_of
from verification.round.papers import Bytes, Exhibit, Papers

MAX_REASON = 200
"""Characters."""


Owed = Literal["exhibit", "part", "hop"]
Asked: TypeAlias = tuple[Step, PeerId, PeerId, Owed, int, bytes]


@dataclass(frozen=True, kw_only=True)
class OwedAudit(SignedRecord):
    """The auditor's word that the target did not serve what it had drawn."""

    DOMAIN: ClassVar[str] = "owed-audit"
    run_id: str
    stage: StageNumber
    step: Step
    """That the target contributed to."""
    auditor: PeerId
    target: PeerId
    reveal: Digest
    """Of the auditor's hash chain, for the step."""
    what: Owed
    number: int
    """The microbatch's id, or the part's index."""
    reason: Annotated[str, Text(MAX_REASON)]
    birth: BirthRecord | None = None
    """Of a hop: its microbatch's."""
    header: HopHeader | None = None
    """Of a hop: the target's, that names what nobody has shown."""

    @property
    def asked(self) -> "Asked":
        """What it asks for, of whom and for whom."""
        header = self.header.digest() if self.header is not None else b""
        return (self.step, self.auditor, self.target, self.what, self.number, header)

    def check(self, *, run_id: str) -> None:
        """Raises RemoteError unless the auditor signed it in this run."""
        if self.run_id != run_id:
            raise RemoteError("protocol", f"audit owed in run {self.run_id[:12]}, not {run_id[:12]}", self.auditor)
        if not self.is_signed_by(self.auditor):
            raise RemoteError("signature", f"audit owed to {self.auditor} is not signed by it", self.auditor)


def check_owed(owed: OwedAudit, ticket: Ticket, roster: Roster, audits: AuditSettings) -> Contribution:
    """The target's contribution, if the auditor has drawn what it asks for. Raises RemoteError if it has not."""
    if (ticket.peer_id, ticket.stage, owed.stage) != (owed.auditor, owed.stage, roster.stage):
        raise RemoteError("ticket", f"audit of stage {owed.stage} owed to {owed.auditor}", owed.auditor)
    contribution = roster.contribution_of(owed.target)
    if contribution is None or not contribution.work or owed.auditor not in roster.members:
        raise RemoteError("draw", f"{owed.target} owes {owed.auditor} nothing of step {owed.step}", owed.auditor)
    check_reveal(ticket.chain_end, int(owed.step), owed.reveal)
    drawn = draw(owed.reveal, contribution.digest(), auditor=owed.auditor, target=owed.target)
    rate = contribution_rate(len(roster.members), AuditBudget.of_run(audits), factor=SUSPICION_FACTOR)
    is_exhibit = owed.what == "exhibit" and owed.number in [item.microbatch_id for item in contribution.work]
    is_part = owed.what == "part" and owed.number < len(contribution.part_digests)
    if not drawn.hits_contribution(rate) or not (is_exhibit or is_part):
        raise RemoteError("draw", f"{owed.what} {owed.number} of step {owed.step} was not drawn", owed.auditor)
    return contribution


def check_owed_hop(owed: OwedAudit, ticket: Ticket, roster: Roster, settings: RunSettings, *, run_id: str) -> HopHeader:
    """The target's header, if the auditor has drawn its microbatch. Raises RemoteError if it has not.

    Only headers that came of training in that step: of those an honest peer keeps what they were made from.
    """
    birth, header = owed.birth, owed.header
    if (ticket.peer_id, ticket.stage, owed.stage) != (owed.auditor, owed.stage, roster.stage):
        raise RemoteError("ticket", f"audit of stage {owed.stage} owed to {owed.auditor}", owed.auditor)
    if birth is None or header is None or owed.stage == 0 or owed.auditor not in roster.members:
        raise RemoteError("draw", f"{owed.target} owes {owed.auditor} nothing of step {owed.step}", owed.auditor)
    check_birth(birth, run_id=run_id)
    is_of_it = (header.run_id, header.stage, header.producer) == (run_id, owed.stage, owed.target)
    is_of_it = is_of_it and (header.microbatch_id, header.attempt) == (birth.microbatch_id, birth.attempt)
    is_of_it = is_of_it and (birth.kind, birth.step, birth.microbatch_id) == ("train", owed.step, owed.number)
    is_of_it = is_of_it and owed.step - settings.delay_at(owed.step) <= header.version <= owed.step
    is_of_it = is_of_it and (header.direction == "gradient" or header.parents[:1] == (birth.digest(),))
    if not is_of_it or not header.is_signed_by(owed.target):
        raise RemoteError("papers", f"no header of {owed.target} for microbatch {owed.number}", owed.auditor)
    check_reveal(ticket.chain_end, int(owed.step), owed.reveal)
    drawn = hop_draw(owed.reveal, birth.microbatch_id, auditor=owed.auditor, target=owed.target)
    rate = microbatch_rate(len(roster.members), AuditBudget.of_run(settings.audits), factor=SUSPICION_FACTOR)
    if not drawn.hits_hop(rate):
        raise RemoteError("draw", f"microbatch {owed.number} of step {owed.step} was not drawn", owed.auditor)
    return header


def read_hop(meta: Value, body: Bytes, header: HopHeader, settings: RunSettings, *, run_id: str) -> HopClaim:
    """The header beside all that it names, from an answer. Raises RemoteError unless that is there."""
    shown = read_exchanges(meta, body)
    for claim in claims_of(header.producer, shown, shown):
        if claim.header.digest() == header.digest():
            claim.check(settings, run_id=run_id)
            return claim
    raise RemoteError("papers", "what the header names is not shown", header.producer)


def read_exhibit(
    meta: Value, body: Bytes, contribution: Contribution, work: Work, *, run_id: str, num_stages: int
) -> Exhibit:
    """The exhibit in an answer. Raises RemoteError unless it is whole and what the contribution was made from."""
    fields = Fields("exhibit", meta)
    papers = Papers.from_value(fields.message("papers"))
    sizes = fields.items("sizes", integer_item, max_items=8)
    fields.done()
    if sum(sizes) != len(body):
        raise RemoteError("malformed", f"bodies of {sum(sizes)} bytes in {len(body)}", contribution.peer_id)
    bodies, at, view = [], 0, memoryview(body)
    for size in sizes:
        bodies.append(view[at : at + size])
        at += size
    exhibit = Exhibit.of_bodies(papers, work.version, tuple(bodies))
    exhibit.check(contribution.peer_id, run_id=run_id, stage=contribution.stage, num_stages=num_stages)
    exhibit.check_work(work, contribution.peer_id)
    return exhibit


def read_part(body: Bytes, contribution: Contribution, index: int) -> Bytes:
    """The encoded part in an answer. Raises RemoteError unless it is the one the contribution names."""
    if not index < len(contribution.part_digests):
        raise RemoteError("malformed", f"part {index} of {len(contribution.part_digests)}", contribution.peer_id)
    if bulk_digest(body) != contribution.part_digests[index]:
        raise RemoteError("digest", f"part {index} differs from its commitment", contribution.peer_id)
    return body
