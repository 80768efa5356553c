"""A leader's roster, put together from the commitments it has, or from an earlier roster's facts."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace

from swarm.core.ids import PeerId
from swarm.core.ranking import rotated
from swarm.core.round.contribution import Contribution, Departure, Roster
from swarm.core.round.facts import RoundFacts

MAX_REASON = 200
MAX_TURNS = 8


def left_by(roster: Roster) -> set[PeerId]:
    """Whom the roster puts off."""
    return {departure.peer_id for departure in roster.leaves}


def fresh_roster(
    facts: RoundFacts,
    *,
    view: int,
    leader: PeerId,
    committed: Mapping[PeerId, Contribution | None],
    silent: Mapping[PeerId, str],
    joins: tuple[PeerId, ...],
    neighbours: tuple[PeerId, ...],
    reason: str,
) -> Roster:
    """What was committed; whoever did not commit leaves, for the reason in `silent`. Reducers are still to be named."""
    made = [committed.get(peer) for peer in facts.members]
    return Roster(
        facts.run_id,
        facts.stage,
        facts.step,
        view,
        0,
        leader,
        facts.previous_name,
        facts.members,
        tuple(contribution for contribution in made if contribution is not None and contribution.work),
        (),
        tuple(peer for peer in joins if peer not in facts.members),
        tuple(Departure(peer, silent[peer][:MAX_REASON]) for peer in facts.members if peer not in committed),
        reason[:MAX_REASON],
        neighbours,
    )


def with_reducers(
    roster: Roster, held: tuple[PeerId, ...], live: tuple[PeerId, ...], *, num_parts: int, done: Container[int]
) -> Roster:
    """The roster with a live reducer for each part in each cohort: one of the cohort, if one of it lives.

    Who has nothing to bring, and brought nothing before that anybody measured, reduces nothing where at least half do:
    its line may well be too slow to get work by. Of `held`, the reducers so far, those stay who are live or whose part
    is `done`: nothing moves twice.
    """
    if not roster.contributions:
        return replace(roster, reducers=())
    left = left_by(roster)
    reducers: list[PeerId] = []
    known = {rate.peer_id for made in roster.contributions for rate in made.rates}
    known |= {made.peer_id for made in roster.contributions}
    for cohort in roster.cohorts:
        near = [peer for peer in live if peer in cohort] or live
        able = [peer for peer in near if peer in known]
        near = able if 2 * len(able) >= len(near) else near
        order = rotated(near, roster.step + roster.revision + 1)  # whoever leads first has enough to do
        turns = reducer_turns(order, roster.contributions)
        reducers += [turns[part % len(turns)] for part in range(num_parts)]
    for place, reducer in enumerate(held):
        if reducer not in left and (reducer in live or place % num_parts in done):
            reducers[place] = reducer
    return replace(roster, reducers=tuple(reducers))


def reducer_turns(order: Sequence[PeerId], contributions: Iterable[Contribution]) -> list[PeerId]:
    """Whose turn it is to reduce a part, over and over: peers take turns by how fast others get parts from them.

    A peer's octave is the (lower) median of what others measured; whoever is more than one octave below the fastest
    has half the turns for each octave more, an eighth at least. Nobody's own word counts, and a single liar's seldom.
    """
    measured: dict[PeerId, list[int]] = {}
    for made in contributions:
        for rate in made.rates:
            measured.setdefault(rate.peer_id, []).append(rate.octave)
    octaves = {peer: sorted(found)[(len(found) - 1) // 2] for peer, found in measured.items() if peer in order}
    fastest = max(octaves.values(), default=0)
    shares = {peer: MAX_TURNS >> min(3, max(0, fastest - 1 - octaves.get(peer, fastest))) for peer in order}
    # Turns are spread: at each, everyone gains its share, and whoever has gained most pays for the turn.
    gained = dict.fromkeys(order, 0)
    turns = []
    for _ in range(sum(shares.values())):
        for peer in order:
            gained[peer] += shares[peer]
        turn = max(order, key=lambda peer: gained[peer])
        gained[turn] -= sum(shares.values())
        turns.append(turn)
    return turns
