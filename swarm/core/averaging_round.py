"""This is where one member decides its part in one averaging round; `peer.rounds` carries the decisions out.

Phases, led by the leader of the view: close and commit, roster, reduce, result. A stimulus (a message, a death,
a deadline) returns the instructions it leads to. Nothing here waits, encodes or sends.

Views follow Viewstamped Replication (Liskov and Cowling, 2012), with one signature where a certificate will be:
whoever commits to a view follows nothing of a lower one, and tells the new leader if it has applied a result. A leader
hears every member that is not gone before it proposes, so the survivors of any deaths agree; a partition, or a
member suspected while it is well and already past the end, may fork until results carry certificates.

Deadlines are multiples of `phase_s`: a reducer waits 1 for parts, a leader 2 before it asks once more and 3 before
it goes on without a member, or 2 before it relieves a reducer; others wait 4 before they turn to the next leader.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from swarm.core.contribution import Contribution, ReducedPart, Result, Roster
from swarm.core.errors import RemoteError
from swarm.core.ids import PeerId
from swarm.core.round_facts import MAX_VIEWS_AHEAD, RoundFacts, Verify, is_of
from swarm.core.round_instructions import (
    AggregatePart,
    FetchPart,
    Finish,
    Instruction,
    Instructions,
    MakeContribution,
    SendClose,
    SendCommit,
    SendPart,
    SendReduced,
    SendResult,
    SendRoster,
)
from swarm.core.round_parts import RoundParts
from swarm.core.round_proposal import can_propose_again, fresh_roster, left_by, with_reducers

__all__ = [
    "AggregatePart",
    "AveragingRound",
    "FetchPart",
    "Finish",
    "Instruction",
    "Instructions",
    "MakeContribution",
    "RoundFacts",
    "SendClose",
    "SendCommit",
    "SendPart",
    "SendReduced",
    "SendResult",
    "SendRoster",
]

MAX_FETCHES = 4
"""Times a part of the result is asked for, without any arriving, before the next leader is turned to."""


@dataclass
class AveragingRound:
    """One member's side of round `facts.step`.

    `sign` makes the own signature, `verify(peer, data, signature)` checks another's; both are pure.
    """

    facts: RoundFacts
    me: PeerId
    sign: Callable[[bytes], bytes]
    verify: Verify
    view: int = 0
    """Whose leader this peer reports to. It may be given up for a lower one until something is promised."""
    roster: Roster | None = None
    """The roster that is followed."""
    result: Result | None = None
    """The outcome. Until `finished` it may yet be replaced, if every holder of its bytes dies."""
    finished: bool = False
    _promised: int = -1  # highest view committed to: nothing of a lower one is followed
    _closing: bool = False  # a leader has closed the step
    _started: bool = False  # this peer leads `view` and has asked for commitments
    _asked_again: bool = False
    _reason: str = ""
    _joins: tuple[PeerId, ...] = ()
    _contribution: Contribution | None = None
    _contribution_asked: bool = False
    _commit_owed: bool = False
    _committed: dict[PeerId, Contribution] = field(default_factory=dict)  # to `view`, which this peer leads
    _seen: dict[PeerId, Contribution] = field(default_factory=dict)  # checked; in any view
    _earlier: Roster | None = None  # highest roster known: its facts are proposed again
    _gone: dict[PeerId, str] = field(default_factory=dict)  # unreachable and not heard of since
    _late: dict[PeerId, str] = field(default_factory=dict)  # silent in this view
    _parts: RoundParts = field(default_factory=RoundParts)
    _num_fetches: int = 0
    _due: float | None = None  # when this peer acts as leader, or gives up on its leader
    _parts_due: float | None = None  # when this peer stops waiting for parts to reduce

    def __post_init__(self) -> None:
        assert self.me in self.facts.members
        assert set(self.facts.members) <= set(self.facts.leaders)
        while self.leader not in self.facts.members:
            self.view += 1

    @property
    def leader(self) -> PeerId:
        return self.facts.leader_of(self.view)

    @property
    def leads(self) -> bool:
        return self.leader == self.me

    @property
    def left(self) -> bool:
        """The roster that is followed puts this peer off: it is no member of the next version."""
        roster = self.result.roster if self.result is not None else self.roster
        return roster is not None and self.me in left_by(roster)

    @property
    def deadline(self) -> float | None:
        """When `tick` wants to be called next."""
        if self.finished:
            return None
        return min((time for time in (self._due, self._parts_due) if time is not None), default=None)

    # -- close and commit ---------------------------------------------------------------------------------

    def close(self, *, reason: str, joins: Iterable[PeerId], view: int, now: float) -> Instructions:
        """The leader of `view` (this peer) closes the step."""
        assert self.facts.leader_of(view) == self.me
        assert view >= self.view
        if self.result is not None or (self._started and view == self.view):
            return []
        self._joins = tuple(sorted(set(joins)))
        return self._begin(view, reason, now)

    def _begin(self, view: int, reason: str, now: float) -> Instructions:
        self._enter(view)
        self._reason, self._started, self._asked_again = reason, True, False
        self._due = now + 2 * self.facts.phase_s
        # Whoever was thought gone is asked too: a broken stream must not make two stages of one.
        self._gone.clear()
        others = tuple(peer for peer in self.facts.members if peer != self.me)
        out: Instructions = [SendClose(others, view, reason)] if others else []
        return out + self._commit(now)

    def on_close(self, sender: PeerId, view: int, *, now: float) -> Instructions:
        """The view's leader wants this member's contribution."""
        self.facts.check_view(sender, view)
        self._check_not_far(sender, view)
        self._gone.pop(sender, None)
        if self.finished and self._contribution is not None:
            return [SendCommit(sender, view, self._contribution, self._earlier, self.result)]
        news = self._news_for(sender, view)
        if news or view < self._promised:
            return news
        self._enter(view)
        self._commit_owed = True
        return self._commit(now)

    def contributed(self, contribution: Contribution, *, now: float) -> Instructions:
        """The own commitment is made. It is made once, whatever view asks for it."""
        assert self._contribution is None
        self._contribution = contribution
        self._seen[self.me] = contribution
        return self._commit(now)

    def on_commit(
        self,
        sender: PeerId,
        view: int,
        contribution: Contribution,
        roster: Roster | None,
        result: Result | None,
        *,
        now: float,
    ) -> Instructions:
        """A member's commitment reaches the leader, with what the member knows of earlier views.

        Sent unasked, it tells this peer that the sender found all leaders before it gone.
        """
        facts = self.facts
        facts.check_member(sender)
        self._check_not_far(sender, view)
        if facts.leader_of(view) != self.me:
            raise RemoteError("protocol", f"commitment to view {view}, which is not led here", sender)
        if contribution.peer_id != sender:
            raise RemoteError("protocol", f"contribution of {contribution.peer_id} sent by {sender}", sender)
        if not self._knows(contribution):
            facts.check_contribution(contribution, self.verify)
        if self._seen.get(sender, contribution) != contribution:
            raise RemoteError("equivocation", f"two contributions of {sender} in step {facts.step}", sender)
        if roster is not None:
            facts.check_roster(roster, self.verify, known=self._knows)
        if result is not None:
            out = self.on_result(result, now=now)
            return out or self._news_for(sender, view)
        self._seen[sender] = contribution
        self._gone.pop(sender, None)
        news = self._news_for(sender, view)
        if news or view < self._promised:
            return news
        if roster is not None and (self._earlier is None or roster.rank > self._earlier.rank):
            self._earlier = roster
        if self._has_overslept(now):
            return self._begin_own_view(now)
        out = []
        if view > self.view or not self._started:
            out = self._begin(view, self._reason or "the leader is gone", now)
        self._committed[sender] = contribution
        self._late.pop(sender, None)
        return out + self._propose(now)

    def _commit(self, now: float) -> Instructions:
        if self._contribution is None:
            if self._contribution_asked:
                return []
            self._contribution_asked = True
            return [MakeContribution()]
        if self.result is not None:
            return []
        if self.leads and self._started:
            self._committed[self.me] = self._contribution
            return self._propose(now)
        if self._commit_owed:
            self._commit_owed = False
            self._wait_for_leader(now)
            return [SendCommit(self.leader, self.view, self._contribution, self._earlier, None)]
        return []

    def _news_for(self, sender: PeerId, view: int) -> Instructions:
        """What the sender of a message of `view` has missed, if it matters."""
        if sender == self.me:
            return []
        if self.finished or (self.result is not None and view <= self.view):
            assert self.result is not None
            return [SendResult((sender,), self.result)]
        roster = self.roster
        if roster is not None and (roster.view > view or sender in left_by(roster) or self._has_proposed(view)):
            return [SendRoster((sender,), roster)]
        return []

    def _has_proposed(self, view: int) -> bool:
        return self.roster is not None and self.roster.view == view and self.roster.leader == self.me

    # -- roster -------------------------------------------------------------------------------------------

    def _missing(self) -> tuple[PeerId, ...]:
        heard = {self.me, *self._committed, *self._gone}
        return tuple(peer for peer in self.facts.members if peer not in heard)

    def _propose(self, now: float, *, late: bool = False) -> Instructions:
        if not self._started or self._contribution is None or self._has_proposed(self.view):
            return []
        missing = self._missing()
        if missing and not late:
            return []
        for peer in missing:
            self._late[peer] = f"no commitment within {3 * self.facts.phase_s:.1f} s"
        earlier = self._earlier
        if earlier is not None and can_propose_again(earlier, self.me, self._committed):
            # It may already have been acted on: parts that moved need not move again.
            proposal = replace(earlier, view=self.view, revision=0, leader=self.me)
        else:
            proposal = fresh_roster(
                self.facts,
                view=self.view,
                leader=self.me,
                committed=self._committed,
                silent={**self._late, **self._gone},
                joins=self._joins,
                reason=self._reason,
            )
        return self._publish(self._with_reducers(proposal, earlier.reducers if earlier is not None else ()), now)

    def _with_reducers(self, roster: Roster, held: tuple[PeerId, ...]) -> Roster:
        away = {*left_by(roster), *self._gone, *self._late} - {self.me}
        live = tuple(peer for peer in self.facts.members if peer not in away)
        done = {part for part, reduced in self._parts.reduced.items() if is_of(reduced, roster)}
        return with_reducers(roster, held, live, num_parts=self.facts.num_parts, done=done)

    def _publish(self, proposal: Roster, now: float) -> Instructions:
        signed = replace(proposal, signature=self.sign(proposal.signed_bytes()))
        to = self._audience(signed)
        out: Instructions = [SendRoster(to, signed)] if to else []
        return out + self._follow(signed, now)

    def on_roster(self, sender: PeerId, roster: Roster, *, now: float) -> Instructions:
        """A leader's roster, from it or from whoever has it: the highest (view, revision) is followed."""
        self.facts.check_roster(roster, self.verify, known=self._knows)
        self._check_not_far(roster.leader, roster.view)
        self._gone.pop(sender, None)
        if self.finished or roster.view < self._promised:
            return self._news_for(sender, roster.view) if sender == roster.leader else []
        held = self.roster
        if held is not None and roster.rank <= held.rank:
            if roster.rank == held.rank and roster != held:
                raise RemoteError(
                    "equivocation", f"two rosters of view {roster.view} of {roster.leader}", roster.leader
                )
            return []
        if self.result is not None and roster.view <= self._promised:
            return []  # decided in this view
        self._enter(roster.view)
        return self._follow(roster, now)

    def _follow(self, roster: Roster, now: float) -> Instructions:
        earlier = self.roster
        self.roster = self._earlier = roster
        self._closing = True
        for made in roster.contributions:
            self._seen.setdefault(made.peer_id, made)
        if earlier is not None and earlier.facts_digest() != roster.facts_digest():
            self._parts.keep_what_fits(earlier, roster)
        mine = self._own_contribution(roster)
        moved_before = earlier is not None and self._own_contribution(earlier) is not None
        new_leader = earlier is None or earlier.leader != roster.leader
        out: Instructions = []
        for part, reducer in enumerate(roster.reducers):
            stays = earlier is not None and bool(earlier.reducers) and earlier.reducers[part] == reducer
            if reducer != self.me:
                if mine is not None and not (stays and moved_before):
                    out.append(SendPart(reducer, part, roster.view))
                continue
            if mine is not None:
                self._parts.received.setdefault(part, set()).add(self.me)
            known = self._parts.aggregated.get(part) or self._parts.reduced.get(part)
            if known is None:
                out += self._aggregate_if_complete(part)
            else:  # done before, here or by a reducer that is relieved; who leads now may not have it
                self._parts.reduced.setdefault(part, known)
                if not self.leads and (new_leader or not stays):
                    out.append(SendReduced((roster.leader,), known))
        self._parts_due = now + self.facts.phase_s if self.me in roster.reducers else None
        self._wait_for_leader(now)
        self._parts.accept_offers(roster)
        return out + self._conclude(now)

    def _own_contribution(self, roster: Roster) -> Contribution | None:
        """The own contribution, if it is on the roster and the bytes it commits to are here."""
        made = roster.contribution_of(self.me)
        return made if made is not None and made == self._contribution else None

    # -- reduce -------------------------------------------------------------------------------------------

    def expected_digest(self, part: int, sender: PeerId) -> bytes:
        """Digest that `sender` committed to for `part`. Raises RemoteError if its part is not wanted."""
        contribution = self.roster.contribution_of(sender) if self.roster is not None else None
        if contribution is None or not 0 <= part < len(contribution.part_digests):
            raise RemoteError("protocol", f"part {part} of {sender} is not on the roster", sender)
        return contribution.part_digests[part]

    def on_part(self, sender: PeerId, part: int, *, now: float) -> Instructions:
        """A contributor's part is here and matches its committed digest."""
        self.expected_digest(part, sender)
        self._gone.pop(sender, None)
        self._parts.received.setdefault(part, set()).add(sender)
        return self._aggregate_if_complete(part)

    def _aggregate_if_complete(self, part: int, *, late: bool = False) -> Instructions:
        roster = self.roster
        if roster is None or self.result is not None or self.me not in roster.reducers[part : part + 1]:
            return []
        contributors = self._parts.begin(part, roster, self._gone, late=late)
        return [AggregatePart(part, contributors)] if contributors else []

    def aggregated(self, reduced: ReducedPart, *, now: float) -> Instructions:
        """The own part is aggregated and encoded."""
        part, roster = reduced.part, self.roster
        if not self._parts.done(reduced, roster):
            return self._aggregate_if_complete(part)
        assert roster is not None
        if self.result is not None or part in self._parts.reduced or roster.reducers[part] != self.me:
            return []
        to = self._audience(roster)
        out: Instructions = [SendReduced(to, reduced)] if to else []
        return out + self._take_reduced(reduced, now)

    def on_reduced(self, sender: PeerId, reduced: ReducedPart, *, now: float) -> Instructions:
        """A reducer's part is here; its bytes match its digest."""
        self.facts.check_member(sender)
        roster = self.roster
        if roster is None or not 0 <= reduced.part < self.facts.num_parts:
            raise RemoteError("protocol", f"reduced part {reduced.part} is not of this round, or too early", sender)
        if not reduced.contributors or not set(reduced.contributors) <= set(self.facts.members):
            raise RemoteError("protocol", f"reduced part {reduced.part} is made of no members' contributions", sender)
        self._parts.offer(sender, reduced)
        self._gone.pop(sender, None)
        if self.result is not None:
            return self._finish_if_complete()
        # Of a reducer relieved of the part, or of another view's facts: the bytes may still be chosen.
        if (
            reduced.part >= len(roster.reducers)
            or roster.reducers[reduced.part] != sender
            or not is_of(reduced, roster)
        ):
            return []
        return self._take_reduced(reduced, now)

    def _take_reduced(self, reduced: ReducedPart, now: float) -> Instructions:
        self._parts.reduced.setdefault(reduced.part, reduced)
        if self._has_overslept(now):
            return self._begin_own_view(now)
        self._wait_for_leader(now)
        return self._conclude(now)

    # -- result -------------------------------------------------------------------------------------------

    def _conclude(self, now: float) -> Instructions:
        roster = self.roster
        if roster is None or not self._has_proposed(self.view) or not self._started or self.result is not None:
            return []
        if self._parts.unreduced(roster):
            return []
        parts = tuple(self._parts.reduced[part] for part in range(len(roster.reducers)))
        unsigned = Result(roster, parts, self.me)
        return self._accept(unsigned.signed_by(self.sign(unsigned.signed_bytes())), now)

    def check_result(self, result: Result) -> None:
        """Raises RemoteError unless the result belongs to this round, is complete and signed by a leader of it."""
        self.facts.check_result(result, self.verify, known=self._knows)

    def on_result(self, result: Result, *, now: float, sender: PeerId | None = None) -> Instructions:
        """The round's outcome: sent by `sender`, or taken from the store of a peer that has applied it (None).

        A result of a view below the one this peer promised to is void if only its sender had it: the sender may be
        dead by now, and the new leader cannot know of it. So it is taken only from the promised view's leader.
        """
        held = self.result
        if held is not None and held.root() == result.root():
            return []
        self.check_result(result)
        view = result.roster.view
        if held is not None and (self.finished or sender is not None):
            if view == held.roster.view:
                raise RemoteError("equivocation", f"two results of view {view} of {result.leader}", result.leader)
            if self.finished and view > held.roster.view:
                raise RemoteError("fork", f"step {self.facts.step} ended otherwise in view {view}", result.leader)
            if view < held.roster.view:
                return []
        if sender is not None and view < self._promised and sender != self.leader and not self.leads:
            return []
        return self._accept(result, now)

    def _accept(self, result: Result, now: float) -> Instructions:
        if result.roster.view > self.view:
            self._enter(result.roster.view)
        self.result = result
        self._earlier = result.roster
        self._num_fetches = 0
        self._parts_due = None
        self._due = now + self.facts.phase_s
        to = self._audience(result.roster) if self.leads else ()
        out: Instructions = [SendResult(to, result)] if to else []
        return out + self._fetch_missing() + self._finish_if_complete()

    def _fetch_missing(self) -> Instructions:
        result = self.result
        assert result is not None
        out: Instructions = []
        for reduced in self._parts.lacking(result):
            reducer = result.roster.reducers[reduced.part]
            others = [peer for peer in self.facts.members if peer != reducer]
            holders = tuple(peer for peer in (reducer, *others) if peer != self.me and peer not in self._gone)
            if holders:
                out.append(FetchPart(reduced.part, reduced.digest, holders))
        return out

    def part_fetched(self, part: int, digest: bytes) -> Instructions:
        """Bytes of a part of the result were fetched and match."""
        self._parts.held.add((part, digest))
        self._num_fetches = 0
        return self._finish_if_complete()

    def _finish_if_complete(self) -> Instructions:
        if self.result is None or self.finished or self._parts.lacking(self.result):
            return []
        self.finished = True
        return [Finish(self.result)]

    # -- deaths and deadlines -----------------------------------------------------------------------------

    def unreachable(self, peer: PeerId, *, now: float) -> Instructions:
        """A peer is gone: its stream broke or its lease ran out."""
        if self.finished or peer == self.me or peer not in self.facts.members:
            return []
        self._gone.setdefault(peer, "unreachable")
        if self.result is not None:
            return [] if self._fetch_missing() else self._turn_to_next(now)
        if peer == self.leader:
            return self._next_view(now)
        if self._has_overslept(now):
            return self._begin_own_view(now)
        if self.roster is None or self.roster.view < self.view:
            return self._propose(now)
        out: Instructions = []
        for part in sorted(self._parts.received):
            out += self._aggregate_if_complete(part)
        return out + self._reassign(now)

    def tick(self, *, now: float) -> Instructions:
        """The deadline passed."""
        if self.deadline is None or now < self.deadline:
            return []
        out: Instructions = []
        if self._parts_due is not None and now >= self._parts_due:
            out += self._aggregate_late(now)
        if self._due is None or now < self._due:
            return out
        if self._has_overslept(now):
            return out + self._begin_own_view(now)
        if now > self._due + self.facts.phase_s:  # this process stood still: first hear what has come meanwhile
            self._due = now + self.facts.phase_s
            return out
        if self.result is not None:
            return out + self._fetch_again(now)
        if not (self.leads and self._started):
            return out + self._next_view(now)
        if self._has_proposed(self.view):
            return out + self._relieve_late_reducers(now)
        self._due = now + self.facts.phase_s
        missing = self._missing()
        if self._asked_again or not missing:
            return out + self._propose(now, late=True)
        self._asked_again = True
        return [*out, SendClose(missing, self.view, self._reason)]

    def _aggregate_late(self, now: float) -> Instructions:
        """Parts that are still missing are left out. A part that nobody has sent yet is waited for."""
        self._parts_due = None
        out: Instructions = []
        assert self.roster is not None
        for part, reducer in enumerate(self.roster.reducers):
            if reducer == self.me:
                out += self._aggregate_if_complete(part, late=True)
                if part not in self._parts.aggregating and part not in self._parts.reduced:
                    self._parts_due = now + self.facts.phase_s
        return out

    def _relieve_late_reducers(self, now: float) -> Instructions:
        roster = self.roster
        assert roster is not None
        self._due = now + 2 * self.facts.phase_s
        missing = self._parts.unreduced(roster)
        for part in missing:
            if roster.reducers[part] != self.me:
                self._late[roster.reducers[part]] = f"part {part} not reduced within {2 * self.facts.phase_s:.1f} s"
        out = self._reassign(now)
        if out or any(part in self._parts.aggregating for part in missing):
            return out
        return self._begin_own_view(now)  # nobody has brought the parts: propose without those contributions

    def _reassign(self, now: float) -> Instructions:
        roster = self.roster
        if roster is None or not self._started or not self._has_proposed(self.view):
            return []
        away = {*self._gone, *self._late}
        if not any(roster.reducers[part] in away for part in self._parts.unreduced(roster)):
            return []
        return self._publish(self._with_reducers(replace(roster, revision=roster.revision + 1), roster.reducers), now)

    def _fetch_again(self, now: float) -> Instructions:
        self._num_fetches += 1
        self._due = now + self.facts.phase_s
        out = self._fetch_missing()
        return out if out and self._num_fetches < MAX_FETCHES else self._turn_to_next(now)

    def _turn_to_next(self, now: float) -> Instructions:
        return self._begin_own_view(now) if self.leads and self._started else self._next_view(now)

    def _next_view(self, now: float) -> Instructions:
        facts, left = self.facts, left_by(self.roster) if self.roster is not None else set()
        others = [peer for peer in facts.members if peer not in left and peer not in self._gone and peer != self.me]
        view = self.view + 1
        # Whoever was put off leads only if nobody else is there.
        while facts.leader_of(view) not in others and (facts.leader_of(view) != self.me or (self.left and others)):
            view += 1
        if not self._closing:  # nothing has been asked yet: only whom to report to changes
            self.view = view
            return []
        if facts.leader_of(view) == self.me:
            return self._begin(view, self._reason or "the leader is gone", now)
        self._enter(view)
        self._commit_owed = True  # sent unasked, it tells the new leader that its view has begun
        return self._commit(now)

    def _begin_own_view(self, now: float) -> Instructions:
        """Ask everyone again, in the next view that this peer leads."""
        view = self.view + 1
        while self.facts.leader_of(view) != self.me:
            view += 1
        return self._begin(view, self._reason, now)

    def _enter(self, view: int) -> None:
        """Promise to follow nothing of a lower view."""
        if view > self._promised:
            self._started = False
            self._committed.clear()
            self._late.clear()
            self._due = self._parts_due = None
            if not self.finished:
                # Nobody who lives has applied it, or the new leader will hear so and hand it out again.
                self.result = None
        self.view = self._promised = view
        self._closing = True

    def _wait_for_leader(self, now: float) -> None:
        if self.result is None:
            self._due = now + (2 if self.leads and self._started else 4) * self.facts.phase_s

    def _has_overslept(self, now: float) -> bool:
        """This leader stood still past its deadline: others may have gone on to another view."""
        return (
            self.leads
            and self._started
            and self.result is None
            and self._due is not None
            and now > self._due + self.facts.phase_s
        )

    # -- who and what -------------------------------------------------------------------------------------

    def _audience(self, roster: Roster) -> tuple[PeerId, ...]:
        """Everyone else; of those who leave only whoever may be there to hear it."""
        away = left_by(roster) & set(self._gone)
        return tuple(peer for peer in self.facts.members if peer != self.me and peer not in away)

    def _knows(self, made: Contribution) -> bool:
        return self._seen.get(made.peer_id) == made

    def _check_not_far(self, sender: PeerId, view: int) -> None:
        if view > self.view + MAX_VIEWS_AHEAD:
            raise RemoteError("protocol", f"view {view} is far ahead of view {self.view}", sender)
