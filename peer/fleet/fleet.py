"""A simulated fleet: who comes, downloads, proves itself, trains, moves and goes, on a virtual clock.

Placement, moves and deadlines are decided by the daemon's own objects in `swarm.core`; microbatches pass in
`peer.fleet.flow`. The oracle that throughput is compared with has the same members at every moment, with the same
links, downloads and probation behind them, but always in perfect balance, never idle, and it loses nothing.
"""

import heapq
import itertools
import math
import random
import statistics
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from peer.fleet import flow as flows
from peer.fleet import waited_step
from peer.fleet.scenario import Event, Scenario
from swarm.core.directory.rebalancing import Placement, best_stage, plan_moves
from swarm.core.ids import PeerId, StageIndex
from swarm.core.pipeline.deadlines import AdaptiveDeadline
from verification.audit.draws import AuditBudget, contribution_rate, detection, found_by_one, microbatch_rate

HEADERS = 1.05
"""Bytes on the line for each byte of a message, as in `swarm.core.plan`."""
PACKET_BYTES = 1460
DONORS, DONOR_SHARE = 8, 0.25
"""A joiner's chunks come from so many donors, each of which gives that share of its uplink. It asks twice as many, and
takes those that give least to others."""
DONOR_MOST = 0.75
"""Of a donor's uplink, to all joiners together."""
REVEALED_AFTER = 2
SAMPLE_S = 10.0
LONGEST_STEP = 2.0
"""A step's grants end at this multiple of `model.step_s`, whatever has been granted."""
RECOVERED = 0.9
"""A disturbance is over when throughput, as a share of the ideal, is back at this share of what it was before."""
RECENT = 12
"""Samples that say what throughput is now."""

RECORD_BYTES = 400
"""A signed record of a peer in the directory: addresses, stage, power, expiry, key and signature."""
RECORD_COPIES = 5
"""Nodes of the directory that hold a record."""
CALL_BYTES = 250
"""A small call and its answer, headers included: watches, grants, votes, and each question whether a peer has room."""
BUCKETS = 16
"""Of a stage's records, one of which is read to learn of the stage as a whole."""


@dataclass
class Stay:
    """A peer's time as a member of a stage; times from the end of the warm-up."""

    stage: int
    power: float
    joined_at: float
    ended_at: float | None = None
    """None if it never ended."""


@dataclass(slots=True)
class _Peer:
    """One machine, from its coming to its going."""

    name: PeerId
    power: float
    leaves_at: float
    is_warned: bool
    is_liar: bool = False
    slot: int = -1
    stage: int = -1
    """Where it is, or is on the way to."""
    state: str = "joining"
    """joining, waiting (for admission), member, draining, moving, gone"""
    is_proven: bool = False
    settled_at: float = 0.0
    banned_at: int = -1
    useful_power: float = 0.0
    """In its stage."""
    rate: float = 0.0
    """What it could do in a second, of all stages' work for one microbatch."""
    in_oracle: bool = False
    gives: int = 0
    """Joiners that download from it."""
    stay: Stay | None = None
    """While it is a member."""

    def serves(self, stage: int) -> bool:
        """Whether it is there, as a member or about to be one."""
        return self.slot >= 0 and self.stage == stage


@dataclass
class Outcome:
    """What came of it."""

    scenario: Scenario
    wall_s: float = 0.0
    cpu_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    useful: float = 0.0
    """Microbatches added to sums less those lost with them or refuted; a stage counts by its share of the work."""
    ideal: float = 0.0
    """Microbatches that the oracle does in the same time."""
    recoveries_s: list[float] = field(default_factory=list)
    disturbances: list[dict[str, float | str | None]] = field(default_factory=list)
    series: list[tuple[float, float, float, int, int]] = field(default_factory=list)
    """(time, done a second, ideal a second, peers, members), every SAMPLE_S; times from the end of the warm-up."""
    stage_bytes: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    peer_seconds: float = 0.0
    decide_s: list[float] = field(default_factory=list)
    """Real seconds that each look at who should move took."""
    trip_s: float = 0.0
    versions: list[tuple[float, int]] = field(default_factory=list)
    """When every stage had each version, from the first on, and microbatches that came home with it; times from the end
    of the warm-up."""
    stays: list[Stay] = field(default_factory=list)

    @property
    def throughput_vs_ideal(self) -> float:
        return self.useful / self.ideal if self.ideal else 0.0


