"""Charges without a case: they lapse, but only while the host is there to be brought one."""

import asyncio
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bootstrap.audit.charges import ANCHORS_TO_BRING, MOST_ANCHORS, VERSIONS_TO_BRING, OpenCharge, OpenCharges
from swarm.core.errors import RemoteError
from swarm.core.ids import PeerId, StageIndex, Step, Version
from swarm.core.round.contribution import Charge, Result
from swarm.core.seats import seats
from swarm.host_protocol import QUARANTINE
from swarm.network.memory import MemoryNetwork
from swarm.network.transport import Message
from tests.bootstrap.audit.test_justice import STAGE, Court, Past6, court, past  # noqa: F401
from verification.audit.evidence import Evidence
from verification.audit.tolerance import Grade
from verification.audit.verdicts import Accusation, JurorVote, Pardon, Quarantine
from verification.kinds.mismatch import accusation_of, charge_of, mismatch_of

EVERY = 8
ACCUSER, ACCUSED = PeerId("accuser"), PeerId("accused")
CHARGE = Charge(ACCUSED, b"c" * 32)


def result(step: int, charge: Charge = CHARGE, accuser: PeerId = ACCUSER) -> Result:
    made = (SimpleNamespace(peer_id=accuser, charges=(charge,)), SimpleNamespace(peer_id=PeerId("other"), charges=()))
    return cast(Result, SimpleNamespace(roster=SimpleNamespace(stage=STAGE, step=Step(step), committed=made)))


def charges(anchored: int = 96) -> OpenCharges:
    made = OpenCharges(EVERY)
    made.was_anchored(STAGE, anchored)
    return made


def anchors(held: OpenCharges, *versions: int) -> list[list[OpenCharge]]:
    return [held.anchored(STAGE, version) for version in versions]


EXPECTED = OpenCharge(STAGE, Step(97), ACCUSER, ACCUSED, CHARGE.digest)


def test_a_charge_without_its_case_lapses_after_sixteen_versions() -> None:
    held = charges()
    assert held.certified(result(97)) == [EXPECTED]
    assert anchors(held, 104, 112, 120, 128) == [[], [], [EXPECTED], []]
    assert 112 < 97 + VERSIONS_TO_BRING <= 120
    assert held.is_over(CHARGE)


def test_a_case_that_keeps_coming_is_waited_for_but_not_for_ever() -> None:
    held = charges()
    held.certified(result(97))
    lapsed = []
    for number in range(MOST_ANCHORS + 1):
        held.comes(ACCUSED)
        lapsed += held.anchored(STAGE, 104 + EVERY * number)
        assert (lapsed == [EXPECTED]) == (number + 1 >= MOST_ANCHORS)


def test_nothing_lapses_for_a_host_that_was_away() -> None:
    """Neither what was charged in that time nor what was charged before it."""
    held = charges()
    held.certified(result(97))
    assert held.certified(result(140)) == [], "the last anchor is of version 96"
    assert anchors(held, 144, 152, 160, 168, 176) == [[]] * 5
    assert not held.is_over(CHARGE), "what jurors found stands"
    assert held.certified(result(177)) == [replace(EXPECTED, step=Step(177))], "it is there again"


def test_nothing_lapses_either_for_its_next_process() -> None:
    """That reads what was charged before the host was away, and the anchors since."""
    held = charges()
    held.certified(result(97))
    held.was_anchored(STAGE, 160)
    assert anchors(held, 168, 176, 184) == [[]] * 3
    assert not held.is_over(CHARGE)


def test_no_stage_s_anchors_count_for_another() -> None:
    held = charges()
    held.was_anchored(StageIndex(0), 96)
    held.certified(result(97))
    for number in range(ANCHORS_TO_BRING + 3):
        assert held.anchored(StageIndex(0), 104 + EVERY * number) == []


def test_what_is_judged_lapses_no_more() -> None:
    held = charges()
    held.certified(result(97))
    held.certified(result(98, Charge(ACCUSED, bytes(32))))
    assert held.judged(PeerId("other"), [], is_true=True) == []
    assert held.judged(ACCUSED, [CHARGE], is_true=False) == [CHARGE]
    assert held.was_untrue(CHARGE)
    assert [one.digest for one in held.judged(ACCUSED, [], is_true=True)] == [bytes(32)]
    assert anchors(held, 104, 112, 120) == [[]] * 3


@pytest.mark.parametrize("is_true", [False, True])
def test_what_is_judged_before_any_round_bears_it_is_not_waited_for(is_true: bool) -> None:
    """Rounds of minutes are slower than the host: who accused rightly was struck for a charge without a case."""
    held = charges()
    assert held.judged(ACCUSED, [CHARGE], is_true=is_true) == [CHARGE]
    assert held.certified(result(97)) == []
    assert held.is_over(CHARGE)
    assert held.was_untrue(CHARGE) != is_true
    assert anchors(held, 104, 112, 120) == [[]] * 3


# -- with the host's justice --------------------------------------------------------------------------------


def juries(court: Court, accusation: Accusation) -> Quarantine:  # noqa: F811
    """What a jury of liars finds of it."""
    votes = tuple(
        JurorVote(*accusation.facts, court.past.auditor.peer_id, Step(2), juror, Grade.FRAUD, signature=bytes(64))
        for juror in seats(court.followed[STAGE].chain.basis.work_of)
        if juror not in (court.past.auditor.peer_id, court.past.target.peer_id)
    )
    return Quarantine(*accusation.facts, votes)


