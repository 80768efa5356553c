"""Who else is there: hints from the directory, confirmed by an open call to each.

A neighbour is watched by a call that stays open: when its process dies the call breaks, and it is gone at once,
long before its lease runs out.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable

from peer.stage.context import StageContext
from peer.stage.events import PeerLost, PeersChanged
from swarm.core.canonical import Value
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId, StageIndex, Version
from swarm.network.directory.records import MAX_ADDRESSES, addresses_in
from swarm.network.loop import happened
from swarm.network.transport import Directory, Message

log = logging.getLogger(__name__)

WATCH = "watch"
WATCH_S = 20.0
LOOKUP_EVERY_S, LONGEST_LOOKUP_S, LOOKUPS_A_STEP = 1.0, 20.0, 10
"""A look into the directory asks several peers for the records of all: where steps take minutes, one each second took a
tenth of a line of 1 Mbit/s, and one each five seconds a twentieth."""
LONGEST_LEASE_S, LEASES_A_STEP = 30.0, 4
"""Of this peer's own record: to store it is to ask as many. Whoever is watched is known to be gone at once. It is not
longer, for of two records the one that expires later counts, and whoever is started again has another address."""
LONGEST_RETRY_S = 8.0


def stage_topic(run_id: str, stage: int) -> str:
    """Directory topic of a stage's live peers."""
    return f"homeswarm/{run_id[:32]}/stage/{stage}"


