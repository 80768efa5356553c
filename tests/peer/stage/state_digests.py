"""Whether replicas of a running swarm hold the same bytes at each version."""

from collections import defaultdict

from peer.round.stage_steps import StageSteps
from peer.stage.events import Applied
from swarm.checkpoint.state import state_digest


class StateDigests(defaultdict[tuple[int, int], set[bytes]]):
    """By stage and version, the digests of the states that peers came to; `applied` hears of each."""

    def __init__(self) -> None:
        super().__init__(set)

    def applied(self, steps: StageSteps, applied: Applied) -> None:
        state = steps.replica.state  # of who catches up perhaps a version further than what is told of
        self[steps.chain.stage, state.version].add(state_digest(state))
