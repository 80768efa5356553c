"""A single member of a round, given what others would send it, signed and certified as a test says."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from swarm.core.ids import PeerId
from swarm.core.round.averaging_round import (
    AggregatePart,
    AveragingRound,
    Instruction,
    Instructions,
    MakeContribution,
    SendBallot,
)
from swarm.core.round.ballots import Proposal
from swarm.core.round.contribution import Contribution, ReducedPart, Result, Roster
from swarm.core.round.facts import RoundFacts
from swarm.core.round.proposal import fresh_roster, with_reducers
from swarm.core.round.voting import Certificate, Phase, Promise, Proof, Vote
from tests.swarm.core.round.round_world import contribution, facts_of, identity_of, reduced_part, round_of

T = TypeVar("T")


def facts_and_rounds(num_members: int, *, witnesses: int = 0) -> tuple[RoundFacts, list[AveragingRound]]:
    """The facts, and the members' rounds in the order in which they lead."""
    facts = facts_of(num_members, witnesses=witnesses)
    return facts, [round_of(facts, peer) for peer in facts.leaders]


def witnesses_of(facts: RoundFacts) -> tuple[PeerId, ...]:
    return tuple(peer for peer in facts.voters if peer not in facts.members)


def others(machine: AveragingRound) -> tuple[PeerId, ...]:
    """The other members."""
    return tuple(peer for peer in machine.facts.members if peer != machine.me)


def only(out: Sequence[object], kind: type[T]) -> T:
    (found,) = [instruction for instruction in out if isinstance(instruction, kind)]
    return found


def has(out: Sequence[object], kind: type[object]) -> bool:
    return any(isinstance(instruction, kind) for instruction in out)


# -- what others sign -------------------------------------------------------------------------------------


def signed(roster: Roster, peer: PeerId | None = None) -> Roster:
    """By its leader unless said."""
    return replace(roster, signature=identity_of(peer or roster.leader).sign(roster.signed_bytes()))


def signed_result(result: Result) -> Result:
    return replace(result, signature=identity_of(result.leader).sign(result.signed_bytes()))


def resigned(made: Contribution) -> Contribution:
    return replace(made, signature=identity_of(made.peer_id).sign(made.signed_bytes()))


def vote_by(facts: RoundFacts, peer: PeerId, phase: Phase, view: int, value: bytes) -> Vote:
    return Vote(peer, identity_of(peer).sign(facts.election.ballot(phase, view, value)))


def certificate_by(
    facts: RoundFacts, phase: Phase, view: int, value: bytes, voters: Iterable[PeerId] | None = None
) -> Certificate:
    """Signed by these, all voters unless said."""
    votes = (vote_by(facts, peer, phase, view, value) for peer in sorted(facts.voters if voters is None else voters))
    return Certificate(phase, view, value, tuple(votes))


def promise_by(
    facts: RoundFacts, peer: PeerId, view: int, *, roster: Certificate | None = None, result: Certificate | None = None
) -> Promise:
    """A promise that names these certificates."""
    held = [(made.view, made.value) if made is not None else None for made in (roster, result)]
    unsigned = Promise(peer, view, held[0], held[1])
    return replace(unsigned, signature=identity_of(peer).sign(facts.election.promised(unsigned)))


def proof_by(
    facts: RoundFacts,
    view: int,
    *,
    bound: Certificate | None = None,
    shown: Certificate | None = None,
    voters: Iterable[PeerId] | None = None,
) -> Proof:
    """Promises of these voters (all unless said), each naming `bound`; with the certificate shown (`bound`)."""
    roster = bound if bound is not None and bound.phase == "roster" else None
    result = bound if bound is not None and bound.phase == "result" else None
    everyone = sorted(facts.voters if voters is None else voters)
    promises = tuple(promise_by(facts, peer, view, roster=roster, result=result) for peer in everyone)
    return Proof(promises, shown if shown is not None else bound)


