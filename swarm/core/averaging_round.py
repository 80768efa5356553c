"""This is where one member decides its part in one averaging round; `peer.rounds` carries the decisions out.

Phases, led by the leader of the view: close and commit, roster, reduce, result. A stimulus (a message, a death,
a deadline) returns the instructions it leads to. Nothing here waits, encodes or sends.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from swarm.core.contribution import Contribution, Departure, ReducedPart, Result, Roster
from swarm.core.errors import RemoteError
from swarm.core.ids import PeerId, StageIndex, Step
from swarm.core.ranking import rank


@dataclass(frozen=True)
class MakeContribution:
    """Take the step's gradient, encode it, sign the commitment; then call `contributed`."""


@dataclass(frozen=True)
class SendClose:
    to: tuple[PeerId, ...]
    view: int
    reason: str


@dataclass(frozen=True)
class SendCommit:
    """The own contribution and the highest roster or the result known, to the view's leader."""

    to: PeerId
    view: int
    contribution: Contribution
    roster: Roster | None
    result: Result | None


@dataclass(frozen=True)
class SendRoster:
    to: tuple[PeerId, ...]
    roster: Roster


@dataclass(frozen=True)
class SendPart:
    """The own encoded part to its reducer."""

    to: PeerId
    part: int
    view: int


@dataclass(frozen=True)
class AggregatePart:
    """Aggregate the part over these contributors, encode once; then call `aggregated`."""

    part: int
    contributors: tuple[PeerId, ...]


@dataclass(frozen=True)
class SendReduced:
    to: tuple[PeerId, ...]
    reduced: ReducedPart


@dataclass(frozen=True)
class SendResult:
    to: tuple[PeerId, ...]
    result: Result


@dataclass(frozen=True)
class FetchPart:
    """Get the bytes with this digest from any of these; then call `part_fetched`."""

    part: int
    digest: bytes
    holders: tuple[PeerId, ...]


@dataclass(frozen=True)
class Finish:
    """The result is signed and all its bytes are here: apply it."""

    result: Result


Instruction: TypeAlias = (
    MakeContribution
    | SendClose
    | SendCommit
    | SendRoster
    | SendPart
    | AggregatePart
    | SendReduced
    | SendResult
    | FetchPart
    | Finish
)
Instructions: TypeAlias = list[Instruction]


@dataclass(frozen=True, kw_only=True)
class RoundFacts:
    """What a round starts from: the same at every member."""

    run_id: str
    stage: StageIndex
    step: Step
    members: tuple[PeerId, ...]
    """Sorted; those of the last certificate."""
    leaders: tuple[PeerId, ...]
    """Peers in the order in which they lead: view k is led by number k modulo their count. The order is drawn from
    the certificate before the last, so that it is known while the last round still runs; whoever left since is
    passed over, whoever joined comes last."""
    previous_name: bytes
    num_parts: int
    phase_s: float
    """Deadline of each phase."""

    def leader_of(self, view: int) -> PeerId:
        return self.leaders[view % len(self.leaders)]


