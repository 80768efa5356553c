"""Audits of what the other replicas of a stage contributed: all that went into it is fetched, replayed and compared."""

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from peer.audit.beside import Beside
from peer.audit.inquiry import Inquiry
from peer.stage.events import Applied
from peer.state.past_weights import standing_on
from swarm.bulk_digest import bulk_digest
from swarm.core.canonical import Value
from swarm.core.errors import RemoteError, TransientError
from swarm.core.ids import Step, Version
from swarm.core.round.contribution import Contribution, Work
from swarm.host_protocol import EXHIBIT, PART, max_exhibit_bytes
from swarm.network.transport import Message
from swarm.optim.second_moments import second_moments
from verification.audit.amplified import Amplified, moved_bounds_in_force
from verification.audit.draws import contribution_rate, draw
from verification.audit.owed import read_exhibit, read_part
from verification.audit.running_bias import RunningBiases
from verification.audit.tolerance import CAUTION, Grade
from verification.kinds.replay_mismatch import ReplayMismatch
from verification.replay.compared import ComparedContribution, compared_contribution
from verification.replay.stage_replay import StageReplay
from verification.round.papers import Bytes, Exhibit

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class ContributionDue:
    """A contribution that was drawn."""

    contribution: Contribution
    reveal: bytes

    @property
    def step(self) -> Step:
        return self.contribution.step

    def __str__(self) -> str:
        return f"the contribution of {self.contribution.peer_id} to step {self.step}"


