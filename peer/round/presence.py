"""Which members of the stage are there: who does not answer is left out, or its leading passed on."""

import asyncio
import math
import time
from collections import Counter, deque

from peer.round.stage_steps import StageSteps
from peer.round.step_state import StepState
from peer.stage.events import MemberBack, MemberGone, PeerLost
from swarm.core.errors import RemoteError, TransientError, UnreachableError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId, Step, Version
from swarm.core.pipeline.deadlines import AdaptiveDeadline
from swarm.core.round.contribution import Result
from swarm.network.transport import Message

PING_S, PING_FACTOR = 2.0, 4.0
"""A ping is waited for so many times as long as small calls to that member lately took, and at least so many seconds:
on a full line they wait behind what is under way, and its member is not gone."""
LOOK_AGAIN_S = 5.0
"""Between two looks whether a member for which something waits is back."""
ROUNDS_LOOKED_AT, IN_VAIN = 8, 2
"""Whoever was waited for in vain in so many of the last rounds is not waited for."""


class Presence:
    """The stage's members as far as they answer."""

    def __init__(self, steps: StageSteps) -> None:
        self._steps = steps
        self._context = steps.context
        self._gone: dict[PeerId, Version] = {}
        """Members that did not answer, with the version at that time, until they are left out or heard of."""
        self._looked_for: set[PeerId] = set()
        self._heard_at: dict[PeerId, float] = {}
        """When something last came from a member, or was answered by it."""
        self._ping_s: dict[PeerId, AdaptiveDeadline] = {}
        self._waited_in_vain: deque[frozenset[PeerId]] = deque(maxlen=ROUNDS_LOOKED_AT)
        """Of the last rounds, whose parts were waited for and left out all the same."""

    def present(self) -> list[PeerId]:
        """Members, but for those that did not answer."""
        return [peer for peer in self._steps.chain.members if peer not in self._gone]

    async def is_gone(self, peer: PeerId) -> bool:
        """Whether the peer does not even answer a ping, or has gone to another stage: one broken stream is no death.
        Probation is one, to rounds."""
        if not self._steps.may_join(peer):
            return True
        asked_at, patience = time.monotonic(), self._patience_with(peer)
        try:
            reply = await self._context.transport.call(
                peer, "ping", Message(), timeout_s=patience.seconds, max_body_bytes=0
            )
            patience.observe(time.monotonic() - asked_at)
            fields = Fields("ping answer", reply.meta)
            return fields.optional("stage") and fields.integer("stage") != self._steps.chain.stage
        except UnreachableError:
            patience.missed()
            return self._heard_at.get(peer, -math.inf) < asked_at
        except (TransientError, RemoteError):
            return False

    def heard_of(self, peer: PeerId) -> None:
        """Something has come from it, or was answered: it is not gone."""
        self._heard_at[peer] = time.monotonic()
        self._is_back(peer)

    def _is_back(self, peer: PeerId) -> None:
        if self._gone.pop(peer, None) is not None:
            self._context.events.publish(MemberBack(peer))

    def seems_gone(self, peer: PeerId) -> bool:
        """Whether it did not answer, and nothing was heard of it since."""
        return peer in self._gone

    def look_for(self, peer: PeerId) -> None:
        """Something waits for it: ask now and then whether it is back. Where a line was cut off, who is at its one end
        thinks the others gone, and the others think so of it: each would wait for the other's word."""
        if peer not in self._looked_for:
            self._looked_for.add(peer)
            self._context.tasks.spawn(self._look_until_back(peer))

    async def _look_until_back(self, peer: PeerId) -> None:
        try:
            while self.seems_gone(peer):
                await asyncio.sleep(LOOK_AGAIN_S)
                if self.seems_gone(peer) and not await self.is_gone(peer):
                    self.heard_of(peer)
        finally:
            self._looked_for.discard(peer)

    def answered(self, peer: PeerId, *, within_s: float) -> None:
        """A small call to it took so long."""
        self.heard_of(peer)
        self._patience_with(peer).observe(within_s)

    def _patience_with(self, peer: PeerId) -> AdaptiveDeadline:
        if peer not in self._ping_s:
            limit_s = max(PING_S, self._context.settings.deadlines.call_s)
            self._ping_s[peer] = AdaptiveDeadline(limit_s=limit_s, floor_s=PING_S, factor=PING_FACTOR)
        return self._ping_s[peer]

    def lost(self, event: PeerLost) -> None:
        """A peer's open call broke: unless it answers a ping, every open step is told at once.

        Who says that it has left answers that too, for a moment; and then a call to it may hang for as long as it may.
        """

        async def confirm() -> None:
            if event.says_so or await self.is_gone(event.peer):
                for state in list(self._steps.open.values()):
                    self.unreachable(state, event.peer)

        self._context.tasks.spawn(confirm())

    def unreachable(self, state: StepState, peer: PeerId) -> None:
        """An open step goes on without the peer, under another leader if it was the leader."""
        if not self._steps.is_open(state):
            return
        me, led_by = self._context.me, state.leader
        self._gone[peer] = self._steps.version
        state.progress.lost(peer)
        self._steps.asks_no_more(peer)
        if state.round is not None:
            self._context.events.publish(MemberGone(state.step, peer))
            state.view = state.round.view
        elif state.leader == peer:
            state.view += 1
        if state.leader == me and led_by != me:
            state.progress.expect(self.present(), now=time.monotonic())
        state.dirty.set()

    def not_waited_for(self) -> frozenset[PeerId]:
        """Whose parts the next round does not wait for when most others' are there."""
        counted = Counter(peer for lost in self._waited_in_vain for peer in lost)
        return frozenset(peer for peer, count in counted.items() if count >= IN_VAIN)

    def step_taken(self, result: Result, *, given_up: frozenset[PeerId]) -> None:
        """Who is no member any more, or was in a round that began after it did not answer, is forgotten.

        `given_up`: whose parts this peer itself waited for in vain: what others say of them shortens no wait here.
        """
        left_out = frozenset(lost.peer_id for lost in result.roster.left_out)
        self._waited_in_vain.append((left_out & given_up) - self.not_waited_for())
        heard = {contribution.peer_id for contribution in result.roster.committed}
        step: Step = result.roster.step
        members = self._steps.chain.members
        self._heard_at = {peer: at for peer, at in self._heard_at.items() if peer in members}
        self._ping_s = {peer: patience for peer, patience in self._ping_s.items() if peer in members}
        for peer, version in list(self._gone.items()):
            if peer not in self._steps.chain.members or (peer in heard and int(step) > version):
                self._is_back(peer)
