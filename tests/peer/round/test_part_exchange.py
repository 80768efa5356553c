"""Messages of several parts, taken apart: whatever is wrong with one, the others are heard."""

import asyncio
import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kernels.threads import Threads
from peer.pipeline.compute import WorkThread
from peer.round.mail.fragments import MOST_BEGUN, Fragment, Fragments
from peer.round.mail.mail import RESEND_S, RoundMail
from peer.round.mail.outbox import OnItsWay
from peer.round.mail.parcel import Parcel
from peer.round.part_exchange import PartExchange
from peer.round.reductions import ReductionStore, SignedPart
from peer.round.step_state import StepParts
from peer.stage.events import Events
from swarm.averaging.certified_gradient import squares_of
from swarm.averaging.codecs import vector_codec
from swarm.averaging.parts import Parts
from swarm.bulk_digest import bulk_digest
from swarm.core.canonical import Value
from swarm.core.errors import RemoteError, TransientError, UnreachableError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId, Step
from swarm.core.round import averaging_round as act
from swarm.core.round.ballots import Proposal
from swarm.core.round.contribution import Exclusion, ReducedPart, Result, Roster
from swarm.core.round.voting import Proof
from swarm.core.round.words import Reduction, Word, Words
from swarm.disk.cold_bytes import ColdBytes
from swarm.identity.key import verify
from swarm.network.transport import Message
from tests.swarm.core.round.round_members import roster_of
from tests.swarm.core.round.round_world import contribution, facts_of, identity_of
from verification.kinds.equivocation import Equivocation
from verification.kinds.protocol_violation import ProtocolViolation

FACTS = facts_of(3, num_parts=4)
ROSTER = roster_of(FACTS, commits={peer: contribution(peer, num_parts=4) for peer in FACTS.members})
SENDER, OTHER, _ = FACTS.members
CAP = 2.5
WEIGHTS = {peer: 10 * number for number, peer in enumerate(FACTS.members, 1)}
OVERTAKEN = FACTS.members[:2]
"""Who contributed under a roster that was left for another."""
SIZE = 300
CODEC = vector_codec("int8")
PARTS = Parts(4 * SIZE, SIZE)
GOOD = [CODEC.encode(np.full(SIZE, part + 1, dtype=np.float32), seed=bytes(32)) for part in range(4)]


class Machine:
    """Takes what it is told, and refuses the part of the number 3."""

    def __init__(self, digests: list[bytes]) -> None:
        self.roster = ROSTER
        self.result = None
        self.facts = SimpleNamespace(check_member=lambda peer: None)
        self.heard: list[tuple[str, int]] = []
        self.num_moved = 0
        self._digests = digests

    def expected_digest(self, part: int, sender: PeerId) -> bytes:
        if part >= len(self._digests):
            raise RemoteError("protocol", f"part {part} is not on the roster", sender)
        return self._digests[part]

    def roster_of(self, reduced: ReducedPart) -> Any:
        return ROSTER if reduced.part < 4 and reduced.contributors == FACTS.members else None

    def is_overtaken(self, reduced: ReducedPart) -> bool:
        return reduced.contributors == OVERTAKEN

    def _take(self, what: str, part: int) -> list[Any]:
        self.heard.append((what, part))
        if part == 3:
            raise RemoteError("protocol", "part 3 is not wanted", SENDER)
        return [f"{what} {part}"]

    def moved(self, peer: PeerId, *, now: float) -> None:
        assert peer == SENDER
        self.num_moved += 1

    def on_part(self, sender: PeerId, part: int) -> list[Any]:
        return self._take("part", part)

    def on_bad_part(self, sender: PeerId, part: int) -> list[Any]:
        return self._take("bad", part)

    def on_reduced(self, sender: PeerId, reduced: ReducedPart, *, now: float) -> list[Any]:
        return self._take("reduced", reduced.part)


