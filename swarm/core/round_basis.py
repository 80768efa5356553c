"""This is where what a round starts from is said in a few values that the version's name binds.

A voter outside the stage need not follow its chain: whoever asks for its vote shows the basis, and votes count only
under the version name that the basis hashes to.
"""

from dataclasses import dataclass
from functools import cached_property

from swarm.core.canonical import Value, digest
from swarm.core.cohorts import MAX_MEMBERS
from swarm.core.fields import Fields, peer_item
from swarm.core.ids import PeerId, StageIndex, Step
from swarm.core.ranking import rank

MAX_NEIGHBOURS = 16


@dataclass(frozen=True)
class RoundBasis:
    """What makes a version of a stage, as far as the next round's votes depend on it."""

    previous_name: bytes
    root: bytes
    """Of the result that made the version; digest of the genesis for a stage's first."""
    previous_members: tuple[PeerId, ...]
    members: tuple[PeerId, ...]
    neighbours: tuple[PeerId, ...]

    @cached_property
    def name(self) -> bytes:
        """Name of the version."""
        return digest("version-name", self.to_value())

    def leaders(self, stage: StageIndex, step: Step) -> tuple[PeerId, ...]:
        """Who leads the round in which view: drawn from the certificate before the version's own."""
        first = rank(self.previous_members, "leader", self.previous_name, stage, step)
        return first + tuple(peer for peer in self.members if peer not in first)

    def to_value(self) -> Value:
        return [
            self.previous_name,
            self.root,
            list(self.previous_members),
            list(self.members),
            list(self.neighbours),
        ]

    @classmethod
    def from_value(cls, value: Value) -> "RoundBasis":
        names = ("previous_name", "root", "previous_members", "members", "neighbours")
        fields = Fields.of_list("basis", value, *names)
        return cls(
            fields.octets("previous_name", length=32),
            fields.octets("root", length=32),
            fields.items("previous_members", peer_item, max_items=MAX_MEMBERS),
            fields.items("members", peer_item, max_items=MAX_MEMBERS),
            fields.items("neighbours", peer_item, max_items=MAX_NEIGHBOURS),
        )
