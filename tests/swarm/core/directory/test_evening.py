"""Five peers at one stage and one at the other become three and three, and stay, whatever two of them say."""

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise

import pytest

from swarm.core.directory.capacities import Witness, capacities
from swarm.core.directory.evening import SETTLES_VERSIONS, Evening, StageFigures
from swarm.core.directory.rebalancing import Move, RebalancingSettings
from swarm.core.ids import PeerId
from swarm.core.pipeline.quickest import Quickest
from swarm.core.state.recent_work import RECENT_VERSIONS

IN_FLIGHT = 4
PER_VERSION = 24
MOVE_S = 6.0
COME_VERSIONS = 3
"""That a peer takes to get the other stage's state."""
FORWARD = 1 / 3
"""Of a microbatch's work at the first stage; the rest is its backward."""

Lie = Callable[[Witness], Witness]
LIES: dict[str, Lie] = {
    "ten times as fast, others a tenth": lambda said: Witness(said.work, said.answered_s / 10, said.waited_s * 10),
    "a tenth as fast, others ten times": lambda said: Witness(said.work, said.answered_s * 10, said.waited_s / 10),
    "all is fast": lambda said: Witness(said.work, said.answered_s / 10, said.waited_s / 10),
    "all is slow": lambda said: Witness(said.work, said.answered_s * 10, said.waited_s * 10),
}


@dataclass(eq=False)
class _Peer:
    name: PeerId
    stage: int
    service_s: tuple[float, float]
    """Of a microbatch at each of the two stages."""
    lie: Lie | None
    free_at: float = 0.0
    held: int = 0
    answered: Quickest = field(default_factory=Quickest)
    waited: Quickest = field(default_factory=Quickest)
    done: deque[int] = field(default_factory=lambda: deque([PER_VERSION] * RECENT_VERSIONS, RECENT_VERSIONS))
    comes_at: int = 0
    """The version from which it works."""


