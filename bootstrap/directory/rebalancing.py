"""How the host keeps the stages even: it posts one member at a time to the stage that limits the run."""

import asyncio
from dataclasses import replace

from bootstrap.directory.postings import Postings
from bootstrap.program.host_context import HostContext
from swarm.core.directory.capacities import Witness
from swarm.core.directory.evening import SETTLES_VERSIONS, Evening, StageFigures
from swarm.core.directory.rebalancing import RebalancingSettings
from swarm.core.ids import PeerId
from swarm.core.plan import flops_a_token
from swarm.manifest.model import hidden_size, stage_num_parameters

LATE_VERSIONS = 2
"""Who has reported no step since so many versions is not there, as far as can be known."""
PAYS_BACK_IN = 4
"""Times what a move takes, if that is more than `RebalancingSettings` has."""


class Rebalancing:
    """Of one run. A host that is started again has tried nothing yet."""

    def __init__(self, host: HostContext, postings: Postings) -> None:
        settings, move_s = host.run.settings, postings.arrives_s
        self._host = host
        self._postings = postings
        sizes, width = stage_num_parameters(settings.model), hidden_size(settings.model)
        rules = RebalancingSettings(min_replicas=settings.limits.min_replicas)
        self._evening = Evening(
            [flops_a_token(settings, stage, size, width) for stage, size in enumerate(sizes)],
            move_s,
            replace(rules, payback_s=max(rules.payback_s, PAYS_BACK_IN * move_s)),
        )

    async def run_for_ever(self) -> None:
        """Look every `limits.rebalance_s`; not at all if that is 0, or there is one stage."""
        settings = self._host.run.settings
        while settings.limits.rebalance_s and settings.model.num_stages > 1:
            await asyncio.sleep(settings.limits.rebalance_s)
            self.look()

    def look(self) -> None:
        """Post a peer, if that helps now."""
        progress, postings = self._host.progress, self._postings
        version = progress.done_versions()
        rate = progress.microbatches_per_s(version - SETTLES_VERSIONS, version)
        if self._evening.waits(version, is_moving=postings.are_under_way) or not rate:
            return
        if len(self._host.followed) < progress.num_stages:
            return
        stages = [self._figures(stage) for stage in range(progress.num_stages)]
        move = self._evening.look(stages, version=version, rate=rate, seed=postings.seed)
        if move is not None:
            postings.post(move.peer_id, move.source, move.target, move.reason)

    def _figures(self, stage: int) -> StageFigures:
        chain, witnesses = self._host.followed[stage].chain, dict[PeerId, Witness]()
        for peer, work in chain.basis.work_of.items():
            figures = self._host.progress.peers.get(peer)
            last = figures.last if figures is not None and not figures.left else None
            if last is None or last.stage != stage or not self._host.justice.may_train(peer):
                continue
            if last.version + LATE_VERSIONS >= chain.version:
                witnesses[peer] = Witness(work, last.answered_s, last.waited_s)
        settled = {one.peer_id for one in chain.recent_work if len(one.tokens) >= SETTLES_VERSIONS}
        return StageFigures(set(chain.members), witnesses, settled)
