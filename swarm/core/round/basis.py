"""What a round starts from, in a few values that the version's name binds.

A voter outside the stage need not follow its chain: whoever asks for its vote shows the basis, and votes count only
under the version name that the basis hashes to.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, TypeAlias

from swarm.core.canonical import digest
from swarm.core.errors import RemoteError
from swarm.core.forms import Digest, Integer
from swarm.core.ids import PeerId, StageIndex, Step
from swarm.core.layout import AtMost
from swarm.core.record import Row
from swarm.core.round.cohorts import MAX_MEMBERS
from swarm.core.seats import drawn, seats

MAX_NEIGHBOURS = 16
Work: TypeAlias = Annotated[tuple[Annotated[int, Integer(high=1 << 56)], ...], AtMost(MAX_MEMBERS)]


@dataclass(frozen=True)
class RoundBasis(Row, kind="basis"):
    """What makes a version of a stage, as far as the next round's votes depend on it."""

    previous_name: Digest
    root: Digest
    """Of the result that made the version; digest of the genesis for a stage's first."""
    previous_members: Annotated[tuple[PeerId, ...], AtMost(MAX_MEMBERS)]
    previous_work: Work
    """Of each of them, in the versions before that one."""
    members: Annotated[tuple[PeerId, ...], AtMost(MAX_MEMBERS)]
    work: Work
    """Tokens that each member did in the last versions (`swarm.core.state.recent_work`): by them votes weigh."""
    neighbours: Annotated[tuple[PeerId, ...], AtMost(MAX_NEIGHBOURS)]

    @cached_property
    def name(self) -> bytes:
        """Name of the version."""
        return digest("version-name", self.to_value())

    @cached_property
    def work_of(self) -> dict[PeerId, int]:
        """Tokens that each member did in the last versions."""
        return dict(zip(self.members, self.work, strict=True))

    def leaders(self, stage: StageIndex, step: Step) -> tuple[PeerId, ...]:
        """Who leads the round in which view: drawn from the certificate before the version's own."""
        before = dict(zip(self.previous_members, self.previous_work, strict=True))
        first = leaders_of(before, self.previous_name, stage, step)
        return first + tuple(peer for peer in self.members if peer not in first)

    def _check_fields(self) -> None:
        if (len(self.members), len(self.previous_members)) != (len(self.work), len(self.previous_work)):
            raise RemoteError("malformed", "basis does not say what each member has done")


def leaders_of(work: Mapping[PeerId, int], name: bytes, stage: StageIndex, step: Step) -> tuple[PeerId, ...]:
    """In which order members lead, drawn by their work up to the version of this name; who did none comes last."""
    return drawn({**dict.fromkeys(work, 0), **seats(work)}, "leader", name, stage, step)
