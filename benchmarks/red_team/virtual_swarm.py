"""A host and its peers in one virtual loop, some of whom lie, and everything about the others that must hold.

What an honest peer's own program does is seen here as it happens: the steps it takes, what ends it, what it answers
without knowing why.
"""

import asyncio
import functools
import hashlib
import logging
import random
import tempfile
from collections.abc import Coroutine, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.red_team.mutations import SCALE
from benchmarks.red_team.virtual_time import AtOnce, StandsStillError, VirtualLoop, WorkInLoop, run_virtually
from benchmarks.whole_model import WholeModel
from bootstrap.program.host import Host, HostSettings
from bootstrap.program.ledger import Ledger
from bootstrap.state.run_folder import PreparedRun, prepare_run
from peer.directory.kept_answers import KeptAnswers
from peer.owner.limits import VolunteerSettings
from peer.pipeline import exchange_store
from peer.program.daemon import PeerDaemon
from peer.round.stage_steps import StageSteps
from peer.stage.events import Applied
from swarm.averaging.certified_gradient import squares_of
from swarm.core.audit.hash_chain import HashChain
from swarm.core.ids import PeerId
from swarm.core.kept import once
from swarm.core.round.contribution import Result
from swarm.data.batches import Batch, BatchReader, held_out_batches
from swarm.data.token_file import TokenFile
from swarm.identity.key import Identity
from swarm.manifest.file import parse_manifest
from swarm.model.stage import StageModel
from swarm.network import memory
from swarm.network.identity_file import save_identity
from swarm.network.memory import MemoryNetwork, MemoryTransport
from swarm.network.service import decode_meta
from swarm.network.transport import MAX_META_BYTES, Message
from verification.pipeline.headers import BirthRecord

Event = dict[str, Any]

IN_MEMORY = Path("/dev/shm")
"""Where runs have their files, if the machine has it."""
OPENING_S = 0.05
"""The last stage's peers come so much later: the run begins with everybody."""
MOST_STEP_S = 12.5
"""Of virtual time, of each step on average; a run that takes longer does not go on."""
MICROBATCH_TOKENS = 16
"""Of two samples of eight."""
MAX_MESSAGE_BYTES = MAX_META_BYTES // SCALE
"""Without its body."""

FORWARD = "forward"
"""The call that carries a microbatch to the next stage, and its gradient back."""

_MANIFEST = """
[run]
name = "attacked"
trust = "public"
[model]
stages = 2
[model.config]
model_type = "llama"
vocab_size = 256
hidden_size = 16
intermediate_size = 16
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
max_position_embeddings = 16
[data]
text = ["text.txt"]
sequence_length = 8
held_out_share = 0.1
[batch]
microbatch_size = 2
target_tokens = {target_tokens}
[optimizer]
learning_rate = 0.01
warmup_steps = 2
total_steps = {steps}
[checkpoint]
every_steps = 100
snapshot_every = 4
[limits]
max_peers_per_stage = 16
[deadlines]
call_s = 2.0
hop_s = 8.0
step_s = 5.0
straggler_s = 0.5
drain_s = 1.0
"""


@dataclass(frozen=True)
class Setting:
    """How many peers each of the two stages has, and which of them lie."""

    peers: tuple[int, int]
    liars: tuple[tuple[int, int], ...]
    """(stage, index in it)."""
    steps: int = 12
    microbatches: int = 8
    seed: int = 0
    """Of identities and routes."""

    def honest(self) -> "Setting":
        """The same, where nobody lies."""
        return replace(self, liars=())


@dataclass(eq=False)
class VirtualPeer:
    """One peer and the task it lives in."""

    stage: int
    index: int
    identity: Identity
    is_liar: bool
    daemon: PeerDaemon
    stop: asyncio.Event
    task: asyncio.Task[None]
    killed: bool = False

    @property
    def peer_id(self) -> PeerId:
        return self.identity.peer_id


class PeerMaker:
    """How a liar's daemon is made; an honest one's as this class does it."""

    def make(self, swarm: "VirtualSwarm", stage: int, index: int, identity: Identity, **given: Any) -> PeerDaemon:
        """`given` are the volunteer's settings, the directory and what else `PeerDaemon` wants."""
        transport = swarm.network.transport(identity)
        directory = swarm.network.directory(identity)
        return PeerDaemon(given.pop("volunteer"), identity, transport, directory, swarm.host_id, **given)


