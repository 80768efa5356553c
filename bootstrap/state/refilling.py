"""How the host has a stage served again that nobody serves any more: it posts members of other stages to it.

Which of them, is drawn by what is certified of their work, from a signature of the run key: nobody knows it before.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from bootstrap.directory.postings import Postings
from bootstrap.program.host_context import HostContext
from swarm.core.directory.posting import refills
from swarm.core.ids import PeerId, StageIndex
from swarm.core.state.coming_back import StageSeen


@dataclass(kw_only=True)
class Refilling:
    """Of one run."""

    host: HostContext
    postings: Postings
    _lost_since: dict[int, float] = field(default_factory=dict)

    def look(self, seen: Sequence[StageSeen]) -> None:
        """Post whom it takes to the stages that have been lost for `limits.refill_s`. `seen`: all stages, as of now."""
        now, limits = time.monotonic(), self.host.run.settings.limits
        for stage, one in enumerate(seen):
            if not one.is_lost:
                self._lost_since.pop(stage, None)
            elif limits.refill_s and now >= self._lost_since.setdefault(stage, now) + limits.refill_s:
                self._refill(StageIndex(stage), seen)

    def counts(self, peer: PeerId, stage: int) -> bool:
        """Whether a peer that waits at a stage nobody serves may begin it again: in a run of strangers who was a member
        there by the newest certified version, or was posted there."""
        if not self.host.run.settings.has_probation:
            return True
        return peer in self.host.followed[stage].chain.members or self.postings.target_of(peer) == stage

    def _refill(self, target: StageIndex, seen: Sequence[StageSeen]) -> None:
        followed, limits = self.host.followed, self.host.run.settings.limits
        here = seen[target].waiting | self.postings.coming(target)
        work = [
            {
                peer: done
                for peer, done in followed[stage].chain.basis.work_of.items()
                if peer in one.training and self.postings.target_of(peer) is None and self.host.justice.may_train(peer)
            }
            for stage, one in enumerate(seen)
        ]
        posted = refills(
            work, target, min_replicas=limits.min_replicas, num_arriving=len(here), seed=self.postings.seed(target)
        )
        for peer, source in posted:
            self.postings.post(peer, source, target, f"nobody of stage {target} is left")
