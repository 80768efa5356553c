"""Verdicts and standing: who may sign what, and the same table at everyone whatever the order of events."""

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.core.audit.beacon import Beacon
from swarm.core.canonical import Value, pack, unpack
from swarm.core.errors import RemoteError
from swarm.core.ids import PeerId, StageIndex, Step, Version
from swarm.core.ranking import rank
from swarm.core.round.basis import RoundBasis
from swarm.core.seats import seats, weight_of
from swarm.identity.key import Identity
from tests.swarm.core.audit.chances import UNSAID, beacon_of
from verification.audit.standing import FAULT, KEPT_DEBTS, AuditDebt, Event, Standing, StandingTable, Suspicion
from verification.audit.tolerance import Grade
from verification.audit.verdicts import (
    FEWEST_REPLICAS,
    MOST_JURORS,
    OF_THE_MOST,
    Ban,
    Debt,
    DrawnJury,
    JurorVote,
    Pardon,
    Promotion,
    Quarantine,
    jurors,
)

RUN_ID = "ab" * 32
SOME = beacon_of(1)
RUN_KEY = Identity.from_seed(bytes(range(32)))
JURY = tuple(Identity.from_seed(bytes([number]) * 32) for number in range(1, 4))
DRAWN = tuple(identity.peer_id for identity in JURY)
JURY_OF_THREE = DrawnJury(dict.fromkeys(DRAWN, 40), 61)
ACCUSED, OTHER = PeerId("accused"), PeerId("other")
PEERS = (ACCUSED, OTHER)
STAGE = StageIndex(1)
CHARGE = (RUN_ID, ACCUSED, STAGE, Version(300), "replay_mismatch", bytes(range(32)))
NOW = Version(1000)

BAN = Ban(*CHARGE).signed_by(RUN_KEY)
QUARANTINE = Quarantine(*CHARGE).signed_by(RUN_KEY)
PARDON = Pardon(RUN_ID, ACCUSED, Version(300), True).signed_by(RUN_KEY)
VOTE = JurorVote(*CHARGE, OTHER, Step(302), DRAWN[0], Grade.FRAUD).signed_by(JURY[0])
PROMOTION = Promotion(RUN_ID, ACCUSED, STAGE, Version(300)).signed_by(RUN_KEY)
DEBT = Debt(RUN_ID, ACCUSED, Version(300)).signed_by(RUN_KEY)


def _tried(verdicts: Iterable[Grade]) -> Quarantine:
    votes = zip(JURY, verdicts, strict=False)
    summons = (OTHER, Step(302))
    return Quarantine(
        *CHARGE, tuple(JurorVote(*CHARGE, *summons, one.peer_id, verdict).signed_by(one) for one, verdict in votes)
    )


GUILTY, SPLIT = _tried([Grade.FRAUD, Grade.SUSPICIOUS, Grade.FRAUD]), _tried([Grade.FRAUD, Grade.HONEST])


# -- the messages -----------------------------------------------------------------------------------------------


def test_the_bytes_of_a_ban_never_change() -> None:
    assert BAN.signed_bytes() == b"homeswarm/ban\0" + pack(
        {
            "run_id": "ab" * 32,
            "peer_id": "accused",
            "stage": 1,
            "version": 300,
            "kind": "replay_mismatch",
            "evidence_digest": bytes(range(32)),
        }
    )
    assert BAN.digest().hex() == "64594dd2faf2657af834f184937884d97adf09d6997324dd59e1333227c16c66"
    assert BAN.signature.hex() == (
        "b17dcf6b0fac393eccaacde5f2a1270a6fa8819a35d49483b2798d0e62ab0e81"
        "0e15f071c62e345b8597f706838fcc6cf6e4c8a222a649ebfef086d4d9aac105"
    )


def test_the_bytes_of_the_other_verdicts_never_change() -> None:
    found = [hashlib.sha256(one.signed_bytes()).hexdigest()[:16] for one in (QUARANTINE, VOTE, PARDON)]
    assert found == ["81726d6ad29a153e", "d9ba70dde0f4aff2", "cd25b503dc2cc5d7"]


@pytest.mark.parametrize("made", [BAN, QUARANTINE, GUILTY, PARDON, VOTE])
def test_a_verdict_comes_back_from_its_value(made: Ban | Quarantine | Pardon | JurorVote) -> None:
    assert type(made).from_value(unpack(pack(made.to_value()), max_bytes=1 << 16)) == made


