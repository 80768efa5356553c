"""This is where simulated microbatches pass through the stages, each by itself: compiled, for they are millions.

A peer computes in the order of arrival and sends one activation after another. It chooses among the peers it knows of
the next stage as `swarm.core.wiring.EarliestFinishWiring` does, from the durations it measured itself, but for one rule
(whoever is late with the oldest in flight): `tests/test_fleet_flow.py` holds the two against each other. What is not
about single microbatches (who is a member, when a round begins) is `peer.fleet.fleet`'s, in Python.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kernels.compiled import compiled
from swarm.core.wiring import FORGET_AFTER, LOAD_MEMORY, SMOOTHING

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Places in `Flow.counters`
HEAP, FREE, STEP, GRANTED, TARGET, LIMIT, CHOICES, COMPLETED, KILLED, REDONE, CHANCE, TRIPS, SENT, ORPHANED = range(14)
NO_PEER_RETRY_S = 1.0
BUSY_S = 1e6
NUM_TRIPS = 1 << 10


PEER = np.dtype(
    [
        ("stage", np.int64),  # -1: serves none
        ("takes", np.int64),  # whether it takes new work: 0 while it drains
        ("window", np.int64),  # microbatches a source keeps in flight
        ("in_flight", np.int64),  # of a source
        ("forward_s", np.float64),
        ("backward_s", np.float64),
        ("send_s", np.float64),  # of one activation through its uplink
        ("free_at", np.float64),
        ("sends_at", np.float64),  # when the uplink is free
    ]
)
KNOWN = np.dtype(
    [
        ("target", np.int64),
        ("pending", np.int64),
        ("duration_s", np.float64),  # below 0: not measured
        ("load", np.float64),
        ("last_sent_at", np.float64),
    ]
)
WORK = np.dtype(
    [
        ("at", np.int64),  # stage it is at, or on the way to; -1 at the end of the way back
        ("is_back", np.int64),
        ("token", np.int64),  # an event with another token is stale
        ("step", np.int64),
        ("counted", np.int64),  # the first stage that has it in its sum: all above have too
        ("is_active", np.int64),
        ("left_at", np.float64),  # when the last sender had sent all of it
        ("born", np.float64),
    ]
)
WAY = np.dtype([("chosen_at", np.float64), ("link", np.int32), ("load_then", np.int32)])
EVENT = np.dtype([("at", np.float64), ("work", np.int64), ("token", np.int64)])


class Flow(NamedTuple):
    """P peers, each knowing F of the next stage; S stages; room for M microbatches in flight.

    Few arrays of records: a compiled call counts a reference of each.
    """

    peers: Any
    """PEER [P]"""
    done: Ints
    """[P, 2] unaveraged microbatches, of even and odd steps."""
    known: Any
    """KNOWN [P, F]: what a peer knows of the next stage."""
    work: Any
    """WORK [M]: microbatches."""
    ways: Any
    """WAY [M, S]: how the peer of each stage chose the next."""
    holder: NDArray[np.int32]
    """[S, M]: the peer of each stage that has the microbatch; by stage, for a lost peer's are searched."""
    free: Ints
    """[M] places in `work`."""
    heap: Any
    """EVENT [4 M]"""
    members: NDArray[np.int32]
    """[S, P]"""
    num_members: Ints
    open_step: Ints
    """[S] the step whose round has not begun."""
    stage_done: Ints
    """[S, 2]"""
    void: Ints
    """[S, 2] microbatches that will not come any more."""
    added: Ints
    """[S] microbatches added to a live peer's sum, ever."""
    counters: Ints
    trips_s: Floats
    """The last ones' durations."""
    settings: Floats
    """Delay in seconds from peer to peer; 1 if only a lost peer's own stage is computed again; seconds of waiting work
    past which a peer says BUSY."""


