"""The states that others state, held against a peer's own: replicas are exact, so one of two is wrong.

No chance is needed. A statement commits to all chunks, so equal digests clear a peer whole; where they differ, the
first chunk that does is computed again from the last anchored state and the certified results, which shows who is
wrong. It may be this peer: then it takes its own word back. Others have some time to do so too: a broken machine is
no liar. What proves them wrong is held meanwhile, for what it was made from is kept for a few versions only.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from peer.audit.accuser import Accuser
from peer.pipeline.compute import Urgency
from peer.round.stage_steps import StageSteps
from peer.stage.events import Applied, StateFault
from peer.state.provable_past import provable_past
from peer.state.state_check import StateCheck
from swarm.checkpoint.snapshots import Snapshot
from swarm.checkpoint.state import chunk_hash, merkle_path, num_chunks_of, verify_hashes
from swarm.core.errors import LocalError, RemoteError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId
from swarm.core.kept import keep_newest
from swarm.host_protocol import STATE, STATED, WITHDRAW, WITHDRAWN
from swarm.identity.key import Identity
from swarm.network.loop import happened
from swarm.network.transport import Message
from verification.kinds.step_fraud import OldChunk, StepFraud
from verification.replay.stepped_again import chunk_again, needs_of
from verification.state.state_statement import MAX_STATED, StateStatement

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
"""While a snapshot is not anchored, or a statement is wrong; and after each step."""
IDLE_S = 10.0
GRACE_S = 5.0
"""From when a statement is found wrong until its maker is accused of it: a broken machine looks once, computes a chunk
again, and takes its word back. Not steps: of these there may be twenty in a second."""
MAX_PENDING = 4
"""Wrong statements whose makers have time yet, one of a peer: each with the chunks and parts that prove it."""
MAX_JUDGED = 256


def state_of(snapshot: Snapshot, me: Identity) -> StateStatement:
    """A peer's word for a snapshot of its own."""
    chain = snapshot.chain
    statement = StateStatement(
        run_id=chain.run_id,
        stage=chain.stage,
        version=chain.version,
        name=chain.name,
        peer_id=me.peer_id,
        state_digest=snapshot.digest,
        total_bytes=snapshot.total_bytes,
    )
    return statement.signed_by(me)


@dataclass
class StepAuditCounters:
    """What this peer's audits of steps came to; for status and reports."""

    chunks: int = 0
    """Computed again, because two had stated different states."""
    frauds: int = 0
    own_faults: int = 0
    withdrawn: int = 0
    """Wrong statements that their makers took back."""
    skipped: int = 0
    """What could not be shown from here."""


@dataclass
class _Wrong:
    """A statement that was found wrong."""

    case: StepFraud
    found_at: float