@pytest.mark.parametrize("made", [BAN, QUARANTINE, PARDON, VOTE])
def test_no_field_of_a_verdict_can_change_without_its_digest(made: Ban | Quarantine | Pardon | JurorVote) -> None:
    others: dict[str, Any] = {
        "run_id": "cd" * 32,
        "peer_id": OTHER,
        "stage": StageIndex(2),
        "version": Version(301),
        "kind": "equivocation",
        "evidence_digest": bytes(32),
        "acquitted": False,
        "accuser": PeerId("someone"),
        "committed_at": Step(303),
        "juror": DRAWN[1],
        "verdict": Grade.HONEST,
    }
    names = [one.name for one in fields(made) if one.name not in ("signature", "votes")]
    changed = [replace(made, **{name: others[name]}) for name in names]
    assert len({made.digest(), *(one.digest() for one in changed)}) == 1 + len(names)
    for one in changed:
        with pytest.raises(RemoteError):
            _check(one)
    _check(made)


def _check(made: Ban | Quarantine | Pardon | JurorVote) -> None:
    if isinstance(made, JurorVote):
        made.check(RUN_ID)
    else:
        made.check(RUN_ID, RUN_KEY.peer_id)


def test_a_verdict_of_another_kind_or_key_is_not_the_run_keys() -> None:
    for made in (Ban(*CHARGE), Quarantine(*CHARGE), Pardon(RUN_ID, ACCUSED, Version(300), True)):
        made.signed_by(RUN_KEY).check(RUN_ID, RUN_KEY.peer_id)
        for wrong in (
            made.signed_by(JURY[0]),
            replace(made, signature=BAN.signature[:-1] + bytes([BAN.signature[-1] ^ 1])),
            replace(made, signature=VOTE.signature),
        ):
            with pytest.raises(RemoteError) as caught:
                wrong.check(RUN_ID, RUN_KEY.peer_id)
            assert caught.value.kind == "signature"
    with pytest.raises(RemoteError):
        Ban(*CHARGE, signature=QUARANTINE.signature).check(RUN_ID, RUN_KEY.peer_id)
    with pytest.raises(RemoteError) as caught:
        BAN.check("cd" * 32, RUN_KEY.peer_id)
    assert caught.value.kind == "protocol"


BAD: tuple[Value, ...] = (None, [], b"short", "x" * 300, -1, 1 << 63)


@pytest.mark.parametrize(
    ("reader", "good"),
    [
        (Ban.from_value, BAN),
        (Quarantine.from_value, GUILTY),
        (JurorVote.from_value, VOTE),
        (Pardon.from_value, PARDON),
        (Promotion.from_value, PROMOTION),
        (Debt.from_value, DEBT),
    ],
)
def test_malformed_verdicts_are_refused(
    reader: Callable[[Value], object], good: Ban | Quarantine | JurorVote | Pardon | Promotion | Debt
) -> None:
    value = good.to_value()
    assert isinstance(value, dict)
    inner = value["value"]
    assert isinstance(inner, dict)
    wrong: list[Value] = [
        None,
        [],
        {},
        {**value, "more": 1},
        {**value, "signature": b"short"},
        {**value, "value": None},
    ]
    for name in inner:
        wrong += [{**value, "value": {key: held for key, held in inner.items() if key != name}}]
        wrong += [{**value, "value": {**inner, name: bad}} for bad in BAD]
    wrong += [{**value, "value": {**inner, "more": 1}}]
    if isinstance(good, Quarantine):
        too_many = [VOTE.to_value()] * (MOST_JURORS + 1)
        wrong += [{**value, "votes": votes} for votes in (too_many, [None], None)]
    for one in wrong:
        with pytest.raises(RemoteError) as caught:
            reader(one)
        assert caught.value.kind == "malformed"


# -- juries -----------------------------------------------------------------------------------------------------


def test_enough_of_the_drawn_jurors_quarantine() -> None:
    GUILTY.check(RUN_ID, RUN_KEY.peer_id, jury=JURY_OF_THREE)
    _tried([Grade.FRAUD] * 3).check(RUN_ID, RUN_KEY.peer_id, jury=JURY_OF_THREE)
    _tried([Grade.FRAUD] * 2).check(RUN_ID, RUN_KEY.peer_id, jury=JURY_OF_THREE)