class Scene:
    def __init__(self, folder: Path, *, call_s: float = 0.002) -> None:
        self.folder = folder
        self.out: list[Any] = []
        self.violations: list[Any] = []
        self.equivocations: list[Any] = []
        self.state: Any = SimpleNamespace(
            came_bytes=0, step=FACTS.step, parts=StepParts(own=list(map(memoryview, GOOD))), changed=asyncio.Event()
        )
        self.heard: list[tuple[int, int, bytes]] = []
        """What a window that goes on meanwhile was told of the result."""
        self.exact = WorkThread("exact")
        replica = SimpleNamespace(
            parts=lambda: PARTS,
            num_parts=len(PARTS),
            norm_cap=lambda: CAP,
            threads=Threads(2),
            inputs=ColdBytes(folder, "inputs"),
            outputs=ColdBytes(folder, "outputs"),
            hear_of_result=lambda step, part, body: self.heard.append((step, part, bytes(body))),
        )
        events = Events()
        events.hear(ProtocolViolation, self.violations.append)
        events.hear(Equivocation, self.equivocations.append)
        events.seal()
        context = SimpleNamespace(
            exact=self.exact,
            settings=SimpleNamespace(deadlines=SimpleNamespace(call_s=call_s)),
            reductions=ReductionStore(2),
            me=OTHER,
            events=events,
            tasks=SimpleNamespace(spawn=lambda work: work.close()),
            transport=SimpleNamespace(traffic=lambda: (0, 0)),
        )
        steps: Any = SimpleNamespace(
            context=context,
            replica=replica,
            chain=SimpleNamespace(
                stage=0, version=FACTS.step, members=FACTS.members, weights_of=lambda result, settings: WEIGHTS
            ),
            version=FACTS.step,
            is_open=lambda state: state is self.state,
        )
        self.state.round = self.machine = Machine([bulk_digest(body) for body in GOOD])
        screens: Any = SimpleNamespace(check_part=lambda *args, **named: None)
        self.sent: list[Any] = []
        mail: Any = SimpleNamespace(bring=self._send)
        self.exchange = PartExchange(steps, mail, screens)

    async def _send(
        self, state: Any, peer: PeerId, meta: dict[str, Value], bodies: tuple[Any, ...], *told: Any
    ) -> None:
        self.sent.append(meta["heads"])

    def receive(self, **meta: Any) -> None:
        """Take a message, and carry out what it leads to. Raises what was wrong."""
        body = b"".join(meta.pop("bodies"))
        machine: Any = self.machine
        heard = asyncio.run(
            self.exchange.receive(self.state, machine, SENDER, Fields("message", meta), memoryview(bytearray(body)))
        )
        self.out += heard.instructions
        if heard.failure is not None:
            raise heard.failure


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path / "reductions")
    yield made
    made.exact.close(timeout_s=5)


def contributed(parts: list[int], bodies: list[Any]) -> dict[str, Any]:
    heads = [{"part": part, "view": 0} for part in parts]
    return {
        "of": "contributed",
        "heads": heads,
        "sizes": [len(body) for body in bodies],
        "fragment": None,
        "bodies": bodies,
    }


def reduced(
    parts: list[int],
    bodies: list[Any],
    digests: list[bytes] | None = None,
    *,
    reducer: PeerId = SENDER,
    cap: float = CAP,
    signature: bytes | None = None,
    squares: float | None = None,
) -> dict[str, Any]:
    digests = digests or [bulk_digest(body) for body in bodies]
    heads = []
    for part, found, body in zip(parts, digests, bodies, strict=True):
        said = (squares_of(CODEC, body, SIZE) if body in GOOD else 0.0) if squares is None else squares
        made = ReducedPart(part, found, FACTS.members, squares=said)
        reduction = Reduction.of(ROSTER, replace(made, part=min(part, 3)), WEIGHTS, norm_cap=cap, reducer=reducer)
        signed = signature or reduction.signed_by(identity_of(reducer)).signature
        heads.append(SignedPart(made, reducer, signed, ()).to_value())
    return {
        "of": "reduced",
        "heads": heads,
        "sizes": [len(body) for body in bodies],
        "fragment": None,
        "bodies": bodies,
    }


def test_parts_of_a_message_are_heard_in_order_and_carried_out_together(scene: Scene) -> None:
    scene.receive(**contributed([2, 0], [GOOD[2], GOOD[0]]))
    assert scene.out == ["part 2", "part 0"]
    assert {key: bytes(body) for key, body in scene.state.parts.received.items()} == {
        (2, SENDER): bytes(GOOD[2]),
        (0, SENDER): bytes(GOOD[0]),
    }
    scene.receive(**reduced([1, 2], GOOD[1:3]))
    assert scene.out[2:] == ["reduced 1", "reduced 2"]
    assert sorted(part for part, _ in scene.state.parts.reduced) == [1, 2]


@pytest.mark.parametrize(
    ("bad", "kind"),
    [(GOOD[1], "digest"), (b"", "digest"), (bytes(len(GOOD[0])), "digest")],
)
def test_bad_part_is_refused_and_the_others_of_its_message_count(scene: Scene, bad: Any, kind: str) -> None:
    with pytest.raises(RemoteError) as info:
        scene.receive(**contributed([1, 0, 2], [GOOD[1], bad, GOOD[2]]))
    assert info.value.kind == kind
    assert sorted(scene.out) == ["part 1", "part 2"], "what was not committed to has not come"
    assert sorted(part for part, _ in scene.state.parts.received) == [1, 2]


