"""Who comes back to a run whose peers had all left, or all those of a stage: who is there, and who is waited for.

Whoever comes back and finds nobody of its stage who trains waits at the host. When enough of each stage that was lost
are there, the run goes on from the newest state that is held together (`bootstrap.state.going_on`). Where they do not
come back, members of other stages are posted there (`bootstrap.state.refilling`).
"""

import asyncio
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bootstrap.directory.postings import Postings
from bootstrap.program.host_context import HostContext
from bootstrap.round.asking import of_each
from bootstrap.state.archived_states import ArchivedStates
from bootstrap.state.beginning import GENESIS_POLL_S
from bootstrap.state.going_on import GoingOn
from bootstrap.state.refilling import Refilling
from swarm.core.canonical import Value
from swarm.core.errors import LocalError, RemoteError, SettingsError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId
from swarm.core.state.coming_back import AHEAD, StageSeen
from swarm.host_protocol import HAND_OVER, STANDING
from swarm.network.transport import Message, Transport

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
LOOK_WHERE_QUIET_S = 5.0
"""Between two looks at who is there where nobody waits, and no stage has made a version for a while."""
CALL_S = 3.0
SILENT_S, SILENT_AFTER_START_S = 10.0, 20.0
"""A member that has not answered for so long, and for a lease, is not waited for; longer where this host has only just
been started, for it takes peers some seconds to find it again."""
HANDED_OVER_WITHIN_S = 5.0
"""Who hands over asks again and again whether it is done, and has an answer by then: it may take hours."""
MOST_HANDED_RESULTS = 64
"""With a state, by a peer that leaves."""
LATE_GOODBYE = 2
"""Versions that a stage may make while a peer leaves."""


