"""What this peer's contribution was given for, shown to the voters of its round; and what theirs is, looked at."""

from collections import Counter
from collections.abc import Callable

from peer.round.stage_steps import StageSteps
from peer.round.step_state import StepState
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import value_or_none
from swarm.core.ids import PeerId, Step
from swarm.core.round.facts import RoundFacts
from swarm.drawn_papers import PAPERS, DrawnPapers, read_asked
from swarm.network.transport import Message, Transport
from verification.round.papers import Papers

MOST_ASKED = 64
"""Times that one voter may ask in a step, for papers of all members."""
PAPERS_SHARE = 4
"""Papers are waited for a fourth of a call's time: who votes asks their maker, and then the leader twice as long."""
LeaveOut = Callable[[StepState, PeerId], None]


def papers_s(call_s: float, facts: RoundFacts) -> float:
    """How long a voter waits for one contribution's papers, in a round of these facts."""
    return max(facts.phase_s / 2, call_s / PAPERS_SHARE)


class PapersDesk:
    """Answers the voters of this peer's rounds."""

    def __init__(self, steps: StageSteps, drawn: DrawnPapers, leave_out: LeaveOut) -> None:
        """`leave_out` is told whose papers are not shown here either, where this peer leads."""
        self._steps = steps
        self._drawn = drawn
        self._leave_out = leave_out
        self._asked: Counter[tuple[int, PeerId]] = Counter()

    def serve(self, transport: Transport) -> None:
        """Begin to answer."""
        transport.serve(PAPERS, self._on_papers, max_body_bytes=0)

    async def _on_papers(self, sender: PeerId, request: Message) -> Message:
        fields, entries = read_asked(request)
        stage, step, of = fields.integer("stage"), Step(fields.integer("step")), fields.peer("of")
        fields.done()
        self._steps.check_stage(sender, stage)
        state = self._steps.open_step(step)
        if state is None or state.round is None:
            raise TransientError(f"step {step} is not open here")
        facts = state.round.facts
        if sender not in facts.voters and sender not in facts.members:
            raise RemoteError("standing", f"{sender} has no vote in step {step}", sender)
        self._count(step, sender)
        if of == self._steps.context.me:
            return Message({"papers": [value_or_none(papers) for papers in self._own(state, entries, sender)]})
        made = state.round.asks_votes_for(of)
        if made is None or entries[-1] >= len(made.work):
            raise TransientError(f"no contribution of {of[-6:]} to step {step} is voted on here")
        try:
            within_s = papers_s(self._steps.context.settings.deadlines.call_s, facts)
            return Message({"papers": await self._drawn.fetch(made, entries, of=of, within_s=within_s)})
        except (RemoteError, TransientError) as error:
            self._leave_out(state, of)
            raise TransientError(f"{of[-6:]} shows no papers here either: {error}") from error

    def _own(self, state: StepState, entries: tuple[int, ...], sender: PeerId) -> list[Papers | None]:
        listed = state.papers
        if entries[-1] >= len(listed):
            raise RemoteError("protocol", f"entry {entries[-1]} of {len(listed)}", sender)
        return [listed[entry] for entry in entries]

    def _count(self, step: Step, sender: PeerId) -> None:
        for old in [key for key in self._asked if key[0] < int(step) - 1]:
            del self._asked[old]
        self._asked[int(step), sender] += 1
        if self._asked[int(step), sender] > MOST_ASKED:
            raise RemoteError("protocol", f"{sender} has asked for papers {MOST_ASKED} times in step {step}", sender)
