"""Which members of the stage are there: who does not answer is left out, or its leading passed on."""

import time
from collections import Counter, deque

from peer.round.stage_steps import StageSteps
from peer.round.step_state import StepState
from peer.stage.events import MemberGone, PeerLost
from swarm.core.errors import RemoteError, TransientError, UnreachableError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId, Step, Version
from swarm.core.round.contribution import Result
from swarm.network.transport import Message

PING_S = 2.0
ROUNDS_LOOKED_AT, IN_VAIN = 8, 2
"""Whoever was waited for in vain in so many of the last rounds is not waited for."""


class Presence:
    """The stage's members as far as they answer."""

    def __init__(self, steps: StageSteps) -> None:
        self._steps = steps
        self._context = steps.context
        self._gone: dict[PeerId, Version] = {}
        """Members that did not answer, with the version at that time, until they are left out or heard of."""
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
        try:
            reply = await self._context.transport.call(peer, "ping", Message(), timeout_s=PING_S, max_body_bytes=0)
            fields = Fields("ping answer", reply.meta)
            return fields.optional("stage") and fields.integer("stage") != self._steps.chain.stage
        except UnreachableError:
            return True
        except (TransientError, RemoteError):
            return False

    def heard_of(self, peer: PeerId) -> None:
        """It reports: it is not gone."""
        self._gone.pop(peer, None)

    def lost(self, event: PeerLost) -> None:
        """A peer's open call broke: unless it answers a ping, every open step is told at once."""

        async def confirm() -> None:
            if await self.is_gone(event.peer):
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
        for peer, version in list(self._gone.items()):
            if peer not in self._steps.chain.members or (peer in heard and int(step) > version):
                del self._gone[peer]