def empty_flow(
    num_peers: int,
    fanout: int,
    num_stages: int,
    num_work: int,
    *,
    delay_s: float,
    redo_stage: bool,
    busy_s: float = math.inf,
) -> Flow:
    """No peers, no microbatches."""
    counters = np.zeros(14, np.int64)
    counters[FREE] = num_work
    counters[CHANCE] = 88172645463325252
    peers = np.zeros(num_peers, PEER)
    peers["stage"] = -1
    known = np.zeros((num_peers, fanout), KNOWN)
    known["target"], known["duration_s"] = -1, -1.0
    ways = np.zeros((num_work, num_stages), WAY)
    ways["link"] = -1
    return Flow(
        peers=peers,
        done=np.zeros((num_peers, 2), np.int64),
        known=known,
        work=np.zeros(num_work, WORK),
        ways=ways,
        holder=np.full((num_stages, num_work), -1, np.int32),
        free=np.arange(num_work, dtype=np.int64),
        heap=np.zeros(4 * num_work, EVENT),
        members=np.full((num_stages, num_peers), -1, np.int32),
        num_members=np.zeros(num_stages, np.int64),
        open_step=np.zeros(num_stages, np.int64),
        stage_done=np.zeros((num_stages, 2), np.int64),
        void=np.zeros((num_stages, 2), np.int64),
        added=np.zeros(num_stages, np.int64),
        counters=counters,
        trips_s=np.zeros(NUM_TRIPS),
        settings=np.array([delay_s, float(redo_stage), busy_s]),
    )


@compiled
def _push(flow: Flow, at: float, work: int) -> None:
    place = flow.counters[HEAP]
    flow.counters[HEAP] += 1
    while place > 0:
        above = (place - 1) >> 1
        if flow.heap[above].at <= at:
            break
        flow.heap[place].at = flow.heap[above].at
        flow.heap[place].work = flow.heap[above].work
        flow.heap[place].token = flow.heap[above].token
        place = above
    flow.heap[place].at = at
    flow.heap[place].work = work
    flow.heap[place].token = flow.work[work].token


@compiled
def _pop(flow: Flow) -> None:
    """Take the first event away."""
    flow.counters[HEAP] -= 1
    size = flow.counters[HEAP]
    at, work, token = flow.heap[size].at, flow.heap[size].work, flow.heap[size].token
    place = 0
    while True:
        below = 2 * place + 1
        if below >= size:
            break
        if below + 1 < size and flow.heap[below + 1].at < flow.heap[below].at:
            below += 1
        if flow.heap[below].at >= at:
            break
        flow.heap[place].at = flow.heap[below].at
        flow.heap[place].work = flow.heap[below].work
        flow.heap[place].token = flow.heap[below].token
        place = below
    flow.heap[place].at = at
    flow.heap[place].work = work
    flow.heap[place].token = token


@compiled
def _chance(flow: Flow, num: int) -> int:
    """A number below `num` (xorshift)."""
    x = flow.counters[CHANCE]
    x ^= x << 13
    x ^= (x >> 7) & 0x1FFFFFFFFFFFFFF
    x ^= x << 17
    flow.counters[CHANCE] = x
    return int((x & 0x7FFFFFFFFFFFFFFF) % num)


