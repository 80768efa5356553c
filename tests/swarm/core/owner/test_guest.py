"""A guest's manners: each of the owner's limits alone decides when the peer works, pauses or goes away."""

import random

import pytest

from swarm.core.errors import SettingsError
from swarm.core.owner.guest import GIB, LEAVE_AFTER_S, QUIET_S, Conduct, Guest, Reading
from swarm.core.owner.limits import LIMITS, NONE, Hours, OwnerLimits
from tests import ROOT

NIGHT = OwnerLimits().with_value("hours", "22:00-07:00")


def _conduct(limits: OwnerLimits, **facts: object) -> Conduct:
    reading = Reading(**{"minute_of_day": 0, **facts})  # type: ignore[arg-type]
    return Guest(limits).decide(reading, now=0.0).conduct


def test_a_peer_without_limits_works() -> None:
    spent = {"month_bytes": 10**15, "disk_bytes": 10**15, "written_today_bytes": 10**15, "others_cpu_percent": 100.0}
    assert _conduct(OwnerLimits(), **spent, on_battery=None) is Conduct.WORK


@pytest.mark.parametrize(
    ("name", "value", "below", "at"),
    [
        ("month-gb", "2", {"month_bytes": 2 * 10**9 - 1}, {"month_bytes": 2 * 10**9}),
        ("disk-gib", "1", {"disk_bytes": GIB}, {"disk_bytes": GIB + 1}),
        ("disk-writes-gib", "1", {"written_today_bytes": GIB - 1}, {"written_today_bytes": GIB}),
    ],
)
def test_what_is_spent_sends_away(name: str, value: str, below: dict[str, int], at: dict[str, int]) -> None:
    limits = OwnerLimits().with_value(name, value)
    assert _conduct(limits, **below) is Conduct.WORK
    assert _conduct(limits, **at) is Conduct.AWAY


@pytest.mark.parametrize(
    ("name", "value", "below", "above"),
    [
        ("busy-cpu", "40", {"others_cpu_percent": 40.0}, {"others_cpu_percent": 40.1}),
        ("busy-gpu", "10%", {"others_gpu_percent": 10.0}, {"others_gpu_percent": 10.1}),
        ("on-battery", "pause", {"on_battery": False}, {"on_battery": True}),
    ],
)
def test_what_lasts_a_moment_pauses(name: str, value: str, below: dict[str, float], above: dict[str, float]) -> None:
    limits = OwnerLimits().with_value(name, value)
    assert _conduct(limits, **below) is Conduct.WORK
    assert _conduct(limits, **above) is Conduct.PAUSE


def test_a_laptop_may_work_on_battery_when_told() -> None:
    assert _conduct(OwnerLimits(on_battery="work"), on_battery=True) is Conduct.WORK


def test_what_cannot_be_told_stops_nothing() -> None:
    assert _conduct(OwnerLimits(busy_cpu=1.0, busy_gpu=1.0)) is Conduct.WORK


@pytest.mark.parametrize(
    ("minute", "works"),
    [(21 * 60 + 59, False), (22 * 60, True), (0, True), (6 * 60 + 59, True), (7 * 60, False), (12 * 60, False)],
)
def test_hours_that_pass_midnight(minute: int, works: bool) -> None:
    decision = Guest(NIGHT).decide(Reading(minute_of_day=minute), now=0.0)
    assert decision.conduct is (Conduct.WORK if works else Conduct.AWAY)
    assert works or decision.reason == "outside the hours 22:00-07:00: again at 22:00"


def test_a_busy_machine_is_left_alone_until_it_has_been_quiet() -> None:
    guest = Guest(OwnerLimits(busy_cpu=40.0))
    busy = Reading(minute_of_day=0, others_cpu_percent=90.0)
    quiet = Reading(minute_of_day=0, others_cpu_percent=5.0)
    assert guest.decide(busy, now=0.0).reason == "other programs use 90 % of the processor, more than 40 %"
    assert guest.decide(quiet, now=QUIET_S - 1).conduct is Conduct.PAUSE
    assert guest.decide(quiet, now=QUIET_S).conduct is Conduct.WORK


def test_a_long_pause_becomes_a_leave_and_ends_all_the_same() -> None:
    guest = Guest(OwnerLimits())
    asked = Reading(minute_of_day=0, asked_to_pause=True)
    assert guest.decide(asked, now=5.0).conduct is Conduct.PAUSE
    assert guest.decide(asked, now=5.0 + LEAVE_AFTER_S).conduct is Conduct.PAUSE
    assert guest.decide(asked, now=6.0 + LEAVE_AFTER_S).conduct is Conduct.AWAY
    assert guest.decide(Reading(minute_of_day=0), now=7.0 + LEAVE_AFTER_S).conduct is Conduct.WORK


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.name)
def test_a_limit_is_read_as_it_is_written(limit: object) -> None:
    name, example = limit.name, limit.example  # type: ignore[attr-defined]
    limits = OwnerLimits().with_value(name, example)
    assert limits.get(name) == example
    assert OwnerLimits().changed(limits.written()) == limits
    if name not in ("on-battery", "router-ports", "nice"):
        assert limits.with_value(name, NONE) == OwnerLimits()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("threads", text) for text in ("0", "-1", "1.5", "", "²")),
        *(("upload-mbit", text) for text in ("0", "nan", "inf", "fast", "-3")),
        *(("hours", text) for text in ("", "7-8", "24:00-01:00", "07:00-07:00", "07:60-08:00", "07:00", "7:00-8:00,")),
        *(("on-battery", text) for text in ("none", "sleep")),
        *(("router-ports", text) for text in ("none", "no")),
        *(("nice", text) for text in ("20", "-1", "none", "low")),
        ("busy-cpu", "101"),
        ("speed", "1"),
    ],
)
def test_nonsense_is_refused_by_name(name: str, text: str) -> None:
    with pytest.raises(SettingsError, match=name):
        OwnerLimits().with_value(name, text)


def test_hours_agree_with_a_minute_by_minute_list() -> None:
    rng = random.Random(5)
    for _ in range(50):
        start, stop = rng.sample(range(24 * 60), 2)
        inside, minute = set(), start
        while minute != stop:
            inside.add(minute)
            minute = (minute + 1) % (24 * 60)
        hours = Hours(((start, stop),))
        assert {minute for minute in range(24 * 60) if hours.include(minute)} == inside


def test_the_guide_explains_every_limit() -> None:
    guide = (ROOT / "docs" / "volunteer.md").read_text(encoding="utf-8")
    assert [limit.name for limit in LIMITS if f"`{limit.name}`" not in guide] == []
