"""When a run over emulated home links has been timed for long enough."""

from typing import Any

from benchmarks.homes.links import LEAST_STEPS, PEERS, TimedEnough

FIRST = {"event": "version", "version": 3, "at": 100.0}


def version(number: int, at: float) -> dict[str, Any]:
    return {"event": "version", "version": number, "at": at}


def steps(number: int, peers: tuple[str, ...] = PEERS) -> list[dict[str, Any]]:
    return [{"event": "step", "step": number, "peer_id": peer} for peer in peers]


def stops_at(events: list[dict[str, Any]], *, seconds: float) -> int | None:
    enough = TimedEnough(FIRST, seconds)
    return next((event["version"] for event in events if enough(event)), None)


def test_seconds_that_hold_one_step_are_not_enough() -> None:
    events = [*steps(2), FIRST, *steps(3), version(4, 109.0), *steps(4), version(5, 118.0), *steps(5)]
    assert LEAST_STEPS == 2
    assert stops_at(events, seconds=1.0) == 5
    assert stops_at(events[:-5], seconds=1.0) is None


def test_a_step_counts_once_its_version_is_there_and_all_peers_have_told_of_it() -> None:
    late = [*steps(3), *steps(4, PEERS[:3])]
    events = [FIRST, *late, version(5, 110.0), *steps(4, PEERS[3:]), version(6, 112.0)]
    assert stops_at(events, seconds=5.0) == 6
    early = [FIRST, *steps(3), *steps(4), version(4, 110.0)]
    assert stops_at(early, seconds=5.0) is None


def test_the_seconds_asked_for_are_waited_for() -> None:
    events = [FIRST, *(event for at in range(4, 9) for event in (*steps(at - 1), version(at, 100.0 + 5.0 * (at - 3))))]
    assert stops_at(events, seconds=20.0) == 7
