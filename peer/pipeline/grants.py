"""The next microbatch of a member of stage 0: granted by the leader, leased by the chain."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from swarm.core.ids import MicrobatchId, Step
from swarm.core.round.contribution import MAX_ATTEMPTS


@dataclass(frozen=True)
class Turn:
    """One microbatch to start: its id, the step it counts in, and which try this is."""

    microbatch_id: MicrobatchId
    step: Step
    attempt: int
    of: "StepGrants" = field(compare=False, repr=False)
    """What granted it: after the stage has begun again another step may have the same number."""


@dataclass
class StepGrants:
    """What the leader of one step granted this member, and what became of it."""

    step: Step
    granted: int = 0
    exhausted: bool = False
    over: bool = False
    """Downstream has closed the step: nothing more is started in it."""
    in_flight: set[MicrobatchId] = field(default_factory=set)
    passed_on: set[MicrobatchId] = field(default_factory=set)
    """Of those in flight: they are on their way in later stages."""
    done: set[MicrobatchId] = field(default_factory=set)

    @property
    def started(self) -> int:
        return len(self.in_flight) + len(self.done)

    def take(self, leased: list[MicrobatchId], used: set[MicrobatchId], tries: dict[MicrobatchId, int]) -> Turn | None:
        """The first leased id that is in no open step, if another microbatch is granted."""
        if self.over or self.started >= self.granted:
            return None
        for microbatch_id in leased:
            if microbatch_id not in used:
                self.in_flight.add(microbatch_id)
                used.add(microbatch_id)
                attempt = min(tries.get(microbatch_id, 0), MAX_ATTEMPTS - 1)
                return Turn(microbatch_id, self.step, attempt, self)
        return None


def take_next(
    open_steps: Iterable[StepGrants],
    leased: list[MicrobatchId],
    used: set[MicrobatchId],
    tries: dict[MicrobatchId, int],
    accepts: Callable[[Step], bool],
) -> Turn | None:
    """A turn of the first open step that has one, earlier steps first.

    A step is passed over only when nothing more of it will be granted: a microbatch of the next step would tell the
    next stage that this one is ending.
    """
    for grants in open_steps:
        turn = grants.take(leased, used, tries)
        if turn is not None:
            return turn
        if not (grants.exhausted or grants.over) and accepts(grants.step):
            return None
    return None
