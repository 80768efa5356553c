"""Which steps the stage before takes no more of, by its peers' own words; and this peer's word to the stage after.

Nothing comes of a step any more once the stage before has closed it: then a later stage need not wait for the rest of
a step's work, which may have been lost, or done by members that do not say so.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from peer.stage.events import StepClosed, VersionTurned
from peer.stage.tasks import Tasks
from swarm.core.canonical import Value
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId, StageIndex, Step
from swarm.network.transport import Message, Transport

CLOSED = "closed"
"""{stage, era, step}: the sender's stage takes no more of the step, nor of any before it."""
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

    def serve(self) -> None:
        """Begin to listen."""
        self.transport.serve(CLOSED, self._on_closed, max_body_bytes=0)

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

    def _say(self, step: Step) -> None:
        at = (self.era(), step)
        if step < 0 or at <= self._said:
            return
        self._said = at
        meta: dict[str, Value] = {"stage": int(self.stage), "era": at[0], "step": int(step)}
        for peer in sorted(self.after()):
            self.tasks.spawn(self._tell(peer, Message(meta)))

    async def _tell(self, peer: PeerId, word: Message) -> None:
        for left in reversed(range(TRIES)):
            try:
                await self.transport.call(peer, CLOSED, word, timeout_s=self.call_s, max_body_bytes=0)
                return
            except (TransientError, RemoteError):
                if not left:
                    raise

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