class ContributionAudits:
    """Of the other members'."""

    name = "contributions"
    most_due = 256

    def __init__(self, inquiry: Inquiry, beside: Beside) -> None:
        """`beside` shows what a target does not."""
        self._inquiry = inquiry
        self._beside = beside
        self._steps = steps = inquiry.steps
        settings = steps.context.settings
        self._replay = StageReplay(settings, steps.chain.stage, model=steps.replica.model_of_replays())
        bounds = moved_bounds_in_force(settings)
        self._biases = RunningBiases(inquiry.draws.secret, bounds)

    def drawn(self, applied: Applied, reveal: bytes) -> Iterable[ContributionDue]:
        """Contributions with work in them, where a replay can give such sums."""
        if self._steps.context.settings.leaves_residual:
            return
        roster, me = applied.result.roster, self._steps.context.me
        for made in roster.contributions:
            if made.peer_id == me or not made.work:
                continue
            drawn = draw(reveal, made.digest(), auditor=me, target=made.peer_id)
            rate = self._inquiry.rate(contribution_rate, len(roster.members), made.peer_id, applied.chain.version)
            if drawn.hits_contribution(rate):
                yield ContributionDue(made, reveal)

    def computed_on(self, due: ContributionDue) -> Iterable[int]:
        """What the work was done on."""
        return {int(work.version) for work in due.contribution.work}

    async def audit(self, due: ContributionDue) -> None:
        """All of it, and the sum."""
        try:
            await self._audit(due)
        except RemoteError:
            self._inquiry.standing.suspect(due.contribution.peer_id, Version(int(due.step)))
            raise

    async def _audit(self, due: ContributionDue) -> None:
        made, step, inquiry = due.contribution, due.step, self._inquiry
        inquiry.check_not_accused(made.peer_id)
        kept = {work.version: self._steps.replica.past.get(int(work.version)) for work in made.work}
        exhibits = [await self._exhibit(due, work) for work in made.work]
        if await inquiry.is_of_other_data(made.peer_id, step, [exhibit.papers.birth for exhibit in exhibits]):
            return

        def replayed() -> list[tuple[Bytes, bytes]]:
            with standing_on(self._replay, kept):
                parts = self._replay.encoded_contribution(exhibits, step, keep=self._steps.replica.inputs.put)
            return [(part, bulk_digest(part)) for part in parts]

        own = await inquiry.replay(replayed)
        parts = await self._parts(due, own)
        case = ReplayMismatch(contribution=made, parts=tuple(parts), exhibits=tuple(exhibits))

        def beside() -> ComparedContribution:
            with standing_on(self._replay, kept):
                return self.compared(case, [part for part, _ in own])

        compared = await inquiry.replay(beside)
        inquiry.counters.contributions += 1
        await inquiry.conclude(step, "contribution", compared.found, case)
        if compared.found.grade is not Grade.FRAUD:
            await self._sum_up(case, compared.amplified)

    def compared(self, case: ReplayMismatch, replayed: Sequence[Bytes]) -> ComparedContribution:
        """(replays) What is to be thought of a contribution, from its parts as shown and as they came out here."""
        made, replica = case.contribution, self._steps.replica
        # Moments are changed in place, before the version they belong to is this replica's: perhaps one step more.
        steps_since = 1 + int(replica.version) - int(made.step)
        second = second_moments(replica.settings.optimizer, replica.state.moments, steps_since=steps_since)
        seed = self._biases.seed_for(made.peer_id)
        compared = compared_contribution(
            *(self._replay, case.exhibits, case.parts, replayed), second=second, seed=seed, caution=CAUTION
        )
        log.debug("%s at step %d: %s", made.peer_id, made.step, compared.found.reason)
        return compared

    async def _sum_up(self, case: ReplayMismatch, amplified: Amplified) -> None:
        """One audit more of the peer: if all of them together are led one way, the run key is to see for itself."""
        made, inquiry, biases = case.contribution, self._inquiry, self._biases
        if amplified.sketch is None:
            return
        held = biases.after(made.peer_id, made.step, amplified.sketch, num_values=self._replay.layout.num_values)
        if not held.is_led:
            inquiry.counters.largest_bias_share = max(inquiry.counters.largest_bias_share, held.share)
            return
        log.warning("%s is led one way: %.2f of the law after %d audits", made.peer_id, held.share, held.num_audits)
        inquiry.standing.suspect(made.peer_id, Version(int(made.step)))
        if amplified.measured > 2 * biases.bounds.bias:
            await inquiry.lay_open(case)

    # -- fetched ------------------------------------------------------------------------------------------

    async def _exhibit(self, due: ContributionDue, work: Work) -> Exhibit:
        """What an entry was made from, as the target shows it, or its neighbours."""
        made, steps, number = due.contribution, self._steps, int(work.microbatch_id)
        settings, keep = steps.context.settings, steps.replica.inputs.put

        def read(reply: Message) -> Exhibit:
            num_stages, body = settings.model.num_stages, keep(memoryview(reply.body))
            return read_exhibit(reply.meta, body, made, work, run_id=steps.context.run_id, num_stages=num_stages)

        largest = max_exhibit_bytes(settings, steps.replica.model.hidden_size)
        asked = self._inquiry.shown(
            *(due, made.peer_id, EXHIBIT, {"microbatch_id": number}, read),
            what="exhibit",
            number=number,
            max_body_bytes=largest,
        )
        return await _or_instead(asked, lambda: self._beside.exhibit(due, made, work))

    async def _parts(self, due: ContributionDue, own: Sequence[tuple[Bytes, bytes]]) -> list[Bytes]:
        """The contribution's parts. Only those cross the line that came out otherwise here, and of which this peer was
        not the reducer: who computes alike to the bit needs none. What nobody has any more is empty."""
        made, reductions = due.contribution, self._steps.context.reductions
        if len(made.part_digests) != len(own):
            raise RemoteError("malformed", f"contribution of {len(made.part_digests)} parts, not {len(own)}")
        parts: list[Bytes] = []
        for index, (part, digest) in enumerate(own):
            if digest == made.part_digests[index]:
                parts.append(part)
                continue
            reduced = reductions.input(made.step, index, made.part_digests[index])
            parts.append(reduced if reduced is not None else await self._part(due, index))
        if not any(len(part) for part in parts):
            raise TransientError(f"no part of {made.peer_id} at step {made.step} is with anybody who reduced it")
        return parts

    async def _part(self, due: ContributionDue, index: int) -> Bytes:
        """As the target shows it, or whoever reduced it."""
        made, replica = due.contribution, self._steps.replica
        largest = replica.parts().result_bytes(index)
        meta: dict[str, Value] = {"part": index, "of": made.peer_id}

        def read(reply: Message) -> Bytes:
            return replica.inputs.put(memoryview(read_part(reply.body, made, index)))

        async def of_others() -> Bytes:
            for peer in sorted({*self._steps.chain.members} - {made.peer_id, self._steps.context.me}):
                try:
                    reply = await self._inquiry.ask(peer, PART, due, meta, max_body_bytes=largest)
                    return await self._inquiry.exact(partial(read, reply))
                except (TransientError, RemoteError) as error:
                    log.debug("part %d of %s by %s: %s", index, made.peer_id, peer[-6:], error)
            raise TransientError(f"part {index} of {made.peer_id} is with nobody who reduced it")

        asked = self._inquiry.shown(
            *(due, made.peer_id, PART, meta, read), what="part", number=index, max_body_bytes=largest
        )
        try:
            return await _or_instead(asked, of_others)
        except TransientError as error:  # it reduced the part itself, and is gone: the others tell enough
            log.info("part %d of %s at step %d: %s", index, made.peer_id, made.step, error)
            return b""


async def _or_instead(asked: Awaitable[T], instead: Callable[[], Awaitable[T]]) -> T:
    """What the target shows, or what others do who hold the same: it is audited all the same. Raises as the first."""
    try:
        return await asked
    except (TransientError, RemoteError) as error:
        try:
            return await instead()
        except (TransientError, RemoteError) as other:
            log.info("nor from others: %s", other)
            raise error from other