@compiled
def choose(flow: Flow, caller: int, stage: int, now: float) -> int:
    """Place, among those the caller knows, of the peer of `stage` expected to answer first; -1: none is there."""
    num_known = flow.known.shape[1]
    each_s, best_s, num_measured = 0.0, math.inf, 0
    num_there = flow.num_members[stage]
    for place in range(num_known):
        peer = flow.known[caller, place].target
        if peer < 0 or flow.peers[peer].takes == 0 or flow.peers[peer].stage != stage:
            if num_there == 0:
                return -1
            flow.known[caller, place].target = flow.members[stage, _chance(flow, num_there)]
            flow.known[caller, place].duration_s = -1.0
            flow.known[caller, place].load = 0.0
            flow.known[caller, place].pending = 0
            flow.known[caller, place].last_sent_at = 0.0
        elif flow.known[caller, place].duration_s >= 0:
            each_s += flow.known[caller, place].duration_s / flow.known[caller, place].load
            best_s = min(best_s, flow.known[caller, place].duration_s)
            num_measured += 1
    each_s = each_s / num_measured if num_measured else 1.0
    if num_measured == 0:
        best_s = 0.0
    chosen, soonest_s, first = -1, math.inf, _chance(flow, num_known)
    for turn in range(num_known):
        place = first + turn if first + turn < num_known else first + turn - num_known
        duration_s, load = flow.known[caller, place].duration_s, flow.known[caller, place].load
        pending = flow.known[caller, place].pending
        if duration_s < 0 or (
            pending == 0 and now > flow.known[caller, place].last_sent_at + FORGET_AFTER * duration_s
        ):
            duration_s, load = best_s, 1.0
        expected_s = duration_s + each_s * (pending + 1 - LOAD_MEMORY * load)
        if flow.peers[flow.known[caller, place].target].free_at > now + flow.settings[2]:
            expected_s += BUSY_S  # it would refuse: only if all do
        if expected_s < soonest_s:
            chosen, soonest_s = place, expected_s
    flow.counters[CHOICES] += 1
    return chosen


@compiled
def sent(flow: Flow, caller: int, place: int, now: float) -> int:
    """The load that the chosen peer now has from the caller."""
    flow.known[caller, place].pending += 1
    flow.known[caller, place].last_sent_at = now
    return int(flow.known[caller, place].pending)


@compiled
def finished(flow: Flow, caller: int, place: int, duration_s: float, load: int) -> None:
    """The peer answered."""
    share = SMOOTHING if flow.known[caller, place].duration_s >= 0 else 1.0
    before_s = flow.known[caller, place].duration_s if flow.known[caller, place].duration_s >= 0 else 0.0
    flow.known[caller, place].duration_s = (1 - share) * before_s + share * duration_s
    flow.known[caller, place].load = (1 - share) * flow.known[caller, place].load + share * load
    flow.known[caller, place].pending -= 1


@compiled
def _is_known(flow: Flow, work: int, hop: int) -> bool:
    """Whether the caller at stage `hop` still knows the peer it sent the microbatch to."""
    place = flow.ways[work, hop].link
    return bool(place >= 0 and flow.known[flow.holder[hop, work], place].target == flow.holder[hop + 1, work])


@compiled
def _forget(flow: Flow, work: int, hop: int) -> None:
    """The call from stage `hop` ends without an answer."""
    if _is_known(flow, work, hop):
        flow.known[flow.holder[hop, work], flow.ways[work, hop].link].pending -= 1
    flow.ways[work, hop].link = -1


@compiled
def _send(flow: Flow, sender: int, ready_at: float) -> float:
    """When an activation is through the sender's uplink."""
    through_at = max(ready_at, flow.peers[sender].sends_at) + flow.peers[sender].send_s
    flow.peers[sender].sends_at = through_at
    flow.counters[SENT] += 1
    return float(through_at)


@compiled
def _onward(flow: Flow, work: int, now: float, ready_at: float) -> None:
    """The peer at stage `at` - 1 sends the microbatch, once it is ready, to a peer that it chooses."""
    stage = flow.work[work].at
    caller = flow.holder[stage - 1, work]
    place = choose(flow, caller, stage, now)
    if place < 0:
        flow.holder[stage, work] = -1
        flow.ways[work, stage - 1].link = -1
        _push(flow, max(ready_at, now) + NO_PEER_RETRY_S, work)
        return
    flow.holder[stage, work] = flow.known[caller, place].target
    flow.ways[work, stage - 1].link = place
    flow.ways[work, stage - 1].chosen_at = now
    flow.ways[work, stage - 1].load_then = sent(flow, caller, place, now)
    flow.work[work].left_at = _send(flow, caller, ready_at)
    _push(flow, flow.work[work].left_at + flow.settings[0], work)


