"""A version that its stage has left behind, built again: from a snapshot and the results since."""

from peer.round.stage_steps import StageSteps
from swarm.checkpoint.state import state_from_chunks
from swarm.core.errors import LocalError
from verification.replay.stage_replay import StageReplay


def rebuilt(steps: StageSteps, step: int, oldest: int) -> StageReplay:
    """(judging) A replay that stands at version `step` and still has `oldest`, if that is the one before.

    Raises LocalError if this peer joined later, or does not hold the results any more.
    """
    snapshots = steps.context.snapshots
    found = max((number for number in snapshots.versions() if number <= oldest), default=None)
    held = snapshots.get(found) if found is not None else None
    if held is None:
        raise LocalError(f"no snapshot up to version {oldest} is held, those of {snapshots.versions()} are")
    replay = StageReplay(steps.context.settings, steps.chain.stage, model=steps.replica.model_of_replays())
    chunks = [held.chunk(index) for index in range(len(held.hashes))]
    replay.begin(state_from_chunks(replay.layout, chunks, held.digest), held.chain)
    while int(replay.version) < step:
        result = steps.context.results.get(int(replay.version))
        if result is None:
            raise LocalError(f"the result of step {replay.version} is not held any more")
        replay.advance(*result)
    return replay