async def told_of(court: Court, found: Quarantine) -> None:  # noqa: F811
    """The host is."""
    message = Message({"quarantine": found.to_value()})
    await court.target.call(court.host.peer_id, QUARANTINE, message, timeout_s=5, max_body_bytes=0)


def untrue_case(court: Court) -> tuple[bytes, Charge, PeerId]:  # noqa: F811
    """Before an open court with its first anchor: a case, what is charged in it, and by whom."""
    court.open()
    court.justice._charges.was_anchored(STAGE, 0)
    body = court.past.untrue(2)
    charge = charge_of(Evidence.from_bytes(body, max_bytes=1 << 26))
    assert charge is not None
    return body, charge, court.past.auditor.peer_id


def test_a_lapsed_charge_strikes_its_bringers_and_lets_the_accused_in_again(court: Court) -> None:  # noqa: F811
    async def play() -> None:
        court.open()
        target, auditor = court.past.target.peer_id, court.past.auditor.peer_id
        every = court.prepared.settings.checkpoint.snapshot_every
        justice = court.justice
        for number in range(3):  # as by a jury that was bound to be believed
            facts = (court.prepared.run_id, target, STAGE, Version(1), "replay_mismatch", bytes([number]) * 32)
            accusation = Accusation(*facts)
            charge, found = Charge(target, accusation.digest()), juries(court, accusation)
            (juror,) = [vote.juror for vote in found.votes]
            justice.admit(juror, STAGE, bytes(32))
            justice._charges.was_anchored(STAGE, 200 * number)
            justice.certified(result(200 * number + 1, charge, auditor))
            justice._juries[target] = found
            justice._keep_out(target, STAGE, Version(1), found.kind, found.evidence_digest, "jurors found it guilty")
            assert justice._is_out(target)
            for version in range(200 * number + every, 200 * number + 16 + 3 * every, every):
                lapsed = justice._charges.anchored(STAGE, version)
                justice._are_over([one.charge for one in lapsed], is_true=False)
                await justice._lapse(lapsed)
            assert not justice._is_out(target)
            assert [event["event"] for event in court.events].count("pardoned") == number + 1
        kept_out = {peer for peer, kind in court.quarantined if kind == "false_accusation"}
        assert auditor in kept_out
        assert target not in kept_out
        with pytest.raises(RemoteError):
            await told_of(court, found)

    asyncio.run(play())


def test_a_charge_that_a_round_bears_after_the_verdict_on_anothers_lapses_not(court: Court) -> None:  # noqa: F811
    """Whoever brings the same liar's case second has it waved through: an honest accuser was struck for it."""

    async def play() -> None:
        _, charge, auditor = untrue_case(court)
        justice = court.justice
        for is_out in (False, True):
            if is_out:
                justice.bans[charge.accused] = cast(Any, None)
            justice.certified(result(2, charge, auditor))
            assert justice._charges.is_over(charge) == is_out
        every = court.prepared.settings.checkpoint.snapshot_every
        assert not any(justice._charges.anchored(STAGE, version) for version in range(every, 64, every))

    asyncio.run(play())


def test_jurors_who_find_what_was_found_untrue_are_struck_and_their_stage_hears_that_it_is_over(
    court: Court,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host is left to judge first: it had nothing to end yet, and members kept an honest peer out for good."""

    async def play() -> None:
        body, charge, auditor = untrue_case(court)
        target = charge.accused
        await court.accuse(body)
        assert [event["event"] for event in court.judged] == ["acquitted"]
        justice = court.justice
        justice.certified(result(2, charge, auditor))
        assert not justice._charges._open, "no round need bear what is judged"
        light = mismatch_of(Evidence.from_bytes(body, max_bytes=1 << 26)).without_past()
        found = juries(court, accusation_of(light.to_evidence(court.past.signed)))
        (juror,) = [vote.juror for vote in found.votes]
        justice.admit(juror, STAGE, bytes(32))
        monkeypatch.setattr("bootstrap.audit.justice.jury_of", lambda *of: None)
        monkeypatch.setattr(Quarantine, "check", lambda *of, **drawn: None)
        for again in ("judged, or has lapsed", "let in again since", "let in again since"):
            with pytest.raises(RemoteError, match=again):
                await told_of(court, found)
            await justice.told()
        heard = [word for word in court.told if isinstance(word, Pardon)]
        assert [(word.peer_id, word.acquitted, word.version >= found.version) for word in heard] == [
            (target, True, True)
        ]
        assert not justice._is_out(target)
        assert [number for _, number in justice._strikes.held[juror]] == [charge.digest]

    asyncio.run(play())


def test_charges_outlive_the_host_and_are_over_with_the_verdict(court: Court) -> None:  # noqa: F811
    async def play() -> None:
        body, charge, auditor = untrue_case(court)
        assert charge.accused == court.past.target.peer_id
        court.justice.certified(result(2, charge, auditor))
        court.ledger.close()
        court.network = MemoryNetwork(random.Random(0))
        court.open()
        held: Any = court.justice._charges
        assert [one.charge for one in held._open] == [charge]
        await court.accuse(body)
        assert [event["event"] for event in court.judged] == ["acquitted"]
        assert not held._open
        assert held.is_over(charge)
        court.ledger.close()
        court.network = MemoryNetwork(random.Random(0))
        court.open()
        assert court.justice._charges.was_untrue(charge)
        assert not court.justice._charges._open

    asyncio.run(play())