@dataclass
class Seen:
    """What an onlooker saw of a run."""

    events: list[Event] = field(default_factory=list)
    """The host's."""
    applied: dict[tuple[int, int], dict[PeerId, tuple[bytes, bytes]]] = field(default_factory=dict)
    """Of each stage and version: its name and the digest of the weights at each honest peer."""
    results: dict[tuple[int, int], Result] = field(default_factory=dict)
    """Certified, by stage and step."""
    squares: dict[tuple[int, int], tuple[float, ...]] = field(default_factory=dict)
    """Of the parts of these, as their bytes have it."""
    receipts: dict[tuple[int, PeerId], set[tuple[int, int]]] = field(default_factory=dict)
    """Which microbatches, and attempts, a peer has really been through with its neighbours, by stage."""
    broken: list[str] = field(default_factory=list)
    """What broke in an honest peer or in the host, in words."""
    liars_ended: list[str] = field(default_factory=list)
    """What ended liars' own processes."""
    members: dict[int, tuple[PeerId, ...]] = field(default_factory=dict)
    """Of each stage, at the end."""
    held_out: float = float("nan")
    """Of honest peers' last weights, in nats a token."""
    version: int = 0
    shut_out_by_peers: set[PeerId] = field(default_factory=set)
    """Honest ones whom another honest peer holds to be shut out at the end."""
    tasks: int = 0
    """Alive in the loop at the end of the steps."""
    elapsed_s: float = 0.0
    """Virtual."""
    weights: dict[tuple[int, int], NDArray[np.float32]] = field(default_factory=dict)
    """Of each stage and version, at an honest peer; if they are kept."""
    losses: dict[int, float] = field(default_factory=dict)
    """Held-out loss of these, by version."""
    alone: dict[int, float] = field(default_factory=dict)
    """The same of one process that nobody lies to, on the microbatches that were counted."""
    counted_tokens: int = 0
    """Of these microbatches."""
    credit: dict[PeerId, int] = field(default_factory=dict)
    """Tokens in the host's books."""


_OWNER: ContextVar[PeerId | None] = ContextVar("owner", default=None)
"""In whose program the present task runs."""


def owner() -> PeerId | None:
    """The peer in whose program this is asked."""
    return _OWNER.get()


class _OwnedTask(asyncio.Task[Any]):
    """Which knows in whose program it was begun, to its last moment."""

    owner: PeerId | None


class _Network(MemoryNetwork):
    """Whose program breaks in a call is known: the callee's."""

    def __init__(self, rng: random.Random, seen: "VirtualSwarm") -> None:
        super().__init__(rng)
        self._swarm = seen

    async def exchange(
        self, caller: PeerId, callee: MemoryTransport, method: str, request: Message, timeout_s: float
    ) -> tuple[bytes, memoryview]:
        before = _OWNER.get()
        _OWNER.set(callee.peer_id)
        try:
            self._swarm.brought(callee.peer_id, method, request)
            answer = await super().exchange(caller, callee, method, request, timeout_s)
            self._swarm.overhear(caller, callee.peer_id, method, request, answer)
            return answer
        finally:
            _OWNER.set(before)


class _Errors(logging.Handler):
    """What an honest program logs as an error is a bug of its own."""

    def __init__(self, swarm: "VirtualSwarm") -> None:
        super().__init__(logging.ERROR)
        self._swarm = swarm

    def emit(self, record: logging.LogRecord) -> None:
        said = record.getMessage()
        if record.exc_info is not None and record.exc_info[1] is not None:
            said += f": {record.exc_info[1]!r}"
        self._swarm.broke(_OWNER.get(), f"{record.name}: {said}")


