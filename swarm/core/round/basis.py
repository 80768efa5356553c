"""What a round starts from, in a few values that the version's name binds.

A voter outside the stage need not follow its chain: whoever asks for its vote shows the basis, and votes count only
under the version name that the basis hashes to.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from swarm.core.canonical import digest
from swarm.core.forms import Digest
from swarm.core.ids import PeerId, StageIndex, Step
from swarm.core.layout import AtMost
from swarm.core.ranking import rank
from swarm.core.record import Row
from swarm.core.round.cohorts import MAX_MEMBERS

MAX_NEIGHBOURS = 16


@dataclass(frozen=True)
class RoundBasis(Row, kind="basis"):
    """What makes a version of a stage, as far as the next round's votes depend on it."""

    previous_name: Digest
    root: Digest
    """Of the result that made the version; digest of the genesis for a stage's first."""
    previous_members: Annotated[tuple[PeerId, ...], AtMost(MAX_MEMBERS)]
    members: Annotated[tuple[PeerId, ...], AtMost(MAX_MEMBERS)]
    neighbours: Annotated[tuple[PeerId, ...], AtMost(MAX_NEIGHBOURS)]

    @cached_property
    def name(self) -> bytes:
        """Name of the version."""
        return digest("version-name", self.to_value())

    def leaders(self, stage: StageIndex, step: Step) -> tuple[PeerId, ...]:
        """Who leads the round in which view: drawn from the certificate before the version's own."""
        first = rank(self.previous_members, "leader", self.previous_name, stage, step)
        return first + tuple(peer for peer in self.members if peer not in first)
