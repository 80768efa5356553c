"""This is where the host serves a run: admits, begins the stages, records results, archives, evaluates, ends it.

Training goes on without it once begun; what it holds in memory is rebuilt from the ledger.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from bootstrap.following import Following
from bootstrap.justice import Justice
from bootstrap.ledger import Ledger
from bootstrap.lost_quorum import LostQuorum
from bootstrap.progress import PeerFigures, RunProgress
from bootstrap.run_folder import PreparedRun
from swarm.checkpoint.archive import CheckpointMeta, CheckpointWriter, keep_last
from swarm.checkpoint.state import StageState, chunk_hash, merkle_root, state_chunks, state_digest
from swarm.checkpoint.transfer import CHUNK, SNAPSHOT, Offer, fetch_state
from swarm.core.canonical import Value
from swarm.core.contribution import MAX_NEIGHBOURS, Result
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields, value_or_none
from swarm.core.ids import PeerId, StageIndex, Version
from swarm.core.leases import LeaseTable
from swarm.core.stage_chain import Genesis
from swarm.host_protocol import (
    ADMIT,
    FILE,
    FILE_PIECE_BYTES,
    FINISH,
    GENESIS,
    GOODBYE,
    REPORT,
    RESULT,
    RUN,
    StepReport,
)
from swarm.identity import verify
from swarm.manifest import settings_to_value
from swarm.network.loop import happened
from swarm.network.outcasts import GuardedTransport
from swarm.network.transport import Message, Transport
from swarm.witness_service import VoteLog, WitnessService

log = logging.getLogger(__name__)

KEPT_CHECKPOINTS = 3
EVALUATE_AT_ONCE = 4
KEEP_UP_S = 1.0
LONGEST_GENESIS_WAIT_S = 10.0
HELD_SNAPSHOTS = 3
"""Snapshots a peer keeps."""
GENESIS_POLL_S = 15.0
"""A peer that has not asked for the genesis for this long is not ready any more."""


@dataclass(frozen=True, kw_only=True)
class CoordinatorSettings:
    """What the host's owner chooses; the run's settings are everyone's."""

    evaluate_tokens: int = 65536
    """Held-out tokens per evaluation."""
    kept_checkpoints: int = KEPT_CHECKPOINTS


@dataclass
class _StageStart:
    """A stage before its genesis."""

    state: StageState
    chunks: list[bytes | bytearray | memoryview]
    offer: Offer
    ready: dict[PeerId, float] = field(default_factory=dict)


class VersionGone(TransientError):
    """No live peer holds the version any more."""


