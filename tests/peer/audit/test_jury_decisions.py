"""A jury's votes: who is drawn, what counts in its own stage, and how the other stages hear of it."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peer.audit.jury import Charges, Jury
from peer.pipeline.screens import KnownStanding
from peer.round.stage_steps import StageSteps
from peer.stage.bases import RecentBases
from peer.stage.beacon import StageBeacon
from peer.stage.events import Events, VersionTurned
from swarm.core.audit.beacon import Beacon
from swarm.core.errors import RemoteError, TransientError
from swarm.core.ids import PeerId, StageIndex, Step, Version
from swarm.core.round.basis import RoundBasis
from swarm.core.round.contribution import Charge, Result, Roster
from swarm.core.state.stage_chain import StageChain
from swarm.identity.key import Identity
from swarm.manifest.signed_run import SignedRun
from swarm.network.transport import Message
from tests.swarm.core.audit.chances import HOST_CHAIN, UNSAID, said_by
from verification.audit.tolerance import Grade
from verification.audit.verdicts import Accusation, Ban, DrawnJury, JurorVote, Quarantine, jury_of
from verification.kinds.mismatch import Mismatch

RUN_ID = "ab" * 32
RUN_KEY = Identity.from_seed(b"k" * 32)
PEERS = {one.peer_id: one for one in (Identity.from_seed(bytes([number]) * 32) for number in range(1, 8))}
MEMBERS = tuple(sorted(PEERS))
ACCUSER, ACCUSED = MEMBERS[:2]
CHARGE = Accusation(RUN_ID, ACCUSED, StageIndex(1), Version(30), "replay_mismatch", bytes(range(32)))


ROOT = b"r" * 32
COMMITTED, ANOTHER = Charge(ACCUSED, CHARGE.digest()), Charge(ACCUSED, bytes(32))


def certified(*charges: Charge) -> Result:
    """A result of step 33 in which the accuser has committed to these charges."""
    made = SimpleNamespace(peer_id=ACCUSER, stage=StageIndex(1), charges=charges)
    roster = SimpleNamespace(
        run_id=RUN_ID,
        stage=StageIndex(1),
        step=Step(33),
        committed=(),
        commitment_of=lambda peer: made if peer == ACCUSER else None,
    )
    return cast(Result, SimpleNamespace(roster=roster, root=lambda: ROOT))


def after(members: tuple[PeerId, ...] = MEMBERS, *, version: int = 34) -> StageChain:
    """The chain of the version that the step made."""
    work, links = (7,) * len(members), (None,) * len(members)
    basis = RoundBasis(bytes(32), ROOT, members, work, members, work, (), links, UNSAID)
    return cast(StageChain, SimpleNamespace(version=Version(version), basis=basis))


def beacon_of(roster: Roster) -> Beacon:
    return Beacon.of(roster, said_by(HOST_CHAIN, 40))


def jury_drawn(*charges: Charge, members: tuple[PeerId, ...] = MEMBERS) -> DrawnJury | None:
    return jury_of(certified(*charges), after(members).basis, CHARGE, ACCUSER, beacon_of)


DRAWN = tuple(cast(DrawnJury, jury_drawn(COMMITTED)).weights)


def found(*grades: Grade, jurors: tuple[PeerId, ...] = DRAWN) -> Quarantine:
    votes = (
        JurorVote(*CHARGE.facts, ACCUSER, Step(33), juror, grade).signed_by(PEERS[juror])
        for juror, grade in zip(jurors, grades, strict=False)
    )
    return Quarantine(*CHARGE.facts, tuple(votes))


GUILTY = found(Grade.FRAUD, Grade.HONEST, Grade.FRAUD, Grade.FRAUD)


class CertifiedAtOnce(Charges):
    def bring(self, charge: Charge) -> asyncio.Future[Result]:
        bringing = super().bring(charge)
        self.certified(charge, certified(charge))
        return bringing


async def nothing_is_brought(case: object) -> None:
    """These jurors convict nobody."""


def jury(
    stage: int,
    *,
    of_stage: set[PeerId] | None = None,
    charges: Charges | None = None,
    spoken: int = 40,
    members: tuple[PeerId, ...] = MEMBERS,
    me: PeerId = MEMBERS[-1],
    wait_for_version: Callable[..., Awaitable[bool]] | None = None,
    call: Callable[..., Awaitable[Message]] | None = None,
) -> tuple[Jury, list[Coroutine[Any, Any, None]]]:
    """Of a peer of that stage, where the host has spoken of so many versions, and what it began to do."""
    begun: list[Coroutine[Any, Any, None]] = []
    basis = SimpleNamespace(said=said_by(HOST_CHAIN, 0))
    chain = SimpleNamespace(
        stage=StageIndex(stage), run_key=RUN_KEY.peer_id, members=MEMBERS, lineage=bytes(32), basis=basis
    )
    context = SimpleNamespace(
        run_id=RUN_ID,
        me=me,
        results={33: (certified(COMMITTED), []), 34: (certified(), [])},
        tasks=SimpleNamespace(spawn=begun.append),
        events=Events(),
        settings=SimpleNamespace(deadlines=SimpleNamespace(step_s=1.0), checkpoint=SimpleNamespace(snapshot_every=8)),
        transport=SimpleNamespace(call=call),
    )
    steps = SimpleNamespace(chain=chain, context=context, version=40, wait_for_version=wait_for_version)
    beacon = StageBeacon(cast(StageSteps, steps), cast(Any, None), cast(Any, None), RUN_KEY.peer_id)
    beacon.hear(said_by(HOST_CHAIN, spoken))
    bases = RecentBases(after(members), kept=4)
    bases.turned(VersionTurned(after(members, version=35), is_next=True))
    made = Jury(
        cast(StageSteps, steps),
        bases,
        charges or Charges(),
        beacon,
        cast(SignedRun, None),
        RUN_KEY.peer_id,
        lambda stage: of_stage or set(),
        lambda quarantine, sender: None,
        KnownStanding(),
        nothing_is_brought,
    )
    return made, begun


def test_the_jury_is_drawn_when_the_charge_is_certified() -> None:
    assert len(set(DRAWN)) == 5
    assert not {ACCUSER, ACCUSED} & set(DRAWN)
    assert jury_drawn(ANOTHER, COMMITTED) == jury_drawn(COMMITTED)
    assert jury_drawn(COMMITTED, members=MEMBERS[:4]) is None
    elsewhere = replace(after().basis, root=bytes(32))
    with pytest.raises(RemoteError, match="did not make this version"):
        jury_of(certified(COMMITTED), elsewhere, CHARGE, ACCUSER, beacon_of)
    for result, accuser in (
        (certified(), ACCUSER),
        (certified(ANOTHER), ACCUSER),
        (certified(Charge(ACCUSER, CHARGE.digest())), ACCUSER),
        (certified(COMMITTED), ACCUSED),
    ):
        with pytest.raises(RemoteError, match="accused nobody of that"):
            jury_of(result, after().basis, CHARGE, accuser, beacon_of)


def test_no_drawn_jury_binds_before_the_host_has_spoken_of_the_step() -> None:
    """Where all judge nothing is drawn: they do without the host."""
    crowd = tuple(sorted([*MEMBERS, *(PeerId(f"other {number:02}") for number in range(12))]))
    for spoken in (33, 34):
        own, begun = jury(1, spoken=spoken)
        assert own.counts(GUILTY, MEMBERS[4])
        begun[0].close()
        large, _ = jury(1, spoken=spoken, members=crowd)
        error = TransientError if spoken == 33 else RemoteError
        with pytest.raises(error, match="has not spoken of step 33" if spoken == 33 else "guilty|drawn"):
            large.counts(GUILTY, MEMBERS[4])


def test_its_own_stage_checks_the_draw_and_tells_the_stages_beside_it() -> None:
    own, begun = jury(1)
    assert own.counts(GUILTY, MEMBERS[4])
    assert len(begun) == 1
    begun[0].close()


@pytest.mark.parametrize(
    "made",
    [
        found(Grade.FRAUD, Grade.HONEST, Grade.HONEST, Grade.FRAUD),
        found(Grade.FRAUD, Grade.FRAUD, Grade.FRAUD, jurors=(DRAWN[0], DRAWN[1], ACCUSER)),
        replace(GUILTY, peer_id=MEMBERS[5]),
        replace(GUILTY, evidence_digest=bytes(32)),
        replace(GUILTY, votes=()),
        replace(GUILTY, votes=tuple(replace(one, committed_at=Step(34)) for one in GUILTY.votes)),
    ],
)
def test_other_findings_put_nobody_out(made: Quarantine) -> None:
    own, begun = jury(1)
    with pytest.raises(RemoteError):
        own.counts(made, MEMBERS[4])
    assert begun == []


def test_a_finding_about_a_step_that_is_not_here_is_asked_for_again() -> None:
    own, _ = jury(1)
    late = replace(GUILTY, votes=tuple(replace(one, committed_at=Step(35)) for one in GUILTY.votes))
    with pytest.raises(TransientError):
        own.counts(late, MEMBERS[4])


def test_another_stage_acts_when_most_of_that_stages_peers_do() -> None:
    beside, begun = jury(0, of_stage=set(MEMBERS[:6]))
    strangers = [PeerId("stranger"), ACCUSED]
    told = [beside.counts(GUILTY, peer) for peer in (*strangers, *strangers, MEMBERS[0], MEMBERS[0], MEMBERS[2])]
    assert told == [False] * 7
    assert beside.counts(GUILTY, MEMBERS[3]), "three of the five others"
    assert begun == []


def test_what_several_accusers_bring_about_one_peer_counts_together_in_another_stage() -> None:
    """Each of its stage's peers tells of the finding that it heard of first."""
    beside, _ = jury(0, of_stage=set(MEMBERS[:6]))
    another, of_long_ago = replace(GUILTY, evidence_digest=ROOT), replace(GUILTY, version=Version(3))
    assert not beside.counts(of_long_ago, MEMBERS[4])
    assert not beside.counts(GUILTY, MEMBERS[0])
    assert not beside.counts(another, MEMBERS[2])
    assert beside.counts(another, MEMBERS[3])


