"""Averaging rounds driven without machines: a virtual clock, a seeded network, deaths and freezes.

Everything a driver must do is done here as `swarm.core.round.instructions` says; a run is a function of its arguments.
"""

import hashlib
import heapq
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache, partial

from swarm.core.canonical import Value, pack
from swarm.core.cohorts import cohorts
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import packed_or_none, value_or_none
from swarm.core.ids import MicrobatchId, PeerId, StageIndex, Step, Version
from swarm.core.ranking import rotated
from swarm.core.round.averaging_round import (
    AggregatePart,
    AnnounceShare,
    AskPromise,
    AveragingRound,
    CombineShares,
    FetchPart,
    Finish,
    Instruction,
    MakeContribution,
    RoundFacts,
    SayMissing,
    SayThere,
    SendBallot,
    SendClose,
    SendCommit,
    SendPart,
    SendReduced,
    SendResult,
    SendRoster,
    SendTurned,
    SendVote,
)
from swarm.core.round.ballots import Proposal
from swarm.core.round.contribution import EMPTY_DIGEST, Contribution, Exclusion, ReducedPart, Result, Work
from swarm.core.round.mail import sheets
from swarm.core.round.mail.desk import Desk, Letter, Offer, Waiting
from swarm.core.round.mail.sheets import Restored, Sheet
from swarm.core.round.patience import Waits
from swarm.core.round.voter import NOT_RECONFIGURED, RoundVoter, Witness
from swarm.core.round.voting import Vote, electorate
from swarm.core.round.words import Reduction, Words
from swarm.identity.key import Identity, verify
from swarm.left_without import TIME_PHASES, is_outsiders_to_ask
from tests.swarm.core.audit.chances import HOST_CHAIN, chance_of, link_of, said_by

PHASE_S = 1.0
NO_WAITS = Waits()
LEASE_S = 10.0
RESEND_S = 0.2
HOLD_S = 20.0
"""So long voters outside hold their votes back for a member that is there and not on a roster."""
HEAD_BYTES = 100
"""Of a message that holds little: its kind, stage and step."""
MAX_BYTES = 8 << 20
MOST_MEMBERS = 256
RUN_ID = "world"
NORM_CAP = 2.5
STAGE, STEP = StageIndex(1), Step(7)
PREVIOUS_NAME = hashlib.sha256(b"previous").digest()


@cache
def identities(count: int) -> tuple[Identity, ...]:
    """The same identities in every run, in the order of their peer ids."""
    made = (Identity.from_seed(hashlib.sha256(f"world/{n}".encode()).digest()) for n in range(count))
    return tuple(sorted(made, key=lambda identity: identity.peer_id))


@cache
def cached_verify(peer: PeerId, data: bytes, signature: bytes) -> bool:
    """The same check again is not measured here."""
    return verify(peer, data, signature)


def facts_of(num_members: int, *, num_parts: int = 3, outsiders: int = 0, witnesses: int = 0) -> RoundFacts:
    """Facts of a round of this many members; `outsiders` more have left since the order of leaders was drawn.

    `witnesses` vote without being members.
    """
    others = [identity.peer_id for identity in witness_identities(witnesses)]
    everyone = [identity.peer_id for identity in identities(num_members + outsiders)]
    order = rotated(everyone, STEP)
    gone = set(order[:outsiders])
    members = tuple(sorted(set(everyone) - gone))
    said = said_by(HOST_CHAIN, STEP)
    weights = {**electorate(dict.fromkeys(members, 1), (), None, said.value), **dict.fromkeys(others, 1)}
    return RoundFacts(
        run_id=RUN_ID,
        stage=STAGE,
        step=STEP,
        members=members,
        leaders=order,
        weights=dict(sorted(weights.items())),
        run_key=run_key().peer_id,
        previous_name=PREVIOUS_NAME,
        links={peer: link_of(peer, STEP - 1) for peer in members},
        said=said,
        num_parts=num_parts,
        phase_s=PHASE_S,
    )


@cache
def witness_identities(count: int) -> tuple[Identity, ...]:
    """Of voters that are no members."""
    return tuple(Identity.from_seed(hashlib.sha256(f"world/witness/{n}".encode()).digest()) for n in range(count))


@cache
def identity_of(peer: PeerId) -> Identity:
    everyone = (*identities(MOST_MEMBERS), *witness_identities(32))
    return next(identity for identity in everyone if identity.peer_id == peer)


@cache
def run_key() -> Identity:
    return Identity.from_seed(hashlib.sha256(b"world/run key").digest())


def witnesses_for(num_members: int, num_dead: int) -> int:
    """How many voters must be added so that the others are a quorum when so many are dead."""
    return max(0, 3 * num_dead + 1 - num_members)


def part_bytes(peer: PeerId, part: int) -> bytes:
    """What a member contributes to a part."""
    return f"{peer}/{part}".encode()


def aggregate(part: int, contributors: tuple[PeerId, ...]) -> bytes:
    """The encoded result of a part in one cohort: any change in who is in it changes it."""
    return hashlib.sha256(b"".join(part_bytes(peer, part) for peer in contributors)).digest() * 2


