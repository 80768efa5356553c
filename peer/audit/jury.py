"""Replicas that judge one of them: the accuser's side, the jurors', and what everybody makes of their votes.

The accuser commits to its charge in a contribution; once that is certified the jurors are drawn (`jury_of`). Each
replays the case on the weights that it has itself. If enough find fraud the accused is shut out, until the run key
speaks. Each who did sees to it that it can: the case is to come before the host, whoever brings it.

A case is as large as a contribution, and goes to each juror over the accuser's line: none is asked while the host,
whom it reaches first, is there to judge it.
"""

import asyncio
import contextlib
import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence

from peer.pipeline.compute import Urgency
from peer.pipeline.screens import KnownStanding
from peer.round.stage_steps import StageSteps
from peer.stage.bases import RecentBases
from peer.stage.beacon import StageBeacon
from peer.stage.events import Applied
from peer.state.rebuilding import rebuilt
from swarm.core.audit.chance import HostWord
from swarm.core.canonical import Value
from swarm.core.errors import LocalError, RemoteError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId, StageIndex, Step, Version
from swarm.core.kept import keep_newest
from swarm.core.round.contribution import MAX_CHARGES, Charge, Result
from swarm.core.settings import KEPT_SNAPSHOTS
from swarm.host_protocol import MAX_CASE_BYTES, QUARANTINE
from swarm.manifest.signed_run import SignedRun
from swarm.network.transport import Message, Transport
from verification.audit.evidence import Evidence
from verification.audit.standing import Standing
from verification.audit.strikes import STRIKES_TO_QUARANTINE
from verification.audit.tolerance import Grade
from verification.audit.verdicts import (
    FEWEST_REPLICAS,
    Accusation,
    DrawnJury,
    JurorVote,
    Quarantine,
    jury_of,
)
from verification.kinds.mismatch import Mismatch, accusation_of, mismatch_of
from verification.replay.judge import judge_as_replica

log = logging.getLogger(__name__)

JURY = "jury"
"""To a juror: {charge, committed_at, said}, body: the evidence without a past -> {vote}."""
HOST_JUDGES_WITHIN = 3
"""Versions for which the host is left to judge a charge by itself, while it speaks of the stage's versions."""
KEPT_VOTES = 64
BRINGS_AFTER = 3
"""Versions that a juror waits for those before it, and for the accuser, to bring a case before the host."""
MAX_RELAYED = 64
"""Other stages' peers whose quarantines are being counted."""
TOLD_WITHIN = 16
"""Versions by which the deeds may differ of which several replicas of another stage found one of them guilty."""
TELL_TRIES = 10
TELL_EVERY_S = 0.5


