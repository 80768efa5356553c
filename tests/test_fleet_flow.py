"""Compiled microbatches: peers are chosen as the daemon chooses them, and what a lost peer held goes on elsewhere."""

import random

import numpy as np
import pytest

from peer.fleet import flow as flows
from peer.fleet.flow import Flow
from swarm.core.ids import PeerId, StageIndex
from swarm.core.wiring import EarliestFinishWiring


def pipeline(*num_members: int, window: int = 4, redo_stage: bool = False) -> Flow:
    """Peers alike: 1 s forward, 2 s backward, 0.1 s to send, 0.05 s away. One step of 1000 microbatches."""
    flow = flows.empty_flow(sum(num_members) + 2, 4, len(num_members), 512, delay_s=0.05, redo_stage=redo_stage)
    flow.peers["forward_s"], flow.peers["backward_s"], flow.peers["send_s"] = 1.0, 2.0, 0.1
    flow.peers["window"] = window
    flow.counters[flows.TARGET] = 1000
    peer = 0
    for stage, num in enumerate(num_members):
        for _ in range(num):
            flows.join(flow, peer, stage)
            peer += 1
    flows.start_all(flow, 0.0)
    return flow


def run_until(flow: Flow, until: float) -> None:
    """A stage whose step is full stops the clock, for the fleet to begin its round: here nobody does."""
    while flows.advance(flow, until)[1] >= 0:
        pass


def test_choices_are_those_of_the_daemons_wiring() -> None:
    flow = pipeline(1, 4)
    names = [PeerId(f"p{place}") for place in range(4)]
    wiring = EarliestFinishWiring(StageIndex(1), random.Random(0))
    wiring.update(set(names))
    flow.known["target"][0] = [1, 2, 3, 4]
    rng, now = random.Random(5), 0.0
    seconds = [1.0, 1.3, 2.1, 4.7]
    open_calls: list[tuple[float, int, float, int]] = []
    same = 0
    for _ in range(600):
        now += rng.expovariate(1.5)
        while open_calls and min(open_calls)[0] <= now:
            call = min(open_calls)
            open_calls.remove(call)
            ends_at, place, duration_s, load = call
            wiring.finished(names[place], duration_s)
            flows.finished(flow, 0, place, duration_s, load)
        place = flows.choose(flow, 0, 1, now)
        theirs = names.index(wiring.choose(now=now).peer_id)
        if theirs != place:  # a tie: go on with the daemon's
            each = [_expected(flow, at, now) for at in (place, theirs)]
            assert each[0] == pytest.approx(each[1], rel=1e-9)
        same += theirs == place
        load = flows.sent(flow, 0, theirs, now)
        # Answered in the order sent, and never so late that this tells of the peer: the two rules that differ.
        ends_at = max([now + seconds[theirs], *(end for end, at, *_ in open_calls if at == theirs)]) + 1e-6
        open_calls.append((ends_at, theirs, seconds[theirs], load))
    assert same > 580


def _expected(flow: Flow, place: int, now: float) -> float:
    known = flow.known[0]
    measured = known[known["duration_s"] >= 0]
    each_s = float(np.mean(measured["duration_s"] / measured["load"])) if len(measured) else 1.0
    best_s = float(measured["duration_s"].min()) if len(measured) else 0.0
    one = known[place]
    duration_s, load = float(one["duration_s"]), float(one["load"])
    if duration_s < 0 or (one["pending"] == 0 and now > one["last_sent_at"] + 20 * duration_s):
        duration_s, load = best_s, 1.0
    return duration_s + each_s * (int(one["pending"]) + 1 - 0.75 * load)


def test_one_microbatch_takes_the_time_of_its_parts() -> None:
    flow = pipeline(1, 1, 1, window=1)
    flow.counters[flows.TARGET] = 1
    run_until(flow, 100.0)
    assert flow.counters[flows.COMPLETED] == 1
    assert flow.trips_s[0] == pytest.approx(3 * (1 + 2) + 4 * (0.1 + 0.05))


def test_pipeline_is_as_fast_as_its_slowest_stage() -> None:
    flow = pipeline(4, 2, 4, window=16)
    run_until(flow, 600.0)
    assert flow.counters[flows.COMPLETED] / 600 == pytest.approx(2 / 3, rel=0.1)


@pytest.mark.parametrize("redo_stage", [False, True])
def test_lost_peer_costs_no_microbatch_but_a_sources_own(redo_stage: bool) -> None:
    flow = pipeline(2, 3, 3, window=8, redo_stage=redo_stage)
    run_until(flow, 100.0)
    flows.lose(flow, 3, 100.0, 100.0)
    flows.lose(flow, 6, 100.0, 100.0)
    assert flow.counters[flows.KILLED] == 0
    assert flow.counters[flows.REDONE] > 0
    flows.lose(flow, 0, 100.0, 100.0)
    assert flow.counters[flows.KILLED] == flow.counters[flows.ORPHANED] == 8
    flow.counters[flows.TARGET] = flow.counters[flows.GRANTED]  # no more are begun
    flow.counters[flows.LIMIT] = flow.counters[flows.STEP]
    run_until(flow, 1000.0)
    assert flow.counters[flows.COMPLETED] + flow.counters[flows.KILLED] == flow.counters[flows.GRANTED]
    assert flow.work["is_active"].sum() == 0


def test_only_the_lost_peers_stage_is_computed_again_if_the_rest_is_adopted() -> None:
    ends = []
    for redo_stage in (False, True):
        flow = pipeline(1, 2, 1, 1, window=1, redo_stage=redo_stage)
        flow.counters[flows.TARGET] = 1
        run_until(flow, 6.4)  # the last stage computes
        held_by = int(flow.holder[1, flow.work["is_active"] == 1][0])
        flows.lose(flow, held_by, 6.4, 6.4)
        run_until(flow, 100.0)
        assert flow.counters[flows.COMPLETED] == 1
        ends.append(float(flow.trips_s[0]))
    assert ends[1] == pytest.approx(4 * 3 + 6 * 0.15)  # the replacement was ready in time
    assert ends[0] > ends[1] + 4


def test_microbatch_waits_for_a_stage_without_peers() -> None:
    flow = pipeline(1, 1, window=1)
    flow.counters[flows.TARGET] = 1
    flows.lose(flow, 1, 0.5, 0.5)
    run_until(flow, 10.0)
    assert flow.counters[flows.COMPLETED] == 0
    flows.join(flow, 2, 1)
    run_until(flow, 20.0)
    assert flow.counters[flows.COMPLETED] == 1
