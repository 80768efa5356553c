"""Screens: norms outside the band of those before them are noticed, and make their sender suspicious."""

import math

import numpy as np
import pytest

from peer.pipeline.screens import KnownStanding, Screens
from swarm.averaging.codecs import vector_codec
from swarm.core.ids import PeerId, StageIndex, Version
from verification.audit.standing import SUSPICION_FACTOR, SUSPICION_VERSIONS
from verification.audit.verdicts import Ban, Pardon, Quarantine
from verification.pipeline.screens import FEWEST_SEEN, NormScreen

LIAR, HONEST = PeerId("liar"), PeerId("honest")
STAGE = StageIndex(1)


def warmed(*, band: float = 8.0, window: int = 16, norm: float = 2.0) -> NormScreen:
    screen = NormScreen(band=band, window=window)
    for _ in range(FEWEST_SEEN):
        assert screen.check(norm).ok
    return screen


@pytest.mark.parametrize(("norm", "ok"), [(2.0, True), (15.9, True), (0.26, True), (16.1, False), (0.24, False)])
def test_a_norm_trips_when_it_is_outside_the_band(norm: float, ok: bool) -> None:
    assert warmed(band=8.0, norm=2.0).check(norm).ok == ok


@pytest.mark.parametrize("norm", [0.0, math.inf, math.nan])
def test_zero_and_what_is_not_finite_trip(norm: float) -> None:
    screened = warmed().check(norm)
    assert not screened.ok
    assert str(norm)[:3] in screened.reason or "norm 0" in screened.reason


def test_nothing_trips_before_there_is_an_average() -> None:
    screen = NormScreen(band=2.0, window=4)
    assert all(screen.check(10.0**power).ok for power in range(FEWEST_SEEN))


def test_what_is_not_finite_does_not_move_the_average() -> None:
    screen = warmed(norm=2.0)
    screen.check(math.inf)
    screen.check(math.nan)
    assert screen.average == pytest.approx(2.0)


def test_one_liar_among_eight_does_not_shift_the_average_out_of_the_honest_band() -> None:
    screen = NormScreen(band=8.0, window=16)
    tripped = [screen.check(1e6 if number % 8 == 7 else 1.0) for number in range(400)]
    assert all(one.ok for number, one in enumerate(tripped) if number % 8 != 7)
    assert not any(one.ok for number, one in enumerate(tripped) if number % 8 == 7 and number > FEWEST_SEEN)


def test_norms_that_changed_for_good_are_believed_in_the_end() -> None:
    screen = warmed(band=8.0, window=16, norm=1.0)
    seen = [screen.check(1000.0).ok for _ in range(64)]
    assert not seen[0]
    assert seen[-1]
    assert seen == sorted(seen)


@pytest.mark.parametrize(("band", "window"), [(1.0, 4), (0.5, 4), (8.0, 0)])
def test_a_band_that_is_none_is_refused(band: float, window: int) -> None:
    with pytest.raises(ValueError, match="band of"):
        NormScreen(band=band, window=window)


def test_a_contribution_a_thousand_times_too_large_makes_its_maker_suspicious_for_twenty_versions() -> None:
    standing, version = KnownStanding(), Version(40)
    screens = Screens(standing, lambda: version)
    codec, chance = vector_codec("int8"), np.random.default_rng(1)

    def send(sender: PeerId, factor: float, part: int) -> None:
        values = (chance.standard_normal(4096) * factor).astype(np.float32)
        body = codec.encode(values, seed=bytes(32))
        screens.check_part(sender, part, codec, body, num_values=4096)

    for _ in range(FEWEST_SEEN):
        send(HONEST, 1.0, 0)
        send(HONEST, 1e-4, 1)  # another part has norms of its own
    assert screens.tripped == {}
    send(LIAR, -1000.0, 0)
    assert screens.tripped == {"contribution_norm": 1}
    assert standing.budget_factor(LIAR, STAGE, version) == SUSPICION_FACTOR
    assert standing.budget_factor(HONEST, STAGE, version) == 1.0
    assert standing.budget_factor(LIAR, STAGE, Version(version + SUSPICION_VERSIONS)) == 1.0
    assert standing.table.may_train(LIAR), "a screen is no verdict"


def test_norms_that_grow_at_all_peers_make_nobody_suspicious_and_one_that_grows_alone_does() -> None:
    """As activations do in the first steps of a run."""
    standing, version = KnownStanding(), Version(3)
    screens = Screens(standing, lambda: version)
    for number in range(40):
        for sender in (HONEST, LIAR):
            screens.check("activation_norm", sender, 3.0 * 1.2**number)
    assert screens.tripped == {}
    screens.check("activation_norm", LIAR, 3.0 * 1.2**40 * 100)
    assert screens.tripped == {"activation_norm": 1}
    assert standing.budget_factor(LIAR, STAGE, version) == SUSPICION_FACTOR
    assert standing.budget_factor(HONEST, STAGE, version) == 1.0
    screens.check("activation_norm", HONEST, math.nan)
    assert standing.budget_factor(HONEST, STAGE, version) == SUSPICION_FACTOR


def test_a_quarantined_peer_trains_again_after_its_pardon_and_a_banned_one_never() -> None:
    standing = KnownStanding()
    charge = ("run", LIAR, StageIndex(1), Version(7), "withholding", bytes(32))
    assert standing.table.may_train(LIAR)
    standing.take(Quarantine(*charge))
    assert not standing.table.may_train(LIAR)
    standing.take(Pardon("run", LIAR, Version(9), acquitted=False))
    assert standing.table.may_train(LIAR)
    standing.take(Ban(*charge))
    standing.take(Pardon("run", LIAR, Version(11), acquitted=True))
    assert not standing.table.may_train(LIAR)
