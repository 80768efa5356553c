"""Whether members are there of whom a leader's new roster brings nothing, asked of themselves.

A leader's word is all that others have of who is silent. Members need none of it for themselves, for none votes for a
roster without what it brings; and before anyone votes for one that is without others, it asks those others. A member
always does, so that a leader who needs members' votes leaves out nobody that is there by its word alone. Voters outside
the stage do so where those others are more than a third, and where the leader needs no other member's vote
(`swarm.witness_service`).
"""

import asyncio
import time
from collections.abc import Callable

from swarm.core.canonical import digest
from swarm.core.errors import RemoteError, TransientError, UnreachableError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId
from swarm.core.kept import keep_newest
from swarm.core.round.averaging_round import AveragingRound
from swarm.core.round.ballots import Proposal
from swarm.core.round.contribution import Contribution, Result
from swarm.core.round.facts import RoundFacts
from swarm.core.round.instructions import SayThere
from swarm.core.round.voting import Reconfiguration
from swarm.drawn_papers import MOST_REMEMBERED, DrawnPapers, WaitedInVain
from swarm.identity.key import verify
from swarm.network.transport import Message, Transport

LEFT_WITHOUT = "left_without"
"""{stage, step, proposal | None} -> {brings_nothing, made}, of a member without whose contribution a roster is
proposed: what it contributes to the round, None while it has not made that. Who is shown the roster contributes, though
its leader never called it."""
MOST_ASKED = 8
"""Members who are asked, of those without whom a roster is proposed."""
TIME_PHASES = 1.5
"""So long a member has to make its contribution, once a voter finds it there: an honest leader has given it twice as
long before, and waits two for votes."""


async def contributed(
    transport: Transport, facts: RoundFacts, peer: PeerId, proposal: Proposal | None, *, answer_s: float
) -> Contribution | bool:
    """What a member contributes, as it says; or whether it is there and has yet to make that.

    Raises UnreachableError or RemoteError if it does not say so.
    """
    shown = proposal.packed if proposal is not None else None
    told = Message({"stage": facts.stage, "step": facts.step, "proposal": shown})
    try:
        reply = await transport.call(peer, LEFT_WITHOUT, told, timeout_s=answer_s, max_body_bytes=0)
    except UnreachableError:
        raise
    except TransientError:
        return True
    fields = Fields("answer to a roster", reply.meta)
    brings_nothing, made = fields.boolean("brings_nothing"), fields.maybe("made", Contribution.from_value)
    fields.done()
    if made is None or made.peer_id != peer:
        return not brings_nothing
    facts.check_contribution(made, verify)
    return made


def is_outsiders_to_ask(facts: RoundFacts, proposal: Proposal, changed: Reconfiguration | None = None) -> bool:
    """Whether voters outside the stage ask those without whom a new roster is proposed, under a reconfiguration. Where
    the work hangs on few, they and the leader are a quorum: other members may ask, and are not needed."""
    members, without = {*facts.members}, proposal.left_without
    there = {*facts.election.voters_in(proposal.view, changed)}
    outside = there - (members - {facts.leader_of(proposal.view)})
    is_enough = facts.election.is_more_than_liars(without, members) or facts.election.is_quorum(outside, there)
    return bool(without & members) and is_enough


async def is_missing(
    papers: DrawnPapers, facts: RoundFacts, made: Contribution, proposal: Proposal, *, papers_s: float
) -> bool:
    """Whether a member that contributes this should be on the roster, or stay; its papers are waited for so long."""
    if not made.work:
        return made.peer_id in proposal.put_off
    return await papers.lack(made, num_members=len(facts.members), within_s=papers_s) is None


