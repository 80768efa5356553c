"""What a roster's voters look at before they vote: the papers of a few entries of each contribution, drawn by each of
them for itself.

Who votes draws with its own randomness, after the contribution was committed to, and tells nobody before it asks. What
is not shown does not count: a voter tells the leader what it lacks, and the leader either has it shown, and hands it
on, or proposes a roster without that contribution, and tells who misses it there which entries it lacks: whoever sees
those goes on missing it (`swarm.left_without`).
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence

from swarm.core.canonical import Value
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields, integer_item
from swarm.core.ids import PeerId, Step
from swarm.core.kept import keep_newest
from swarm.core.round.ballots import Proposal
from swarm.core.round.contribution import MAX_WORK, Contribution
from swarm.network.transport import Message, Transport

log = logging.getLogger(__name__)

PAPERS = "papers"
"""{stage, step, of, entries} -> {papers}: of the contribution of the one asked, or, where that is who leads the round,
of another's. None for an entry of which it has none."""
DRAWN = 32
"""Entries that a voter draws of a round's contributions, in equal shares; of each at least one."""
MOST_REMEMBERED = 1024
DISTRUSTED_STEPS, DISTRUSTED_SHARE = 8, 8
"""Who was waited for in vain is waited for an eighth as long in so many steps after it, and then as long as at first:
papers that a full line holds up would never come in an eighth of their time."""

KNOWN_SOON_S = 0.1
CheckEntry = Callable[[Contribution, int, Value], bool]
"""Raises RemoteError unless the papers bear out the contribution's entry of that number, and tells whom it concerns if
they prove a lie. False while those who signed them are not known here: promotions are on their way."""


