"""This is where the host judges: it anchors states, replays what a peer is accused of, and bans under the run key."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bootstrap.followed_stage import FollowedStage
from bootstrap.ledger import Ledger
from bootstrap.run_folder import PreparedRun
from swarm.core.errors import LocalError, RemoteError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId, StageIndex, Version
from swarm.host_protocol import ACCUSE, ANCHOR, BAN, MAX_ACCUSATION_BYTES
from swarm.network.outcasts import GuardedTransport
from swarm.network.transport import Message
from verification.anchor import Anchor
from verification.evidence import SUFFIX, Evidence
from verification.replay.judge import judge
from verification.standing import Ban
from verification.ticket import Ticket

log = logging.getLogger(__name__)

KEPT_ANCHORS = 6
MAX_WAITING = 8
"""Accusations on disk that are not judged yet; whoever brings one more is asked to come again."""
TELL_S = 5.0


class Justice:
    """The run key's side of verification."""

    def __init__(
        self,
        run: PreparedRun,
        transport: GuardedTransport,
        ledger: Ledger,
        emit: Callable[[dict[str, Any]], None],
        peers: Callable[[], Iterable[PeerId]],
    ) -> None:
        """`peers` are those to tell of a ban."""
        self._run = run
        self._transport = transport
        self._ledger = ledger
        self._emit = emit
        self._peers = peers
        self._folder = run.folder.root / "evidence"
        self._anchors: list[dict[int, Anchor]] = [{} for _ in range(run.settings.model.num_stages)]
        """Of each stage, by version."""
        self._tickets: dict[PeerId, Ticket] = {}
        self._waiting: asyncio.Queue[tuple[PeerId, Path]] = asyncio.Queue(MAX_WAITING)
        self.bans: dict[PeerId, Ban] = {}
        for event in ledger.events("ban", "ticket"):
            if event.kind == "ban":
                ban = Ban.from_value(event.facts)
                self.bans[ban.peer_id] = ban
                transport.shut_out(ban.peer_id)
            else:
                ticket = Ticket.from_value(event.facts)
                self._tickets[ticket.peer_id] = ticket

    def serve(self) -> None:
        """Begin to answer."""
        self._transport.serve(ANCHOR, self._on_anchor, max_body_bytes=0)
        self._transport.serve(ACCUSE, self._on_accuse, max_body_bytes=MAX_ACCUSATION_BYTES)

    # -- admission ----------------------------------------------------------------------------------------

    def admit(self, peer: PeerId, stage: StageIndex, chain_end: bytes) -> Ticket:
        """The peer's ticket. Raises RemoteError if it has one with another hash chain: its draws would be two."""
        held = self._tickets.get(peer)
        if held is not None and held.chain_end != chain_end:
            raise RemoteError("standing", f"{peer} was admitted with another hash chain; use a new identity", peer)
        if held is None or held.stage != stage:
            held = Ticket(self._run.run_id, peer, stage, chain_end).signed_by(self._run.run_key)
            self._tickets[peer] = held
            self._ledger.append("ticket", held.to_value())
        return held

    # -- anchors ------------------------------------------------------------------------------------------

    def anchor_genesis(self, stage: StageIndex, followed: FollowedStage, state_digest: bytes) -> None:
        """The state a stage begins at."""
        self._anchor(stage, Anchor.of_chain(followed.chain, state_digest))

    def anchor_if_agreed(
        self, stage: StageIndex, followed: FollowedStage, version: int, digests: dict[PeerId, str]
    ) -> None:
        """Anchor a version once more than two thirds of its members have stated one digest of it."""
        chain = followed.at(version)
        held = self._anchors[stage]
        if chain is None or version in held:
            return
        stated = [digests[peer] for peer in chain.members if peer in digests]
        for found in sorted(set(stated)):
            if 3 * stated.count(found) > 2 * len(chain.members):
                self._anchor(stage, Anchor.of_chain(chain, bytes.fromhex(found)))

    def _anchor(self, stage: StageIndex, anchor: Anchor) -> None:
        held = self._anchors[stage]
        held[int(anchor.version)] = anchor.signed_by(self._run.run_key)
        for old in sorted(held)[:-KEPT_ANCHORS]:
            del held[old]

    async def _on_anchor(self, sender: PeerId, request: Message) -> Message:
        fields = Fields("anchor request", request.meta)
        stage, version = fields.integer("stage", high=len(self._anchors) - 1), fields.integer("version")
        fields.done()
        held = self._anchors[stage]
        found = max((number for number in held if number <= version), default=None)
        if found is None:
            raise TransientError(f"no state of stage {stage} up to version {version} is anchored here")
        return Message({"anchor": held[found].to_value()})

    # -- accusations --------------------------------------------------------------------------------------

    async def _on_accuse(self, sender: PeerId, request: Message) -> Message:
        if sender not in self._tickets:
            raise RemoteError("standing", f"{sender} is not admitted", sender)
        if self._waiting.full():
            raise TransientError(f"{MAX_WAITING} accusations are waiting to be judged")
        body = request.body
        evidence = await asyncio.to_thread(Evidence.from_bytes, body, max_bytes=MAX_ACCUSATION_BYTES)
        if evidence.run_id != self._run.run_id:
            raise RemoteError("evidence", f"evidence of run {evidence.run_id[:12]}, not of this one", sender)
        if evidence.accused in self.bans:
            return Message()
        path = self._folder / f"{evidence.kind}-{evidence.accused[-8:]}-{evidence.digest().hex()[:16]}{SUFFIX}"
        if not await asyncio.to_thread(_write_new, path, body):
            return Message()  # two auditors found the same
        if self._waiting.full():
            await asyncio.to_thread(path.unlink, missing_ok=True)
            raise TransientError(f"{MAX_WAITING} accusations are waiting to be judged")
        self._waiting.put_nowait((sender, path))
        return Message()

    async def run(self) -> None:
        """Judge what is brought, one after another, for ever."""
        while True:
            accuser, path = await self._waiting.get()
            try:
                await self._judge(accuser, path)
            except (RemoteError, LocalError) as error:
                await asyncio.to_thread(path.unlink, missing_ok=True)
                self._emit({"event": "dismissed", "accuser": accuser, "reason": str(error)})

    async def _judge(self, accuser: PeerId, path: Path) -> None:
        evidence = Evidence.from_bytes(await asyncio.to_thread(path.read_bytes), max_bytes=MAX_ACCUSATION_BYTES)
        if evidence.accused in self.bans:
            await asyncio.to_thread(path.unlink, missing_ok=True)
            return
        verdict = await asyncio.to_thread(judge, evidence, run_key=self._run.run_key.peer_id)
        log.info("%s accused of %s by %s: %s", evidence.accused, evidence.kind, accuser, verdict.reason)
        if not verdict.guilty:
            await asyncio.to_thread(path.unlink, missing_ok=True)
            self._emit(
                {"event": "acquitted", "accuser": accuser, "peer_id": evidence.accused, "reason": verdict.reason}
            )
            return
        ban = Ban(
            self._run.run_id,
            evidence.accused,
            evidence.stage,
            Version(evidence.version),
            evidence.kind,
            evidence.digest(),
        ).signed_by(self._run.run_key)
        self._ledger.append("ban", ban.to_value())
        self.bans[ban.peer_id] = ban
        self._emit(
            {
                "event": "banned",
                "peer_id": ban.peer_id,
                "stage": ban.stage,
                "kind": ban.kind,
                "step": ban.version,
                "evidence": str(path),
                "accuser": accuser,
                "reason": verdict.reason,
            }
        )
        await self._tell(ban)

    async def _tell(self, ban: Ban) -> None:
        """Everyone, the banned peer too: then it is shut out."""

        async def tell(peer: PeerId) -> None:
            with contextlib.suppress(TransientError, RemoteError):
                await self._transport.call(
                    peer, BAN, Message({"ban": ban.to_value()}), timeout_s=TELL_S, max_body_bytes=0
                )

        await asyncio.gather(*(tell(peer) for peer in sorted({*self._peers(), ban.peer_id})))
        self._transport.shut_out(ban.peer_id)


def _write_new(path: Path, body: bytes | bytearray | memoryview) -> bool:
    """Whether it was not there yet."""
    if path.exists():
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    return True
