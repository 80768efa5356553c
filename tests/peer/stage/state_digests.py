"""Whether replicas of a running swarm hold the same bytes at each version."""

from collections import defaultdict

from peer.round.stage_steps import StageSteps
from peer.stage.events import Applied
from swarm.checkpoint.archive import weights_digest


class StateDigests(defaultdict[tuple[int, int], set[bytes]]):
    """By stage and version, the digests of the weights that peers came to; `applied` hears of each.

    Other moments would make other weights of the version after. They are not read themselves: while a step is told of,
    the next one may be changing them in place.
    """

    def __init__(self) -> None:
        super().__init__(set)

    def applied(self, steps: StageSteps, applied: Applied) -> None:
        state = steps.replica.state  # of who catches up perhaps a version further than what is told of
        self[steps.chain.stage, state.version].add(weights_digest(state.weights))