def test_what_came_of_an_earlier_contribution_is_none_of_a_later_one(scene: Scene) -> None:
    """A leader may have another contribution of its own certified in a later view: a reducer aggregated the first,
    signed for the second, and was banned for it."""
    scene.receive(**contributed([0], [GOOD[0]]))
    scene.state.round = scene.machine
    heads = contributed([0], [GOOD[1]])["heads"]
    said = Fields("held", {"of": "contributed", "heads": heads, "fragment": None})
    assert scene.exchange.holds(scene.state, SENDER, said)
    scene.machine._digests[0] = bulk_digest(GOOD[1])
    said = Fields("held", {"of": "contributed", "heads": heads, "fragment": None})
    assert not scene.exchange.holds(scene.state, SENDER, said)
    scene.receive(**contributed([0], [GOOD[1]]))
    assert bytes(scene.state.parts.received[0, SENDER]) == bytes(GOOD[1])


def test_committed_nonsense_is_refused_by_its_form(scene: Scene) -> None:
    nonsense = bytes([0x80]) * len(GOOD[0])
    scene.machine._digests[0] = bulk_digest(nonsense)
    with pytest.raises(RemoteError, match="part 0") as info:
        scene.receive(**contributed([0, 1], [nonsense, GOOD[1]]))
    assert info.value.kind == "malformed"
    assert sorted(scene.out) == ["bad 0", "part 1"]
    assert [(case.accused, case.part, bytes(case.body)) for case in scene.violations] == [(SENDER, 0, nonsense)]


def test_what_the_round_refuses_costs_nothing_but_itself(scene: Scene) -> None:
    for message in (contributed([3, 0], [GOOD[3], GOOD[0]]), reduced([3, 0], [GOOD[3], GOOD[0]])):
        with pytest.raises(RemoteError, match="not wanted"):
            scene.receive(**message)
    assert scene.out == ["part 0", "reduced 0"]


def test_reduced_part_that_is_not_its_digest_is_not_kept(scene: Scene) -> None:
    digests = [bulk_digest(GOOD[0]), hashlib.sha256(b"other").digest()]
    with pytest.raises(RemoteError, match="differs from its digest"):
        scene.receive(**reduced([0, 1], GOOD[:2], digests))
    assert [part for part, _ in scene.state.parts.reduced] == [0]


@pytest.mark.parametrize(
    "change",
    [
        {"sizes": [1]},
        {"sizes": [len(GOOD[0]), 1]},
        {"sizes": [-1, len(GOOD[0]) + 1]},
        {"heads": []},
        {"heads": [{"part": 0}]},
        {"heads": [7]},
        {"heads": [{"part": 99, "view": 0}]},
        {"of": "other"},
        {"fragment": 7},
        {"fragment": {"number": 0}},
        {"fragment": {"number": 0, "count": 1}},
        {"fragment": {"number": 2, "count": 2}},
        {"fragment": {"number": -1, "count": 2}},
        {"fragment": {"number": 0, "count": 1 << 20}},
    ],
)
def test_message_that_contradicts_itself_is_refused_whole(scene: Scene, change: dict[str, Any]) -> None:
    with pytest.raises(RemoteError):
        scene.receive(**{**contributed([0], [GOOD[0]]), **change})
    assert scene.out == []
    assert scene.state.parts.received == {}


def test_reduced_part_of_an_overtaken_roster_is_refused_at_once_and_not_sent(tmp_path: Path) -> None:
    """A contribution was left out in the middle of a round. What was reduced with it fills the line for nothing."""
    scene = Scene(tmp_path / "reductions", call_s=600.0)  # a roster that may still come is waited for
    message = reduced([0], GOOD[:1])
    (head,) = message["heads"]
    old = replace(SignedPart.from_fields(Fields("head", head)).reduced, contributors=OVERTAKEN)
    with pytest.raises(RemoteError, match="no roster"):
        scene.receive(**message | {"heads": [SignedPart(old, SENDER, bytes(64), ()).to_value()]})
    scene.exact.close(timeout_s=5)

    scene.state.round, good = scene.machine, replace(old, contributors=FACTS.members)
    made = [Parcel(scene.state, "reduced", {"of": of.contributors[-1]}, GOOD[0], 0, of) for of in (old, good)]
    scene.machine.roster = SimpleNamespace(reducers_of=lambda part: (OTHER,))
    asyncio.run(scene.exchange._send(SENDER, made, OnItsWay(lambda: None, lambda: None)))
    assert scene.sent == [[{"of": FACTS.members[-1]}]]


def test_reduced_part_past_the_last_is_refused(scene: Scene) -> None:
    with pytest.raises(RemoteError, match="no roster"):
        scene.receive(**reduced([4000], [b"whatever"]))
    assert scene.machine.heard == []


