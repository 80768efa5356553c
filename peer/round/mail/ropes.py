"""A round's large messages as this peer sends and gets them: in ropes, and those of a leader to all handed on.

What a sheet is, and who hands on to whom, is said in `swarm.core.round.mail.sheets`. A leader sends its message to all
whole to the first of the tree, to the others its name; who has restored it hands it on. Whoever lacks something all the
same says so, and gets it from whom the message is of.
"""

import asyncio
import logging
import time
from collections.abc import Iterable

from peer.round.mail.mail import RESEND_S, RoundMail
from peer.round.step_state import StepSheets, StepState
from peer.stage.context import StageContext
from swarm.core.canonical import Value, pack
from swarm.core.errors import RemoteError
from swarm.core.fields import Fields, digest_item
from swarm.core.ids import PeerId
from swarm.core.round.mail.desk import Letter, Offer, Waiting
from swarm.core.round.mail.sheets import MAX_PIECES, Restored, Sheet
from swarm.network.loop import happened
from swarm.network.transport import Message

log = logging.getLogger(__name__)

HANDED_ON = "handed on"
"""The kind of a message in which a member brings another what the leader sends to all."""


class RoundRopes:
    """What this peer's rounds send and get in ropes."""

    def __init__(self, mail: RoundMail, context: StageContext) -> None:
        self._mail = mail
        self._context = context

    # -- sending ------------------------------------------------------------------------------------------

    def send(self, state: StepState, to: Iterable[PeerId], meta: dict[str, Value], inner: Iterable[Sheet]) -> None:
        """Begin to bring each of them the message, in which these sheets stand in this order."""
        assert state.facts is not None
        targets, desk = tuple(to), _of(state).desk
        sheet = Sheet(pack({**meta, "stage": state.facts.stage, "step": state.step}), tuple(inner))
        asked: dict[str, Value] = {"kind": meta["kind"], "to_all": len(targets) > 1}
        for peer, letter in desk.letters(targets, sheet):
            self._context.tasks.spawn(self._bring(state, peer, asked, letter))

    async def _bring(self, state: StepState, peer: PeerId, asked: dict[str, Value], letter: Letter) -> None:
        while True:
            reply = await self._mail.send(state, peer, {**asked, "rope": letter.rope})
            if reply is None or reply.meta.get("status") != "lacks":
                return
            try:
                lacking = Fields("answer", reply.meta).items("names", digest_item, max_items=MAX_PIECES)
                _of(state).desk.lacked(peer, letter, lacking)
            except RemoteError as error:
                log.warning("step %d: %s: %s", state.step, peer[-6:], error)
                return

    # -- getting ------------------------------------------------------------------------------------------

    async def restored(self, state: StepState, sender: PeerId, fields: Fields) -> Restored:
        """What a rope comes to. In what the leader sends to all, what is lacking is waited for; then it is handed on,
        before anything else is done with it."""
        machine, sheets = state.round, _of(state)
        assert machine is not None
        rope, to_all = fields.message("rope"), fields.boolean("to_all") and sender == machine.leader
        found = sheets.desk.open(rope, leader=sender if to_all else None, now=time.monotonic())
        if isinstance(found, Waiting):
            rope, found = await self._waited_for(sheets, found)
        if to_all and not found.lacking:
            for peer, offer in sheets.desk.offers(found, rope, sender, now=time.monotonic()):
                self._context.tasks.spawn(self._hand_on(state, peer, offer))
        return found

    async def _waited_for(self, sheets: StepSheets, waiting: Waiting) -> tuple[Value, Restored]:
        try:
            found: Restored | Waiting = waiting
            while isinstance(found, Waiting):
                await happened(sheets.came, within_s=max(0.0, waiting.ends_at - time.monotonic()))
                found = sheets.desk.look(waiting, now=time.monotonic())
        finally:
            sheets.desk.give_up(waiting)
        return waiting.rope, found

    def came(self, state: StepState, sender: PeerId, found: Iterable[Sheet]) -> None:
        """Sheets of a message of that member that was taken."""
        sheets = _of(state)
        sheets.desk.hold(found, of=sender, now=time.monotonic())
        sheets.notify()

    def taken(self, state: StepState, sender: PeerId, found: Restored) -> None:
        """The message that the rope came to was taken."""
        _of(state).desk.taken(found)
        self.came(state, sender, found.whole)

    # -- handing on ---------------------------------------------------------------------------------------

    async def _hand_on(self, state: StepState, peer: PeerId, offer: Offer) -> None:
        asked: dict[str, Value] = {"kind": HANDED_ON, "leader": offer.leader, "name": offer.name}
        while True:
            reply = await self._mail.send(state, peer, {**asked, "rope": offer.rope})
            if reply is None or not offer.answered(reply.meta.get("status"), now=time.monotonic()):
                return
            if offer.rope is None:
                await asyncio.sleep(RESEND_S)

    def handed_on(self, state: StepState, sender: PeerId, fields: Fields) -> Message:
        """A member hands on what the leader sends to all."""
        sheets, leader = _of(state), fields.peer("leader")
        name, rope = fields.octets("name", length=32), fields.message("rope")
        try:
            status = sheets.desk.handed_on(sender, leader, name, rope, now=time.monotonic())
        finally:
            sheets.notify()
        return Message({"status": status})


def _of(state: StepState) -> StepSheets:
    assert state.sheets is not None
    return state.sheets