@pytest.mark.parametrize(
    "made",
    [
        SPLIT,
        _tried([]),
        _tried([Grade.FRAUD, Grade.SUSPICIOUS, Grade.SUSPICIOUS]),
        replace(SPLIT, votes=(VOTE, VOTE)),
        replace(GUILTY, votes=(VOTE, *(replace(one, accuser=DRAWN[0]) for one in GUILTY.votes[1:]))),
        replace(GUILTY, votes=(VOTE, *(replace(one, committed_at=Step(303)) for one in GUILTY.votes[1:]))),
        replace(SPLIT, votes=(VOTE, replace(VOTE, juror=DRAWN[1]))),
        replace(SPLIT, votes=(VOTE, replace(SPLIT.votes[1], verdict=Grade.FRAUD))),
        replace(GUILTY, peer_id=OTHER),
        replace(GUILTY, stage=StageIndex(0)),
        replace(GUILTY, version=Version(900)),
        replace(GUILTY, kind="equivocation"),
        replace(GUILTY, evidence_digest=bytes(32)),
        replace(GUILTY, run_id="cd" * 32),
        replace(GUILTY, signature=bytes(64)),
    ],
)
def test_fewer_or_other_votes_quarantine_nobody(made: Quarantine) -> None:
    with pytest.raises(RemoteError):
        made.check(RUN_ID, RUN_KEY.peer_id, jury=JURY_OF_THREE)


def test_votes_of_whoever_was_not_drawn_do_not_count() -> None:
    for drawn in (DRAWN[:2], (*DRAWN[:2], OTHER)):
        for jury in (DrawnJury(dict.fromkeys(drawn, 1), 2), None):
            with pytest.raises(RemoteError) as caught:
                GUILTY.check(RUN_ID, RUN_KEY.peer_id, jury=jury)
            assert caught.value.kind == "verdict"


def _basis(*work: int) -> RoundBasis:
    members = tuple(PeerId(f"peer {number:03}") for number in range(len(work)))
    return RoundBasis(bytes(32), bytes(32), members, work, members, work, (), (None,) * len(work), UNSAID)


def _jurors(basis: RoundBasis, beacon: Beacon = SOME) -> DrawnJury | None:
    """On the second member, whom the first accuses."""
    return jurors(basis, accuser=basis.members[0], accused=basis.members[1], beacon=lambda: beacon)


@pytest.mark.parametrize("num", range(2, 18))
def test_all_others_judge_in_a_small_stage_and_more_than_half_of_their_weight_convicts(num: int) -> None:
    drawn = _jurors(_basis(*[30] * num))
    if num < FEWEST_REPLICAS:
        assert drawn is None
        return
    assert drawn is not None
    assert drawn.weights == dict.fromkeys(_basis(*[30] * num).members[2:], 30)
    assert drawn.needed == 15 * (num - 2) + 1
    assert num == 5 or len([*drawn.weights]) > 3, "it grows with the stage"


def _three_drawn(members: Iterable[PeerId], parties: set[PeerId], evidence: bytes, name: bytes) -> set[PeerId]:
    """The rule before: three by chance, two of whom convict."""
    return {*rank({*members} - parties, "juror", evidence, name)[:3]}


def test_three_liars_of_ten_convicted_by_charges_alone_and_do_no_more() -> None:
    """Each brought four charges a step, of evidence that there was not, and asked where a jury was of accomplices."""
    rng, basis = random.Random(3), _basis(*[64] * 10)
    liars, steps_to_convict = {*basis.members[:3]}, []
    for _ in range(40):
        steps = 0
        while True:
            steps += 1
            charges = [(liar, rng.choice(basis.members[3:]), rng.randbytes(32)) for liar in liars for _ in range(4)]
            name, accomplices = rng.randbytes(32), [0]
            for liar, accused, evidence in charges:
                accomplices.append(len(_three_drawn(basis.members, {liar, accused}, evidence, name) & liars))
                drawn = jurors(basis, accuser=liar, accused=accused, beacon=lambda: SOME)
                assert drawn is not None
                assert not drawn.convicts(liars)
            if max(accomplices) >= 2:
                break
        steps_to_convict.append(steps)
    assert max(steps_to_convict) <= 6
    assert sorted(steps_to_convict)[20] <= 2