@pytest.mark.parametrize("signed_otherwise", [{"cap": CAP / 2}, {"signature": bytes(64)}, {"reducer": "stranger"}])
def test_reduced_part_that_its_reducer_did_not_sign_as_it_is_is_refused(
    scene: Scene, signed_otherwise: dict[str, Any]
) -> None:
    if "reducer" in signed_otherwise:
        good = reduced([0, 1], GOOD[:2])
        message = {**good, "heads": [{**head, "reducer": identity_of(OTHER).peer_id[::-1]} for head in good["heads"]]}
    else:
        message = reduced([0, 1], GOOD[:2], **signed_otherwise)
    with pytest.raises(RemoteError) as info:
        scene.receive(**message)
    assert info.value.kind in ("signature", "standing")
    assert scene.machine.heard == []
    assert scene.state.parts.reduced == scene.state.parts.reductions == {}


def test_reduced_part_whose_bytes_are_nonsense_or_of_another_length_than_was_signed_is_refused(scene: Scene) -> None:
    nonsense = bytes([0x80]) * len(GOOD[1])
    for message in (reduced([0, 1], [GOOD[0], nonsense]), reduced([2], GOOD[2:3], squares=1.0)):
        with pytest.raises(RemoteError) as info:
            scene.receive(**message)
        assert (info.value.kind, info.value.peer_id) == ("malformed", SENDER)
    assert [part for part, _ in scene.state.parts.reduced] == [0]
    assert [(case.accused, case.message.part) for case in scene.violations] == [(SENDER, 1), (SENDER, 2)]


def test_a_reducer_with_two_words_for_one_part_is_caught_by_whoever_gets_both(scene: Scene) -> None:
    scene.receive(**reduced([0, 1], GOOD[:2]))
    scene.receive(**reduced([1], GOOD[1:2]))
    assert scene.equivocations == []
    scene.receive(**reduced([1], GOOD[2:3]))
    (case,) = scene.equivocations
    one, other = case.one, case.other
    assert Equivocation(one=one, other=other).contradiction == "two reductions of one part from the same inputs at " + (
        f"version {FACTS.step} of stage {FACTS.stage}"
    )
    scene.receive(**reduced([2], GOOD[2:3]))
    scene.receive(**reduced([2], GOOD[1:2], reducer=OTHER))
    assert len(scene.equivocations) == 1, "of two reducers each has its own"


def test_part_that_another_hands_on_is_kept_under_its_reducer(scene: Scene) -> None:
    scene.receive(**reduced([1], GOOD[1:2], reducer=OTHER))
    ((made, reduction),) = scene.state.parts.reductions.items()
    assert (made.part, reduction.reducer, reduction.norm_cap) == (1, OTHER, CAP)
    assert [one.num_tokens for one in reduction.inputs] == [10, 20, 30]
    reduction.check(verify)
    assert scene.heard == [(FACTS.step, 1, bytes(GOOD[1]))]


def test_part_that_this_peer_reduced_before_it_was_restarted_is_taken_and_what_went_into_it_is_not_here(
    scene: Scene,
) -> None:
    scene.receive(**contributed([1], [GOOD[1]]))
    scene.receive(**reduced([1], GOOD[1:2], reducer=OTHER))
    (made,) = scene.state.parts.reductions
    store = ReductionStore(retained_versions=2)
    store.keep(scene.state, Result(ROSTER, (made,), OTHER), WEIGHTS, norm_cap=CAP, me=OTHER)
    reduction = store.reduction(ROSTER.step, (1, None))
    assert reduction is not None
    assert reduction.reducer == OTHER
    held = {one.peer_id: store.input(ROSTER.step, 1, one.digest) for one in reduction.inputs}
    assert {peer: body if body is None else bytes(body) for peer, body in held.items()} == {
        peer: bytes(GOOD[1]) if peer == SENDER else None for peer in FACTS.members
    }


def test_what_is_sent_again_takes_room_once(scene: Scene) -> None:
    for _ in range(3):
        scene.receive(**contributed([1], [GOOD[1]]))
        scene.receive(**reduced([1], GOOD[1:2]))
    held = sorted((path.name, path.stat().st_blocks * 512) for path in scene.folder.iterdir())
    assert [name for name, _ in held] == ["inputs-00000000", "outputs-00000000"]
    assert all(size <= len(GOOD[1]) + 8192 for _, size in held)


def test_only_what_brings_something_new_shows_that_the_round_goes_on(scene: Scene) -> None:
    """Or a leader could hold its view for as long as parts are waited for, with messages of nothing."""
    scene.receive(**contributed([], []))
    with pytest.raises(RemoteError, match="differ from its commitment"):
        scene.receive(**contributed([1], [GOOD[2]]))
    assert scene.machine.num_moved == 0
    for _ in range(2):
        scene.receive(**contributed([1], [GOOD[1]]))
        scene.receive(**reduced([1], GOOD[1:2]))
        for fragment in fragments_of(contributed([2], [GOOD[2]]), 4)[:2]:
            scene.receive(**fragment)
    assert scene.machine.num_moved == 4


