"""Audits as a peer that misbehaves makes them: others' work is found wrong that is right, or is not looked at."""

from collections.abc import Sequence
from dataclasses import replace

from peer.adversary.hooks import Adversary, Liar
from peer.audit.beside import Beside
from peer.audit.contributions import ContributionAudits
from peer.audit.inquiry import Inquiry
from peer.pipeline.screens import KnownStanding
from swarm.core.ids import PeerId, StageIndex, Step, Version
from verification.audit.tolerance import Grade
from verification.kinds.replay_mismatch import ReplayMismatch
from verification.replay.compared import ComparedContribution
from verification.round.papers import Bytes


class FalseAudits(ContributionAudits):
    """Accuses whom it found honest."""

    def __init__(self, adversary: Adversary, inquiry: Inquiry, beside: Beside) -> None:
        super().__init__(inquiry, beside)
        self._adversary = adversary

    def compared(self, case: ReplayMismatch, replayed: Sequence[Bytes]) -> ComparedContribution:
        compared = super().compared(case, replayed)
        found = compared.found
        if found.grade is Grade.HONEST and self._adversary.accuses_falsely(case.contribution.step):
            return replace(compared, found=replace(found, grade=Grade.FRAUD))
        return compared


class FalseStanding(KnownStanding):
    """Under which a lazy auditor follows no draw: it spends nothing on anybody's work."""

    def __init__(self, liar: Liar) -> None:
        super().__init__()
        self._liar = liar

    def budget_factor(self, peer: PeerId, stage: StageIndex, version: Version) -> float:
        is_lazy = self._liar.adversary.is_lazy(Step(max(0, version - 1)))
        return 0.0 if is_lazy else super().budget_factor(peer, stage, version)
