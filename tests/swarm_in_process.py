"""A whole swarm inside one process: a host and peers, their real objects, one event loop.

    async with swarm_in_process(manifest_of(optimizer={"total_steps": 5}), tmp_path, peers=(1, 2)) as swarm:
        await swarm.until_version(2)
        await swarm.kill(swarm.of_stage(1)[0])
        report = await swarm.finished()

Messages go through a MemoryNetwork, or with `real_network` through p2pd processes. Identities, routes and weights
follow `seed`; which peer computes which microbatch does not, for that is a matter of time.
"""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bootstrap.program.host import Host, HostSettings
from bootstrap.program.ledger import Ledger
from bootstrap.state.run_folder import PreparedRun, prepare_run, taken_up_again
from peer.adversary.peer import MisbehavingPeer
from peer.directory.kept_answers import KeptAnswers
from peer.owner.limits import VolunteerSettings
from peer.program.daemon import PeerDaemon
from peer.program.verifying import Verifying
from peer.round.rounds import StageRounds
from peer.round.stage_steps import StageSteps
from peer.stage.events import Applied
from swarm.attacks import parse_attack
from swarm.core.ids import PeerId
from swarm.identity.key import Identity
from swarm.local.rehearsal import rehearse
from swarm.manifest.file import parse_manifest
from swarm.network.identity_file import save_identity
from swarm.network.memory import MemoryNetwork
from swarm.network.transport import Directory, Transport

Event = dict[str, Any]
DeviceOf = Callable[[int, int], str]
"""(stage, index within the stage) -> what the peer computes on, or several with commas, the first that will do."""
Wrap = Callable[[int, int, Transport], Transport]
"""(stage, index within the stage, transport) -> the transport the peer gets: for slow, greedy or lying peers."""

TINY_MODEL = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}

_TINY: dict[str, dict[str, Any]] = {
    "run": {"name": "tiny"},
    "model": {"config": TINY_MODEL, "stages": 2},
    "data": {"text": ["text.txt"], "sequence_length": 16, "held_out_share": 0.1},
    "batch": {"microbatch_size": 2, "target_tokens": 128},
    "optimizer": {"learning_rate": 0.01, "warmup_steps": 2, "total_steps": 10},
    "checkpoint": {"every_steps": 10, "snapshot_every": 5},
    "deadlines": {
        "call_s": 5.0,
        "hop_s": 20.0,
        "step_s": 20.0,
        "straggler_s": 0.5,
        "drain_s": 1.0,
    },
}


def manifest_of(**tables: dict[str, Any]) -> str:
    """TOML of a tiny run: 4 layers of width 32, 4 microbatches of 2 x 16 tokens a step.

    `tables` change its fields; None drops one.
    """
    merged = {name: {**_TINY.get(name, {}), **tables.get(name, {})} for name in {**_TINY, **tables}}
    lines = []
    for name, fields in merged.items():
        lines += [f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in fields.items() if value is not None)]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return json.dumps(value)  # strings, numbers and booleans are written alike


def prepare(manifest: str, folder: Path, *, seed: int = 0) -> PreparedRun:
    """The run of a manifest, ready to be hosted in `folder`; `text.txt` there is made if the manifest wants it."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "text.txt").exists():
        (folder / "text.txt").write_text(sample_text(40_000, seed=seed))
    run_key = folder / "host" / "run.key"
    if not run_key.exists():  # always the same: the run id, and with it each rounding, follows from it
        run_key.parent.mkdir(parents=True, exist_ok=True)
        save_identity(run_key, Identity.from_seed(b"run key".ljust(32)))
    return prepare_run(parse_manifest(manifest, folder / "run.toml"), folder / "host", lambda what: None)


def sample_text(num_letters: int, *, seed: int) -> str:
    """Text with something to learn: sentences of few words, some much more frequent than others."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 6))) for _ in range(40)]
    weights = [1.0 / rank for rank in range(1, len(words) + 1)]
    sentences, size = [], 0
    while size < num_letters:
        sentences.append(" ".join(rng.choices(words, weights, k=rng.randint(3, 9))) + ".\n")
        size += len(sentences[-1])
    return "".join(sentences)


