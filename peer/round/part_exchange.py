"""The parts of a round on the move: contributions to their reducers, reduced parts to everyone.

Parts travel several to a message; all of a message are hashed, checked and decoded in one job of the exact thread. A
reduced part goes with the signature of whoever reduced it, whoever hands it on: nobody votes for a part without.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, repeat
from typing import TypeAlias

from peer.pipeline.compute import Urgency
from peer.pipeline.screens import Screens
from peer.round.joiners import Joiners
from peer.round.mail.fragments import Fragment
from peer.round.mail.mail import RoundMail
from peer.round.mail.meter import Turns
from peer.round.mail.outbox import OnItsWay, Outbox
from peer.round.mail.parcel import Parcel
from peer.round.receive_rates import ReceiveRates
from peer.round.reductions import SignedPart
from peer.round.stage_steps import StageSteps
from peer.round.step_state import StepState
from peer.round.work import ContributionEncoder, PartReducer
from peer.stage.events import MemberBack, Overtaken, VersionTurned
from peer.state.replica import Accumulation
from swarm.averaging.certified_gradient import squares_of
from swarm.averaging.encoded import VectorCodec
from swarm.averaging.encoded_mean import check_encoded
from swarm.averaging.reduce import read_and_written
from swarm.averaging.seeds import reduced_seed
from swarm.bulk_digest import bulk_digest
from swarm.checkpoint.transfer import PART_BYTES
from swarm.core.canonical import Value, pack
from swarm.core.errors import RemoteError, TransientError, UnreachableError
from swarm.core.fields import Fields, integer_item, value_or_none
from swarm.core.ids import PeerId, Step
from swarm.core.kept import once
from swarm.core.round import averaging_round as act
from swarm.core.round.averaging_round import AveragingRound, Instruction
from swarm.core.round.ballots import Proposal
from swarm.core.round.contribution import EMPTY_DIGEST, ReducedPart, Result, Roster
from swarm.core.round.proposal import left_by
from swarm.core.round.voting import MOST_VIEWS
from swarm.core.round.words import Reduction, Words
from swarm.core.transfers import MESSAGE_BYTES, bytes_per_s, longest_s
from swarm.identity.key import verify
from swarm.network.bulk.uplink import UPLINK
from swarm.network.loop import happened
from swarm.network.transport import Message, Place
from verification.kinds.equivocation import Equivocation
from verification.kinds.protocol_violation import ProtocolViolation, ViolationError
from verification.round.papers import Bytes

log = logging.getLogger(__name__)

MAX_PARCELS = 1 << 12
MOST_FETCHED = 32
"""Parts of a result that are fetched at a time."""

Taken: TypeAlias = dict[ReducedPart, Reduction]
"""What was signed for a part that came, and for the shares in it."""


@dataclass(frozen=True)
class Heard:
    """What parts that came lead to: to be carried out together, before who sent them is told what was wrong."""

    instructions: list[Instruction]
    failure: RemoteError | None = None
    """Of the parts that were no good, the first's."""


