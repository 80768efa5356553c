"""A simulated fleet of whole models in windows: who comes, downloads, takes inner steps and goes, on a virtual clock.

Windows close as `WindowProgress` closes them; a round's bytes are those of the product's cohorts, a joiner's those of a
snapshot and the results since, as the plan counts both. The oracle that throughput is compared with has the same
machines at every moment, with the same downloads behind them, the same work between rounds, rounds that nobody else's
bytes slow down, and loses what is lost with those who leave. But its machines compute all the time between two rounds,
each at its own power.
"""

import heapq
import itertools
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from peer.fleet.window_scenario import WindowScenario
from swarm.core.cohorts import num_cohorts
from swarm.core.plan import (
    FLOAT_BYTES,
    HEADERS,
    LINK_SHARE,
    RESULT_BYTES,
    ROUND_TRIPS,
    exact_round_s,
    result_bytes,
    round_bytes,
    state_bytes,
)
from swarm.core.settings import KEPT_SNAPSHOTS
from swarm.core.transfers import join_share


@dataclass(slots=True, eq=False)
class _Peer:
    """One machine, from its coming to its going."""

    power: float
    came_at: float
    state: str = "joining"
    """joining, ready (for the next roster), member, gone"""
    version: int = 0
    """Of the state that it has or downloads."""
    joins: int = 0
    """Which window it was a member in first counts as its first; 0: none yet."""
    began_at: float = 0.0
    """Its present window."""
    inner_s: float = 0.0
    """In its present window."""
    is_full: bool = False
    oracle_from: float = math.inf
    """Beginning of the oracle's first window that it is in."""


@dataclass
class WindowOutcome:
    """What came of it. Tokens are counted in windows of a machine of power 1."""

    scenario: WindowScenario
    cpu_s: float = 0.0
    useful: float = 0.0
    """In certified results."""
    ideal: float = 0.0
    """Of the oracle."""
    ideal_alike: float = 0.0
    """Of one whose quicker machines wait, where windows are alike, until the median one has done its own."""
    lost: float = 0.0
    """With those who left before their sums had been sent."""
    waited: float = 0.0
    """What members could have done that had done their windows while others had not."""
    cut: float = 0.0
    """Of inner steps that a closing window found unfinished."""
    late: float = 0.0
    """What members could have done that were not through with their downloads when their first window began, and of
    those whose owners needed the machine."""
    counts: Counter[str] = field(default_factory=Counter)
    round_s: list[float] = field(default_factory=list)
    window_s: list[float] = field(default_factory=list)
    members: list[int] = field(default_factory=list)
    join_s: list[float] = field(default_factory=list)
    """From a newcomer's start to the end of the first round that had its window."""

    @property
    def throughput_vs_ideal(self) -> float:
        return self.useful / self.ideal if self.ideal else 0.0

    @property
    def throughput_vs_ideal_alike(self) -> float:
        return self.useful / self.ideal_alike if self.ideal_alike else 0.0


class Downloads:
    """Those who share the donors' uplinks, all at the same rate; a heap by how much that must have come to."""

    def __init__(self) -> None:
        self._served = 0.0
        self._heap: list[tuple[float, int, _Peer]] = []
        self._order = itertools.count()
        self._at = 0.0
        self._rate = 0.0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, peer: _Peer, num_bytes: float) -> None:
        heapq.heappush(self._heap, (self._served + num_bytes, next(self._order), peer))

    def go_on(self, now: float, rate: float) -> None:
        """Each has come so much further at the rate until now; from now on it is `rate` bytes a second."""
        self._served += self._rate * (now - self._at)
        self._at, self._rate = now, rate

    def next_at(self) -> float:
        """When the next one is through at this rate."""
        if not self._heap or self._rate <= 0:
            return math.inf
        return max(self._at, self._at + (self._heap[0][0] - self._served) / self._rate)

    def pop(self) -> _Peer:
        return heapq.heappop(self._heap)[2]


def round_bytes_of(scenario: WindowScenario, num_members: int) -> float:
    """That one member sends in a round: its contribution, and the results of the parts that it reduces, to its cohort;
    in a stage of several cohorts also its parts' shares to who combines them, and what it combines to the others."""
    part, number = scenario.windows, num_cohorts(num_members)
    cohort, num_values = num_members / number, part.settings.round_values * part.parameters
    across = (number - 1) / number * (FLOAT_BYTES + RESULT_BYTES[part.averaging]) / cohort
    return round_bytes(part.averaging, num_values, cohort) + across * num_values