@compiled
def _compute(flow: Flow, peer: int, now: float, seconds: float) -> float:
    end = max(now, flow.peers[peer].free_at) + seconds
    flow.peers[peer].free_at = end
    return float(end)


@compiled
def _count(flow: Flow, work: int, stage: int) -> None:
    """The stage's peer has it in its sum."""
    if stage >= flow.work[work].counted:
        return
    flow.work[work].counted = stage
    step = flow.work[work].step
    if step < flow.open_step[stage]:
        return
    flow.stage_done[stage, step & 1] += 1
    peer = flow.holder[stage, work]
    if peer >= 0 and flow.peers[peer].stage == stage:
        flow.done[peer, step & 1] += 1
        flow.added[stage] += 1


@compiled
def is_full(flow: Flow, stage: int) -> bool:
    """Whether all of the stage's open step that can come has come."""
    parity = flow.open_step[stage] & 1
    is_granted = flow.counters[STEP] > flow.open_step[stage] or (
        flow.counters[STEP] == flow.open_step[stage] and flow.counters[GRANTED] >= flow.counters[TARGET]
    )
    return bool(is_granted and flow.stage_done[stage, parity] + flow.void[stage, parity] >= flow.counters[TARGET])


@compiled
def _end(flow: Flow, work: int) -> None:
    flow.work[work].token += 1
    flow.work[work].is_active = 0
    flow.free[flow.counters[FREE]] = work
    flow.counters[FREE] += 1
    source = flow.holder[0, work]
    if flow.peers[source].stage == 0:
        flow.peers[source].in_flight -= 1


@compiled
def kill(flow: Flow, work: int) -> None:
    """The microbatch is lost to the stages that have not counted it."""
    for stage in range(flow.work[work].counted):
        if flow.work[work].step >= flow.open_step[stage]:
            flow.void[stage, flow.work[work].step & 1] += 1
    last = flow.work[work].at + 1 if flow.work[work].is_back else flow.work[work].at
    for hop in range(last):
        _forget(flow, work, hop)
    flow.counters[KILLED] += 1
    _end(flow, work)


@compiled
def start(flow: Flow, source: int, now: float) -> None:
    """The source fills its window, as far as the step's grants go."""
    counters = flow.counters
    while (
        flow.peers[source].takes
        and flow.peers[source].stage == 0
        and flow.peers[source].in_flight < flow.peers[source].window
    ):
        if counters[GRANTED] >= counters[TARGET]:
            if counters[STEP] >= counters[LIMIT]:
                return
            counters[STEP] += 1
            counters[GRANTED] = 0
        if counters[FREE] == 0:
            return
        counters[FREE] -= 1
        counters[GRANTED] += 1
        work = flow.free[counters[FREE]]
        flow.peers[source].in_flight += 1
        flow.holder[0, work] = source
        flow.work[work].at = 0
        flow.work[work].is_back = 0
        flow.work[work].step = counters[STEP]
        flow.work[work].left_at = now
        flow.work[work].counted = flow.holder.shape[0]
        flow.work[work].is_active = 1
        flow.work[work].born = now
        _push(flow, now, work)


@compiled
def start_all(flow: Flow, now: float) -> None:
    """Every source fills its window."""
    for place in range(flow.num_members[0]):
        start(flow, flow.members[0, place], now)