def test_less_than_a_third_of_the_work_convicts_nobody_and_cannot_save_its_own() -> None:
    """Whatever was done by whom, in a stage of which all judge."""
    rng = random.Random(7)
    for _ in range(3000):
        basis = _basis(*(rng.choice([0, 1, rng.randrange(1, 1000)]) for _ in range(rng.randint(5, 17))))
        weights = seats(basis.work_of)
        liars = set(rng.sample(basis.members, rng.randrange(len(basis.members))))
        if len(weights) < FEWEST_REPLICAS or 3 * weight_of(weights, liars) >= sum(weights.values()):
            continue
        for accuser in basis.members:
            for accused in basis.members:
                if (accuser in liars) == (accused in liars):
                    continue
                drawn = jurors(basis, accuser=accuser, accused=accused, beacon=lambda: SOME)
                assert drawn is not None
                for_guilty = liars if accuser in liars else {*basis.members} - liars
                assert drawn.convicts(for_guilty - {accuser, accused}) == (accused in liars)


def test_in_a_large_stage_a_third_of_the_work_seldom_has_twelve_of_fifteen_jurors() -> None:
    convicted = 0
    for number in range(3000):
        basis = _basis(*[20] * 40, 0, 0, 0)
        liars = {*basis.members[:1], *basis.members[2:14]}
        drawn = _jurors(basis, beacon_of(1, str(number)))
        assert drawn is not None
        assert (len([*drawn.weights]), drawn.needed) == (MOST_JURORS, OF_THE_MOST)
        assert not {*drawn.weights} & {*basis.members[:2], *basis.members[40:]}
        convicted += drawn.convicts(liars)
    assert convicted <= 3


def test_the_draw_of_jurors_goes_by_work() -> None:
    rng, counts = random.Random(1), Counter[PeerId]()
    for _ in range(600):
        drawn = _jurors(_basis(*[10] * 20, *[30] * 10), beacon_of(1, str(rng.random())))
        assert drawn is not None
        counts.update(drawn.weights)
    slow, fast = (sum(counts[PeerId(f"peer {number:03}")] for number in of) for of in (range(2, 20), range(20, 30)))
    assert 1.8 < (fast / 10) / (slow / 18) < 3.0
    assert not counts[PeerId("peer 000")] + counts[PeerId("peer 001")]


# -- the table --------------------------------------------------------------------------------------------------


def _after(events: Iterable[Event], table: StandingTable | None = None) -> StandingTable:
    made = StandingTable(frozenset({ACCUSED})) if table is None else table
    for event in events:
        made = made.after(event, NOW)
    return made


def _events(made: Callable[[PeerId, Version], Event], *versions: int) -> list[Event]:
    return [made(ACCUSED, Version(version)) for version in versions]


def _promoted(version: int) -> Event:
    return Promotion(RUN_ID, ACCUSED, STAGE, Version(version))


def _quarantined(version: int) -> Event:
    return replace(QUARANTINE, version=Version(version))


def _pardoned(version: int, *, acquitted: bool) -> Event:
    return Pardon(RUN_ID, ACCUSED, Version(version), acquitted)


def _standing(events: Iterable[Event], *, version: int = 1000, founder: bool = True) -> Standing:
    table = _after(events, StandingTable(frozenset({ACCUSED} if founder else ())))
    found = table.standing(ACCUSED, Version(version))
    assert table.may_train(ACCUSED) == (found in (Standing.MEMBER, Standing.SUSPICIOUS))
    assert table.banned == ((ACCUSED,) if found is Standing.BANNED else ())
    return found


def test_events_taken_together_make_the_same_table() -> None:
    events = [
        _promoted(7),
        BAN,
        replace(BAN, peer_id=OTHER, version=Version(310)),
        *_events(AuditDebt, 5, 6),
        QUARANTINE,
        PARDON,
    ]
    assert StandingTable().after_all((event, NOW) for event in events) == _after(events, StandingTable())
    with pytest.raises(RemoteError, match="it is 4"):
        StandingTable().after_all([(_promoted(7), NOW), (AuditDebt(ACCUSED, Version(5)), Version(4))])