class WindowFleet:
    """One simulation."""

    def __init__(self, scenario: WindowScenario) -> None:
        self.scenario = scenario
        self.outcome = WindowOutcome(scenario)
        self.now = 0.0
        self._rng = random.Random(f"windows/{scenario.run.seed}")
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        part = scenario.fleet
        self._up = part.up_mbit * 125_000 * LINK_SHARE / HEADERS
        self._down = part.down_mbit * 125_000 * LINK_SHARE / HEADERS
        self._until = scenario.run.warm_up_s + scenario.run.measured_s
        self._state_bytes = state_bytes(scenario.windows.settings, scenario.windows.parameters)
        self._result_bytes = result_bytes(scenario.windows.settings, scenario.windows.parameters)
        self._kept = KEPT_SNAPSHOTS * scenario.windows.snapshot_every + 2
        self._downloads = Downloads()
        self._peers: dict[_Peer, None] = {}
        self._members: dict[_Peer, None] = {}
        self._ready: dict[_Peer, None] = {}
        self._expected = 0
        """Members whose windows are waited for."""
        self._num_full = 0
        self._version = 0
        self._opened_at = 0.0
        self._closes_at = math.inf
        self._is_closed = False
        self._round: dict[_Peer, float] = {}
        """What each brings to the round under way."""
        self._oracles_period_s = scenario.windows.window_s + self._round_s(part.peers)

    def run(self) -> WindowOutcome:
        begun = time.process_time()
        part, law = self.scenario.fleet, self.scenario.law
        stays = law.draw_present(part.peers, self._rng) if law is not None else [math.inf] * part.peers
        for stay_s in stays:
            peer = self._new_peer(stay_s)
            peer.state, peer.oracle_from = "ready", 0.0
            self._ready[peer] = None
        if law is not None:
            self._at(self._rng.expovariate(part.peers / law.mean_s), self._someone_comes)
        self._open()
        while self.now < self._until:
            self._downloads.go_on(self.now, self._download_rate())
            there_at = self._downloads.next_at()
            next_at = self._queue[0][0] if self._queue else math.inf
            self.now = min(there_at, next_at, self._until)
            if self.now == self._until:
                break
            if there_at <= next_at:
                self._downloads.go_on(self.now, 0.0)
                self._has_come(self._downloads.pop())
            else:
                heapq.heappop(self._queue)[2]()
        for peer in list(self._peers):
            self._oracle_ends_with(peer)
        self.outcome.cpu_s = time.process_time() - begun
        return self.outcome

    def _at(self, at: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (at, next(self._order), act))

    def _is_measured(self) -> bool:
        return self.now >= self.scenario.run.warm_up_s

    # -- coming and going ---------------------------------------------------------------------------------

    def _new_peer(self, stay_s: float) -> _Peer:
        spread = math.log(self.scenario.fleet.power_ratio) / 2
        peer = _Peer(math.exp(self._rng.uniform(-spread, spread)), self.now)
        self._peers[peer] = None
        if math.isfinite(stay_s):
            self._at(self.now + stay_s, lambda: self._leave(peer))
        return peer

    def _someone_comes(self) -> None:
        law = self.scenario.law
        assert law is not None
        peer = self._new_peer(law.draw(self._rng))
        self.outcome.counts["joins"] += self._is_measured()
        since = self._version % self.scenario.windows.snapshot_every
        self._fetch(peer, self._state_bytes + since * self._result_bytes)
        self._at(self.now + self._rng.expovariate(self.scenario.fleet.peers / law.mean_s), self._someone_comes)

    def _fetch(self, peer: _Peer, num_bytes: float) -> None:
        peer.version = self._version
        self._downloads.add(peer, num_bytes)
        self.outcome.counts["downloaded_mbytes"] += round(num_bytes / 1e6)

    def _download_rate(self) -> float:
        """Of each: what a round leaves of the donors' uplinks is shared by all."""
        free = join_share(len(self._members)) if self._is_closed else 1.0
        given = free * self._up * max(1, len(self._members))
        return min(self._down, given / len(self._downloads)) if self._downloads else 0.0

    def _has_come(self, peer: _Peer) -> None:
        """The state is there; results that were made meanwhile are fetched after it, if they are still kept."""
        if peer.state == "gone":
            return
        behind = self._version - peer.version
        if peer.state == "member":  # it had the result of the round that named it to fetch
            self._begin_window(peer)
        elif behind > self._kept:
            self.outcome.counts["began_again"] += 1
            since = self._version % self.scenario.windows.snapshot_every
            self._fetch(peer, self._state_bytes + since * self._result_bytes)
        elif behind:
            self._fetch(peer, behind * self._result_bytes)
        else:
            peer.state = "ready"
            self._ready[peer] = None
            period_s = self._oracles_period_s
            peer.oracle_from = math.ceil(self.now / period_s) * period_s

    def _leave(self, peer: _Peer) -> None:
        self._oracle_ends_with(peer)
        self.outcome.counts["departures"] += self._is_measured()
        was_member = peer.state == "member"
        peer.state = "gone"
        del self._peers[peer]
        self._ready.pop(peer, None)
        if not was_member:
            return
        self.outcome.counts["windows_lost"] += self._is_measured()
        del self._members[peer]
        if self._is_closed:
            self._lose(self._round.pop(peer, 0.0))
            return
        self._lose(self._brought(peer))
        version = self._version
        self._at(self.now + self.scenario.run.lease_s, lambda: self._is_lost(peer, version))

    def _lose(self, tokens: float) -> None:
        self.outcome.lost += tokens * self._is_measured()

    def _is_lost(self, peer: _Peer, version: int) -> None:
        """Its silence has been noticed."""
        if version == self._version and not self._is_closed:
            self._expected -= 1
            self._num_full -= peer.is_full
            self._look()

    # -- windows and rounds -------------------------------------------------------------------------------

    def _open(self) -> None:
        """A version is there: who was on its roster begins a window, and those whom it names."""
        room = self.scenario.fleet.most_members - len(self._members)
        newcomers = list(self._ready)[:room]
        for peer in newcomers:
            del self._ready[peer]
            peer.state = "member"
        self._opened_at, self._closes_at, self._is_closed, self._num_full = self.now, math.inf, False, 0
        old = list(self._members)
        self._members.update(dict.fromkeys(newcomers))
        self._expected = len(self._members)
        for peer in old:
            self._begin_window(peer)
        for peer in newcomers:
            peer.joins = self._version + 1
            peer.is_full, peer.began_at = False, math.inf
            if self._version:
                self._fetch(peer, self._result_bytes)
            else:
                self._begin_window(peer)
        self.outcome.members.append(len(self._members))

    def _begin_window(self, peer: _Peer) -> None:
        part, fleet = self.scenario.windows, self.scenario.fleet
        if self._is_closed:  # it was not through in time: it brings nothing to this round
            peer.began_at = math.inf
            return
        peer.is_full, peer.began_at = False, self.now
        quick = peer.power if part.sized == "alike" else 1.0
        peer.inner_s = part.window_s / part.local_steps / quick
        if self._rng.random() < fleet.stalls:
            peer.began_at += fleet.stall_s
        full_at, version = peer.began_at + part.local_steps * peer.inner_s, self._version
        self._at(full_at, lambda: self._fill(peer, version))

    def _fill(self, peer: _Peer, version: int) -> None:
        if peer.state == "member" and version == self._version and not self._is_closed:
            peer.is_full = True
            self._num_full += 1
            self._look()

    def _look(self) -> None:
        """As `WindowProgress.closing` does."""
        if self._num_full and self._num_full >= self._expected:
            self._close(self._version)
        elif self._closes_at == math.inf and self._num_full and 2 * self._num_full >= self._expected:
            self._closes_at, version = self.now + self.scenario.windows.straggler_s, self._version
            self._at(self._closes_at, lambda: self._close(version))

    def _steps(self, peer: _Peer) -> tuple[int, float]:
        """Inner steps that it has taken whole, and how many it could have."""
        could = max(0.0, self.now - peer.began_at) / peer.inner_s if peer.began_at <= self.now else 0.0
        return min(self.scenario.windows.local_steps, math.floor(could + 1e-9)), could

    def _brought(self, peer: _Peer) -> float:
        return self._steps(peer)[0] * self._step_tokens(peer)

    def _step_tokens(self, peer: _Peer) -> float:
        size = 1.0 if self.scenario.windows.sized == "alike" else peer.power
        return size / self.scenario.windows.local_steps

    def _close(self, version: int) -> None:
        """The round begins, with what each has by now."""
        if self._is_closed or version != self._version:
            return
        self._is_closed = True
        outcome, is_measured = self.outcome, self._is_measured()
        work_s, window_s = self.now - self._opened_at, self.scenario.windows.window_s
        outcome.window_s.append(work_s)
        for peer in self._members:
            steps, could = self._steps(peer)
            each = self._step_tokens(peer)
            if steps:
                self._round[peer] = steps * each
            if is_measured:
                most = peer.power * work_s / window_s
                outcome.late += max(0.0, most - could * each)
                if steps == self.scenario.windows.local_steps:
                    outcome.waited += (could - steps) * each
                else:
                    outcome.cut += (could - steps) * each
        joiners = len(self._downloads)
        round_s = self._round_s(len(self._members), beside_joiners=bool(joiners))
        outcome.round_s.append(round_s)
        self._at(self.now + round_s / 2, self._has_sent)
        self._at(self.now + round_s, self._end_round)

    def _round_s(self, num_members: int, *, beside_joiners: bool = False) -> float:
        """A member whose uplink others take a share of keeps all waiting."""
        part = self.scenario.windows
        rate = self._up * (1 - join_share(num_members) if beside_joiners else 1.0)
        exact_s = exact_round_s(part.settings, part.parameters)
        round_trips_s = ROUND_TRIPS * self.scenario.fleet.round_trip_ms / 1000
        return round_bytes_of(self.scenario, max(2, num_members)) / rate + round_trips_s + exact_s

    def _has_sent(self) -> None:
        """Sums are with who reduces them: whoever goes now leaves its window behind."""
        self.outcome.useful += sum(self._round.values()) * self._is_measured()
        for peer in self._round:
            if peer.joins == self._version + 1:
                self.outcome.join_s.append(self.now - peer.came_at)
        self._round.clear()

    def _end_round(self) -> None:
        self._version += 1
        self.outcome.counts["versions"] += self._is_measured()
        self._open()

    # -- the oracle ---------------------------------------------------------------------------------------

    def _oracle_ends_with(self, peer: _Peer) -> None:
        """Whole windows of the oracle that it was there for, in the time that is measured."""
        period_s, run = self._oracles_period_s, self.scenario.run
        # Sums are sent in the first half of a round.
        sent_s = (self.scenario.windows.window_s + period_s) / 2
        first = max(peer.oracle_from, math.ceil((run.warm_up_s - sent_s) / period_s) * period_s)
        if first < math.inf:
            num = max(0, math.floor((min(self.now, self._until) - first - sent_s) / period_s) + 1)
            self.outcome.ideal += peer.power * num
            alike = self.scenario.windows.sized == "alike"
            self.outcome.ideal_alike += (min(1.0, peer.power) if alike else peer.power) * num


