"""How a peer that is behind, or new, comes to its stage's present version and becomes a member.

From the stage's other peers: signed results one after another, or a snapshot in checked chunks first; then it asks
to be put on the next roster. Until it is a member it takes what the stage's rounds have reduced while they go on: on a
home line a result takes as long as half a round, and a member that has it later is left out of the next.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, zip_longest

from peer.round.joiners import Joiners
from peer.round.rounds import StageRounds
from peer.round.stage_steps import StageSteps
from peer.round.step_state import StepParts
from peer.stage.events import Overtaken
from peer.state.joining_state import BrokenOff, JoiningState
from peer.state.way_back import bytes_of_result_and_state
from swarm.checkpoint.state import Bytes
from swarm.checkpoint.transfer import (
    CHUNK,
    EARLY_PARTS,
    MOST_EARLY_PARTS,
    SNAPSHOT,
    Offer,
    OfferedResults,
    bodies_of,
    fetch_early_parts,
    fetch_parts,
    fetch_results,
    parts_of,
)
from swarm.core.audit.ticket import Ticket
from swarm.core.canonical import Value
from swarm.core.errors import DiskFullError, LocalError, RemoteError, TransientError
from swarm.core.fields import Fields, value_or_none
from swarm.core.ids import PeerId, Step, Version
from swarm.core.round.contribution import Result
from swarm.core.transfers import MOST_DONORS
from swarm.host_protocol import MAX_RESULTS_PER_CALL, RESULTS
from swarm.identity.key import verify
from swarm.network.loop import happened
from swarm.network.transport import Message, Transport
from verification.audit.verdicts import Promotion

log = logging.getLogger(__name__)

JOIN = "join"
"""{ticket, promotion | None} -> {version}: a peer that has caught up asks to be put on the next roster of its stage.
With that version it will be a member, or is one."""
LONGEST_WAIT_S = 5.0
VERSIONS_LOOKED_AT = 8
"""The last ones that the stage was found at say how long a step takes there."""
PARTS_LOOKED_AT = 4
"""So many at once say how long one takes."""
MOST_IN_VAIN = 3
"""Tries to take a result of a donor that has it by its word alone."""
PAUSE_S = 0.25
"""Between two donors that have brought nothing new."""


class StateDonor:
    """Serves the stage's results and snapshots to whoever asks."""

    def __init__(self, steps: StageSteps, joiners: Joiners, heard_of: Callable[[Promotion], None]) -> None:
        """`heard_of` checks a promotion that its peer shows, and remembers it. It raises RemoteError."""
        self._steps = steps
        self._joiners = joiners
        self._heard_of = heard_of
        self.num_given = 0
        """Chunks of states, so far."""

    def serve(self, transport: Transport) -> None:
        for method, handler in (
            (RESULTS, self._on_results),
            (SNAPSHOT, self._on_snapshot),
            (CHUNK, self._on_chunk),
            (EARLY_PARTS, self._on_early_parts),
            (JOIN, self._on_join),
        ):
            transport.serve(method, handler, max_body_bytes=0)
        transport.in_turns(CHUNK, self._joiners.turn_of_state)

    async def _on_results(self, sender: PeerId, request: Message) -> Message:
        """Results from a version on, at most a few; waits for the next one if the caller is up to date."""
        fields = Fields("results request", request.meta)
        start, wait_s = fields.integer("from"), min(fields.number("wait_s"), LONGEST_WAIT_S)
        steps = self._steps
        if start >= steps.version and not steps.is_over:
            await steps.wait_for_version(start + 1, timeout_s=wait_s)
        results = await asyncio.to_thread(steps.context.results.signed_since, start, at_most=MAX_RESULTS_PER_CALL)
        oldest = min(steps.context.results, default=int(steps.version))
        return Message({"version": steps.version, "oldest": oldest, "results": [*results]})

    async def _on_snapshot(self, sender: PeerId, request: Message) -> Message:
        """The latest snapshot, or that of one version: see `swarm.checkpoint.transfer`."""
        fields = Fields("snapshot request", request.meta)
        version = fields.integer("version") if fields.optional("version") else None
        stage = self._steps.chain.stage
        if fields.integer("stage") != stage:
            raise RemoteError("protocol", f"this peer serves stage {stage}", sender)
        store = self._steps.context.snapshots
        held = store.latest() if version is None else store.get(version)
        if held is None:
            raise TransientError(f"no snapshot {'yet' if version is None else f'of version {version}'} here")
        return Offer(stage, held.chain.version, held.digest, held.hashes, held.total_bytes, held.chain).to_message()

    async def _on_chunk(self, sender: PeerId, request: Message) -> Message:
        fields = Fields("chunk request", request.meta)
        version, index = fields.integer("version"), fields.integer("index", high=1 << 32)
        snapshot = self._steps.context.snapshots.get(version)
        if snapshot is None or index >= len(snapshot.hashes):
            raise TransientError(f"no chunk {index} of version {version} here")
        self.num_given += 1
        return Message({}, await asyncio.to_thread(snapshot.chunk, index))

    async def _on_early_parts(self, sender: PeerId, request: Message) -> Message:
        """What is here of an open step's result."""
        fields = Fields("early parts request", request.meta)
        state, start = self._steps.open_step(Step(fields.integer("step"))), fields.integer("from", high=1 << 32)
        made = state.parts.reductions if state is not None else ()
        whole: Iterator[Value] = ([one.part, one.digest] for one in made if one.cohort is None and not one.is_empty)
        named: list[Value] = [*islice(whole, start, start + MOST_EARLY_PARTS)] if start < len(made) else []
        return Message({"parts": named})

    async def _on_join(self, sender: PeerId, request: Message) -> Message:
        steps, fields = self._steps, Fields("join request", request.meta)
        ticket = Ticket.from_value(fields.message("ticket"))
        promotion = fields.maybe("promotion", Promotion.from_value)
        fields.done()
        ticket.check(
            run_id=steps.context.run_id,
            run_key=steps.chain.run_key,
            amendments=steps.chain.amendments,
            verify=verify,
        )
        if ticket.peer_id != sender or ticket.stage != steps.chain.stage:
            raise RemoteError("ticket", f"a ticket of {ticket.peer_id} for stage {ticket.stage}", sender)
        limit = steps.context.settings.limits.max_peers_per_stage
        if promotion is not None and promotion.peer_id == sender:
            self._heard_of(promotion)
        if sender in steps.chain.members:
            return Message({"version": steps.version})
        if not steps.may_join(sender):
            raise TransientError(f"{sender} is not known here to be past its probation")
        if len(steps.chain.members) + len(steps.joining - {sender}) >= limit:
            raise TransientError(f"stage {steps.chain.stage} has its {limit} peers")
        steps.asks_to_join(sender)
        return Message({"version": steps.next_to_join()})