def drawn_entries(made: Contribution, *, num_members: int, rng: random.Random) -> tuple[int, ...]:
    """Numbers of the entries of a contribution that a voter looks at, of a stage with so many members; sorted."""
    count = min(len(made.work), max(1, DRAWN // max(1, num_members - 1)))
    return tuple(sorted(rng.sample(range(len(made.work)), count)))


class WithheldError(TransientError):
    """A contribution's maker says itself that it has no papers for an entry of it."""


class WaitedInVain:
    """Who was waited for in vain lately, and so is waited for less."""

    def __init__(self) -> None:
        self.steps: dict[PeerId, int] = {}
        """Of each, the last in which it was."""

    def add(self, peer: PeerId, step: Step) -> None:
        self.steps[peer] = int(step)
        keep_newest(self.steps, MOST_REMEMBERED)

    def names(self, peer: PeerId, step: Step) -> bool:
        """Whether it was in this step, or in the last `DISTRUSTED_STEPS`."""
        return 0 <= int(step) - self.steps.get(peer, -DISTRUSTED_STEPS - 1) <= DISTRUSTED_STEPS


class DrawnPapers:
    """One voter's draws, and what was shown for them."""

    def __init__(self, transport: Transport, check: CheckEntry, rng: random.Random) -> None:
        """Nobody else must be able to tell what `rng` gives."""
        self._transport = transport
        self._check = check
        self._rng = rng
        self._draws: dict[bytes, tuple[int, ...]] = {}
        """By contribution: who asks again must not draw again."""
        self._shown: dict[bytes, None] = {}
        self._lacked: dict[bytes, tuple[int, ...]] = {}
        """By contribution, entries that its maker was asked for here in vain."""
        self._withheld = WaitedInVain()

    async def check(self, proposal: Proposal, leader: PeerId, *, num_members: int, within_s: float) -> None:
        """Raises TransientError while something that was drawn of a new roster is not shown; WithheldError if its
        leader has none for its own contribution: then no roster of this leader's can be voted for.

        A roster that is proposed again was certified: whoever voted then has looked.
        """
        roster = proposal.new_roster
        if roster is None:
            return
        me = self._transport.peer_id
        others = [made for made in roster.contributions if made.peer_id != me]
        asked = (
            self.lack(made, num_members=num_members, within_s=within_s, leads=made.peer_id == leader) for made in others
        )
        for made, lack in zip(others, await asyncio.gather(*asked), strict=True):
            if lack is None:
                continue
            if made.peer_id == leader:
                kind = WithheldError if isinstance(lack, WithheldError) else TransientError
                raise kind(f"papers of {leader[-6:]}, who leads, are not shown: {lack}")
            await self.fetch(made, self._drawn(made, num_members), of=leader, within_s=2 * within_s)
            self._remember(made)

    async def lack(
        self, made: Contribution, *, num_members: int, within_s: float, leads: bool = False
    ) -> RemoteError | TransientError | None:
        """Why its maker does not show what is drawn of it here; None if it does. Who `leads` holds up its own round
        alone: it has all of its time always."""
        if made.digest() in self._shown or not made.work:
            return None
        is_distrusted = self._withheld.names(made.peer_id, made.step)
        if is_distrusted and not leads:
            within_s /= DISTRUSTED_SHARE
        try:
            await self.fetch(made, self._drawn(made, num_members), of=made.peer_id, within_s=within_s)
        except (RemoteError, TransientError) as error:
            log.info("step %d: papers of %s: %s", made.step, made.peer_id[-6:], error)
            if is_distrusted:
                return error
            self._withheld.add(made.peer_id, made.step)
            return error
        self._remember(made)
        return None

    async def fetch(
        self, made: Contribution, entries: Sequence[int], *, of: PeerId, within_s: float
    ) -> tuple[Value, ...]:
        """The papers of some entries, as a peer shows them. Raises RemoteError or TransientError if it does not."""
        if of == made.peer_id:
            self._keep_lacked(made, tuple(entries))
        papers = await self._fetched(made, entries, of, within_s)
        if of == made.peer_id:
            self._lacked.pop(made.digest(), None)
        return papers

    def lacks(self, made: Contribution) -> tuple[int, ...]:
        """Entries of a contribution, of which its maker has not shown all here: who doubts it may ask for the same."""
        return self._lacked.get(made.digest(), ())

    def _keep_lacked(self, made: Contribution, entries: tuple[int, ...]) -> None:
        self._lacked[made.digest()] = entries
        keep_newest(self._lacked, MOST_REMEMBERED)

    async def _fetched(
        self, made: Contribution, entries: Sequence[int], of: PeerId, within_s: float
    ) -> tuple[Value, ...]:
        give_up_at = time.monotonic() + within_s
        meta: dict[str, Value] = {
            "stage": made.stage,
            "step": made.step,
            "of": made.peer_id,
            "entries": list(entries),
        }
        reply = await self._transport.call(of, PAPERS, Message(meta), timeout_s=within_s, max_body_bytes=0)
        fields = Fields("papers answer", reply.meta)
        papers = fields.items("papers", lambda value: value, max_items=DRAWN)
        fields.done()
        if len(papers) != len(entries):
            raise RemoteError("malformed", f"{len(papers)} papers for {len(entries)} entries", of)
        if None in papers:
            raise WithheldError(f"{of[-6:]} has no papers for {papers.count(None)} of {len(papers)} entries")
        while not all(self._check(made, entry, value) for entry, value in zip(entries, papers, strict=True)):
            if time.monotonic() >= give_up_at:
                raise TransientError(f"papers of {made.peer_id[-6:]} are signed by peers that are not known here")
            await asyncio.sleep(KNOWN_SOON_S)
        return tuple(papers)

    def _drawn(self, made: Contribution, num_members: int) -> tuple[int, ...]:
        """Numbers of the entries, sorted."""
        key = made.digest()
        if key not in self._draws:
            self._draws[key] = drawn_entries(made, num_members=num_members, rng=self._rng)
            keep_newest(self._draws, MOST_REMEMBERED)
        return self._draws[key]

    def _remember(self, made: Contribution) -> None:
        self._shown[made.digest()] = None
        keep_newest(self._shown, MOST_REMEMBERED)


def read_asked(request: Message) -> tuple[Fields, tuple[int, ...]]:
    """What is asked for, all but stage, step and whose read. Raises RemoteError("malformed")."""
    fields = Fields("papers request", request.meta)
    entries = fields.items("entries", integer_item, max_items=DRAWN)
    if not entries or list(entries) != sorted(set(entries)) or entries[-1] >= MAX_WORK:
        raise RemoteError("malformed", f"{len(entries)} entries, not each once and in order")
    return fields, tuple(entries)
