"""A round's large messages as this peer sends and gets them: in ropes, and those of a leader to all handed on.

What a sheet is, and who hands on to whom, is said in `swarm.core.round.mail.sheets`. A leader sends its message to all
whole to the first of the tree, to the others its name; who has restored it hands it on. Whoever lacks something all the
same says so, and gets it from whom the message is of.
"""

import asyncio
import logging
import time
from collections.abc import Collection, Iterable

from peer.round.mail.mail import RESEND_S, RoundMail
from peer.round.step_state import StepState
from peer.stage.context import StageContext
from swarm.core.canonical import Value, pack
from swarm.core.errors import RemoteError
from swarm.core.fields import Fields, digest_item
from swarm.core.ids import PeerId
from swarm.core.round.averaging_round import AveragingRound
from swarm.core.round.mail.sheets import MAX_PIECES, Name, Restored, Sheet, Tree, hand_on_s, name_of
from swarm.network.loop import happened
from swarm.network.transport import MAX_META_BYTES, Message

log = logging.getLogger(__name__)

HANDED_ON = "handed on"
"""The kind of a message in which a member brings another what the leader sends to all."""
MOST_AWAITED = 4
"""Messages to all of which a member waits for more than their names: as many as a view has phases, and its result."""
MOST_HANDED_ON = 1 << 10
"""Names of messages that were handed on are kept of a step, so that none is handed on twice."""


