"""Audits as a peer that misbehaves makes them: others' work is found wrong that is right or that nobody has seen, or is
not looked at.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from peer.adversary.hooks import Adversary, Liar
from peer.audit.beside import Beside
from peer.audit.contributions import ContributionAudits
from peer.audit.inquiry import Inquiry
from peer.audit.jury import JURY
from peer.pipeline.screens import KnownStanding
from peer.round.stage_steps import StageSteps
from swarm.core.audit.beacon import Beacon
from swarm.core.canonical import Value
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId, StageIndex, Step, Version
from swarm.core.round.contribution import Charge, Result
from swarm.host_protocol import QUARANTINE
from swarm.network.transport import Message
from verification.audit.tolerance import Grade
from verification.audit.verdicts import Accusation, JurorVote, Quarantine, jury_of
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


class FalseCharges:
    """Charges of evidence that there is not, and what its jurors are asked to make of it."""

    def __init__(self, adversary: Adversary, steps: StageSteps, honest: Callable[[], tuple[Charge, ...]]) -> None:
        """`honest`: what this peer would bring."""
        self._adversary = adversary
        self._steps = steps
        self._honest = honest
        self._made: Accusation | None = None

    def brought(self) -> tuple[Charge, ...]:
        """What the next contribution commits to."""
        steps, step = self._steps, Step(self._steps.version)
        others = [peer for peer in steps.chain.members if peer != steps.context.me]
        if not self._adversary.charges_in(step) or not others:
            return self._honest()
        chance = self._adversary.chance("charge", step)
        accused, evidence = others[int(chance.integers(len(others)))], chance.bytes(32)
        self._made = Accusation(
            steps.context.run_id, accused, steps.chain.stage, Version(step), ReplayMismatch.KIND, evidence
        )
        return (Charge(accused, self._made.digest()),)

    def certified(self, result: Result) -> None:
        """A round is over: if it bears the charge, its jury is asked."""
        made, self._made = self._made, None
        own = result.roster.commitment_of(self._steps.context.me)
        if made is not None and own is not None and own.charges:
            self._steps.context.tasks.spawn(self._try(made, result))

    async def _try(self, made: Accusation, result: Result) -> None:
        """Accomplices convict without evidence; who is convicted is told of as if there had been some."""
        steps, me = self._steps, self._steps.context.me
        after = steps.chain.advance(result, steps.context.settings)
        said = after.basis.said
        drawn = jury_of(result, after.basis, made, me, lambda roster: Beacon.of(roster, said))
        jurors = drawn.weights if drawn is not None else {}
        meta: dict[str, Value] = {
            "charge": made.to_value(),
            "committed_at": result.roster.step,
            "said": said.to_value(),
        }
        votes = []
        for juror in jurors:
            with contextlib.suppress(RemoteError, TransientError):
                reply = await self._call(juror, JURY, meta)
                votes.append(JurorVote.from_value(Fields("jury answer", reply.meta).message("vote")))
        found = Quarantine(*made.facts, votes=tuple(votes))
        for peer in {*after.members, steps.chain.host} - {me}:
            with contextlib.suppress(RemoteError, TransientError):
                await self._call(peer, QUARANTINE, {"quarantine": found.to_value()})

    async def _call(self, peer: PeerId, method: str, meta: dict[str, Value]) -> Message:
        call_s = self._steps.context.settings.deadlines.call_s
        return await self._steps.context.transport.call(peer, method, Message(meta), timeout_s=call_s, max_body_bytes=0)


class FalseStanding(KnownStanding):
    """Under which a lazy auditor follows no draw: it spends nothing on anybody's work."""

    def __init__(self, liar: Liar) -> None:
        super().__init__()
        self._liar = liar

    def budget_factor(self, peer: PeerId, stage: StageIndex, version: Version) -> float:
        is_lazy = self._liar.adversary.is_lazy(Step(max(0, version - 1)))
        return 0.0 if is_lazy else super().budget_factor(peer, stage, version)
