"""A version's beacon: chance that nobody has chosen, for draws that decide about people.

It is made of what the certified roster's members reveal of their hash chains and of the host's value, which is told
when the round is certified and is committed since the stage's genesis. Until then nobody knows the beacon; the host
knows its own value alone, members theirs; who withholds its own does not know what it chooses instead. The version's
name is not in it: what a leader or a contributor may write, it may write again and again until it likes a hash.
"""

from dataclasses import dataclass

from swarm.core.audit.chance import HostWord
from swarm.core.canonical import Value, digest
from swarm.core.errors import TransientError
from swarm.core.ids import Step
from swarm.core.round.contribution import Roster


@dataclass(frozen=True)
class Beacon:
    """Of the round of one step of one stage."""

    step: Step
    value: bytes
    """32 bytes."""

    @classmethod
    def of(cls, roster: Roster, said: HostWord) -> "Beacon":
        """Of the certified roster. `said` is a word of the host, checked, on this step or a later one.

        Raises TransientError while the host has not spoken of the step.
        """
        if said.num_versions <= roster.step:
            raise TransientError(f"the host has not spoken of step {roster.step} of stage {roster.stage} yet")
        revealed: list[Value] = [[made.peer_id, made.chance.value] for made in roster.committed]
        value_of_host = said.value_of(int(roster.step))
        return cls(roster.step, digest("beacon", [roster.run_id, roster.stage, roster.step, value_of_host, revealed]))

    def seed(self, purpose: str, *facts: Value) -> bytes:
        """32 bytes for a draw that is not of peers.

        `facts` must be such that nobody can choose them after the roster was certified.
        """
        return digest(f"beacon/{purpose}", [self.value, *facts])