class LeftWithout:
    """One member's questions to those without whom leaders propose rosters to it."""

    def __init__(
        self, transport: Transport, papers: DrawnPapers, may_join: Callable[[PeerId], bool], *, call_s: float
    ) -> None:
        """`may_join`: who may be a member of the stage at all, as far as is known here. `call_s`: who asks this peer
        waits so long."""
        self._transport = transport
        self._papers = papers
        self._may_join = may_join
        self._answer_s = call_s / 4
        self._in_vain = WaitedInVain()
        """Who was asked in vain: it is not for a while."""
        self._looked_at: dict[tuple[PeerId, bytes], None] = {}
        """Contributions that leaders had no papers for, and that were shown here."""
        self._told_by: dict[PeerId, WaitedInVain] = {}
        """Of members that were there, which leaders brought no round to its end though they were told of them."""
        self._round = b""
        self._found_at: dict[PeerId, float] = {}
        """When members were found there that had nothing yet, in that round."""

    async def are_there(
        self, machine: AveragingRound, proposal: Proposal, *, papers_s: float
    ) -> tuple[Contribution, ...]:
        """What members contribute without whom a new roster is proposed.

        Raises RemoteError if it may not be proposed; TransientError while one of them has yet to make its contribution,
        until it has had its time.
        """
        facts = machine.facts
        asked = [peer for peer in machine.unheard(proposal) if self._may_be_missing(peer, facts)]
        if not asked:
            return ()
        machine.looks_at(proposal, now=time.monotonic())
        # Others ask others, if they are many: nobody hides behind eight.
        asked = sorted(asked, key=lambda peer: digest("asked", [machine.me, peer]))[:MOST_ASKED]
        answers = await asyncio.gather(*(self._is_there(machine, peer, proposal, papers_s) for peer in asked))
        said = dict(zip(asked, answers, strict=True))
        found = tuple(made for made in answers if isinstance(made, Contribution))
        late = [peer for peer, made in said.items() if made is True and not self._had_time(peer, facts)]
        if late and not found:
            raise TransientError(f"{late[0][-6:]} is there, without which view {proposal.view} goes on")
        for peer, made in said.items():
            if made is None or (made is True and peer not in late):
                self._in_vain.add(peer, facts.step)
        return found

    async def _is_there(
        self, machine: AveragingRound, peer: PeerId, proposal: Proposal, papers_s: float
    ) -> Contribution | bool | None:
        """What a member contributes that should be on the roster; whether it has yet to make that; None if it does not
        answer, or does not show its papers."""
        facts, made = machine.facts, machine.seen(peer)
        if made is None:
            answer_s = min(self._answer_s, facts.phase_s / 2)
            try:
                said = await contributed(self._transport, facts, peer, None, answer_s=answer_s)
                if said is True:  # it may never have been called
                    said = await contributed(self._transport, facts, peer, proposal, answer_s=answer_s)
            except (UnreachableError, RemoteError):  # or it has left the stage
                return None
            if isinstance(said, bool):
                return said
            made = said
        if await is_missing(self._papers, facts, made, proposal, papers_s=papers_s):
            return made
        return None if made.work else False

    def _had_time(self, peer: PeerId, facts: RoundFacts) -> bool:
        """Whether the member has been there for so long in this round that it might have contributed."""
        if self._round != facts.name:
            self._round, self._found_at = facts.name, {}
        now = time.monotonic()
        return now >= self._found_at.setdefault(peer, now) + TIME_PHASES * facts.phase_s

    def _may_be_missing(self, peer: PeerId, facts: RoundFacts) -> bool:
        """Not who was asked in vain lately, nor who shows itself here and not to leaders, one of whom is honest."""
        told_by = self._told_by.get(peer, WaitedInVain())
        lately = [leader for leader in told_by.steps if told_by.names(leader, facts.step)]
        hides = bool(lately) and facts.election.is_more_than_liars(lately, facts.members)
        return self._may_join(peer) and not hides and not self._in_vain.names(peer, facts.step)

    async def shows(self, named: SayThere, entries: tuple[int, ...], *, within_s: float) -> bool:
        """Whether a member shows its papers here for entries for which, as the leader says, it shows it none: looked at
        once. One that does not is not asked for a while."""
        made, key = named.made, (named.to, named.made.digest())
        if key in self._looked_at or not entries or entries[-1] >= len(made.work):
            return True
        try:
            await self._papers.fetch(made, entries, of=made.peer_id, within_s=within_s)
        except (RemoteError, TransientError):
            self._in_vain.add(made.peer_id, made.step)
            return False
        self._looked_at[key] = None
        keep_newest(self._looked_at, MOST_REMEMBERED)
        return True

    def ended(self, machine: AveragingRound, result: Result) -> None:
        """The round has this outcome."""
        told = [(leader, peer) for leader, of in machine.told.items() if leader != result.roster.leader for peer in of]
        for leader, peer in told:
            self._told_by.setdefault(peer, WaitedInVain()).add(leader, machine.facts.step)
        keep_newest(self._told_by, MOST_REMEMBERED)