@compiled
def _event(flow: Flow, work: int, now: float) -> int:
    """Something happens to a microbatch; the stage that counted it, or -1."""
    stage, last = flow.work[work].at, flow.holder.shape[0] - 1
    if not flow.work[work].is_back:
        peer = flow.holder[stage, work]
        if stage > 0 and (peer < 0 or flow.peers[peer].stage != stage):
            _forget(flow, work, stage - 1)
            _onward(flow, work, now, now)
            return -1
        end = _compute(flow, peer, now, flow.peers[peer].forward_s)
        if stage < last:
            flow.work[work].at = stage + 1
            _onward(flow, work, now, end)
            return -1
        end = _compute(flow, peer, now, flow.peers[peer].backward_s)
        flow.work[work].is_back = 1
        flow.work[work].at = stage - 1
        flow.work[work].left_at = _send(flow, peer, end)
        _push(flow, flow.work[work].left_at + flow.settings[0], work)
        return -1
    _count(flow, work, stage + 1)
    if stage < 0:
        source = flow.holder[0, work]
        flow.trips_s[flow.counters[TRIPS] % NUM_TRIPS] = now - flow.work[work].born
        flow.counters[TRIPS] += 1
        flow.counters[COMPLETED] += 1
        _end(flow, work)
        start(flow, source, now)
        return 0
    if flow.work[work].step < flow.open_step[stage]:  # a straggler: its step has closed here
        source = flow.holder[0, work]
        kill(flow, work)
        start(flow, source, now)
        return int(stage + 1)
    peer = flow.holder[stage, work]
    if _is_known(flow, work, stage):
        seconds = now - flow.ways[work, stage].chosen_at
        finished(flow, peer, flow.ways[work, stage].link, seconds, flow.ways[work, stage].load_then)
    flow.ways[work, stage].link = -1
    end = _compute(flow, peer, now, flow.peers[peer].backward_s)
    flow.work[work].at = stage - 1
    flow.work[work].left_at = _send(flow, peer, end) if stage > 0 else end
    _push(flow, flow.work[work].left_at + (flow.settings[0] if stage > 0 else 0.0), work)
    return int(stage + 1)


@compiled
def advance(flow: Flow, until: float) -> tuple[float, int]:
    """Let things happen up to `until`, or until a stage's step is full: the time, and the stage or -1."""
    while flow.counters[HEAP] > 0 and flow.heap[0].at <= until:
        now, work, token = flow.heap[0].at, flow.heap[0].work, flow.heap[0].token
        _pop(flow)
        if token == flow.work[work].token:
            stage = _event(flow, work, now)
            if stage >= 0 and is_full(flow, stage):
                return now, stage
    return until, -1


@compiled
def expire(flow: Flow, step: int) -> None:
    """What is still under way of `step` is late: lost to the stages that have not counted it."""
    for work in range(flow.work.shape[0]):
        if flow.work[work].is_active and flow.work[work].step == step:
            kill(flow, work)