@dataclass
class StepAuditor:
    """Audits the steps of the stage's other members, at every snapshot."""

    steps: StageSteps
    host: PeerId
    accuser: Accuser
    state_check: StateCheck
    counters: StepAuditCounters = field(default_factory=StepAuditCounters)
    _said: int = -1
    """The newest version that was stated."""
    _settled: set[int] = field(default_factory=set)
    """Versions of which everybody had time to state something else, and nobody did."""
    _stepped: asyncio.Event = field(default_factory=asyncio.Event)
    _judged: dict[bytes, None] = field(default_factory=dict)
    """Signatures of statements that were held against a chunk that was computed again; the newest."""
    _pending: dict[PeerId, _Wrong] = field(default_factory=dict)

    def applied(self, applied: Applied) -> None:
        """A step was taken: there may be a new snapshot, and others have one."""
        self._stepped.set()

    def faulty(self, event: StateFault) -> None:
        """What this peer has stated is to be taken back."""
        self._stepped.set()

    async def run(self) -> None:
        """State what is new and look at what others state, for ever. Without the host there is nobody to tell."""
        while True:
            try:
                self._stepped.clear()
                await self._state()
                await self._withdraw()
                await self._accuse()
                held = self.steps.context.snapshots.versions()
                self._settled &= set(held)
                for version in sorted(set(held) - self._settled):
                    await self._look_at(version)
                is_open = bool(self._pending or set(held) - self._settled - self.state_check.checked)
                await happened(self._stepped, within_s=LOOK_EVERY_S if is_open else IDLE_S)
            except (TransientError, RemoteError, TimeoutError) as error:
                log.debug("stated states: %s", error)
                await asyncio.sleep(LOOK_EVERY_S)

    async def _state(self) -> None:
        steps = self.steps
        for version in steps.context.snapshots.versions():
            snapshot = steps.context.snapshots.get(version)
            if snapshot is None or version <= self._said:
                continue
            statement = state_of(snapshot, steps.context.identity)
            try:
                await self._call(STATE, Message({"statement": statement.to_value()}, b"".join(snapshot.hashes)))
            except RemoteError as error:
                log.info("the host does not take the state of version %d: %s", version, error)
            self._said = version

    async def _withdraw(self) -> None:
        """Take back what this peer has stated, if its state was found wrong: nobody knows since when it is."""
        snapshots = self.steps.context.snapshots
        if snapshots.is_to_take_back and self._said >= 0:
            await self._call(WITHDRAW, Message({"version": self._said}))
        snapshots.is_to_take_back = False

    async def _accuse(self) -> None:
        """Whoever had time to take a wrong statement back."""
        for peer, wrong in list(self._pending.items()):
            if time.monotonic() < wrong.found_at + GRACE_S:
                continue
            try:
                await self.accuser.accuse(wrong.case)
            except RemoteError as error:
                log.info("%s is not accused of its state: %s", peer, error)
                self.counters.withdrawn += error.kind == WITHDRAWN
            del self._pending[peer]

    async def _look_at(self, version: int) -> None:
        steps = self.steps
        snapshot = steps.context.snapshots.get(version)
        if snapshot is None:
            return
        stage = int(steps.chain.stage)
        reply = await self._call(
            STATED, Message({"stage": stage, "version": version, "digest": snapshot.digest}), snapshot
        )
        others = _read_stated(reply, snapshot, steps.context.run_id)
        if not others and steps.version >= version + steps.context.settings.checkpoint.snapshot_every:
            self._settled.add(version)
        for statement, hashes in others:
            peer, signature = statement.peer_id, statement.signature
            if signature in self._judged or peer in self._pending or len(self._pending) >= MAX_PENDING:
                continue
            try:
                wrong = await self._audited(statement, hashes, snapshot)
            except LocalError as error:  # perhaps at the next look
                self.counters.skipped += 1
                log.info("state of version %d as %s has it: %s", version, peer, error)
                continue
            self._judged[signature] = None
            keep_newest(self._judged, MAX_JUDGED)
            if wrong is not None:
                self._pending[peer] = _Wrong(wrong, time.monotonic())
            if steps.context.snapshots.get(version) is not snapshot:
                return  # it was dropped: nothing can be held against it

    async def _audited(
        self, statement: StateStatement, hashes: Sequence[bytes], snapshot: Snapshot
    ) -> StepFraud | None:
        """What proves a statement wrong that differs from this peer's state; None: it is right. Raises as `_case`."""
        steps, version = self.steps, int(statement.version)
        case = await self._case(statement, hashes, snapshot)
        again = await steps.context.exact.run(Urgency.AUDIT, lambda: chunk_again(case, self.accuser.signed_run))
        self.counters.chunks += 1
        leaf = chunk_hash(again.body)
        if leaf != snapshot.hashes[case.chunk]:
            log.error(
                "stage %d: chunk %d of this peer's state of version %d is not what certified results make of the "
                "anchored state: a fault of this machine (memory, overclocking, disk); the state is loaded anew",
                *(statement.stage, case.chunk, version),
            )
            self.counters.own_faults += 1
            self.state_check.is_wrong_from(version)
            await self._withdraw()
        if leaf == case.leaf and again.total_bytes == statement.total_bytes:
            return None
        log.warning("%s states a wrong chunk %d of version %d", statement.peer_id, case.chunk, version)
        self.counters.frauds += 1
        return case

    async def _case(self, statement: StateStatement, hashes: Sequence[bytes], snapshot: Snapshot) -> StepFraud:
        """All that the first chunk in which they differ follows from. Raises LocalError if it is not here."""
        steps, version = self.steps, int(statement.version)
        pairs = zip(hashes, snapshot.hashes, strict=False)
        chunk = next((index for index, (one, other) in enumerate(pairs) if one != other), 0)
        past = await provable_past(steps, self.host, oldest=version, version=version)
        old = past.snapshot

        def read() -> tuple[tuple[OldChunk, ...], tuple[int, ...]]:
            needs = needs_of(old.chunk(0), chunk, layout=steps.replica.layout, cut=steps.replica.parts())
            chunks = (
                OldChunk(index=index, path=merkle_path(old.hashes, index), body=old.chunk(index))
                for index in needs.old_chunks
            )
            return tuple(chunks), needs.parts

        old_chunks, parts = await asyncio.to_thread(read)
        return StepFraud(
            statement=statement,
            chunk=chunk,
            leaf=hashes[chunk],
            path=merkle_path(hashes, chunk),
            past=past.past,
            old_chunks=old_chunks,
            parts=parts,
            bodies=tuple(tuple(bodies[part] if bodies else b"" for part in parts) for bodies in past.bodies),
        )

    async def _call(self, method: str, request: Message, snapshot: Snapshot | None = None) -> Message:
        call_s = self.steps.context.settings.deadlines.call_s
        largest = 2 * MAX_STATED * 32 * len(snapshot.hashes) if snapshot is not None else 0
        return await self.steps.context.transport.call(
            self.host, method, request, timeout_s=call_s, max_body_bytes=largest
        )


def _read_stated(reply: Message, snapshot: Snapshot, run_id: str) -> list[tuple[StateStatement, tuple[bytes, ...]]]:
    """What others sign of the snapshot's version, with their chunks' hashes. Raises RemoteError."""
    fields = Fields("stated states", reply.meta)
    statements = fields.items("statements", StateStatement.from_value, max_items=MAX_STATED)
    fields.done()
    found, at, chain = [], 0, snapshot.chain
    for statement in statements:
        size = 32 * num_chunks_of(statement.total_bytes)
        hashes = tuple(bytes(reply.body[start : start + 32]) for start in range(at, at + size, 32))
        at += size
        if (statement.stage, statement.version, statement.name) != (chain.stage, chain.version, chain.name):
            continue
        statement.check(run_id=run_id)
        verify_hashes(statement.state_digest, hashes, statement.total_bytes)
        found.append((statement, hashes))
    return found
