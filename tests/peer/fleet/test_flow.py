"""Compiled microbatches: peers are chosen as the daemon chooses them, and what a lost peer held goes on elsewhere."""

import random

import pytest

from peer.fleet import flow as flows
from peer.fleet.layout import Flow
from swarm.core.ids import PeerId, StageIndex
from swarm.core.pipeline.wiring import EarliestFinishWiring


def pipeline(*num_members: int, window: int = 4) -> Flow:
    """Peers alike: 1 s forward, 2 s backward, 0.1 s to send, 0.05 s away. One step of 1000 microbatches."""
    flow = flows.empty_flow(sum(num_members) + 2, 4, len(num_members), 512, delay_s=0.05)
    flow.peers["forward_s"], flow.peers["backward_s"], flow.peers["send_s"] = 1.0, 2.0, 0.1
    flow.peers["window"] = window
    flow.counters[flows.TARGET] = 1000
    peer = 0
    for stage, num in enumerate(num_members):
        for _ in range(num):
            flows.join(flow, peer, stage, 0.0)
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
    seconds = [10.0, 13.0, 21.0, 67.0]  # the last one always says that it has room, and is late
    for place, name in enumerate(names):
        wiring.told(name, 0.0, now=now)
        assert wiring.choose(now=now).peer_id == name
        wiring.finished(name, seconds[place])
        flows.finished(flow, 0, place, seconds[place])
    chosen = [0] * 4
    for _ in range(600):
        now += 1.0
        for place, name in enumerate(names):
            waits_s = 0.0 if place == 3 else rng.expovariate(0.3)
            flow.shown["backlog_s"][place + 1] = waits_s
            wiring.told(name, waits_s, now=now)
        place = flows.choose(flow, 0, 1, 0, now)
        assert names[place] == wiring.choose(now=now).peer_id
        wiring.finished(names[place], seconds[place])
        flows.finished(flow, 0, place, seconds[place])
        chosen[place] += 1
    assert min(chosen[:3]) > 60
    assert chosen[3] == 0


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


def test_lost_peer_costs_no_microbatch_but_a_sources_own() -> None:
    flow = pipeline(2, 3, 3, window=8)
    run_until(flow, 100.0)
    flows.lose(flow, 3, 100.0, 100.0)
    flows.lose(flow, 6, 100.0, 100.0)
    assert flow.counters[flows.KILLED] == 0
    assert flow.counters[flows.REDONE] > 0
    begun = int(flow.peers["in_flight"][0])
    flows.lose(flow, 0, 100.0, 100.0)
    killed, orphaned = int(flow.counters[flows.KILLED]), int(flow.counters[flows.ORPHANED])
    assert killed + orphaned == begun
    assert min(killed, orphaned) > 0
    flow.counters[flows.TARGET] = flow.counters[flows.GRANTED]  # no more are begun
    flow.counters[flows.LIMIT] = flow.counters[flows.STEP]
    run_until(flow, 1000.0)
    home = int(flow.counters[flows.COMPLETED])
    assert home + begun == flow.counters[flows.GRANTED]
    assert flow.stages[:, flows.VOID].tolist() == [begun, 0, 0], "what is lost was on its way home"
    assert flow.stages[:, flows.ADDED].tolist() == [home, home + begun, home + begun]
    assert flow.work["is_active"].sum() == 0


def test_what_outlived_its_source_is_lost_with_the_peer_after_it() -> None:
    flow = pipeline(2, 1, 3, window=8)
    run_until(flow, 100.0)
    flows.lose(flow, 0, 100.0, 100.0)
    killed, orphaned = int(flow.counters[flows.KILLED]), int(flow.counters[flows.ORPHANED])
    flows.join(flow, 6, 1, 100.0)
    flows.lose(flow, 2, 100.0, 100.0)
    lost = int(flow.counters[flows.KILLED]) - killed
    assert 0 < lost <= orphaned
    flow.counters[flows.TARGET] = flow.counters[flows.GRANTED]  # no more are begun
    flow.counters[flows.LIMIT] = flow.counters[flows.STEP]
    run_until(flow, 1000.0)
    added, void = flow.stages[:, flows.ADDED], flow.stages[:, flows.VOID]
    assert (added + void).tolist() == [flow.counters[flows.GRANTED]] * 3
    assert void[:2].tolist() == [killed + orphaned, killed + lost]
    assert flow.work["is_active"].sum() == 0