def test_founders_are_members_and_others_on_probation_until_they_are_promoted() -> None:
    assert _standing([]) is Standing.MEMBER
    assert _standing([], founder=False) is Standing.PROBATION
    assert _standing([_promoted(0)], founder=False) is Standing.MEMBER
    assert _standing([_promoted(300), _promoted(5)], founder=False) is Standing.MEMBER


def test_nobody_is_on_probation_in_a_run_without_replay_audits() -> None:
    table = StandingTable(has_probation=False)
    assert table.may_train(OTHER)
    assert _after(_events(AuditDebt, 5), table).standing(ACCUSED, NOW) is Standing.MEMBER
    assert _after(_events(AuditDebt, 5, 6, 7), table).standing(ACCUSED, NOW) is Standing.QUARANTINED


def test_a_ban_raises_the_budget_for_everybody_of_its_stage_for_twelve_versions_from_the_deed() -> None:
    later = replace(BAN, peer_id=OTHER, version=Version(305))
    member = StandingTable(frozenset({ACCUSED, OTHER}))
    table = _after([later, BAN], member)
    for version, factor in ((299, 1.0), (305, 5.0), (316, 5.0), (317, 1.0)):
        assert table.budget_factor(DRAWN[0], STAGE, Version(version)) == factor
    assert table.budget_factor(DRAWN[0], StageIndex(0), Version(306)) == 1.0
    assert table.standing(DRAWN[0], Version(306)) is not Standing.SUSPICIOUS, "an alarm is no word on anybody"
    assert _after([BAN, later], member) == table
    assert _after([BAN]).budget_factor(DRAWN[0], STAGE, Version(300)) == 5.0


def test_whoever_was_never_a_member_sets_off_no_alarm() -> None:
    """A key costs nothing: neither does a ban that it brings upon itself."""
    thrown_away = replace(BAN, peer_id=PeerId("stranger"), version=Version(305))
    table = _after([BAN, thrown_away])
    assert table == _after([thrown_away, BAN])
    assert table.is_out(PeerId("stranger"))
    assert not table.was_member(PeerId("stranger"))
    assert table.budget_factor(DRAWN[0], STAGE, Version(311)) == 5.0
    assert table.budget_factor(DRAWN[0], STAGE, Version(312)) == 1.0, "twelve versions from the member's deed"


def test_a_suspicion_raises_the_budget_for_twenty_versions() -> None:
    table = _after(_events(Suspicion, 50, 40))
    for version, factor in ((49, 1.0), (50, 5.0), (69, 5.0), (70, 1.0)):
        assert table.budget_factor(ACCUSED, STAGE, Version(version)) == factor
        wanted = Standing.SUSPICIOUS if factor > 1 else Standing.MEMBER
        assert table.standing(ACCUSED, Version(version)) is wanted
    assert table.budget_factor(OTHER, STAGE, Version(55)) == 1.0
    assert _standing(_events(Suspicion, 50), version=55, founder=False) is Standing.PROBATION


def test_a_debt_puts_a_member_back_on_probation() -> None:
    debt = _events(AuditDebt, 50)
    assert _standing(debt) is Standing.PROBATION
    assert _standing([*debt, _promoted(50)]) is Standing.PROBATION  # not after the debt
    assert _standing([*debt, _promoted(51)]) is Standing.MEMBER
    assert _standing([_promoted(10), *debt], founder=False) is Standing.PROBATION
    assert _standing([*debt, _promoted(61), *_events(AuditDebt, 160)]) is Standing.PROBATION
    assert _after(debt).on_probation_since(ACCUSED) == 50
    assert _after([]).on_probation_since(ACCUSED) == -1


@pytest.mark.parametrize(
    ("versions", "wanted"),
    [
        ((1, 2), Standing.PROBATION),
        ((1, 1, 1, 2, 2), Standing.PROBATION),  # one in a version
        ((1, 2, 100), Standing.QUARANTINED),
        ((1, 2, 101), Standing.PROBATION),
        ((100, 1, 50), Standing.QUARANTINED),
        ((1, 90, 180, 270), Standing.PROBATION),
        ((1, 90, 180, 181), Standing.QUARANTINED),
        (tuple(range(0, 990, 60)), Standing.PROBATION),
        ((0, 1, 2, *range(200, 900, 60)), Standing.QUARANTINED),
    ],
)
def test_three_debts_in_a_hundred_versions_quarantine(versions: tuple[int, ...], wanted: Standing) -> None:
    assert _standing(_events(AuditDebt, *versions)) is wanted
    assert _standing([*_events(AuditDebt, *versions), _promoted(999)]) is (
        Standing.QUARANTINED if wanted is Standing.QUARANTINED else Standing.MEMBER
    )


