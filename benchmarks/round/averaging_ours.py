"""One peer of ours that averages: real rounds, transport, p2pd and exact step; a bare vector for a model.

    python -m benchmarks.round.averaging_ours NUMBER PEERS FOLDER PARAMS RULE [calls]

Number PEERS is the run's host, which only votes. With `calls` the CPU seconds of single calls are measured too, which
costs a round of int8 some milliseconds.

A round is timed from the closing of the step to the averaged gradient in fp32, and on to the new version; and how much
of it this peer computes on its bytes or moves them (`benchmarks.round.busy_spans`). The pieces are timed too, each by
itself and at all peers at once: encode, hash, wire, decode.
"""

import asyncio
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from benchmarks.fleet import timed_peer
from benchmarks.round import busy_spans

busy_spans.install()
if "calls" in sys.argv:
    timed_peer.install()

from benchmarks.round.averaging_vectors import check, vector_of  # noqa: E402 - after the stopwatches
from benchmarks.round.drawn_papers import Neighbours, papers_of, work_of  # noqa: E402
from benchmarks.round.orders import Fields, answer, next_order  # noqa: E402
from peer.machine.core_share import ComputeThreads  # noqa: E402
from peer.pipeline.compute import Urgency, WorkThread  # noqa: E402
from peer.pipeline.screens import KnownStanding, Screens  # noqa: E402
from peer.round.reductions import ReductionStore  # noqa: E402
from peer.round.rounds import StageRounds  # noqa: E402
from peer.round.signing_log import SigningLog  # noqa: E402
from peer.round.stage_steps import StageSteps  # noqa: E402
from peer.stage.context import StageContext  # noqa: E402
from peer.stage.events import Events  # noqa: E402
from peer.stage.tasks import Tasks  # noqa: E402
from peer.state.replica import StageReplica  # noqa: E402
from swarm.averaging.parts import Parts  # noqa: E402
from swarm.bulk_digest import bulk_digest  # noqa: E402
from swarm.checkpoint.results import ResultStore  # noqa: E402
from swarm.checkpoint.snapshots import SnapshotStore  # noqa: E402
from swarm.checkpoint.state import StageState  # noqa: E402
from swarm.core.audit.chance import REVEALED_AFTER, Chance, HostWord  # noqa: E402
from swarm.core.audit.hash_chain import HashChain  # noqa: E402
from swarm.core.audit.ticket import Ticket  # noqa: E402
from swarm.core.ids import MicrobatchId, PeerId, StageIndex, Step, Version  # noqa: E402
from swarm.core.pipeline.leases import LeaseTable  # noqa: E402
from swarm.core.settings import (  # noqa: E402
    AveragingSettings,
    BatchSettings,
    CheckpointSettings,
    CodecSettings,
    DataSettings,
    LimitSettings,
    ModelSettings,
    OptimizerSettings,
    RunSettings,
)
from swarm.core.state.stage_chain import Genesis, StageChain  # noqa: E402
from swarm.drawn_papers import DrawnPapers  # noqa: E402
from swarm.identity.key import Identity  # noqa: E402
from swarm.local.rehearsal import rehearse  # noqa: E402
from swarm.model.layout import ParameterLayout  # noqa: E402
from swarm.model.link import link_to  # noqa: E402
from swarm.network.loop import run  # noqa: E402
from swarm.network.p2pd.p2p import P2PSettings, P2PTransport  # noqa: E402
from swarm.network.transport import Message, Transport  # noqa: E402
from swarm.optim.stage_step import Gradient, StageStep, Stepped  # noqa: E402
from swarm.witness_service import VoteLog, WitnessService  # noqa: E402
from verification.kinds.false_work import entry_check  # noqa: E402
from verification.round.papers import Papers  # noqa: E402

STAGE = StageIndex(1)
TOKENS = 1024
ROUND_S = 60.0
SINK = "sink"
MAX_SINK_BYTES = 1 << 22
MOST_ROUNDS = 1 << 12
KEPT_RESULTS = 4
"""Results whose bytes stay for late peers; a run that takes snapshots, which would disturb here, keeps ten."""
LANES = 4
"""Calls to one peer at a time when the wire is timed by itself."""


