"""A stage's certified results as the host folds them itself: it believes no peer about the past."""

import logging
from collections.abc import Mapping
from typing import NamedTuple

from swarm.core.errors import RemoteError
from swarm.core.ids import PeerId, Version
from swarm.core.round.contribution import Result, Roster, Work
from swarm.core.round.facts import RoundFacts
from swarm.core.settings import RunSettings
from swarm.core.state.stage_chain import StageChain
from swarm.identity.key import verify

log = logging.getLogger(__name__)

MAX_EARLY = 16
"""Versions that a stage may be ahead of what is known of it here: of so many steps results are kept that came before
those they follow from."""
KEPT_CHAINS = 4
KEPT_RESULTS = 16
"""Beside as many as there are between two snapshots: what jurors find of so old a charge can still be checked."""


class Certified(NamedTuple):
    """A result that the chain has come by."""

    result: Result
    work: Mapping[PeerId, tuple[Work, ...]]
    """What counts in it, of whom."""
    name: bytes
    """Of the version that it makes."""


class FollowedStage:
    """The chain of one stage from one that is certified on, and as it was at the versions of the last snapshots."""

    def __init__(self, chain: StageChain, settings: RunSettings) -> None:
        self._settings = settings
        self.ends_at = settings.optimizer.total_steps
        """The version at which its era ends: it has a snapshot."""
        self._early: dict[int, Result] = {}
        self.chain = chain
        self._kept: dict[int, StageChain] = {int(self.chain.version): self.chain}
        self._results: dict[int, Result] = {}

    def at(self, version: int) -> StageChain | None:
        """What was certified of a version that had a snapshot; None if it is too long ago, or not known yet."""
        return self._kept.get(version)

    def chain_at(self, version: int) -> StageChain | None:
        """What was certified of the version; None if it is too long ago, or not known yet."""
        chain = self.chain if version == self.chain.version else None
        for kept in sorted((one for one in self._kept if one <= version), reverse=True)[:1] if chain is None else ():
            chain = self._kept[kept]
            while chain is not None and chain.version < version:
                result = self._results.get(int(chain.version))
                chain = chain.advance(result, self._settings) if result is not None else None
        return chain

    def roster(self, step: int) -> Roster | None:
        """Of one of the last steps, certified; None if it is too long ago, or not known yet."""
        result = self.result(step)
        return result.roster if result is not None else None

    def result(self, step: int) -> Result | None:
        """Of one of the last steps, certified; None if it is too long ago, or not known yet."""
        return self._results.get(step)

    def may_begin(self, step: int, name: bytes) -> bool:
        """Whether a round of this step may start from the version of this name, as far as is known here: the stage may
        be a little ahead, and some of its members may lack the last result."""
        version, basis = int(self.chain.version), self.chain.basis
        if step in (version - 1, version):
            return name == (basis.name if step == version else basis.previous_name)
        return version < step <= version + MAX_EARLY

    def take(self, result: Result) -> list[Certified]:
        """A result that somebody sent; what is certified with it, in order, and was not before.

        Raises RemoteError if it is not certified; one that is a little early is kept, unchecked, till it is its turn.
        """
        step, version = int(result.roster.step), int(self.chain.version)
        if step != version:
            if version < step <= version + MAX_EARLY:
                self._early[step] = result
            return []
        done = [self._advance(result)]
        while (early := self._early.pop(int(self.chain.version), None)) is not None:
            try:
                done.append(self._advance(early))
            except RemoteError as error:  # whoever sent it is long gone; an honest peer will be asked for it again
                log.info("an early result of stage %d was not certified: %s", result.roster.stage, error)
                break
        return done

    def _advance(self, result: Result) -> Certified:
        chain = self.chain
        facts: RoundFacts = chain.facts(
            self._settings,
            num_parts=len(result.parts),
            phase_s=self._settings.deadlines.call_s,
        )
        facts.check_result(result, verify, certified=True)
        self.chain = chain.advance(result, self._settings)
        made = Certified(result, chain.work_done(result, self._settings), self.chain.name)
        version = int(self.chain.version)
        self._results[version - 1] = result
        every = self._settings.checkpoint.snapshot_every
        self._results.pop(version - 1 - KEPT_RESULTS - every, None)
        if version % every == 0 or version == self.ends_at:
            self._kept[version] = self.chain
            for old in sorted(self._kept)[:-KEPT_CHAINS]:
                del self._kept[old]
        return made

    @property
    def version(self) -> Version:
        return self.chain.version