def combined(shares: list[bytes]) -> bytes:
    """The encoded result of a part from the cohorts' shares, in their order."""
    return hashlib.sha256(b"combined" + b"".join(shares)).digest() * 2


def cohorts_of(facts: RoundFacts) -> tuple[tuple[PeerId, ...], ...]:
    """Of a round whose members have all heard the same of the host."""
    return cohorts(facts.members, facts.said.value)


def aggregate_of(facts: RoundFacts, part: int, contributors: tuple[PeerId, ...]) -> bytes:
    """What a part must come to in a round of these facts."""
    split = cohorts_of(facts)
    if len(split) == 1:
        return aggregate(part, contributors)
    heard = [tuple(peer for peer in contributors if peer in cohort) for cohort in split]
    return combined([aggregate(part, of) for of in heard if of])


def reduced_part(part: int, contributors: tuple[PeerId, ...], excluded: tuple[Exclusion, ...] = ()) -> ReducedPart:
    return ReducedPart(part, hashlib.sha256(aggregate(part, contributors)).digest(), contributors, excluded)


def words_of(proposal: Proposal, votes: Iterable[Vote] = ()) -> Words | None:
    """What a leader shows of a result where each part was reduced by whom the roster names."""
    result = proposal.result
    return words_for(result, votes=votes) if result is not None and proposal.is_new_result else None


def words_for(result: Result, *, reducer: PeerId | None = None, votes: Iterable[Vote] = ()) -> Words:
    """The words for a result; `reducer`: who has reduced all of it, if it is not whom the roster names."""
    roster = result.roster
    weights = {made.peer_id: made.num_tokens for made in roster.contributions}
    held = {}
    for part in result.parts:
        makers = [reducer or roster.combiner_of(part.part), *(share.reducer for share in part.shares)]
        for one, maker in zip((part, *part.shares_of(roster)), makers, strict=True):
            unsigned = Reduction.of(roster, one, weights, norm_cap=NORM_CAP, reducer=maker)
            held[one] = unsigned.signed_by(identity_of(maker))
    made = Words.of(result, held, weights, norm_cap=NORM_CAP, votes=votes)
    assert made is not None
    return made


def contribution(peer: PeerId, *, num_parts: int = 3, num_work: int = 1, first_id: int = 0) -> Contribution:
    """A member's signed commitment to `part_bytes`; nothing if there is no work."""
    work = tuple(
        Work(MicrobatchId(first_id + n), 0, Version(STEP), 64, bytes(32), bytes(range(32))) for n in range(num_work)
    )
    digests = tuple(hashlib.sha256(part_bytes(peer, part)).digest() for part in range(num_parts)) if num_work else ()
    unsigned = Contribution(RUN_ID, STAGE, STEP, PREVIOUS_NAME, peer, work, digests, chance_of(peer, STEP))
    return replace(unsigned, signature=identity_of(peer).sign(unsigned.signed_bytes()))


def round_of(
    facts: RoundFacts,
    peer: PeerId,
    *,
    votes: bool = True,
    signed_under: int = NOT_RECONFIGURED,
    waits: Waits = NO_WAITS,
) -> AveragingRound:
    sign = identity_of(peer).sign
    return AveragingRound(facts, peer, sign, cached_verify, votes=votes, signed_under=signed_under, waits=waits)


def size_of(rope: Value) -> int:
    """On the wire, but for some bytes of its form."""
    if isinstance(rope, list):
        return sum(map(size_of, rope))
    return len(rope) if isinstance(rope, bytes) else 1


def not_cut(one: PeerId, other: PeerId) -> bool:
    return False


def honest(rope: Value) -> Value:
    return rope


Deliver = Callable[["Member"], list[Instruction]]


@dataclass(eq=False)
class Mail:
    """A message in sheets on its way to one member."""

    sender: "Member"
    what: str
    letter: Letter
    to_all: bool
    deliver: Deliver


@dataclass
class Outsider:
    """A voter that is no member."""

    peer_id: PeerId
    witness: Witness
    alive: bool = True


@dataclass
class Member:
    """One member's driver and the bytes it holds."""

    peer_id: PeerId
    round: AveragingRound
    desk: Desk
    num_work: int
    alive: bool = True
    frozen: bool = False
    answers: bool = False
    """Frozen, it says all the same that it votes."""
    dies_after: int | None = None
    """Actions (a send to one peer is one) after which the member dies."""
    num_actions: int = 0
    parts: dict[tuple[int, PeerId], bytes] = field(default_factory=dict)
    reduced: dict[tuple[int, bytes], bytes] = field(default_factory=dict)
    held_back: list[tuple[PeerId, int, int]] = field(default_factory=list)
    inbox: list[Callable[[], None]] = field(default_factory=list)
    fetching: set[tuple[int, bytes]] = field(default_factory=set)
    hands_on: bool = True
    """Whether it brings others what the leader sends to all."""
    brings: Callable[[Value], Value] = honest
    """What it hands on in place of what came."""
    awaited: dict[Waiting, Mail] = field(default_factory=dict)
    was_asked: bool = False
    started_again: bool = False
    finished: Result | None = None
    finished_at: float = 0.0

    @property
    def is_up(self) -> bool:
        return self.alive and not self.frozen


