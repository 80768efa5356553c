"""A run's host at work: it admits, begins the stages, records results, archives, evaluates, and ends the run.

Training goes on without it once begun; what it decides by is rebuilt from the ledger.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from bootstrap.audit.beacon import HostBeacon, HostChains
from bootstrap.audit.justice import Justice
from bootstrap.directory.admission import Admission, AdmissionPolicy
from bootstrap.directory.postings import Postings
from bootstrap.directory.rebalancing import Rebalancing
from bootstrap.directory.vouchers import Vouchers
from bootstrap.owner.progress import PeerFigures, RunProgress, VersionGone
from bootstrap.owner.reference import Reference
from bootstrap.owner.trained_tokens import TrainedTokens
from bootstrap.owner.trouble import Notice, Trouble
from bootstrap.program.books import Books, Credit, is_cut_anew
from bootstrap.program.host_context import HostContext
from bootstrap.program.ledger import Ledger
from bootstrap.round.asking import of_each
from bootstrap.round.followed_stage import Certified
from bootstrap.round.following import Following
from bootstrap.round.lost_quorum import LostQuorum, Place
from bootstrap.state.amending import Amending
from bootstrap.state.archived_states import ArchivedStates
from bootstrap.state.archivist import Archivist, Downloads
from bootstrap.state.beginning import Beginning, StageSource
from bootstrap.state.coming_back import ComingBack
from bootstrap.state.evaluation import Evaluation
from bootstrap.state.going_on import GoingOn
from bootstrap.state.lineage import lineage_of
from bootstrap.state.refilling import Refilling
from bootstrap.state.rolling_back import RollingBack
from bootstrap.state.run_folder import PreparedRun
from swarm.averaging.certified_gradient import certified_norm
from swarm.averaging.parts import Parts
from swarm.core.canonical import Value
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId, StageIndex, Step
from swarm.core.pipeline.data_order import DataOrder
from swarm.core.plan import longest_round_s
from swarm.core.round.contribution import Result
from swarm.core.state.stage_chain import Genesis, work_limits
from swarm.core.transfers import MOST_TIMES
from swarm.data.piece_store import WholeFile
from swarm.drawn_papers import DrawnPapers
from swarm.file_donor import FileDonor
from swarm.host_protocol import (
    ADMIT,
    FINISH,
    GOODBYE,
    OVER,
    RELAY,
    REPORT,
    RESULT,
    RUN,
    STANDING,
    Credited,
    RelayOffer,
    StepReport,
)
from swarm.identity.key import verify
from swarm.manifest.model import stage_num_parameters
from swarm.manifest.signed_run import Amendment
from swarm.model.stack import stage_layout
from swarm.network.loop import happened
from swarm.network.outcasts import GuardedTransport
from swarm.network.places import network_of
from swarm.network.transport import Message, Transport
from swarm.optim.stage_step import stage_num_parts
from swarm.witness_service import VoteLog, WitnessService
from verification.kinds.false_work import FalseWork, entry_check

if TYPE_CHECKING:  # fsspec is not loaded unless it is used
    from bootstrap.state.remote_archive import ArchiveCopies
    from bootstrap.state.task_scores import TaskScores

log = logging.getLogger(__name__)

KEPT_CHECKPOINTS = 3
KEEP_UP_S = 1.0
WINDOWS_SILENT = 3.0
"""Windows of local steps are silent for too long at this multiple of the longest of the last ones."""
FAREWELL_S = 600.0
"""Who was heard of in this time is told of the end."""
FIGURES_AFTER = 2
"""Versions; a step's figures are written down when its peers have had so long to report."""
MAX_NOTICES = 1024
MOST_STEPS_WORK = 2
"""Times a member's part of a step, that it may say added nothing."""
NEAR_VERSIONS = 16
"""What peers say of steps further away is not written down."""


class Carrier(Protocol):
    """What carries peers that cannot be dialled to each other, for this host."""

    def offer(self) -> RelayOffer:
        """Where, or why nowhere."""

    def report(self) -> dict[str, int]:
        """How much of the budget is used."""


@dataclass(frozen=True, kw_only=True)
class HostSettings:
    """What the host's owner chooses; the run's settings are everyone's."""

    evaluate_tokens: int = 65536
    """Held-out tokens per evaluation."""
    kept_checkpoints: int = KEPT_CHECKPOINTS
    admission: AdmissionPolicy = field(default_factory=AdmissionPolicy)
    minimum_release: str = "0"
    """The oldest release of the program that the host takes in; an older peer finishes what it does, and goes."""
    mirrors: tuple[str, ...] = ()
    """HTTPS URLs of folders that hold the run's token files."""
    reference: Reference | None = None
    """The curve that the held-out loss is held against."""