class Coordinator:
    """The host's side of one run."""

    def __init__(
        self,
        run: PreparedRun,
        transport: Transport,
        ledger: Ledger,
        settings: CoordinatorSettings,
        emit: Callable[[dict[str, Any]], None],
    ) -> None:
        self.run = run
        self._transport = GuardedTransport(transport)
        self._ledger = ledger
        self._settings = settings
        self._emit = emit
        self.progress = RunProgress(run.settings.model.num_stages, run.version)
        self._stages = [_stage_start(stage, state) for stage, state in enumerate(run.states)]
        self._genesis: list[Genesis] | None = None
        self._genesis_made = asyncio.Event()
        self._earlier: list[Genesis] = self._remember()
        """Where the stages began under an earlier process of this host, whose peers may still be training."""
        self._started_at = time.monotonic()
        self._changed = asyncio.Event()
        self._files = {
            run.settings.data.train_digest: run.data.train_path,
            run.settings.data.held_out_digest: run.data.held_out_path,
        }
        self._followed = Following(run.settings, ledger, self._transport)
        self.justice = Justice(run, self._transport, ledger, emit, self._present, self._followed)
        self._witness = WitnessService(
            run.run_id,
            run.host_key,
            run.host_key.peer_id,
            run.run_key.peer_id,
            VoteLog(run.folder.root / "voted.log"),
            self._is_of_stage,
        )
        lease_s = run.settings.deadlines.lease_s
        self._watched = [
            LostQuorum(StageIndex(stage), self._transport, run.host_key.peer_id, run.run_key, lease_s)
            for stage in range(run.settings.model.num_stages)
        ]
        self.held_out: dict[int, float] = {}
        self.checkpoint_paths: dict[int, str] = {}

    def serve(self) -> None:
        """Begin to answer."""
        for method, handler in (
            ("ping", self._on_ping),
            (RUN, self._on_run),
            (ADMIT, self._on_admit),
            (GENESIS, self._on_genesis),
            (FILE, self._on_file),
            (SNAPSHOT, self._on_snapshot),
            (CHUNK, self._on_chunk),
            (REPORT, self._on_report),
            (RESULT, self._on_result),
            (GOODBYE, self._on_goodbye),
        ):
            self._transport.serve(method, handler, max_body_bytes=0)
        self._witness.serve(self._transport)
        self.justice.serve()

    def _present(self) -> list[PeerId]:
        return [peer for peer, figures in self.progress.peers.items() if not figures.left]

    def _is_of_stage(self, peer: PeerId, stage: int) -> bool:
        figures = self.progress.peers.get(peer)
        return figures is not None and figures.stage == stage

    # -- the run's course ---------------------------------------------------------------------------------

    async def conduct(self) -> None:
        """From the genesis to the end of the run: evaluations, checkpoints, and the farewell."""
        settings = self.run.settings
        await self._genesis_made.wait()
        self.progress.started_at = time.time()
        first = max(self.run.version, self.progress.first_version)
        due = [v for v in range(first, settings.optimizer.total_steps + 1) if self._is_due(v) and v > self.run.version]
        for watched in self._watched:
            watched.heard()
        evaluation = asyncio.ensure_future(self._evaluate_and_tell(first))
        services = [
            asyncio.ensure_future(self._mend_lost_quorums()),
            asyncio.ensure_future(self.justice.run()),
            asyncio.ensure_future(self._keep_up()),
        ]
        try:
            for version in due:
                await self._reached(version)
                try:
                    await self._archive(version)
                except VersionGone as gone:  # the host was away too long: the next checkpoint will do
                    self._emit({"event": "skipped", "version": version, "reason": str(gone)})
            await evaluation
            if settings.optimizer.total_steps > first:
                await self._evaluate_and_tell(settings.optimizer.total_steps)
        finally:
            evaluation.cancel()
            for service in services:
                service.cancel()
        await self.farewell()

    async def _mend_lost_quorums(self) -> None:
        """Let stages go on whose voters have died in such number that nothing can be certified.

        All at once: a stage waits for those beside it, so what one loses in seconds all lose.
        """

        async def mend(stage: int, watched: LostQuorum) -> None:
            members = [p for p, figures in sorted(self.progress.peers.items()) if figures.stage == stage]
            changed = await watched.mend([peer for peer in members if not self.progress.peers[peer].left])
            if changed is not None:
                self._emit({"event": "reconfigured", "stage": stage, "voters": [*changed.voters]})

        while self.progress.done_versions() < self.run.settings.optimizer.total_steps:
            await asyncio.sleep(1.0)
            await asyncio.gather(*(mend(stage, watched) for stage, watched in enumerate(self._watched)))

    async def _keep_up(self) -> None:
        """Follow the stages also where a result did not come."""
        while True:
            await asyncio.sleep(KEEP_UP_S)
            for stage in list(self._followed):
                reported = [
                    (figures.last.version, peer)
                    for peer, figures in self.progress.peers.items()
                    if figures.stage == stage and not figures.left and figures.last is not None
                ]
                await self._followed.catch_up(stage, reported)
                self._anchor(StageIndex(stage))

    def _remember(self) -> list[Genesis]:
        """Replay the ledger: the last genesis and what came of it."""
        genesis: list[Genesis] = []
        for event in self._ledger.events("genesis", "admitted", "result"):
            if event.kind == "genesis":
                made = Genesis.from_value(event.facts)
                genesis = [*genesis[: made.stage], made]
                self.progress.steps.clear()
                self.progress.first_version = made.version
                continue
            assert isinstance(event.facts, dict)
            if event.kind == "result":
                self.progress.replay_result(event.facts, self.run.settings.microbatch_tokens)
            else:
                peer, stage = event.facts["peer"], event.facts["stage"]
                assert isinstance(peer, str)
                assert isinstance(stage, int)
                self.progress.peers[PeerId(peer)] = PeerFigures(stage, event.at, event.at, left=True)
        return genesis if len(genesis) == self.run.settings.model.num_stages else []

    def _take_up(self) -> None:
        """Peers of an earlier process of this host are at work: go on with their run."""
        self._genesis = self._earlier
        self._followed.take_up()
        self._emit({"event": "recovered", "version": self.progress.done_versions()})
        self._genesis_made.set()

    async def farewell(self) -> None:
        """Tell every peer that the run is over."""

        async def tell(peer: PeerId) -> None:
            with contextlib.suppress(TransientError, RemoteError):
                await self._transport.call(peer, FINISH, Message(), timeout_s=5.0, max_body_bytes=0)

        await asyncio.gather(*(tell(peer) for peer in self._present()))

    def _is_due(self, version: int) -> bool:
        settings = self.run.settings
        return version % settings.checkpoint.every_steps == 0 or version == settings.optimizer.total_steps

    async def _reached(self, version: int) -> None:
        """Until every stage has reported a state of this version."""
        while len(self.progress.digests.get(version, {})) < self.progress.num_stages:
            self._changed.clear()
            await happened(self._changed, within_s=1.0)

    async def _archive(self, version: int) -> None:
        """Write the checkpoint of this version, from whichever peers have its states."""
        settings = self.run.settings
        leases = LeaseTable()
        writer = await asyncio.to_thread(CheckpointWriter, self.run.folder.checkpoints, version)
        try:
            for stage, start in enumerate(self._stages):
                state, offer = await self._state_of(stage, version, start)
                if offer.chain is not None and stage == 0:
                    leases = offer.chain.leases
                await asyncio.to_thread(writer.add_stage, stage, state)
            meta = CheckpointMeta(
                model=settings.model,
                tokenizer=settings.data.tokenizer,
                run=_json(settings_to_value(settings)),
                data_position=_json(leases.to_value()),
            )
            path = await asyncio.to_thread(writer.commit, meta)
        except BaseException:
            writer.abandon()
            raise
        await asyncio.to_thread(keep_last, self.run.folder.checkpoints, self._settings.kept_checkpoints)
        self.checkpoint_paths[version] = str(path)
        self._ledger.append("checkpoint", {"version": version})
        self._emit({"event": "checkpoint", "version": version, "path": str(path)})

    def _is_gone(self, stage: int, version: int) -> bool:
        """Whether every live peer of the stage is so far ahead that none holds the version any more."""
        reports = [f.last for f in self.progress.peers.values() if f.stage == stage and not f.left and f.last]
        kept = HELD_SNAPSHOTS * self.run.settings.checkpoint.snapshot_every
        return bool(reports) and all(report.version > version + kept for report in reports)

    async def _state_of(self, stage: int, version: int, start: _StageStart) -> tuple[StageState, Offer]:
        while True:
            if self._is_gone(stage, version):
                raise VersionGone(f"no peer of stage {stage} holds version {version} any more")
            for peer in sorted(self.progress.digests[version].get(stage, {})):
                if self.progress.peers[peer].left:
                    continue
                try:
                    return await fetch_state(
                        self._transport, peer, stage, start.state.layout, self.run.settings, version=version
                    )
                except (TransientError, RemoteError, TimeoutError) as error:
                    log.info("state of stage %d version %d from %s: %s", stage, version, peer[-6:], error)
            await asyncio.sleep(0.5)

    async def _evaluate_and_tell(self, version: int) -> None:
        try:
            loss = await self.evaluate(version)
        except VersionGone as gone:
            self._emit({"event": "skipped", "version": version, "reason": str(gone)})
            return
        self.held_out[version] = loss
        self._emit({"event": "evaluation", "version": version, "held_out_loss": loss})

    async def evaluate(self, version: int) -> float:
        """Held-out loss at a version in nats a token, computed by the swarm itself."""
        settings = self.run.settings
        per_batch = settings.microbatch_tokens
        available = max(1, (settings.data.num_held_out_tokens - 1) // per_batch)
        count = max(1, min(available, self._settings.evaluate_tokens // per_batch))
        places = asyncio.Semaphore(EVALUATE_AT_ONCE)

        async def one(index: int) -> tuple[float, int]:
            async with places:
                turn = index
                while True:
                    sources = [p for p, f in sorted(self.progress.peers.items()) if f.stage == 0 and not f.left]
                    if sources:
                        source = sources[turn % len(sources)]
                        try:
                            reply = await self._transport.call(
                                source,
                                "evaluate",
                                Message({"version": version, "index": index}),
                                timeout_s=settings.deadlines.hop_s * 2,
                                max_body_bytes=0,
                            )
                            fields = Fields("evaluation", reply.meta)
                            return fields.number("loss_sum"), fields.integer("num_targets", low=1)
                        except (TransientError, RemoteError) as error:
                            log.info("evaluation of %d by %s: %s", version, source[-6:], error)
                    if self._is_gone(0, version):
                        raise VersionGone(f"no peer of stage 0 holds version {version} any more")
                    turn += 1
                    await asyncio.sleep(0.2)

        answers = await asyncio.gather(*(one(index) for index in range(count)))
        return sum(loss for loss, _ in answers) / sum(targets for _, targets in answers)

    # -- answers ------------------------------------------------------------------------------------------

    async def _on_ping(self, sender: PeerId, request: Message) -> Message:
        return Message()

    async def _on_run(self, sender: PeerId, request: Message) -> Message:
        return Message(self.run.signed.to_value())

    async def _on_admit(self, sender: PeerId, request: Message) -> Message:
        fields = Fields("admission request", request.meta)
        num_stages = self.run.settings.model.num_stages
        chain_end = fields.octets("chain_end", length=32)
        wish = fields.integer("stage", high=num_stages - 1) if fields.optional("stage") else None
        known = self.progress.peers.get(sender)
        if known is not None and wish is None:
            wish = known.stage
        if wish is None:
            counts = [
                sum(1 for figures in self.progress.peers.values() if figures.stage == stage and self._is_live(figures))
                for stage in range(num_stages)
            ]
            wish = counts.index(min(counts))
        ticket = self.justice.admit(sender, StageIndex(wish), chain_end)
        now = time.time()
        self.progress.peers[sender] = PeerFigures(wish, now, now)
        self._ledger.append("admitted", {"peer": sender, "stage": wish})
        self._emit({"event": "admitted", "peer_id": sender, "stage": wish})
        bans: list[Value] = [ban.to_value() for ban in self.justice.bans.values()]
        quarantines: list[Value] = [quarantine.to_value() for quarantine in self.justice.quarantines.values()]
        answer: dict[str, Value] = {"stage": wish, "ticket": ticket.to_value()}
        return Message({**answer, "bans": bans, "quarantines": quarantines})

    def _is_live(self, figures: PeerFigures) -> bool:
        return not figures.left

    async def _on_genesis(self, sender: PeerId, request: Message) -> Message:
        fields = Fields("genesis request", request.meta)
        stage = fields.integer("stage", high=self.run.settings.model.num_stages - 1)
        ready, wait_s = fields.boolean("ready"), min(fields.number("wait_s"), LONGEST_GENESIS_WAIT_S)
        figures = self.progress.peers.get(sender)
        if figures is None or figures.stage != stage:
            raise RemoteError("standing", f"{sender} is not admitted to stage {stage}", sender)
        if ready and self._genesis is None:
            self._stages[stage].ready[sender] = time.monotonic()
            if not self._earlier or time.monotonic() > self._started_at + self.run.settings.deadlines.lease_s:
                self._begin_if_ready()
            if self._genesis is None:
                await happened(self._genesis_made, within_s=wait_s)
        genesis = self._genesis[stage] if self._genesis is not None else None
        return Message({"genesis": value_or_none(genesis)})

    def _begin_if_ready(self) -> None:
        now = time.monotonic()
        wanted = self.run.settings.limits.founders_per_stage
        for start in self._stages:
            start.ready = {peer: at for peer, at in start.ready.items() if now - at < GENESIS_POLL_S}
        missing = {n: wanted - len(start.ready) for n, start in enumerate(self._stages) if len(start.ready) < wanted}
        self._emit({"event": "waiting", "missing": {str(stage): count for stage, count in missing.items()}})
        if missing:
            return
        self.progress.steps.clear()
        self.progress.first_version = self.run.version
        self._genesis = [self._sign_genesis(stage, start) for stage, start in enumerate(self._stages)]
        for genesis in self._genesis:
            followed = self._followed.begin(genesis)
            found = _named_digest(self._stages[genesis.stage], genesis.name)
            self.justice.anchor_genesis(genesis.stage, followed, found)
            self._ledger.append("genesis", genesis.to_value())
        self._emit({"event": "genesis", "version": self.run.version})
        self._genesis_made.set()

    def _sign_genesis(self, stage: int, start: _StageStart) -> Genesis:
        beside = [other for number, other in enumerate(self._stages) if abs(number - stage) == 1]
        neighbours = tuple(sorted({peer for other in beside for peer in other.ready}))
        unsigned = Genesis(
            self.run.run_id,
            StageIndex(stage),
            Version(start.state.version),
            start.offer.digest,
            tuple(sorted(start.ready)),
            self.run.leases if stage == 0 else LeaseTable(),
            self.run.host_key.peer_id,
            self.run.run_key.peer_id,
            neighbours[:MAX_NEIGHBOURS],
        )
        return replace(unsigned, signature=self.run.run_key.sign(unsigned.signed_bytes()))

    async def _on_file(self, sender: PeerId, request: Message) -> Message:
        fields = Fields("file request", request.meta)
        path = self._files.get(fields.octets("digest", length=32))
        offset = fields.integer("offset")
        if path is None:
            raise RemoteError("protocol", "no file with that digest", sender)

        def piece() -> bytes:
            with path.open("rb") as file:
                file.seek(offset)
                return file.read(FILE_PIECE_BYTES)

        return Message({}, await asyncio.to_thread(piece))

    async def _on_snapshot(self, sender: PeerId, request: Message) -> Message:
        fields = Fields("snapshot request", request.meta)
        stage = fields.integer("stage", high=self.run.settings.model.num_stages - 1)
        return self._stages[stage].offer.to_message()

    async def _on_chunk(self, sender: PeerId, request: Message) -> Message:
        fields = Fields("chunk request", request.meta)
        start = self._stages[fields.integer("stage", high=self.run.settings.model.num_stages - 1)]
        index = fields.integer("index", high=1 << 32)
        if index >= len(start.chunks):
            raise RemoteError("protocol", f"chunk {index} of {len(start.chunks)}", sender)
        return Message({}, start.chunks[index])

    async def _on_report(self, sender: PeerId, request: Message) -> Message:
        fields = Fields("report", request.meta)
        report = StepReport.from_value(fields.message("report"))
        if self._genesis is None:
            if not self._earlier or sender not in self.progress.peers:
                raise RemoteError("standing", "the run has not begun", sender)
            self._take_up()
        self.progress.take(sender, report)
        self.progress.peers[sender].left = False
        self._tell_step(sender, report)
        if report.state_digest:
            self._anchor(StageIndex(report.stage))
        self._changed.set()
        known = report.stage in self.progress.steps[report.version - 1].ids
        return Message({"wants_result": not known})

    async def _on_result(self, sender: PeerId, request: Message) -> Message:
        result = Result.from_value(Fields("result call", request.meta).message("result"))
        roster = result.roster
        if roster.run_id != self.run.run_id or not verify(result.leader, result.signed_bytes(), result.signature):
            raise RemoteError("signature", "the result is not signed by its leader", sender)
        self._followed.take(result)
        self._anchor(roster.stage)
        before = self.progress.done_versions()
        if not self.progress.take_result(result):
            return Message()
        self._watched[roster.stage].heard()
        facts: Value = {
            "stage": roster.stage,
            "step": roster.step,
            "name": result.new_name,
            "members": len(roster.contributions),
            "joins": [*roster.joins],
            "leaves": [[d.peer_id, d.reason] for d in roster.leaves],
            "ids": [item.microbatch_id for item in result.work_done()],
        }
        self._ledger.append("result", facts)
        for departure in roster.leaves:
            self._mark(departure.peer_id, left=True)
            self._emit(
                {"event": "left", "stage": roster.stage, "peer_id": departure.peer_id, "reason": departure.reason}
            )
        for peer in roster.joins:
            self._mark(peer, left=False)
            self._emit({"event": "joined", "stage": roster.stage, "peer_id": peer})
        for version in range(before, self.progress.done_versions()):
            self._emit({"event": "version", "version": version + 1})
        self._changed.set()
        return Message()

    def _anchor(self, stage: StageIndex) -> None:
        """Anchor what the stage's members agree on by now."""
        followed = self._followed.get(stage)
        if followed is not None:
            for version in sorted(self.progress.digests)[-HELD_SNAPSHOTS:]:
                self.justice.anchor_if_agreed(stage, followed, version, self.progress.digests[version].get(stage, {}))

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
            }
        )

    async def _on_goodbye(self, sender: PeerId, request: Message) -> Message:
        figures = self.progress.peers.get(sender)
        if figures is not None:
            figures.left = True
            self._emit({"event": "goodbye", "peer_id": sender, "stage": figures.stage})
        return Message()

    def report(self) -> dict[str, Any]:
        """The run's figures for `--report`."""
        first, last = self.run.version, self.run.settings.optimizer.total_steps
        summary = self.progress.summary()
        summary["held_out_loss"] = {"start": self.held_out.get(first), "end": self.held_out.get(last)}
        summary["run_id"] = self.run.run_id
        summary["checkpoint"] = self.checkpoint_paths.get(last)
        return summary


def _stage_start(stage: int, state: StageState) -> _StageStart:
    chunks = state_chunks(state)
    hashes = tuple(chunk_hash(chunk) for chunk in chunks)
    total = sum(len(chunk) for chunk in chunks)
    assert merkle_root(hashes, total) == state_digest(state)
    return _StageStart(state, chunks, Offer(stage, state.version, state_digest(state), hashes, total, None))


def _named_digest(start: _StageStart, name: bytes) -> bytes:
    """Digest of the state once it bears the name of the version that the genesis makes it: its first chunk differs."""
    chunks = state_chunks(replace(start.state, name=name))
    return merkle_root([chunk_hash(chunks[0]), *start.offer.hashes[1:]], start.offer.total_bytes)


def _json(value: Value) -> Any:
    """The value as JSON has it: bytes in hex."""
    return json.loads(json.dumps(value, default=lambda data: bytes(data).hex()))