def identity_of(number: int, *, seed: int = 0) -> Identity:
    """Of the peer that is added as the `number`th, from 0."""
    return Identity.from_seed(random.Random(f"{seed}/{number}").randbytes(32))


@dataclass(eq=False)
class SwarmPeer:
    """One peer of the swarm and the task it lives in."""

    stage: int
    identity: Identity
    daemon: PeerDaemon
    transport: Transport
    directory: Directory
    stop: asyncio.Event
    task: asyncio.Task[None]
    killed: bool = False
    """Or banned, or gone in good order: it may end as it will."""

    @property
    def peer_id(self) -> PeerId:
        return self.identity.peer_id

    @property
    def rounds(self) -> StageRounds:
        """Of a peer that has joined."""
        assert self.daemon.at is not None, "this peer has not joined yet"
        return self.daemon.at.rounds

    @property
    def steps(self) -> StageSteps:
        """Of a peer that has joined."""
        return self.rounds.steps

    @property
    def verifying(self) -> Verifying:
        """Of a peer that has joined."""
        assert self.daemon.live is not None, "this peer has not joined yet"
        return self.daemon.live.verifying


@dataclass(frozen=True, kw_only=True)
class Volunteer(VolunteerSettings):
    """One whose device need not be there."""

    device: str = "cpu"

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(self.device.split(","))