class PartExchange:
    """What the stage's rounds send, receive and compute of parts on this peer."""

    def __init__(self, steps: StageSteps, mail: RoundMail, screens: Screens) -> None:
        """`screens` are of the norms of what comes."""
        self._steps = steps
        self._context = steps.context
        self._replica = steps.replica
        self._mail = mail
        self.encoder = ContributionEncoder(steps.replica)
        self.reducer = PartReducer(steps.replica)
        self._screens = screens
        self._reductions = steps.context.reductions
        traffic = self._context.transport.traffic
        self._outbox = Outbox(
            self._context.tasks.spawn,
            self._send,
            moved=lambda: traffic()[0],
            most=lambda: UPLINK.carries_at_most,
            least=lambda: UPLINK.lately,
        )
        self.joiners = Joiners(steps, self._outbox)
        self._turns = Turns(most=MOST_FETCHED, moved=lambda: traffic()[1])
        self._counted: tuple[Roster, dict[PeerId, int]] | None = None
        self.rates = ReceiveRates()
        self.num_given = 0
        """Parts that others were given on asking."""

    @once
    def max_message_bytes(self) -> int:
        return max(MESSAGE_BYTES, *(self._encoded_bytes(part) for part in range(self._replica.num_parts)))

    def serve(self) -> None:
        """Begin to answer who asks for parts."""
        self._context.transport.serve(PART_BYTES, self._on_part_bytes, max_body_bytes=0)
        self._context.transport.in_turns(PART_BYTES, self._turn)

    def _turn(self, sender: PeerId, request: Message) -> AbstractAsyncContextManager[Place]:
        """At once for members, of a round that is under way or the last one, if they took part in it: the others wait
        for them. Who missed it has its result in its turns."""
        fields = Fields("part request", request.meta)
        step = Step(fields.integer("step"))
        lacks_bytes = fields.integer("lacks_bytes") if fields.optional("lacks_bytes") else 0
        is_last = int(step) == self._steps.version - 1
        held = self._context.results.get(step)
        took_part = (
            held is None or sender in held[0].roster.reducers or held[0].roster.contribution_of(sender) is not None
        )
        if sender in self._steps.chain.members and took_part and int(step) >= self._steps.version - 1:
            return self.joiners.member_takes()
        return self.joiners.turn(sender, lacks_bytes=lacks_bytes if is_last else None)

    # -- the own contribution -----------------------------------------------------------------------------

    async def encoded(
        self, step: Step, accumulation: Accumulation, seeds: Sequence[bytes]
    ) -> tuple[list[memoryview], list[bytes]]:
        """As `ContributionEncoder.encode`."""
        return await self._context.exact.run(Urgency.ROUND, lambda: self.encoder.encode(step, accumulation, seeds))

    def commit(self, state: StepState, parts: list[memoryview], digests: list[bytes]) -> None:
        """This is what this peer contributes."""
        state.parts.own = parts
        self._reductions.contributed(state.step, parts, digests)
        for index, part in enumerate(parts):
            state.parts.received[index, self._context.me] = part

    def take_results(self, state: StepState, result: Result, bodies: Sequence[Bytes]) -> None:
        """The bytes of a step's result, from other peers' stores: each has the digest that the result names."""
        for reduced, body in zip(result.parts, bodies, strict=True):
            state.parts.reduced[reduced.part, reduced.digest] = body

    def _have(self, state: StepState, reduced: ReducedPart, body: Bytes) -> None:
        """A part of the step's result, or a cohort's share of one, is here."""
        state.parts.reduced[reduced.part, reduced.digest] = body
        if reduced.cohort is None and self._steps.is_open(state):
            self._replica.hear_of_result(state.step, reduced.part, body)

    # -- out ----------------------------------------------------------------------------------------------

    def send_part(self, state: StepState, reducer: PeerId, part: int, view: int) -> None:
        """The own contribution's part."""
        head: dict[str, Value] = {"part": part, "view": view}
        self._outbox.put(reducer, Parcel(state, "contributed", head, state.parts.own[part], part))

    def send_reduced(self, state: StepState, to: Sequence[PeerId], reduced: ReducedPart) -> None:
        """A part or share that was aggregated here, or that is handed on."""
        assert state.round is not None
        roster = state.round.roster_of(reduced)
        assert roster is not None, f"part {reduced.part} of step {state.step} is of no roster"
        head = SignedPart.of(reduced, roster, state.parts.reductions).to_value()
        body = state.parts.reduced[reduced.part, reduced.digest]
        done_without = {*left_by(roster), *(one.peer_id for one in roster.left_out)}
        for peer in to:
            parcel = Parcel(state, "reduced", head, body, reduced.part, reduced)
            self._outbox.put(peer, parcel, is_last=peer in done_without)

    def member_back(self, event: MemberBack) -> None:
        """What could not be brought to it is sent now."""
        self._outbox.back(event.peer)

    async def _send(self, peer: PeerId, parcels: list[Parcel], way: OnItsWay) -> int | None:
        parcels = [parcel for parcel in parcels if self._is_wanted(peer, parcel)]
        if not parcels:
            return 0
        meta: dict[str, Value] = {
            "kind": "parts",
            "of": parcels[0].kind,
            "heads": [parcel.head for parcel in parcels],
            "sizes": [len(parcel.body) for parcel in parcels],
            "fragment": value_or_none(parcels[0].fragment),
        }
        state = parcels[0].state
        bodies = tuple(parcel.body for parcel in parcels)
        may_be_there = any(parcel.may_be_there for parcel in parcels)
        try:
            reply = await self._mail.bring(state, peer, meta, bodies, way, may_be_there)
        except UnreachableError:
            return None if self._mail.waits_for(peer) else 0
        if reply is None or reply.meta.get("status") in ("over", "held"):
            return 0
        if state.round is not None:
            state.round.moved(peer, now=time.monotonic())
        return sum(len(one.body) for one in parcels)

    def _is_wanted(self, peer: PeerId, parcel: Parcel) -> bool:
        """By the roster that is followed now: whether the peer reduces the contribution's part, and the contribution is
        in it; and of a reduced part, whether this peer still is its reducer, and its roster not overtaken, before the
        outcome names it."""
        machine, me = parcel.state.round, self._context.me
        roster = machine.roster if machine is not None else None
        if machine is None or roster is None:
            return True
        if parcel.reduced is not None:
            is_due = machine.result is not None or me in roster.reducers_of(parcel.part)
            return is_due and not machine.is_overtaken(parcel.reduced)
        return roster.contribution_of(me) is not None and roster.reducer_of(parcel.part, roster.cohort_of[me]) == peer

    # -- in -----------------------------------------------------------------------------------------------

    async def receive(
        self, state: StepState, machine: AveragingRound, sender: PeerId, fields: Fields, body: memoryview
    ) -> Heard:
        """Parts that came in one message, or a fragment of one. One that is no good does not keep the others out.

        Raises RemoteError if the message as a whole is no good, TransientError if it is too early or too late.
        """
        machine.facts.check_member(sender)
        state.came_bytes += len(body)
        was_here = self.holds(state, sender, fields)
        heard = await self._received(state, machine, sender, fields, body)
        # What brings nothing shows nobody that the round goes on: a leader could hold up its own for ever.
        if len(body) and heard.failure is None and not was_here:
            machine.moved(sender, now=time.monotonic())
        return heard

    async def _received(
        self, state: StepState, machine: AveragingRound, sender: PeerId, fields: Fields, body: memoryview
    ) -> Heard:
        kind = fields.text("of")
        heads = fields.items("heads", lambda head: head, max_items=MAX_PARCELS)
        bodies = _cut(body, fields.items("sizes", integer_item, max_items=MAX_PARCELS), sender)
        fragment = fields.maybe("fragment", Fragment.from_value)
        if len(heads) != len(bodies) or (fragment is not None and len(heads) != 1):
            of_what = "a fragment of " if fragment is not None else ""
            raise RemoteError("malformed", f"{of_what}{len(heads)} heads of {len(bodies)} parts", sender)
        if fragment is None:
            heard = await self._receive_whole(state, machine, sender, kind, heads, bodies)
            self._measure(sender, kind, body)
            return heard
        self._measure(sender, kind, body)
        part = bulk_digest(pack([kind, heads[0]]))
        whole = state.parts.fragments.put(sender, part, fragment, bodies[0], max_bytes=self.max_message_bytes)
        if whole is None:
            return Heard([])
        try:
            heard = await self._receive_whole(state, machine, sender, kind, heads, [whole])
        except RemoteError:
            state.parts.fragments.drop(sender, part, fragment)
            raise
        state.parts.fragments.drop(sender, part, fragment)
        return heard

    def _measure(self, sender: PeerId, kind: str, body: memoryview) -> None:
        """By contributions alone: when a reduced part can be sent is not its sender's choice."""
        if kind == "contributed":
            self.rates.arrived(sender, len(body), now=time.monotonic())

    def holds(self, state: StepState, sender: PeerId, fields: Fields) -> bool:
        """Whether all parts of a message are here, of which the sender does not know whether it came: reduced ones with
        all that their reducer says of them, which may change while the bytes stay the same."""
        kind, heads = fields.text("of"), fields.items("heads", lambda head: head, max_items=MAX_PARCELS)
        fragment = fields.maybe("fragment", Fragment.from_value)
        named = bulk_digest(pack([kind, heads[0]])) if fragment is not None and len(heads) == 1 else None
        if named is not None and fragment is not None and state.parts.fragments.holds(sender, named, fragment):
            return True
        read = [Fields("head of a part", head) for head in heads]
        if kind == "contributed":
            return all(self._holds_part(state, head.integer("part", high=1 << 20), sender) for head in read)
        made = [SignedPart.from_fields(head).reduced for head in read]
        return all((one.part, one.digest) in state.parts.reduced and one in state.parts.reductions for one in made)

    def _holds_part(self, state: StepState, part: int, sender: PeerId) -> bool:
        try:
            expected = state.round.expected_digest(part, sender) if state.round is not None else None
        except RemoteError:  # it is not wanted any more
            expected = None
        held = state.parts.received.get((part, sender))
        return held is not None and (expected is None or state.parts.received_as(part, sender, expected) is not None)

    async def _receive_whole(
        self,
        state: StepState,
        machine: AveragingRound,
        sender: PeerId,
        kind: str,
        said: Sequence[Value],
        bodies: list[memoryview],
    ) -> Heard:
        heads = [Fields("head of a part", head) for head in said]
        if kind == "contributed":
            parts = [(head.integer("part", high=1 << 20), head.integer("view", high=MOST_VIEWS)) for head in heads]
            return await self._receive_contributed(state, machine, sender, parts, bodies)
        if kind == "reduced":
            made = list(map(SignedPart.from_fields, heads))
            return await self._receive_reduced(state, machine, sender, made, bodies)
        raise RemoteError("protocol", f"parts of kind {kind[:20]!r}", sender)

    async def _receive_contributed(
        self,
        state: StepState,
        machine: AveragingRound,
        sender: PeerId,
        parts: list[tuple[int, int]],
        bodies: list[memoryview],
    ) -> Heard:
        view = max((view for _, view in parts), default=0)
        await self._roster_known(state, machine, lambda: machine.roster is not None and machine.roster.view >= view)
        if machine.result is None and (machine.roster is None or machine.roster.view < view):
            raise TransientError(f"no roster of step {state.step} here yet")
        expected = [machine.expected_digest(part, sender) for part, _ in parts]
        given = list(zip([part for part, _ in parts], bodies, expected, strict=True))

        def look() -> tuple[list[RemoteError | None], list[Bytes]]:
            wrong = self._replica.threads.map(lambda one: self._what_is_wrong(*one), given)
            kept: list[Bytes] = list(bodies)
            for place, ((part, body, digest), error) in enumerate(zip(given, wrong, strict=True)):
                if error is None:
                    parts = self._replica.parts()
                    codec, size = parts.contribution_codec(part), parts.size(part)
                    self._screens.check_part(sender, part, codec, body, num_values=size)
                    # Sent again and again it takes room once.
                    held = state.parts.received_as(part, sender, digest)
                    kept[place] = self._replica.inputs.put(body) if held is None else held
            return wrong, kept

        wrong, kept = await self._context.exact.run(Urgency.ROUND, look)

        def came(part: int, digest: bytes, body: Bytes, error: RemoteError | None) -> Heard:
            if machine.expected_digest(part, sender) != digest:
                raise RemoteError("digest", f"part {part} is of a contribution that is overtaken", sender)
            if error is None:
                state.parts.received[part, sender], state.parts.committed[part, sender] = body, digest
                return Heard(machine.on_part(sender, part))
            log.warning("stage %d part %d of %s: %s", self._steps.chain.stage, part, sender[-6:], error)
            contribution = machine.roster.contribution_of(sender) if machine.roster is not None else None
            if error.kind == "digest":  # as if nothing had come: who leaves out what was committed to must prove it
                return Heard([], RemoteError(error.kind, f"part {part}: {error}", sender))
            if contribution is not None:
                self._context.events.publish(ProtocolViolation(message=contribution, part=part, body=body))
            out = machine.on_bad_part(sender, part)
            return Heard(out, RemoteError(error.kind, f"part {part}: {error}", sender))

        numbers = [part for part, _ in parts]
        return _together(map(partial, repeat(came), numbers, expected, kept, wrong))

    def _what_is_wrong(self, part: int, body: memoryview, expected: bytes) -> RemoteError | None:
        """(exact, its threads) With a contribution's part."""
        if bulk_digest(body) != expected:
            return RemoteError("digest", "its bytes differ from its commitment")
        try:
            parts = self._replica.parts()
            check_encoded(parts.contribution_codec(part), body, num_values=parts.size(part))
        except RemoteError as error:
            return error
        return None

    async def _receive_reduced(
        self,
        state: StepState,
        machine: AveragingRound,
        sender: PeerId,
        said: list[SignedPart],
        bodies: list[memoryview],
    ) -> Heard:
        machine.facts.check_member(sender)
        made = [one.reduced for one in said]
        await self._roster_known(
            state, machine, lambda: all(machine.roster_of(one) or machine.is_overtaken(one) for one in made)
        )
        if machine.result is None and machine.roster is None:
            raise TransientError(f"no roster of step {state.step} here yet")
        rosters = [machine.roster_of(one.reduced) for one in said]
        taken, kept = await self._take_signed(state, said, rosters, bodies)

        def came(reduced: ReducedPart, body: Bytes, found: Taken | RemoteError) -> Heard:
            if isinstance(found, RemoteError):
                self._accuse_if_proved(found)
                raise RemoteError(found.kind, f"reduced part {reduced.part} from {sender}: {found}", sender)
            out = machine.on_reduced(sender, reduced, now=time.monotonic())
            self._have(state, reduced, body)
            self._keep_words(state, found)
            return Heard(out)

        return _together(map(partial, repeat(came), made, kept, taken))

    async def _take_signed(
        self,
        state: StepState,
        said: Sequence[SignedPart],
        rosters: Sequence[Roster | None],
        bodies: Sequence[Bytes],
    ) -> tuple[list[Taken | RemoteError], list[Bytes]]:
        """What was signed for each part, or what is wrong with it; and its bytes, kept where they can stay."""
        self._check_open(state)
        weights = [self._weights(roster) if roster is not None else {} for roster in rosters]
        cap = self._replica.norm_cap()

        def take_one(place: int) -> Taken | RemoteError:
            one, body = said[place], bodies[place]
            try:
                made = one.checked(rosters[place], weights[place], body, norm_cap=cap)
                squares = self._read(one.reduced, body)
                return self._violation(made[one.reduced], squares, body) or made
            except RemoteError as error:
                return error

        def take() -> tuple[list[Taken | RemoteError], list[Bytes]]:
            taken = self._replica.threads.map(take_one, range(len(said)))
            return taken, [self._kept(state, *one) for one in zip(said, bodies, taken, strict=True)]

        return await self._context.exact.run(Urgency.ROUND, take)

    def _kept(self, state: StepState, said: SignedPart, body: Bytes, found: Taken | RemoteError) -> Bytes:
        """(exact) A part of the result, or a share, where it can stay until the step is over."""
        if isinstance(found, RemoteError):
            return body
        held = state.parts.reduced.get((said.reduced.part, said.reduced.digest))
        return self._replica.outputs.put(memoryview(body)) if held is None else held

    def _read(self, reduced: ReducedPart, body: Bytes) -> float | RemoteError:
        """(exact, its threads) The sum of squares of a part; 0 of a cohort's share; or what is wrong with it."""
        parts, part = self._replica.parts(), reduced.part
        try:
            if reduced.cohort is None:
                return squares_of(parts.result_codec(part), body, parts.size(part))
            if not reduced.is_empty:
                check_encoded(self._share_codec(part), body, num_values=parts.size(part))
        except RemoteError as error:
            return error
        return 0.0

    def _share_codec(self, part: int) -> VectorCodec:
        return read_and_written("cohort", self._replica.parts().codec_name(part))[1]

    def _violation(self, made: Reduction, squares: float | RemoteError, body: Bytes) -> ViolationError | None:
        """(exact, its threads) What is wrong with a part that its reducer signed, seen from its bytes alone."""
        if squares == made.squares:
            return None
        reason = f"squares sum to {squares}, not {made.squares}" if isinstance(squares, float) else str(squares)
        error = RemoteError("malformed", f"part {made.part}: {reason}", made.reducer)
        return ViolationError(ProtocolViolation(message=made, part=0, body=body), error)

    def _accuse_if_proved(self, error: RemoteError) -> None:
        if isinstance(error, ViolationError):
            self._context.events.publish(error.case)

    def _keep_words(self, state: StepState, found: Taken) -> None:
        """What reducers signed: for the auditors, and in case one of them has signed something else."""
        self._compare_words(state, found)
        for reduced, made in found.items():
            state.parts.reductions.setdefault(reduced, made)

    def _accuse_who_leaves_out(self, state: StepState, made: Reduction) -> None:
        """Accuse a reducer that takes a part of this peer for nonsense which is none."""
        if made.level == "shares" or not state.parts.own:
            return
        for place, one in enumerate(made.malformed, 1):
            own = state.parts.own[made.part] if one.peer_id == self._context.me else None
            if own is not None and self._what_is_wrong(made.part, own, one.digest) is None:
                self._context.events.publish(ProtocolViolation(message=made, part=place, body=own))

    def _compare_words(self, state: StepState, found: Taken) -> None:
        for reduced, made in found.items():
            self._accuse_who_leaves_out(state, made)
            for known, held in state.parts.reductions.items():
                is_other = (held.digest, held.squares) != (made.digest, made.squares)
                if known.part == reduced.part and held.reducer == made.reducer and is_other:
                    self._context.events.publish(Equivocation(one=held, other=made))

    # -- words of a result that is voted on ---------------------------------------------------------------

    def words(self, state: StepState, proposal: Proposal) -> Words | None:
        """What this peer, who proposes it, shows for a new result; None of what needs no words."""
        result = proposal.result
        if result is None or not proposal.is_new_result:
            return None
        weights, cap = self._weights(result.roster), self._replica.norm_cap()
        votes = state.round.votes_for(proposal) if state.round is not None else ()
        return Words.of(result, state.parts.reductions, weights, norm_cap=cap, votes=votes)

    async def compare(self, state: StepState, proposal: Proposal, words: Words | None) -> None:
        """Hold words that a proposal came with, and that are not known here, against the bytes and other words.

        Raises RemoteError if the result says of a part what is signed neither here nor there.
        """
        result, known = proposal.result, state.parts.reductions
        if result is None or not proposal.is_new_result or not self._steps.is_open(state):
            return
        if all(reduced.is_empty or reduced in known for reduced in result.parts):
            return
        if words is None:
            raise RemoteError("signature", "a result without its reducers' words", result.leader)
        said, weights, cap = words, self._weights(result.roster), self._replica.norm_cap()

        def checked() -> Taken:
            found = dict(said.of_result(result, weights, norm_cap=cap, known=known))
            for made in found.values():
                made.check(verify)
            return found

        found = await asyncio.to_thread(checked)
        self._compare_words(state, found)
        state.parts.claimed = found
        for reduced, made in found.items():
            body = state.parts.reduced.get((reduced.part, reduced.digest))
            if body is not None:
                await self._hold_against(reduced, made, body)

    async def _hold_against(self, reduced: ReducedPart, made: Reduction, body: Bytes) -> None:
        """Accuse a reducer that signed for other squares than the part's bytes have."""
        wrong = await self._context.exact.run(
            Urgency.ROUND, lambda: self._violation(made, self._read(reduced, body), body)
        )
        if wrong is not None:
            self._accuse_if_proved(wrong)

    async def _certified(self, state: StepState, wanted: bytes, body: Bytes) -> memoryview | None:
        """The bytes, kept where they can stay, if they are those of the outcome's part, whoever reduced it."""
        self._check_open(state)

        def take() -> memoryview | None:
            return self._replica.outputs.put(memoryview(body)) if bulk_digest(body) == wanted else None

        return await self._context.exact.run(Urgency.ROUND, take)

    def _check_open(self, state: StepState) -> None:
        if not self._steps.is_open(state) or int(self._steps.version) != int(state.step):
            raise TransientError(f"step {state.step} is over")

    async def _roster_known(self, state: StepState, machine: AveragingRound, is_known: Callable[[], bool]) -> None:
        """Wait for a roster for some time: what was sent under it may be ahead of it."""
        give_up_at = time.monotonic() + self._context.settings.deadlines.call_s / 2
        while machine.result is None and not is_known() and (left_s := give_up_at - time.monotonic()) > 0:
            await happened(state.changed, within_s=left_s)

    # -- computed -----------------------------------------------------------------------------------------

    async def aggregate(
        self, state: StepState, roster: Roster, asked: list[act.AggregatePart | act.CombineShares]
    ) -> list[Instruction]:
        """Aggregate and encode these parts, of which this peer is the roster's reducer; what the round says to it."""
        context, chain, machine = self._context, self._steps.chain, state.round
        assert machine is not None
        self._check_open(state)  # of a step that is over, it would be signed by the wrong seed
        counted = self._weights(roster)
        wanted = [_wanted(one) for one in asked]
        bodies = [self._inputs(state, roster, one) for one in wanted]
        cap = self._replica.norm_cap()

        def reduce_one(place: int) -> tuple[ReducedPart, Reduction, Bytes]:
            reduced, encoded = wanted[place], memoryview(b"")
            if reduced.contributors:
                part, level = reduced.part, reduced.level
                seed = reduced_seed(context.run_id, chain.stage, chain.version, part)
                encoded, found = self.reducer.reduce(part, bodies[place], norm_cap=cap, seed=seed, level=level)
                reduced = replace(reduced, digest=found)
                squares = self._read(reduced, encoded)
                reduced = replace(reduced, squares=squares if isinstance(squares, float) else 0.0)
            reduction = Reduction.of(roster, reduced, counted, norm_cap=cap, reducer=context.me)
            return reduced, reduction.signed_by(context.identity), self._replica.outputs.put(encoded)

        out: list[Instruction] = []
        places = range(len(wanted))
        made = await context.exact.owed(
            lambda: self._replica.threads.map(reduce_one, places),
            within_s=context.settings.deadlines.step_s,
            still=lambda: self._steps.is_open(state),
        )
        self._check_open(state)
        for reduced, reduction, encoded in made:
            self._have(state, reduced, encoded)
            state.parts.reductions[reduced] = reduction
            out += machine.aggregated(reduced, now=time.monotonic())
        return out

    def _inputs(self, state: StepState, roster: Roster, one: ReducedPart) -> list[tuple[int, Bytes]]:
        """Weight and bytes of what goes into a part or a share."""
        counted = self._weights(roster)
        if one.shares:
            heard = [(sum(counted[peer] for peer in share.contributors), share) for share in one.shares_of(roster)]
            return [(tokens, state.parts.reduced[one.part, share.digest]) for tokens, share in heard if tokens > 0]
        return [(counted[peer], state.parts.received[one.part, peer]) for peer in one.contributors if counted[peer] > 0]

    def _weights(self, roster: Roster) -> Mapping[PeerId, int]:
        """Of the contributions to the present step."""
        if self._counted is None or self._counted[0] is not roster:
            self._counted = (roster, self._steps.chain.weights_of(roster, self._steps.context.settings))
        return self._counted[1]

    def turned(self, event: VersionTurned) -> None:
        """The round is over."""
        self.joiners.turned(event)
        version = int(event.chain.version)
        self._outbox.keep(event.chain.members, lambda state: self._steps.is_open(state) and int(state.step) >= version)
        if event.is_next:
            self.rates.end_round()

    # -- fetched ------------------------------------------------------------------------------------------

    async def fetch(self, state: StepState, asked: act.FetchPart) -> list[Instruction]:
        """Get a part of the result from whoever holds it; what the round says to it."""
        part, wanted = asked.part, asked.digest
        if (part, wanted) in state.parts.fetching or self._is_fetched_no_more(state, asked):
            return []
        state.parts.fetching.add((part, wanted))
        try:
            return await self._fetch_of(state, asked)
        finally:
            state.parts.fetching.discard((part, wanted))

    async def _fetch_of(self, state: StepState, asked: act.FetchPart) -> list[Instruction]:
        part, wanted, parts = asked.part, asked.digest, state.parts
        meta: dict[str, Value] = {"step": state.step, "part": part, "digest": wanted}
        deadlines = self._context.settings.deadlines
        answer_s = longest_s(self._encoded_bytes(part), bytes_per_s(deadlines.least_mbit), floor_s=deadlines.call_s)
        left = [*asked.holders]
        while left:
            async with self._turns.turn() as came:
                # Meanwhile it may have come from its reducer.
                if self._is_fetched_no_more(state, asked):
                    return []
                # One that hangs takes its time once, and not with each of a thousand parts.
                holder = min(left, key=lambda peer: peer in parts.silent)
                left.remove(holder)
                try:
                    reply = await self._context.transport.call(
                        holder, PART_BYTES, Message(meta), timeout_s=answer_s, max_body_bytes=self._encoded_bytes(part)
                    )
                except (TransientError, RemoteError) as error:
                    log.info("step %d part %d from %s: %s", state.step, part, holder[-6:], error)
                    if isinstance(error, UnreachableError):
                        parts.silent.add(holder)
                    continue
                came(len(reply.body))
            kept = await self._fetched(state, asked, holder, reply)
            if kept is not None:
                self._have(state, asked.reduced, kept)
                assert state.round is not None
                return state.round.part_fetched(asked.reduced, now=time.monotonic())
        if self._is_fetched_no_more(state, asked):
            return []
        log.warning("step %d: nobody has part %d of the result", state.step, part)
        for holder in asked.holders[:1]:
            self._context.events.publish(Overtaken(holder))
        return []

    def _is_fetched_no_more(self, state: StepState, asked: act.FetchPart) -> bool:
        """Once the outcome is certified its bytes are enough; before, their reducer's word on it, too."""
        parts = state.parts
        if parts.are_caught_up_on or not self._steps.is_open(state):
            return True
        is_certified = state.round is not None and state.round.result is not None
        return (asked.part, asked.digest) in parts.reduced and (is_certified or asked.reduced in parts.reductions)

    async def _fetched(self, state: StepState, asked: act.FetchPart, holder: PeerId, reply: Message) -> Bytes | None:
        """The part that came, if it counts. Before the outcome is certified it must come with its reducer's word."""
        try:
            said = SignedPart.from_answer(asked.reduced, reply.meta)
        except RemoteError as error:
            log.info("step %d part %d from %s: %s", state.step, asked.part, holder[-6:], error)
            return None
        if said is not None:
            (found,), (kept,) = await self._take_signed(state, [said], [asked.roster], [reply.body])
            if not isinstance(found, RemoteError):
                self._keep_words(state, found)
                return kept
            self._accuse_if_proved(found)
            log.warning("step %d part %d from %s: %s", state.step, asked.part, holder[-6:], found)
        is_certified = state.round is not None and state.round.result is not None
        certified = await self._certified(state, asked.digest, reply.body) if is_certified else None
        claimed = state.parts.claimed.get(asked.reduced)
        if certified is not None and claimed is not None:
            await self._hold_against(asked.reduced, claimed, certified)
        return certified

    async def _on_part_bytes(self, sender: PeerId, request: Message) -> Message:
        fields = Fields("part request", request.meta)
        step, part = fields.integer("step"), fields.integer("part", high=1 << 20)
        wanted = fields.octets("digest", length=32)
        state = self._steps.open_step(Step(step))
        if state is not None and (part, wanted) in state.parts.reduced:
            self.num_given += 1
            known = [made for made in state.parts.reductions if (made.slot, made.digest) == ((part, None), wanted)]
            said = next(filter(None, (self._said(state, made) for made in reversed(known))), None)
            return Message(said.answer() if said is not None else {}, state.parts.reduced[part, wanted])
        held = self._context.results.get(step)
        if held is not None and part < len(held[1]) and held[0].parts[part].digest == wanted:
            self.num_given += 1
            said = self._reductions.said(Step(step), held[0].parts[part], held[0].roster)
            return Message(said.answer() if said is not None else {}, held[1][part])
        raise TransientError(f"part {part} of step {step} is not here")

    def _said(self, state: StepState, reduced: ReducedPart) -> SignedPart | None:
        roster = state.round.roster_of(reduced) if state.round is not None else None
        return SignedPart.of(reduced, roster, state.parts.reductions) if roster is not None else None

    def _encoded_bytes(self, part: int) -> int:
        """Of the longest a part can be: no contribution is longer than the longest result."""
        return self._replica.parts().result_bytes(part)


def _together(stimuli: Iterable[Callable[[], Heard]]) -> Heard:
    """What all of them lead to."""
    out: list[Instruction] = []
    failure: RemoteError | None = None
    for stimulus in stimuli:
        try:
            heard = stimulus()
        except RemoteError as error:
            heard = Heard([], error)
        out += heard.instructions
        failure = failure or heard.failure
    return Heard(out, failure)


def _wanted(asked: act.AggregatePart | act.CombineShares) -> ReducedPart:
    """What is to be made, without its digest."""
    named = (asked.part, EMPTY_DIGEST, asked.contributors, asked.excluded)
    if isinstance(asked, act.CombineShares):
        return ReducedPart(*named, shares=asked.shares)
    return ReducedPart(*named, cohort=asked.cohort)


def _cut(body: memoryview, sizes: Sequence[int], sender: PeerId) -> list[memoryview]:
    """The bodies of several parts. Raises RemoteError if they do not make up the whole."""
    if sum(sizes) != len(body):
        raise RemoteError("malformed", f"parts of {sum(sizes)} bytes in a message of {len(body)}", sender)
    return [body[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
