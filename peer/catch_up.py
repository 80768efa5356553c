"""This is where a peer that is behind, or new, comes to its stage's present version and becomes a member.

From the stage's other peers: signed results one after another, or a snapshot in checked chunks first; then it asks
to be put on the next roster.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable

from peer.joining_state import JoiningState
from peer.rounds import StageRounds
from swarm.checkpoint.transfer import CHUNK, SNAPSHOT, Offer
from swarm.core.canonical import Value
from swarm.core.contribution import Result
from swarm.core.errors import LocalError, RemoteError, TransientError
from swarm.core.fields import Fields, integer_item, value_or_none
from swarm.core.ids import PeerId, Step, Version
from swarm.host_protocol import MAX_BARE_RESULTS_PER_CALL, MAX_RESULTS_PER_CALL, RESULTS, STANDING
from swarm.network.loop import happened
from swarm.network.transport import Message, Transport
from verification.ticket import Ticket
from verification.verdicts import Promotion

log = logging.getLogger(__name__)

JOIN = "join"
"""{ticket, promotion | None} -> {version}: a peer that has caught up asks to be put on the next roster of its stage.
With that version it will be a member, or is one."""
LONGEST_WAIT_S = 5.0


class StateDonor:
    """Serves the stage's results and snapshots to whoever asks."""

    def __init__(self, rounds: StageRounds, heard_of: Callable[[Promotion], None] = lambda promotion: None) -> None:
        """`heard_of` checks a promotion that its peer shows, and remembers it. It raises RemoteError."""
        self._rounds = rounds
        self._heard_of = heard_of

    def serve(self, transport: Transport) -> None:
        for method, handler in (
            (RESULTS, self._on_results),
            (SNAPSHOT, self._on_snapshot),
            (CHUNK, self._on_chunk),
            (JOIN, self._on_join),
        ):
            transport.serve(method, handler, max_body_bytes=0)

    async def _on_results(self, sender: PeerId, request: Message) -> Message:
        """Results from a version on, at most a few; waits for the next one if the caller is up to date."""
        fields = Fields("results request", request.meta)
        start, wait_s = fields.integer("from"), min(fields.number("wait_s"), LONGEST_WAIT_S)
        with_bodies = fields.boolean("bodies")
        rounds = self._rounds
        if start >= rounds.version and not rounds.is_over:
            await rounds.wait_for_version(start + 1, timeout_s=wait_s)
        if not with_bodies:
            bare = rounds.bare_results.since(start, at_most=MAX_BARE_RESULTS_PER_CALL)
            return Message({"version": rounds.version, "oldest": start, "results": [*bare], "sizes": []})
        values: list[Value] = []
        sizes: list[Value] = []
        bodies: list[bytes | bytearray | memoryview] = []
        for version in range(start, min(rounds.version, start + MAX_RESULTS_PER_CALL)):
            held = rounds.results.get(version)
            if held is None:
                break
            values.append(held[0].packed)
            sizes.append([len(body) for body in held[1]])
            bodies += held[1]
        oldest = min(rounds.results, default=int(rounds.version))
        meta: dict[str, Value] = {"version": rounds.version, "oldest": oldest, "results": values, "sizes": sizes}
        return Message(meta, b"".join(bodies))

    async def _on_snapshot(self, sender: PeerId, request: Message) -> Message:
        """The latest snapshot, or that of one version: see `swarm.checkpoint.transfer`."""
        fields = Fields("snapshot request", request.meta)
        version = fields.integer("version") if fields.optional("version") else None
        stage = self._rounds.chain.stage
        if fields.integer("stage") != stage:
            raise RemoteError("protocol", f"this peer serves stage {stage}", sender)
        store = self._rounds.snapshots
        held = store.latest() if version is None else store.get(version)
        if held is None:
            raise TransientError(f"no snapshot {'yet' if version is None else f'of version {version}'} here")
        return Offer(stage, held.chain.version, held.digest, held.hashes, held.total_bytes, held.chain).to_message()

    async def _on_chunk(self, sender: PeerId, request: Message) -> Message:
        fields = Fields("chunk request", request.meta)
        version, index = fields.integer("version"), fields.integer("index", high=1 << 32)
        snapshot = self._rounds.snapshots.get(version)
        if snapshot is None or index >= len(snapshot.hashes):
            raise TransientError(f"no chunk {index} of version {version} here")
        return Message({}, await asyncio.to_thread(snapshot.chunk, index))

    async def _on_join(self, sender: PeerId, request: Message) -> Message:
        rounds, fields = self._rounds, Fields("join request", request.meta)
        ticket = Ticket.from_value(fields.message("ticket"))
        promotion = fields.maybe("promotion", Promotion.from_value)
        fields.done()
        ticket.check(run_id=rounds.run_id, run_key=rounds.chain.run_key)
        if ticket.peer_id != sender or ticket.stage != rounds.chain.stage:
            raise RemoteError("ticket", f"a ticket of {ticket.peer_id} for stage {ticket.stage}", sender)
        limit = rounds.settings.limits.max_peers_per_stage
        if promotion is not None and promotion.peer_id == sender:
            self._heard_of(promotion)
        if sender in rounds.chain.members:
            return Message({"version": rounds.version})
        if not rounds.may_join(sender):
            raise TransientError(f"{sender} is not known here to be past its probation")
        if len(rounds.chain.members) + len(rounds.joining) >= limit:
            raise TransientError(f"stage {rounds.chain.stage} has its {limit} peers")
        rounds.joining.add(sender)
        return Message({"version": rounds.next_to_join()})