def test_a_charge_is_committed_to_once_and_waits_for_its_result() -> None:
    async def play() -> None:
        charges = Charges()
        own, _ = jury(1, charges=charges)
        assert charges.brought() == ()
        waiting = charges.bring(COMMITTED)
        charges.bring(ANOTHER)
        assert charges.brought() == (COMMITTED,), "one at a time"
        made = SimpleNamespace(charges=(COMMITTED,))
        roster = SimpleNamespace(commitment_of=lambda peer: made)
        result = SimpleNamespace(roster=roster)
        own.applied(cast(Any, SimpleNamespace(result=result)))
        assert charges.brought() == (ANOTHER,)
        assert waiting.result() is result

    asyncio.run(play())


@pytest.mark.parametrize(
    ("spoken", "banned_at", "of_version", "waited", "asks"),
    [
        (40, 36, 30, [35, 36], False),
        (40, None, 30, [35, 36, 37], True),
        (33, None, 30, [35], True),
        (35, None, 30, [35, 36, 37], True),
        (40, None, 22, [], True),
    ],
    ids=[
        "the host judges",
        "it takes too long",
        "it has not spoken of the round",
        "it falls silent after that",
        "jurors hold its past not for long any more",
    ],
)
def test_jurors_are_asked_once_the_host_had_its_time(
    spoken: int, banned_at: int | None, of_version: int, waited: list[int], asks: bool
) -> None:
    """The charge is certified in step 33, which makes version 34."""
    seen: list[int] = []
    asked: set[PeerId] = set()

    async def wait_for_version(version: int, *, timeout_s: float) -> bool:
        seen.append(version)
        if version == banned_at:
            accuser._standing.take(Ban(*CHARGE.facts))
        return True

    async def call(juror: PeerId, *_: object, **limits: float) -> Message:
        asked.add(juror)
        raise RemoteError("verdict", "this juror judges nothing", juror)

    accuser, _ = jury(
        1, charges=CertifiedAtOnce(), spoken=spoken, me=ACCUSER, wait_for_version=wait_for_version, call=call
    )
    light = SimpleNamespace(
        **vars(CHARGE), accused=ACCUSED, digest=lambda: CHARGE.evidence_digest, to_bytes=lambda: b"a case"
    )
    case = SimpleNamespace(
        accused=ACCUSED,
        versions=(of_version, of_version),
        without_past=lambda: SimpleNamespace(to_evidence=lambda run: light),
    )

    async def accuse() -> None:
        if not asks:
            return await accuser.prosecute(cast(Mismatch, case))
        with pytest.raises(RemoteError, match="votes"):
            await accuser.prosecute(cast(Mismatch, case))

    asyncio.run(accuse())
    assert seen == waited
    assert asked == (set(DRAWN) if asks else set())