def simulate_windows(scenario: WindowScenario) -> WindowOutcome:
    """The same outcome for the same scenario."""
    return WindowFleet(scenario).run()


def window_figures(outcome: WindowOutcome) -> dict[str, Any]:
    """Everything measured, as JSON has it."""
    scenario, ideal = outcome.scenario, max(1e-9, outcome.ideal)
    measured_s = scenario.run.measured_s
    return {
        "scenario": scenario.name,
        "seed": scenario.run.seed,
        "peers": scenario.fleet.peers,
        "members": round(statistics.fmean(outcome.members)),
        "cohorts": num_cohorts(max(outcome.members)),
        "virtual_seconds": measured_s,
        "cpu_seconds": round(outcome.cpu_s, 3),
        "throughput_vs_ideal": round(outcome.throughput_vs_ideal, 4),
        "throughput_vs_ideal_alike": round(outcome.throughput_vs_ideal_alike, 4),
        "machines": round(outcome.useful * scenario.windows.window_s / measured_s, 1),
        "shares_of_ideal": {
            "lost": round(outcome.lost / ideal, 4),
            "waited_for_half": round(outcome.waited / ideal, 4),
            "cut_short": round(outcome.cut / ideal, 4),
            "began_late": round(outcome.late / ideal, 4),
        },
        "window_seconds": round(statistics.median(outcome.window_s), 1) if outcome.window_s else 0.0,
        "round_seconds": round(statistics.median(outcome.round_s), 1) if outcome.round_s else 0.0,
        "first_window_seconds": round(statistics.median(outcome.join_s), 1) if outcome.join_s else 0.0,
        **{name: outcome.counts[name] for name in ("versions", "joins", "departures", "windows_lost", "began_again")},
        "downloaded_gbytes": round(outcome.counts["downloaded_mbytes"] / 1000, 1),
    }