@dataclass(kw_only=True)
class ComingBack:
    """Looks after those who wait, for ever."""

    host: HostContext
    going_on: GoingOn
    archived: ArchivedStates
    """Where what is handed over is kept."""
    postings: Postings
    refilling: Refilling
    is_told_to_go_on: bool = False
    """The owner has said that nobody more is waited for."""
    _started_at: float = field(default_factory=time.monotonic)
    _silent_since: dict[PeerId, float] = field(default_factory=dict)
    _taking: dict[tuple[PeerId, int, int], asyncio.Task[None]] = field(default_factory=dict)
    """What is being handed over: of whom, from which version to which."""
    _left_at: dict[PeerId, int] = field(default_factory=dict)
    """The version that each was at who has said goodbye."""
    _leaving: set[PeerId] = field(default_factory=set)
    """Who has asked whether its state is wanted, and may be gone in a moment."""
    _empty: set[int] = field(default_factory=set)
    """Stages of which nobody is left."""
    missing: dict[int, int] = field(default_factory=dict)
    """How many peers of which stages are waited for."""
    waits_for: str = ""
    """The same in words; empty while the run goes on."""
    _made: list[tuple[int, int]] = field(default_factory=list)
    """The era and the version of each stage at the last look; `_quiet_since` they are these."""
    _quiet_since: float = field(default_factory=time.monotonic)
    _looked_at: float = 0.0

    def __post_init__(self) -> None:
        self._is_restarted = self.host.beginning.made.is_set()
        for event in self.host.ledger.events("goodbye"):
            facts: Any = event.facts
            self._left_at[PeerId(facts["peer"])] = int(facts["version"])

    def serve(self, transport: Transport) -> None:
        transport.serve(HAND_OVER, self._on_hand_over, max_body_bytes=0)

    # -- who leaves ---------------------------------------------------------------------------------------

    def goodbye(self, peer: PeerId, version: int) -> None:
        """A peer has left, and says what it was at. Of a member that is remembered: nobody waits for it."""
        self._leaving.discard(peer)
        stage = self.host.progress.peers[peer].stage
        followed = self.host.followed.get(stage)
        if followed is None or peer not in followed.chain.members:
            return
        version = min(version, int(followed.version) + AHEAD)
        if version <= self._left_at.get(peer, -1):  # each version once: the ledger keeps it for ever
            return
        self._left_at[peer] = version
        self.host.ledger.append("goodbye", {"peer": peer, "version": version})

    async def _on_hand_over(self, sender: PeerId, request: Message) -> Message:
        """Whether a peer that leaves is the last of its stage; its state, once it has it ready."""
        fields = Fields("hand-over", request.meta)
        stage = fields.integer("stage", high=self.host.progress.num_stages - 1)
        start, version, ready = fields.integer("start"), fields.integer("version"), fields.boolean("ready")
        fields.done()
        figures = self.host.progress.peers.get(sender)
        if figures is None or figures.stage != stage or stage not in self.host.followed:
            raise RemoteError("standing", f"{sender} serves no stage {stage} that has begun", sender)
        # In a public run nobody is believed alone, and the disks of those who agree keep the state.
        is_believed = self.host.run.settings.trust == "friends" and sender in self.host.followed[stage].chain.members
        if ready:
            if not is_believed:
                raise RemoteError("standing", f"nobody has asked {sender} for the state of stage {stage}", sender)
            if not start <= version <= start + MOST_HANDED_RESULTS:
                raise RemoteError("protocol", f"{version - start} results are handed over", sender)
            is_here = await self._is_taken(sender, stage, start=start, version=version)
            return Message({"wanted": not is_here})
        self._leaving.add(sender)
        others = [peer for peer in self.host.progress.present(stage=stage) if peer not in self._leaving]
        standing = await self._standings([peer for peer in others if self.host.justice.may_train(peer)], stage)
        return Message({"wanted": not standing and is_believed})

    async def _is_taken(self, peer: PeerId, stage: int, *, start: int, version: int) -> bool:
        """Whether what a member hands over is on disk here, or soon is. Raises TransientError or RemoteError where it
        did not come; whoever asks then has it tried again.
        """
        given = peer, start, version
        for other in [other for other in self._taking if other[0] == peer and other != given]:
            self._taking.pop(other).cancel()
        if given not in self._taking:
            self._taking[given] = asyncio.ensure_future(self._take(peer, stage, start=start, version=version))
        taking = self._taking[given]
        await asyncio.wait({taking}, timeout=HANDED_OVER_WITHIN_S)
        if not taking.done():
            return False
        del self._taking[given]
        taking.result()
        return True

    async def _take(self, peer: PeerId, stage: int, *, start: int, version: int) -> None:
        """What a member hands over, up to a version that is certified. Raises TransientError or RemoteError."""
        try:
            async with asyncio.timeout(self.host.beginning.states_s):
                await self._take_now(peer, stage, start=start, version=version)
        except TimeoutError as error:
            raise TransientError(f"the state of stage {stage} did not come in time") from error
        self.host.emit({"event": "handed_over", "stage": stage, "version": version, "peer_id": peer})

    async def _take_now(self, peer: PeerId, stage: int, *, start: int, version: int) -> None:
        await self.host.followed.catch_up(stage, [(version, peer)], most_behind=0)
        certified = self.host.followed.chain_at(stage, version)
        if certified is None:
            raise TransientError(f"version {version} of stage {stage} is not known to be certified")
        await self.archived.take(self.host.transport, peer, stage, certified, start=start)

    # -- who waits ----------------------------------------------------------------------------------------

    async def run_for_ever(self) -> None:
        """Look, decide, and carry out."""
        try:
            await self._look_for_ever()
        finally:
            for taking in self._taking.values():
                taking.cancel()
            await asyncio.gather(*self._taking.values(), return_exceptions=True)
            await self.going_on.stop()

    async def _look_for_ever(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            oldest = time.monotonic() - GENESIS_POLL_S
            for waiting in self.host.beginning.waiting:
                for peer in [peer for peer, at in waiting.items() if at < oldest]:
                    del waiting[peer]
            self._look_who_is_missing()
            self._look_what_is_made()
            if not self._is_time_to_look and not any(self.host.beginning.waiting):
                continue
            self._looked_at = time.monotonic()
            try:
                await self._look()
            except (TransientError, RemoteError, LocalError, TimeoutError, OSError) as error:
                log.info("going on from what is held: %s", error)

    def _look_what_is_made(self) -> None:
        """Where a stage goes on, nobody is known to be silent any more, and no stage to be lost."""
        made = [(stage.chain.era, int(stage.version)) for stage in self.host.followed.values()]
        if made != self._made:
            self._made, self._quiet_since = made, time.monotonic()
            self._silent_since.clear()
            self.host.beginning.lost = frozenset()

    @property
    def _is_time_to_look(self) -> bool:
        """Though nobody waits: no stage has made a version for longer than a member is waited for."""
        return time.monotonic() > max(self._quiet_since + self._patience_s(), self._looked_at + LOOK_WHERE_QUIET_S)

    def _look_who_is_missing(self) -> None:
        """Nobody of a stage is left: that is said once, before anybody is back."""
        if self._is_restarted and time.monotonic() - self._started_at < SILENT_AFTER_START_S:
            return  # those who train have not been heard of yet
        for stage in range(self.host.progress.num_stages):
            followed = self.host.followed.get(stage)
            if followed is None or followed.version >= self.host.run.settings.optimizer.total_steps:
                continue
            if self.host.progress.present(stage=stage):
                self._empty.discard(stage)
            elif stage not in self._empty:
                self._empty.add(stage)
                self.host.emit({"event": "paused", "stage": stage, "version": int(followed.version)})
        if not any(self.host.beginning.waiting):
            wanted = {stage: self._wanted(stage) for stage in sorted(self._empty)}
            self._wait_for(wanted, f"nobody of stage {_listed(wanted)} is there" if wanted else "")

    def _wanted(self, stage: int) -> int:
        members = frozenset(self.host.followed[stage].chain.members)
        nobody = frozenset[PeerId]()
        seen = StageSeen(members=members, training=nobody, waiting=nobody, left=nobody, silent=nobody)
        return seen.missing(self.host.run.settings.limits.min_replicas)

    def _wait_for(self, missing: Mapping[int, int], why: str) -> None:
        """Tell everybody who waits, and whoever looks at the run."""
        wanted = {stage: count for stage, count in missing.items() if count}
        peers = ", ".join(f"{count} of stage {stage}" for stage, count in sorted(wanted.items()))
        self.waits_for = f"{why}; the run goes on by itself when these are back: {peers}" if peers else why
        self.host.beginning.tell_waiting(self.waits_for)
        if wanted != self.missing and wanted:
            self.host.emit({"event": "waiting", "missing": {str(stage): count for stage, count in wanted.items()}})
        self.missing = wanted

    async def _look(self) -> None:
        seen = await self._all_seen()
        self.host.beginning.lost = frozenset(stage for stage, one in enumerate(seen) if one.is_lost)
        self.refilling.look(seen)
        if not any(stage.is_lost and stage.waiting for stage in seen):
            self._wait_for({}, self._who_is_silent(seen))
            return
        if not all(one.is_lost or one.members & one.training for one in seen):
            self._wait_for({}, self._who_is_silent(seen))  # a stage may be lost, and is not known to be
            return
        lost = {stage: one for stage, one in enumerate(seen) if one.is_lost}
        fewest = self.host.run.settings.limits.min_replicas
        missing = {
            stage: max(one.missing(fewest), len(self.postings.coming(stage) - one.waiting - one.training))
            for stage, one in lost.items()
        }
        if self.is_told_to_go_on:
            missing = {stage: 0 if one.waiting else 1 for stage, one in lost.items()}
        if any(missing.values()):
            self._wait_for(missing, f"everybody of stage {_listed(lost)} had left")
            return
        self._wait_for({}, "those who are back prepare the newest state that all stages have")
        if await self.going_on.go_on(seen, self._all_seen, self._left_at.values()):
            self._wait_for({}, "")

    def _who_is_silent(self, seen: Sequence[StageSeen]) -> str:
        """Why those who wait do so, where others of their stage might still be there."""
        for stage, one in enumerate(seen):
            silent = sorted(one.members - one.waiting - one.left - one.silent)
            if silent and not one.members & one.training:
                left_s = max(self._silent_since[peer] for peer in silent) + self._patience_s() - time.monotonic()
                return f"{len(silent)} who were in stage {stage} do not answer; they are waited for {left_s:.0f} s more"
        return ""

    async def go_on_now(self) -> str:
        """The owner wants nobody waited for any more: what came of it. Raises SettingsError if nobody is."""
        if not self.host.beginning.made.is_set() or not self.missing:
            raise SettingsError("--to newest: no stage waits for peers to come back")
        if not any(self.host.beginning.waiting):
            raise SettingsError("--to newest: nobody has come back yet; somebody of each stage is needed")
        again, self.is_told_to_go_on = self.host.beginning.again, True
        try:
            async with asyncio.timeout(self.host.beginning.states_s):
                await again.wait()
        finally:
            self.is_told_to_go_on = False
        return f"the run goes on as version {self.host.beginning.geneses[0].version}"

    def _patience_s(self) -> float:
        is_new = self._is_restarted and time.monotonic() - self._started_at < SILENT_AFTER_START_S
        return max(SILENT_AFTER_START_S if is_new else SILENT_S, self.host.run.settings.deadlines.lease_s)

    async def _all_seen(self) -> list[StageSeen]:
        """Who is there of each stage, as of now."""
        return list(await asyncio.gather(*(self._seen(stage) for stage in range(self.host.progress.num_stages))))

    async def _seen(self, stage: int) -> StageSeen:
        """Who is there of the stage, as of now."""
        members = frozenset(self.host.followed[stage].chain.members)
        waiting = frozenset(
            peer
            for peer in self.host.beginning.waiting[stage]
            if self.host.justice.may_train(peer) and (self.is_told_to_go_on or self.refilling.counts(peer, stage))
        )
        asked = sorted(members | waiting | {*self.host.progress.present(stage=stage)})
        training = frozenset(
            await self._standings([peer for peer in asked if self.host.justice.may_train(peer)], stage)
        )
        for peer in waiting & training:  # it waits no more
            self.host.beginning.waiting[stage].pop(peer, None)
        waiting -= training
        self._leaving -= waiting
        newest, now, patience_s = int(self.host.followed[stage].version), time.monotonic(), self._patience_s()
        for peer in asked:
            if peer in training:
                self._silent_since.pop(peer, None)
            else:
                self._silent_since.setdefault(peer, now)
        silent = {peer for peer, since in self._silent_since.items() if now - since > patience_s}
        left = {peer for peer, version in self._left_at.items() if version >= newest - LATE_GOODBYE}
        there = training | waiting
        return StageSeen(
            members=members,
            training=training,
            waiting=waiting,
            left=frozenset(members & left - there),
            silent=frozenset(members & silent - there),
        )

    async def _standings(self, peers: Collection[PeerId], stage: int) -> dict[PeerId, int]:
        """At which version those are who train."""

        async def one(peer: PeerId) -> int:
            meta: dict[str, Value] = {"stage": stage}
            reply = await self.host.transport.call(peer, STANDING, Message(meta), timeout_s=CALL_S, max_body_bytes=0)
            return Fields("standing", reply.meta).integer("version")

        return await of_each(peers, one)


def _listed(stages: Collection[int]) -> str:
    return ", ".join(map(str, sorted(stages)))