class World:
    """Members of one round and the network between them.

    `keeps_rounds`: a finished member's round goes on answering; otherwise its driver says "over" and serves the
    result with its bytes. `calls_time_out`: a send to a frozen member is reported as undeliverable in the end.
    """

    def __init__(
        self,
        seed: int,
        num_members: int,
        *,
        num_parts: int = 3,
        workless: int = 0,
        outsiders: int = 0,
        witnesses: int = 0,
        keeps_rounds: bool = True,
        calls_time_out: bool = True,
        slowest_s: float = 0.3,
    ) -> None:
        self.rng = random.Random(seed)
        self.facts = facts_of(num_members, num_parts=num_parts, outsiders=outsiders, witnesses=witnesses)
        self.now = 0.0
        self.keeps_rounds = keeps_rounds
        self.calls_time_out = calls_time_out
        self.slowest_s = slowest_s
        idle = set(self.rng.sample(self.facts.members, workless))
        self.members = {
            peer: Member(peer, round_of(self.facts, peer), self._desk(peer), 0 if peer in idle else 1 + index % 2)
            for index, peer in enumerate(self.facts.members)
        }
        self.outsiders = {
            peer: Outsider(peer, Witness(RoundVoter(self.facts, peer, identity_of(peer).sign, cached_verify)))
            for peer in self.facts.voters
            if peer not in self.members
        }
        self.cut: Callable[[PeerId, PeerId], bool] = not_cut
        """Whether nothing gets from one to the other now."""
        self.errors: list[tuple[PeerId, RemoteError]] = []
        self.story: list[str] = []
        self.sent: defaultdict[str, Counter[tuple[PeerId, PeerId]]] = defaultdict(Counter)
        """Messages of each kind, from whom to whom."""
        self.sent_bytes: defaultdict[str, Counter[PeerId]] = defaultdict(Counter)
        """In messages of each kind, but for those of parts, by whom."""
        self.held_since: dict[tuple[PeerId, PeerId], float] = {}
        self.found_at: dict[PeerId, float] = {}
        """When members found others there that had nothing yet."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        for member in self.members.values():
            self._later(self._delay(), partial(self._poll, member))

    # -- the script ---------------------------------------------------------------------------------------

    def leader(self, view: int = 0) -> Member:
        """Leader number `view` among the members."""
        order = [peer for peer in self.facts.leaders if peer in self.members]
        return self.members[order[view % len(order)]]

    def run(self, *, until_s: float = 60.0, wait_for: Callable[[Member], bool] = lambda member: True) -> None:
        """Until every live member that `wait_for` accepts has finished, then until nothing is under way."""
        settled = False
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            if self.now > until_s:
                assert settled, self.explain(f"not over after {until_s} s")
                return
            event()
            if not settled and all(m.finished or not m.alive or not wait_for(m) for m in self.members.values()):
                settled, until_s = True, self.now + 12.0

    def kill(self, member: Member) -> None:
        if not member.alive:
            return
        self.story.append(f"{self.now:.2f} {member.peer_id[-4:]} dies")
        member.alive = False
        for other in self.members.values():
            notice_s = self._delay() * (6.0 if self.rng.random() < 0.3 else 1.0)
            self._later(notice_s, partial(self._unreachable, other, member.peer_id))

    def restart(self, member: Member, *, after_s: float, down_s: float, is_noticed: bool) -> None:
        """The member's process ends, and another begins: it has lost the bytes, and may not vote or contribute again.

        Unless it is noticed, only whoever sends to it meanwhile learns that it was gone.
        """

        def begin() -> None:
            self.story.append(f"{self.now:.2f} {member.peer_id[-4:]} is started again")
            before = self.members[member.peer_id].round
            last = before.changed.first_view if before.changed is not None else before.signed_under
            again = round_of(self.facts, member.peer_id, votes=False, signed_under=max(last, before.signed_under))
            fresh = Member(member.peer_id, again, self._desk(member.peer_id), 0, started_again=True)
            self.members[member.peer_id] = fresh
            self._poll(fresh)

        self._later(after_s, partial(self.kill, member) if is_noticed else partial(setattr, member, "alive", False))
        self._later(after_s + down_s, begin)

    def freeze(self, member: Member, *, after_s: float, for_s: float | None) -> None:
        """Stop the member's process; None: for ever. Its streams stay open; its lease runs out."""

        def stop() -> None:
            self.story.append(f"{self.now:.2f} {member.peer_id[-4:]} freezes")
            member.frozen = True
            if for_s is not None:
                self._later(for_s, wake)
            self._later(LEASE_S, lease_out)

        def lease_out() -> None:
            for other in self.members.values():
                if member.frozen and other is not member:
                    self._unreachable(other, member.peer_id)

        def wake() -> None:
            self.story.append(f"{self.now:.2f} {member.peer_id[-4:]} wakes")
            member.frozen = False
            waiting, member.inbox = member.inbox, []
            for deliver in waiting:  # what came meanwhile is read at once, but timers run between
                self._later(self.rng.random() * 0.01, deliver)
            self._later(self.rng.random() * 0.01, lambda: self._tick(member))

        self._later(after_s, stop)

    def call_later(self, after_s: float, action: Callable[[], None]) -> None:
        self._later(after_s, action)

    def suspect(self, member: Member, peer: PeerId) -> None:
        """A stream to a live peer breaks."""
        self._unreachable(member, peer)

    @property
    def survivors(self) -> list[Member]:
        return [member for member in self.members.values() if member.alive]

    def roots(self) -> set[bytes]:
        """Roots that members finished with, the dead ones before they died."""
        return {member.finished.root() for member in self.members.values() if member.finished is not None}

    def explain(self, what: str) -> str:
        states = "\n".join(
            f"{m.peer_id[-4:]} alive={m.alive} frozen={m.frozen} view={m.round.view} promised={m.round._promised} "
            f"roster={m.round.roster.rank if m.round.roster else None} result={m.round.result is not None} "
            f"asks={asked and asked.phase} votes={len(m.round._lead.ballots.votes)} "
            f"finished={m.finished is not None} due={m.round.deadline} gone={[p[-4:] for p in m.round._gone]}"
            for m in self.members.values()
            for asked in [m.round._lead.ballots.proposal]
        )
        errors = [f"{peer[-4:]}: {error.kind} {error}" for peer, error in self.errors]
        return "\n".join([what, *self.story, states, *errors])

    # -- drivers ------------------------------------------------------------------------------------------

    def _poll(self, member: Member) -> None:
        """The step's progress: whoever leads closes the step once."""
        if not member.alive or member.finished is not None:
            return
        machine = member.round
        if member.is_up and machine.leads and not member.was_asked:
            self._do(member, machine.close(reason="full", joins=(), view=machine.view, now=self.now))
        leader = self.members[machine.leader]
        if leader.finished is not None and member.is_up and not self.cut(member.peer_id, leader.peer_id):
            self._later(self._delay(), lambda: self._adopt(member, leader))  # it says that the step is over
        self._later(0.5 * PHASE_S, lambda: self._poll(member))

    def _unreachable(self, member: Member, peer: PeerId) -> None:
        if member.frozen:
            member.inbox.append(lambda: self._unreachable(member, peer))
        elif member.alive:
            self._do(member, member.round.unreachable(peer, now=self.now))

    def _tick(self, member: Member) -> None:
        if member.is_up:
            self._do(member, member.round.tick(now=self.now))

    def _do(self, member: Member, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if not member.alive:
                return
            self._carry_out(member, instruction)
        if member.alive and member.round.deadline is not None:
            self._later(max(0.0, member.round.deadline - self.now), lambda: self._tick(member))

    def _carry_out(self, member: Member, instruction: Instruction) -> None:
        me = member.peer_id
        match instruction:
            case MakeContribution():
                member.was_asked = True
                self._act(member, lambda: self._contribute(member), after_s=self._delay())
            case SendClose(to, view, _):
                shown = member.round.turned
                self._send(
                    member,
                    to,
                    "close",
                    lambda m: m.round.on_close(me, view, shown, now=self.now),
                    num_bytes=len(pack(shown.to_value())),
                )
            case SendTurned(to, view):
                self._send(member, to, "turned", lambda m: m.round.on_turned(me, view, now=self.now))
            case SendCommit():
                self._commit(member, instruction)
            case AskPromise(to, view):
                for peer in to:
                    self._ask(member, peer, lambda o, m: self._promise(o, m, view))
            case SendBallot(to, proposal):
                inside = tuple(peer for peer in to if peer in self.members)
                ballot = pack({"proposal": proposal.packed, "words": value_or_none(words_of(proposal))})
                self._send_sheet(
                    member,
                    inside,
                    "ballot",
                    Sheet(ballot, sheets.of_proposal(proposal)),
                    lambda m: self._take_ballot(m, me, proposal),
                )
                for peer in to:
                    if peer in self.outsiders:
                        self._ask(member, peer, lambda o, m: self._outside_vote(o, m, proposal))
            case SendVote(to, proposal, vote):
                asked = (proposal.view, proposal.phase, proposal.value)
                self._send(
                    member,
                    (to,),
                    "vote",
                    lambda m: m.round.on_vote(me, *asked, vote, now=self.now),
                    num_bytes=len(pack(vote.to_value())),
                )
            case SayThere(to, named):
                self._send(member, (to,), "there", lambda m: self._named(m, me, named))
            case SendRoster(to, roster):
                self._release_parts(member)
                certified = Sheet(pack({"roster": roster.packed}), sheets.of_roster(roster))
                self._send_sheet(member, to, "roster", certified, lambda m: self._take_roster(m, me, roster))
            case SendPart(to, part, view):
                self._send(member, (to,), "part", lambda m: self._take_part(m, me, part, view))
            case AggregatePart(part, contributors, excluded, cohort):
                body = b"".join(member.parts[part, peer] for peer in contributors)
                assert body == b"".join(part_bytes(peer, part) for peer in contributors)
                empty = ReducedPart(part, EMPTY_DIGEST, (), excluded)
                made = reduced_part(part, contributors, excluded) if contributors else empty
                said = replace(made, cohort=cohort)
                result = aggregate(part, contributors)
                self._act(member, lambda: self._reduced(member, said, result), after_s=self._delay())
            case CombineShares(part, contributors, excluded, shares):
                assert all(share.reducer in self.members for share in shares)
                result = combined([member.reduced[part, share.digest] for share in shares])
                assert result == aggregate_of(self.facts, part, contributors)
                whole = ReducedPart(part, hashlib.sha256(result).digest(), contributors, excluded, shares=shares)
                self._act(member, lambda: self._reduced(member, whole, result), after_s=self._delay())
            case SayMissing(to, view, missing, given_up):
                self._send(
                    member, (to,), "missing", lambda m: m.round.on_missing(me, view, missing, given_up, now=self.now)
                )
            case AnnounceShare(to, part, cohort):
                self._send(member, (to,), "made", lambda m: m.round.on_announced(me, part, cohort, now=self.now))
            case SendReduced(to, reduced):
                body = b"" if reduced.is_empty else member.reduced[reduced.part, reduced.digest]
                self._send(member, to, "reduced", lambda m: self._take_reduced(m, me, reduced, body))
            case SendResult(to, outcome):
                inside = tuple(peer for peer in to if peer in self.members)
                decided = Sheet(pack({"result": outcome.packed}), sheets.of_result(outcome))
                self._send_sheet(member, inside, "result", decided, lambda m: m.round.on_result(outcome, now=self.now))
            case FetchPart(part, digest, holders, wanted):
                if (part, digest) not in member.fetching:
                    member.fetching.add((part, digest))
                    self._act(member, lambda: self._fetch(member, wanted, holders))
            case Finish(result):
                self._act(member, lambda: self._finish(member, result))

    def _take_ballot(self, member: Member, leader: PeerId, proposal: Proposal) -> list[Instruction]:
        """Votes for it, or asks those first of whom it brings nothing."""
        unheard = member.round.unheard(proposal)
        if not unheard:
            return member.round.on_ballot(leader, proposal, now=self.now)
        member.round.looks_at(proposal, now=self.now)
        take = partial(self._take_answers, leader=leader, proposal=proposal, unheard=unheard)
        self._later(self._delay() + self._delay(), lambda: self._deliver(member, take, "answers"))
        return []

    def _take_answers(
        self, member: Member, leader: PeerId, proposal: Proposal, unheard: set[PeerId]
    ) -> list[Instruction]:
        asked = [self.members[peer] for peer in sorted(unheard) if not self.cut(member.peer_id, peer)]
        asked = [one for one in asked if one.is_up and self.shows(one.peer_id, member)]
        for one in asked:
            if one.round.contribution is None and not one.round.brings_nothing:
                self._do(one, one.round.on_left_without(proposal, now=self.now))
        there, is_waiting = self._are_there(asked, proposal)
        found_at = self.found_at.setdefault(member.peer_id, self.now) if is_waiting else -math.inf
        if not there and self.now < found_at + TIME_PHASES * PHASE_S:
            take = partial(self._take_ballot, leader=leader, proposal=proposal)
            self._later(RESEND_S, lambda: self._deliver(member, take, "ballot"))
            return []
        return member.round.on_ballot(leader, proposal, there=there, now=self.now)

    def _are_there(self, asked: list[Member], proposal: Proposal) -> tuple[list[Contribution], bool]:
        """What they contribute, and whether one of them has yet to make that."""
        made = [one.round.contribution for one in asked]
        found = [one for one in made if one is not None and (one.work or one.peer_id in proposal.put_off)]
        return found, not all(one.round.brings_nothing for one in asked)

    def _commit(self, member: Member, asked: SendCommit) -> None:
        me, made, result, roster = member.peer_id, asked.contribution, asked.result, asked.roster
        shown = (*sheets.of_result(result), *sheets.of_roster(roster))
        said: dict[str, Value] = {"contribution": packed_or_none(made), "promise": value_or_none(asked.promise)}
        data = pack({**said, "result": packed_or_none(result), "roster": packed_or_none(roster)})

        def take(m: Member) -> list[Instruction]:
            out = m.round.on_commit(me, asked.view, made, asked.promise, roster, result, now=self.now)
            self._came(m, me, sheets.of_contribution(made))
            return out

        if shown:
            commit = Sheet(data, (*sheets.of_contribution(made), *shown))
            self._send_sheet(member, (asked.to,), "commit", commit, take)
        else:
            self._send(member, (asked.to,), "commit", take, num_bytes=len(data))

    def _contribute(self, member: Member) -> None:
        for part in range(self.facts.num_parts if member.num_work else 0):
            member.parts[part, member.peer_id] = part_bytes(member.peer_id, part)
        first_id = 10 * self.facts.members.index(member.peer_id)
        made = contribution(member.peer_id, num_parts=self.facts.num_parts, num_work=member.num_work, first_id=first_id)
        if not member.started_again:
            self._show_all(member, made)
        self._do(member, member.round.contributed(None if member.started_again else made, now=self.now))

    def _show_all(self, member: Member, made: Contribution) -> None:
        """Who leads gets it with what is committed to it."""
        shown = sheets.of_contribution(made)
        self._came(member, member.peer_id, shown)
        apart = {member.peer_id, member.round.leader}
        to = tuple(peer for peer in self.facts.members if peer not in apart)

        def take(m: Member) -> list[Instruction]:
            out = m.round.on_contribution(member.peer_id, made)
            self._came(m, member.peer_id, shown)
            return out

        self._send(member, to, "contribution", take, num_bytes=len(made.packed.data))

    def _take_roster(self, member: Member, sender: PeerId, roster: object) -> list[Instruction]:
        out = member.round.on_roster(sender, roster, now=self.now)  # type: ignore[arg-type]
        self._release_parts(member)
        return out

    def _take_part(self, member: Member, sender: PeerId, part: int, view: int) -> list[Instruction]:
        roster = member.round.roster
        if roster is None or roster.view < view:
            member.held_back.append((sender, part, view))
            return []
        body = part_bytes(sender, part)
        try:
            expected = member.round.expected_digest(part, sender)
        except RemoteError:
            is_left_out = any(one.peer_id == sender for one in roster.left_out)
            assert roster.view > view or is_left_out, "only a part of other facts may be unwanted"
            return []
        assert hashlib.sha256(body).digest() == expected
        member.parts[part, sender] = body
        return member.round.on_part(sender, part)

    def _release_parts(self, member: Member) -> None:
        waiting, member.held_back = member.held_back, []
        for sender, part, view in waiting:
            self._do(member, self._take_part(member, sender, part, view))

    def _take_reduced(self, member: Member, sender: PeerId, reduced: ReducedPart, body: bytes) -> list[Instruction]:
        if member.round.roster is None:  # held back until the roster is there
            self._later(
                0.05, lambda: self._deliver(member, lambda m: self._take_reduced(m, sender, reduced, body), "reduced")
            )
            return []
        if not reduced.is_empty:
            assert hashlib.sha256(body).digest() == reduced.digest
            member.reduced[reduced.part, reduced.digest] = body
        return member.round.on_reduced(sender, reduced, now=self.now)

    def _reduced(self, member: Member, reduced: ReducedPart, body: bytes) -> None:
        if not reduced.is_empty:
            member.reduced[reduced.part, reduced.digest] = body
        self._do(member, member.round.aggregated(reduced, now=self.now))

    def _fetch(self, member: Member, reduced: ReducedPart, holders: tuple[PeerId, ...]) -> None:
        part, digest = reduced.part, reduced.digest
        if not holders:
            member.fetching.discard((part, digest))
            return
        holder = self.members[holders[0]]
        reached = holder.is_up and not self.cut(member.peer_id, holder.peer_id)
        body = holder.reduced.get((part, digest)) if reached else None
        if body is None:
            if not holder.alive:
                self._later(self._delay(), lambda: self._unreachable(member, holder.peer_id))
            wait_s = 2 * PHASE_S if holder.frozen else self._delay()
            self._act(member, lambda: self._fetch(member, reduced, holders[1:]), after_s=wait_s)
            return
        member.reduced[part, digest] = body
        member.fetching.discard((part, digest))
        self._act(
            member,
            lambda: self._do(member, member.round.part_fetched(reduced, now=self.now)),
            after_s=self._delay(),
        )

    def _finish(self, member: Member, result: Result) -> None:
        assert member.finished is None
        if result.roster.contributions:
            assert len(result.parts) == self.facts.num_parts
        for reduced in (part for part in result.parts if not part.is_empty):
            right = aggregate_of(self.facts, reduced.part, reduced.contributors)
            assert member.reduced[reduced.part, reduced.digest] == right
        member.finished, member.finished_at = result, self.now
        self.story.append(f"{self.now:.2f} {member.peer_id[-4:]} finishes {result.root().hex()[:6]}")

    # -- the network --------------------------------------------------------------------------------------

    def _delay(self) -> float:
        return self.rng.random() * self.slowest_s * (4.0 if self.rng.random() < 0.1 else 1.0)

    def _later(self, after_s: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + after_s, self._count, action))

    def _act(self, member: Member, action: Callable[[], None], *, after_s: float = 0.0) -> None:
        """The member does one thing, unless it dies before."""
        if member.dies_after is not None and member.num_actions >= member.dies_after:
            self.kill(member)
            return
        member.num_actions += 1

        def when_up() -> None:
            if member.frozen:
                member.inbox.append(when_up)
            elif member.alive:
                action()

        if after_s:
            self._later(after_s, when_up)
        else:
            when_up()

    def _send(self, sender: Member, to: tuple[PeerId, ...], what: str, deliver: Deliver, *, num_bytes: int = 0) -> None:
        targets = [self.members[peer] for peer in to]
        assert sender not in targets
        for target in targets:
            self.sent[what][sender.peer_id, target.peer_id] += 1
            self.sent_bytes[what][sender.peer_id] += HEAD_BYTES + num_bytes
            self._act(sender, partial(self._post, sender, target, what, deliver))

    def _desk(self, peer: PeerId) -> Desk:
        return Desk(self.facts, peer, LEASE_S, MAX_BYTES)

    def _send_sheet(self, sender: Member, to: tuple[PeerId, ...], what: str, sheet: Sheet, deliver: Deliver) -> None:
        """As `peer.round.mail.ropes` sends: to all by those who hand it on."""
        for peer, letter in sender.desk.letters(to, sheet):
            self._bring(Mail(sender, what, letter, len(to) > 1, deliver), peer)

    def _bring(self, mail: Mail, peer: PeerId) -> None:
        rope = mail.letter.rope
        self._send(mail.sender, (peer,), mail.what, lambda m: self._take_mail(m, mail), num_bytes=size_of(rope))

    def _take_mail(self, member: Member, mail: Mail) -> list[Instruction]:
        rope, leader = mail.letter.rope, mail.sender.peer_id
        is_handed_on = mail.to_all and leader == member.round.leader
        found = member.desk.open(rope, leader=leader if is_handed_on else None, now=self.now)
        if isinstance(found, Waiting):
            member.awaited[found] = mail
            self._later(found.ends_at - self.now, partial(self._waited, member, found))
            return []
        return self._read(member, mail, rope, found, is_handed_on)

    def _read(self, member: Member, mail: Mail, rope: Value, found: Restored, is_handed_on: bool) -> list[Instruction]:
        if found.lacking:
            self._lacks(member, mail, found)
            return []
        assert found.data == mail.letter.sheet.data
        if is_handed_on:
            for peer, offer in member.desk.offers(found, rope, mail.sender.peer_id, now=self.now):
                self._hand_on(member, peer, offer)
        out = mail.deliver(member)
        member.desk.taken(found)
        self._came(member, mail.sender.peer_id, found.whole)
        return out

    def _hand_on(self, member: Member, peer: PeerId, offer: Offer) -> None:
        def take(m: Member) -> list[Instruction]:
            try:
                status = m.desk.handed_on(member.peer_id, offer.leader, offer.name, rope, now=self.now)
            finally:
                self._look(m)
            if offer.answered(status, now=self.now):
                self._later(RESEND_S if offer.rope is None else 0.0, lambda: self._hand_on(member, peer, offer))
            return []

        if member.hands_on:
            rope = member.brings(offer.rope) if offer.rope is not None else None
            self._send(member, (peer,), "handed on", take, num_bytes=size_of(rope))

    def _came(self, member: Member, sender: PeerId, found: Iterable[Sheet]) -> None:
        member.desk.hold(found, of=sender, now=self.now)
        self._look(member)

    def _look(self, member: Member) -> None:
        for waiting, mail in tuple(member.awaited.items()):
            found = member.desk.look(waiting, now=self.now)
            if not isinstance(found, Waiting):
                del member.awaited[waiting]
                read = partial(self._read, mail=mail, rope=waiting.rope, found=found, is_handed_on=True)
                self._later(0.0, partial(self._deliver, member, read, mail.what))

    def _waited(self, member: Member, waiting: Waiting) -> None:
        if waiting not in member.awaited or not member.alive:
            return
        if member.frozen:
            member.inbox.append(partial(self._waited, member, waiting))
        elif self.now < waiting.ends_at:
            self._later(waiting.ends_at - self.now, partial(self._waited, member, waiting))
        else:
            self._look(member)

    def _lacks(self, member: Member, mail: Mail, found: Restored) -> None:
        """It answers so, and who sent the message sends what is lacking."""

        def answered() -> None:
            sender = mail.sender
            if sender.is_up and self.members[sender.peer_id] is sender and member.alive:
                sender.desk.lacked(member.peer_id, mail.letter, found.lacking)
                self._bring(mail, member.peer_id)

        self._later(self._delay(), answered)

    def _ask(self, sender: Member, peer: PeerId, answer: Callable[[Outsider, Member], None]) -> None:
        """A call to a voter outside the stage."""
        outsider = self.outsiders[peer]

        def arrive() -> None:
            if outsider.alive and not self.cut(sender.peer_id, peer):
                answer(outsider, sender)

        self._act(sender, lambda: self._later(self._delay(), arrive))

    def _promise(self, outsider: Outsider, leader: Member, view: int) -> None:
        if leader.round.view != view:
            return
        gone = [member.peer_id for member in self.members.values() if not (member.is_up or member.answers)]
        try:
            promise = outsider.witness.on_ask(leader.peer_id, view, leader.round.turned, gone=gone, now=self.now)
        except TransientError:  # too few members have turned: it is asked again
            return
        if promise is not None:
            shown = (outsider.witness.voter.roster, outsider.witness.voter.result)
            self._reply(leader, lambda m: m.round.on_promise(outsider.peer_id, promise, *shown, now=self.now))

    def _outside_vote(self, outsider: Outsider, leader: Member, proposal: Proposal) -> None:
        missing = proposal.left_without
        if is_outsiders_to_ask(self.facts, proposal):
            asked = [self.members[peer] for peer in missing if not self.cut(outsider.peer_id, peer)]
            held = [one for one in asked if one.is_up and self.holds(outsider, one)]
            for one in held:
                self._do(one, one.round.on_left_without(proposal, now=self.now))
            found, is_waiting = self._are_there(held, proposal)
            is_waiting &= self.facts.election.is_more_than_liars(missing, self.facts.members)
            if found:
                self._reply(leader, lambda m: self._heard_of(m, found))
            if found or is_waiting:
                if leader.round.wants(SendBallot((), proposal)):
                    self.call_later(RESEND_S, lambda: self._outside_vote(outsider, leader, proposal))
                return
        words = words_of(proposal, leader.round.votes_for(proposal))
        gone = [member.peer_id for member in self.members.values() if not member.is_up]
        try:
            vote = outsider.witness.on_ballot(leader.peer_id, proposal, words, gone=gone)
        except TransientError:  # too few members have voted: it is asked again
            return
        if vote is not None:
            asked = (proposal.view, proposal.phase, proposal.value)
            self._reply(leader, lambda m: m.round.on_vote(outsider.peer_id, *asked, vote, now=self.now))

    def holds(self, outsider: Outsider, member: Member) -> bool:
        """Whether it gives no vote yet for a roster without a member that is there."""
        began = self.held_since.setdefault((outsider.peer_id, member.peer_id), self.now)
        return self.now < began + HOLD_S

    def shows(self, peer: PeerId, voter: Member) -> bool:
        """Whether a member shows another papers for its contribution."""
        return True

    def _named(self, leader: Member, sender: PeerId, made: Contribution) -> list[Instruction]:
        """By a member."""
        return leader.round.on_named(sender, made, now=self.now)

    def _heard_of(self, leader: Member, found: list[Contribution]) -> list[Instruction]:
        """Named by voters."""
        return leader.round.on_there(found, now=self.now)

    def _reply(self, leader: Member, deliver: Deliver) -> None:
        self._later(self._delay(), lambda: self._deliver(leader, deliver, "answer"))

    def _post(self, sender: Member, target: Member, what: str, deliver: Deliver) -> None:
        def arrive() -> None:
            if self.cut(sender.peer_id, target.peer_id):
                self._later(self._delay(), lambda: self._unreachable(sender, target.peer_id))
                return
            if not sender.alive and self.rng.random() < 0.5:
                return  # lost with its sender
            if not target.alive:
                self._later(self._delay(), lambda: self._unreachable(sender, target.peer_id))
            elif target.frozen:
                target.inbox.append(arrive)
                if self.calls_time_out:
                    self._later(1.5 * PHASE_S, timed_out)
            elif target.finished is not None and not self.keeps_rounds:
                self._later(self._delay(), lambda: self._adopt(sender, target))
            else:
                self._do(target, target.round.is_back(sender.peer_id, now=self.now))
                self._deliver(target, deliver, what)

        def timed_out() -> None:
            if target.frozen:
                self._unreachable(sender, target.peer_id)

        self._later(self._delay(), arrive)

    def _deliver(self, target: Member, deliver: Deliver, what: str) -> None:
        if target.frozen:
            target.inbox.append(lambda: self._deliver(target, deliver, what))
            return
        if not target.alive:
            return
        try:
            out = deliver(target)
        except RemoteError as error:
            self.story.append(f"{self.now:.2f} {target.peer_id[-4:]} refuses {what}: {error.kind} {error}")
            self.errors.append((target.peer_id, error))
            return
        self._do(target, out)

    def _adopt(self, member: Member, donor: Member) -> None:
        """`member` was told that the round is over and takes the result, with its bytes, from the donor's store."""
        result = donor.finished
        if not member.is_up or not donor.is_up or result is None:
            return
        for reduced in (part for part in result.parts if not part.is_empty):
            member.reduced[reduced.part, reduced.digest] = donor.reduced[reduced.part, reduced.digest]

        def take(m: Member) -> list[Instruction]:
            out: list[Instruction] = [
                i for i in m.round.on_result(result, now=self.now) if not isinstance(i, FetchPart)
            ]
            for reduced in (part for part in result.parts if not part.is_empty):
                out += m.round.part_fetched(reduced, now=self.now)
            return out

        self._deliver(member, take, "stored result")