class VirtualSwarm:
    """Runs once: `seen` is what came of it."""

    def __init__(self, setting: Setting, maker: PeerMaker, *, rng: random.Random, keeps_weights: bool = False) -> None:
        """`keeps_weights`: for `losses` and `alone`."""
        self._keeps_weights = keeps_weights
        self.setting = setting
        self.rng = rng
        self.seen = Seen()
        self.peers: list[VirtualPeer] = []
        self._maker = maker
        self._lost = asyncio.Event()
        """An honest program broke: what follows shows nothing more."""
        self.network = _Network(random.Random(0), self)
        self.run: PreparedRun
        self.host: Host

    @property
    def host_id(self) -> PeerId:
        return self.run.host_key.peer_id

    @property
    def honest(self) -> list[VirtualPeer]:
        return [peer for peer in self.peers if not peer.is_liar]

    def of_stage(self, stage: int) -> list[VirtualPeer]:
        """Honest ones."""
        return [peer for peer in self.honest if peer.stage == stage]

    def is_liar(self, peer: PeerId | None) -> bool:
        return any(one.is_liar and one.peer_id == peer for one in self.peers)

    def broke(self, owner: PeerId | None, what: str) -> None:
        if not self.is_liar(owner):
            name = "the host" if owner in (None, self.host_id) else f"{owner[-6:]}" if owner else "somebody"
            self.seen.broken.append(f"{name}: {what}"[:400])
            self._lost.set()

    # -- the run ------------------------------------------------------------------------------------------

    def go(self) -> Seen:
        """From the first peer to the farewell."""
        torch.set_num_threads(1)
        root = logging.getLogger()
        handler, level = _Errors(self), root.level
        root.addHandler(handler)
        try:
            with (
                tempfile.TemporaryDirectory(dir=IN_MEMORY if IN_MEMORY.is_dir() else None) as folder,
                mock.patch.object(HashChain, "of_run", _chain_of_run),
                mock.patch.object(memory, "MAX_META_BYTES", MAX_MESSAGE_BYTES),
                mock.patch.object(exchange_store, "ThreadPoolExecutor", AtOnce),
            ):
                self.run = _prepared(self.setting, Path(folder))
                run_virtually(partial(self._main, Path(folder)), rng=self.rng, on_unhandled=self._unhandled)
        except StandsStillError as error:
            self.broke(None, str(error))
        finally:
            root.removeHandler(handler)
            root.setLevel(level)
        return self.seen

    async def _main(self, folder: Path) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        make: Any = self._task
        loop.set_task_factory(make)
        _OWNER.set(self.host_id)
        transport = self.network.transport(self.run.host_key)
        ledger = Ledger(self.run.folder.ledger)
        settings = HostSettings(evaluate_tokens=1)
        self.host = Host(self.run, transport, ledger, settings, self._emit)
        self.host.serve()
        conducting = asyncio.ensure_future(self.host.conduct())
        try:
            for stage in sorted((0, 1), key=lambda stage: -self.setting.peers[stage]):
                for index in range(self.setting.peers[stage]):
                    await self._add(folder, stage, index)
                await asyncio.sleep(OPENING_S)
            living = asyncio.ensure_future(self.live(folder))
            lost = asyncio.ensure_future(self._lost.wait())
            await asyncio.wait(
                {conducting, lost}, timeout=MOST_STEP_S * self.setting.steps, return_when=asyncio.FIRST_COMPLETED
            )
            lost.cancel()
            living.cancel()
            await asyncio.gather(living, return_exceptions=True)
            self.seen.elapsed_s = loop.time()
            self.seen.tasks = len(asyncio.all_tasks())
            if conducting.done() and conducting.exception() is not None:
                self.broke(None, f"conducting ended: {conducting.exception()!r}")
            await asyncio.sleep(2.0)
            self._look()
        finally:
            for task in (conducting, *(peer.task for peer in self.peers)):
                task.cancel()
            await asyncio.gather(conducting, *(peer.task for peer in self.peers), return_exceptions=True)
            await transport.close()
            ledger.close()

    async def _add(self, folder: Path, stage: int, index: int) -> None:
        number = stage * 64 + index
        identity = Identity.from_seed(random.Random(f"peer {number} of {self.setting.seed}").randbytes(32))
        is_liar = (stage, index) in self.setting.liars
        self.peers.append(self._started(folder, stage, index, identity, is_liar))

    def _started(self, folder: Path, stage: int, index: int, identity: Identity, is_liar: bool) -> VirtualPeer:
        volunteer = VolunteerSettings(folder=folder / f"peer{stage}-{index}", threads=1, stage=stage)
        volunteer.folder.mkdir(parents=True, exist_ok=True)
        maker = self._maker if is_liar else PeerMaker()
        token = _OWNER.set(identity.peer_id)
        try:
            daemon = maker.make(
                self,
                stage,
                index,
                identity,
                volunteer=volunteer,
                rng=random.Random(f"{self.setting.seed}/{stage}/{index}"),
                kept=KeptAnswers(volunteer.folder / "host.answers"),
                on_step=None if is_liar else partial(self._applied, identity.peer_id),
                work_thread=WorkInLoop,
            )
            stop = asyncio.Event()
            task = asyncio.ensure_future(daemon.run(stop))
        finally:
            _OWNER.reset(token)
        peer = VirtualPeer(stage, index, identity, is_liar, daemon, stop, task)
        task.add_done_callback(partial(self._ended, peer))
        return peer

    async def live(self, folder: Path) -> None:
        """What liars do beside talking; here nothing."""

    async def rejoin(self, liar: VirtualPeer, folder: Path, *, away_s: float) -> None:
        """The liar's process dies, and is started again."""
        liar.killed = True
        self.network.kill(liar.peer_id)
        liar.task.cancel()
        await asyncio.wait({liar.task})
        await asyncio.sleep(away_s)
        at = self.peers.index(liar)
        self.peers[at] = self._started(folder, liar.stage, liar.index, liar.identity, True)

    # -- seen ---------------------------------------------------------------------------------------------

    def brought(self, callee: PeerId, method: str, request: Message) -> None:
        """What is on its way to a peer. The last stage's receipt of a microbatch is the header of its x, whatever
        becomes of the answer."""
        if method == FORWARD and (one := _trained(request)) is not None:
            self.seen.receipts.setdefault((1, callee), set()).add(one)

    def overhear(
        self, caller: PeerId, callee: PeerId, method: str, request: Message, answer: tuple[bytes, memoryview]
    ) -> None:
        """What has passed between two peers."""
        if (
            method == FORWARD
            and decode_meta(answer[0]).get("status") == "ok"
            and (one := _trained(request)) is not None
        ):
            self.seen.receipts.setdefault((0, caller), set()).add(one)

    def _task(self, loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], **given: Any) -> asyncio.Task[Any]:
        task = _OwnedTask(coro, loop=loop, **given)
        task.owner = _OWNER.get()
        return task

    def _unhandled(self, context: Mapping[str, Any]) -> None:
        task = context.get("task") or context.get("future")
        owner = task.owner if isinstance(task, _OwnedTask) else _OWNER.get()
        what = context.get("exception") or f"{context.get('message')} {task!r}"
        self.broke(owner, f"nobody waited for {what!r}")

    def _ended(self, peer: VirtualPeer, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is None:
            return
        if peer.is_liar:
            self.seen.liars_ended.append(repr(task.exception()))
        else:
            self.broke(peer.peer_id, f"its process ended: {task.exception()!r}")

    def _emit(self, event: Event) -> None:
        self.seen.events.append(event)

    def _applied(self, me: PeerId, steps: StageSteps, applied: Applied) -> None:
        steps.validate()
        stage, roster = int(steps.chain.stage), applied.result.roster
        state = steps.replica.state
        digest = hash_of(state.weights)
        at = (stage, int(steps.chain.version))
        self.seen.applied.setdefault(at, {})[me] = (steps.chain.name, digest)
        if self._keeps_weights and at not in self.seen.weights:
            self.seen.weights[at] = np.array(state.weights)
        self.seen.results.setdefault((stage, int(roster.step)), applied.result)
        bodies = steps.context.results.get(int(roster.step))
        if bodies is not None and (stage, int(roster.step)) not in self.seen.squares:
            self.seen.squares[stage, int(roster.step)] = _squares(steps, applied.result, bodies[1])

    def _look(self) -> None:
        seen = self.seen
        seen.version = self.host.progress.done_versions()
        for stage in (0, 1):
            held = [peer.daemon.at.steps for peer in self.of_stage(stage) if peer.daemon.at is not None]
            if held:
                newest = max(held, key=lambda steps: int(steps.chain.version))
                seen.members[stage] = newest.chain.members
        everyone = {peer.peer_id for peer in self.honest}
        for peer in self.honest:
            seen.shut_out_by_peers |= {one for one in everyone if peer.daemon.standing.is_out(one)}
        seen.credit = {peer: credit.num_tokens for peer, credit in self.host.books.credit.items()}
        seen.held_out = self._held_out_loss()
        if self._keeps_weights:
            self._go_alone()

    def _held_out_loss(self) -> float:
        """What honest peers' weights come to on held-out text, without any peer's word; nan where a stage has none."""
        found = []
        for stage in (0, 1):
            held = [peer.daemon.at.steps.replica for peer in self.of_stage(stage) if peer.daemon.at is not None]
            if not held:
                return float("nan")
            found.append(max(held, key=lambda replica: int(replica.version)))
        for version in sorted({version for _, version in self.seen.weights}):
            both = [self.seen.weights.get((stage, version)) for stage in (0, 1)]
            if both[0] is not None and both[1] is not None:
                self.seen.losses[version] = self._loss_of([both[0], both[1]])
        return self._loss_of([replica.state.weights for replica in found])

    @once
    def _models(self) -> list[StageModel]:
        """That compute all samples at once, where peers' may compute few."""
        return [StageModel(self.run.settings.model, stage) for stage in (0, 1)]

    def _loss_of(self, weights: Sequence[NDArray[np.float32]]) -> float:
        first, last = (model.weights(np.array(flat)) for model, flat in zip(self._models, weights, strict=True))
        tokens_BL, targets_BL = self.held_out
        y_BLD, _ = self._models[0].forward(first, torch.from_numpy(tokens_BL), keep=False)
        loss_sum, num_targets, _ = self._models[1].loss(last, y_BLD, torch.from_numpy(targets_BL), keep=False)
        return loss_sum / num_targets

    @once
    def held_out(self) -> Batch:
        """All held-out text."""
        settings = self.run.settings
        tokens = TokenFile(self.run.data.held_out_path, settings.data.token_bytes)
        parts = zip(*held_out_batches(settings, tokens, limit_tokens=len(tokens)), strict=True)
        tokens_BL, targets_BL = (np.concatenate(part) for part in parts)
        return tokens_BL, targets_BL

    def _go_alone(self) -> None:
        """Train the whole model here on what each step was made of, as the stage without liars has it certified: what
        the swarm's losses are held against, for two runs on other data differ by more than many a lie does."""
        settings, lying = self.run.settings, {stage for stage, _ in self.setting.liars}
        stage = min({0, 1} - lying)
        reader = BatchReader(settings, TokenFile(self.run.data.train_path, settings.data.token_bytes))
        model = WholeModel(settings, [state.weights for state in self.run.states])
        for step in range(max(self.seen.losses, default=0)):
            result = self.seen.results.get((stage, step))
            made = result.roster.contributions if result is not None else ()
            numbers = sorted({work.microbatch_id for one in made for work in one.work})
            if numbers:
                self.seen.counted_tokens += model.train_step(step, map(reader.batch, numbers)).num_tokens
            self.seen.alone[step + 1] = model.held_out_loss([self.held_out])


def _squares(steps: StageSteps, result: Result, bodies: Sequence[Any]) -> tuple[float, ...]:
    """What each part's bytes come to; nothing where nobody contributed: then there are no parts."""
    if not result.parts:
        return ()
    parts = steps.replica.parts()
    return tuple(
        0.0 if reduced.is_empty else squares_of(parts.result_codec(part), body, parts.size(part))
        for part, (reduced, body) in enumerate(zip(result.parts, bodies, strict=True))
    )


def hash_of(weights: NDArray[np.float32]) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(weights).tobytes()).digest()