class BareModel:
    """A stage that is nothing but its parameters; it computes nothing."""

    def __init__(self, params: int) -> None:
        self.stage = STAGE
        self.is_first, self.is_last = False, True
        self.device = torch.device("cpu")
        self.link = link_to(self.device)
        norm = min(1024, params // 2)
        self.layout = ParameterLayout.of({"norm.weight": (norm,), "mlp.weight": (1, params - norm)})

    def weights(self, flat: NDArray[np.float32]) -> Any:
        return SimpleNamespace(flat=flat)


def settings_of(codec: Any, rule: Any, peers: int) -> RunSettings:
    """A run of many steps, each of one microbatch of every peer."""
    return RunSettings(
        name="averaging",
        protocol=1,
        model=ModelSettings(config_json="{}", stage_layers=((0, 1), (1, 2))),
        data=DataSettings(
            tokenizer="bytes",
            vocab_size=256,
            token_bytes=1,
            num_train_tokens=1 << 20,
            num_held_out_tokens=1 << 10,
            train_digest=bytes(32),
            held_out_digest=bytes(32),
            sequence_length=TOKENS,
            chunk_tokens=1 << 16,
            seed=0,
        ),
        batch=BatchSettings(microbatch_size=1, target_tokens=TOKENS * peers),
        optimizer=OptimizerSettings(total_steps=1 << 20),
        codecs=CodecSettings(averaging=codec),
        averaging=AveragingSettings(rule=rule),
        limits=LimitSettings(max_peers_per_stage=peers),
        checkpoint=CheckpointSettings(every_steps=1 << 19, snapshot_every=1 << 19),
    )


class OurPeer:
    def __init__(self, number: int, peers: int, folder: Path, params: int, rule: str) -> None:
        self._identities = [Identity.from_seed(bytes([other]) * 32) for other in range(peers)]
        self._number = number
        self._me = self._identities[number]
        self._run_key = host_identity(peers)
        self._host = self._run_key.peer_id
        self._draws, self._host_chain = (HashChain(bytes([seed]) * 32, MOST_ROUNDS) for seed in (number, peers))
        self._folder = folder
        self._params = params
        self._rule = rule
        self._own = torch.from_numpy(vector_of(folder, number).copy()).mul_(TOKENS)
        self._compute = WorkThread("compute", before_job=ComputeThreads(_threads()).follower())
        self._exact = _NotedThread("exact")
        self._marks: dict[str, float] = {}
        self._averaged: NDArray[np.float32] | None = None
        self._time_steps()

    def _time_steps(self) -> None:
        plain_close, plain_next = StageReplica.close, StageStep.next

        def close(replica: StageReplica, step: Step) -> Any:
            self._marks.setdefault("began", time.monotonic())
            return plain_close(replica, step)

        def take(stage: StageStep, old: StageState, gradient: Gradient | None, name: bytes) -> Stepped:
            self._marks["ended"] = time.monotonic()
            stepped = plain_next(stage, old, gradient, name)
            self._marks["stepped"] = time.monotonic()
            assert gradient is not None
            self._averaged = np.empty(self._params, np.float32)
            for piece, where in enumerate(gradient.pieces):
                self._averaged[where] = gradient.values(piece)
            return stepped

        StageReplica.close, StageStep.next = close, take  # type: ignore[method-assign]

    async def listen(self) -> None:
        self._transport = await P2PTransport.create(self._me, P2PSettings(listen=("/ip4/127.0.0.1/tcp/0",)))
        self._transport.serve("ping", _pong, max_body_bytes=0)
        self._transport.serve(SINK, _pong, max_body_bytes=MAX_SINK_BYTES)
        self._children = psutil.Process().children(recursive=True)

    async def do(self, order: Fields) -> Fields:
        match order["order"]:
            case "listen":
                await self.listen()
                return {"addresses": self._transport.addresses()}
            case "connect":
                everyone = [identity.peer_id for identity in self._identities] + [self._host]
                for other, addresses in zip(everyone, order["addresses"], strict=True):
                    if other != self._me.peer_id:
                        await self._transport.connect(other, addresses)
            case "open":
                await self._open(order["codec"])
            case "ready":
                step = self._steps.version
                await self._compute.run(Urgency.BACKWARD, lambda: self._fill(step))
                self._marks.clear()
            case "round":
                return await self._round()
            case "check":
                assert self._averaged is not None
                return check(self._folder, self._averaged) | {"version": self._steps.chain.name.hex()}
            case "piece":
                return {"seconds": await self._piece(order["piece"])}
            case "close":
                await self._rounds.stop()
                del self._rounds, self._steps, self._replica
                self._averaged = None
            case "leave":
                await self._transport.close()
        return {}

    async def _open(self, codec: str) -> None:
        settings = settings_of(codec, self._rule, len(self._identities))
        rehearse(settings)
        model: Any = BareModel(self._params)
        members = tuple(sorted(identity.peer_id for identity in self._identities))
        genesis = Genesis(
            run_id="averaging",
            stage=STAGE,
            version=Version(0),
            state_digest=bytes(32),
            members=members,
            leases=LeaseTable(),
            host=self._host,
            run_key=self._host,
            neighbours=(),
            host_chain_end=self._host_chain.end,
        )
        chain = StageChain.begin(genesis, settings)
        state = StageState(0, model.layout, np.zeros(self._params, dtype=np.float32), name=genesis.name)
        self._replica = StageReplica(settings, model, state, clip_norm=settings.optimizer.max_norm)
        name = f"{codec}-{self._number}-{time.monotonic_ns()}"
        context = StageContext(
            settings=settings,
            run_id="averaging",
            identity=self._me,
            transport=self._transport,
            compute=self._compute,
            copies=self._compute,
            exact=self._exact,
            replays=self._compute,
            judging=self._exact,
            snapshots=SnapshotStore(self._folder / f"snapshots-{name}"),
            results=ResultStore(self._folder / f"snapshots-{name}", chain, kept=KEPT_RESULTS),
            reductions=ReductionStore(settings.audits.retained_versions),
            tasks=Tasks(STAGE),
            events=Events(),
        )
        self._steps = StageSteps(context, self._replica, chain, may_join=lambda peer: True)
        self._rounds = StageRounds(
            context=context,
            steps=self._steps,
            screens=Screens(KnownStanding(), lambda: self._steps.version),
            signing_log=SigningLog(self._folder / f"signed-{name}.log"),
            vote_log=VoteLog(self._folder / f"voted-{name}.log"),
            neighbours=set,
            is_closed_before=lambda step: False,
            charges=tuple,
            chance=self._chance,
            drawn=drawn_papers(self._transport, settings),
        )
        context.events.seal()
        self._rounds.start()

    def _chance(self, chain: StageChain) -> Chance:
        step, me = int(chain.version), self._me.peer_id
        ticket = (
            None
            if me in chain.basis.link_of
            else Ticket(chain.run_id, me, STAGE, self._draws.end).signed_by(self._run_key)
        )
        said = HostWord(step, self._host_chain.reveal(step - 1))
        return Chance(self._draws.reveal(step - REVEALED_AFTER), said, ticket)

    def _fill(self, step: int) -> None:
        self._replica.sum_of(Step(step)).gradient.flat.copy_(self._own)
        number = MicrobatchId(step * len(self._identities) + self._number)
        settings, near = self._rounds.context.settings, Neighbours.made_up()
        self._worked = papers_of(settings, "averaging", STAGE, Step(step), number, self._me, near)

    def _record(self, papers: Papers, step: Step) -> None:
        """The microbatch is in the step's sum, for these papers."""
        self._replica.record(step, work_of(papers, Version(step)))
        self._replica.sum_of(step).papers[papers.birth.microbatch_id] = papers

    async def _round(self) -> Fields:
        step, failure = self._steps.version, self._rounds.context.tasks.failure
        before = timed_peer.figures(self._children)
        sent = self._transport.traffic()[0]
        await self._compute.run(Urgency.BACKWARD, lambda: self._record(self._worked, Step(step)))
        self._steps.work_done(Step(step))
        waiting = asyncio.ensure_future(self._steps.wait_for_version(step + 1, timeout_s=ROUND_S))
        await asyncio.wait({waiting, failure}, return_when=asyncio.FIRST_COMPLETED)
        if failure.done():
            waiting.cancel()
            failure.result()
        if not waiting.result():
            raise TimeoutError(f"round {step} did not end within {ROUND_S:.0f} s")
        after = timed_peer.figures(self._children)
        return {
            **self._marks,
            "busy": busy_spans.taken(self._marks["began"], self._marks["ended"]),
            "bytes": self._transport.traffic()[0] - sent,
            "cpu": {
                "process": after["process"] - before["process"],
                "p2pd": after["p2pd"] - before["p2pd"],
                **{f"thread {name}": _spent(after, before, "threads", name) for name in after["threads"]},
                **{name: _spent(after, before, "calls", name) for name in after["calls"]},
            },
        }

    # -- pieces by themselves -----------------------------------------------------------------------------

    async def _piece(self, piece: str) -> float:
        """Seconds of what one peer does of it in a round."""
        if piece == "wire":
            return await self._wire()
        return await self._exact.run(Urgency.ROUND, lambda: self._local(piece))

    def _local(self, piece: str) -> float:
        replica, peers = self._replica, len(self._identities)
        parts = replica.parts()
        share = parts[self._number :: peers]
        values = self._own.numpy()
        contribution, result = parts.contribution_codec(0), parts.result_codec(0)
        seed = bytes(32)
        if piece == "encode":
            began = time.perf_counter()
            for part in parts:
                contribution.encode(values[part], seed=seed)
            for part in share:
                result.encode(values[part], seed=seed)
            return time.perf_counter() - began
        bodies = [contribution.encode(values[part], seed=seed) for part in parts]
        if piece == "hash":
            began = time.perf_counter()
            for hashed in (bodies, bodies, share):  # own; received of both kinds; the share of the result
                for index, _ in enumerate(hashed):
                    bulk_digest(bodies[index])
            for index in range(len(share) * (peers - 2)):
                bulk_digest(bodies[index % len(bodies)])
            return time.perf_counter() - began
        assert piece == "decode"
        results = [result.encode(values[part], seed=seed) for part in parts]
        out = np.empty(self._params, dtype=np.float32)
        out.fill(0)
        began = time.perf_counter()
        for _ in range(peers):
            for index in range(self._number, len(parts), peers):
                contribution.decode(bodies[index], out[parts[index]])
        for index, part in enumerate(parts):
            result.decode(results[index], out[part])
        return time.perf_counter() - began

    async def _wire(self) -> float:
        replica, peers = self._replica, len(self._identities)
        parts = replica.parts()
        first, second = parts.contribution_codec(0), parts.result_codec(0)
        began = time.perf_counter()
        for codec, share in ((first, None), (second, self._number)):
            sending = []
            for other in self._others():
                number = self._number_of(other) if share is None else share
                sizes = [codec.encoded_bytes(part.stop - part.start) for part in parts[number::peers]]
                sending += [self._send_each(other, sizes[lane::LANES]) for lane in range(LANES)]
            await asyncio.gather(*sending)
        return time.perf_counter() - began

    async def _send_each(self, other: PeerId, sizes: list[int]) -> None:
        for size in sizes:
            await self._transport.call(other, SINK, Message({}, bytes(size)), timeout_s=ROUND_S, max_body_bytes=0)

    def _others(self) -> list[PeerId]:
        return [identity.peer_id for identity in self._identities if identity is not self._me]

    def _number_of(self, peer: PeerId) -> int:
        return [identity.peer_id for identity in self._identities].index(peer)


class _NotedThread(WorkThread):
    async def run(self, urgency: Urgency, job: Callable[[], Any], *, step: int = 0) -> Any:
        return await super().run(urgency, busy_spans.computing(job), step=step)


def drawn_papers(transport: Transport, settings: RunSettings) -> DrawnPapers:
    """What a voter looks at: everybody is known here, and honest."""
    check = entry_check(settings, is_of_stage=lambda peer, stage: True, on_lie=lambda case: None)
    return DrawnPapers(transport, check, random.SystemRandom())


def host_identity(peers: int) -> Identity:
    return Identity.from_seed(bytes([peers]) * 32)


def _spent(after: dict[str, Any], before: dict[str, Any], kind: str, name: str) -> float:
    return float(after[kind][name] - defaultdict(float, before[kind])[name])


def _threads() -> int:
    return int(os.environ["OMP_NUM_THREADS"])


async def _pong(sender: PeerId, request: Message) -> Message:
    return Message()


async def _host(number: int, folder: Path, *, params: int) -> Callable[[Fields], Awaitable[Fields]]:
    """The run's host, as far as rounds concern it."""
    identity = host_identity(number)
    transport = await P2PTransport.create(identity, P2PSettings(listen=("/ip4/127.0.0.1/tcp/0",)))
    log = VoteLog(folder / "voted-host.log")
    settings = settings_of("int8", "mean", number)
    witness = WitnessService(
        run_id="averaging",
        identity=identity,
        host=identity.peer_id,
        run_key=identity.peer_id,
        log=log,
        is_of_stage=lambda peer, stage: True,
        may_join=lambda peer: True,
        may_lead=lambda peer, stage, step, name: True,
        num_parts=[len(Parts.of(settings, ParameterLayout.of({"mlp.weight": (1, params)})))] * (STAGE + 1),
        papers=drawn_papers(transport, settings),
    )
    witness.serve(transport)

    async def do(order: Fields) -> Fields:
        if order["order"] == "listen":
            return {"addresses": transport.addresses()}
        await transport.close()
        return {}

    return do


async def _live(stop: asyncio.Event) -> None:
    number, peers, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    if number == peers:
        do = await _host(number, folder, params=int(sys.argv[4]))
    else:
        do = OurPeer(number, peers, folder, params=int(sys.argv[4]), rule=sys.argv[5]).do
    while (order := await asyncio.to_thread(next_order)) is not None:
        try:
            fields = await do(order)
        except Exception as error:  # noqa: BLE001 - it is the answer
            fields = {"error": f"{type(error).__name__}: {error}"[:500]}
        answer(fields)
    await do({"order": "leave"})


if __name__ == "__main__":
    run(_live)
