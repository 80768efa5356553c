"""The volunteer's daemon and its life: join, train, drain, leave."""

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import torch

from peer.audit.verdicts import Verdicts, Word, passes
from peer.directory.host import Host
from peer.directory.kept_answers import KeptAnswers
from peer.directory.limited_transport import LimitedTransport
from peer.machine.core_share import ComputeThreads
from peer.owner.limits import VolunteerSettings
from peer.owner.tally import WorkTally
from peer.pipeline.compute import WorkThread
from peer.pipeline.memory_pressure import MemoryPressure
from peer.pipeline.screens import KnownStanding
from peer.program.at_stage import Belongings, PeerAtStage, work_threads
from peer.program.composition import Composition
from peer.program.joining import Joined, Joining, OnRun
from peer.program.reports import Reports
from peer.program.shared import Shared
from peer.round.stage_steps import StageSteps
from peer.stage.events import Applied
from swarm.core.errors import LocalError, RemoteError, ShutOutError, TransientError, UpgradeNeeded
from swarm.core.ids import PeerId, StageIndex
from swarm.disk.room import disk_room
from swarm.host_protocol import FINISH, GOODBYE, OVER
from swarm.identity.key import Identity
from swarm.network.outcasts import GuardedTransport
from swarm.network.transport import Directory, Message, Transport
from swarm.release import check_release
from verification.audit.standing import FAULT
from verification.audit.verdicts import Ban, Pardon, Quarantine
from verification.kinds.mismatch import MISMATCHES

log = logging.getLogger(__name__)

CLOSING_S = 3.0
"""What its threads compute is waited for so long, once a peer has said goodbye."""
LINGER_S = 60.0
"""After the last step a peer serves evaluations and state until the host says it is over, at most this long alone."""


