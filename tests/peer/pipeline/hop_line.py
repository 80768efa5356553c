"""Microbatches through real hop servers, four stages of two peers, without rounds or daemons.

async with hop_line() as line:
    answering = line.send(0)                     # by the source, a peer of stage 0
    lost = await line.holder(1)                  # the peer of stage 1 that has it
    await line.kill(lost)
    answer = await answering
"""

import asyncio
import contextlib
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch

from peer.directory.limited_transport import LimitedTransport
from peer.directory.line import Line
from peer.pipeline.compute import Urgency, WorkThread
from peer.pipeline.downstream import Answer, Downstream, HopCounters
from peer.pipeline.exchange_store import ExchangeStore
from peer.pipeline.hops import HopServer
from peer.pipeline.screens import KnownStanding, Screens
from peer.pipeline.stage_pass import Activation, StagePass
from peer.pipeline.stage_work import StageWork
from peer.state.replica import StageReplica
from swarm.core.ids import MicrobatchId, PeerId, StageIndex, Step, Version
from swarm.core.pipeline.wiring import EarliestFinishWiring
from swarm.core.settings import ModelSettings, RunSettings
from swarm.identity.key import Identity
from swarm.local.rehearsal import rehearse
from swarm.model.stage import Weights
from swarm.network.memory import MemoryNetwork
from tests.swarm.model.tiny_models import tiny_model
from tests.verification.exhibits import RUN_ID, SmallRun, small_settings, tokens_and_targets
from verification.kinds.protocol_violation import ProtocolViolation

STEP = Step(0)
T = TypeVar("T")


class CountingThread(WorkThread):
    """Counts what it is given; `hold` makes it begin nothing."""

    def __init__(self, name: str) -> None:
        self._holds = threading.Event()
        super().__init__(name, may_begin=lambda urgency: not self._holds.is_set())
        self.jobs: Counter[Urgency] = Counter()
        self.more_s = 0.0
        """Of backlog: whoever is asked for room says so much more."""

    @property
    def backlog_s(self) -> float:
        return super().backlog_s + self.more_s

    async def run(self, urgency: Urgency, job: Callable[[], T], *, step: int = 0) -> T:
        def counted() -> T:
            self.jobs[urgency] += 1
            return job()

        return await super().run(urgency, counted, step=step)

    def hold(self) -> None:
        self._holds.set()

    def go_on(self) -> None:
        self._holds.clear()
        self.wake()


class Still:
    """A stage that stays at version 0."""

    version = Version(0)
    era = 0

    def __init__(self) -> None:
        self.works_from = STEP

    def may_work_for(self, step: Step) -> bool:
        return step >= self.works_from

    async def wait_for_version(self, version: int, *, timeout_s: float) -> bool:
        return False

    def work_done(self, step: Step) -> None:
        pass

    def evaluation_weights(self, version: int) -> Weights | None:
        return None


class LinePeer:
    """One peer of the line."""

    def __init__(self, line: "HopLine", stage: int, identity: Identity, replica: StageReplica) -> None:
        settings, self.stage, self.replica = line.settings, stage, replica
        self.peer_id = identity.peer_id
        self.identity = identity
        self.line = Line()
        self.transport = LimitedTransport(line.network.transport(identity), self.line)
        self.thread = CountingThread(f"stage {stage}")
        self.gate = Still()
        self.violations: list[ProtocolViolation] = []
        self.is_before_nobody = False
        """It takes everybody for a stranger."""
        self.counters = HopCounters()
        self.exchanges = ExchangeStore.of_run(settings, self.peer_id)
        self.wiring = EarliestFinishWiring(StageIndex(stage + 1), random.Random(self.peer_id))
        self.stage_pass = StagePass(settings, RUN_ID, identity, replica)
        self.downstream = None
        if stage < settings.model.num_stages - 1:
            self.downstream = Downstream(
                self.stage_pass,
                self.transport,
                self.thread,
                self.wiring,
                self.counters,
                era=lambda: 0,
                keep=self.exchanges.keep,
                on_violation=self.violations.append,
            )
        self.work = StageWork(
            self.stage_pass,
            self.thread,
            self.gate,
            self.counters,
            self.exchanges,
            Screens(KnownStanding(), lambda: Version(0)),
        )
        self.server = HopServer(
            self.work,
            self.downstream,
            self.transport,
            is_before=lambda peer: not self.is_before_nobody and peer in line.of_stage(stage - 1),
            begun=lambda peer, step: None,
            on_violation=self.violations.append,
        )
        self.server.serve(self.transport)

    def meet(self, peers: set[PeerId]) -> None:
        """These are the next stage, and answers of it take so long that they are asked for room."""
        assert self.downstream is not None
        self.downstream.update_peers(peers)
        for _ in range(len(peers)):
            self.wiring.finished(self.wiring.choose(now=0.0).peer_id, 40.0)


