"""What a peer gets before it can take part: the run, its ticket, a model that fits, tokens,
and a state.
"""

import asyncio
import contextlib
import hashlib
import logging
import random
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from kernels.threads import Threads
from peer.audit.verdicts import Verdicts
from peer.directory.host import Host
from peer.directory.limited_transport import LimitedTransport
from peer.directory.neighbours import stage_topic
from peer.machine.load import folder_bytes
from peer.owner.limits import VolunteerSettings
from peer.pipeline.compute import Urgency, WorkThread
from peer.program.shared import Shared
from peer.state.donors import donors_of
from peer.state.downloads import HeldFile
from peer.state.first_state import FirstState
from peer.state.run_files import RunFiles
from swarm.checkpoint.state import StageState
from swarm.core.audit.hash_chain import HashChain
from swarm.core.audit.ticket import Ticket
from swarm.core.canonical import Value, signed_bytes
from swarm.core.errors import AmendedError, RemoteError, SettingsError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId, RunId, StageIndex
from swarm.core.pipeline.compute_mode import ComputeMode, modes
from swarm.core.plan import TOKENS, held_token_bytes, stage_memory_bytes
from swarm.core.settings import RunSettings
from swarm.core.state.stage_chain import StageChain
from swarm.data.piece_store import PieceFolder
from swarm.host_protocol import ADMIT
from swarm.identity.key import Identity, verify
from swarm.local.compiling import rehearse_apart
from swarm.manifest.model import stage_size
from swarm.manifest.signed_run import SignedRun
from swarm.model.adapters.base import Base, base_layout
from swarm.model.families import validate_config
from swarm.model.stack import stage_layout
from swarm.model.stage import StageModel
from swarm.network.loop import in_thread_to_its_end
from swarm.network.transport import Directory, Transport
from swarm.release import check_release

log = logging.getLogger(__name__)

BASE_TRIES, BASE_AGAIN_S = 8, 5.0
"""To have all of the frozen base: what came is not asked for again."""
DONORS_SOON_S = 2.0
"""Where some donors of pieces are connected by then, no others are waited for."""

OnRun = Callable[[SignedRun, RunSettings], Awaitable[None]]
"""Told of the run before anything of it is joined; what it raises ends the peer."""


class JoinedTokens(NamedTuple):
    """Of what a microbatch is read, and how more of it comes."""

    files: RunFiles
    train: HeldFile[PieceFolder]
    held_out: HeldFile[PieceFolder]


class StateToEnter:
    """The state that a peer enters its stage with, until the stage takes it: it is in memory once."""

    def __init__(self, state: StageState) -> None:
        self._state: StageState | None = state

    def take(self) -> StageState:
        """Whoever holds what was joined holds it no more."""
        state, self._state = self._state, None
        assert state is not None, "the state was taken before"
        return state


class Joined(NamedTuple):
    """What a peer has when it has joined."""

    settings: RunSettings
    run_id: RunId
    signed_run: SignedRun
    ticket: Ticket
    draws: HashChain
    model: StageModel
    state: StateToEnter
    chain: StageChain
    folder: Path
    """Of the run."""
    snapshots: Path
    tokens: JoinedTokens | None
    """At stage 0."""