class TwoStages:
    """Sources that keep microbatches in flight, queues at every peer, and a host that looks after each version."""

    def __init__(self, stages: list[int], *, liars: tuple[int, ...], lie: Lie, seed: int, speeds: list[float]) -> None:
        self.rng = random.Random(seed)
        self.peers = [
            _Peer(PeerId(f"p{n}"), stage, (1 / speeds[n], 1 / speeds[n]), lie if n in liars else None)
            for n, stage in enumerate(stages)
        ]
        self.evening = Evening([1.0, 1.0], MOVE_S, RebalancingSettings(min_replicas=1))
        self.now, self.version, self.num_done = 0.0, 0, 0
        self.ends: list[tuple[float, int]] = []
        self.history: list[list[int]] = []
        self.moved: _Peer | None = None
        self.in_flight = IN_FLIGHT
        self._counts = Counter[PeerId]()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def run(self, versions: int) -> None:
        for peer in self._at(0):
            self._fill(peer)
        while self.version < versions:
            self.now, _, event = heapq.heappop(self._events)
            event()

    def _at(self, stage: int) -> list[_Peer]:
        return [peer for peer in self.peers if peer.stage == stage and peer.comes_at <= self.version]

    def _after(self, peer: _Peer, work: float, then: Callable[[], None]) -> None:
        """Work of a peer that does one thing after another."""
        seconds = work * peer.service_s[peer.stage] * self.rng.uniform(0.95, 1.1)
        peer.free_at = max(self.now, peer.free_at) + seconds
        self._number += 1
        heapq.heappush(self._events, (peer.free_at, self._number, then))

    def _fill(self, source: _Peer) -> None:
        while source.stage == 0 and source.held < self.in_flight:
            source.held += 1
            self._begin(source, self.now)

    def _begin(self, source: _Peer, began_at: float) -> None:
        def send() -> None:
            least = min(peer.held for peer in self._at(1))
            callee = self.rng.choice([peer for peer in self._at(1) if peer.held == least])
            callee.held += 1
            sent_at = self.now
            self._after(callee, 1.0, lambda: answer(callee, sent_at))

        def answer(callee: _Peer, sent_at: float) -> None:
            callee.held -= 1
            callee.answered.observe(self.now - sent_at)
            source.waited.observe(self.now - sent_at)
            self._counts[callee.name] += 1
            self._after(source, 1 - FORWARD, end)

        def end() -> None:
            source.held -= 1
            source.answered.observe(self.now - began_at)
            self._counts[source.name] += 1
            self.num_done += 1
            if self.num_done % PER_VERSION == 0:
                self._turn()
            self._fill(source)

        self._after(source, FORWARD, send)

    def _turn(self) -> None:
        self.version += 1
        self.ends.append((self.now, self.num_done))
        for peer in self.peers:
            if peer.comes_at < self.version:
                peer.done.append(self._counts.pop(peer.name, 0))
            if peer.comes_at == self.version and peer.stage == 0:
                self._fill(peer)
        self.history.append([sum(peer.stage == stage for peer in self.peers) for stage in range(2)])
        if not self.evening.waits(self.version, is_moving=any(peer.comes_at >= self.version for peer in self.peers)):
            (start, before), (stop, after) = self.ends[-SETTLES_VERSIONS], self.ends[-1]
            rate = (after - before) / (stop - start)
            move = self.evening.look(
                [self._figures(stage) for stage in range(2)],
                version=self.version,
                rate=rate,
                seed=lambda target: bytes([target, self.version % 256]),
            )
            if move is not None:
                self._move(next(peer for peer in self.peers if peer.name == move.peer_id), int(move.target))

    def _move(self, peer: _Peer, target: int) -> None:
        peer.stage, peer.comes_at = target, self.version + COME_VERSIONS
        peer.answered, peer.waited = Quickest(), Quickest()
        peer.done.clear()

    def _figures(self, stage: int) -> StageFigures:
        here = self._at(stage)
        said = {peer.name: Witness(sum(peer.done), peer.answered.seconds, peer.waited.seconds) for peer in here}
        said = {peer.name: peer.lie(said[peer.name]) if peer.lie else said[peer.name] for peer in here}
        settled = {peer.name for peer in here if len(peer.done) >= SETTLES_VERSIONS}
        return StageFigures(set(said), said, settled)


def moves(history: list[list[int]]) -> list[list[int]]:
    """The sizes of the stages, each once for as long as it lasted."""
    return [history[0]] + [after for before, after in pairwise(history) if after != before]


@pytest.mark.parametrize("lie", LIES)
def test_five_and_one_become_three_and_three_and_stay_whichever_two_lie(lie: str) -> None:
    for liars in combinations(range(6), 2):
        swarm = TwoStages([0, 0, 0, 0, 0, 1], liars=liars, lie=LIES[lie], seed=sum(liars), speeds=[1.0] * 6)
        swarm.run(100)
        assert moves(swarm.history) == [[5, 1], [4, 2], [3, 3]], (lie, liars, moves(swarm.history))
        assert swarm.history[50:] == [[3, 3]] * 50, (lie, liars)


@pytest.mark.parametrize("lie", LIES)
def test_three_and_three_stay_whichever_two_lie(lie: str) -> None:
    for liars in combinations(range(6), 2):
        swarm = TwoStages([0, 0, 0, 1, 1, 1], liars=liars, lie=LIES[lie], seed=sum(liars), speeds=[1.0] * 6)
        swarm.run(50)
        assert moves(swarm.history) == [[3, 3]], (lie, liars)


@pytest.mark.parametrize(
    ("start", "end"), [([1, 5], [[1, 5], [2, 4], [3, 3]]), ([12, 4], [[12, 4], [11, 5], [10, 6], [9, 7]])]
)
def test_stages_become_even_from_either_side_and_stay(start: list[int], end: list[list[int]]) -> None:
    stages = [stage for stage, size in enumerate(start) for _ in range(size)]
    swarm = TwoStages(stages, liars=(), lie=LIES["all is fast"], seed=3, speeds=[1.0] * len(stages))
    swarm.run(200)
    assert moves(swarm.history) == end