def test_bytes_of_old_steps_leave_memory_and_disk(tmp_path: Path) -> None:
    store, digests = ReductionStore(retained_versions=2), [bulk_digest(body) for body in GOOD]
    inputs = ColdBytes(tmp_path, "inputs")
    for number in range(6):
        step = Step(number)
        store.contributed(step, [inputs.put(memoryview(body)) for body in GOOD], digests)
        inputs.begin_anew()
        state: Any = SimpleNamespace(step=step, parts=StepParts())
        store.keep(state, Result(ROSTER, (), OTHER), WEIGHTS, norm_cap=CAP, me=OTHER)
        kept = range(max(0, number - 2), number + 1)
        assert sorted(path.name for path in tmp_path.iterdir()) == [f"inputs-{one:08d}" for one in kept]
        for old in range(number + 1):
            for part, (body, digest) in enumerate(zip(GOOD, digests, strict=True)):
                assert store.input(Step(old), part, digest) == (body if old in kept else None)


def answer(reducer: PeerId = SENDER) -> tuple[act.FetchPart, Message]:
    """What is fetched, and what a holder answers."""
    squares = squares_of(CODEC, GOOD[0], SIZE)
    made = ReducedPart(0, bulk_digest(GOOD[0]), FACTS.members, squares=squares)
    reduction = Reduction.of(ROSTER, made, WEIGHTS, norm_cap=CAP, reducer=reducer).signed_by(identity_of(reducer))
    return act.FetchPart(0, made.digest, (OTHER,), made, ROSTER), Message(
        SignedPart.of(made, ROSTER, {made: reduction}).answer(), GOOD[0]
    )


@pytest.mark.parametrize("certified", [False, True])
def test_fetched_part_needs_its_reducers_word_until_the_outcome_is_certified(scene: Scene, certified: bool) -> None:
    asked, signed = answer()
    scene.state.round = SimpleNamespace(result=object() if certified else None)

    def counts(reply: Message) -> bool:
        return asyncio.run(scene.exchange._fetched(scene.state, asked, OTHER, reply)) is not None

    assert not counts(Message(signed.meta, GOOD[1]))
    assert counts(Message({}, GOOD[0])) is certified
    assert counts(Message({**signed.meta, "signature": bytes(64)}, GOOD[0])) is certified
    assert scene.state.parts.reductions == {}
    assert counts(signed)
    assert [one.reducer for one in scene.state.parts.reductions.values()] == [SENDER]


def leaves_out(peer: PeerId, own: Any) -> tuple[Roster, ReducedPart]:
    """A part that leaves a contributor out, whose contribution commits to these bytes."""
    made = [
        replace(one, part_digests=(bulk_digest(own), *one.part_digests[1:])) if one.peer_id == peer else one
        for one in ROSTER.contributions
    ]
    others = tuple(one for one in FACTS.members if one != peer)
    squares = squares_of(CODEC, GOOD[1], SIZE)
    reduced = ReducedPart(0, bulk_digest(GOOD[1]), others, (Exclusion(peer, "malformed"),), squares)
    return replace(ROSTER, contributions=tuple(made)), reduced


@pytest.mark.parametrize("own", [GOOD[0], bytes([0x80]) * len(GOOD[0])], ids=["good", "nonsense"])
def test_who_is_left_out_as_malformed_and_is_not_accuses_the_reducer(scene: Scene, own: Any) -> None:
    scene.state.parts.own = [memoryview(own), *map(memoryview, GOOD[1:])]
    roster, reduced = leaves_out(OTHER, own)
    made = Reduction.of(roster, reduced, WEIGHTS, norm_cap=CAP, reducer=SENDER).signed_by(identity_of(SENDER))
    scene.exchange._keep_words(scene.state, {reduced: made})
    if own is not GOOD[0]:
        assert scene.violations == []
        return
    (case,) = scene.violations
    assert (case.accused, case.part, case.committed_digest, bytes(case.body)) == (SENDER, 1, bulk_digest(own), own)
    roster, reduced = leaves_out(SENDER, GOOD[0])
    of_another = Reduction.of(roster, reduced, WEIGHTS, norm_cap=CAP, reducer=OTHER)
    scene.exchange._keep_words(scene.state, {reduced: of_another.signed_by(identity_of(OTHER))})
    assert len(scene.violations) == 1, "who is left out knows best what it sent"