@dataclass
class AveragingRound:
    """One member's side of round `facts.step`.

    `sign` makes the own signature, `verify(peer, data, signature)` checks another's; both are pure.
    """

    facts: RoundFacts
    me: PeerId
    sign: Callable[[bytes], bytes]
    verify: Callable[[PeerId, bytes, bytes], bool]
    view: int = 0
    roster: Roster | None = None
    result: Result | None = None
    finished: bool = False
    _reason: str = ""
    _started: bool = False
    _joins: tuple[PeerId, ...] = ()
    _contribution: Contribution | None = None
    _contribution_asked: bool = False
    _commit_owed: bool = False
    _committed: dict[PeerId, Contribution] = field(default_factory=dict)
    _gone: dict[PeerId, str] = field(default_factory=dict)
    _received: dict[int, set[PeerId]] = field(default_factory=dict)
    _aggregating: set[int] = field(default_factory=set)
    _aggregated: dict[int, ReducedPart] = field(default_factory=dict)
    _reduced: dict[int, ReducedPart] = field(default_factory=dict)
    _held: set[tuple[int, bytes]] = field(default_factory=set)
    _deadline: float | None = None

    @property
    def leader(self) -> PeerId:
        return self.facts.leader_of(self.view)

    @property
    def leads(self) -> bool:
        return self.leader == self.me

    @property
    def deadline(self) -> float | None:
        """When `tick` wants to be called next."""
        return None if self.finished else self._deadline

    # -- close and commit ---------------------------------------------------------------------------------

    def close(self, *, reason: str, joins: Iterable[PeerId], view: int, now: float) -> Instructions:
        """The leader of `view` (this peer) closes the step."""
        assert self.facts.leader_of(view) == self.me
        assert view >= self.view
        if self.result is not None or (self._started and view == self.view):
            return []
        self._enter_view(view, now)
        self._reason, self._joins, self._started = reason, tuple(sorted(set(joins))), True
        others = tuple(peer for peer in self.facts.members if peer != self.me)
        out: Instructions = [SendClose(others, view, reason)] if others else []
        return out + self._commit(now)

    def on_close(self, sender: PeerId, view: int, *, now: float) -> Instructions:
        """The view's leader wants this member's contribution."""
        self._check_leader(sender, view)
        if view < self.view:
            return []
        self._enter_view(view, now)
        self._commit_owed = True
        return self._commit(now)

    def contributed(self, contribution: Contribution, *, now: float) -> Instructions:
        """The own commitment is made. It is made once, whatever view asks for it."""
        assert self._contribution is None
        self._contribution = contribution
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
        """A member's commitment reaches the leader, with what the member knows of earlier views."""
        if result is not None:
            return self.on_result(result, now=now)
        if view != self.view or not self.leads or (self.roster is not None and self.roster.view == view):
            return []
        self._check_contribution(sender, contribution)
        held = self._committed.get(sender)
        if held is not None and held != contribution:
            raise RemoteError("equivocation", f"two contributions of {sender} in step {self.facts.step}", sender)
        if roster is not None:
            self._check_roster(roster)
            if self.roster is None or roster.rank > self.roster.rank:
                self.roster = roster
        self._committed[sender] = contribution
        self._gone.pop(sender, None)
        return self._propose(now, late=False)

    def _commit(self, now: float) -> Instructions:
        if self._contribution is None:
            if self._contribution_asked:
                return []
            self._contribution_asked = True
            return [MakeContribution()]
        if self.leads and self._started:
            return self.on_commit(self.me, self.view, self._contribution, None, self.result, now=now)
        if self._commit_owed:
            self._commit_owed = False
            return [SendCommit(self.leader, self.view, self._contribution, self.roster, self.result)]
        return []

    # -- roster -------------------------------------------------------------------------------------------

    def _propose(self, now: float, *, late: bool) -> Instructions:
        missing = [p for p in self.facts.members if p not in self._committed and p not in self._gone]
        if self._contribution is None or (missing and not late):
            return []
        for peer in missing:
            self._gone[peer] = f"no commitment within {self.facts.phase_s:.1f} s"
        live = tuple(p for p in self.facts.members if p in self._committed)
        earlier = self.roster
        if earlier is None:
            proposal = self._fresh_roster(live)
        else:  # an earlier view's roster may already have been acted on: its facts are proposed again
            proposal = replace(
                earlier, view=self.view, revision=0, leader=self.me, reducers=self._reducers(live, earlier)
            )
        return self._publish(proposal, now)

    def _fresh_roster(self, live: tuple[PeerId, ...]) -> Roster:
        facts = self.facts
        contributions = tuple(self._committed[peer] for peer in live if self._committed[peer].work)
        fresh = Roster(
            facts.run_id,
            facts.stage,
            facts.step,
            self.view,
            0,
            self.me,
            facts.previous_name,
            contributions,
            (),
            tuple(peer for peer in self._joins if peer not in facts.members),
            tuple(Departure(peer, self._gone[peer][:200]) for peer in facts.members if peer not in live),
            self._reason[:200],
        )
        return replace(fresh, reducers=self._reducers(live, fresh))

    def _reducers(self, live: tuple[PeerId, ...], roster: Roster) -> tuple[PeerId, ...]:
        if not roster.contributions:
            return ()
        order = rank(live, "reducer", roster.previous_name, roster.stage, roster.step)
        return tuple(order[part % len(order)] for part in range(self.facts.num_parts))

    def _publish(self, proposal: Roster, now: float) -> Instructions:
        signed = replace(proposal, signature=self.sign(proposal.signed_bytes()))
        to = self._audience(signed)
        out: Instructions = [SendRoster(to, signed)] if to else []
        return out + self.on_roster(self.me, signed, now=now)

    def on_roster(self, sender: PeerId, roster: Roster, *, now: float) -> Instructions:
        """The leader's roster: the highest (view, revision) is followed."""
        if self.result is not None:
            return []
        self._check_roster(roster)
        if roster.leader != sender:
            raise RemoteError("protocol", f"roster of {roster.leader} sent by {sender}", sender)
        if self.roster is not None and roster.rank <= self.roster.rank and sender != self.me:
            return []
        earlier = self.roster
        if earlier is not None and earlier.facts_digest() != roster.facts_digest():
            earlier = None
            for gathered in (self._received, self._aggregated, self._reduced):
                gathered.clear()
            self._aggregating.clear()
        self.view = max(self.view, roster.view)
        self.roster = roster
        self._deadline = now + self.facts.phase_s
        mine = roster.contribution_of(self.me)
        out: Instructions = []
        for part, reducer in enumerate(roster.reducers):
            if reducer == self.me:
                if mine is not None:
                    self._received.setdefault(part, set()).add(self.me)
                if part in self._aggregated and roster.leader != self.me:  # a new leader has not seen it
                    out.append(SendReduced((roster.leader,), self._aggregated[part]))
                out += self._aggregate_if_complete(part)
            elif mine is not None and (earlier is None or earlier.reducers[part] != reducer):
                out.append(SendPart(reducer, part, roster.view))
        return out + self._conclude(now)

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
        self._received.setdefault(part, set()).add(sender)
        return self._aggregate_if_complete(part)

    def _aggregate_if_complete(self, part: int, *, late: bool = False) -> Instructions:
        roster = self.roster
        if roster is None or part in self._aggregating or roster.reducers[part] != self.me:
            return []
        wanted = [c.peer_id for c in roster.contributions]
        here = tuple(peer for peer in wanted if peer in self._received.get(part, ()))
        if not here or (any(peer not in here and peer not in self._gone for peer in wanted) and not late):
            return []
        self._aggregating.add(part)
        return [AggregatePart(part, here)]

    def aggregated(self, reduced: ReducedPart, *, now: float) -> Instructions:
        """The own part is aggregated and encoded."""
        if self.result is not None or self.roster is None or reduced.part not in self._aggregating:
            return []
        self._held.add((reduced.part, reduced.digest))
        self._aggregated[reduced.part] = reduced
        to = self._audience(self.roster)
        out: Instructions = [SendReduced(to, reduced)] if to else []
        return out + self._take_reduced(reduced, now)

    def on_reduced(self, sender: PeerId, reduced: ReducedPart, *, now: float) -> Instructions:
        """A reducer's part is here; its bytes match its digest."""
        roster = self.roster
        if roster is None:
            raise RemoteError("protocol", f"reduced part {reduced.part} before the roster", sender)
        known = {c.peer_id for c in roster.contributions}
        if not reduced.contributors or not set(reduced.contributors) <= known or reduced.part >= self.facts.num_parts:
            raise RemoteError("protocol", f"reduced part {reduced.part} names contributors not on the roster", sender)
        self._held.add((reduced.part, reduced.digest))
        if self.result is not None:
            return self._finish_if_complete()
        if roster.reducers[reduced.part] != sender:  # a reducer relieved of the part: its bytes may still be chosen
            return []
        return self._take_reduced(reduced, now)

    def _take_reduced(self, reduced: ReducedPart, now: float) -> Instructions:
        self._reduced.setdefault(reduced.part, reduced)
        self._deadline = now + self.facts.phase_s
        return self._conclude(now)

    # -- result -------------------------------------------------------------------------------------------

    def _conclude(self, now: float) -> Instructions:
        roster = self.roster
        if not self.leads or roster is None or self.result is not None or roster.leader != self.me:
            return []
        num_parts = self.facts.num_parts if roster.contributions else 0
        if len(self._reduced) < num_parts:
            return []
        unsigned = Result(roster, tuple(self._reduced[part] for part in range(num_parts)), self.me)
        result = unsigned.signed_by(self.sign(unsigned.signed_bytes()))
        return self.on_result(result, now=now)

    def on_result(self, result: Result, *, now: float) -> Instructions:
        """The round's outcome, from whoever has it."""
        if self.result is not None:
            if self.result.root() != result.root():
                raise RemoteError("fork", f"two results of step {self.facts.step}", result.leader)
            return []
        self.check_result(result)
        self.result = result
        self.roster = result.roster
        out: Instructions = []
        if self.leads:
            to = self._audience(result.roster)
            if to:
                out.append(SendResult(to, result))
        for reduced in result.parts:
            if (reduced.part, reduced.digest) not in self._held:
                reducer = result.roster.reducers[reduced.part]
                others = [p for p in self._audience(result.roster) if p != reducer]
                holders = tuple(p for p in (reducer, *others) if p != self.me)
                out.append(FetchPart(reduced.part, reduced.digest, holders))
        return out + self._finish_if_complete()

    def part_fetched(self, part: int, digest: bytes) -> Instructions:
        """Bytes of a part of the result were fetched and match."""
        self._held.add((part, digest))
        return self._finish_if_complete()

    def _finish_if_complete(self) -> Instructions:
        if self.result is None or self.finished:
            return []
        if any((reduced.part, reduced.digest) not in self._held for reduced in self.result.parts):
            return []
        self.finished = True
        return [Finish(self.result)]

    # -- deaths and deadlines -----------------------------------------------------------------------------

    def unreachable(self, peer: PeerId, *, now: float) -> Instructions:
        """A peer is gone: its stream broke or its lease ran out."""
        if self.finished or peer == self.me:
            return []
        self._gone.setdefault(peer, "unreachable")
        out: Instructions = []
        if self.result is None and peer == self.leader:
            return self._next_view(now)
        if self.leads and self._started and (self.roster is None or self.roster.view < self.view):
            out += self._propose(now, late=False)
        elif self.roster is not None and self.result is None:
            for part in sorted(self._received):
                out += self._aggregate_if_complete(part)
            if self.leads:
                out += self._reassign(now)
        return out

    def tick(self, *, now: float) -> Instructions:
        """The deadline passed."""
        if self.finished or self._deadline is None or now < self._deadline:
            return []
        phase_s = self.facts.phase_s
        self._deadline = now + phase_s
        out: Instructions = []
        if self.result is not None:
            self._deadline = None
        elif self.leads and self._started and (self.roster is None or self.roster.view < self.view):
            out += self._propose(now, late=True)
        elif self.roster is not None and self.roster.view == self.view:
            for part, reducer in enumerate(self.roster.reducers):
                if reducer == self.me:
                    out += self._aggregate_if_complete(part, late=True)
            if self.leads and not out:
                for part, reducer in enumerate(self.roster.reducers):
                    if part not in self._reduced and reducer != self.me:
                        self._gone.setdefault(reducer, f"part {part} not reduced within {phase_s:.1f} s")
                out += self._reassign(now)
            elif not self.leads and not out:
                out += self._next_view(now)
        else:
            out += self._next_view(now)
        return out

    def _reassign(self, now: float) -> Instructions:
        roster = self.roster
        assert roster is not None
        lost = [p for p, r in enumerate(roster.reducers) if r in self._gone and p not in self._reduced]
        if not lost or roster.view != self.view:
            return []
        live = tuple(p for p in self.facts.members if p not in self._gone)
        order = rank(live, "reducer", roster.previous_name, roster.stage, roster.step, roster.revision + 1)
        reducers = list(roster.reducers)
        for index, part in enumerate(lost):
            reducers[part] = order[index % len(order)]
        return self._publish(replace(roster, revision=roster.revision + 1, reducers=tuple(reducers)), now)

    def _next_view(self, now: float) -> Instructions:
        for view in range(self.view + 1, self.view + 1 + len(self.facts.leaders)):
            leader = self.facts.leader_of(view)
            if leader == self.me or (leader in self.facts.members and leader not in self._gone):
                break
        else:  # everyone else is thought gone: start over with whoever answers
            self._gone.clear()
            view = self.view + 1
        if self._deadline is None:  # nothing has been asked yet: only whom to report to changes
            self.view = view
            return []
        if self.facts.leader_of(view) == self.me:
            return self.close(reason=self._reason or "the leader is gone", joins=self._joins, view=view, now=now)
        self._enter_view(view, now)
        self._commit_owed = True  # sent unasked, it tells the new leader that its view has begun
        return self._commit(now)

    def _enter_view(self, view: int, now: float) -> None:
        if view > self.view:
            self.view = view
            self._started = False
            self._committed.clear()
        self._deadline = now + self.facts.phase_s * 3

    # -- checks -------------------------------------------------------------------------------------------

    def _audience(self, roster: Roster) -> tuple[PeerId, ...]:
        left = {departure.peer_id for departure in roster.leaves}
        everyone = set(self.facts.members) - left - {self.me}
        return tuple(sorted(everyone))

    def _check_leader(self, sender: PeerId, view: int) -> None:
        if view < 0 or self.facts.leader_of(view) != sender:
            raise RemoteError("protocol", f"{sender} does not lead view {view} of step {self.facts.step}", sender)

    def _check_contribution(self, sender: PeerId, made: Contribution) -> None:
        facts = self.facts
        if (made.run_id, made.stage, made.step, made.peer_id) != (facts.run_id, facts.stage, facts.step, sender):
            raise RemoteError("protocol", f"contribution of {sender} names another run, stage, step or peer", sender)
        if sender not in facts.members:
            raise RemoteError("standing", f"{sender} is no member of stage {facts.stage}", sender)
        if len(made.part_digests) != (facts.num_parts if made.work else 0):
            raise RemoteError("protocol", f"{len(made.part_digests)} part digests for {facts.num_parts} parts", sender)
        if not self.verify(sender, made.signed_bytes(), made.signature):
            raise RemoteError("signature", f"contribution of {sender} is not signed by it", sender)

    def _check_roster(self, roster: Roster) -> None:
        facts = self.facts
        if (roster.run_id, roster.stage, roster.step) != (facts.run_id, facts.stage, facts.step):
            raise RemoteError("protocol", "roster names another run, stage or step", roster.leader)
        if roster.previous_name != facts.previous_name:
            raise RemoteError("fork", f"roster of step {facts.step} starts from another version", roster.leader)
        self._check_leader(roster.leader, roster.view)
        if len(roster.reducers) != (facts.num_parts if roster.contributions else 0):
            raise RemoteError("protocol", f"{len(roster.reducers)} reducers for {facts.num_parts} parts", roster.leader)
        if not set(roster.reducers) <= set(facts.members):
            raise RemoteError("standing", "a reducer is no member", roster.leader)
        for contribution in roster.contributions:
            self._check_contribution(contribution.peer_id, contribution)
        if not self.verify(roster.leader, roster.signed_bytes(), roster.signature):
            raise RemoteError("signature", f"roster is not signed by {roster.leader}", roster.leader)

    def check_result(self, result: Result) -> None:
        """Raises RemoteError unless the result belongs to this round, is complete and signed by a leader of it."""
        self._check_roster(result.roster)
        num_parts = self.facts.num_parts if result.roster.contributions else 0
        if len(result.parts) != num_parts:
            raise RemoteError("protocol", f"result of {len(result.parts)} parts, not {num_parts}", result.leader)
        known = {c.peer_id for c in result.roster.contributions}
        for reduced in result.parts:
            if not reduced.contributors or not set(reduced.contributors) <= known:
                raise RemoteError(
                    "protocol", f"part {reduced.part} names contributors not on the roster", result.leader
                )
        if result.leader not in self.facts.members:
            raise RemoteError("standing", f"{result.leader} is no member", result.leader)
        if not self.verify(result.leader, result.signed_bytes(), result.signature):
            raise RemoteError("signature", f"result is not signed by {result.leader}", result.leader)
