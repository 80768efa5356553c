"""What came of each step, told to the host for as long as it takes until it has heard."""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

from peer.directory.host import Host
from peer.pipeline.screens import Screens
from peer.pipeline.source import StepLoss
from peer.pipeline.stage_pass import numeric_class
from peer.pipeline.stage_work import StageWork
from peer.stage.context import StageContext
from peer.stage.events import Applied
from swarm.core.audit.honest_audits import AuditsMade, HonestAudits
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import Step
from swarm.core.round.contribution import Result
from swarm.host_protocol import REPORT, RESULT, Credited, StepReport
from swarm.network.transport import Directory, Transport, Way

log = logging.getLogger(__name__)

MAX_UNSENT = 256


class Reports:
    """Of one peer, over all stages it serves; the newest that are not sent yet."""

    def __init__(
        self, host: Host, transport: Transport, directory: Directory, on_minimum_release: Callable[[str], None]
    ) -> None:
        """`on_minimum_release` is told the oldest release that the host takes in."""
        self._host = host
        self._transport = transport
        self._directory = directory
        self._unsent: deque[tuple[StepReport, Result]] = deque(maxlen=MAX_UNSENT)
        self._ready = asyncio.Event()
        self.credit: Credited | None = None
        """By the host's ledger; None until the host has said it."""
        self._on_minimum_release = on_minimum_release

    def add(
        self,
        applied: Applied,
        context: StageContext,
        screens: Screens,
        work: StageWork,
        losses: Mapping[Step, StepLoss],
        honest_audits: Sequence[HonestAudits],
    ) -> None:
        """A step is over; `losses` are a source's, `honest_audits` those of this peer's audits so far."""
        version, counters = applied.chain.version, work.counters
        snapshot = context.snapshots.get(version)
        loss = losses.get(Step(version - 1), StepLoss())
        sent, received = self._transport.traffic()
        ways = Counter(self._transport.ways().values())
        report = StepReport(
            stage=work.replica.stage,
            version=version,
            loss_sum=float(loss.loss_sum),
            num_targets=loss.num_targets,
            stale=applied.stale,
            counted=applied.counted,
            round_s=applied.seconds,
            round_bytes=applied.sent_bytes,
            overlap=applied.overlap,
            gradient_norm=applied.gradient_norm,
            microbatches=counters.microbatches,
            evaluated=counters.evaluated,
            reassigned=counters.reassigned,
            stragglers=counters.stragglers,
            refused=counters.refused,
            sent_bytes=sent,
            received_bytes=received,
            busy_s=work.compute.busy_s,
            exact_s=context.exact.busy_s,
            screens=self._screens(screens, work),
            state_digest=snapshot.digest if snapshot is not None else b"",
            num_direct=ways[Way.DIRECT],
            num_punched=ways[Way.PUNCHED],
            num_relayed=ways[Way.RELAYED],
            not_finite=applied.not_finite,
            answered_s=counters.answered.seconds,
            waited_s=counters.waited.seconds,
            audits=AuditsMade(
                run_id=context.run_id,
                auditor=context.me,
                stage=work.replica.stage,
                version=version,
                numeric_class=numeric_class(work.replica.model.device, context.settings.model.compute_dtype),
                honest=tuple(honest_audits),
            ).signed_by(context.identity),
        )
        self._unsent.append((report, applied.result))
        self._ready.set()

    async def send(self) -> None:
        """Send what there is, for ever."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            while self._unsent:
                report, result = self._unsent[0]
                try:
                    reply = await self._host.call(REPORT, {"report": report.to_value()})
                    answer = Fields("report answer", reply.meta)
                    self._on_minimum_release(answer.text("minimum_release", max_length=32))
                    self.credit = Credited.from_value(answer.message("credit"))
                    if answer.boolean("wants_result"):
                        await self._host.call(RESULT, {"result": result.to_value()})
                except TransientError:
                    await asyncio.sleep(1.0)
                    continue
                except RemoteError as error:
                    log.warning("the host refused a report: %s", error)
                if self._unsent and self._unsent[0][0] is report:  # else it was dropped for newer ones meanwhile
                    self._unsent.popleft()

    def _screens(self, screens: Screens, work: StageWork) -> tuple[tuple[str, int], ...]:
        """All screens that tripped, of norms and of form, by kind."""
        found = Counter[str](screens.tripped)
        found.update(work.counters.bad_messages)
        if self._directory.refused:
            found["directory_record"] = self._directory.refused
        return tuple(sorted(found.items()))