@dataclass
class EarlyParts:
    """What was named of the result of a step that is open: of each part one encoding, for there is one as a rule."""

    num_named: Counter[PeerId] = field(default_factory=Counter)
    """By each donor."""
    parts: set[int] = field(default_factory=set)
    """That are here."""


class CatchUp:
    """Brings `rounds` to the stage's present, and this peer onto the roster."""

    def __init__(
        self,
        rounds: StageRounds,
        transport: Transport,
        peers_of_stage: Callable[[], set[PeerId]],
        ticket: Ticket,
        promotion: Callable[[], Promotion | None],
        rng: random.Random,
    ) -> None:
        """`promotion`: what this peer may show now, if it was no founder."""
        self._rounds = rounds
        self._steps = steps = rounds.steps
        self._promotion = promotion
        self._ticket = ticket
        self._transport = transport
        self._peers_of_stage = peers_of_stage
        self._rng = rng
        self._behind: set[PeerId] = set()
        self._parts: dict[bytes, Bytes] = {}
        """Of the result that comes next, by digest: those that are here."""
        self._early = EarlyParts()
        self._follow = steps.chain.name
        """The version that both are of the result after."""
        self._part_s: float | None = None
        """That a part of a result lately took."""
        self._stage_was: deque[tuple[float, int]] = deque(maxlen=VERSIONS_LOOKED_AT)
        """At which version the stage was found, when that was a new one."""
        self._asked_at: Version | None = None
        """The version that was here when this peer last asked to join."""
        self._broken_off = BrokenOff()
        self._is_wrong = False
        """This peer's own state is not the stage's."""
        self._in_vain: Counter[PeerId] = Counter()
        """Who had what comes next by its word, while others had it no more, and did not give it: how often."""
        self._in_vain_at = int(steps.version)
        """The version that was here then."""
        self._version = steps.version
        self._look_at = 0.0
        """When to look where the stage is, unless a step is taken before."""
        self._overtaken_at = steps.version
        """The version at which another peer was last found ahead. At first this one's: its state may be an old one."""
        self._wake = asyncio.Event()

    def overtaken(self, event: Overtaken) -> None:
        """Another peer is ahead of this one."""
        self.behind(event.peer)

    def behind(self, peer: PeerId) -> None:
        """`peer` is ahead of this one."""
        self._behind.add(peer)
        self._wake.set()

    def load_anew(self) -> None:
        """The state that this peer has is wrong, whatever its version."""
        self._is_wrong = True
        self._wake.set()

    async def run(self) -> None:
        """Watch for falling behind or off the roster, and mend it, for ever. Raises DiskFullError."""
        while True:
            steps = self._steps
            if steps.is_over or (self._takes_part and not self._behind and not self._is_wrong):
                self._wake.clear()
                await happened(self._wake, within_s=0.5)
                await self._look_around()
                continue
            donors = sorted(self._behind - {self._me}) or self._others()
            self._behind.clear()
            if not donors:
                await asyncio.sleep(PAUSE_S)
                continue
            donor = self._rng.choice(donors)
            version, asked_at = steps.version, time.monotonic()
            try:
                if self._is_wrong:
                    await self._load_snapshot(donor, newer_than=-1)
                else:
                    await self._advance(donor)
            except DiskFullError:  # the volunteer is told, and all else stands still, too
                raise
            except (TransientError, RemoteError, TimeoutError, LocalError) as error:
                log.info("catching up from %s: %s", donor[-6:], error)
                await asyncio.sleep(PAUSE_S)
            else:
                if steps.version == version and time.monotonic() < asked_at + PAUSE_S:
                    await asyncio.sleep(PAUSE_S)  # the donor was to wait for the next result, and did not

    @property
    def _me(self) -> PeerId:
        return self._transport.peer_id

    @property
    def _takes_part(self) -> bool:
        """Whether the stage's rounds reach this peer: not while it is on probation, whatever the last roster says."""
        return self._steps.is_member and self._steps.may_join(self._me)

    @property
    def _is_joining(self) -> bool:
        return not self._steps.is_member and self._steps.may_join(self._me)

    def _others(self) -> list[PeerId]:
        return sorted((self._peers_of_stage() | set(self._steps.chain.members)) - {self._me})

    async def _look_around(self) -> None:
        """Where no step is taken for a call's time, ask a peer where the stage is.

        Members hear from a step's leader that it is over. Whoever leads the step itself hears from nobody.
        """
        steps, others = self._steps, self._others()
        call_s, own = steps.context.settings.deadlines.call_s, steps.version
        if own != self._version:
            self._version, self._look_at = own, time.monotonic() + call_s
        if steps.is_over or not others or time.monotonic() < self._look_at:
            return
        asked = self._rng.choice(others)
        try:
            version = await self._rounds.version_of(asked)
        except (TransientError, RemoteError) as error:
            log.debug("where the stage is, from %s: %s", asked[-6:], error)
            return
        self._look_at = time.monotonic() + call_s
        # One step ahead it may just have ended that which is under way here, too.
        if version > own + 1 or (version > own and self._overtaken_at == own):
            self.behind(asked)
        if version > own:
            self._overtaken_at = own

    async def _advance(self, donor: PeerId) -> None:
        steps = self._steps
        is_to_ask = self._is_joining and self._asked_at != steps.version  # at once: the next round may begin
        wait_s = 0.0 if self._takes_part or is_to_ask else 2.0
        settings, started_at = steps.context.settings, int(steps.version)
        offered = await fetch_results(self._transport, donor, started_at, settings, wait_s=wait_s)
        self._stage_is_at(offered.version, donor)
        is_of_another = offered.version > steps.version and offered.oldest > steps.version
        if is_of_another:
            others = await self._who_has_what_is_next(donor)
            if others is None:
                await self._load_snapshot(donor, newer_than=int(steps.version))
                return
            donor, offered = others
        if self._is_dear(offered.version):
            try:  # whatever one donor says: where the stage is says the state that is chosen
                await self._load_snapshot(donor, newer_than=self._cheap_to)
                return
            except (TransientError, RemoteError) as error:  # no newer state is anchored yet: the results are there
                log.info("a state from %s: %s", donor[-6:], error)
        if offered.version > steps.version and not offered.results:
            raise TransientError(f"{donor[-6:]} is at {offered.version} but sent no results")
        if self._is_joining and self._is_there_in_time(offered.version - started_at):
            self._asked_at = steps.version
            await self._ask_to_join()
        results = offered.results
        for result, following in zip_longest(results, results[1:]):
            if int(result.roster.step) != int(steps.version):
                break
            try:
                await self._take(result, following, donor)
            except (TransientError, RemoteError, TimeoutError):
                if is_of_another:
                    self._in_vain[donor] += 1
                raise
        if offered.version > steps.version:
            self._behind.add(donor)
        elif offered.version == started_at and self._is_joining and donor in steps.chain.members:
            await self._take_early_parts(donor)  # anybody can be in the directory, and name what is none

    async def _who_has_what_is_next(self, but: PeerId) -> tuple[PeerId, OfferedResults] | None:
        """Who of several has the results from here on, members first, and what it offers; None if nobody has.

        That one donor has none says nothing of the others: it may have loaded a newer state itself.
        """
        steps = self._steps
        settings, version = steps.context.settings, int(steps.version)
        if self._in_vain_at != version:
            self._in_vain_at = version
            self._in_vain.clear()

        async def ask(peer: PeerId) -> OfferedResults | None:
            with contextlib.suppress(TransientError, RemoteError):
                offered = await fetch_results(self._transport, peer, version, settings)
                if offered.oldest <= version and offered.results:
                    return offered
            return None

        asked = [peer for peer in self._donors(but)[1:] if self._in_vain[peer] < MOST_IN_VAIN]
        found = zip(asked, await asyncio.gather(*map(ask, asked)), strict=True)
        return next(((peer, offered) for peer, offered in found if offered is not None), None)

    def _stage_is_at(self, version: int, donor: PeerId) -> None:
        """By a donor's word, of which only members' counts."""
        was = self._stage_was
        if donor not in self._steps.chain.members:
            return
        if was and version < was[-1][1]:  # it was rolled back, or somebody lies
            was.clear()
        if not was or version > was[-1][1]:
            was.append((time.monotonic(), version))

    def _is_there_in_time(self, num_lacking: int) -> bool:
        """Whether it holds the stage's version, or lacks one result and has that, and the one that is then being made,
        in no more time than a step takes: whoever comes later than the next round begins is no member of that."""
        if num_lacking != 1:
            return num_lacking <= 0
        if self._part_s is None or len(self._stage_was) < 2:
            return True
        (first_at, first), (last_at, last) = self._stage_was[0], self._stage_was[-1]
        if last - first < 2:
            return True
        num_here = len(self._parts) if self._follow == self._steps.chain.name else 0
        num_parts = 2 * self._steps.replica.num_parts - num_here
        return num_parts * self._part_s <= (last_at - first_at) / (last - first)

    async def _take(self, result: Result, following: Result | None, donor: PeerId) -> None:
        """Take the next step by this result; that which the donor names after it comes meanwhile."""
        bodies = await self._parts_of(result, donor)
        self._parts.clear()
        coming = asyncio.ensure_future(self._come_meanwhile(following, donor))
        try:
            await self._rounds.adopt(result, bodies)
            self._follow, self._early = self._steps.chain.name, EarlyParts()  # what comes is of what follows it
            await coming
        finally:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)

    async def _come_meanwhile(self, result: Result | None, donor: PeerId) -> None:
        """The parts of a result of which nothing is checked yet, by a member's word."""
        steps = self._steps
        if result is None or donor not in steps.chain.members:
            return
        if int(result.roster.step) != int(steps.version) + 1 or len(result.parts) != steps.replica.num_parts:
            return
        # They are asked for again when it is their turn.
        with contextlib.suppress(TransientError, RemoteError, TimeoutError):
            async with asyncio.timeout(self._unchecked_s):
                await self._fetch_parts(donor, result.roster.step, parts_of(result))

    @property
    def _unchecked_s(self) -> float:
        """How long what nobody has certified may take: a donor may name what nobody else has, and let it drip."""
        return max(self._steps.context.settings.deadlines.call_s, self._steps.usual_s or 0.0)

    async def _take_early_parts(self, donor: PeerId) -> None:
        """A few that the donor and others have of the present round's result."""
        steps = self._steps
        settings, num_parts, step = steps.context.settings, steps.replica.num_parts, Step(steps.version)
        self._forget_other_parts()
        early, held = self._early, self._parts
        named = await fetch_early_parts(self._transport, donor, step, settings, start=early.num_named[donor])
        first = {part: digest for part, digest in reversed(named) if part < num_parts and part not in early.parts}
        wanted = {digest: part for part, digest in first.items()}
        try:
            async with asyncio.timeout(self._unchecked_s):
                await self._fetch_parts(donor, step, wanted)
            early.num_named[donor] += len(named)
        finally:
            early.parts |= {part for digest, part in wanted.items() if digest in held}
        if wanted:
            log.debug("step %d: %d of %d parts are here before the result", step, len(early.parts), num_parts)

    def _forget_other_parts(self) -> None:
        """Those of a result that does not follow this peer's version."""
        if self._follow != self._steps.chain.name:
            self._follow, self._early = self._steps.chain.name, EarlyParts()
            self._parts.clear()

    async def _fetch_parts(self, donor: PeerId, step: Step, named: Mapping[bytes, int]) -> None:
        """Have them here, from the donor and others. Raises TransientError or RemoteError."""
        replica, settings = self._steps.replica, self._steps.context.settings
        largest_bytes = max(map(replica.parts().result_bytes, range(replica.num_parts)))
        num_here, began = len(self._parts), time.monotonic()
        try:
            # A result is a byte a parameter: what waits for the rest of it waits on disk.
            await fetch_parts(
                self._transport,
                self._donors(donor),
                step,
                named,
                settings,
                self._parts,
                largest_bytes=largest_bytes,
                keep=replica.outputs.put,
            )
        finally:
            came, took_s = len(self._parts) - num_here, time.monotonic() - began
            if came > 0:
                log.info("%d parts of step %d's result came in %.1f s", came, step, took_s)
        if came >= PARTS_LOOKED_AT:
            self._part_s = took_s / came

    def _donors(self, first: PeerId) -> list[PeerId]:
        """Of parts: it and others, members before those whom anybody can be in the directory."""
        others = [peer for peer in self._others() if peer != first]
        self._rng.shuffle(others)
        others.sort(key=lambda peer: peer not in self._steps.chain.members)
        return [first, *others[: MOST_DONORS - 1]]

    @property
    def _cheap_to(self) -> int:
        """The version up to which results are no more bytes than a state."""
        steps = self._steps
        result_bytes, state_bytes = bytes_of_result_and_state(steps.context.settings, steps.replica.layout)
        return int(steps.version) + int(state_bytes / result_bytes)

    def _is_dear(self, version: int) -> bool:
        """Whether the results up to the snapshot before `version` are more bytes than that snapshot."""
        return version - version % self._steps.context.settings.checkpoint.snapshot_every > self._cheap_to

    async def _parts_of(self, result: Result, donor: PeerId) -> list[Bytes]:
        """The bytes of a result that somebody offers, once it is known to be genuine; from all who may have them."""
        steps, replica = self._steps, self._steps.replica
        settings = steps.context.settings
        facts = steps.chain.facts(settings, num_parts=replica.num_parts, phase_s=settings.deadlines.call_s)
        facts.check_result(result, verify, certified=True)
        self._forget_other_parts()
        state = steps.open_step(result.roster.step)
        held = state.parts if state is not None else StepParts()
        # What the step's round has need not come again, nor what is on its way here.
        keys = {(part.part, part.digest) for part in result.parts} & held.reduced.keys()
        self._parts |= {digest: held.reduced[part, digest] for part, digest in keys}
        held.are_caught_up_on = True
        try:
            await self._fetch_parts(donor, result.roster.step, parts_of(result))
        finally:
            held.are_caught_up_on = False
        return bodies_of(result, self._parts)

    async def _load_snapshot(self, donor: PeerId, *, newer_than: int) -> None:
        steps = self._steps
        started = time.monotonic()
        replica = steps.replica
        own = steps.chain
        wanted = JoiningState(
            self._transport,
            steps.context.settings,
            own.run_id,
            own.run_key,
            own.host,
            own.stage,
            replica.layout,
            steps.context.snapshots.folder,
            own.amendments,
            self._broken_off,
        )

        async def find() -> list[PeerId]:
            others = [peer for peer in self._others() if peer != donor]
            self._rng.shuffle(others)
            return [donor, *others]

        # Anybody can be in the directory of a public run: there, without an anchor, only certified members count.
        members = own.members if steps.context.settings.trust == "public" else self._peers_of_stage() or own.members
        state, chain = await wanted.fetch(await find(), members, newer_than=newer_than, find=find)
        if chain.version <= steps.version and not self._is_wrong:  # meanwhile
            return
        self._is_wrong = True  # half of it may be another's, where memory gives out
        await self._rounds.taking.begin_again(state, chain)
        self._is_wrong = False
        log.info("took version %d in %.1f s", chain.version, time.monotonic() - started)
        self._behind.add(donor)

    async def _ask_to_join(self) -> None:
        steps, call_s = self._steps, self._steps.context.settings.deadlines.call_s
        state = steps.open_step(Step(steps.version))
        leader = state.leader if state is not None else None
        request = Message({"ticket": self._ticket.to_value(), "promotion": value_or_none(self._promotion())})

        async def ask(peer: PeerId) -> None:
            with contextlib.suppress(TransientError, RemoteError):
                reply = await self._transport.call(peer, JOIN, request, timeout_s=call_s, max_body_bytes=0)
                version = Version(Fields("join answer", reply.meta).integer("version"))
                if peer == leader:  # who makes the roster
                    steps.joins_at(version)

        await asyncio.gather(*(ask(peer) for peer in self._others()))