class CatchUp:
    """Brings `rounds` to the stage's present, and this peer onto the roster."""

    def __init__(
        self,
        rounds: StageRounds,
        transport: Transport,
        peers_of_stage: Callable[[], set[PeerId]],
        ticket: Ticket,
        rng: random.Random,
    ) -> None:
        self._rounds = rounds
        self._ticket = ticket
        self._transport = transport
        self._peers_of_stage = peers_of_stage
        self._rng = rng
        self._behind: set[PeerId] = set()
        self._is_wrong = False
        """This peer's own state is not the stage's."""
        self._version = rounds.version
        self._look_at = 0.0
        """When to look where the stage is, unless a step is taken before."""
        self._overtaken_at = rounds.version
        """The version at which another peer was last found ahead. At first this one's: its state may be an old one."""
        self._wake = asyncio.Event()
        self.promotion: Promotion | None = None
        """What this peer may show, if it was no founder."""
        rounds.on_behind = self.behind

    def behind(self, peer: PeerId) -> None:
        """`peer` is ahead of this one."""
        self._behind.add(peer)
        self._wake.set()

    def load_anew(self) -> None:
        """The state that this peer has is wrong, whatever its version."""
        self._is_wrong = True
        self._wake.set()

    async def run(self) -> None:
        """Watch for falling behind or off the roster, and mend it, for ever."""
        while True:
            rounds = self._rounds
            if rounds.is_over or (self._takes_part and not self._behind and not self._is_wrong):
                self._wake.clear()
                await happened(self._wake, within_s=0.5)
                await self._look_around()
                continue
            donors = sorted(self._behind - {self._me}) or self._others()
            self._behind.clear()
            if not donors:
                await asyncio.sleep(0.25)
                continue
            donor = self._rng.choice(donors)
            try:
                if self._is_wrong:
                    await self._load_snapshot(donor)
                else:
                    await self._advance(donor)
            except (TransientError, RemoteError, TimeoutError, LocalError) as error:
                log.info("catching up from %s: %s", donor[-6:], error)
                await asyncio.sleep(0.25)

    @property
    def _me(self) -> PeerId:
        return self._transport.peer_id

    @property
    def _takes_part(self) -> bool:
        """Whether the stage's rounds reach this peer: not while it is on probation, whatever the last roster says."""
        return self._rounds.is_member and self._rounds.may_join(self._me)

    def _others(self) -> list[PeerId]:
        return sorted((self._peers_of_stage() | set(self._rounds.chain.members)) - {self._me})

    async def _look_around(self) -> None:
        """Where no step is taken for a call's time, ask a peer where the stage is.

        Members hear from a step's leader that it is over. Whoever leads the step itself hears from nobody.
        """
        rounds, others = self._rounds, self._others()
        call_s, own = rounds.settings.deadlines.call_s, rounds.version
        if own != self._version:
            self._version, self._look_at = own, time.monotonic() + call_s
        if rounds.is_over or not others or time.monotonic() < self._look_at:
            return
        asked = self._rng.choice(others)
        try:
            meant: dict[str, Value] = {"stage": rounds.chain.stage}
            reply = await self._transport.call(asked, STANDING, Message(meant), timeout_s=call_s, max_body_bytes=0)
            version = Fields("standing", reply.meta).integer("version")
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
        rounds = self._rounds
        if not rounds.is_member and rounds.may_join(self._me):
            await self._ask_to_join()
        started_at = rounds.version
        wait_s = 0.0 if self._takes_part else 2.0
        layout_bytes = rounds.replica.codec.encoded_bytes(rounds.replica.layout.num_values)
        reply = await self._transport.call(
            donor,
            RESULTS,
            Message({"from": int(started_at), "wait_s": wait_s, "bodies": True}),
            timeout_s=rounds.settings.deadlines.call_s + wait_s,
            max_body_bytes=MAX_RESULTS_PER_CALL * (layout_bytes + (1 << 20)),
        )
        fields = Fields("results", reply.meta)
        version, oldest = fields.integer("version"), fields.integer("oldest")
        results = fields.items("results", Result.from_value, max_items=MAX_RESULTS_PER_CALL)
        sizes = fields.items(
            "sizes",
            lambda value: Fields("sizes", {"of": value}).items("of", integer_item, max_items=1 << 16),
            max_items=MAX_RESULTS_PER_CALL,
        )
        fields.done()
        if version > rounds.version and not results:
            if oldest <= rounds.version:
                raise TransientError(f"{donor[-6:]} is at {version} but sent no results")
            await self._load_snapshot(donor)
            return
        view, at = memoryview(reply.body), 0
        for result, part_sizes in zip(results, sizes, strict=True):
            if at + sum(part_sizes) > len(view) or len(part_sizes) != len(result.parts):
                raise RemoteError("malformed", "results' bodies are cut short", donor)
            bodies: list[bytes | bytearray | memoryview] = []
            for size in part_sizes:
                bodies.append(bytes(view[at : at + size]))
                at += size
            await rounds.adopt(result, bodies)
        if version > rounds.version:
            self._behind.add(donor)

    async def _load_snapshot(self, donor: PeerId) -> None:
        rounds = self._rounds
        started = time.monotonic()
        replica = rounds.replica
        own = rounds.chain
        wanted = JoiningState(
            self._transport, rounds.settings, own.run_id, own.run_key, own.coordinator, own.stage, replica.layout
        )
        others = [peer for peer in self._others() if peer != donor]
        self._rng.shuffle(others)
        # Anybody can be in the directory of a public run: there, without an anchor, only certified members count.
        members = own.members if rounds.settings.trust == "public" else self._peers_of_stage() or own.members
        newer_than = -1 if self._is_wrong else int(rounds.version)
        state, chain = await wanted.fetch([donor, *others], members, newer_than=newer_than)
        if chain.version <= rounds.version and not self._is_wrong:  # meanwhile
            return
        self._is_wrong = False
        await rounds.begin_again(state, chain)
        log.info("took version %d in %.1f s", chain.version, time.monotonic() - started)
        self._behind.add(donor)

    async def _ask_to_join(self) -> None:
        rounds, call_s = self._rounds, self._rounds.settings.deadlines.call_s
        state = rounds.open_step(Step(rounds.version))
        leader = state.leader if state is not None else None
        request = Message({"ticket": self._ticket.to_value(), "promotion": value_or_none(self.promotion)})

        async def ask(peer: PeerId) -> None:
            with contextlib.suppress(TransientError, RemoteError):
                reply = await self._transport.call(peer, JOIN, request, timeout_s=call_s, max_body_bytes=0)
                version = Version(Fields("join answer", reply.meta).integer("version"))
                if peer == leader:  # who makes the roster
                    rounds.joins_at(version)

        await asyncio.gather(*(ask(peer) for peer in self._others()))
