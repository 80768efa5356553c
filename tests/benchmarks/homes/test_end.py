"""What is counted of a run of strangers at home, from what was seen of it."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.homes.end import HOME_KINDS, LIAR, MODES, PlanOfThose, Watched, figures
from benchmarks.homes.punching import KINDS, can_be_punched
from swarm.core.plan import StagePlan

STAGES = 2
PEERS = {"home0": "a", LIAR: "liar", "home2": "b", "home3": "c"}
OF_STAGE = {"a": 0, "b": 0, "liar": 1, "c": 1}


class OneSecondAPeer(PlanOfThose):
    """A version takes a second for each peer of the larger stage, and what joins in a second; computing one second,
    exact work a tenth."""

    def __init__(self) -> None:
        self.asked: list[dict[str, float]] = []

    def stage(self, stage: int, peers: int, **supposed: float) -> StagePlan:
        made = object.__new__(StagePlan)
        vars(made).update(compute_s=1.0, exact_s=0.1)
        return made

    def step_s(self, peers: Any, joins_per_s: Any, **supposed: float) -> float:
        self.asked.append(supposed)
        return float(max(peers) + sum(joins_per_s))


def step(number: int, peer: str, *, counted: int = 2) -> dict[str, Any]:
    told = {"event": "step", "step": number, "peer_id": peer, "stage": OF_STAGE[peer], "counted": counted}
    # Computing took twice what a unit of the plan has, and the exact work three times that.
    return {**told, "num_targets": 50, "busy_s": 2.0 * number, "exact_s": 0.3 * number, "round_s": 0.5}


def watched(steps: list[dict[str, Any]], *others: dict[str, Any]) -> Watched:
    versions = [{"event": "version", "version": number, "at": 2.0 * number} for number in range(2, 5)]
    lines = [{"up_bytes": {"one": 600, "other": 400}}]
    events = [*steps, *versions, *others]
    return Watched(events, lines, versions[0], versions[-1], PEERS, ["one", "other"], 7, True, [])


def test_the_plan_is_of_those_who_had_work_in_each_version() -> None:
    steps = [step(number, peer) for number in (1, 2, 3) for peer in PEERS.values()]
    plan = OneSecondAPeer()
    found = figures(watched(steps), plan, STAGES)
    assert found["of_plan"] == pytest.approx(1.0)  # two versions, two peers of each stage in both, four seconds
    assert found["tokens_per_s"] == pytest.approx(2 * 2 * 50 / 4.0)
    assert plan.asked[0] == pytest.approx({"tflops": 0.5, "exact_ns": 3.0})
    alone = [one for one in steps if one["step"] != 3 or one["peer_id"] in ("a", "c")]
    idle = [{**one, "counted": 0} if one["peer_id"] in ("b", "liar") else one for one in steps]
    for fewer in (alone, idle):
        assert figures(watched(fewer), OneSecondAPeer(), STAGES)["of_plan"] < 1.0
    came = [{"event": "admitted", "peer_id": "b", "stage": 0, "at": at} for at in (3.9, 4.1, 7.0)]
    joined = figures(watched(steps, *came), OneSecondAPeer(), STAGES)
    assert joined["joins"] == [2, 0], "but for who came before anything counted"
    assert joined["planned_step_s"] == pytest.approx(2.0 + 2 / 4.0)
    assert found["relayed_share"] == 7 / 1000
    assert found["peers_at_work"] == [2, 2]


def test_who_comes_back_counts_its_seconds_from_nothing() -> None:
    steps = [step(number, peer) for number in (1, 2, 3) for peer in ("a", "liar", "c")]
    steps += [step(1, "b"), {**step(3, "b"), "busy_s": 0.0, "exact_s": 0.0}]
    plan = OneSecondAPeer()
    figures(watched(steps), plan, STAGES)
    assert plan.asked[0] == pytest.approx({"tflops": 0.5, "exact_ns": 3.0})


def test_the_liar_is_told_apart_from_others_who_are_out() -> None:
    steps = [step(number, peer) for number in (1, 2, 3) for peer in PEERS.values()]
    seen = watched(steps)
    assert figures(seen, OneSecondAPeer(), STAGES)["liar_out"] is None
    outs = [
        {"event": "quarantined", "peer_id": "liar", "kind": "charges", "step": 3},
        {"event": "banned", "peer_id": "c", "kind": "activation", "step": 4},
    ]
    found = figures(replace(seen, events=[*seen.events, *outs]), OneSecondAPeer(), STAGES)
    assert found["liar_out"] == {"how": "quarantined", "for": "charges", "step": 3}
    assert found["others_out"] == ["banned for activation"]


def test_any_two_homes_can_be_punched_and_no_stage_is_all_liars() -> None:
    assert set(HOME_KINDS) <= set(KINDS)
    assert all(can_be_punched(one, other) for one in HOME_KINDS for other in HOME_KINDS)
    for mode in MODES.values():
        assert len(HOME_KINDS) % mode.stages == 0
        assert list(mode.stage_of.values()).count(mode.stage_of[LIAR]) > 1
