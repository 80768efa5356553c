"""Wiring against queues under a virtual clock: who gets how much, how fast a bad peer loses its traffic."""

import heapq
import random
from dataclasses import dataclass, field

import pytest

from swarm.core.ids import PeerId, StageIndex
from swarm.core.pipeline.wiring import (
    ASKED,
    BUSY_RETRY_S,
    FIRST_RETRY_S,
    LONGEST_RETRY_S,
    RARELY,
    WASTED_S,
    EarliestFinishWiring,
    NoPeerAvailable,
    Route,
)

FAST, SLOW, OTHER = PeerId("fast"), PeerId("slow"), PeerId("other")


def _wiring(*peers: PeerId, seed: int = 0) -> EarliestFinishWiring:
    wiring = EarliestFinishWiring(StageIndex(1), random.Random(seed))
    wiring.update(set(peers))
    return wiring


@dataclass
class Peer:
    """One queue, then a way that any number go at once."""

    service_s: float
    latency_s: float = 0.0
    busy_until: float = 0.0


@dataclass
class Traffic:
    """`num_callers` callers that each keep `slots` microbatches in flight."""

    peers: dict[PeerId, Peer]
    slots: int
    num_callers: int = 1
    seed: int = 0
    now: float = 0.0
    done: dict[PeerId, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._wirings = [_wiring(*self.peers, seed=self.seed + number) for number in range(self.num_callers)]
        self._events: list[tuple[float, int, int, PeerId, float]] = []
        self._count = 0
        for _ in range(self.slots):
            for caller in range(self.num_callers):
                self._send(caller)

    def _send(self, caller: int) -> None:
        chosen = self._wirings[caller].choose(now=self.now).peer_id
        peer = self.peers[chosen]
        peer.busy_until = max(self.now, peer.busy_until) + peer.service_s * self._rng.uniform(0.8, 1.2)
        answer_at = peer.busy_until + peer.latency_s * self._rng.uniform(0.9, 1.1)
        self._count += 1
        heapq.heappush(self._events, (answer_at, self._count, caller, chosen, self.now))

    def run(self, num_microbatches: int) -> dict[PeerId, float]:
        """Shares of the work done by each peer, from now on."""
        self.done = dict.fromkeys(self.peers, 0)
        for _ in range(num_microbatches):
            self.now, _, caller, chosen, sent_at = heapq.heappop(self._events)
            self._wirings[caller].finished(chosen, self.now - sent_at)
            self.done[chosen] += 1
            self._send(caller)
        return {peer: count / num_microbatches for peer, count in self.done.items()}


@pytest.mark.parametrize("num_callers", [1, 3])
@pytest.mark.parametrize("slots", [4, 8, 16])
def test_work_is_in_proportion_to_speed(slots: int, num_callers: int) -> None:
    traffic = Traffic({SLOW: Peer(3.0), FAST: Peer(1.0)}, slots, num_callers, seed=slots)
    traffic.run(200)
    shares = traffic.run(1000)
    assert shares[SLOW] == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize(("service_s", "latency_s"), [(1.0, 0.0), (0.0, 1.0), (0.02, 1.0)])
@pytest.mark.parametrize("slots", [3, 6, 12])
def test_equal_peers_get_equal_work_whether_they_queue_or_are_far_away(
    slots: int, service_s: float, latency_s: float
) -> None:
    peers = {peer: Peer(service_s, latency_s) for peer in (FAST, SLOW, OTHER)}
    traffic = Traffic(peers, slots, seed=slots)
    traffic.run(100)
    shares = traffic.run(1200)
    assert all(share == pytest.approx(1 / 3, abs=0.1) for share in shares.values()), shares


def test_a_peer_that_becomes_slow_loses_its_traffic_and_gets_it_back() -> None:
    traffic = Traffic({FAST: Peer(0.1), OTHER: Peer(0.1)}, slots=4)
    traffic.run(200)
    traffic.peers[OTHER].service_s = 1.0
    traffic.run(60)
    assert traffic.run(200)[OTHER] < 0.15
    traffic.peers[OTHER].service_s = 0.1
    traffic.run(200)
    assert traffic.run(200)[OTHER] == pytest.approx(0.5, abs=0.05)


def test_a_new_peer_gets_work_though_the_known_ones_have_room() -> None:
    wiring = _wiring(FAST, SLOW)
    for moment in range(20):
        wiring.finished(wiring.choose(now=float(moment)).peer_id, 0.5)
    wiring.update({FAST, SLOW, OTHER})
    chosen = {wiring.choose(now=20.0).peer_id for _ in range(3)}
    assert OTHER in chosen


def test_a_peer_that_stops_answering_is_given_no_more() -> None:
    wiring = _wiring(FAST, OTHER)
    now = 0.0
    for _ in range(20):
        now += 0.1
        wiring.finished(wiring.choose(now=now).peer_id, 0.1)
    stuck = 0
    for _ in range(100):
        now += 0.1
        chosen = wiring.choose(now=now).peer_id
        if chosen == OTHER:
            stuck += 1
        else:
            wiring.finished(chosen, 0.1)
    assert stuck <= 2


def test_a_dead_peer_is_shunned_at_once_and_probed_back() -> None:
    wiring = _wiring(FAST, OTHER)
    wiring.choose(now=0.0)
    wiring.choose(now=0.0)
    wiring.failed(OTHER, now=1.0)
    assert {wiring.choose(now=1.0 + 0.001 * n).peer_id for n in range(20)} == {FAST}
    at = 1.0 + FIRST_RETRY_S
    assert [wiring.choose(now=at).peer_id for _ in range(8)].count(OTHER) == 1  # one probe, not a flood
    wiring.finished(OTHER, 0.01)
    assert OTHER in {wiring.choose(now=at).peer_id for _ in range(4)}


def _steps_beside_a_waster(*, says_no: bool, rarely: float, monkeypatch: pytest.MonkeyPatch) -> tuple[float, int]:
    """How long 240 steps of four microbatches take, and how often one was wasted, where one of two takes what it does
    not end: 3 s, and then it is given up, or says that it cannot."""
    monkeypatch.setattr("swarm.core.pipeline.wiring.RARELY", rarely)
    wiring, now, wasted = _wiring(FAST, OTHER), 0.0, 0
    for _ in range(240):
        ends = []
        for _ in range(4):
            at = now
            while wiring.choose(now=at).peer_id == OTHER:
                at, wasted = at + 3.0, wasted + 1
                if says_no:
                    wiring.refused(OTHER, took_s=3.0, now=at)
                else:
                    wiring.failed(OTHER, took_s=3.0, now=at)
            wiring.finished(FAST, 0.1)
            ends.append(at + 0.1)
        now = max(ends)
    return now, wasted


@pytest.mark.parametrize("says_no", [True, False])
def test_who_takes_work_and_does_not_end_it_is_called_after_all_others(
    says_no: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds, wasted = _steps_beside_a_waster(says_no=says_no, rarely=0.0, monkeypatch=monkeypatch)
    assert seconds > (100.0 if says_no else 30.0), "without the rule"
    seconds, wasted = _steps_beside_a_waster(says_no=says_no, rarely=RARELY, monkeypatch=monkeypatch)
    assert seconds < 24.0 + 4 * 3.0
    assert wasted <= 2


def test_who_wasted_time_is_called_where_nobody_else_is_and_is_forgiven_by_one_answer() -> None:
    wiring = _wiring(FAST, OTHER)
    assert {wiring.choose(now=0.0).peer_id for _ in range(2)} == {FAST, OTHER}
    wiring.failed(OTHER, took_s=10.0, now=10.0)
    assert {wiring.choose(now=20.0).peer_id for _ in range(5)} == {FAST}
    wiring.refused(FAST, now=20.0)
    assert wiring.choose(now=20.01).peer_id == OTHER, "the other is busy"
    wiring.failed(OTHER, took_s=10.0, now=30.0)
    assert {wiring.choose(now=10.0 + RARELY * 10.0 - 1.0).peer_id for _ in range(5)} == {FAST}
    wiring.update({FAST})
    wiring.update({FAST, OTHER})
    assert OTHER in {wiring.choose(now=40.0).peer_id for _ in range(9)}, "it was killed, and has come back"


def test_who_is_busy_or_says_no_soon_is_not_doubted() -> None:
    wiring = _wiring(FAST, OTHER)
    for moment in range(9):
        chosen = [wiring.choose(now=float(moment)).peer_id for _ in range(2)]
        assert set(chosen) == {FAST, OTHER}
        for peer in chosen:
            wiring.refused(peer, took_s=WASTED_S, now=float(moment))


def test_what_fails_together_counts_once_and_waits_are_bounded() -> None:
    wiring = _wiring(FAST)
    for _ in range(4):
        wiring.choose(now=0.0)
    for _ in range(4):
        wiring.failed(FAST, now=1.0)
    with pytest.raises(NoPeerAvailable) as caught:
        wiring.choose(now=1.0)
    assert caught.value.retry_at == 1.0 + FIRST_RETRY_S
    now, waits = 1.0, []
    for _ in range(2000):
        with pytest.raises(NoPeerAvailable) as caught:
            wiring.choose(now=now)
        assert caught.value.retry_at is not None
        waits.append(caught.value.retry_at - now)
        now = caught.value.retry_at
        wiring.choose(now=now)
        wiring.failed(FAST, now=now)
    assert waits[:4] == pytest.approx([FIRST_RETRY_S * 2**n for n in range(4)])
    assert max(waits) == pytest.approx(LONGEST_RETRY_S)
    assert waits[-1] == pytest.approx(LONGEST_RETRY_S)


def test_a_busy_peer_is_tried_again_soon_and_is_not_blamed() -> None:
    wiring = _wiring(FAST)
    for moment in range(10):
        wiring.choose(now=float(moment))
        wiring.refused(FAST, now=float(moment))
        with pytest.raises(NoPeerAvailable) as caught:
            wiring.choose(now=float(moment))
        assert caught.value.retry_at == moment + BUSY_RETRY_S


def test_ties_are_broken_by_chance() -> None:
    peers = {PeerId(f"peer {number}") for number in range(4)}
    chosen = [_wiring(*peers, seed=seed).choose(now=0.0).peer_id for seed in range(80)]
    assert set(chosen) == peers
    assert chosen == [_wiring(*peers, seed=seed).choose(now=0.0).peer_id for seed in range(80)]


def test_a_peer_that_left_gets_nothing_though_it_still_owes_answers() -> None:
    wiring = _wiring(FAST, OTHER)
    chosen = {wiring.choose(now=0.0).peer_id for _ in range(2)}
    assert chosen == {FAST, OTHER}
    wiring.update({FAST})
    assert wiring.peers() == (FAST,)
    wiring.failed(OTHER, now=0.0)
    assert {wiring.choose(now=100.0).peer_id for _ in range(9)} == {FAST}
    wiring.finished(OTHER, 1.0)  # a stray answer of a peer that is forgotten
    wiring.update({FAST, OTHER})
    assert OTHER in {wiring.choose(now=200.0).peer_id for _ in range(9)}


def test_the_shortest_queue_is_chosen_while_its_word_is_fresh() -> None:
    wiring = _wiring(FAST, SLOW, OTHER)
    for _ in range(3):
        wiring.choose(now=0.0)
    for peer, waits_s in ((FAST, 3.0), (SLOW, 0.5), (OTHER, 2.0)):
        wiring.told(peer, waits_s, now=10.0)
    assert [wiring.choose(now=10.5).peer_id for _ in range(3)] == [SLOW, OTHER, FAST]  # a word is for one microbatch
    wiring.told(SLOW, 0.0, now=10.5)
    wiring.told(OTHER, 9.0, now=11.6)
    assert wiring.choose(now=11.6).peer_id == OTHER  # what the other said is old


def test_a_peer_that_always_has_room_but_answers_late_loses_its_traffic() -> None:
    wiring = _wiring(FAST, SLOW)
    chosen = []
    for now in range(100):
        wiring.told(SLOW, 0.0, now=float(now))
        wiring.told(FAST, 1.0, now=float(now))
        chosen.append(wiring.choose(now=float(now)).peer_id)
        wiring.finished(chosen[-1], 10.0 if chosen[-1] == FAST else 30.0)
    assert chosen.count(SLOW) < 10


def test_only_those_that_take_long_are_worth_asking() -> None:
    wiring = _wiring(FAST, SLOW, OTHER)
    assert wiring.worth_asking(b"microbatch", now=0.0) == ()
    for _ in range(3):
        wiring.finished(wiring.choose(now=0.0).peer_id, 40.0)
    wiring.choose(now=0.0)
    assert set(wiring.worth_asking(b"microbatch", now=0.0)) == {FAST, SLOW, OTHER}
    wiring.update({FAST})
    assert wiring.worth_asking(b"microbatch", now=0.0) == ()


def test_who_is_asked_follows_from_the_microbatch_and_changes_little_with_who_is_there() -> None:
    peers = {PeerId(f"peer {number}") for number in range(40)}

    def asked(there: set[PeerId], microbatch: bytes, seed: int) -> set[PeerId]:
        wiring = _wiring(*there, seed=seed)
        wiring.finished(wiring.choose(now=0.0).peer_id, 40.0)
        return set(wiring.worth_asking(microbatch, now=0.0))

    chosen = [asked(peers, bytes([number]), seed=number) for number in range(100)]
    assert all(len(eight) == ASKED for eight in chosen)
    assert set().union(*chosen) == peers
    for number, eight in enumerate(chosen):
        assert asked(peers, bytes([number]), seed=1000 + number) == eight
        gone = min(eight)
        assert len(eight & asked(peers - {gone}, bytes([number]), seed=2)) == ASKED - 1


def test_whoever_holds_the_microbatch_goes_first_unless_it_is_always_late() -> None:
    wiring = _wiring(FAST, SLOW, OTHER)
    for peer in (FAST, SLOW):
        wiring.told(peer, 0.0, now=0.0)
        assert wiring.choose(now=0.0).peer_id == peer
        wiring.finished(peer, 40.0)

    def chosen(microbatch: bytes) -> Route:
        for peer, waits_s in ((FAST, 0.0), (SLOW, 0.0), (OTHER, 9.0)):
            wiring.told(peer, waits_s, holds=b"held" if peer == OTHER else b"", now=0.0)
        return wiring.choose(microbatch, now=0.0)

    route = chosen(b"held")
    assert (route.peer_id, route.is_held) == (OTHER, True)
    wiring.finished(OTHER, 0.1, was_held=True)  # it had done the work before: that says nothing of its speed
    assert {chosen(b"another").peer_id for _ in range(20)} == {FAST, SLOW}
    num_late = 0
    for _ in range(20):
        route = chosen(b"held")
        num_late += route.peer_id == OTHER
        wiring.finished(route.peer_id, 200.0 if route.peer_id == OTHER else 40.0, was_held=route.is_held)
    assert num_late == 2


def test_nobody_known_is_said_with_the_remedy() -> None:
    wiring = _wiring()
    with pytest.raises(NoPeerAvailable, match="swarm join --stage 1") as caught:
        wiring.choose(now=0.0)
    assert caught.value.retry_at is None


def test_an_answer_without_a_choice_is_our_own_fault() -> None:
    wiring = _wiring(FAST)
    with pytest.raises(AssertionError):
        wiring.finished(FAST, 1.0)