def test_a_quarantine_lasts_until_the_pardon() -> None:
    quarantine = _quarantined(300)
    assert _standing([quarantine, _promoted(400)], version=100_000) is Standing.QUARANTINED
    assert _standing([quarantine, _pardoned(299, acquitted=True)]) is Standing.QUARANTINED
    assert _standing([quarantine, _pardoned(300, acquitted=True)]) is Standing.MEMBER
    assert _standing([quarantine, _pardoned(300, acquitted=True), _quarantined(301)]) is Standing.QUARANTINED


def test_a_fault_that_is_pardoned_begins_again_and_an_acquitted_peer_is_what_it_was() -> None:
    before = [_promoted(9), _quarantined(300)]
    for founder in (True, False):
        fault = [*before, _pardoned(310, acquitted=False)]
        assert _standing(fault, founder=founder) is Standing.PROBATION
        assert _standing([*fault, _promoted(310)], founder=founder) is Standing.PROBATION
        assert _standing([*fault, _promoted(311)], founder=founder) is Standing.MEMBER
        assert _standing([*fault, _pardoned(400, acquitted=True)], founder=founder) is Standing.PROBATION
        assert _standing([*before, _pardoned(310, acquitted=True)], founder=founder) is Standing.MEMBER
    assert _standing([_quarantined(300), _pardoned(310, acquitted=True)], founder=False) is Standing.PROBATION


def _fault(version: int) -> Event:
    return replace(QUARANTINE, version=Version(version), kind=FAULT)


@pytest.mark.parametrize(
    ("faults", "stays_out"),
    [((10, 40), False), ((10, 40, 109), True), ((10, 40, 110), False), ((10, 80, 120, 170), True)],
)
def test_a_fault_may_return_but_three_in_a_hundred_versions_stay_out(faults: tuple[int, ...], stays_out: bool) -> None:
    events: list[Event] = []
    for version in faults:
        events += [_fault(version), _pardoned(version, acquitted=False), _promoted(version + 1)]
    assert _standing(events) is (Standing.QUARANTINED if stays_out else Standing.MEMBER)
    table = _after([*events[:-2]])
    assert table.may_return(ACCUSED) is not stays_out
    assert table.is_out(ACCUSED)
    assert _standing([*events, _pardoned(200, acquitted=True)]) is Standing.MEMBER


def test_only_a_fault_may_return() -> None:
    assert not _after([_quarantined(300)]).may_return(ACCUSED)
    assert not _after([_fault(299), _quarantined(300)]).may_return(ACCUSED)
    assert not _after([_fault(300), BAN]).may_return(ACCUSED)
    assert not _after([_fault(300), *_events(AuditDebt, 301)]).may_return(ACCUSED)
    assert not _after([]).may_return(ACCUSED)
    assert _after([_quarantined(299), _fault(300)]).may_return(ACCUSED)


def test_a_pardon_covers_debts_and_suspicions_up_to_its_version() -> None:
    debts = _events(AuditDebt, 10, 20, 30)
    assert _standing([*debts, _pardoned(30, acquitted=True)]) is Standing.MEMBER
    assert _standing([*debts, _pardoned(29, acquitted=True)]) is Standing.PROBATION  # one is left
    assert _standing([*debts, _pardoned(30, acquitted=False)]) is Standing.PROBATION
    suspected = _events(Suspicion, 50)
    assert _standing([*suspected, _pardoned(50, acquitted=True)], version=55) is Standing.MEMBER
    assert _standing([*suspected, _pardoned(49, acquitted=True)], version=55) is Standing.SUSPICIOUS


def test_an_old_pardon_told_again_lifts_nothing_newer() -> None:
    pardon = _pardoned(300, acquitted=True)
    assert _standing([_quarantined(300), pardon, _quarantined(400), pardon]) is Standing.QUARANTINED


