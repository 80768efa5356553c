"""A simulated stage's averaging round: every member's own `AveragingRound`, its messages handed over in order.

Whatever a message says is signed, checked and decided as between daemons. Time stands still while anything is under
way, and then goes on to the next deadline.
"""

import logging
import random
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from peer.sim.pipeline import SimulatedPeer
from swarm.averaging.certified_gradient import squares_of
from swarm.averaging.seeds import reduced_seed
from swarm.bulk_digest import bulk_digest
from swarm.core.errors import LocalError, RemoteError, TransientError
from swarm.core.ids import PeerId
from swarm.core.round import averaging_round as act
from swarm.core.round.averaging_round import AveragingRound, Instruction, RoundFacts
from swarm.core.round.ballots import Proposal
from swarm.core.round.contribution import EMPTY_DIGEST, Contribution, ReducedPart, Result, Roster
from swarm.core.round.facts import EquivocationError
from swarm.core.round.voter import RoundVoter, Witness
from swarm.core.round.voting import Phase, Reconfiguration, Vote, phase_of
from swarm.core.round.words import Reduction, Words
from swarm.core.settings import RunSettings
from swarm.core.state.stage_chain import StageChain
from swarm.drawn_papers import drawn_entries
from swarm.identity.key import Identity, verify
from swarm.left_without import is_outsiders_to_ask
from swarm.witness_service import check_joins
from verification.kinds.equivocation import CastVote, Statement
from verification.kinds.false_work import FalseWork, entry_check
from verification.round.papers import Bytes, Papers

log = logging.getLogger(__name__)

MOST_DEADLINES = 1000
"""A round that has no outcome after so many never has one."""
FIRST_VIEW = 1
"""Of a round that the run key reconfigures before it begins."""

Parts = Sequence[memoryview]


@dataclass
class Member:
    """A member of the round, and the bytes it holds."""

    peer: SimulatedPeer
    machine: AveragingRound
    parts: Parts = ()
    """Of its own contribution."""
    received: dict[tuple[int, PeerId], Bytes] = field(default_factory=dict)
    waiting: list[tuple[PeerId, int, int, Bytes]] = field(default_factory=list)
    """Parts of a roster that is not here yet: sender, part, view, bytes."""
    reduced: dict[tuple[int, bytes], Bytes] = field(default_factory=dict)
    reductions: dict[ReducedPart, Reduction] = field(default_factory=dict)
    votes: dict[tuple[PeerId, Phase, int], tuple[bytes, Vote]] = field(default_factory=dict)
    unshown: set[PeerId] = field(default_factory=set)
    """Who does not show what a leader has drawn."""
    finished: Result | None = None


@dataclass(frozen=True)
class RoundOutcome:
    """What came of a round, as one of its members has it."""

    result: Result
    """Certified."""
    bodies: tuple[Bytes, ...]
    """Of the result's parts."""
    reductions: tuple[Reduction, ...]
    inputs: Mapping[tuple[int, PeerId], Bytes]
    """Every contribution's parts."""
    contradictions: tuple[tuple[Statement, Statement], ...]
    """Two statements of one peer each, that members held side by side."""
    lies: tuple[FalseWork, ...]
    """Entries whose papers say otherwise, as voters were shown them."""


Contribute = Callable[[SimulatedPeer], tuple[Contribution, Parts]]
Show = Callable[[PeerId, int], Papers | None]
"""What a contributor has for an entry of its contribution."""
Deliver = Callable[[Member], list[Instruction]]