class RoundRopes:
    """What this peer's rounds send and get in ropes."""

    def __init__(self, mail: RoundMail, context: StageContext) -> None:
        self._mail = mail
        self._context = context

    # -- sending ------------------------------------------------------------------------------------------

    def send(self, state: StepState, to: Iterable[PeerId], meta: dict[str, Value], inner: Iterable[Sheet]) -> None:
        """Begin to bring each of them the message, in which these sheets stand in this order."""
        assert state.facts is not None
        targets, sheets = tuple(to), state.sheets
        sheet = Sheet(pack({**meta, "stage": state.facts.stage, "step": state.step}), tuple(inner))
        fresh = sheets.here.fresh(sheet)
        rope = sheets.here.rope(sheet)
        sheets.here.hold(sheet.named())
        tree, to_all = Tree.of(state.facts, self._context.me), len(targets) > 1
        for peer in targets:
            handed = to_all and peer not in sheets.left_waiting and tree.before(peer) in targets
            asked: dict[str, Value] = {"kind": meta["kind"], "to_all": to_all}
            self._context.tasks.spawn(self._bring(state, peer, asked, sheet, rope, fresh, handed=handed))

    async def _bring(
        self,
        state: StepState,
        peer: PeerId,
        asked: dict[str, Value],
        sheet: Sheet,
        rope: Value,
        fresh: Collection[Name],
        *,
        handed: bool,
    ) -> None:
        """`fresh`: what nobody can have had before this message."""
        said: set[Name] = set()
        next_rope: Value = [sheet.name] if handed else rope
        while True:
            reply = await self._mail.send(state, peer, {**asked, "rope": next_rope})
            if reply is None or reply.meta.get("status") != "lacks":
                return
            try:
                lacking = Fields("answer", reply.meta).items("names", digest_item, max_items=MAX_PIECES)
            except RemoteError as error:
                log.warning("step %d: %s: %s", state.step, peer[-6:], error)
                return
            if said.issuperset(lacking):
                log.warning("step %d: %s lacks again what it was sent", state.step, peer[-6:])
                return
            said.update(lacking)
            if sheet.name in lacking:
                state.sheets.left_waiting.add(peer)
                next_rope = rope
            else:
                next_rope = state.sheets.here.rope(sheet, whole={*fresh, *said})

    # -- getting ------------------------------------------------------------------------------------------

    async def restored(self, state: StepState, sender: PeerId, fields: Fields) -> Restored:
        """What a rope comes to. In what the leader sends to all, what is lacking is waited for; then it is handed on,
        before anything else is done with it."""
        machine, here = state.round, state.sheets.here
        assert machine is not None
        rope, to_all = fields.message("rope"), fields.boolean("to_all") and sender == machine.leader
        found = here.restore(rope, max_bytes=MAX_META_BYTES)
        if found.lacking and to_all:
            patience_s = hand_on_s(machine.facts.phase_s, self._context.settings.deadlines.call_s)
            rope, found = await self._waited_for(state, rope, found, patience_s)
        if to_all and not found.lacking:
            self._hand_on(state, machine, name_of(found.data), rope)
        return found

    async def _waited_for(
        self, state: StepState, rope: Value, found: Restored, patience_s: float
    ) -> tuple[Value, Restored]:
        sheets, name, begun_at = state.sheets, _name_in(rope), time.monotonic()
        ends_at = begun_at + patience_s
        if name is not None:
            if len(sheets.awaited) >= MOST_AWAITED:
                return rope, found
            sheets.awaited.setdefault(name, None)
        try:
            while found.lacking and await happened(sheets.came, within_s=max(0.0, ends_at - time.monotonic())):
                ends_at = min(time.monotonic() + patience_s, begun_at + 2 * patience_s)
                came = sheets.awaited.get(name) if name is not None else None
                if came is not None and came is not rope:
                    rope = came
                elif not sheets.here.held.keys() >= {*found.lacking}:
                    continue
                found = sheets.here.restore(rope, max_bytes=MAX_META_BYTES)
                if name is not None and not found.lacking and name_of(found.data) != name:
                    return rope, Restored(lacking=(name,))  # whoever handed it on has made it up
        finally:
            if name is not None:
                sheets.awaited.pop(name, None)
        return rope, found

    def came(self, state: StepState, found: Iterable[Sheet]) -> None:
        """Sheets of a message that was taken."""
        state.sheets.here.hold(found)
        state.sheets.notify()

    # -- handing on ---------------------------------------------------------------------------------------

    def _hand_on(self, state: StepState, machine: AveragingRound, name: Name, rope: Value) -> None:
        if name in state.sheets.handed_on:
            return
        if len(state.sheets.handed_on) >= MOST_HANDED_ON:
            state.sheets.handed_on.clear()
        state.sheets.handed_on.add(name)
        facts, leader = machine.facts, machine.leader
        within_s = 2 * hand_on_s(facts.phase_s, self._context.settings.deadlines.call_s)
        asked: dict[str, Value] = {"kind": HANDED_ON, "leader": leader, "name": name, "rope": rope}
        for peer in Tree.of(facts, leader).after(machine.me):
            self._context.tasks.spawn(self._until_awaited(state, peer, asked, within_s))

    async def _until_awaited(self, state: StepState, peer: PeerId, asked: dict[str, Value], within_s: float) -> None:
        """The leader's own word that this is its message may come later."""
        latest = time.monotonic() + within_s
        while True:
            reply = await self._mail.send(state, peer, asked)
            if reply is None or reply.meta.get("status") != "early" or time.monotonic() > latest:
                return
            await asyncio.sleep(RESEND_S)

    def handed_on(self, state: StepState, sender: PeerId, fields: Fields) -> Message:
        """A member hands on what the leader sends to all. Nothing is kept that the leader has not named."""
        assert state.round is not None
        facts, me, leader = state.round.facts, state.round.me, fields.peer("leader")
        facts.check_member(leader)
        if leader == me or Tree.of(facts, leader).before(me) != sender:
            raise RemoteError("protocol", "it is not this peer that hands on here", sender)
        name, rope, sheets = fields.octets("name", length=32), fields.message("rope"), state.sheets
        if name in sheets.handed_on:
            return Message({"status": "ok"})
        if name not in sheets.awaited:
            return Message({"status": "early"})
        sheets.awaited[name] = rope
        sheets.notify()
        return Message({"status": "ok"})


def _name_in(rope: Value) -> Name | None:
    """The name that is all of the rope."""
    first = rope[0] if isinstance(rope, list) else None
    return first if isinstance(first, bytes) else None
