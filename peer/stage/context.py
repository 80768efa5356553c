"""What every part of a peer at one stage is made with, and nobody changes."""

from dataclasses import dataclass

from peer.pipeline.compute import WorkThread
from peer.round.reductions import ReductionStore
from peer.stage.events import Events
from peer.stage.tasks import Tasks
from swarm.checkpoint.results import ResultStore
from swarm.checkpoint.snapshots import SnapshotStore
from swarm.core.ids import PeerId
from swarm.core.settings import RunSettings
from swarm.identity.key import Identity
from swarm.network.transport import Transport


@dataclass(frozen=True, kw_only=True)
class StageContext:
    """Of one peer, from when it has joined a stage until it leaves it."""

    settings: RunSettings
    """Everyone's."""
    run_id: str
    """The manifest's hash, which all that is signed names."""
    identity: Identity
    """This peer's, whose id its transport has."""
    transport: Transport
    """To all others, the host among them."""
    compute: WorkThread
    """Forward and backward, and what must not come between them: the closing of a step's sum."""
    copies: WorkThread
    """What comes is checked and decoded, what goes is taken from the device: on a CPU `compute`; on a GPU a thread of
    its own, so that the GPU has something to compute meanwhile."""
    exact: WorkThread
    """Encoding, hashing, aggregation, the optimizer's step."""
    replays: WorkThread
    """Others' work done again, for audits and exams: on a CPU `compute`, whose cores it takes; on a GPU a thread of its
    own, which does not hold up the one that feeds the GPU."""
    judging: WorkThread
    """Cases of jurors, and what this peer is accused of: versions built again from results, and replays on them. They
    take long, and no round waits for them."""
    snapshots: SnapshotStore
    """The stage's states on disk."""
    results: ResultStore
    """The stage's certified results with their bytes."""
    reductions: ReductionStore
    """What reducers signed for in the last steps, and what this peer put into them."""
    tasks: Tasks
    """What runs until this peer leaves the stage."""
    events: Events
    """What the parts tell each other."""

    @property
    def me(self) -> PeerId:
        """This peer."""
        return self.identity.peer_id
