"""Messages of an open step's round to its members, brought however often it takes."""

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator

from peer.round.mail.outbox import OnItsWay
from peer.round.presence import Presence
from peer.round.stage_steps import StageSteps
from peer.round.step_state import StepState
from peer.stage.events import Overtaken
from swarm.core.canonical import Value
from swarm.core.errors import RemoteError, TransientError, UnreachableError
from swarm.core.ids import PeerId
from swarm.network.transport import Message
from verification.round.papers import Bytes

log = logging.getLogger(__name__)

ROUND = "round"
RESEND_S, LONGEST_RESEND_S = 0.2, 2.0


def resend_pauses_s() -> Iterator[float]:
    """Doubled each time, for a message that its receiver is not ready for may be long."""
    pause_s = RESEND_S
    while True:
        yield pause_s
        pause_s = min(LONGEST_RESEND_S, 2 * pause_s)


class RoundMail:
    """What this peer's rounds send."""

    def __init__(self, steps: StageSteps, presence: Presence) -> None:
        self._steps = steps
        self._context = steps.context
        self._presence = presence

    def send_all(self, state: StepState, to: Iterable[PeerId], meta: dict[str, Value]) -> None:
        """Begin to bring each of them the message."""
        for peer in to:
            self._context.tasks.spawn(self.send(state, peer, meta))

    def waits_for(self, peer: PeerId) -> bool:
        """Whether it is told (`MemberBack`) when a member is back to which something could not be brought."""
        seems_gone = self._presence.seems_gone(peer)
        if seems_gone:
            self._presence.look_for(peer)
        return seems_gone

    def heard(self, peer: PeerId) -> None:
        """A member has sent something of an open step's round."""
        self._presence.heard_of(peer)

    async def send(self, state: StepState, peer: PeerId, meta: dict[str, Value]) -> Message | None:
        """Bring a member a message without bodies, as `bring` does; None also if it is gone."""
        try:
            return await self.bring(state, peer, meta)
        except UnreachableError:
            return None

    async def bring(
        self,
        state: StepState,
        peer: PeerId,
        meta: dict[str, Value],
        bodies: tuple[Bytes, ...] = (),
        way: OnItsWay | None = None,
        may_be_there: bool = False,
    ) -> Message | None:
        """Bring a member a message of the open step, however often it takes. What it answers; None if it did not take
        it. `way` is told before its bytes go, and when they are there, each time. Raises UnreachableError if it is
        gone.

        Bodies of which it is not known whether they came are asked after before they are sent again, and before they
        are sent at all if they `may_be_there`.
        """
        context, stage = self._context, self._steps.chain.stage
        what = f"stage {stage} step {state.step}: {meta.get('kind')!s} to {peer[-6:]}"
        await asyncio.shield(state.logged)
        num_bytes, is_sent, pauses_s = sum(map(len, bodies)), False, resend_pauses_s()
        while self._steps.is_open(state):
            asked_at = time.monotonic()
            try:
                asked: dict[str, Value] = {**meta, "stage": stage, "step": state.step}
                call_s = context.settings.deadlines.call_s
                reply = Message()
                if may_be_there:
                    doubt = Message({**asked, "kind": "held", "sizes": []})
                    reply = await context.transport.call(peer, ROUND, doubt, timeout_s=call_s, max_body_bytes=0)
                may_be_there = False
                if reply.meta.get("status") not in ("held", "over"):
                    whole = Message(asked, more=bodies, on_left=way.left if way is not None else None)
                    if way is not None:
                        way.leaves()
                    is_sent = True
                    reply = await context.transport.call(peer, ROUND, whole, timeout_s=call_s, max_body_bytes=0)
            except RemoteError as error:
                log.warning("%s: refused: %s", what, error)
                if await self._presence.is_gone(peer):
                    self._presence.unreachable(state, peer)
            except UnreachableError as error:
                log.info("%s, %d bytes: %s", what, num_bytes, error)
                may_be_there = bool(bodies)
                if not await self._presence.is_gone(peer):
                    await asyncio.sleep(RESEND_S)  # a call may fail at once, again and again
                    continue
                self._presence.unreachable(state, peer)
                raise
            except TransientError as error:  # alive, but not there yet: the round's own deadlines end this
                log.debug("%s, %d bytes: %s", what, num_bytes, error)
                await asyncio.sleep(next(pauses_s))
                continue
            else:
                state.sent_bytes += num_bytes if is_sent else 0
                if num_bytes:
                    self._presence.heard_of(peer)
                else:
                    self._presence.answered(peer, within_s=time.monotonic() - asked_at)
                if reply.meta.get("status") == "over":
                    context.events.publish(Overtaken(peer))
                return reply
            return None
        return None
