"""This is where a leader's roster is put together: from the commitments it has, or from an earlier roster's facts."""

from collections.abc import Container, Mapping
from dataclasses import replace

from swarm.core.contribution import Contribution, Departure, Roster
from swarm.core.ids import PeerId
from swarm.core.ranking import rank
from swarm.core.round_facts import RoundFacts

MAX_REASON = 200


def left_by(roster: Roster) -> set[PeerId]:
    """Whom the roster puts off."""
    return {departure.peer_id for departure in roster.leaves}


def fresh_roster(
    facts: RoundFacts,
    *,
    view: int,
    leader: PeerId,
    committed: Mapping[PeerId, Contribution],
    silent: Mapping[PeerId, str],
    joins: tuple[PeerId, ...],
    neighbours: tuple[PeerId, ...],
    reason: str,
) -> Roster:
    """What was committed; whoever did not commit leaves, for the reason in `silent`. Reducers are still to be named."""
    return Roster(
        facts.run_id,
        facts.stage,
        facts.step,
        view,
        0,
        leader,
        facts.previous_name,
        facts.members,
        tuple(committed[peer] for peer in facts.members if peer in committed and committed[peer].work),
        (),
        tuple(peer for peer in joins if peer not in facts.members),
        tuple(Departure(peer, silent[peer][:MAX_REASON]) for peer in facts.members if peer not in committed),
        reason[:MAX_REASON],
        neighbours,
    )


def with_reducers(
    roster: Roster, held: tuple[PeerId, ...], live: tuple[PeerId, ...], *, num_parts: int, done: Container[int]
) -> Roster:
    """The roster with a live reducer for each part.

    Of `held`, the reducers so far, those stay who are live or whose part is `done`: nothing moves twice.
    """
    if not roster.contributions:
        return replace(roster, reducers=())
    left = left_by(roster)
    order = rank(live, "reducer", roster.previous_name, roster.stage, roster.step, roster.revision)
    reducers = [order[part % len(order)] for part in range(num_parts)]
    for part, reducer in enumerate(held):
        if reducer not in left and (reducer in live or part in done):
            reducers[part] = reducer
    return replace(roster, reducers=tuple(reducers))