def proposed(squares: float) -> tuple[Proposal, Words]:
    """A result of one part, as its leader and reducer says of it, with its word."""
    made = ReducedPart(0, bulk_digest(GOOD[0]), FACTS.members, squares=squares)
    reduction = Reduction.of(ROSTER, made, WEIGHTS, norm_cap=CAP, reducer=SENDER).signed_by(identity_of(SENDER))
    result = Result(ROSTER, (made,), SENDER)
    words = Words.of(result, {made: reduction}, WEIGHTS, norm_cap=CAP)
    assert words is not None
    return Proposal.of_result(result, 0, Proof((), ROSTER.certificate)), words


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_reducer_whose_false_word_is_voted_on_is_accused_by_who_has_the_bytes(scene: Scene, when: str) -> None:
    """It shows the word to voters who have no bytes; a member has them, or fetches them once they are certified."""
    proposal, words = proposed(1e30)
    if when == "before":
        scene.state.parts.reduced[0, bulk_digest(GOOD[0])] = GOOD[0]
    asyncio.run(scene.exchange.compare(scene.state, proposal, words))
    if when == "after":
        assert scene.violations == []
        assert proposal.result is not None
        asked = act.FetchPart(0, bulk_digest(GOOD[0]), (OTHER,), proposal.result.parts[0], ROSTER)
        scene.state.round = SimpleNamespace(result=proposal.result)
        assert asyncio.run(scene.exchange._fetched(scene.state, asked, OTHER, Message({}, GOOD[0]))) is not None
    (case,) = scene.violations
    assert (case.accused, case.message.squares) == (SENDER, 1e30)


def test_a_word_that_differs_from_another_of_its_reducer_is_an_equivocation(scene: Scene) -> None:
    scene.receive(**reduced([0], GOOD[:1]))
    asyncio.run(scene.exchange.compare(scene.state, *proposed(1e30)))
    (case,) = scene.equivocations
    assert Equivocation(one=case.one, other=case.other).contradiction is not None


def test_words_that_are_true_or_not_their_reducers_accuse_nobody(scene: Scene) -> None:
    scene.receive(**reduced([0], GOOD[:1]))
    asyncio.run(scene.exchange.compare(scene.state, *proposed(squares_of(CODEC, GOOD[0], SIZE))))
    proposal, words = proposed(1e30)
    for bad in (None, replace(words, said=()), replace(words, said=(Word(0, bytes(64)),))):
        with pytest.raises(RemoteError):
            asyncio.run(scene.exchange.compare(scene.state, proposal, bad))
    assert scene.violations == scene.equivocations == []