@dataclass(eq=False)
class InProcessSwarm:
    """A host, its peers and what lies between them. Made by `swarm_in_process`."""

    run: PreparedRun
    folder: Path
    seed: int
    network: MemoryNetwork
    real_network: bool
    wrap: Wrap
    attacks: Mapping[tuple[int, int], str]
    manifest: str = ""
    """Of a run that was not made ready by others."""
    device_of: DeviceOf = lambda stage, index: "cpu"
    peers: list[SwarmPeer] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    on_event: list[Callable[[Event], None]] = field(default_factory=list)
    on_applied: list[Callable[[StageSteps, Applied], None]] = field(default_factory=list)
    """Told of each step that any peer took."""
    host: Host = field(init=False)
    _conducting: asyncio.Task[None] = field(init=False)
    _event_came: asyncio.Event = field(default_factory=asyncio.Event)
    _opened: tuple[Transport, Directory, Ledger] = field(init=False)
    _evaluate_tokens: int = field(init=False)

    async def start(self, evaluate_tokens: int) -> None:
        self._evaluate_tokens = evaluate_tokens
        await self._open_host()
        self._conducting = asyncio.ensure_future(self._conduct())

    async def _open_host(self) -> None:
        transport, directory = await self._connected(self.run.host_key)
        ledger = Ledger(self.run.folder.ledger)
        self._opened = transport, directory, ledger
        settings = HostSettings(evaluate_tokens=self._evaluate_tokens)
        self.host = Host(self.run, transport, ledger, settings, self._emit)
        self.host.serve()

    async def _conduct(self) -> None:
        """As `bootstrap.program.hosting`: an amended run is taken up anew."""
        while True:
            await self.host.conduct()
            if not self.host.amending.done.is_set():
                return
            await self._close_host()
            self.run = await asyncio.to_thread(taken_up_again, self.run)
            await self._open_host()

    async def _close_host(self) -> None:
        transport, directory, ledger = self._opened
        await directory.close()
        await transport.close()
        ledger.close()

    def host_addresses(self) -> list[str]:
        """Where the host listens, on a real network."""
        return self._opened[0].addresses()

    def of_stage(self, stage: int) -> list[SwarmPeer]:
        """Peers of the stage that were not killed, in the order in which they were added."""
        return [peer for peer in self.peers if peer.stage == stage and not peer.killed]

    async def add_peer(self, stage: int) -> SwarmPeer:
        """Start one more peer of `stage`; it joins in its own time."""
        number = len(self.peers)
        index = sum(1 for peer in self.peers if peer.stage == stage)
        self.peers.append(await self._started(stage, number, index, identity_of(number, seed=self.seed)))
        return self.peers[-1]

    async def restart(self, peer: SwarmPeer) -> SwarmPeer:
        """Start a killed peer's process again, with its identity and what is left of it on disk."""
        assert peer.killed
        await asyncio.wait({peer.task})
        number = self.peers.index(peer)
        index = sum(1 for other in self.peers[:number] if other.stage == peer.stage)
        await peer.directory.close()
        self.peers[number] = await self._started(peer.stage, number, index, peer.identity)
        return self.peers[number]

    async def _started(self, stage: int, number: int, index: int, identity: Identity) -> SwarmPeer:
        transport, directory = await self._connected(identity)
        attack = self.attacks.get((stage, index))
        volunteer = Volunteer(
            folder=self.folder / f"peer{number}",
            threads=1,
            stage=stage,
            device=self.device_of(stage, index),
        )
        volunteer.folder.mkdir(parents=True, exist_ok=True)
        make_peer = PeerDaemon if attack is None else partial(MisbehavingPeer, parse_attack(attack))
        daemon = make_peer(
            volunteer,
            identity,
            self.wrap(stage, index, transport),
            directory,
            self.run.host_key.peer_id,
            rng=random.Random(f"{self.seed}/{number}/routes"),
            kept=KeptAnswers(volunteer.folder / "host.answers"),
            on_step=self._on_step,
        )
        stop = asyncio.Event()
        task = asyncio.ensure_future(daemon.run(stop))
        return SwarmPeer(stage, identity, daemon, transport, directory, stop, task)

    async def kill(self, peer: SwarmPeer) -> None:
        """The peer's process dies: its calls break at once and it says goodbye to nobody.

        What is left of it in this process hears and reaches nobody any more, and ends in its own time.
        """
        peer.killed = True
        self.network.kill(peer.peer_id)
        if self.real_network:
            await peer.transport.close()
        peer.task.cancel()

    async def leave(self, peer: SwarmPeer) -> None:
        """The peer is told to leave, and does in good order; then its process is no more. Raises what it raises."""
        peer.stop.set()
        await asyncio.wait({peer.task})
        if not peer.killed:  # meanwhile
            peer.killed = True
            await peer.transport.close()
            peer.task.result()

    async def kill_host(self) -> None:
        """The host's process dies: what it was asked is not answered, and what it did not write down is forgotten."""
        self.network.kill(self.run.host_key.peer_id)
        self._conducting.cancel()
        await asyncio.gather(self._conducting, return_exceptions=True)
        await self._close_host()

    async def restart_host(self) -> None:
        """Start a killed host's process again, from what is left of it on disk."""
        assert self.manifest, "the run was made ready by others"
        self.run = await asyncio.to_thread(prepare, self.manifest, self.folder, seed=self.seed)
        await self.start(self._evaluate_tokens)

    def has_ended(self) -> bool:
        """Whether the host has, by itself."""
        return self._conducting.done()

    async def until(self, condition: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
        """Wait for something that only becomes true with an event of the host. Raises what broke meanwhile."""
        async with self._while_versions_come(timeout_s):
            while not condition():
                self._event_came.clear()
                waiting = asyncio.ensure_future(self._event_came.wait())
                await self._first_of(waiting)

    async def first_of_stage(self, stage: int, is_it: Callable[[SwarmPeer], bool]) -> SwarmPeer:
        """The first of the stage that is found to be so, looked at whenever anything has happened."""
        async with asyncio.timeout(120.0):
            while True:
                for peer in self.of_stage(stage):
                    if is_it(peer):
                        return peer
                await asyncio.sleep(0)

    async def until_version(self, version: int, *, timeout_s: float = 60.0) -> None:
        """Wait until every stage has reached `version`."""
        await self.until(lambda: self.host.progress.done_versions() >= version, timeout_s=timeout_s)

    async def finished(self, *, timeout_s: float = 60.0) -> dict[str, Any]:
        """The host's report, once the run is over and every peer has left. Raises what broke on the way."""
        async with self._while_versions_come(timeout_s):
            while not self._conducting.done():
                await self._first_of(asyncio.shield(self._conducting))
            self._conducting.result()
            await asyncio.gather(*(peer.task for peer in self.peers if not peer.killed))
        return self.host.report()

    @contextlib.asynccontextmanager
    async def _while_versions_come(self, timeout_s: float) -> AsyncIterator[None]:
        """A deadline `timeout_s` after the newest version, and in any case four times that from now."""
        now = asyncio.get_running_loop().time
        last = now() + 4 * timeout_s
        async with asyncio.timeout(timeout_s) as deadline:

            def put_off(event: Event) -> None:
                if event["event"] == "version" and not deadline.expired():
                    deadline.reschedule(min(now() + timeout_s, last))

            self.on_event.append(put_off)
            try:
                yield
            finally:
                self.on_event.remove(put_off)

    async def close(self) -> None:
        """Stop everything, in whatever state it is."""
        self._conducting.cancel()
        for peer in self.peers:
            peer.task.cancel()
        await asyncio.gather(self._conducting, *(peer.task for peer in self.peers), return_exceptions=True)
        for peer in self.peers:
            await peer.directory.close()
            await peer.transport.close()
        await self._close_host()

    async def _first_of(self, waiting: asyncio.Future[Any]) -> None:
        """Until `waiting` or the first failure among host and peers, which is raised."""
        living = [peer.task for peer in self.peers if not peer.killed and not peer.task.done()]
        try:
            await asyncio.wait({waiting, self._conducting, *living}, return_when=asyncio.FIRST_COMPLETED)
            for peer in self.peers:
                if peer.task.done() and not peer.killed:
                    peer.task.result()
            if self._conducting.done():
                self._conducting.result()
        finally:
            if waiting is not self._conducting:
                waiting.cancel()

    def _on_step(self, steps: StageSteps, applied: Applied) -> None:
        steps.validate()
        for listener in self.on_applied:
            listener(steps, applied)

    def _emit(self, event: Event) -> None:
        self.events.append(event)
        if event["event"] in ("banned", "quarantined"):
            next(peer for peer in self.peers if peer.peer_id == event["peer_id"]).killed = True
        for listener in self.on_event:
            listener(event)
        self._event_came.set()

    async def _connected(self, identity: Identity) -> tuple[Transport, Directory]:
        if not self.real_network:
            return self.network.transport(identity), self.network.directory(identity)
        from swarm.network.directory.dht import DHTDirectory
        from swarm.network.p2pd.p2p import P2PSettings, P2PTransport

        transport = await P2PTransport.create(identity, P2PSettings(listen=("/ip4/127.0.0.1/tcp/0",)))
        directory = await DHTDirectory.create(identity, transport)
        if identity is not self.run.host_key:
            addresses = self.host_addresses()
            await transport.connect(self.run.host_key.peer_id, addresses)
            await directory.join(addresses)
        return transport, directory


@contextlib.asynccontextmanager
async def swarm_in_process(
    manifest: str | PreparedRun,
    folder: Path,
    *,
    peers: Sequence[int],
    seed: int = 0,
    on_event: Callable[[Event], None] | None = None,
    wrap: Wrap = lambda stage, index, transport: transport,
    evaluate_tokens: int = 2048,
    delay_s: float = 0.0,
    loss: float = 0.0,
    real_network: bool = False,
    attacks: Mapping[tuple[int, int], str] | None = None,
    device_of: DeviceOf = lambda stage, index: "cpu",
) -> AsyncIterator[InProcessSwarm]:
    """A swarm with `peers[stage]` peers in each stage, from a manifest's text or a run made ready by `prepare`.

    `attacks` says what peers do, by stage and index within it, as `python -m peer.adversary` has it.
    `delay_s` and `loss` are the memory network's. The run begins once `limits.founders_per_stage` peers of every
    stage are there.
    """
    run = manifest if isinstance(manifest, PreparedRun) else prepare(manifest, folder, seed=seed)
    rehearse(run.settings)  # in a checkout where nobody did they are compiled: what is waited for below is not that
    network = MemoryNetwork(random.Random(f"{seed}/network"), delay_s=delay_s, loss=loss)
    text = manifest if isinstance(manifest, str) else ""
    swarm = InProcessSwarm(run, folder, seed, network, real_network, wrap, attacks or {}, text, device_of)
    if on_event is not None:
        swarm.on_event.append(on_event)
    await swarm.start(evaluate_tokens)
    try:
        for stage, count in enumerate(peers):
            for _ in range(count):
                await swarm.add_peer(stage)
        yield swarm
    finally:
        await swarm.close()
