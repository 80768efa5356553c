"""Where a run's stages begin: who is ready, what they start from, and the geneses once enough are."""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bootstrap.state.run_folder import PreparedRun
from swarm.checkpoint.state import StageState, chunk_hash, merkle_root, root_as, state_chunks
from swarm.checkpoint.transfer import CHUNK, SNAPSHOT, Offer, states_s
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields, value_or_none
from swarm.core.ids import PeerId, StageIndex, Version
from swarm.core.pipeline.leases import LeaseTable
from swarm.core.round.basis import MAX_NEIGHBOURS
from swarm.core.state.recent_work import founding_work
from swarm.core.state.stage_chain import Genesis
from swarm.host_protocol import GENESIS
from swarm.log_format import printable
from swarm.model.layout import ParameterLayout
from swarm.network.loop import happened
from swarm.network.transport import Message, Transport

LONGEST_GENESIS_WAIT_S = 10.0
GENESIS_POLL_S = 15.0
"""A peer that has not asked for the genesis for this long is not ready any more."""
AMENDED_WAIT_S = 30.0
"""The peers of a run that was amended have so long to join again before the stages begin without them."""


@dataclass
class StageStart:
    """A stage before its genesis."""

    state: StageState
    chunks: list[bytes | bytearray | memoryview]
    offer: Offer
    ready: dict[PeerId, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StageSource:
    """A state at which a stage begins, as far as the host must know it."""

    layout: ParameterLayout
    version: int
    digest: bytes
    total_bytes: int
    hashes: tuple[bytes, ...]
    first_chunk: bytes | bytearray | memoryview

    @classmethod
    def of_start(cls, start: StageStart) -> "StageSource":
        offer = start.offer
        return cls(start.state.layout, offer.version, offer.digest, offer.total_bytes, offer.hashes, start.chunks[0])

    def digest_as(self, version: int, name: bytes) -> bytes:
        """Of the state as that version: by the genesis's name it is the first of its stage's new lineage."""
        return root_as(self.layout, self.first_chunk, self.hashes, self.total_bytes, version=version, name=name)


class Beginning:
    """The host's answers to those who wait for a run to begin."""

    def __init__(
        self,
        run: PreparedRun,
        earlier: list[Genesis],
        to_version: int,
        era: int,
        has_gone_on: Callable[[int], bool],
        stage_of: Callable[[PeerId], int | None],
        chain_end: Callable[[int, int], bytes],
        begin: Callable[[list[Genesis], Sequence[StageSource]], None],
        emit: Callable[[dict[str, Any]], None],
        known: Mapping[PeerId, int],
    ) -> None:
        """`earlier`: where the stages began under an earlier process of this host, whose peers may still be training;
        `to_version`: of which version the state was.

        `era`: of the geneses that are signed here. `has_gone_on` a stage from its genesis; `stage_of` a peer that is
        admitted; `chain_end`: of the host's hash chain for a stage and an era; `begin` is told the geneses as soon
        as they are signed. `known`: what is certified of the work of those who trained until the run was amended: they
        are waited for, for a while.
        """
        self._known = known
        self._wait_until = time.monotonic() + AMENDED_WAIT_S
        self._run = run
        self._has_gone_on = has_gone_on
        self._stage_of = stage_of
        self._chain_end = chain_end
        self._begin = begin
        self._emit = emit
        self._era = era
        self._genesis: list[Genesis] | None = earlier or None
        self.to_version = to_version
        """Of which version the state was that the stages began at."""
        begun = zip(run.states, run.hashes, strict=True)
        self.stages = [_started(stage, state, hashes) for stage, (state, hashes) in enumerate(begun)]
        self.waiting: list[dict[PeerId, float]] = [{} for _ in run.states]
        """Of each stage that has begun: who has found nobody of it who trains, and when it last said so."""
        self.lost: frozenset[int] = frozenset()
        """Stages of which nobody trains any more, as far as is known: whoever comes there waits here."""
        self.words: list[str] = [""] * len(run.states)
        """What those wait for, said by whoever looks after them."""
        self._told: dict[PeerId, int] = {}
        """The era whose genesis each peer was told last, of those that are admitted."""
        self.made = asyncio.Event()
        """The run has begun."""
        self.again = asyncio.Event()
        """Set when the stages begin (again), and replaced."""
        if earlier:
            self.made.set()

    def serve(self, transport: Transport) -> None:
        transport.serve(GENESIS, self._on_genesis, max_body_bytes=0)
        transport.serve(SNAPSHOT, self._on_snapshot, max_body_bytes=0)
        transport.serve(CHUNK, self._on_chunk, max_body_bytes=0)

    @property
    def geneses(self) -> list[Genesis]:
        """Of all stages, once the run has begun."""
        assert self._genesis is not None
        return self._genesis

    @property
    def _genesis_era(self) -> int | None:
        return None if self._genesis is None else self._genesis[0].era

    def missing(self) -> dict[int, int]:
        """How many peers of which stages have to come before the run can begin."""
        wanted = self._run.settings.limits.founders_per_stage
        return {n: wanted - len(start.ready) for n, start in enumerate(self.stages) if len(start.ready) < wanted}

    @property
    def states_s(self) -> float:
        """Seconds after which a transfer of the states of all stages has ended in any case."""
        return states_s(self._run.settings, (start.state.layout.num_values for start in self.stages))

    async def _on_genesis(self, sender: PeerId, request: Message) -> Message:
        fields, amendments = Fields("genesis request", request.meta), len(self._run.signed.amendments)
        if fields.integer("amendments") < amendments:
            said = "the run was amended"
            return _answered(None, (), 0, begins=False, is_lost=False, waits_for=said, amendments=amendments)
        stage = fields.integer("stage", high=len(self.stages) - 1)
        ready, wait_s = fields.boolean("ready"), min(fields.number("wait_s"), LONGEST_GENESIS_WAIT_S)
        if self._stage_of(sender) != stage:
            raise RemoteError("standing", f"{sender} is not admitted to stage {stage}", sender)
        if ready and self._genesis is None:
            self.stages[stage].ready[sender] = time.monotonic()
            self._begin_if_ready()
        elif ready and self._told.get(sender) == self._genesis_era:
            self.waiting[stage][sender] = time.monotonic()  # else it may begin by what it hears now
        if ready and (self._genesis is None or sender in self.waiting[stage]):
            await happened(self.again, within_s=wait_s)
        if self._genesis is None:
            said = self._who_is_missing()
            return _answered(None, (), 0, begins=False, is_lost=False, waits_for=said, amendments=amendments)
        self._told[sender] = self._genesis[stage].era
        beside = [one for one in self._genesis if abs(one.stage - stage) == 1]
        words = self.words[stage] if sender in self.waiting[stage] else ""
        return _answered(
            self._genesis[stage],
            beside,
            self.to_version,
            begins=not self._has_gone_on(stage),
            is_lost=stage in self.lost,
            waits_for=words,
            amendments=amendments,
        )

    def _who_is_missing(self) -> str:
        missing = ", ".join(f"{count} of stage {number}" for number, count in sorted(self.missing().items()))
        if missing:
            return f"the run begins when these have come: {missing}"
        return f"{len(self._expected())} who trained before the run was amended are waited for, for a while"

    def _expected(self) -> set[PeerId]:
        """Who trained until the run was amended, and has not joined again."""
        return {*self._known} - {peer for start in self.stages for peer in start.ready}

    def _begin_if_ready(self) -> None:
        now = time.monotonic()
        for start in self.stages:
            start.ready = {peer: at for peer, at in start.ready.items() if now - at < GENESIS_POLL_S}
        missing = self.missing()
        self._emit({"event": "waiting", "missing": {str(stage): count for stage, count in missing.items()}})
        if missing or (self._expected() and now < self._wait_until):
            return
        sources = [StageSource.of_start(start) for start in self.stages]
        geneses = self.signed(
            sources, [tuple(start.ready) for start in self.stages], self._run.leases, known=self._known
        )
        self._begin(geneses, sources)
        self.begun(geneses, self._run.version)
        self._emit({"event": "genesis", "version": self._run.version})
        self.made.set()

    def tell_waiting(self, words: str) -> None:
        """What those of all stages wait for who have found nobody that trains."""
        self.words = [words] * len(self.words)

    def begin_from(self, stage: int, start: StageStart) -> None:
        """Whoever asks the host for the stage's state from now on gets this."""
        self.stages[stage] = start

    def begun(self, geneses: list[Genesis], to_version: int) -> None:
        """The stages begin by these: whoever waits is told."""
        self._genesis, self.to_version = geneses, to_version
        self._era = geneses[0].era
        self.lost = frozenset()
        for waiting in self.waiting:
            waiting.clear()
        self.words = [""] * len(self.words)
        self.again.set()
        self.again = asyncio.Event()

    def signed(
        self,
        sources: Sequence["StageSource"],
        members: Sequence[Collection[PeerId]],
        leases: LeaseTable,
        *,
        known: Mapping[PeerId, int],
        era: int | None = None,
    ) -> list[Genesis]:
        """Geneses of all stages, with these members of each, and what is `known` of the work of any of them.

        Of more than a stage takes those come first who are known to have done the most, then those named first.
        """
        settings, made, era = self._run.settings, [], self._era if era is None else era
        most = settings.limits.max_peers_per_stage
        members = [sorted(of_stage, key=lambda peer: -known.get(peer, 0))[:most] for of_stage in members]
        step_tokens = settings.microbatches_of_one * settings.microbatch_targets
        if settings.has_windows:  # each has done a window
            step_tokens *= len(members[0])
        for stage, source in enumerate(sources):
            beside = [other for number, other in enumerate(members) if abs(number - stage) == 1]
            neighbours = tuple(sorted({peer for other in beside for peer in other}))
            unsigned = Genesis(
                self._run.run_id,
                StageIndex(stage),
                Version(source.version),
                source.digest,
                (founders := tuple(sorted(members[stage]))),
                leases if stage == 0 else LeaseTable(),
                self._run.host_key.peer_id,
                self._run.run_key.peer_id,
                neighbours[:MAX_NEIGHBOURS],
                self._chain_end(stage, era),
                era,
                founding_work(founders, known, step_tokens=step_tokens),
                len(self._run.signed.amendments),
            )
            made.append(unsigned.signed_by(self._run.run_key))
        return made

    async def _on_snapshot(self, sender: PeerId, request: Message) -> Message:
        fields = Fields("snapshot request", request.meta)
        return self.stages[fields.integer("stage", high=len(self.stages) - 1)].offer.to_message()

    async def _on_chunk(self, sender: PeerId, request: Message) -> Message:
        fields = Fields("chunk request", request.meta)
        start = self.stages[fields.integer("stage", high=len(self.stages) - 1)]
        version, index = fields.integer("version"), fields.integer("index", high=1 << 32)
        if version != start.offer.version:  # the stages have begun again since the state was offered
            raise TransientError(f"version {start.offer.version} is given here, not {version}")
        if index >= len(start.chunks):
            raise RemoteError("protocol", f"chunk {index} of {len(start.chunks)}", sender)
        return Message({}, start.chunks[index])


def _answered(
    genesis: Genesis | None,
    beside: Sequence[Genesis],
    to_version: int,
    *,
    begins: bool,
    is_lost: bool,
    waits_for: str,
    amendments: int,
) -> Message:
    return Message(
        {
            "genesis": value_or_none(genesis),
            "beside": [one.to_value() for one in beside],
            "to_version": to_version,
            "begins": begins,
            "is_lost": is_lost,
            "waits_for": printable(waits_for),
            "amendments": amendments,
        }
    )


def stage_start(stage: int, state: StageState) -> StageStart:
    """Its state is hashed: not for the event loop."""
    return _started(stage, state, tuple(chunk_hash(chunk) for chunk in state_chunks(state)))


def _started(stage: int, state: StageState, hashes: tuple[bytes, ...]) -> StageStart:
    chunks = state_chunks(state)
    total = sum(len(chunk) for chunk in chunks)
    return StageStart(state, chunks, Offer(stage, state.version, merkle_root(hashes, total), hashes, total, None))