def test_a_ban_is_for_ever_and_before_all_else() -> None:
    lenient = [_pardoned(999, acquitted=True), _promoted(999)]
    for events in ([BAN, *lenient], [*lenient, BAN], [_quarantined(5), BAN, _pardoned(999, acquitted=False)]):
        assert _standing(events, version=100_000) is Standing.BANNED
    table = _after([BAN, replace(BAN, peer_id=OTHER)])
    assert table.banned == (ACCUSED, OTHER)
    assert _after([BAN]).standing(OTHER, NOW) is Standing.PROBATION


@pytest.mark.parametrize("made", [Suspicion, AuditDebt])
def test_nothing_is_seen_before_it_happens(made: Callable[[PeerId, Version], Event]) -> None:
    StandingTable().after(made(ACCUSED, Version(7)), Version(7))
    with pytest.raises(RemoteError) as caught:
        StandingTable().after(made(ACCUSED, Version(8)), Version(7))
    assert caught.value.kind == "standing"


def test_a_peers_record_stays_small() -> None:
    faults = [_fault(version) for version in range(1000)]
    table = _after([*_events(AuditDebt, *range(1000)), *faults, *_events(Suspicion, *range(1000))])
    (record,) = table.records.values()
    assert len(record.debts) == len(record.faults) == KEPT_DEBTS


VERSIONS = st.integers(0, 60).map(Version)
EVENT = st.one_of(
    *(st.builds(made, st.sampled_from(PEERS), VERSIONS) for made in (Suspicion, AuditDebt)),
    st.builds(
        lambda peer, version, kind: replace(QUARANTINE, peer_id=peer, version=version, kind=kind),
        st.sampled_from(PEERS),
        VERSIONS,
        st.sampled_from([FAULT, "withholding"]),
    ),
    st.builds(lambda peer, version: replace(BAN, peer_id=peer, version=version), st.sampled_from(PEERS), VERSIONS),
    st.builds(Pardon, st.just(RUN_ID), st.sampled_from(PEERS), VERSIONS, st.booleans()),
    st.builds(Promotion, st.just(RUN_ID), st.sampled_from(PEERS), st.just(StageIndex(1)), VERSIONS),
)
EVENTS = st.lists(EVENT, max_size=12)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data(), events=EVENTS)
def test_any_order_of_events_gives_the_same_table(data: st.DataObject, events: list[Event]) -> None:
    """Not of one version's alone: of all, and with some told twice."""
    again = events[: data.draw(st.integers(0, len(events)))]
    assert _after(data.draw(st.permutations([*events, *again]))) == _after(events)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(events=EVENTS)
def test_the_table_says_what_all_events_together_say(events: list[Event]) -> None:
    """The rules again, read off the whole history instead of the few versions that are kept."""
    table = _after(events)
    for peer in PEERS:
        mine = [event for event in events if event.peer_id == peer]
        for version in (0, 30, 60, 79, 80):
            assert table.standing(peer, Version(version)) is _told(mine, version, founder=peer == ACCUSED)


def _told(events: list[Event], version: int, *, founder: bool) -> Standing:
    def versions(kind: type) -> set[int]:
        return {event.version for event in events if isinstance(event, kind)}

    pardoned = max(versions(Pardon), default=-1)
    pardons = [event for event in events if isinstance(event, Pardon)]
    acquitted = max((event.version for event in pardons if event.acquitted), default=-1)
    begun_again = {event.version for event in pardons if not event.acquitted}
    quarantines = [event for event in events if isinstance(event, Quarantine)]
    faults = {event.version for event in quarantines if event.kind == FAULT and event.version > acquitted}
    debts = {debt for debt in versions(AuditDebt) if debt > pardoned}
    since = max(begun_again | debts, default=-1)
    if versions(Ban):
        return Standing.BANNED
    if max(versions(Quarantine), default=-1) > pardoned or max(len(debts), len(faults)) >= 3:  # all within 100 here
        return Standing.QUARANTINED
    if not (founder and since < 0) and max(versions(Promotion), default=-1) <= since:
        return Standing.PROBATION
    suspected = max(versions(Suspicion), default=-1)
    return Standing.SUSPICIOUS if pardoned < suspected <= version < suspected + 20 else Standing.MEMBER