class Host:
    """The host's side of one run."""

    def __init__(
        self,
        run: PreparedRun,
        transport: Transport,
        ledger: Ledger,
        settings: HostSettings,
        emit: Callable[[dict[str, Any]], None],
    ) -> None:
        self.run = run
        self.settings = settings
        self._transport = GuardedTransport(transport)
        self.relay: Carrier | None = None
        """If this host carries peers that cannot be dialled to each other."""
        self.copies: ArchiveCopies | None = None
        """If checkpoints are kept at a URL too."""
        self.scoring: TaskScores | None = None
        """If checkpoints are tried at tasks."""
        self._ledger = ledger
        self._emit = emit
        self.downloads = Downloads()
        self.progress = RunProgress(run.settings.model.num_stages, run.version)
        self._began_at = run.version
        self._books = Books()
        self._trained = TrainedTokens()
        self._trouble = Trouble(run.settings)
        self.notices = deque[Notice](maxlen=MAX_NOTICES)
        """What has gone wrong in this run lately, oldest first; all of it is in the ledger."""
        self.noticed = Counter[str]()
        """All of it, by kind."""
        self._heard_at = time.monotonic()
        self._silent_since = -1
        self._ended = False
        earlier = self._remember()
        self._is_taken_up = not earlier
        """Nobody need be told that peers have gone on from what an earlier process of this host began."""
        self._chains = HostChains(run)
        self._followed = Following(run.settings, ledger, self._transport, self._record)
        self._followed.take_up()
        self._beginning = Beginning(
            run,
            earlier,
            self.books.went_back_to(int(earlier[0].version)) if earlier else run.version,
            self.books.lineages.get(0, 0),
            self._has_gone_on,
            self._stage_of,
            self._chains.end,
            self._begin,
            emit,
            self._followed.before_amendment,
        )
        self._changed = asyncio.Event()
        self._files = {pieces.digest: WholeFile(path, pieces) for path, pieces in run.data.pieces().items()}
        if run.base is not None:
            self._files[run.base.pieces.digest] = run.base
        self.vouchers = Vouchers(ledger, self._books)
        beacon = HostBeacon(self._chains, self._followed)
        self.justice = Justice(run, self._transport, ledger, emit, self.progress.present, self._followed, beacon)
        self._postings = Postings(run, self._transport, self.progress, self._followed, emit)
        self.admission = Admission(
            settings.admission,
            run.settings.model.num_stages,
            ledger,
            self._books,
            self.progress,
            self.justice,
            self._postings,
            emit,
        )
        vote_log = VoteLog(run.folder.root / "voted.log")
        self._witness = WitnessService(
            run.run_id,
            run.host_key,
            run.host_key.peer_id,
            run.run_key.peer_id,
            vote_log,
            lambda peer, stage: self._stage_of(peer) == stage,
            self.justice.may_train,
            self._may_lead,
            num_parts=stage_num_parts(run.settings),
            papers=DrawnPapers(
                self._transport,
                entry_check(
                    run.settings,
                    is_of_stage=lambda peer, stage: self.justice.table.was_member(peer),
                    on_lie=_told_by_members,
                ),
                random.SystemRandom(),
            ),
            limits=partial(work_limits, run.settings),
            call_s=run.settings.deadlines.call_s,
            amendments=len(run.signed.amendments),
        )
        lease_s, most = run.settings.deadlines.lease_s, run.settings.limits.max_peers_per_stage
        longest_s = [longest_round_s(run.settings, size, most) for size in stage_num_parameters(run.settings.model)]
        self._silent_after_s = self._trouble.silent_after_s(max(longest_s) / MOST_TIMES)
        self._watched = [
            LostQuorum(
                StageIndex(stage),
                self._transport,
                run.host_key.peer_id,
                run.run_key,
                lease_s,
                run.settings.deadlines.call_s,
                longest_s[stage],
                vote_log,
                partial(self._certified_place, stage),
            )
            for stage in range(run.settings.model.num_stages)
        ]
        self._evaluation = Evaluation(
            run.settings, self._transport, self.progress, settings.evaluate_tokens, self.justice.may_train
        )
        self._archivist = Archivist(
            run,
            self._transport,
            ledger,
            self.progress,
            self.justice.anchor_of,
            self._followed.chain_at,
            settings.kept_checkpoints,
            lambda: lineage_of(run, self.books),
            self.downloads,
        )
        host = HostContext(
            run=run,
            transport=self._transport,
            ledger=ledger,
            books=lambda: self.books,
            progress=self.progress,
            followed=self._followed,
            justice=self.justice,
            beginning=self._beginning,
            emit=emit,
        )
        self.amending = Amending(host=host, is_over=lambda: self.is_over)
        self._rebalancing = Rebalancing(host, self._postings)
        archived = ArchivedStates(run)
        self._coming_back = ComingBack(
            host=host,
            going_on=GoingOn(host, archived, self._begin_anew),
            archived=archived,
            postings=self._postings,
            refilling=Refilling(host=host, postings=self._postings),
        )
        self.rolling_back = RollingBack(
            run=run,
            transport=self._transport,
            ledger=ledger,
            progress=self.progress,
            justice=self.justice,
            followed=self._followed,
            archivist=self._archivist,
            beginning=self._beginning,
            coming_back=self._coming_back,
            amending=self.amending,
            books=lambda: self.books,
            notices=lambda: self.notices,
            begin=lambda geneses, sources, because: self._begin(geneses, sources, because=because),
            emit=emit,
        )

    def serve(self) -> None:
        """Begin to answer."""
        for method, handler in (
            ("ping", self._on_ping),
            (RUN, self._on_run),
            (ADMIT, self._on_admit),
            (REPORT, self._on_report),
            (RESULT, self._on_result),
            (GOODBYE, self._on_goodbye),
            (RELAY, self._on_relay),
        ):
            self._transport.serve(method, handler, max_body_bytes=0)
        FileDonor(self._files, self.settings.mirrors).serve(self._transport)
        self._beginning.serve(self._transport)
        self._coming_back.serve(self._transport)
        self._witness.serve(self._transport)
        self.justice.serve()

    @property
    def books(self) -> Books:
        """As of now: justice and whoever makes vouchers write to the ledger too."""
        self._books.catch_up(self._ledger)
        return self._books

    @property
    def trained(self) -> TrainedTokens:
        """As of now."""
        self._trained.catch_up(self._ledger)
        return self._trained

    def held_out_by_tokens(self) -> list[tuple[int, float]]:
        """(tokens trained on, held-out loss) of each version that was measured, without those of abandoned branches."""
        books, trained = self.books, self.trained
        held_out = sorted(books.held_out.items())
        return [(trained.at(version), loss) for version, loss in held_out if not books.is_abandoned(version)]

    def missing(self) -> dict[int, int]:
        """How many peers of which stages have to come before the run can begin, or go on; empty while it goes on."""
        return self._coming_back.missing if self._beginning.made.is_set() else self._beginning.missing()

    @property
    def has_begun(self) -> bool:
        return self._beginning.made.is_set()

    @property
    def waits_for(self) -> str:
        """What a run waits for that has begun and does not go on, or is to, in words; else empty."""
        return self._coming_back.waits_for or self.amending.waits_for

    @property
    def is_over(self) -> bool:
        """Whether the last step's checkpoint is here: nobody is admitted any more."""
        return self._ended or self.run.version >= self.run.settings.optimizer.total_steps

    # -- the run's course ---------------------------------------------------------------------------------

    async def conduct(self) -> None:
        """From the genesis to the end of the run, or of its era if it is amended (`amending.done`).

        Raises what any part of it raises: none goes on without another.
        """
        await self._archivist.sign_newest(self.books.checkpoints)
        if self.is_over:
            await self._end_once_more()
            return
        await asyncio.to_thread(self._chains.make, self.books.lineages.get(0, 0))
        await self._beginning.made.wait()
        await asyncio.to_thread(self._chains.make, self.books.lineages[0])
        self._heard_at = time.monotonic()
        self.progress.started_at = time.time()
        first = max(self.run.version, self.progress.first_version)
        for watched in self._watched:
            watched.heard()
        self._evaluation.ask_for(first)
        course = asyncio.ensure_future(self._course(first))
        running = {
            course,
            asyncio.ensure_future(self._evaluate()),
            asyncio.ensure_future(self._mend_lost_quorums()),
            asyncio.ensure_future(self.justice.run()),
            asyncio.ensure_future(self._keep_up()),
            asyncio.ensure_future(self.rolling_back.serve()),
            asyncio.ensure_future(self._coming_back.run_for_ever()),
            asyncio.ensure_future(self._postings.run_for_ever()),
            asyncio.ensure_future(self._rebalancing.run_for_ever()),
            asyncio.ensure_future(self.amending.run()),
        }
        try:
            while not course.done():
                ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    task.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        if self.amending.pending is None:
            await self.farewell()
        else:
            self.amending.carry_out()

    async def _end_once_more(self) -> None:
        """The run was over when this process began: the one before may have been killed before the last version was
        evaluated, or anybody told."""
        known = {*self.books.peers} & {*self.progress.peers}

        async def is_there(peer: PeerId) -> None:
            await self._transport.call(peer, STANDING, Message(), timeout_s=5.0, max_body_bytes=0)
            self.progress.has_answered(peer)

        await of_each(known, is_there)
        if self.run.version not in self.books.held_out and self.progress.present(stage=0):
            self._evaluation.ask_for(self.run.version)
            work = [asyncio.ensure_future(self._evaluate()), asyncio.ensure_future(self._evaluation.asked_for.join())]
            try:
                ended, _ = await asyncio.wait(work, timeout=FAREWELL_S, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    task.result()
            finally:
                for task in work:
                    task.cancel()
                await asyncio.gather(*work, return_exceptions=True)
        await self.farewell(known)

    async def _course(self, version: int) -> None:
        """Checkpoints at the versions that are due beyond this one, and the held-out loss there."""
        while (last := self.amending.ends_at) > version:
            due = next(number for number in range(version + 1, last + 1) if self._is_due(number))
            try:
                if not await self._reached(due):
                    continue
                version = due
                path = await self._archivist.archive(version, self._beginning.stages)
                if self.copies is not None:
                    self.copies.wake()
                if self.scoring is not None:
                    self.scoring.wake()
                self._emit({"event": "checkpoint", "version": version, "path": str(path)})
            except VersionGone as gone:  # the host was away too long: the next checkpoint will do
                if self.amending.pending is not None and due == self.amending.ends_at:
                    await asyncio.sleep(1.0)  # the stages have begun again, and are to end later
                    continue
                version = due
                self._emit({"event": "skipped", "version": version, "reason": str(gone)})
            self._evaluation.ask_for(version)
        await self._evaluation.asked_for.join()
        for step in range(version - FIGURES_AFTER, version):  # no step beyond these is going to end
            self._write_figures(step)

    async def _mend_lost_quorums(self) -> None:
        """Let stages go on whose voters have died in such number that nothing can be certified.

        All at once: a stage waits for those beside it, so what one loses in seconds all lose.
        """

        async def mend(stage: int, watched: LostQuorum) -> None:
            # A newcomer must not say where the stage is, nor who its voters are.
            members = [peer for peer in self.progress.present(stage=stage) if self.justice.may_train(peer)]
            changed = await watched.mend(members)
            if changed is not None:
                self._emit({"event": "reconfigured", "stage": stage, "voters": [*changed.voters]})

        while self.progress.done_versions() < self.run.settings.optimizer.total_steps:
            await asyncio.sleep(1.0)
            await asyncio.gather(*(mend(stage, watched) for stage, watched in enumerate(self._watched)))

    async def _certified_place(self, stage: int, claims: Sequence[tuple[int, PeerId]]) -> Place | None:
        """Where the stage stands by the results that those who say so can show."""
        await self._followed.catch_up(stage, claims, most_behind=0)
        followed = self._followed.get(stage)
        return Place(int(followed.version), followed.chain.basis) if followed is not None else None

    async def _keep_up(self) -> None:
        """Follow the stages also where a result did not come."""
        while True:
            await asyncio.sleep(KEEP_UP_S)
            for stage in list(self._followed):
                last_reports = [(peer, self.progress.peers[peer].last) for peer in self.progress.present(stage=stage)]
                reported = [(last.version, peer) for peer, last in last_reports if last is not None]
                await self._followed.catch_up(stage, reported)
                self.justice.anchor_what_is_agreed(StageIndex(stage))
            self._notice_silence()

    def _notice_silence(self) -> None:
        """Once for each version that the stages do not get beyond.

        Windows of local steps are silent while they last: only much longer than the last ones is too long.
        """
        done, silent_s = self.progress.done_versions(), time.monotonic() - self._heard_at
        total = self.run.settings.optimizer.total_steps
        longest_s = self._silent_after_s
        if self.run.settings.has_windows:  # how long one lasts nobody knows before the first has ended
            longest_s = max(longest_s, WINDOWS_SILENT * self.progress.longest_recent_step_s())
        if silent_s < longest_s or done >= total or self._silent_since == done:
            return
        self._silent_since = done
        behind = [stage for stage in range(self.progress.num_stages) if stage not in self.progress.steps[done].ids]
        peers = tuple(peer for stage in behind for peer in self.progress.present(stage=stage))
        self._notice(Notice("stalled", done, behind[0], peers, (), f"no step has ended for {silent_s:.0f} s"))

    def _notice(self, notice: Notice) -> None:
        who = f"{notice.stage}/{','.join(notice.peers) if notice.kind == 'not_finite' else ''}"
        once = f"{notice.kind} {self.books.lineages.get(0, 0)}/{notice.step}/{who}"
        if self._ledger.append("notice", notice.to_facts(), once=once):
            self._keep_in_mind(notice)
            self._emit({"event": "notice", **notice.told(DataOrder.of_run(self.run.settings))})

    def _keep_in_mind(self, notice: Notice) -> None:
        self.notices.append(notice)
        self.noticed[notice.kind] += 1

    def _remember(self) -> list[Genesis]:
        """Replay the ledger: the last genesis and what came of it."""
        for event in self._ledger.events("genesis", "admitted", "result", "figures", "notice", "amendment"):
            facts: Any = event.facts
            if event.kind == "amendment":
                self._forget_stages(facts)
            elif event.kind == "genesis":
                genesis = Genesis.from_value(facts)
                self._trouble.begin_again(genesis.stage, self.books.went_back_to(int(genesis.version)))
                self.progress.begin(int(genesis.version))
            elif event.kind == "notice":
                self._keep_in_mind(Notice.from_facts(facts))
            elif event.kind == "result":
                self._trouble.skipped(facts["stage"], facts["step"], facts["norm"])
                self.progress.take_result(facts, event.at)
            elif event.kind == "figures":
                self.progress.take_figures(facts)
            else:
                self.progress.peers[PeerId(facts["peer"])] = PeerFigures(facts["stage"], event.at, event.at, left=True)
        held = self.books.geneses
        return [held[stage] for stage in sorted(held)] if len(held) == self.run.settings.model.num_stages else []

    def _forget_stages(self, amendment: Value) -> None:
        """The stages begin anew, and may be others."""
        self.progress.begin(int(Amendment.from_value(amendment).version))
        if is_cut_anew(amendment):
            self.progress.peers.clear()
            self._trouble = Trouble(self.run.settings)

    def _has_gone_on(self, stage: int) -> bool:
        """Whether a step was taken since the stage began, as far as is known here."""
        followed = self._followed.get(stage)
        return followed is not None and followed.chain.name != followed.chain.lineage

    def _begin(self, geneses: list[Genesis], sources: Sequence[StageSource], *, because: Value = None) -> None:
        """The stages begin from these states, or begin again `because` of something."""
        self.progress.begin(int(geneses[0].version))
        self._heard_at, self._silent_since = time.monotonic(), -1
        with self._ledger.together():
            if because is not None:
                self._ledger.append("rollback", because)
            for genesis, source in zip(geneses, sources, strict=True):
                self._ledger.append("genesis", genesis.to_value())
                followed = self._followed.begin(genesis)
                self.justice.anchor_genesis(genesis.stage, followed, source.digest_as(source.version, genesis.name))
                self._watched[genesis.stage].heard()
        self._expect_members()
        for genesis in geneses:
            self._trouble.begin_again(genesis.stage, self.books.went_back_to(int(genesis.version)))
        self._changed.set()

    def _begin_anew(self, geneses: list[Genesis], sources: Sequence[StageSource], because: Value) -> None:
        self._begin(geneses, sources, because=because)

    async def farewell(self, known: Iterable[PeerId] = ()) -> None:
        """Tell every peer that the run is over, also who was lately left out of a roster, and those `known`: it may
        live."""
        self._ended = True

        async def tell(peer: PeerId) -> None:
            with contextlib.suppress(TransientError, RemoteError):
                await self._transport.call(peer, FINISH, Message(), timeout_s=5.0, max_body_bytes=0)

        lately = time.time() - FAREWELL_S
        heard = {peer for peer, figures in self.progress.peers.items() if figures.last_heard > lately}
        await asyncio.gather(*(tell(peer) for peer in sorted({*self.progress.present(), *heard, *known})))

    def _is_due(self, version: int) -> bool:
        settings = self.run.settings
        return version % settings.checkpoint.every_steps == 0 or version == self.amending.ends_at

    async def _reached(self, version: int) -> bool:
        """Whether the version is still due once every stage has reported a state of it: the era's end may be another by
        then. Raises VersionGone if the run has gone on beyond it.

        What was reported to an earlier process of this host is not reported again.
        """
        stages = range(self.progress.num_stages)
        while self._is_due(version) and version <= self.amending.ends_at:
            if len(self.progress.digests.get(version, {})) == len(stages):
                return True
            if version <= self.progress.first_version:
                raise VersionGone(f"the run began again, as version {self.progress.first_version}")
            if any(self.progress.is_gone(stage, version, self.run.settings) for stage in stages):
                raise VersionGone(f"no peer of some stage holds version {version} any more")
            self._changed.clear()
            await happened(self._changed, within_s=1.0)
        return False

    async def _evaluate(self) -> None:
        """One version after another, as they are asked for."""
        while True:
            version = await self._evaluation.asked_for.get()
            try:
                loss = await self._evaluation.loss(version)
                self._ledger.append("evaluation", {"version": version, "held_out_loss": loss})
                self._emit({"event": "evaluation", "version": version, "held_out_loss": loss})
                self._compare(version)
            except VersionGone as gone:
                self._emit({"event": "skipped", "version": version, "reason": str(gone)})
            finally:
                self._evaluation.asked_for.task_done()

    def _compare(self, version: int) -> None:
        """The held-out loss with the reference's, if there is one."""
        reference = self.settings.reference
        reason = None if reference is None else reference.why_behind(self.held_out_by_tokens())
        if reason is not None:
            self._notice(Notice("behind_reference", version, None, (), (), reason))

    # -- what peers ask -----------------------------------------------------------------------------------

    async def _on_ping(self, sender: PeerId, request: Message) -> Message:
        return Message({"now": time.time()})

    async def _on_run(self, sender: PeerId, request: Message) -> Message:
        return Message(self.run.signed.to_value())

    async def _on_admit(self, sender: PeerId, request: Message) -> Message:
        fields = Fields("admission request", request.meta)
        chain_end = fields.octets("chain_end", length=32)
        highest = self.run.settings.model.num_stages - 1
        wish = fields.integer("stage", high=highest) if fields.optional("stage") else None
        voucher = fields.text("voucher", max_length=128) if fields.optional("voucher") else ""
        if self.is_over:
            raise RemoteError(OVER, "the run is over: `swarm pull` brings its model", sender)
        network = network_of(await self._transport.host_of(sender))
        ticket = self.admission.admit(sender, wish, chain_end, voucher, network=network)
        answer: dict[str, Value] = {
            "stage": ticket.stage,
            "ticket": ticket.to_value(),
            "minimum_release": self.settings.minimum_release,
        }
        return Message(answer | self.justice.papers_for(sender))

    async def _on_relay(self, sender: PeerId, request: Message) -> Message:
        offer = self.relay.offer() if self.relay is not None else RelayOffer(refusal="this host relays for nobody")
        return Message(offer.to_value())

    # -- what peers tell ----------------------------------------------------------------------------------

    async def _on_report(self, sender: PeerId, request: Message) -> Message:
        fields = Fields("report", request.meta)
        report = StepReport.from_value(fields.message("report"))
        if self._stage_of(sender) != report.stage:
            raise RemoteError("standing", f"{sender} is not admitted to stage {report.stage}", sender)
        report.audits.check(
            run_id=self.run.run_id, auditor=sender, stage=report.stage, version=report.version, verify=verify
        )
        if not self._beginning.made.is_set():
            raise RemoteError("standing", "the run has not begun", sender)
        if not self._is_taken_up:
            self._is_taken_up = True
            self._emit({"event": "recovered", "version": self.progress.done_versions()})
        first, last = self.progress.first_version, self.run.settings.optimizer.total_steps
        if not first < report.version <= last:
            raise RemoteError("protocol", f"a step to version {report.version}; this run goes from {first} to {last}")
        if self.progress.take(sender, report, is_member=self.justice.may_train(sender)):
            self._tell_step(sender, report)
            is_near = abs(report.version - self.progress.done_versions()) < NEAR_VERSIONS
            if report.not_finite and is_near and self.justice.may_train(sender):
                said = "a loss or a gradient was not finite: the work added nothing"
                # What no member can have done is not written down: the ledger keeps it for ever.
                ids = tuple(sorted(set(report.not_finite)))[: MOST_STEPS_WORK * self.run.settings.microbatches_of_one]
                self._notice(Notice("not_finite", report.version - 1, report.stage, (sender,), ids, said))
        self._changed.set()
        step = self.progress.steps.get(report.version - 1)  # nothing is made of a step that somebody names
        known = step is not None and report.stage in step.ids
        return Message(
            {
                "wants_result": not known and self.justice.may_train(sender),
                "minimum_release": self.settings.minimum_release,
                "credit": self._credit_of(sender).to_value(),
            }
        )

    def _credit_of(self, peer: PeerId) -> Credited:
        books = self.books
        held, ranks = books.credit.get(peer, Credit()), books.ranks()
        return Credited(
            num_tokens=held.num_tokens,
            num_microbatches=held.num_microbatches,
            num_steps=held.num_steps,
            rank=ranks.get(peer, 0),
            num_ranked=len(ranks),
        )

    async def _on_result(self, sender: PeerId, request: Message) -> Message:
        result = Result.from_value(Fields("result call", request.meta).message("result"))
        roster = result.roster
        if roster.run_id != self.run.run_id or not verify(result.leader, result.signed_bytes(), result.signature):
            raise RemoteError("signature", "the result is not signed by its leader", sender)
        if self._stage_of(sender) != roster.stage or not self.justice.may_train(sender):
            raise RemoteError("standing", f"{sender} does not train stage {roster.stage}", sender)
        self._followed.take(result)
        self.justice.anchor_what_is_agreed(roster.stage)
        self._changed.set()
        return Message()

    def _expect_members(self, coming: Iterable[PeerId] = ()) -> None:
        """Members' calls come before those of whoever else has made itself a key."""
        members = (peer for followed in self._followed.values() for peer in followed.chain.members)
        self._transport.expect({*members, *coming})

    def _norm(self, result: Result) -> float:
        settings = self.run.settings
        return certified_norm(Parts.of(settings, stage_layout(settings.model, result.roster.stage)), result.parts)

    def _record(self, certified: Certified) -> None:
        """A certified result: for ever in the ledger, once."""
        result, work, name = certified
        roster = result.roster
        stage, step = int(roster.stage), int(roster.step)
        self._watched[stage].heard()
        facts: dict[str, Value] = {
            "stage": stage,
            "step": step,
            "name": name,
            "members": len(roster.contributions),
            "joins": [*roster.joins],
            "leaves": [[d.peer_id, d.reason] for d in roster.leaves],
            "ids": [*sorted({item.microbatch_id for listed in work.values() for item in listed})],
            "credit": [[peer, len(done), sum(item.num_tokens for item in done)] for peer, done in work.items() if done],
            "norm": None if all(part.is_empty for part in result.parts) else self._norm(result),
        }
        with self._ledger.together():  # a charge that is not there with its result never will be
            is_new = self._ledger.append("result", facts, once=f"result {self.books.lineages[stage]}/{stage}/{step}")
            if is_new:
                self.justice.certified(result)
        if not is_new:
            return
        self._expect_members(roster.members_after)
        self._heard_at = time.monotonic()
        before = self.progress.done_versions()
        self.progress.take_result(facts, time.time())
        self._look_at(result, facts["norm"])
        self._say_who_is_left_out(result)
        for departure in roster.leaves:
            self._mark(departure.peer_id, left=True)
            self._emit({"event": "left", "stage": stage, "peer_id": departure.peer_id, "reason": departure.reason})
        for peer in roster.joins:
            self._mark(peer, left=False)
            self._emit({"event": "joined", "stage": stage, "peer_id": peer})
        for version in range(before, self.progress.done_versions()):
            self._write_figures(version - FIGURES_AFTER)
            self._tell_version(version + 1)
        self._changed.set()

    def _say_who_is_left_out(self, result: Result) -> None:
        roster = result.roster
        num_tokens = sum(made.num_tokens for made in roster.committed)
        for made in result.unheard:
            share, step = made.num_tokens / max(1, num_tokens), int(roster.step)
            told = {"stage": int(roster.stage), "step": step, "peer_id": made.peer_id, "share": share}
            self._emit({"event": "left_out", **told})
            ids = tuple(sorted(item.microbatch_id for item in made.work))
            reason = f"{share:.0%} of the step's tokens: its parts did not come in time"
            self._notice(Notice("left_out", step, roster.stage, (made.peer_id,), ids, reason))

    def _tell_version(self, version: int) -> None:
        total, speed = self.run.settings.optimizer.total_steps, self.progress.recent_tokens_per_s()
        num_peers = len(self.progress.present())
        left = (total - version) * self.run.settings.step_tokens(num_peers)
        self._emit(
            {
                "event": "version",
                "version": version,
                "total_steps": total,
                "local_steps": self.run.settings.averaging.local_steps,
                "loss": self.progress.last_loss(),
                "tokens_per_s": speed,
                "peers": num_peers,
                "left_s": left / speed if speed else None,
            }
        )

    def _look_at(self, result: Result, norm: Any) -> None:
        """By the replicas' own rule: what it says of them is what they did."""
        roster = result.roster
        reason = self._trouble.skipped(roster.stage, int(roster.step), norm)
        if reason is not None:
            peers = tuple(made.peer_id for made in roster.contributions)
            ids = tuple(sorted({item.microbatch_id for made in roster.contributions for item in made.work}))
            self._notice(Notice("skipped", int(roster.step), roster.stage, peers, ids, reason))

    def _write_figures(self, step: int) -> None:
        """For people who look at the run after the host was started again."""
        figures = self.progress.steps.get(step)
        if figures is None or not figures.num_targets:
            return
        reason = self._trouble.spiked(figures.loss_sum / figures.num_targets)
        if reason is not None:
            peers = tuple(peer for stage in sorted(figures.peers) for peer in figures.peers[stage])
            self._notice(Notice("loss_spike", step, None, peers, tuple(sorted(figures.ids.get(0, ()))), reason))
        self._ledger.append(
            "figures",
            {
                "step": step,
                "loss_sum": figures.loss_sum,
                "num_targets": figures.num_targets,
                "stale": figures.stale,
                "counted": figures.counted,
                "round_s": figures.round_s,
                "round_bytes": figures.round_bytes,
            },
        )

    def _stage_of(self, peer: PeerId) -> int | None:
        """None if the peer was never admitted."""
        figures = self.progress.peers.get(peer)
        return None if figures is None else figures.stage

    def _may_lead(self, peer: PeerId, stage: StageIndex, step: Step, name: bytes) -> bool:
        """Whether the peer may lead the round that starts from the version of this name: it is a member, or may be one
        by now, for this host hears of results after the stage does."""
        followed = self._followed.get(stage)
        if followed is None or not followed.may_begin(int(step), name):
            return False
        return peer in followed.chain.members or (self._stage_of(peer) == stage and self.justice.may_train(peer))

    def _mark(self, peer: PeerId, *, left: bool) -> None:
        if peer in self.progress.peers:
            self.progress.peers[peer].left = left

    def _tell_step(self, sender: PeerId, report: StepReport) -> None:
        self._emit(
            {
                "event": "step",
                "peer_id": sender,
                "stage": report.stage,
                "step": report.version - 1,
                "loss_sum": report.loss_sum,
                "num_targets": report.num_targets,
                "microbatches": report.microbatches,
                "stale": report.stale,
                "counted": report.counted,
                "round_s": report.round_s,
                "round_bytes": report.round_bytes,
                "overlap": report.overlap,
                "gradient_norm": report.gradient_norm,
                "sent_bytes": report.sent_bytes,
                "received_bytes": report.received_bytes,
                "reassigned": report.reassigned,
                "busy_s": report.busy_s,
                "exact_s": report.exact_s,
            }
        )

    async def _on_goodbye(self, sender: PeerId, request: Message) -> Message:
        figures = self.progress.peers.get(sender)
        if figures is not None:
            figures.left = True
            self._coming_back.goodbye(sender, Fields("goodbye", request.meta).integer("version"))
            self._emit({"event": "goodbye", "peer_id": sender, "stage": figures.stage})
        return Message()

    def outcome(self) -> dict[str, Any]:
        """What came of the run: its last checkpoint, and its held-out loss where it began and ended."""
        first, last = self._began_at, self.run.settings.optimizer.total_steps
        held_out, path = self.books.held_out, self._archivist.paths.get(last)
        return {
            "held_out_loss": {"start": held_out.get(first), "end": held_out.get(last)},
            "checkpoint": None if path is None else str(path),
        }

    def report(self) -> dict[str, Any]:
        """The run's figures for `--report`."""
        summary = self.progress.summary() | self.outcome()
        summary["run_id"] = self.run.run_id
        summary["held_out_by_tokens"] = self.held_out_by_tokens()
        summary["amendments"] = self.amending.history
        order = DataOrder.of_run(self.run.settings)
        summary["notices"] = [notice.told(order) for notice in self.notices]
        summary["relay"] = None if self.relay is None else self.relay.report()
        summary["credit"] = {peer: credit.num_tokens for peer, credit in self.books.leaders(len(self.books.credit))}
        return summary


def _told_by_members(case: FalseWork) -> None:
    """Whoever votes sees the same, and members bring it."""
    log.info("%s claims work that is not its own at step %d", case.accused, case.version)
