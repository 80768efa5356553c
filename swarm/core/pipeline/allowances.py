"""How many microbatches of a step each source may hold at once with the right to be waited for: by what it brought
home before, as certified results say.

Whoever has a grant keeps others from the microbatch until it is passed over, so a grant is lent against work. A source
may have twice what was certified of it in one version, half of that for each version since. What that comes to less
than one for is a chance at a single microbatch, in the 1st, 2nd, 4th, 8th version without work and so on: a source that
ends nothing costs a run so many microbatches as the logarithm of its length, and one that was away waits at most as
long again as it was away.

At later stages the same bounds what a member's word counts for that it has done so much of a step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarm.core.ids import PeerId
from swarm.core.state.recent_work import RecentWork

GROWTH = 2
"""So many times what was certified of a source it may have of the next step."""
NEWCOMERS_SHARE = 8
"""A new source begins with this part of an even share, at least with one microbatch."""
LONGEST_WAIT = 64
"""Whoever brings nothing for long has a chance in each so many versions all the same."""
SOON = 2
"""A step of fewer microbatches than so many for each member leaves some without by chance: then it counts as part of a
version only."""


@dataclass(frozen=True)
class Allowances:
    """Of a stage's members at one version, in microbatches."""

    lent: Mapping[PeerId, int]
    newcomers: int

    @classmethod
    def of_work(
        cls, recent: Sequence[RecentWork], *, microbatches_per_step: int, microbatch_targets: int, of_sources: bool
    ) -> "Allowances":
        """Of the members who did that, at stage 0 or a later one, where it is others that give work."""
        wanted = SOON * max(1, len(recent))
        even = -(-microbatches_per_step // max(1, len(recent)))
        first = max(1, even // NEWCOMERS_SHARE) if of_sources else even

        def turns(versions: int) -> int:
            """How often a source could have had work in so many versions."""
            return versions * min(microbatches_per_step, wanted) // wanted

        def lent(one: RecentWork) -> int:
            if not one.tokens and not one.idle:
                return first
            certified = (-(-tokens // microbatch_targets) for tokens in reversed(one.tokens))
            most = max((GROWTH * count >> turns(age) for age, count in enumerate(certified)), default=0)
            return most or int(_has_a_chance(turns(one.idle)))

        return cls({one.peer_id: lent(one) for one in recent}, first)

    def of(self, peer: PeerId) -> int:
        """Of a member, or of one who comes."""
        return self.lent.get(peer, self.newcomers)


def _has_a_chance(turns: int) -> bool:
    return turns & (turns - 1) == 0 or turns % LONGEST_WAIT == 0