def fragments_of(message: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """The message of one part, cut."""
    (body,) = message["bodies"]
    size = -(-len(body) // count)
    bodies = [bytes(body)[at * size : (at + 1) * size] for at in range(count)]
    return [
        {**message, "sizes": [len(one)], "bodies": [one], "fragment": Fragment(at, count).to_value()}
        for at, one in enumerate(bodies)
    ]


def test_fragments_make_a_part_in_whatever_order_they_come_and_however_often(scene: Scene) -> None:
    for whole in (contributed([2], [GOOD[2]]), reduced([1], GOOD[1:2])):
        one, two, three = fragments_of(whole, 3)
        for fragment in (three, one, three, one):
            scene.receive(**fragment)
        assert "reduced 1" not in scene.out
        scene.receive(**two)
    assert scene.out == ["part 2", "reduced 1"]
    assert bytes(scene.state.parts.received[2, SENDER]) == bytes(GOOD[2])
    assert [bytes(body) for body in scene.state.parts.reduced.values()] == [bytes(GOOD[1])]


@pytest.mark.parametrize("count", [1, 3])
def test_a_line_is_measured_by_contributions_alone_and_by_their_fragments_as_they_come(
    scene: Scene, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    came: list[int] = []
    monkeypatch.setattr(scene.exchange.rates, "arrived", lambda peer, num_bytes, *, now: came.append(num_bytes))
    for whole in (reduced([1], GOOD[1:2]), contributed([2], [GOOD[2]])):
        messages = fragments_of(whole, count) if count > 1 else [whole]
        for message in messages:
            scene.receive(**message)
    assert len(came) == count
    assert sum(came) == len(GOOD[2])


def test_part_that_is_sent_again_may_be_cut_otherwise(scene: Scene) -> None:
    whole = contributed([0], [GOOD[0]])
    scene.receive(**fragments_of(whole, 2)[0])
    for fragment in fragments_of(whole, 3):
        scene.receive(**fragment)
    assert scene.out == ["part 0"]
    assert bytes(scene.state.parts.received[0, SENDER]) == bytes(GOOD[0])


def test_fragments_are_checked_as_a_whole(scene: Scene) -> None:
    one, two = fragments_of(contributed([0], [GOOD[0]]), 2)
    scene.receive(**one)
    with pytest.raises(RemoteError) as info:
        scene.receive(**{**two, "bodies": [bytes(len(two["bodies"][0]))]})
    assert info.value.kind == "digest"
    assert scene.out == []
    scene.receive(**two)
    assert scene.out == [], "nothing is left of what was refused"
    scene.receive(**one)
    assert scene.out == ["part 0"]


def test_last_fragment_alone_comes_again_when_the_roster_was_late(scene: Scene) -> None:
    one, two = fragments_of(contributed([0], [GOOD[0]]), 2)
    scene.machine.roster = None
    scene.receive(**one)
    with pytest.raises(TransientError, match="no roster"):
        scene.receive(**two)
    scene.machine.roster = ROSTER
    scene.receive(**two)
    assert scene.out == ["part 0"]


def test_fragments_that_are_too_long_of_too_many_parts_or_of_a_stranger_are_not_kept(scene: Scene) -> None:
    one, two = fragments_of(contributed([0], [GOOD[0]]), 2)
    with pytest.raises(RemoteError, match="a fragment of 2 heads"):
        scene.receive(**{**contributed([0, 1], GOOD[:2]), "fragment": one["fragment"]})
    scene.receive(**one)
    long = bytes(scene.exchange.max_message_bytes)
    with pytest.raises(RemoteError) as info:
        scene.receive(**{**two, "bodies": [long], "sizes": [len(long)]})
    assert info.value.kind == "too_large"
    scene.receive(**one)
    for part in range(1, MOST_BEGUN):  # of what is begun and never ended, the oldest makes room
        scene.receive(**fragments_of(contributed([part], [GOOD[0]]), 2)[0])
    assert scene.out == []
    scene.receive(**two)
    assert scene.out == ["part 0"]
    scene.receive(**one)
    for part in range(1, MOST_BEGUN + 1):
        scene.receive(**fragments_of(contributed([part], [GOOD[0]]), 4)[0])
    scene.receive(**two)
    assert scene.out == ["part 0"]

    def refuse(peer: PeerId) -> None:
        raise RemoteError("standing", "no member", peer)

    scene.machine.facts.check_member = refuse
    with pytest.raises(RemoteError, match="no member"):
        scene.receive(**one)


@pytest.mark.parametrize(
    ("who", "behind", "waits"),
    [
        ("part", 0, False),
        ("part", 1, False),
        ("part", 2, True),
        ("missed", 1, True),
        ("missed", 0, False),
        ("none", 0, True),
    ],
)
def test_parts_go_at_once_to_members_that_rounds_wait_for(scene: Scene, who: str, behind: int, waits: bool) -> None:
    """Who took part in a round, who was left out of it, and who is no member; of the present step and those before."""
    turns: list[tuple[PeerId, int | None]] = []
    steps: Any = scene.exchange._steps
    steps.chain.members = (SENDER, OTHER) if who != "none" else (OTHER,)
    roster = SimpleNamespace(contribution_of=lambda peer: object() if who == "part" else None, reducers=(OTHER,))
    kept = {int(FACTS.step) - back: (SimpleNamespace(roster=roster), []) for back in (1, 2)}
    scene.exchange._context.results = cast(Any, kept)

    def turn(peer: PeerId, *, lacks_bytes: int | None) -> None:
        turns.append((peer, lacks_bytes))

    at_once: list[None] = []
    scene.exchange.joiners = cast(Any, SimpleNamespace(turn=turn, member_takes=lambda: at_once.append(None)))
    wanted: dict[str, Any] = {"step": int(FACTS.step) - behind, "part": 0, "digest": bytes(32)}
    scene.exchange._turn(SENDER, Message(wanted))
    scene.exchange._turn(SENDER, Message({**wanted, "lacks_bytes": 5}))
    of_last: list[int | None] = [0, 5] if behind == 1 else [None, None]
    assert turns == [(SENDER, lacks_bytes) for lacks_bytes in of_last] * waits
    assert len(at_once) == (0 if waits else 2)


def test_what_is_caught_up_on_the_round_does_not_fetch(scene: Scene) -> None:
    scene.state.parts.are_caught_up_on = True
    reduced = ReducedPart(0, bulk_digest(GOOD[0]), FACTS.members, ())
    asked = act.FetchPart(0, reduced.digest, (SENDER,), reduced, ROSTER)
    assert asyncio.run(scene.exchange.fetch(scene.state, asked)) == []
    assert not scene.state.parts.fetching


def test_a_holder_that_hangs_is_waited_for_once_and_not_with_each_part(scene: Scene) -> None:
    hanging, holder = FACTS.members[:2]
    asked_of: list[PeerId] = []

    async def call(peer: PeerId, method: str, request: Message, **limits: Any) -> Message:
        asked_of.append(peer)
        if peer == hanging:
            raise UnreachableError("silent past the deadline")
        return Message({}, GOOD[request.meta["part"]])

    context: Any = scene.exchange._context
    context.transport.call = call
    context.settings.deadlines.least_mbit = 1.0
    scene.state.round = SimpleNamespace(result=object(), part_fetched=lambda reduced, now: [reduced.part])
    for part in (0, 1, 2):
        made = ReducedPart(part, bulk_digest(GOOD[part]), FACTS.members, squares=1.0)
        asked = act.FetchPart(part, made.digest, (hanging, holder), made, ROSTER)
        assert asyncio.run(scene.exchange.fetch(scene.state, asked)) == [part]
    assert asked_of == [hanging, *[holder] * 3]
    assert not scene.state.parts.fetching


def test_bytes_of_which_their_reducer_says_something_else_now_are_not_held_until_the_outcome_is_certified(
    scene: Scene,
) -> None:
    """Of a part without the nonsense of one that is then left out, the bytes stay the same, and the word does not."""
    message = reduced([1], [GOOD[1]])
    scene.receive(**message)
    scene.state.round = SimpleNamespace(result=None)
    (known,) = scene.state.parts.reductions
    (head,) = message["heads"]
    one, *others = known.contributors
    other = replace(known, contributors=tuple(others), excluded=(Exclusion(one, "malformed"),))
    for made, is_held in ((known, True), (other, False)):
        asked = act.FetchPart(1, made.digest, (SENDER,), made, ROSTER)
        assert scene.exchange._is_fetched_no_more(scene.state, asked) == is_held
        said = {"of": "reduced", "fragment": None, "heads": [{**head, "reduced": made.to_value()}]}
        assert scene.exchange.holds(scene.state, SENDER, Fields("message", said)) == is_held
    scene.state.round.result = ROSTER
    assert scene.exchange._is_fetched_no_more(scene.state, asked), "then the bytes are enough"


BODY = bytes(1000)


class Forgetful:
    """A transport that takes messages whose answers are lost; asked whether they came, it says `status`."""

    def __init__(self, status: str) -> None:
        self.kinds: list[Value] = []
        self.carried = 0
        self._status = status

    async def call(
        self, peer_id: PeerId, method: str, request: Message, *, timeout_s: float, max_body_bytes: int
    ) -> Message:
        self.kinds.append(request.meta["kind"])
        self.carried += request.num_bytes
        if request.meta["kind"] == "held":
            return Message({"status": self._status})
        if self.kinds.count("parts") < 2:
            raise UnreachableError("no answer")
        return Message({"status": "ok"})


async def sent(transport: Forgetful, *, may_be_there: bool = False) -> int:
    """How many bytes count as sent."""
    deadlines = SimpleNamespace(call_s=1.0)
    context = SimpleNamespace(transport=transport, settings=SimpleNamespace(deadlines=deadlines))
    steps: Any = SimpleNamespace(context=context, chain=SimpleNamespace(stage=0), is_open=lambda state: True)

    async def is_gone(peer: PeerId) -> bool:
        return False

    presence: Any = SimpleNamespace(is_gone=is_gone, heard_of=lambda peer: None, answered=lambda peer, within_s: None)
    logged: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    logged.set_result(None)
    state: Any = SimpleNamespace(step=3, logged=logged, sent_bytes=0)
    await RoundMail(steps, presence).bring(state, OTHER, {"kind": "parts"}, (BODY,), may_be_there=may_be_there)
    return int(state.sent_bytes)


@pytest.mark.parametrize(("status", "kinds"), [("held", ["parts", "held"]), ("lacked", ["parts", "held", "parts"])])
def test_bytes_that_came_are_not_sent_again(status: str, kinds: list[str]) -> None:
    transport = Forgetful(status)
    assert asyncio.run(sent(transport)) == len(BODY)
    assert transport.kinds == kinds
    assert transport.carried == kinds.count("parts") * len(BODY)


def test_what_was_given_up_before_is_asked_after_and_not_sent_twice() -> None:
    transport = Forgetful("held")
    asyncio.run(sent(transport, may_be_there=True))
    assert transport.kinds == ["held"]


def test_a_call_that_fails_at_once_is_not_made_again_and_again_in_the_same_moment() -> None:
    class Barred(Forgetful):
        calls = 0

        async def call(
            self, peer_id: PeerId, method: str, request: Message, *, timeout_s: float, max_body_bytes: int
        ) -> Message:
            self.calls += 1
            raise UnreachableError("it is not known here to be past its probation")

    transport = Barred("lacked")

    async def main() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(3.5 * RESEND_S):
                await sent(transport)

    asyncio.run(main())
    assert 1 < transport.calls <= 4


def test_the_last_fragment_of_a_part_that_was_not_taken_is_wanted_again() -> None:
    fragments, part, body = Fragments(), b"part", memoryview(bytes(5))
    first, last = Fragment(0, 2), Fragment(1, 2)
    assert fragments.put(OTHER, part, first, body, max_bytes=10) is None
    assert fragments.holds(OTHER, part, first)
    assert not fragments.holds(OTHER, part, last)
    assert fragments.put(OTHER, part, last, body, max_bytes=10) is not None
    assert not fragments.holds(OTHER, part, last), "whoever was to take the whole did not say that it has"
