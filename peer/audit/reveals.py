"""What an auditor reveals of its hash chain, checked: each value against the last that was."""

from peer.round.stage_steps import StageSteps
from swarm.core.audit.hash_chain import check_reveal
from swarm.core.audit.ticket import Ticket
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId, Step
from swarm.core.kept import keep_newest
from swarm.identity.key import verify

MAX_AUDITORS = 1 << 10


class Reveals:
    """Reads who asks, for which step, and what it reveals."""

    def __init__(self, steps: StageSteps) -> None:
        self._steps = steps
        self._checked: dict[PeerId, tuple[bytes, int, bytes]] = {}
        """Of each auditor: the chain's end, and the last value that was checked; latest last."""

    def read(self, sender: PeerId, fields: Fields) -> tuple[Ticket, Step, bytes]:
        """The auditor's ticket, step and reveal; `fields` has nothing else left. Raises RemoteError.

        An auditor that was not answered comes through the host, which brings its ticket.
        """
        step, reveal = Step(fields.integer("step")), fields.octets("reveal", length=32)
        ticket = Ticket.from_value(fields.message("ticket"))
        fields.done()
        chain = self._steps.chain
        ticket.check(
            run_id=self._steps.context.run_id, run_key=chain.run_key, amendments=chain.amendments, verify=verify
        )
        if sender not in (ticket.peer_id, chain.host):
            raise RemoteError("ticket", f"a ticket of {ticket.peer_id}", sender)
        if step > chain.version:
            raise TransientError(f"a reveal of step {step}; this stage is at version {chain.version}")
        end, known = ticket.chain_end, self._checked.get(ticket.peer_id)
        before = known[1:] if known is not None and known[0] == end else None
        check_reveal(end, int(step), reveal, known=before)
        self._checked.pop(ticket.peer_id, None)
        self._checked[ticket.peer_id] = (end, int(step), reveal)
        keep_newest(self._checked, MAX_AUDITORS)
        return ticket, step, reveal