def window_summary(found: dict[str, Any]) -> str:
    """What a person wants to know of it."""
    shares = found["shares_of_ideal"]
    return "\n".join(
        [
            f"{found['scenario']}: {found['peers']:,} peers, the whole model on each, "
            f"{found['virtual_seconds'] / 3600:g} virtual hours in {found['cpu_seconds']:.1f} s of one core",
            f"  throughput    {100 * found['throughput_vs_ideal']:.1f} % of ideal, "
            f"{100 * found['throughput_vs_ideal_alike']:.1f} % of one that waits for the median machine, "
            f"as much as {found['machines']:,.0f} median machines without rounds",
            f"  of ideal      {100 * shares['waited_for_half']:.1f} % waiting with their windows done, "
            f"{100 * shares['lost']:.1f} % lost with those who left, {100 * shares['cut_short']:.1f} % cut short, "
            f"{100 * shares['began_late']:.1f} % begun late",
            f"  windows       {found['versions']} of {found['window_seconds']:,.0f} s, rounds of "
            f"{found['round_seconds']:,.0f} s (medians), {found['members']:,} members in {found['cohorts']} cohorts",
            f"  churn         {found['joins']:,} joins, {found['departures']:,} departures, {found['windows_lost']:,} "
            f"windows lost, {found['began_again']:,} downloads begun again",
            f"  joining       {found['first_window_seconds'] / 60:.0f} min from start to the first window that counts "
            f"(median), {found['downloaded_gbytes']:,.0f} GB downloaded",
        ]
    )
