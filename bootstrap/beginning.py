"""This is where a run's stages begin: who is ready, what they start from, and the geneses once enough are."""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bootstrap.run_folder import PreparedRun
from swarm.checkpoint.state import StageState, chunk_hash, merkle_root, state_chunks, state_digest
from swarm.checkpoint.transfer import CHUNK, SNAPSHOT, Offer
from swarm.core.canonical import Value
from swarm.core.errors import RemoteError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId, StageIndex, Version
from swarm.core.leases import LeaseTable
from swarm.core.round_basis import MAX_NEIGHBOURS
from swarm.core.stage_chain import Genesis
from swarm.host_protocol import GENESIS
from swarm.network.loop import happened
from swarm.network.transport import Message, Transport

LONGEST_GENESIS_WAIT_S = 10.0
GENESIS_POLL_S = 15.0
"""A peer that has not asked for the genesis for this long is not ready any more."""


@dataclass
class StageStart:
    """A stage before its genesis."""

    state: StageState
    chunks: list[bytes | bytearray | memoryview]
    offer: Offer
    ready: dict[PeerId, float] = field(default_factory=dict)


class Beginning:
    """The host's answers to those who wait for a run to begin."""

    def __init__(
        self,
        run: PreparedRun,
        earlier: list[Genesis],
        era: int,
        stage_of: Callable[[PeerId], int | None],
        begin: Callable[[list[Genesis]], None],
        emit: Callable[[dict[str, Any]], None],
    ) -> None:
        """`earlier`: where the stages began under an earlier process of this host, whose peers may still be training.

        `era`: of the geneses that are signed here. `stage_of` a peer that is admitted; `begin` is told the geneses as
        soon as they are signed.
        """
        self._run = run
        self._stage_of = stage_of
        self._begin = begin
        self._emit = emit
        self._earlier = earlier
        self._era = era
        self._started_at = time.monotonic()
        self._genesis: list[Genesis] | None = None
        self.stages = [stage_start(stage, state) for stage, state in enumerate(run.states)]
        self.made = asyncio.Event()

    def serve(self, transport: Transport) -> None:
        transport.serve(GENESIS, self._on_genesis, max_body_bytes=0)
        transport.serve(SNAPSHOT, self._on_snapshot, max_body_bytes=0)
        transport.serve(CHUNK, self._on_chunk, max_body_bytes=0)

    def take_up(self) -> bool:
        """Go on with the run of an earlier process of this host; whether there is one."""
        if not self._earlier:
            return False
        self._genesis = self._earlier
        self.made.set()
        return True

    def state_digest_of(self, genesis: Genesis) -> bytes:
        """Of the state once it bears the name of the version that the genesis makes it: its first chunk differs."""
        start = self.stages[genesis.stage]
        chunks = state_chunks(replace(start.state, name=genesis.name))
        return merkle_root([chunk_hash(chunks[0]), *start.offer.hashes[1:]], start.offer.total_bytes)

    def missing(self) -> dict[int, int]:
        """How many peers of which stages have to come before the run can begin."""
        wanted = self._run.settings.limits.founders_per_stage
        return {n: wanted - len(start.ready) for n, start in enumerate(self.stages) if len(start.ready) < wanted}

    async def _on_genesis(self, sender: PeerId, request: Message) -> Message:
        fields = Fields("genesis request", request.meta)
        stage = fields.integer("stage", high=len(self.stages) - 1)
        ready, wait_s = fields.boolean("ready"), min(fields.number("wait_s"), LONGEST_GENESIS_WAIT_S)
        if self._stage_of(sender) != stage:
            raise RemoteError("standing", f"{sender} is not admitted to stage {stage}", sender)
        if ready and self._genesis is None:
            self.stages[stage].ready[sender] = time.monotonic()
            if not self._earlier or time.monotonic() > self._started_at + self._run.settings.deadlines.lease_s:
                self._begin_if_ready()
            if self._genesis is None:
                await happened(self.made, within_s=wait_s)
        if self._genesis is None:
            return Message({"genesis": None, "beside": []})
        beside: list[Value] = [one.to_value() for one in self._genesis if abs(one.stage - stage) == 1]
        return Message({"genesis": self._genesis[stage].to_value(), "beside": beside})

    def _begin_if_ready(self) -> None:
        now = time.monotonic()
        for start in self.stages:
            start.ready = {peer: at for peer, at in start.ready.items() if now - at < GENESIS_POLL_S}
        missing = self.missing()
        self._emit({"event": "waiting", "missing": {str(stage): count for stage, count in missing.items()}})
        if missing:
            return
        self._genesis = self._signed([tuple(start.ready) for start in self.stages])
        self._begin(self._genesis)
        self._emit({"event": "genesis", "version": self._run.version})
        self.made.set()

    def begin_again(
        self, stages: list[StageStart], members: Sequence[Collection[PeerId]], *, era: int
    ) -> list[Genesis]:
        """Geneses of a later era, with these members of each stage; whoever asks from now on gets these states.

        The run's states and leases are those of the new beginning already.
        """
        self.stages, self._era = stages, era
        self._genesis = self._signed(members)
        return self._genesis

    def _signed(self, members: Sequence[Collection[PeerId]]) -> list[Genesis]:
        return [self._sign_genesis(stage, start, members) for stage, start in enumerate(self.stages)]

    def _sign_genesis(self, stage: int, start: StageStart, members: Sequence[Collection[PeerId]]) -> Genesis:
        beside = [other for number, other in enumerate(members) if abs(number - stage) == 1]
        neighbours = tuple(sorted({peer for other in beside for peer in other}))
        unsigned = Genesis(
            self._run.run_id,
            StageIndex(stage),
            Version(start.state.version),
            start.offer.digest,
            tuple(sorted(members[stage])),
            self._run.leases if stage == 0 else LeaseTable(),
            self._run.host_key.peer_id,
            self._run.run_key.peer_id,
            neighbours[:MAX_NEIGHBOURS],
            self._era,
        )
        return replace(unsigned, signature=self._run.run_key.sign(unsigned.signed_bytes()))

    async def _on_snapshot(self, sender: PeerId, request: Message) -> Message:
        fields = Fields("snapshot request", request.meta)
        return self.stages[fields.integer("stage", high=len(self.stages) - 1)].offer.to_message()

    async def _on_chunk(self, sender: PeerId, request: Message) -> Message:
        fields = Fields("chunk request", request.meta)
        start = self.stages[fields.integer("stage", high=len(self.stages) - 1)]
        index = fields.integer("index", high=1 << 32)
        if index >= len(start.chunks):
            raise RemoteError("protocol", f"chunk {index} of {len(start.chunks)}", sender)
        return Message({}, start.chunks[index])


def stage_start(stage: int, state: StageState) -> StageStart:
    chunks = state_chunks(state)
    hashes = tuple(chunk_hash(chunk) for chunk in chunks)
    total = sum(len(chunk) for chunk in chunks)
    assert merkle_root(hashes, total) == state_digest(state)
    return StageStart(state, chunks, Offer(stage, state.version, state_digest(state), hashes, total, None))