def roster_of(
    facts: RoundFacts,
    *,
    view: int = 0,
    commits: Mapping[PeerId, Contribution] | None = None,
    reducers: tuple[PeerId, ...] = (),
    revision: int = 0,
    joins: tuple[PeerId, ...] = (),
) -> Roster:
    """A certified roster of these commits (one microbatch of every member unless said); the others leave."""
    committed = {peer: contribution(peer) for peer in facts.members} if commits is None else commits
    leader = facts.leader_of(view)
    fresh = fresh_roster(
        facts,
        view=view,
        leader=leader,
        committed=committed,
        silent=dict.fromkeys(facts.members, "gone"),
        joins=joins,
        neighbours=(),
        reason="full",
    )
    stay = tuple(peer for peer in facts.members if peer in committed)
    made = with_reducers(replace(fresh, revision=revision), reducers, stay, num_parts=facts.num_parts, done=())
    return replace(
        signed(made), certificate=certificate_by(facts, "roster", view, made.facts_digest(), sorted(committed))
    )


def result_of(
    facts: RoundFacts, roster: Roster, *, leader: PeerId | None = None, parts: tuple[ReducedPart, ...] | None = None
) -> Result:
    """A result of all contributions (or of these parts), signed by the roster's leader unless said, not certified."""
    everyone = tuple(made.peer_id for made in roster.contributions)
    if parts is None:
        parts = tuple(reduced_part(part, everyone) for part in range(facts.num_parts if everyone else 0))
    return signed_result(Result(roster, parts, leader or roster.leader))


def certified(facts: RoundFacts, result: Result, *, phase: Phase = "commit", view: int = 0) -> Result:
    return replace(result, certificate=certificate_by(facts, phase, view, result.root()))


def asked_result(facts: RoundFacts, result: Result) -> Proposal:
    """The ballot on a result in the view of its roster."""
    return Proposal.of_result(result, result.roster.view, Proof((), result.roster.certificate))


def asked_commit(facts: RoundFacts, result: Result, view: int = 0) -> Proposal:
    return Proposal.of_commit(certificate_by(facts, "result", view, result.root()))


# -- what a leader hears ----------------------------------------------------------------------------------


def vote(leader: AveragingRound, asked: Proposal, *voters: PeerId, now: float = 0.0) -> Instructions:
    """What the leader does when these vote for what it asks."""
    out: Instructions = []
    for peer in voters:
        cast = vote_by(leader.facts, peer, asked.phase, asked.view, asked.value)
        out += leader.on_vote(peer, asked.view, asked.phase, asked.value, cast, now=now)
    return out


def closed(
    leader: AveragingRound,
    committing: Iterable[PeerId] | None = None,
    *,
    view: int = 0,
    commits: Mapping[PeerId, Contribution] | None = None,
) -> Proposal:
    """What the leader asks when these commit and promise (all others unless said) and the rest cannot be reached."""
    facts, made = leader.facts, dict(commits or {})
    everyone = set(others(leader) if committing is None else committing)
    out: list[Instruction] = leader.close(reason="full", joins=(), view=view, now=0.0)
    if MakeContribution() in out:
        out += leader.contributed(made.get(leader.me, contribution(leader.me)), now=0.0)
    for peer in others(leader):
        if peer in everyone:
            promise = promise_by(facts, peer, view) if view != facts.first_view else None
            out += leader.on_commit(peer, view, made.get(peer, contribution(peer)), promise, None, None, now=0.0)
        else:
            out += leader.unreachable(peer, now=0.0)
    return [instruction for instruction in out if isinstance(instruction, SendBallot)][-1].proposal


def led_roster(leader: AveragingRound, committing: Iterable[PeerId] | None = None) -> Roster:
    """The certified roster of the first view's leader, which all voters voted for."""
    vote(leader, closed(leader, committing), *(peer for peer in leader.facts.voters if peer != leader.me))
    assert leader.roster is not None
    return leader.roster


def reduced(leader: AveragingRound) -> Proposal:
    """What the leader asks once every part of its roster is reduced."""
    assert leader.roster is not None
    everyone = tuple(made.peer_id for made in leader.roster.contributions)
    out: list[Instruction] = []
    for part, reducer in enumerate(leader.roster.reducers):
        if reducer == leader.me:
            for peer in everyone:
                out += leader.on_part(peer, part)
            assert AggregatePart(part, everyone, ()) in out
            out += leader.aggregated(reduced_part(part, everyone), now=0.0)
        else:
            out += leader.on_reduced(reducer, reduced_part(part, everyone), now=0.0)
    return only(out, SendBallot).proposal


def fetched(machine: AveragingRound, result: Result) -> Instructions:
    """What the machine does when all bytes of the result come."""
    return [i for made in result.parts for i in machine.part_fetched(made, now=0.0)]