class Charges:
    """What this peer brings before juries: its next contributions commit to it until one is certified."""

    def __init__(self) -> None:
        self._committing: dict[Charge, asyncio.Future[Result]] = {}

    def brought(self) -> tuple[Charge, ...]:
        """What this peer's next contribution commits to, as far as there is room."""
        return tuple(self._committing)[:MAX_CHARGES]

    def bring(self, charge: Charge) -> asyncio.Future[Result]:
        """From now on; the result that bears it."""
        return self._committing.setdefault(charge, asyncio.get_running_loop().create_future())

    def drop(self, charge: Charge) -> None:
        """It is brought no more."""
        self._committing.pop(charge, None)

    def certified(self, charge: Charge, result: Result) -> None:
        """This result bears it."""
        waiting = self._committing.pop(charge, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(result)


class Jury:
    """One replica's part in its stage's juries."""

    def __init__(
        self,
        steps: StageSteps,
        bases: RecentBases,
        charges: Charges,
        beacon: StageBeacon,
        signed_run: SignedRun,
        host: PeerId,
        of_stage: Callable[[int], set[PeerId]],
        take: Callable[[Quarantine, PeerId], None],
        standing: KnownStanding,
        bring: Callable[[Mismatch], Awaitable[None]],
    ) -> None:
        """`of_stage`: live peers; `take` acts on a quarantine; `bring` brings a case before the host."""
        self._steps = steps
        self._bases = bases
        self._bring = bring
        self._beacon = beacon
        self._signed_run = signed_run
        self._host = host
        self._of_stage = of_stage
        self._take = take
        self._standing = standing
        self._answered_for: set[PeerId] = set()
        """Whose cases this juror sees to."""
        self._charges = charges
        self._prosecuted: set[PeerId] = set()
        """Whom this peer is accusing now: of one thing at a time."""
        self._contradicted: Counter[PeerId] = Counter()
        """How often accusers were wrong, as this juror found."""
        self._votes: OrderedDict[tuple[PeerId, bytes], JurorVote] = OrderedDict()
        self._sitting = asyncio.Lock()
        self._told_by: OrderedDict[PeerId, dict[PeerId, Version]] = OrderedDict()
        """Of whom juries of other stages put out: which of that stage's peers act on it, and when the deed was.

        Several accusers may bring several deeds of it at once; each peer tells of the first that it heard of."""

    def serve(self, transport: Transport) -> None:
        """Begin to sit."""
        transport.serve(JURY, self._on_jury, max_body_bytes=MAX_CASE_BYTES)

    # -- the accuser --------------------------------------------------------------------------------------

    def applied(self, applied: Applied) -> None:
        """A round is over: what it certified of this peer's charges goes before their juries."""
        made = applied.result.roster.commitment_of(self._steps.context.me)
        for charge in made.charges if made is not None else ():
            self._charges.certified(charge, applied.result)

    async def prosecute(self, mismatch: Mismatch) -> None:
        """Bring a case before a jury, and its finding before everybody. Nothing comes of it in a small stage."""
        steps = self._steps
        accused = mismatch.accused
        if len(steps.chain.members) < FEWEST_REPLICAS or self._standing.is_out(accused) or accused in self._prosecuted:
            return
        self._prosecuted.add(accused)
        try:
            await self._prosecute(mismatch)
        finally:
            self._prosecuted.discard(accused)

    async def _prosecute(self, mismatch: Mismatch) -> None:
        steps = self._steps
        evidence = mismatch.without_past().to_evidence(self._signed_run)
        accusation = await asyncio.to_thread(accusation_of, evidence)
        charge = Charge(accusation.peer_id, accusation.digest())
        committed = self._charges.bring(charge)
        try:
            async with asyncio.timeout(2 * steps.context.settings.deadlines.step_s):
                result = await committed
        except TimeoutError:  # the stage stands still, or this peer is no member any more
            log.warning("%s is accused, but no round bears the charge: no jury", mismatch.accused)
            return
        finally:
            self._charges.drop(charge)
        step = result.roster.step
        await self._left_to_host(mismatch, step)
        if self._standing.is_out(accusation.peer_id):  # by the host, or by another's case meanwhile
            return
        drawn = await self._summoned(accusation, step)
        if drawn is None:
            return
        log.info("%s is accused in step %d before %d jurors", accusation.peer_id, step, len(drawn.weights))
        body = await asyncio.to_thread(evidence.to_bytes)
        found = await asyncio.gather(*(self._ask(juror, accusation, step, body) for juror in drawn.weights))
        votes = tuple(vote for vote in found if vote is not None)
        made = Quarantine(*accusation.facts, votes=votes)
        made.check(steps.context.run_id, steps.chain.run_key, jury=drawn)
        self._take(made, steps.context.me)
        members = {*steps.chain.members, *result.roster.members_after} - {steps.context.me}
        await self._tell(made, {*members, self._host})

    async def _left_to_host(self, case: Mismatch, step: Step) -> None:
        """Until the accused is out, or the host had its time; or is silent: then that is a version, not all of them. No
        longer than jurors hold the case's past then, and for as many versions more as lie between two snapshots."""
        steps = self._steps
        (oldest, _), every = case.versions, steps.context.settings.checkpoint.snapshot_every
        made, held_until = int(step) + 1, oldest - oldest % every + (KEPT_SNAPSHOTS - 1) * every
        for version in range(made + 1, min(made + HOST_JUDGES_WITHIN, held_until) + 1):
            is_there = await steps.wait_for_version(Version(version), timeout_s=steps.context.settings.deadlines.step_s)
            is_spoken_of = self._beacon.said.num_versions >= version - 1
            if not is_there or not is_spoken_of or self._standing.is_out(case.accused):
                return

    async def _ask(self, juror: PeerId, accusation: Accusation, step: Step, body: bytes) -> JurorVote | None:
        steps = self._steps
        meta: dict[str, Value] = {
            "charge": accusation.to_value(),
            "committed_at": step,
            "said": self._beacon.said.to_value(),
        }
        for _ in range(TELL_TRIES):
            try:
                reply = await steps.context.transport.call(
                    juror,
                    JURY,
                    Message(meta, body),
                    timeout_s=steps.context.settings.deadlines.step_s,
                    max_body_bytes=0,
                )
                return JurorVote.from_value(Fields("jury answer", reply.meta).message("vote"))
            except TransientError as error:
                log.info("juror %s: %s", juror, error)
                await asyncio.sleep(TELL_EVERY_S)
            except RemoteError as error:
                log.warning("juror %s: %s", juror, error)
                return None
        return None

    # -- a juror ------------------------------------------------------------------------------------------

    async def _on_jury(self, sender: PeerId, request: Message) -> Message:
        steps, fields = self._steps, Fields("jury call", request.meta)
        accusation = Accusation.from_value(fields.message("charge"))
        step, said = Step(fields.integer("committed_at")), HostWord.from_value(fields.message("said"))
        fields.done()
        self._beacon.hear(said)
        drawn = self._drawn(accusation, step, sender)
        if drawn is None or steps.context.me not in drawn.weights:
            raise RemoteError("verdict", f"this peer was not drawn as a juror of {accusation.peer_id}", sender)
        if self._contradicted[sender] >= STRIKES_TO_QUARANTINE:
            raise RemoteError("standing", f"{sender} has accused wrongly {STRIKES_TO_QUARANTINE} times", sender)
        key = (sender, accusation.digest())
        async with self._sitting:
            if key not in self._votes:
                self._votes[key] = await self._judged(accusation, sender, step, request.body, [*drawn.weights])
                keep_newest(self._votes, KEPT_VOTES)
        return Message({"vote": self._votes[key].to_value()})

    async def _judged(
        self,
        accusation: Accusation,
        accuser: PeerId,
        step: Step,
        body: bytes | bytearray | memoryview,
        drawn: Sequence[PeerId],
    ) -> JurorVote:
        steps = self._steps
        evidence = await asyncio.to_thread(Evidence.from_bytes, body, max_bytes=MAX_CASE_BYTES)
        if evidence.run_id != steps.context.run_id or accusation_of(evidence) != accusation:
            raise RemoteError("evidence", "the evidence is not what the charge commits to", accuser)
        try:
            guilty = await steps.context.judging.run(Urgency.AUDIT, lambda: self._is_guilty(evidence))
        except LocalError as error:
            raise TransientError(f"the case cannot be judged here: {error}") from error
        self._contradicted[accuser] += not guilty
        if guilty and accusation.peer_id not in self._answered_for:
            steps.context.tasks.spawn(self._bring_in_turn(mismatch_of(evidence), drawn.index(steps.context.me)))
        grade = Grade.FRAUD if guilty else Grade.HONEST
        log.info("%s, accused by %s: %s", accusation.peer_id, accuser, grade.value)
        return JurorVote(*accusation.facts, accuser, step, steps.context.me, grade).signed_by(steps.context.identity)

    async def _bring_in_turn(self, case: Mismatch, turn: int) -> None:
        """Who convicts answers for it: if the accuser does not bring the case before the host, jurors do, one after the
        other, while they hold its past."""
        steps = self._steps
        due = int(steps.version) + BRINGS_AFTER * (turn + 1)
        self._answered_for.add(case.accused)
        try:
            while steps.version < due and not steps.is_over:
                await steps.turned(within_s=steps.context.settings.deadlines.step_s)
            if self._standing.table.standing(case.accused, steps.version) is not Standing.BANNED:
                await self._bring(case)
        finally:
            self._answered_for.discard(case.accused)

    def _is_guilty(self, evidence: Evidence) -> bool:
        """(judging) Raises LocalError if this peer does not hold the versions."""
        oldest, version = mismatch_of(evidence).versions
        if not version - 1 <= oldest <= version <= self._steps.version:
            raise RemoteError("evidence", f"work of version {oldest} on the way to version {version}")
        return judge_as_replica(evidence, rebuilt(self._steps, version, oldest)).guilty

    # -- everybody ----------------------------------------------------------------------------------------

    def counts(self, quarantine: Quarantine, sender: PeerId) -> bool:
        """Whether to act on what jurors found. Raises RemoteError if they did not, TransientError if it is too early.

        In their own stage everyone checks the draw. Elsewhere nobody knows who was drawn: there it counts once most of
        the stage's peers act on it.
        """
        steps, own = self._steps, self._steps.chain.stage
        accuser, step = quarantine.summons
        if quarantine.stage == own:
            drawn = self._drawn(quarantine.accusation, step, accuser)
            quarantine.check(steps.context.run_id, steps.chain.run_key, jury=drawn)
            if not self._standing.is_out(quarantine.peer_id):
                steps.context.tasks.spawn(self._tell(quarantine, self._of_stage(own - 1) | self._of_stage(own + 1)))
            return True
        peers = self._of_stage(quarantine.stage) - {quarantine.peer_id}
        if sender not in peers:
            return False
        told_by = self._told_by.setdefault(quarantine.peer_id, {})
        told_by[sender] = quarantine.version
        keep_newest(self._told_by, MAX_RELAYED)
        lately = {peer for peer, version in told_by.items() if abs(version - quarantine.version) <= TOLD_WITHIN}
        return 2 * len(lately & peers) > len(peers)

    async def _summoned(self, accusation: Accusation, step: Step) -> DrawnJury | None:
        """The jurors on what this peer brings; where they are drawn, once the host has spoken of the step."""
        try:
            return self._drawn(accusation, step, self._steps.context.me)
        except TransientError:
            await self._beacon.spoken(step, timeout_s=2 * self._steps.context.settings.deadlines.step_s)
        return self._drawn(accusation, step, self._steps.context.me)

    def _drawn(self, accusation: Accusation, step: Step, accuser: PeerId) -> DrawnJury | None:
        """The jurors. Raises RemoteError if nothing was charged, TransientError if it is too early."""
        result, after = self._result(accusation.stage, step), self._bases.at(int(step) + 1)
        return jury_of(result, after, accusation, accuser, self._beacon.of)

    def _result(self, stage: StageIndex, step: Step) -> Result:
        held = self._steps.context.results.get(int(step))
        if stage != self._steps.chain.stage or held is None:
            raise TransientError(f"the result of step {step} of stage {stage} is not here")
        return held[0]

    async def _tell(self, quarantine: Quarantine, peers: Iterable[PeerId]) -> None:
        async def tell(peer: PeerId) -> None:
            for _ in range(TELL_TRIES):
                with contextlib.suppress(TransientError):
                    await self._steps.context.transport.call(
                        peer,
                        QUARANTINE,
                        Message({"quarantine": quarantine.to_value()}),
                        timeout_s=self._steps.context.settings.deadlines.call_s,
                        max_body_bytes=0,
                    )
                    return
                await asyncio.sleep(TELL_EVERY_S)

        await asyncio.gather(*(tell(peer) for peer in sorted(peers)), return_exceptions=True)
