"""What a contribution reveals of two hash chains, and how it is checked: its maker's own, and the host's.

A member's value of version t - 2 is mandatory in its contribution to step t: by then it has served its audits. The
host's value of a version is told when that version's round is certified, and whoever knows it says so in its next
contribution. Each is checked against the last that is certified; neither can be chosen by whoever brings it.
"""

from dataclasses import dataclass
from typing import Annotated

from swarm.core.audit.hash_chain import END, earlier, is_on
from swarm.core.audit.ticket import Ticket, Verify
from swarm.core.errors import RemoteError
from swarm.core.forms import Digest, Integer
from swarm.core.ids import PeerId, StageIndex, Step
from swarm.core.record import Row
from swarm.core.settings import MOST_STEPS

REVEALED_AFTER = 2
"""Versions after the one that the round in question starts from: then a draw is shown, and the audit made."""


class OffChainError(RemoteError):
    """A member signed that its hash chain has a value which it has not."""

    def __init__(self, maker: PeerId, step: Step) -> None:
        super().__init__("draw", f"what {maker} reveals in step {step} is not on its hash chain", maker)
        self.maker = maker
        self.step = step


@dataclass(frozen=True)
class HostWord(Row, kind="host's word"):
    """The host's value of the last of so many versions, counted from the run's first; of none: its chain's end."""

    num_versions: Annotated[int, Integer(high=2 * MOST_STEPS)]
    value: Digest

    def value_of(self, version: int) -> bytes:
        """What the host had for a version that it has spoken of."""
        return earlier(self.value, self.num_versions + END, version)

    def at_most(self, num_versions: int) -> "HostWord":
        """What it was when the host had spoken of so many versions at most."""
        if self.num_versions <= num_versions:
            return self
        return HostWord(num_versions, self.value_of(num_versions + END))

    def follows(self, known: "HostWord") -> bool:
        """Whether it is on the chain that has the known one, and not older."""
        before = known.num_versions + END, known.value
        return self.num_versions >= known.num_versions and is_on(before, self.num_versions + END, self.value)


@dataclass(frozen=True)
class Link(Row):
    """What a member revealed last, in its contribution to a step: what it reveals next must lead to it."""

    step: Step
    value: Digest


@dataclass(frozen=True)
class Chance(Row):
    """What a contribution brings to the beacon, and nobody has chosen."""

    value: Digest
    """Of its maker's hash chain, of the version two before the step."""
    said: HostWord
    """The host's last word that its maker has heard."""
    ticket: Ticket | None
    """Of a maker of whose chain nothing is certified yet: the run key's word on where it ends. Else None."""

    def check(
        self,
        *,
        maker: PeerId,
        run_id: str,
        stage: StageIndex,
        step: Step,
        link: Link | None,
        said: HostWord,
        run_key: PeerId,
        amendments: int,
        verify: Verify,
    ) -> None:
        """Raises RemoteError unless both values are what they must be, by what is certified before the step: the
        maker's `link`, if there is one, and the host's last word `said`; OffChainError if the maker's own is not."""
        if self.said.num_versions > step or not self.said.follows(said):
            raise RemoteError("draw", f"contribution of {maker} has not the host's word, as of step {step}", maker)
        if link is None and self.ticket is None:
            raise RemoteError("ticket", f"contribution of {maker} lacks its ticket: its chain is not known", maker)
        if link is not None and self.ticket is not None:
            raise RemoteError("ticket", f"contribution of {maker} has a ticket, but its chain is known", maker)
        if self.ticket is not None:
            if (self.ticket.peer_id, self.ticket.stage) != (maker, stage):
                raise RemoteError("ticket", f"contribution of {maker} has the ticket of {self.ticket.peer_id}", maker)
            self.ticket.check(run_id=run_id, run_key=run_key, amendments=amendments, verify=verify)
        # Counted in steps: in each the value of the version two before is revealed, in step 1 it would be the end.
        known = (REVEALED_AFTER + END, self.ticket.chain_end) if self.ticket is not None else (0, b"")
        if link is not None:
            known = int(link.step), link.value
        if not is_on(known, step, self.value):
            raise OffChainError(maker, step)