class Joining:
    """How one peer joins a stage: `join`, as often as it goes to another."""

    def __init__(
        self,
        volunteer: VolunteerSettings,
        shared: Shared,
        identity: Identity,
        transport: Transport,
        limited: LimitedTransport,
        directory: Directory,
        host: Host,
        verdicts: Verdicts,
        rng: random.Random,
        say: Callable[[str], None],
        work_thread: Callable[..., WorkThread],
    ) -> None:
        """`say` is told in words what is waited for; `work_thread` as `PeerDaemon` has it."""
        self._work_thread = work_thread
        self._say = say
        self._volunteer = volunteer
        self._shared = shared
        self._identity = identity
        self._transport = transport
        self._limited = limited
        self._directory = directory
        self._host = host
        self._verdicts = verdicts
        self._rng = rng

    async def join(self, wish: int | None, on_run: OnRun | None) -> Joined:
        """Everything this peer needs to take part in the stage it wishes for; None: wherever the host sends it.

        Raises SettingsError where nothing fits this machine, TransientError, RemoteError.
        """
        while True:
            try:
                return await self._join(wish, on_run)
            except AmendedError as error:
                log.info("%s", error)
                if error.told_by != self._host.peer_id:
                    await self._host.hear_run_of(error.told_by)

    async def join_amended(self, before: Joined, on_run: OnRun | None) -> Joined:
        """The same, once the run that was joined has been amended: at the same stage, unless the stages are others."""
        with contextlib.suppress(TransientError):
            _, settings, _ = await self._host.run()
            if settings.model.stage_layers != before.settings.model.stage_layers:
                return await self.join(self._volunteer.stage, on_run)
        return await self.join(before.ticket.stage, on_run)

    async def _join(self, wish: int | None, on_run: OnRun | None) -> Joined:
        signed_run, settings, name = await self._host.run()
        if on_run is not None:
            await on_run(signed_run, settings)
        run_key, amendments = signed_run.run_key, len(signed_run.amendments)
        self._verdicts.serve(name, run_key)
        seed = self._draw_seed(name, amendments)
        draws = await asyncio.to_thread(HashChain.of_run, seed, settings.optimizer.total_steps)
        if wish is not None and amendments and wish >= settings.model.num_stages:
            self._say(f"stage {wish} is none any more: the run was amended to {settings.model.num_stages} stages")
            wish = None
        ticket = await self._admitted(wish, draws.end, name, run_key, amendments)
        stage = ticket.stage
        layout = stage_layout(settings.model, stage)
        await self._rehearse(settings)
        folder = self._volunteer.folder / "runs" / name[:16]
        folder.mkdir(parents=True, exist_ok=True)
        # All libraries are loaded, and nothing else is. A place that is taken after this peer has left would stay so.
        model = await in_thread_to_its_end(self._model_that_fits, settings, stage, folder)
        snapshots = folder / f"snapshots-{self._identity.peer_id[-8:]}"
        files = RunFiles(
            settings=settings,
            host=self._host,
            transport=self._transport,
            limited=self._limited,
            folder=folder,
            donors=partial(self._donors, name, stage),
            downloads=self._shared.downloads,
        )
        if settings.model.has_base:
            model = await self._on_base(model, files, stage)
        tokens = None
        if stage == 0:
            tokens = JoinedTokens(files, *await files.open())
        wanted = FirstState(
            settings=settings,
            run_id=name,
            run_key=run_key,
            amendments=amendments,
            stage=stage,
            layout=layout,
            me=self._identity.peer_id,
            host=self._host,
            transport=self._transport,
            directory=self._directory,
            kept=snapshots,
            on_begun=partial(self._verdicts.begin, settings),
            threads=Threads(self._volunteer.threads),
            say=self._say,
            rng=self._rng,
        )
        state, chain = await wanted.get()
        return Joined(
            settings, name, signed_run, ticket, draws, model, StateToEnter(state), chain, folder, snapshots, tokens
        )

    def _draw_seed(self, name: RunId, amendments: int) -> bytes:
        """Secret, and the same whenever this identity joins the run under so many amendments."""
        return hashlib.sha256(self._identity.sign(signed_bytes("draw-seed", [name, amendments]))).digest()

    async def _admitted(
        self, wish: int | None, chain_end: bytes, name: RunId, run_key: PeerId, amendments: int
    ) -> Ticket:
        """This peer's ticket; who is banned by now is shut out."""
        invite = self._volunteer.invite
        voucher = invite.voucher if invite is not None else ""
        meta: dict[str, Value] = {"stage": wish, "chain_end": chain_end, "voucher": voucher}
        about = f"admit {name} {wish} {amendments}"
        answer = await self._host.answer(about, ADMIT, meta)
        fields = Fields("admission", answer)
        ticket = Ticket.from_value(fields.message("ticket"))
        ticket.check(run_id=name, run_key=run_key, amendments=amendments, verify=verify)
        check_release(fields.text("minimum_release", max_length=32))
        if (ticket.peer_id, ticket.chain_end) != (self._identity.peer_id, chain_end):
            raise RemoteError(
                "ticket", f"the host's ticket is for {ticket.peer_id}, not for this peer", self._host.peer_id
            )
        self._verdicts.take_all(fields)
        self._host.kept.keep(about, answer)
        return ticket

    async def _on_base(self, model: StageModel, files: RunFiles, stage: StageIndex) -> StageModel:
        """The stage on its frozen base, fetched by now. Raises TransientError when nobody gives the rest of it."""
        held, wanted = await files.open_base(stage)
        base = held.folder
        for left in range(BASE_TRIES - 1, -1, -1):
            missing = [index for index in wanted if index not in base]
            if missing:
                missing_bytes = sum(stop - start for start, stop in map(base.pieces.span, missing))
                self._say(f"fetching {missing_bytes / 1e6:.1f} MB of the frozen base")
            try:
                await files.fetch(held, missing)
                break
            except TransientError:
                if not left:
                    raise
                await asyncio.sleep(BASE_AGAIN_S)
        return await asyncio.to_thread(lambda: model.on(Base(base_layout(files.settings.model), base.data)))

    def _model_that_fits(self, settings: RunSettings, stage: StageIndex, folder: Path) -> StageModel:
        """On the first device that it fits. Raises SettingsError if it fits none."""
        volunteer = self._volunteer
        *better, last = volunteer.devices
        for device in better:
            try:
                model = StageModel(settings.model, stage, device=device)
                model = model.computing(self._mode_that_fits(volunteer, settings, stage, device, folder))
            except SettingsError as error:
                self._say(f"computing on the CPU: {error}")
                volunteer = replace(volunteer, gpu=None)
            else:
                self._say(volunteer.computes_on)
                return model
        if not better and volunteer.computes_on:
            self._say(volunteer.computes_on)
        model = StageModel(settings.model, stage, device=last)
        return model.computing(self._mode_that_fits(volunteer, settings, stage, last, folder))

    def _mode_that_fits(
        self,
        volunteer: VolunteerSettings,
        settings: RunSettings,
        stage: StageIndex,
        device: str,
        folder: Path,
    ) -> ComputeMode:
        """How much of a microbatch this peer computes at once. Raises SettingsError if the stage fits in no way."""
        hidden_size = validate_config(settings.model.config_json).hidden_size
        tokens, size = held_token_bytes(settings) if stage == 0 else 0, stage_size(settings.model, stage)

        def items(mode: ComputeMode) -> dict[str, int]:
            found = stage_memory_bytes(settings, size, hidden_size, device, stage=stage, mode=mode)
            return found | {f"disk.{TOKENS}": tokens}

        mode = self._shared.room.first_that_fits(
            self._identity.peer_id, stage, modes(settings), items, volunteer, held_bytes=folder_bytes(folder)
        )
        if mode != ComputeMode.of_run(settings):
            log.info(
                "to fit into memory, %d of a microbatch's %d samples are computed at once, and forward twice",
                mode.samples_at_once,
                settings.batch.microbatch_size,
            )
        return mode

    async def _donors(self, name: RunId, stage: StageIndex) -> Sequence[PeerId]:
        """Who serves the stage on other machines by now, if the directory tells."""
        try:
            topic = stage_topic(name, stage)
            found = await donors_of(self._directory, self._transport, topic, self._rng, soon_s=DONORS_SOON_S)
        except TransientError as error:
            log.info("the directory: %s", error)
            return []
        return [donor for donor in found if donor not in self._shared.downloads.peers]

    async def _rehearse(self, settings: RunSettings) -> None:
        """On a thread that is not waited for: where kernels are compiled it takes longer than leaving may."""
        thread, leaving = self._work_thread("rehearsal"), threading.Event()
        try:
            await thread.run(Urgency.ROUND, lambda: rehearse_apart(settings, leaving))
        finally:
            leaving.set()
            thread.close(timeout_s=0.0)