@compiled
def join(flow: Flow, peer: int, stage: int) -> None:
    """The peer is a member of the stage, and some of the stage before learn of it."""
    flow.peers[peer].stage = stage
    flow.peers[peer].takes = 1
    flow.members[stage, flow.num_members[stage]] = peer
    flow.num_members[stage] += 1
    num_known = flow.known.shape[1]
    for place in range(num_known):
        flow.known[peer, place].target = -1
    if stage > 0 and flow.num_members[stage - 1] > 0:
        callers = flow.num_members[stage - 1]
        for _ in range(max(1, num_known * callers // flow.num_members[stage])):
            caller, place = flow.members[stage - 1, _chance(flow, callers)], _chance(flow, num_known)
            flow.known[caller, place].target = peer
            flow.known[caller, place].duration_s = -1.0
            flow.known[caller, place].load = 0.0
            flow.known[caller, place].pending = 0


@compiled
def drain(flow: Flow, peer: int) -> None:
    """The peer takes no more work."""
    flow.peers[peer].takes = 0
    stage = flow.peers[peer].stage
    for place in range(flow.num_members[stage]):
        if flow.members[stage, place] == peer:
            flow.num_members[stage] -= 1
            flow.members[stage, place] = flow.members[stage, flow.num_members[stage]]
            return


@compiled
def _again(flow: Flow, work: int, stage: int, now: float) -> None:
    """The stage before the lost peer sends the microbatch to another, and all from there on is computed again."""
    last = flow.work[work].at + 1 if flow.work[work].is_back else flow.work[work].at
    for hop in range(stage - 1, last):
        _forget(flow, work, hop)
    flow.work[work].token += 1
    flow.work[work].is_back = 0
    flow.work[work].at = stage
    flow.counters[REDONE] += 1
    _onward(flow, work, now, now)


@compiled
def _adopted(flow: Flow, work: int, stage: int, now: float) -> None:
    """The stage before sends the microbatch to another peer, which computes it forward and takes the lost one's place:
    what is under way in later stages goes on."""
    caller, sender_was_lost = (
        flow.holder[stage - 1, work],
        flow.work[work].at <= stage and flow.work[work].is_back == 1,
    )
    if sender_was_lost and (
        stage == flow.holder.shape[0] - 1 or flow.peers[flow.holder[stage + 1, work]].stage != stage + 1
    ):
        _again(flow, work, stage, now)
        return
    _forget(flow, work, stage - 1)
    place = choose(flow, caller, stage, now)
    if place < 0:
        _again(flow, work, stage, now)
        return
    peer = flow.known[caller, place].target
    flow.holder[stage, work] = peer
    flow.ways[work, stage - 1].link = place
    flow.ways[work, stage - 1].chosen_at = now
    flow.ways[work, stage - 1].load_then = sent(flow, caller, place, now)
    flow.ways[work, stage].link = -1
    through_at = _send(flow, caller, now)
    ready_at = _compute(flow, peer, through_at + flow.settings[0], flow.peers[peer].forward_s)
    flow.counters[REDONE] += 1
    if sender_was_lost:  # the gradient had come to the lost peer, or was on its way: it is sent again
        flow.work[work].token += 1
        flow.work[work].at = stage
        flow.work[work].left_at = _send(flow, flow.holder[stage + 1, work], now)
        _push(flow, max(ready_at, flow.work[work].left_at + flow.settings[0]), work)


@compiled
def lose(flow: Flow, peer: int, now: float, noticed_at: float) -> float:
    """The peer is gone with all it held; from `noticed_at` others take its place: when the last of them can go on."""
    stage = flow.peers[peer].stage
    if flow.peers[peer].takes:
        drain(flow, peer)
    flow.peers[peer].stage = -1
    flow.done[peer, 0] = 0
    flow.done[peer, 1] = 0
    flow.peers[peer].in_flight = 0
    redo_stage = flow.settings[1] > 0
    back_at = now
    for work in range(flow.work.shape[0]):
        if flow.holder[stage, work] != peer or not flow.work[work].is_active:
            continue
        at, is_back = flow.work[work].at, flow.work[work].is_back
        if not is_back and at < stage:
            continue
        if stage == 0:
            kill(flow, work)
            flow.counters[ORPHANED] += 1
            continue
        if is_back and (at < stage - 1 or (at == stage - 1 and now >= flow.work[work].left_at)):
            continue  # it has done its part; the sum is lost, not the microbatch
        left = not is_back and (at > stage + 1 or (at == stage + 1 and now >= flow.work[work].left_at))
        if redo_stage and (is_back or left):
            _adopted(flow, work, stage, noticed_at)
        else:
            _again(flow, work, stage, noticed_at)
        other = flow.holder[stage, work]
        if other >= 0:
            back_at = max(back_at, flow.peers[flow.holder[stage - 1, work]].sends_at, flow.peers[other].free_at)
    return float(back_at)


def compile_all() -> None:
    """Compile what a simulation calls, so that it is not timed; kept on disk for the next process."""
    flow = empty_flow(4, 2, 2, 4, delay_s=0.1, redo_stage=True)
    flow.peers["forward_s"] = flow.peers["send_s"] = 1.0
    flow.counters[TARGET], flow.counters[LIMIT] = 1, 0
    flow.peers["window"] = 1
    for peer, stage in ((0, 0), (1, 1), (2, 1)):
        join(flow, peer, stage)
    start_all(flow, 0.0)
    advance(flow, 1.5)
    is_full(flow, 0)
    drain(flow, 2)
    lose(flow, 1, 1.5, 1.5)
    expire(flow, 0)
    start(flow, 0, 1.5)
