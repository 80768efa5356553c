"""Which steps the stage before takes no more of, by its peers' own words; and this peer's word to the stage after.

Nothing comes of a step any more once the stage before has closed it: then a later stage need not wait for the rest of
a step's work, which may have been lost, or done by members that do not say so.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from peer.stage.events import PeersChanged, StepClosed, VersionTurned
from peer.stage.tasks import Tasks
from swarm.core.canonical import Value
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId, StageIndex, Step, Version
from swarm.network.transport import Message, Transport

CLOSED = "closed"
"""{stage, era, step}: the sender's stage takes no more of the step, nor of any before it."""
LAST_CLOSED = "last_closed"
"""{stage} -> {era, next}: the first step that the answerer's stage still takes work of, by its own word."""
TRIES = 3


@dataclass(kw_only=True)
class ClosedSteps:
    """Each peer speaks for itself; what most of those that live say holds. So no few peers end another stage's step."""

    transport: Transport
    tasks: Tasks
    stage: StageIndex
    call_s: float
    era: Callable[[], int]
    """Of the stage now."""
    before: Callable[[], set[PeerId]]
    """The live peers of the stage before."""
    after: Callable[[], set[PeerId]]
    """And of the one after."""
    _heard: dict[PeerId, tuple[int, Step]] = field(default_factory=dict)
    """Of the stage before: the era and the last step that is closed, by each one's own word."""
    _said: tuple[int, Step] = (0, Step(-1))
    _there: dict[int, frozenset[PeerId]] = field(default_factory=dict)
    """By stage, those beside this one that were there when it was last heard who is."""

    def serve(self, version: Version) -> None:
        """Begin to listen and to answer; the steps before this version are closed here."""
        self.transport.serve(CLOSED, self._on_closed, max_body_bytes=0)
        self.transport.serve(LAST_CLOSED, self._on_last_closed, max_body_bytes=0)
        self._say(Step(version - 1))

    def is_closed_before(self, step: Step) -> bool:
        """Whether most of the stage before take no more of the step."""
        before, era = self.before(), self.era()
        said = [self._heard[peer] for peer in before if peer in self._heard]
        return 2 * sum(of == era and last >= step for of, last in said) > len(before)

    def begun(self, peer: PeerId, step: Step) -> None:
        """A peer of the stage before is at work on the step: the one before it is closed there."""
        self._hear(peer, (self.era(), Step(step - 1)))

    def closed(self, event: StepClosed) -> None:
        """By this peer."""
        self._say(event.step)

    def turned(self, event: VersionTurned) -> None:
        """This peer may have had no part in the step that is over."""
        self._say(Step(event.chain.version - 1))

    def changed(self, event: PeersChanged) -> None:
        """What was said before a peer came is said to it again, and one of the stage before is asked.

        Whichever of the two knows the other last: nothing that was closed until then is missed.
        """
        came = event.peers - self._there.get(event.stage, frozenset())
        self._there[event.stage] = event.peers
        for peer in sorted(came):
            if event.stage == self.stage + 1 and self._said[1] >= 0:
                self.tasks.spawn(self._tell(peer))
            elif event.stage == self.stage - 1:
                self.tasks.spawn(self._ask(peer))

    def _say(self, step: Step) -> None:
        at = (self.era(), step)
        if step < 0 or at <= self._said:
            return
        self._said = at
        for peer in sorted(self.after()):
            self.tasks.spawn(self._tell(peer))

    async def _tell(self, peer: PeerId) -> None:
        era, step = self._said
        await self._called(peer, CLOSED, {"stage": int(self.stage), "era": era, "step": int(step)})

    async def _ask(self, peer: PeerId) -> None:
        answer = await self._called(peer, LAST_CLOSED, {"stage": int(self.stage) - 1})
        fields = Fields("last closed step", answer.meta)
        era, step = fields.integer("era"), Step(fields.integer("next") - 1)
        fields.done()
        self._hear(peer, (era, step))

    async def _called(self, peer: PeerId, method: str, meta: dict[str, Value]) -> Message:
        left = TRIES
        while True:
            left -= 1
            try:
                return await self.transport.call(peer, method, Message(meta), timeout_s=self.call_s, max_body_bytes=0)
            except (TransientError, RemoteError):
                if not left:
                    raise

    async def _on_last_closed(self, sender: PeerId, request: Message) -> Message:
        fields = Fields("question for the last closed step", request.meta)
        stage = fields.integer("stage")
        fields.done()
        if stage != self.stage:
            raise RemoteError("protocol", f"this peer serves stage {self.stage}", sender)
        era, step = self._said
        return Message({"era": era, "next": int(step) + 1})

    async def _on_closed(self, sender: PeerId, request: Message) -> Message:
        fields = Fields("closed step", request.meta)
        stage, era, step = fields.integer("stage"), fields.integer("era"), Step(fields.integer("step"))
        fields.done()
        if stage == self.stage - 1:
            self._hear(sender, (era, step))
        return Message()

    def _hear(self, peer: PeerId, at: tuple[int, Step]) -> None:
        """Of others than those that live nothing is kept."""
        before = self.before()
        if peer in before:
            self._heard = {known: said for known, said in self._heard.items() if known in before}
            self._heard[peer] = max(at, self._heard.get(peer, at))