@functools.cache
def _chain(seed: bytes, total_steps: int) -> HashChain:
    return _CHAIN_OF_RUN(seed, total_steps)


_CHAIN_OF_RUN = HashChain.of_run


def _chain_of_run(seed: bytes, total_steps: int) -> HashChain:
    """As `HashChain.of_run`, each made once: of all a run begins with, it takes longest."""
    return _chain(seed, total_steps)


def _trained(request: Message) -> tuple[int, int] | None:
    """The microbatch and attempt that is sent on, if it is for training."""
    if "birth" not in request.meta:
        return None
    birth = BirthRecord.from_value(request.meta["birth"])
    return (int(birth.microbatch_id), birth.attempt) if birth.kind == "train" else None


def _prepared(setting: Setting, folder: Path) -> PreparedRun:
    (folder / "text.txt").write_text(_text())
    host = folder / "host"
    host.mkdir()
    for name in ("run", "host"):
        save_identity(host / f"{name}.key", Identity.from_seed(f"{name} key".encode().ljust(32)))
    text = _MANIFEST.format(steps=setting.steps, target_tokens=setting.microbatches * MICROBATCH_TOKENS)
    return prepare_run(parse_manifest(text, folder / "run.toml"), host, lambda what: None)


@functools.cache
def _text() -> str:
    """Sentences of few words, some much more frequent than others."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 6))) for _ in range(40)]
    weights = [1.0 / rank for rank in range(1, len(words) + 1)]
    return "".join(" ".join(rng.choices(words, weights, k=rng.randint(3, 9))) + ".\n" for _ in range(1500))