class SimulatedRound:
    """A round that some peers of a stage are there for; those who are not are unreachable."""

    def __init__(
        self,
        chain: StageChain,
        facts: RoundFacts,
        peers: Collection[SimulatedPeer],
        *,
        joins: Iterable[PeerId],
        host: Identity,
        run_key: Identity,
        contribute: Contribute,
        show: Show,
        settings: RunSettings,
    ) -> None:
        """`peers`: the members who are there; `joins`: who is to be one after the round."""
        self._show = show
        self._lies: dict[PeerId, FalseWork] = {}
        self._check = entry_check(settings, is_of_stage=lambda peer, stage: True, on_lie=self._lied)
        self._chain, self._facts = chain, facts
        self._joins = frozenset(joins)
        self._run_key = run_key
        self._contribute = contribute
        self._verified: dict[tuple[PeerId, bytes, bytes], bool] = {}
        self._members = {
            peer.peer_id: Member(peer, AveragingRound(facts, peer.peer_id, peer.identity.sign, self._verify))
            for peer in peers
        }
        self._witness = Witness(RoundVoter(facts, host.peer_id, host.sign, self._verify))
        self._host = host.peer_id
        self._now = 0.0
        self._queue: deque[tuple[Member, Deliver]] = deque()
        self._contradictions: list[tuple[Statement, Statement]] = []

    def run(self) -> RoundOutcome:
        """Raises LocalError if it has no outcome."""
        away = [peer for peer in self._facts.members if peer not in self._members]
        for member in self._members.values():
            for peer in away:
                self._do(member, member.machine.unreachable(peer, now=self._now))
        present = [peer for peer in self._facts.voters if peer in self._members or peer == self._host]
        if not self._facts.election.is_quorum(present, self._facts.voters):
            self._reconfigure(tuple(sorted(present)))
        for member in self._members.values():
            machine = member.machine
            if machine.leads and not machine.is_closing:
                self._do(member, machine.close(reason="full", joins=self._joins, view=machine.view, now=self._now))
        for _ in range(MOST_DEADLINES):
            self._deliver_all()
            waiting = [member for member in self._members.values() if member.finished is None]
            if not waiting:
                return self._outcome()
            due = [member.machine.deadline for member in waiting]
            self._now = min(at for at in due if at is not None)
            for member in waiting:
                self._do(member, member.machine.tick(now=self._now))
        raise LocalError(f"step {self._facts.step} of stage {self._facts.stage} has no outcome")

    def _reconfigure(self, voters: tuple[PeerId, ...]) -> None:
        """Too few voters are left: the run key lets those who are there go on."""
        facts, view = self._facts, FIRST_VIEW
        while facts.leader_of(view) not in self._members:
            view += 1
        unsigned = Reconfiguration(facts.stage, facts.step, facts.previous_name, view, voters)
        changed = replace(unsigned, signature=self._run_key.sign(unsigned.signed_bytes()))
        for member in self._members.values():
            self._do(member, member.machine.reconfigure(changed, now=self._now))

    def _outcome(self) -> RoundOutcome:
        members = list(self._members.values())
        results = [member.finished for member in members if member.finished is not None]
        assert len({result.root() for result in results}) == 1, f"step {self._facts.step} has two outcomes"
        result, first = results[0], members[0]
        bodies = [b"" if part.is_empty else first.reduced[part.part, part.digest] for part in result.parts]
        held = {reduced: made for member in members for reduced, made in member.reductions.items()}
        inputs = {(index, member.peer.peer_id): part for member in members for index, part in enumerate(member.parts)}
        reductions = tuple(held[part] for part in result.parts if part in held)
        return RoundOutcome(
            result, tuple(bodies), reductions, inputs, tuple(self._contradictions), tuple(self._lies.values())
        )

    # -- messages -----------------------------------------------------------------------------------------

    def _verify(self, peer: PeerId, data: bytes, signature: bytes) -> bool:
        """Each signature once for all members."""
        key = (peer, data, signature)
        if key not in self._verified:
            self._verified[key] = verify(peer, data, signature)
        return self._verified[key]

    def _send(self, to: Iterable[PeerId], deliver: Deliver) -> None:
        self._queue.extend((self._members[peer], deliver) for peer in to if peer in self._members)

    def _deliver_all(self) -> None:
        while self._queue:
            member, deliver = self._queue.popleft()
            try:
                out = deliver(member)
            except EquivocationError as error:
                self._contradictions.append((error.one, error.other))
            except (RemoteError, TransientError) as error:
                log.debug("step %d: %s: %s", self._facts.step, member.peer.peer_id, error)
            else:
                self._do(member, out)

    def _do(self, member: Member, instructions: Iterable[Instruction]) -> None:
        """As `peer.round.driver` carries them out; of a peer that misbehaves, what it does instead."""
        member.peer.adversary.writes(member.machine)
        for instruction in instructions:
            for said in member.peer.adversary.instructed(self._facts, instruction, member.peer.identity):
                self._carry_out(member, said)

    def _carry_out(self, member: Member, instruction: Instruction) -> None:
        me = member.peer.peer_id
        match instruction:
            case act.MakeContribution():
                made, member.parts = self._contribute(member.peer)
                member.received |= {(index, me): part for index, part in enumerate(member.parts)}
                self._do(member, member.machine.contributed(made, now=self._now))
            case act.SendClose(to, view, _):
                shown = member.machine.turned
                self._send(to, lambda one: one.machine.on_close(me, view, shown, now=self._now))
            case act.SendTurned(to, view):
                self._send(to, lambda one: one.machine.on_turned(me, view, now=self._now))
            case act.SendCommit():
                self._send((instruction.to,), lambda one: self._committed(one, me, instruction))
            case act.AskPromise(to, view):
                if self._host in to:
                    self._send((me,), lambda one: self._promised(one, view))
            case act.SendBallot(to, proposal):
                self._send(to, lambda one: self._asked(one, me, proposal))
                if self._host in to:
                    self._send((me,), lambda one: self._witnessed(one, proposal))
            case act.SendVote(to, proposal, vote):
                self._send((to,), lambda one: self._voted(one, me, proposal, vote))
            case act.SayThere(to, made, proposal):
                self._send((to,), lambda one: self._named(one, member, made, proposal))
            case act.SendRoster(to, roster):
                self._release(member)
                self._send(to, lambda one: self._followed(one, me, roster))
            case act.SendPart(to, part, view):
                self._send((to,), partial(self._part_came, me, part, view, member.parts[part]))
            case act.SayMissing(to, view, missing, given_up):
                self._send((to,), lambda one: one.machine.on_missing(me, view, missing, given_up, now=self._now))
            case act.AggregatePart():
                self._reduce(member, instruction)
            case act.SendReduced(to, reduced):
                for place, peer in enumerate(to):
                    self._send((peer,), partial(self._reduced_came, me, *self._said_to(member, place, reduced)))
            case act.SendResult(to, result):
                self._send(to, lambda one: one.machine.on_result(result, now=self._now))
            case act.FetchPart():
                self._fetch(member, instruction)
            case act.Accuse(one, other):
                self._contradictions.append((one, other))
            case act.Finish(result):
                member.finished = result
            case act.CombineShares() | act.AnnounceShare():
                raise LocalError("a simulated stage is one cohort")

    # -- heard --------------------------------------------------------------------------------------------

    def _committed(self, member: Member, sender: PeerId, said: act.SendCommit) -> list[Instruction]:
        facts, peer = self._facts, member.peer
        if peer.adversary.ignores(facts.step, facts.members, sender, me=peer.peer_id):
            return []
        if said.contribution is not None and not self._is_shown(peer.peer_id, said.contribution):
            member.machine.leave_out(sender, now=self._now)
        return member.machine.on_commit(
            sender, said.view, said.contribution, said.promise, said.roster, said.result, now=self._now
        )

    def _is_shown(self, voter: PeerId, made: Contribution) -> bool:
        """Whether a contributor shows what a voter draws of what it lists, all of which is shown to all alike."""
        rng = random.Random(f"{voter}/{made.digest().hex()}")
        for entry in drawn_entries(made, num_members=len(self._facts.members), rng=rng):
            papers = self._show(made.peer_id, entry)
            try:
                if papers is None:
                    return False
                self._check(made, entry, papers.to_value())
            except RemoteError as error:
                log.debug("step %d: %s", self._facts.step, error)
                return False
        return True

    def _check_shown(self, voter: PeerId, proposal: Proposal) -> None:
        """Raises TransientError if something that the voter draws of a new roster is not shown."""
        roster = proposal.new_roster
        for made in roster.contributions if roster is not None else ():
            if made.peer_id != voter and not self._is_shown(voter, made):
                raise TransientError(f"papers of {made.peer_id} are not shown")

    def _lied(self, case: FalseWork) -> None:
        self._lies.setdefault(case.accused, case)

    def _asked(self, member: Member, leader: PeerId, proposal: Proposal) -> list[Instruction]:
        check_joins(proposal, lambda peer: peer in self._joins)
        self._check_shown(member.peer.peer_id, proposal)
        there = self._there(member.peer.peer_id, member.machine.unheard(proposal) - member.unshown, proposal)
        return member.machine.on_ballot(leader, proposal, there=there, now=self._now)

    def _named(self, leader: Member, voter: Member, made: Contribution, proposal: Proposal) -> list[Instruction]:
        if leader.peer.adversary.hears_nobody(self._facts.step):
            return []
        if self._is_shown(leader.peer.peer_id, made):
            return leader.machine.on_named(voter.peer.peer_id, made, now=self._now)
        # What is not shown to the leader is shown to nobody.
        voter.unshown.add(made.peer_id)
        self._do(voter, self._asked(voter, leader.peer.peer_id, proposal))
        return []

    def _voted(self, leader: Member, voter: PeerId, asked: Proposal, vote: Vote) -> list[Instruction]:
        self._compare(leader, asked.view, phase_of(asked.phase), asked.value, vote)
        return leader.machine.on_vote(voter, asked.view, asked.phase, asked.value, vote, now=self._now)

    def _compare(self, leader: Member, view: int, phase: Phase, value: bytes, vote: Vote) -> None:
        election = self._facts.election
        earlier, before = leader.votes.setdefault((vote.voter, phase, view), (value, vote))
        if earlier != value and leader.machine.changed is None:
            one = CastVote.of(election, phase, view, earlier, before, None)
            self._contradictions.append((one, CastVote.of(election, phase, view, value, vote, None)))

    def _promised(self, leader: Member, view: int) -> list[Instruction]:
        voter = self._witness.voter
        gone = [peer for peer in self._facts.members if peer not in self._members]
        promise = self._witness.on_ask(leader.peer.peer_id, view, leader.machine.turned, gone=gone, now=self._now)
        if promise is None:
            return []
        return leader.machine.on_promise(self._host, promise, voter.roster, voter.result, now=self._now)

    def _witnessed(self, leader: Member, proposal: Proposal) -> list[Instruction]:
        check_joins(proposal, lambda peer: peer in self._joins)
        self._check_shown(self._host, proposal)
        there = self._left_without(proposal)
        if there and leader.peer.adversary.hears_nobody(self._facts.step):
            return []
        if there:
            return leader.machine.on_there(there, now=self._now)
        gone = [peer for peer in self._facts.members if peer not in self._members]
        vote = self._witness.on_ballot(leader.peer.peer_id, proposal, self._words(leader, proposal), gone=gone)
        if vote is None:
            return []
        asked = (proposal.view, proposal.phase, proposal.value)
        return leader.machine.on_vote(self._host, *asked, vote, now=self._now)

    def _left_without(self, proposal: Proposal) -> list[Contribution]:
        """What members contribute without whom the roster is proposed, as voters outside find it."""
        is_asked = is_outsiders_to_ask(self._facts, proposal)
        return self._there(self._host, proposal.left_without, proposal) if is_asked else []

    def _there(self, voter: PeerId, missing: Collection[PeerId], proposal: Proposal) -> list[Contribution]:
        """What these contribute, asked of themselves, and show the voter."""
        found = []
        for member in [self._members[peer] for peer in missing if peer in self._members]:
            self._do(member, member.machine.on_left_without(proposal, now=self._now))
            made = member.machine.contribution
            if made is None or not (made.work or member.peer.peer_id in proposal.put_off):
                continue
            if self._is_valid(made) and self._is_shown(voter, made):
                found.append(made)
        return found

    def _is_valid(self, made: Contribution) -> bool:
        try:
            self._facts.check_contribution(made, self._verify)
        except RemoteError:
            return False
        return True

    def _words(self, leader: Member, proposal: Proposal) -> Words | None:
        result, replica = proposal.result, leader.peer.replica
        if result is None or not proposal.is_new_result:
            return None
        weights = self._chain.weights_of(result.roster, replica.settings)
        votes = leader.machine.votes_for(proposal)
        return Words.of(result, leader.reductions, weights, norm_cap=replica.norm_cap(), votes=votes)

    def _followed(self, member: Member, sender: PeerId, roster: Roster) -> list[Instruction]:
        out = member.machine.on_roster(sender, roster, now=self._now)
        self._release(member)
        return out

    # -- parts --------------------------------------------------------------------------------------------

    def _part_came(self, sender: PeerId, part: int, view: int, body: Bytes, member: Member) -> list[Instruction]:
        roster = member.machine.roster
        if roster is None or roster.view < view:
            member.waiting.append((sender, part, view, body))
            return []
        if bulk_digest(body) != member.machine.expected_digest(part, sender):
            raise RemoteError("digest", "its bytes differ from its commitment", sender)
        member.received[part, sender] = body
        return member.machine.on_part(sender, part)

    def _release(self, member: Member) -> None:
        waiting, member.waiting = member.waiting, []
        for said in waiting:
            self._send((member.peer.peer_id,), partial(self._part_came, *said))

    def _reduce(self, member: Member, asked: act.AggregatePart) -> None:
        replica, roster, chain = member.peer.replica, member.machine.roster, self._chain
        assert roster is not None
        tokens, cap = chain.weights_of(roster, replica.settings), replica.norm_cap()
        reduced, body = ReducedPart(asked.part, EMPTY_DIGEST, asked.contributors, asked.excluded), memoryview(b"")
        if asked.contributors:
            heard = [
                (tokens[peer], member.received[asked.part, peer]) for peer in asked.contributors if tokens[peer] > 0
            ]
            seed = reduced_seed(chain.run_id, chain.stage, chain.version, asked.part)
            body, digest = member.peer.reducer.reduce(asked.part, heard, norm_cap=cap, seed=seed)
            reduced = replace(reduced, digest=digest, squares=self._squares(member, asked.part, body))
        made = Reduction.of(roster, reduced, tokens, norm_cap=cap, reducer=member.peer.peer_id)
        member.reduced[reduced.part, reduced.digest] = body
        member.reductions[reduced] = made.signed_by(member.peer.identity)
        self._do(member, member.machine.aggregated(reduced, now=self._now))

    def _squares(self, member: Member, part: int, body: Bytes) -> float:
        parts = member.peer.replica.parts()
        return squares_of(parts.result_codec(part), body, parts.size(part))

    def _said_to(self, member: Member, place: int, reduced: ReducedPart) -> tuple[ReducedPart, Bytes, Reduction]:
        """A reduced part for the member at this place; of a liar's own making perhaps another."""
        body, made = member.reduced[reduced.part, reduced.digest], member.reductions[reduced]
        peer, parts, part = member.peer, member.peer.replica.parts(), reduced.part
        if made.reducer != peer.peer_id or reduced.is_empty:
            return reduced, body, made
        said = peer.adversary.reduced_for(
            self._facts.step, place, memoryview(body), parts.result_codec(part), num_values=parts.size(part)
        )
        if said is body:
            return reduced, body, made
        squares = self._squares(member, reduced.part, said)
        other = replace(reduced, digest=bulk_digest(said), squares=squares)
        return other, said, replace(made, digest=other.digest, squares=squares).signed_by(peer.identity)

    def _reduced_came(
        self, sender: PeerId, reduced: ReducedPart, body: Bytes, made: Reduction, member: Member
    ) -> list[Instruction]:
        made.check(self._verify)
        if not reduced.is_empty and bulk_digest(body) != reduced.digest:
            raise RemoteError("digest", f"reduced part {reduced.part} differs from its digest", sender)
        self._compare_words(member, made)
        member.reductions.setdefault(reduced, made)
        member.reduced[reduced.part, reduced.digest] = body
        return member.machine.on_reduced(sender, reduced, now=self._now)

    def _compare_words(self, member: Member, made: Reduction) -> None:
        """With what the same reducer has signed for the part, as far as the member has seen it."""
        for held in member.reductions.values():
            if (held.part, held.reducer) == (made.part, made.reducer) and held.digest != made.digest:
                self._contradictions.append((held, made))

    def _fetch(self, member: Member, asked: act.FetchPart) -> None:
        """From whoever holds it. Two who had another part of the same reducer learn of it so."""
        slot = (asked.part, asked.digest)
        held = [self._members[holder] for holder in asked.holders if holder in self._members]
        certified = member.machine.result is not None
        for other in [one for one in held if slot in one.reduced and (certified or asked.reduced in one.reductions)][
            :1
        ]:
            if asked.reduced in other.reductions:
                self._compare_words(member, other.reductions[asked.reduced])
            member.reduced[slot] = other.reduced[slot]
            self._send((member.peer.peer_id,), lambda one: one.machine.part_fetched(asked.reduced, now=self._now))
