"""What each member of a stage did in the last versions, by certified results alone: what its vote weighs."""

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from swarm.core.forms import Integer
from swarm.core.ids import PeerId
from swarm.core.layout import AtMost
from swarm.core.record import Row
from swarm.core.round.contribution import Result

RECENT_VERSIONS = 16
"""In which the stage had work: a stage that stands still takes nobody's weight."""
PROVEN_VERSIONS = 4
GROWTH = 1.25
EVEN_SHARES = 2


@dataclass(frozen=True)
class RecentWork(Row, kind="recent work"):
    """One member's, of the versions since it came."""

    peer_id: PeerId
    tokens: Annotated[tuple[Annotated[int, Integer(high=1 << 52)], ...], AtMost(RECENT_VERSIONS)]
    """Of each version, the newest last."""
    idle: Annotated[int, Integer(high=1 << 52)] = 0
    """Versions since the last that it brought work to, or since it came, in which the stage had work."""
    is_late: bool = False
    """Its parts did not come in time when it last had a contribution on a roster (`Roster.left_out`), or they come much
    slower than others' (`swarm.core.state.slow_lines`)."""

    @property
    def total(self) -> int:
        return sum(self.tokens)

    def and_then(self, tokens: int, *, is_late: bool) -> "RecentWork":
        """After one version more, to which it brought so many."""
        newest, idle = (*self.tokens, tokens)[-RECENT_VERSIONS:], 0 if tokens else self.idle + 1
        return RecentWork(self.peer_id, newest, idle, is_late or (self.is_late and not tokens))


@dataclass(frozen=True)
class Shares:
    """How many microbatches of one member a step counts in a run of one stage, where no neighbour has signed for any:
    twice an even share, or a quarter more than the most that it brought to one of the last four versions; where each
    takes a window of steps by itself, a window's."""

    even: int
    proven: Mapping[PeerId, int]

    @classmethod
    def of_work(cls, recent: Sequence[RecentWork], *, microbatches_per_step: int, microbatch_targets: int) -> "Shares":
        """Of the members who did that."""
        proven = {
            one.peer_id: int(GROWTH * max(one.tokens[-PROVEN_VERSIONS:], default=0)) // microbatch_targets
            for one in recent
        }
        return cls(-(-EVEN_SHARES * microbatches_per_step // max(1, len(recent))), proven)

    def of(self, peer: PeerId) -> int:
        """Of a member, or of one who comes."""
        return max(self.even, self.proven.get(peer, 0))


def founding_work(members: Sequence[PeerId], known: Mapping[PeerId, int], *, step_tokens: int) -> tuple[int, ...]:
    """What a stage's genesis says its members have done: what is known of each; all the same if that is nothing."""
    if any(known.get(peer) for peer in members):
        return tuple(known.get(peer, 0) for peer in members)
    return (RECENT_VERSIONS * max(1, step_tokens // len(members)),) * len(members)


def founded(members: Sequence[PeerId], work: Sequence[int]) -> tuple[RecentWork, ...]:
    """Of those a stage begins with, who have done so much, or all the same, as if evenly: what they do from then on
    takes its place."""
    even = [-(-total // RECENT_VERSIONS) for total in work or (RECENT_VERSIONS,) * len(members)]
    return tuple(RecentWork(peer, (one,) * RECENT_VERSIONS) for peer, one in zip(members, even, strict=True))


def worked(
    before: Iterable[RecentWork],
    done: Mapping[PeerId, int],
    members: Iterable[PeerId],
    *,
    late: Container[PeerId] = (),
) -> tuple[RecentWork, ...]:
    """After a round in which these tokens were done, and to which these members' lines were too slow, of those who are
    members then; who comes has done nothing."""
    held = {one.peer_id: one for one in before}
    if not any(done.values()):
        return tuple(held.get(peer, RecentWork(peer, ())) for peer in members)
    return tuple(
        held[peer].and_then(done.get(peer, 0), is_late=peer in late) if peer in held else RecentWork(peer, ())
        for peer in members
    )


def late_of(recent: Iterable[RecentWork]) -> tuple[PeerId, ...]:
    """Whose lines were too slow, as far as is known of the last round that they had something to bring to."""
    return tuple(one.peer_id for one in recent if one.is_late)


def done_in(result: Result, counted: Mapping[PeerId, int]) -> dict[PeerId, int]:
    """Of what each has `counted`, as much as it brought: by the share of the parts that it is in."""
    parts = [part for part in result.parts if not part.is_empty]
    num_parts, missed = len(parts), Counter(left_out.peer_id for part in parts for left_out in part.excluded)
    return {peer: tokens * (num_parts - missed[peer]) // num_parts for peer, tokens in counted.items() if num_parts}