def test_only_the_lost_peers_stage_is_computed_again_for_the_rest_is_adopted() -> None:
    flow = pipeline(1, 2, 1, 1, window=1)
    flow.counters[flows.TARGET] = 1
    run_until(flow, 6.4)  # the last stage computes
    held_by = int(flow.holder[1, flow.work["is_active"] == 1][0])
    flows.lose(flow, held_by, 6.4, 6.4)
    run_until(flow, 100.0)
    assert flow.counters[flows.COMPLETED] == 1
    assert flow.trips_s[0] == pytest.approx(4 * 3 + 6 * 0.15)  # the replacement was ready in time


def test_audits_fill_the_gaps_and_are_all_made() -> None:
    flow = flows.empty_flow(2, 1, 2, 64, delay_s=0.05, audits=0.2, latest_audit_s=30.0)
    flow.peers["forward_s"], flow.peers["backward_s"], flow.peers["send_s"] = 1.0, [1.0, 2.0], 0.1
    flow.peers["window"], flow.counters[flows.TARGET] = 4, 1000
    for stage in (0, 1):
        flows.join(flow, stage, stage, 0.0)
    run_until(flow, 600.0)
    for peer in flow.peers[:2]:
        visit_s = float(peer["forward_s"] + peer["backward_s"])
        made_s = float(peer["audited_s"] + peer["owes_s"])
        assert made_s == pytest.approx(0.25 * int(flow.counters[flows.COMPLETED]) * visit_s, rel=0.05)
        assert peer["owes_s"] <= 30.0 + 1.0
    assert flow.counters[flows.COMPLETED] > 600 * 0.8 / 3 * 0.95  # as many as leave time for the audits


def test_microbatch_waits_for_a_stage_without_peers() -> None:
    flow = pipeline(1, 1, window=1)
    flow.counters[flows.TARGET] = 1
    flows.lose(flow, 1, 0.5, 0.5)
    run_until(flow, 10.0)
    assert flow.counters[flows.COMPLETED] == 0
    flows.join(flow, 2, 1, 10.0)
    run_until(flow, 20.0)
    assert flow.counters[flows.COMPLETED] == 1


def test_older_steps_go_first_and_of_a_step_what_came_first() -> None:
    flow = flows.empty_flow(2, 1, 2, 8, delay_s=0.05)
    come = [(7, 3.0), (8, 1.0), (7, 2.0), (8, 4.0), (6, 5.0)]
    flow.peers["queue"] = flow.peers["last"] = flows.NOTHING
    for work, (step, arrives_at) in enumerate(come):
        flow.work["step"][work], flow.work["arrives_at"][work] = step, arrives_at
        flows.link(flow, 0, work)
    order, work = [], int(flow.peers["queue"][0])
    while work >= 0:
        order.append(come[work])
        work = int(flow.work["next"][work])
    assert order == sorted(come)
    assert come[int(flow.peers["last"][0])] == order[-1]
    for work in (2, 4, 0, 3, 1):
        flows.unlink(flow, 0, work)
    assert flow.peers["queue"][0] == flow.peers["last"][0] == flows.NOTHING


def test_who_joins_for_a_later_step_gets_nothing_of_this_one() -> None:
    flow = pipeline(1, 1)
    flows.join(flow, 2, 1, 0.0, 1)
    flow.known["target"][0] = [2, 1, 2, 2]
    chosen = [[flow.known["target"][0, flows.choose(flow, 0, 1, step, 0.0)] for _ in range(40)] for step in (0, 1)]
    assert set(chosen[0]) == {1}
    assert set(chosen[1]) == {1, 2}
    run_until(flow, 100.0)
    assert flow.done[2].sum() == 0