class PeerDaemon:
    """One peer of one stage of one run."""

    def __init__(
        self,
        volunteer: VolunteerSettings,
        identity: Identity,
        transport: Transport,
        directory: Directory,
        host: PeerId,
        *,
        rng: random.Random | None = None,
        shared: Shared | None = None,
        kept: KeptAnswers | None = None,
        threads: ComputeThreads | None = None,
        work_thread: Callable[..., WorkThread] = WorkThread,
        composition: Callable[[], Composition] = Composition,
        standing: KnownStanding | None = None,
        on_run: OnRun | None = None,
        on_step: Callable[[StageSteps, Applied], None] | None = None,
        say: Callable[[str], None] = log.info,
        waits_for: Callable[[str], None] = log.info,
    ) -> None:
        """`shared`: with the other peers of the same daemon; None: it is alone. `kept`: what the host has said before.
        `threads`: how many to compute with; None: always the volunteer's. `work_thread`: what runs heavy jobs, called
        as `WorkThread` is. `composition`: what to be made of, at each stage anew. `standing`: of others, as far as it
        is known.
        `on_run` is told of the run before this peer asks to be admitted to it, `on_step` of each step that it took.

        `say` tells the owner something, `waits_for` what this peer waits for before it can train.
        """
        self.say = say
        self.volunteer = volunteer
        self.identity = identity
        self.shared = shared or Shared.of(volunteer, [identity.peer_id])
        self._threads = threads or ComputeThreads(volunteer.threads)
        self._work_thread = work_thread
        self.tally = WorkTally(identity.peer_id)
        self._on_run = on_run
        self.at: PeerAtStage | None = None
        """This peer at the stage that it serves, or last served; None before it has joined any."""
        self.live: PeerAtStage | None = None
        """The same, once it serves."""
        self.limited = LimitedTransport(transport, self.shared.line)
        self.standing = standing or KnownStanding()
        self.transport = GuardedTransport(self.limited, passes(self.standing, host))
        self.directory = directory
        self.host = Host(self.transport, host, volunteer.invite, kept=kept)
        self.finished = asyncio.Event()
        self.reports = Reports(self.host, self.transport, directory, self._check_release)
        self._outdated: UpgradeNeeded | None = None
        self._shut_out_by: Ban | Quarantine | None = None
        """What is said of this peer itself."""
        self.verdicts = Verdicts(
            identity.peer_id,
            self.standing,
            self.transport,
            on_lost=self._lost,
            counts=self._counts,
            on_self=self._on_self,
        )
        rng = rng or random.Random(secrets.randbits(64))
        self._joining = Joining(
            volunteer,
            self.shared,
            identity,
            self.transport,
            self.limited,
            directory,
            self.host,
            self.verdicts,
            rng,
            waits_for,
            work_thread,
        )
        self._own = Belongings(
            volunteer=volunteer,
            identity=identity,
            limited=self.limited,
            transport=self.transport,
            directory=directory,
            host=self.host,
            permit=self.shared.permit,
            tally=self.tally,
            reports=self.reports,
            verdicts=self.verdicts,
            rng=rng,
            threads=self._threads.exact,
            composition=composition,
            on_step=on_step,
        )
        self._serves: StageIndex | None = None
        """The stage, or where this peer is on its way to; None until it has joined: it may be a member come back."""

    async def run(self, stop: asyncio.Event) -> None:
        """Join, train until the run is over or `stop`, then drain and leave.

        Raises SettingsError when this machine cannot serve the run, LocalError when something here broke,
        DiskFullError when the disk took no more.
        """
        with disk_room(self.volunteer.folder):
            await self._run(stop)

    async def _run(self, stop: asyncio.Event) -> None:
        torch.set_num_threads(self._threads.number)
        self.transport.serve("ping", self._on_ping, max_body_bytes=0)
        self.transport.serve(FINISH, self._on_finish, max_body_bytes=0)
        joining = asyncio.ensure_future(self._joining.join(self.volunteer.stage, self._on_run))
        ends = {asyncio.ensure_future(stop.wait()), asyncio.ensure_future(self.finished.wait())}
        try:
            while True:
                await asyncio.wait({joining, *ends}, return_when=asyncio.FIRST_COMPLETED)
                if not joining.done() or self.finished.is_set():
                    break
                try:
                    joined = joining.result()
                except RemoteError as error:
                    if error.kind != OVER:
                        raise
                    self.finished.set()
                    break
                target = await self._live(joined, stop)
                if target is None or stop.is_set() or self.finished.is_set():
                    break
                if self.at is not None and self.at.amended.is_set():
                    joining = asyncio.ensure_future(self._joining.join_amended(joined, self._on_run))
                else:
                    joining = asyncio.ensure_future(self._joining.join(target, self._on_run))
            if self._outdated is not None:
                raise self._outdated
            verdict = self._shut_out_by
            if verdict is not None:
                raise ShutOutError(
                    f"this peer is {_what(verdict)} from the run: {verdict.kind} at step {verdict.version} of stage "
                    f"{verdict.stage}; the host keeps the evidence {verdict.evidence_digest.hex()[:16]}"
                )
        finally:
            for waiting in (joining, *ends):
                waiting.cancel()
            await asyncio.gather(joining, *ends, return_exceptions=True)
            self._close_last()
            self.shared.left(self.identity.peer_id)

    def _close_last(self) -> None:
        """Let go of what was kept of the last stage: on its way to the next a peer still shows it to auditors."""
        if self.at is not None:
            self.at.close()

    def _lost(self, peer: PeerId) -> None:
        """The peer may not train any more."""
        if self.at is not None:
            self.at.lost(peer)

    def _counts(self, quarantine: Quarantine, sender: PeerId) -> bool:
        """Whether what jurors found counts here. Raises RemoteError or TransientError."""
        return self.at is not None and self.at.verifying.counts(quarantine, sender)

    def _on_self(self, word: Word) -> None:
        """The run key's word on this peer."""
        if isinstance(word, Quarantine) and word.kind in MISMATCHES:
            log.warning("jurors have found this peer guilty of %s: it waits for the host's word", word.kind)
        elif isinstance(word, Quarantine) and word.kind == FAULT:
            if self.at is not None:
                self.at.fault()
        elif isinstance(word, Pardon):
            if self.at is not None:
                self.at.pardon()
        elif isinstance(word, Ban | Quarantine):
            self._shut_out_by = word
            self.finished.set()

    def _check_release(self, minimum: str) -> None:
        """Drain and go, keeping what is here, if the host takes in newer releases only."""
        try:
            check_release(minimum)
        except UpgradeNeeded as outdated:
            self._outdated = outdated
            self.finished.set()

    # -- living -------------------------------------------------------------------------------------------

    async def _live(self, joined: Joined, stop: asyncio.Event) -> StageIndex | None:
        """Train until the run is over or `stop`, or until this peer is to go to the stage that is returned.

        That is its own where the run was amended: it is joined anew.
        """
        memory = MemoryPressure(joined.settings, joined.model)
        threads = work_threads(joined, self.shared.permit, self._threads.follower, memory, make=self._work_thread)
        services = list[asyncio.Future[None]]()
        at = None
        self._close_last()
        try:
            at = self.at = PeerAtStage(self._own, joined, threads, memory)
            self._serves = at.stage
            await at.serve()
            services += [asyncio.ensure_future(work) for work in at.works()]
            self.live = at
            await self._until_over(stop, at, services)
            if not self.finished.is_set() and not self._is_amended(at, stop):
                await self._unless_finished(at.drain())
                if at.target is None:
                    said = await at.hand_over()
                    if said is not None:
                        self.say(said)
        finally:
            if at is not None:
                await self._leave(at, services)
            close_by = time.monotonic() + CLOSING_S
            for thread in threads.all:
                thread.close(timeout_s=max(0.5, close_by - time.monotonic()))
        return at.stage if self._is_amended(at, stop) else at.target

    @staticmethod
    def _is_amended(at: PeerAtStage, stop: asyncio.Event) -> bool:
        """Whether the peer leaves only to join again, under other settings."""
        return at.amended.is_set() and not stop.is_set()

    async def _leave(self, at: PeerAtStage, services: Sequence[asyncio.Future[None]]) -> None:
        """Say goodbye to the stage."""
        at.stop_beginning()
        for service in services:
            service.cancel()
        await asyncio.gather(*services, return_exceptions=True)
        if at.target is not None:
            self._serves = at.target
        await at.leave()
        if at.amended.is_set():
            return
        with contextlib.suppress(TransientError, RemoteError):
            await self.host.call(GOODBYE, {"version": int(at.steps.version)}, timeout_s=2.0)

    async def _until_over(self, stop: asyncio.Event, at: PeerAtStage, services: Sequence[asyncio.Future[None]]) -> None:
        """Until the run is finished, or this peer is told to stop or is to move; raises what broke."""
        waits = [asyncio.ensure_future(event.wait()) for event in (stop, self.finished, at.amended)]
        failure = at.context.tasks.failure
        over_since: float | None = None
        try:
            while not stop.is_set() and not self.finished.is_set() and not at.amended.is_set():
                watched: list[asyncio.Future[Any]] = [*waits, *services, failure]
                await asyncio.wait(watched, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                if failure.done():
                    raise _broken(f"stage {at.stage}", failure.exception())
                for service in services:
                    if service.done() and service.exception() is not None:
                        raise _broken("a service of this peer died", service.exception())
                if at.target is not None:
                    return
                too_much = self.shared.room.asks_to_leave(self.identity.peer_id)
                if too_much:
                    raise LocalError(too_much)
                if at.steps.is_run_over:
                    over_since = over_since or time.monotonic()
                    if time.monotonic() - over_since > LINGER_S and not await self._host_lives():
                        return
        finally:
            for wait in waits:
                wait.cancel()

    async def _unless_finished(self, work: Coroutine[Any, Any, None]) -> None:
        """Until it is done, or the run is over for this peer."""
        waits = [asyncio.ensure_future(work), asyncio.ensure_future(self.finished.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if waits[0].done():
                waits[0].result()
        finally:
            for wait in waits:
                wait.cancel()

    async def _host_lives(self) -> bool:
        try:
            await self.host.call("ping", {}, timeout_s=5.0)
        except (TransientError, RemoteError):
            return False
        return True

    async def _on_ping(self, sender: PeerId, request: Message) -> Message:
        return Message({"now": time.time(), "stage": self._serves})

    async def _on_finish(self, sender: PeerId, request: Message) -> Message:
        if sender != self.host.peer_id:
            raise RemoteError("standing", "only the host ends a run", sender)
        self.finished.set()
        return Message()


def _broken(what: str, error: BaseException | None) -> Exception:
    """What is raised where something of this peer's has ended by `error`."""
    return error if isinstance(error, OSError) else LocalError(f"{what}: {error!r}")


def _what(verdict: Ban | Quarantine) -> str:
    return "banned" if isinstance(verdict, Ban) else "quarantined"