class Neighbours:
    """Live peers of this peer's own stage and of those beside it."""

    def __init__(
        self,
        context: StageContext,
        directory: Directory,
        stage: StageIndex,
        version: Callable[[], Version],
        takes: Callable[[PeerId, dict[str, Value]], bool],
        more_to_say: Callable[[], dict[str, Value]],
        usual_s: Callable[[], float | None],
    ) -> None:
        """`version` is the stage's here, `usual_s` how long its steps take. `takes`: whether a peer, with what it says
        of itself, is one of its stage: not if it is on probation. `more_to_say`: what this peer says of itself besides
        where it is.
        """
        self._settings = context.settings
        self._run_id = context.run_id
        self._transport = context.transport
        self._events = context.events
        self._directory = directory
        self._stage = stage
        self._version = version
        self._watched: dict[int, dict[PeerId, asyncio.Task[None]]] = {}
        self._live: dict[int, set[PeerId]] = {}
        self.addresses: dict[PeerId, list[str]] = {}
        """Where the live ones were reached."""
        self._misses: dict[PeerId, int] = {}
        self._retry_at: dict[PeerId, float] = {}
        self._takes = takes
        self._more_to_say = more_to_say
        self._usual_s = usual_s
        self._alone_pause_s = LONGEST_LOOKUP_S
        """Between two looks for others of its stage, while nobody is live: at first short, after somebody was."""
        self._expires = -math.inf
        """When this peer's last record does."""
        self.leaving = False
        self.gone = asyncio.Event()
        """This peer serves the stage no more."""

    def serve(self) -> None:
        self._transport.serve(WATCH, self._watched_here, max_body_bytes=0)

    async def _watched_here(self, sender: PeerId, request: Message) -> Message:
        """Answers while this peer serves the stage that the caller takes it to serve."""
        fields = Fields("watch", request.meta)
        stage, waits = fields.integer("stage"), fields.boolean("waits")
        fields.done()
        if waits and stage == self._stage:
            await happened(self.gone, within_s=WATCH_S)
        return Message({"serves": stage == self._stage and not self.gone.is_set()})

    def of_stage(self, stage: int) -> set[PeerId]:
        """Peers of the stage that answer now, without this one."""
        return set(self._live.get(stage, ()))

    def drop(self, peer: PeerId) -> None:
        """The peer is none of its stage any more."""
        for watched in self._watched.values():
            if peer in watched:
                watched[peer].cancel()

    async def run(self) -> None:
        """Announce this peer and watch its neighbours, for ever."""
        last = self._settings.model.num_stages - 1
        stages = [StageIndex(self._stage + side) for side in (-1, 0, 1) if 0 <= self._stage + side <= last]
        try:
            await asyncio.gather(self._announce(), *(self._follow(stage) for stage in stages))
        finally:
            for watched in self._watched.values():
                for task in watched.values():
                    task.cancel()

    async def announce_once(self) -> None:
        addresses: list[Value] = [*self._transport.addresses()[:MAX_ADDRESSES]]
        fields: dict[str, Value] = {"addresses": addresses, "version": int(self._version()), **self._more_to_say()}
        topic = stage_topic(self._run_id, self._stage)
        # Never one that expires before the last: that would count.
        self._expires = max(self._expires, time.monotonic() + self._lease_s)
        await self._directory.publish(topic, fields, ttl_s=self._expires - time.monotonic())

    @property
    def _lease_s(self) -> float:
        usual_s = (self._usual_s() or 0.0) / LEASES_A_STEP
        return max(self._settings.deadlines.lease_s, min(LONGEST_LEASE_S, usual_s))

    async def _announce(self) -> None:
        while True:
            pause_s = self._lease_s / 3
            if not self.leaving:
                with contextlib.suppress(TransientError):
                    await self.announce_once()
            await asyncio.sleep(pause_s)

    async def _follow(self, stage: StageIndex) -> None:
        """Whoever was found and is not watched is tried again until the next look."""
        found: dict[PeerId, dict[str, Value]] = {}
        looked_at = -math.inf
        watched = self._watched.setdefault(stage, {})
        while True:
            now = time.monotonic()
            if now >= looked_at + self._pause_s(stage):
                looked_at = now
                if stage == self._stage and not self._live.get(stage):
                    self._alone_pause_s = min(2.0 * self._alone_pause_s, LONGEST_LOOKUP_S)
                with contextlib.suppress(TransientError):
                    found = await self._directory.lookup(stage_topic(self._run_id, stage))
                now = time.monotonic()
            room = self._settings.limits.max_peers_per_stage - sum(not task.done() for task in watched.values())
            # Those first who have answered, or were never asked: who is nowhere takes no place from them.
            for peer, fields in sorted(found.items(), key=lambda one: self._misses.get(one[0], 0)):
                known = peer == self._transport.peer_id or (peer in watched and not watched[peer].done())
                known = known or now < self._retry_at.get(peer, 0.0)
                if not known and self._takes(peer, fields) and room > 0:
                    room -= 1
                    watched[peer] = asyncio.ensure_future(self._watch(stage, peer, addresses_in(fields)))
            for gone in [peer for peer, task in watched.items() if task.done() and peer not in found]:
                del watched[gone]
                self._misses.pop(gone, None)
                self._retry_at.pop(gone, None)
            await asyncio.sleep(LOOKUP_EVERY_S)

    def _pause_s(self, stage: StageIndex) -> float:
        """A small share of a step; but hops wait for a peer of a stage beside this one of which nobody is known, and
        who has lost all of its own was cut off, and looks at once, and more and more seldom."""
        pause_s = min(LONGEST_LOOKUP_S, max(LOOKUP_EVERY_S, (self._usual_s() or 0.0) / LOOKUPS_A_STEP))
        if self._live.get(stage):
            return pause_s
        return min(pause_s, self._alone_pause_s) if stage == self._stage else LOOKUP_EVERY_S

    async def _watch(self, stage: StageIndex, peer: PeerId, addresses: list[str]) -> None:
        """Live while calls of ours stay open; ends when the peer does not answer."""
        live = self._live.setdefault(stage, set())
        has_left = False

        async def ask(waits: bool, timeout_s: float) -> None:
            nonlocal has_left
            asked = Message({"stage": int(stage), "waits": waits})
            reply = await self._transport.call(peer, WATCH, asked, timeout_s=timeout_s, max_body_bytes=0)
            if not Fields("watch answer", reply.meta).boolean("serves"):
                has_left = True
                raise TransientError(f"{peer[-6:]} does not serve stage {stage}")

        try:
            await self._transport.connect(peer, addresses)
            await ask(False, self._settings.deadlines.call_s)
            live.add(peer)
            if stage == self._stage:
                self._alone_pause_s = LOOKUP_EVERY_S
            self.addresses[peer] = addresses
            self._misses.pop(peer, None)
            self._events.publish(PeersChanged(stage, frozenset(live)))
            while True:
                asked_at = time.monotonic()
                await ask(True, WATCH_S + self._settings.deadlines.lease_s)
                if time.monotonic() < asked_at + LOOKUP_EVERY_S:
                    await asyncio.sleep(LOOKUP_EVERY_S)  # the peer was to wait, and did not
        except (TransientError, RemoteError) as error:
            misses = self._misses[peer] = self._misses.get(peer, 0) + 1
            self._retry_at[peer] = time.monotonic() + min(LONGEST_RETRY_S, 2.0**misses / 2)
            log.info("%s of stage %d: %s", peer[-6:], stage, error)
        finally:
            self.addresses.pop(peer, None)
            if peer in live:
                live.discard(peer)
                self._events.publish(PeersChanged(stage, frozenset(live)))
                self._events.publish(PeerLost(peer, says_so=has_left))