@pytest.mark.parametrize("slow", [0, 1])
def test_one_quick_peer_needs_no_help_of_five_slow_ones(slow: int) -> None:
    """By heads one would go."""
    stages, speeds = [slow] * 5 + [1 - slow], [1.0] * 5 + [5.0]
    for seed in range(3):
        swarm = TwoStages(stages, liars=(), lie=LIES["all is fast"], seed=seed, speeds=speeds)
        swarm.in_flight = 3 * IN_FLIGHT  # with fewer the lone source would be too few
        swarm.run(100)
        assert len(moves(swarm.history)) == 1, moves(swarm.history)


A, B, C = (PeerId(name) for name in "abc")


def looked(evening: Evening, stages: Sequence[Sequence[PeerId]], *, version: int, rate: float) -> Move | None:
    """Of stages whose peers all do one microbatch a second."""
    said = Witness(1, 1.0, 0.0), Witness(1, 1.0, 0.0)
    figures = [
        StageFigures(set(stage), {peer: replace(said[n], waited_s=1.0 - n) for peer in stage}, set(stage))
        for n, stage in enumerate(stages)
    ]
    figures[0] = replace(figures[0], witnesses={peer: Witness(1, 2.0, 1.0) for peer in stages[0]})
    return evening.look(figures, version=version, rate=rate, seed=lambda target: b"")


def test_after_a_move_that_brought_nothing_the_next_comes_after_twice_as_many_versions() -> None:
    evening, quick = Evening([1.0, 1.0], 1.0, RebalancingSettings(min_replicas=1)), [PeerId(f"p{n}") for n in range(8)]
    assert evening.waits(SETTLES_VERSIONS - 1, is_moving=False)
    assert not evening.waits(SETTLES_VERSIONS, is_moving=False)
    moved = looked(evening, (quick, [A]), version=8, rate=1.0)
    assert moved is not None
    assert (moved.source, moved.target) == (0, 1)
    assert evening.waits(12, is_moving=True)
    assert evening.waits(19, is_moving=False)
    assert not evening.waits(20, is_moving=False)
    left = [peer for peer in quick if peer != moved.peer_id]
    assert looked(evening, (left, [A, moved.peer_id]), version=20, rate=1.0) is None
    assert evening.waits(20 + 2 * SETTLES_VERSIONS - 1, is_moving=False)
    assert not evening.waits(20 + 2 * SETTLES_VERSIONS, is_moving=False)
    assert looked(evening, (left, [A, moved.peer_id]), version=36, rate=1.0) is not None


def test_no_stage_gives_anybody_away_while_too_many_of_it_are_silent() -> None:
    there = {PeerId(f"p{n}"): Witness(1, 2.0, 1.0) for n in range(3)}
    for members, can_spare in ((3, True), (4, False), (6, False)):
        stage = StageFigures({PeerId(f"p{n}") for n in range(members)}, there, set(there))
        assert stage.can_spare == can_spare


def test_nobody_counts_for_more_than_the_model_allows_at_the_first_stage_nor_for_less_than_is_certified() -> None:
    boasts, honest = Witness(1, 1e-3, 1e-3), Witness(1, 1.0, 0.0)
    assert capacities([{A: boasts}, {B: honest, C: honest}], [1.0, 2.0], rate=0.5) == (2.0, 2.0)
    assert capacities([{A: Witness(1, 90.0, 1.0)}, {B: honest, C: honest}], [1.0, 2.0], rate=0.5) == (0.5, 2.0)
    assert capacities([{A: Witness(1, 0.0, 0.0)}, {B: honest}], [1.0, 1.0], rate=0.5) is None