class Fleet:
    """One simulation."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.rng = random.Random(f"fleet/{scenario.run.seed}")
        self.now = 0.0
        self.outcome = Outcome(scenario)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._names = itertools.count()
        self._peers: set[int] = set()
        model, part = scenario.model, scenario.fleet
        self._costs = scenario.costs
        self._num_stages = model.stages
        self._until = scenario.run.warm_up_s + scenario.run.measured_s
        num_slots = self._num_slots()
        up_bytes_per_s = part.up_mbit * 125_000 * part.link_use / HEADERS
        self._down_bytes_per_s = part.down_mbit * 125_000 * part.link_use / HEADERS
        round_share = model.round_mbytes * 1e6 / model.step_s / up_bytes_per_s
        if round_share >= 1:
            raise ValueError(f"a round of {model.round_mbytes:g} MB takes longer than model.step_s = {model.step_s:g}")
        self._up_bytes_per_s = up_bytes_per_s
        self._send_s = model.activation_mbytes * 1e6 / (up_bytes_per_s * (1 - round_share))
        packets = model.activation_mbytes * 1e6 / PACKET_BYTES
        round_trip_s = part.round_trip_ms / 1000
        resends = math.log(packets) / math.log(1 / part.loss) if part.loss > 0 and packets > 1 else 0.0
        self._delay_s = round_trip_s / 2 + resends * round_trip_s
        # A microbatch's whole way through an idle pipeline of median peers.
        work_s = model.microbatch_compute_s / (1 - scenario.trust.audits)
        self._trip_s = work_s + 2 * (self._num_stages - 1) * (self._send_s + self._delay_s)
        self._fill_s = part.pipeline_fill * self._trip_s
        mean_power = math.exp(part.power_spread**2 / 2)
        num_work = int(
            (64 + 2 * max(part.peers / self._num_stages, *part.first_stages, 1))
            * (2 + (part.max_in_flight or self._fill_s / self._source_s(mean_power)))
        )
        self.flow = flows.empty_flow(
            num_slots,
            part.fanout,
            self._num_stages,
            num_work,
            delay_s=self._delay_s,
            ask_s=round_trip_s,
            audits=scenario.trust.audits,
            latest_audit_s=scenario.trust.audits * model.step_s,
            knows_all=part.peers <= part.fanout,
        )
        self._slots: deque[int] = deque(range(num_slots))
        self._by_slot: dict[int, _Peer] = {}
        self._present: dict[PeerId, _Peer] = {}
        self._counted = [0] * self._num_stages
        """Peers of each stage, those on their way to it included."""
        self._power = [0.0] * self._num_stages
        self._waiting: list[list[_Peer]] = [[] for _ in range(self._num_stages)]
        self._version = [0] * self._num_stages
        """Rounds that have ended."""
        self._places = [0] * self._num_stages
        """Newcomers that each stage may still take with its present version."""
        self._left = [0] * self._num_stages
        """Members that each stage has lost since its last version."""
        self._in_round: list[list[tuple[_Peer, int]] | None] = [None] * self._num_stages
        self._ready: list[_Peer] = []
        """Who waits for the oracle's next version."""
        self._oracle_left = 0
        """Whom the oracle has lost since its last."""
        self._deadline = AdaptiveDeadline(limit_s=4 * self._fill_s + model.step_s, floor_s=5.0, factor=1.5)
        self._expiry_set = -1
        self._granting, self._granting_since = -1, 0.0
        self._ideal_rate = 0.0
        self._ideal_since = 0.0
        self._done_before = 0
        self._came_home: dict[int, int] = {}
        """By step, what stage 0 took into its round."""

    # -- running ------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        flows.compile_all()
        begun, begun_cpu = time.perf_counter(), time.process_time()
        self._begin()
        while self._queue and self.now < self._until:
            at, _, act = self._queue[0]
            now, stage = flows.advance(self.flow, min(at, self._until))
            self.now = now
            if stage >= 0:
                self._close_if_full(stage)
                continue
            if at > self._until:
                break
            heapq.heappop(self._queue)
            act()
        self._tell_ideal()
        self.outcome.useful += self._added()
        counters, outcome = self.flow.counters, self.outcome
        outcome.counts["wiring_choices"] = int(counters[flows.CHOICES])
        outcome.counts["completed_microbatches"] = int(counters[flows.COMPLETED])
        outcome.counts["lost_microbatches"] = int(counters[flows.KILLED])
        outcome.counts["outlived_their_source"] = int(counters[flows.ORPHANED])
        outcome.counts["redone_hops"] = int(counters[flows.REDONE])
        asked = int(counters[flows.CHOICES]) * self.scenario.fleet.fanout
        outcome.stage_bytes["control"] += asked * CALL_BYTES
        outcome.stage_bytes["activations"] = float(counters[flows.SENT]) * self.scenario.model.activation_mbytes * 1e6
        outcome.trip_s = self._median_trip_s()
        outcome.wall_s, outcome.cpu_s = time.perf_counter() - begun, time.process_time() - begun_cpu
        return outcome

    def _at(self, at: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (at, next(self._order), act))

    def _num_slots(self) -> int:
        crowds = sum(event.share for event in self.scenario.events if event.kind == "crowd")
        return int(self.scenario.fleet.peers * (1.6 + crowds)) + 256

    def _begin(self) -> None:
        scenario, part = self.scenario, self.scenario.fleet
        law = scenario.law
        stays = law.draw_present(part.peers, self.rng) if law is not None else [math.inf] * part.peers
        for number, stay_s in enumerate(stays):
            peer = self._new_peer(stay_s, part.powers[number] if part.powers else None)
            peer.stage = self._first_stage(number)
            peer.is_proven = True
            self._placed(peer, +1)
            self._admit(peer)
            self._oracle_has(peer, is_there=True)
        power = sum(peer.useful_power for peer in self._present.values())
        self.flow.counters[flows.TARGET] = scenario.model.microbatches or max(
            self._num_stages, round(power / sum(self._costs) * scenario.model.step_s)
        )
        self.flow.counters[flows.LIMIT] = scenario.model.delay
        for stage in range(self._num_stages):
            self._open_places(stage)
        flows.start_all(self.flow, 0.0)
        if law is not None:
            self._at(self.rng.expovariate(part.peers / law.mean_s), self._someone_comes)
        self._at(scenario.run.warm_up_s, self._begin_to_measure)
        self._at(scenario.run.decide_s, self._decide)
        self._at(scenario.model.step_s, self._oracles_version)
        self._at(SAMPLE_S, self._sample)
        for event in scenario.events:
            self._at(scenario.run.warm_up_s + event.at_s, lambda event=event: self._befall(event))  # type: ignore[misc]

    def _first_stage(self, number: int) -> int:
        first = self.scenario.fleet.first_stages
        if not first:
            return self._lowest_stage()
        return next(stage for stage, end in enumerate(itertools.accumulate(first)) if number < end)

    # -- coming and going ---------------------------------------------------------------------------------

    def _new_peer(self, stay_s: float, power: float | None = None) -> _Peer:
        part = self.scenario
        peer = _Peer(
            name=PeerId(f"{self.rng.getrandbits(64):016x}{next(self._names):06x}"),
            power=self.rng.lognormvariate(0.0, part.fleet.power_spread) if power is None else power,
            leaves_at=self.now + stay_s,
            is_warned=self.rng.random() < part.sessions.warned,
            is_liar=self.rng.random() < part.trust.liars,
        )
        self._present[peer.name] = peer
        if math.isfinite(stay_s):
            self._at(peer.leaves_at, lambda: self._leave(peer))
        return peer

    def _someone_comes(self) -> None:
        law = self.scenario.law
        assert law is not None
        self._come(law.draw(self.rng))
        self._at(self.now + self.rng.expovariate(self.scenario.fleet.peers / law.mean_s), self._someone_comes)

    def _come(self, stay_s: float, power: float | None = None) -> None:
        peer = self._new_peer(stay_s, power)
        peer.stage = self._lowest_stage()
        self.outcome.counts["joins"] += 1
        self._placed(peer, +1)
        self._download(peer)

    def _lowest_stage(self) -> int:
        capacity = [power / cost for power, cost in zip(self._power, self._costs, strict=True)]
        self.outcome.counts["placements"] += 1
        return best_stage(self._counted, capacity, min_replicas=self.scenario.run.min_replicas).stage

    def _placed(self, peer: _Peer, sign: int) -> None:
        if sign > 0:
            peer.useful_power = self._useful_power(peer)
        self._counted[peer.stage] += sign
        self._power[peer.stage] += sign * peer.useful_power

    def _useful_power(self, peer: _Peer) -> float:
        """Work a second that others see the peer do in its stage, where its uplink may be the limit."""
        sends = 1 if peer.stage in (0, self._num_stages - 1) else 2
        cost = self._costs[peer.stage]
        return cost / max(cost / peer.power / (1 - self.scenario.trust.audits), sends * self._send_s)

    def _download(self, peer: _Peer) -> None:
        """Of the stage's state, from its members, a bounded share of whose uplinks it takes."""
        peer.state = "joining" if peer.state == "joining" else "moving"
        flow, stage = self.flow, peer.stage
        num = int(flow.stages[stage, flows.MEMBERS])
        asked = [self._by_slot[flow.members[stage, at]] for at in self.rng.sample(range(num), min(2 * DONORS, num))]
        holders = sorted(asked, key=lambda donor: donor.gives)[:DONORS]
        shares = [min(DONOR_SHARE, DONOR_MOST / (donor.gives + 1)) for donor in holders]
        given = (sum(shares) or DONOR_SHARE) * self._up_bytes_per_s  # without members the host gives
        size = self.scenario.model.state_mbytes * 1e6
        seconds = size / min(self._down_bytes_per_s, given)
        for donor in holders:
            self._burden(donor, +1)
        self.outcome.stage_bytes["states"] += size

        def downloaded() -> None:
            for donor in holders:
                if donor.serves(stage):
                    self._burden(donor, -1)
            if peer.state == "gone":
                return
            replays = 0 if peer.is_proven else self.scenario.trust.probation_replays
            visit_s = self._costs[peer.stage] / peer.power
            self._at(self.now + replays * visit_s, lambda: self._wait_for_admission(peer))

        self._at(self.now + seconds, downloaded)

    def _burden(self, peer: _Peer, more: int) -> None:
        """The uplink of a donor has less, or again more, for activations."""
        peer.gives += more
        self.flow.peers["send_s"][peer.slot] = self._send_beside_s(peer)
        self._set_rate(peer)

    def _send_beside_s(self, peer: _Peer) -> float:
        """Of one activation, beside what the peer gives to joiners."""
        return self._send_s / (1 - min(DONOR_SHARE * peer.gives, DONOR_MOST))

    def _wait_for_admission(self, peer: _Peer) -> None:
        if peer.state == "gone":
            return
        if not peer.in_oracle:
            self._ready.append(peer)
        if self.flow.stages[peer.stage, flows.MEMBERS] == 0:  # the host begins the stage anew from its anchor
            self._admit(peer)
            return
        peer.state = "waiting"
        self._waiting[peer.stage].append(peer)
        if self._works_early(peer.stage):
            self._promote(peer.stage)

    def _open_places(self, stage: int) -> None:
        """A version more: newcomers may join again, so many for eight members, and for each who left."""
        there = self.flow.members[stage, : self.flow.stages[stage, flows.MEMBERS]]
        num_members = int((self.flow.shown["takes_from"][there] <= self._version[stage]).sum())
        self._places[stage] = math.ceil(self.scenario.trust.admitted_share * num_members) + self._left[stage]
        self._left[stage] = 0

    def _works_early(self, stage: int) -> bool:
        """Whether microbatches come while a round runs, and one whom it names may take them: a source starts what is
        leased to it, and nothing is leased before it is a member."""
        return stage > 0 and bool(self.scenario.model.delay)

    def _promote(self, stage: int) -> None:
        """Whoever waits and has a place. The next round to begin names it: it works for the step after that one."""
        takes_from = int(self.flow.stages[stage, flows.OPEN]) + self._works_early(stage)
        still_waiting = []
        for peer in self._waiting[stage]:
            if peer.is_proven or self._places[stage]:
                self._places[stage] -= not peer.is_proven
                self._admit(peer, takes_from)
            else:
                still_waiting.append(peer)
        self._waiting[stage] = still_waiting

    def _admit(self, peer: _Peer, takes_from: int = 0) -> None:
        """A member, or one who is about to be."""
        flow, stage, slot = self.flow, peer.stage, self._slots.popleft()
        peer.slot, peer.state, peer.is_proven, peer.settled_at = slot, "member", True, self.now
        self._by_slot[slot] = peer
        compute_s = self._costs[stage] / peer.power
        forward = self.scenario.model.forward_share
        fill = self.scenario.fleet.max_in_flight or math.ceil(self._fill_s / self._source_s(peer.power))
        one = flow.peers[slot]
        one["forward_s"], one["backward_s"] = forward * compute_s, (1 - forward) * compute_s
        one["send_s"], one["window"] = self._send_s, max(1, fill)
        one["owes_s"] = self.rng.random() * compute_s if self.scenario.trust.audits else 0.0
        flows.join(flow, slot, stage, self.now, takes_from)
        peer.stay = Stay(stage, peer.power, self._since_warm_up())
        self.outcome.stays.append(peer.stay)
        self._set_rate(peer)

    def _source_s(self, power: float) -> float:
        """Seconds between two microbatches that a source of this power begins."""
        return max(self._costs[0] / power / (1 - self.scenario.trust.audits), self._send_s)

    def _set_rate(self, peer: _Peer) -> None:
        self._tell_ideal()
        before = peer.rate if peer.in_oracle else 0.0
        cost = self._costs[peer.stage]
        sends = 1 if peer.stage in (0, self._num_stages - 1) else 2
        visit_s = max(cost / peer.power / (1 - self.scenario.trust.audits), sends * self._send_beside_s(peer))
        peer.rate = 0.0 if peer.is_liar else cost / sum(self._costs) / visit_s
        if peer.in_oracle:
            self._ideal_rate += peer.rate - before

    def _oracle_has(self, peer: _Peer, is_there: bool) -> None:
        if peer.in_oracle != is_there:
            self._oracle_left += not is_there
            self._tell_ideal()
            self._ideal_rate += peer.rate if is_there else -peer.rate
            peer.in_oracle = is_there

    def _oracles_version(self) -> None:
        """The oracle is never late with a step, and admits as many newcomers with its version as the rules allow."""
        ready = [peer for peer in self._ready if peer.state != "gone"]
        num_there = sum(peer.in_oracle for peer in self._present.values())
        room = math.ceil(self.scenario.trust.admitted_share * num_there) + self._oracle_left
        self._oracle_left = 0
        for peer in ready[:room]:
            self._set_rate(peer)
            self._oracle_has(peer, is_there=True)
        self._ready = ready[room:]
        self._at(self.now + self.scenario.model.step_s, self._oracles_version)

    def _leave(self, peer: _Peer) -> None:
        if peer.state == "gone":
            return
        self._oracle_has(peer, is_there=False)
        if peer.is_warned and peer.state == "member":
            self._drain(peer, lambda: self._vanish(peer))
        else:
            self._vanish(peer, notice_s=self.scenario.fleet.notice_s)

    def _drain(self, peer: _Peer, then: Callable[[], None]) -> None:
        """No new work; what is under way has until the drain deadline."""
        peer.state = "draining"
        flows.drain(self.flow, peer.slot)
        self._at(self.now + self.scenario.sessions.drain_s, then)

    def _vanish(self, peer: _Peer, *, notice_s: float = 0.0) -> None:
        """Gone with what it holds. A broken stream is noticed at once, silence only when the lease is over."""
        if peer.state == "gone":
            return
        self._oracle_has(peer, is_there=False)
        self.outcome.counts["departures"] += 1
        self._placed(peer, -1)
        if peer.state == "waiting":
            self._waiting[peer.stage].remove(peer)
        self._leave_stage(peer, notice_s)
        peer.state = "gone"
        del self._present[peer.name]

    def _leave_stage(self, peer: _Peer, notice_s: float) -> None:
        if peer.slot < 0:
            return
        peer.gives = 0
        self._left[peer.stage] += 1
        if peer.stay is not None:
            peer.stay.ended_at, peer.stay = self._since_warm_up(), None
        self._wasted("lost_sums", peer.stage, int(self.flow.done[peer.slot].sum()))
        if self.scenario.model.delay:
            back_at = flows.lose(self.flow, peer.slot, self.now, self.now + notice_s)
        else:
            step = int(self.flow.stages[0, flows.OPEN])
            back_at, again = waited_step.lose(self.flow, peer.slot, self.now, self.now + notice_s)
            self._at(self.now + notice_s, lambda: self._grant_again(step, again))
        if back_at > self.now and self._is_measured():
            self.outcome.recoveries_s.append(back_at - self.now)
        del self._by_slot[peer.slot]
        self._slots.append(peer.slot)
        stage, peer.slot = peer.stage, -1
        if stage == 0:
            for every in range(self._num_stages):
                self._close_if_full(every)

    # -- steps and rounds ---------------------------------------------------------------------------------

    def _close_if_full(self, stage: int) -> None:
        """Begin the stage's round when all that can come of its step has come."""
        if flows.is_full(self.flow, stage) and self._in_round[stage] is None:
            self._close(stage)

    def _close(self, stage: int) -> None:
        flow = self.flow
        step = int(flow.stages[stage, flows.OPEN])
        parity = step & 1
        taken = []
        for place in range(int(flow.stages[stage, flows.MEMBERS])):
            slot = int(flow.members[stage, place])
            if flow.shown["takes_from"][slot] > step:
                continue  # no member yet
            taken.append((self._by_slot[slot], int(flow.done[slot, parity])))
            flow.done[slot, parity] = 0
        flow.stages[stage, flows.DONE + parity] = flow.stages[stage, flows.VOID + parity] = 0
        flow.stages[stage, flows.OPEN] = step + 1
        self._in_round[stage] = taken
        model, part = self.scenario.model, self.scenario.fleet
        if stage == 0:
            self._came_home[step] = sum(num for _, num in taken)
        elif not model.delay:
            waited_step.cut_short(flow, stage, step, self.now)
            for before in range(stage):
                self._close_if_full(before)
        self.outcome.stage_bytes["rounds"] += model.round_mbytes * 1e6 * len(taken)
        round_s = model.round_s + model.round_mbytes * 1e6 / self._up_bytes_per_s + 5 * part.round_trip_ms / 1000
        self._at(self.now + round_s / 2, lambda: self._end_sending(stage))
        self._at(self.now + round_s, lambda: self._end_round(stage))

    def _end_sending(self, stage: int) -> None:
        """The sums have gone to who reduces them, in as many bytes as the means will: whoever goes now leaves its sum
        behind."""
        taken = self._in_round[stage]
        assert taken is not None
        self._in_round[stage] = [(peer, num) for peer, num in taken if peer.serves(stage)]
        for peer, num in taken:
            if not peer.serves(stage):
                self._wasted("lost_sums", stage, num)

    def _end_round(self, stage: int) -> None:
        taken = self._in_round[stage]
        assert taken is not None
        self._in_round[stage] = None
        self._version[stage] += 1
        version = self._version[stage]
        for peer, num in taken:
            if peer.is_liar:
                self._wasted("refuted", stage, num)
                if peer.serves(stage):
                    self._judge(peer, version, num, len(taken))
        self._open_places(stage)
        self._promote(stage)
        while (done := len(self.outcome.versions)) < min(self._version):
            self.outcome.versions.append((self._since_warm_up(), self._came_home.pop(done)))
        if stage == 0 and not self.scenario.model.delay:
            self._tell_of_next_step(version)
        limit = min(self._version) + self.scenario.model.delay  # 1: the next step may begin while this one's rounds run
        if limit > self.flow.counters[flows.LIMIT]:
            self.flow.counters[flows.LIMIT] = limit
            flows.start_all(self.flow, self.now)
        self._close_if_full(stage)

    def _grant_again(self, step: int, num: int) -> None:
        """What a lost source had of the step: others begin it, or find that the next stage has closed the step."""
        if waited_step.is_refused(self.flow, step):
            self._at(self._at_next_stage(), lambda: self._give_up(step, num))
        else:
            waited_step.grant_again(self.flow, step, num, self.now)

    def _give_up(self, step: int, num: int) -> None:
        waited_step.give_up(self.flow, step, num)
        self._close_if_full(0)

    def _at_next_stage(self) -> float:
        """When what the quickest source begins now is there."""
        sources = self.flow.members[0, : self.flow.stages[0, flows.MEMBERS]]
        first_s = float(self.flow.peers["forward_s"][sources].min()) if len(sources) else 0.0
        return self.now + first_s + self._delay_s

    def _tell_of_next_step(self, step: int) -> None:
        """Stages that are short of microbatches learn from the first of the next step that no more come."""
        flow = self.flow
        for stage in range(1, self._num_stages):
            if flow.stages[stage, flows.OPEN] < step and self._in_round[stage] is None:
                self._at(self._at_next_stage(), lambda stage=stage: self._close_short(stage, step - 1))  # type: ignore[misc]

    def _close_short(self, stage: int, step: int) -> None:
        if self.flow.stages[stage, flows.OPEN] == step and self._in_round[stage] is None:
            self._close(stage)

    def _wasted(self, what: str, stage: int, num: int) -> None:
        if self._is_measured():
            self.outcome.counts[what] += num
            self.outcome.useful -= num * self._costs[stage] / sum(self._costs)

    def _judge(self, peer: _Peer, version: int, num: int, num_members: int) -> None:
        """Whoever lies in all it does is found by the law of the draws, and judged when they are revealed."""
        budget = AuditBudget()
        rate = found_by_one(microbatch_rate(num_members, budget), contribution_rate(num_members, budget), num)
        if peer.banned_at < 0 and num and self.rng.random() < detection(rate, num_members - 1):
            peer.banned_at = version + REVEALED_AFTER
        if 0 <= peer.banned_at <= version:
            self.outcome.counts["bans"] += 1
            self._vanish(peer)

    def _expire_late(self) -> None:
        """When all of a step is granted, what is under way has a deadline; a step that takes too long is cut short."""
        counters = self.flow.counters
        step, missing = int(counters[flows.STEP]), int(counters[flows.TARGET] - counters[flows.GRANTED])
        if step > self._granting:
            self._granting, self._granting_since = step, self.now
        if missing and self.now - self._granting_since > LONGEST_STEP * self.scenario.model.step_s:
            self.flow.stages[:, flows.VOID + (step & 1)] += missing
            counters[flows.GRANTED] = counters[flows.TARGET]
            self.outcome.counts["steps_cut_short"] += 1
        elif missing or step <= self._expiry_set:
            return
        self._expiry_set = step

        def expire() -> None:
            before = int(self.flow.counters[flows.KILLED])
            flows.expire(self.flow, step, self.now)
            if self.flow.counters[flows.KILLED] > before:
                self._deadline.missed()
                self.outcome.counts["stragglers"] += int(self.flow.counters[flows.KILLED]) - before
                flows.start_all(self.flow, self.now)
                for stage in range(self._num_stages):
                    self._close_if_full(stage)

        self._at(self.now + (self.scenario.model.straggler_s or self._deadline.seconds), expire)

    # -- moving -------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        """Everyone looks at the same records, and finds the same few who should move."""
        scenario, noise = self.scenario, self.scenario.run.power_noise
        begun = time.perf_counter()
        gauss = self.rng.gauss
        placements = [
            Placement(
                name,
                StageIndex(peer.stage),
                peer.useful_power * max(0.1, gauss(1.0, noise)),
                peer.state == "member" and self.now - peer.settled_at > scenario.run.payback_s / 2,
            )
            for name, peer in self._present.items()
            if peer.state != "draining"
        ]
        move_s = self._move_s()
        moves = plan_moves(placements, self._costs, [move_s] * self._num_stages, scenario.rebalancing)
        self.outcome.decide_s.append(time.perf_counter() - begun)
        self.outcome.counts["plans"] += 1
        for move in moves:
            peer = self._present[move.peer_id]
            self.outcome.counts["moves"] += self._is_measured()
            self._drain(peer, lambda peer=peer, target=int(move.target): self._go(peer, target))  # type: ignore[misc]
        self._at(self.now + scenario.run.decide_s, self._decide)

    def _move_s(self) -> float:
        """What a move costs the mover: drain, download, and half a step until it is on a roster."""
        given = DONORS * DONOR_SHARE * self._up_bytes_per_s
        download_s = self.scenario.model.state_mbytes * 1e6 / min(self._down_bytes_per_s, given)
        return self.scenario.sessions.drain_s + download_s + self.scenario.model.step_s / 2

    def _go(self, peer: _Peer, target: int) -> None:
        if peer.state == "gone":
            return
        self._leave_stage(peer, 0.0)
        self._placed(peer, -1)
        peer.stage, peer.state = target, "moving"
        self._placed(peer, +1)
        self._download(peer)

    # -- what befalls the fleet ---------------------------------------------------------------------------

    def _befall(self, event: Event) -> None:
        if event.kind == "crash":
            self._crash(event)
            return
        self.outcome.disturbances.append(
            {"kind": event.kind, "at_s": self._since_warm_up(), "before": self._reached(), "recovered_s": None}
        )
        names = sorted(self._present)
        if event.kind == "crowd":
            law = self.scenario.law
            for _ in range(round(event.share * self.scenario.fleet.peers)):
                stay_s = law.draw(self.rng) if law is not None else math.inf
                self._at(
                    self.now + self.rng.random() * event.lasts_s,
                    lambda stay_s=stay_s: self._come(stay_s),  # type: ignore[misc]
                )
        elif event.kind == "outage":
            hit = [self._present[name] for name in self.rng.sample(names, round(event.share * len(names)))]
            for peer in hit:
                rest_s = peer.leaves_at - self.now - event.lasts_s
                self._vanish(peer, notice_s=self.scenario.run.lease_s)
                if rest_s > 0:
                    self._at(self.now + event.lasts_s, lambda rest_s=rest_s: self._come(rest_s))  # type: ignore[misc]
        else:
            there = [self._present[name] for name in names if self._present[name].stage == event.stage]
            there = [peer for peer in there if peer.state == "member"]
            for peer in there[event.leaves :]:
                self._vanish(peer)

    def _crash(self, event: Event) -> None:
        """Of one member; the swarm is not looked at as a whole before and after it."""
        there = [peer for _, peer in sorted(self._present.items()) if peer.stage == event.stage]
        there = [peer for peer in there if peer.state == "member" and event.power in (None, peer.power)]
        if not there:
            return
        peer, part = self.rng.choice(there), self.scenario.fleet
        self._vanish(peer, notice_s=part.notice_s)
        if event.replaced_after_s is not None:
            comes_at = self.now + event.replaced_after_s + part.start_s
            self._at(comes_at, lambda: self._come(math.inf, peer.power))

    # -- figures ------------------------------------------------------------------------------------------

    def _since_warm_up(self) -> float:
        return self.now - self.scenario.run.warm_up_s

    def _is_measured(self) -> bool:
        return self._since_warm_up() >= 0

    def _begin_to_measure(self) -> None:
        self._tell_ideal()
        self.outcome.useful -= self._added()

    def _added(self) -> float:
        """Microbatches in sums so far."""
        return float(np.dot(self.flow.stages[:, flows.ADDED], self._costs) / sum(self._costs))

    def _tell_ideal(self) -> None:
        """What the oracle has done up to now."""
        since = max(self._ideal_since, self.scenario.run.warm_up_s)
        if self.now > since:
            self.outcome.ideal += self._ideal_rate * (self.now - since)
        self._ideal_since = self.now

    def _median_trip_s(self) -> float:
        num = min(int(self.flow.counters[flows.TRIPS]), flows.NUM_TRIPS)
        return float(np.median(self.flow.trips_s[:num])) if num else 0.0

    def _sample(self) -> None:
        trip_s = self._median_trip_s()
        if trip_s:
            self._deadline.observe(trip_s)
        self._expire_late()
        done = int(self.flow.counters[flows.COMPLETED])
        rate, self._done_before = (done - self._done_before) / SAMPLE_S, done
        outcome = self.outcome
        members = int(self.flow.stages[:, flows.MEMBERS].sum())
        outcome.series.append((self._since_warm_up(), rate, self._ideal_rate, len(self._present), members))
        self._tell_control(members)
        if self._is_measured():
            reached = self._reached()
            for disturbance in outcome.disturbances:
                since, before = (float(disturbance[name] or 0.0) for name in ("at_s", "before"))
                since = self._since_warm_up() - since
                if disturbance["recovered_s"] is None and since >= RECENT * SAMPLE_S and reached >= RECOVERED * before:
                    disturbance["recovered_s"] = since
        self._at(self.now + SAMPLE_S, self._sample)

    def _reached(self) -> float:
        """Microbatches that came home lately, as a share of the ideal."""
        recent = self.outcome.series[-RECENT:]
        return float(sum(one[1] for one in recent) / max(1e-9, sum(one[2] for one in recent)))

    def _tell_control(self, members: int) -> None:
        """Bytes that nobody computes with: records, look-ups, watches, and the small calls of rounds."""
        run, num = self.scenario.run, len(self._present)
        per_stage = num / self._num_stages
        records = num * RECORD_BYTES * RECORD_COPIES * SAMPLE_S / (run.lease_s / 3)
        # Every look-up of the stages beside is one bucket; to decide, one bucket of every stage.
        beside = members * 3 * per_stage / BUCKETS * RECORD_BYTES * SAMPLE_S / run.lease_s
        deciding = members * self._num_stages * per_stage / BUCKETS * RECORD_BYTES * SAMPLE_S / run.decide_s
        watches = members * 3 * self.scenario.fleet.fanout * CALL_BYTES * SAMPLE_S / 20.0
        votes = members * 64 * CALL_BYTES * SAMPLE_S / self.scenario.model.step_s
        self.outcome.stage_bytes["directory"] += records + beside + deciding
        self.outcome.stage_bytes["control"] += watches + votes
        self.outcome.peer_seconds += num * SAMPLE_S


def simulate(scenario: Scenario) -> Outcome:
    """The same outcome for the same scenario."""
    return Fleet(scenario).run()


def median_and_worst(values: list[float]) -> tuple[float, float]:
    """Of durations; zeros if there are none."""
    return (statistics.median(values), max(values)) if values else (0.0, 0.0)