class HopLine:
    """The peers, and what lies between them."""

    def __init__(self, settings: RunSettings) -> None:
        self.run = SmallRun(settings, num_peers=2)
        self.settings = self.run.settings
        rehearse(self.settings)  # before anything is waited for
        self.network = MemoryNetwork(random.Random(0))
        self._live: dict[PeerId, int] = {}
        """Stages."""
        self.peers = [
            [LinePeer(self, stage, *pair) for pair in zip(self.run.peers[stage], self.run.replicas[stage], strict=True)]
            for stage in range(settings.model.num_stages)
        ]
        for stage, peers in enumerate(self.peers):
            self._live |= {peer.peer_id: stage for peer in peers}
        for stage, peers in enumerate(self.peers[:-1]):
            for peer in peers:
                peer.meet(self.of_stage(stage + 1))

    def of_stage(self, stage: int) -> set[PeerId]:
        """Who lives."""
        return {peer for peer, of in self._live.items() if of == stage}

    def send(self, number: int, source: LinePeer | None = None) -> asyncio.Task[Answer]:
        """Microbatch `number` from a source, which keeps its activation until the answer is there."""
        source = source or self.peers[0][0]
        activation = self.activation(number, source)
        assert source.downstream is not None
        return asyncio.ensure_future(source.downstream.send(activation))

    def activation(self, number: int, source: LinePeer) -> Activation:
        tokens, targets = tokens_and_targets(self.settings, number)
        born = source.stage_pass.born(
            "train", MicrobatchId(number), attempt=0, step=STEP, era=0, tokens_BL=tokens, targets_BL=targets
        )
        _, weights = source.replica.weights_for(STEP)
        return source.stage_pass.forward_only(born.birth, weights, torch.from_numpy(tokens), born.targets, None)

    async def holder(self, stage: int) -> LinePeer:
        """The peer of the stage that has something in flight."""
        await self.until(lambda: any(peer.server.in_flight for peer in self.peers[stage]))
        return next(peer for peer in self.peers[stage] if peer.server.in_flight)

    def other(self, peer: LinePeer) -> LinePeer:
        """The other one of its stage."""
        return next(one for one in self.peers[peer.stage] if one is not peer)

    def jobs(self, stage: int, urgency: Urgency) -> int:
        """Done by the stage's peers together."""
        return sum(peer.thread.jobs[urgency] for peer in self.peers[stage])

    async def kill(self, peer: LinePeer) -> None:
        """Its calls break, and its neighbours know it."""
        del self._live[peer.peer_id]
        self.network.kill(peer.peer_id)
        for caller in self.peers[peer.stage - 1] if peer.stage else []:
            assert caller.downstream is not None
            caller.downstream.update_peers(self.of_stage(peer.stage))
        await peer.server.stop()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(120.0):
            while not condition():  # noqa: ASYNC110 - conditions of all kinds
                await asyncio.sleep(0.002)

    async def close(self) -> None:
        for peers in self.peers:
            for peer in peers:
                peer.thread.go_on()
                await peer.server.stop()
                peer.thread.close(timeout_s=5.0)


@contextlib.asynccontextmanager
async def hop_line(**fields: Any) -> AsyncIterator[HopLine]:
    """A line of which all is audited; `fields` of its RunSettings."""
    whole = tiny_model("llama", 1)
    model = ModelSettings(config_json=whole.config_json, stage_layers=((0, 1), (1, 2), (2, 3), (3, 4)))
    line = HopLine(replace(small_settings(3), model=model, trust="public", **fields))
    try:
        yield line
    finally:
        await line.close()
