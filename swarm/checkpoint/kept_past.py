"""What a disk holds of a stage: states, and the certified results that lead on from them."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from kernels.threads import ONE_THREAD, Threads
from swarm.checkpoint.results import cut, results_on
from swarm.checkpoint.snapshots import KeptState, kept_states
from swarm.checkpoint.state import StageState
from swarm.core.errors import RemoteError
from swarm.core.ids import StageIndex
from swarm.core.settings import RunSettings
from swarm.core.state.coming_back import Holding
from swarm.core.state.stage_chain import StageChain
from swarm.disk.mapped_file import mapped
from swarm.model.layout import ParameterLayout
from swarm.optim.certified_steps import CertifiedSteps

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KeptPast:
    """The versions of one stage that can be made again from a folder."""

    folder: Path
    stage: StageIndex
    settings: RunSettings
    layout: ParameterLayout
    threads: Threads = ONE_THREAD
    """That share the steps."""

    def holdings(self) -> list[Holding]:
        """What can be made again, by what is written there: no bytes of states and parts are read."""
        reached = [
            Holding(kept.chain.lineage, int(kept.chain.version), int(self._leads_to(kept.chain)[-1].version))
            for kept in kept_states(self.folder, self.stage)
        ]
        whole: list[Holding] = []
        for held in sorted(reached):
            if whole and whole[-1].lineage == held.lineage and held.oldest <= whole[-1].newest + 1:
                held = replace(held, oldest=whole[-1].oldest, newest=max(held.newest, whole[-1].newest))
                whole.pop()
            whole.append(held)
        return whole

    def newest(self, lineage: bytes) -> int:
        """The newest version of the lineage that can be made again; -1 if none can."""
        return max((held.newest for held in self.holdings() if held.lineage == lineage), default=-1)

    def chain_at(self, lineage: bytes, version: int) -> StageChain | None:
        """What is certified of the version; None if nothing here leads there."""
        for kept in kept_states(self.folder, self.stage):
            if kept.chain.lineage == lineage and kept.chain.version <= version:
                for chain in self._leads_to(kept.chain):
                    if chain.version == version:
                        return chain
        return None

    def made_again(self, lineage: bytes, version: int) -> tuple[StageState, StageChain] | None:
        """The state at `version` and what is certified of it, with every byte checked; None if it is not to be had."""
        for kept in kept_states(self.folder, self.stage):
            if kept.chain.lineage == lineage and kept.chain.version <= version:
                found = self._from(kept, version)
                if found is not None:
                    return found
        return None

    def _from(self, kept: KeptState, version: int) -> tuple[StageState, StageChain] | None:
        state = kept.load(self.layout)
        if state is None:
            return None
        try:
            steps = CertifiedSteps(self.settings, state, kept.chain, threads=self.threads)
            for result, parts, sizes in results_on(self.folder, kept.chain):
                if steps.chain.version == version:
                    break
                steps.advance(result, cut(mapped(parts), sizes))
        except (OSError, RemoteError) as error:
            log.warning("version %d from what is kept of %d: %s", version, kept.chain.version, error)
            return None
        return (steps.state, steps.chain) if steps.chain.version == version else None

    def _leads_to(self, chain: StageChain) -> list[StageChain]:
        """The chain, and what it becomes by each result that is kept."""
        return [chain, *self._folded(chain)]

    def _folded(self, chain: StageChain) -> Iterator[StageChain]:
        for result, _, _ in results_on(self.folder, chain):
            try:
                chain = chain.advance(result, self.settings)
            except RemoteError as error:
                log.warning("a kept result of step %d is not used: %s", chain.version, error)
                return
            yield chain
