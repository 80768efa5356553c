"""This is where simulated microbatches pass through the stages, each by itself: compiled, for they are millions.

A peer computes one thing at a time, older steps before newer, of a step what came first, and audits when nothing else
is there; it sends one activation after another. It chooses among the peers it knows of the next stage as
`swarm.core.wiring` does, after it has asked them all: `tests/test_fleet_flow.py` holds the two against each other. What
is not about single microbatches (who is a member, when a round begins) is `peer.fleet.fleet`'s, in Python.

An event is the end of what a peer computes: when it then takes the next of its queue, all that has arrived by then is
there to choose from, so arrivals need no events. Events wait in a ring of short lists, one for each moment.

A call hands over every array of a `Flow` by value, and costs as much as five choices: what each event does is inlined.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kernels.compiled import borrowing, inlined
from swarm.core.wiring import BELIEVED, SMOOTHING

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Places in `Flow.counters`
FREE, STEP, GRANTED, TARGET, LIMIT, CHOICES, COMPLETED, KILLED, REDONE, CHANCE, TRIPS, SENT, ORPHANED, MOMENT, USED = (
    range(15)
)
# Places in `Flow.settings`
DELAY_S, ASK_S, AUDITS, LATEST_AUDIT_S, KNOWS_ALL = range(5)
RETRY_S = 1.0
NUM_TRIPS = 1 << 10
NUM_MOMENTS = 1 << 17
"""Lists of events, for so many moments from now on; what is later waits in the list of an earlier moment's."""
MOMENTS_PER_S = 8192.0
NOTHING, LOST, AUDIT = -1, -2, -3
UNTRIED, UNANSWERED = -2.0, -1.0
NO_STEP = 1 << 30


CACHE_LINE_BYTES = 64
SHOWN = np.dtype(
    [
        ("stage", np.int32),  # -1: serves none
        ("takes_from", np.int32),  # it takes new work of this step on; NO_STEP while it drains
        ("backlog_s", np.float64),  # of compute: queue and current
        ("sends_at", np.float64),  # when the uplink is free
        ("paced_at", np.float64),  # when it would take the next, were all it took computed, and sent on, whole at once
    ]
)
PEER = np.dtype(
    [
        ("forward_s", np.float64),
        ("backward_s", np.float64),
        ("send_s", np.float64),  # of one activation through its uplink
        ("begins_at", np.float64),  # of `current`
        ("queue", np.int32),  # first of what is on its way to it or waits for it, in its order; -1: none
        ("last", np.int32),  # of the queue
        ("current", np.int32),  # what it computes, or will as soon as that arrives; NOTHING, LOST, AUDIT
        ("window", np.int32),  # microbatches a source keeps in flight
        ("in_flight", np.int32),  # of a source
        ("again_s", np.float64),  # of compute to do for a lost replica before anything else
        ("owes_s", np.float64),  # of audits
        ("audited_s", np.float64),
    ]
)
KNOWN = np.dtype(
    [
        ("target", np.int32),
        ("duration_s", np.float32),  # smoothed; UNTRIED, or UNANSWERED so far
    ]
)
WORK = np.dtype(
    [
        ("at", np.int32),  # stage it is at, or on the way to
        ("is_back", np.int32),
        ("step", np.int32),
        ("counted", np.int32),  # the first stage that has it in its sum: all above have too
        ("is_active", np.int32),
        ("is_queued", np.int32),
        ("left_at", np.float64),  # when the last sender had sent all of it
        ("born", np.float64),
    ]
)
LINE = np.dtype([("arrives_at", np.float64), ("next", np.int32), ("before", np.int32), ("step", np.int64)])
WAY = np.dtype([("chosen_at", np.float32), ("link", np.int32)])
EVENT = np.dtype([("at", np.float64), ("next", np.int32), ("is_set", np.int32)])


class Flow(NamedTuple):
    """P peers, each knowing F of the next stage; S stages; room for M microbatches in flight."""

    shown: Any
    """SHOWN [P]: what callers look at. A choice reads it of many peers, so it is short, and none lies on two lines of
    the cache."""
    peers: Any
    """PEER [P]: the rest."""
    done: Ints
    """[P, 2] unaveraged microbatches, of even and odd steps."""
    known: Any
    """KNOWN [P, F]: what a peer knows of the next stage."""
    work: Any
    """WORK [M]: microbatches."""
    line: Any
    """LINE [M]: of microbatches, their places in peers' queues: older steps first, then what arrives first."""
    ways: Any
    """WAY [M, S]: how the peer of each stage chose the next."""
    holder: NDArray[np.int32]
    """[S, M]: the peer of each stage that has the microbatch; by stage, for a lost peer's are searched."""
    free: NDArray[np.int32]
    """[M] places in `work`."""
    events: Any
    """EVENT [P + M]: a peer's, or of a microbatch that waits for a stage without peers."""
    moments: NDArray[np.int32]
    """[NUM_MOMENTS] the first event of each."""
    members: NDArray[np.int32]
    """[S, P]"""
    stages: Ints
    """[S, 7]: places below."""
    counters: Ints
    trips_s: Floats
    """The last ones' durations."""
    settings: Floats
    """Seconds from peer to peer; that asking takes; seconds of audits that a second of other work makes due; seconds of
    them that are due at most; whether everyone knows all of the next stage."""


# Places in a row of `Flow.stages`: members; the step whose round has not begun; microbatches in sums of even and odd
# steps; those that will not come any more; those added to a live peer's sum, ever.
MEMBERS, OPEN, DONE, VOID, ADDED = 0, 1, 2, 4, 6


def empty_flow(
    num_peers: int,
    fanout: int,
    num_stages: int,
    num_work: int,
    *,
    delay_s: float,
    ask_s: float = 0.0,
    audits: float = 0.0,
    latest_audit_s: float = math.inf,
    knows_all: bool = False,
) -> Flow:
    """No peers, no microbatches."""
    counters = np.zeros(15, np.int64)
    counters[FREE] = num_work
    counters[CHANCE] = 88172645463325252
    shown = _on_lines(num_peers, SHOWN)
    shown["stage"] = -1
    peers = np.zeros(num_peers, PEER)
    peers["queue"] = peers["last"] = peers["current"] = -1
    known = np.zeros((num_peers, fanout), KNOWN)
    known["target"], known["duration_s"] = -1, UNTRIED
    ways = np.zeros((num_work, num_stages), WAY)
    ways["link"] = -1
    return Flow(
        shown=shown,
        peers=peers,
        done=np.zeros((num_peers, 2), np.int64),
        known=known,
        work=np.zeros(num_work, WORK),
        line=np.zeros(num_work, LINE),
        ways=ways,
        holder=np.full((num_stages, num_work), -1, np.int32),
        free=np.arange(num_work, dtype=np.int32)[::-1].copy(),
        events=np.zeros(num_peers + num_work, EVENT),
        moments=np.full(NUM_MOMENTS, -1, np.int32),
        members=np.full((num_stages, num_peers), -1, np.int32),
        stages=np.zeros((num_stages, 7), np.int64),
        counters=counters,
        trips_s=np.zeros(NUM_TRIPS),
        settings=np.array([delay_s, ask_s, audits / (1 - audits), latest_audit_s, knows_all]),
    )


def _on_lines(num: int, dtype: "np.dtype[Any]") -> Any:
    """Zeros that begin where a line of the cache does."""
    held = np.zeros(num * dtype.itemsize + CACHE_LINE_BYTES, np.uint8)
    start = -held.ctypes.data % CACHE_LINE_BYTES
    return held[start : start + num * dtype.itemsize].view(dtype)


# -- events ---------------------------------------------------------------------------------------------------


@inlined
def _set(flow: Flow, event: int, at: float) -> None:
    moment = max(int(at * MOMENTS_PER_S), flow.counters[MOMENT])
    flow.events[event].at = at
    flow.events[event].is_set = 1
    flow.events[event].next = flow.moments[moment & (NUM_MOMENTS - 1)]
    flow.moments[moment & (NUM_MOMENTS - 1)] = event


@inlined
def _unlinked(flow: Flow, moment: int, event: int) -> bool:
    """Take the event out of what is due in the moment; whether it was there."""
    after = flow.moments[moment]
    if after == event:
        flow.moments[moment] = flow.events[event].next
        return True
    while after >= 0:
        before, after = after, flow.events[after].next
        if after == event:
            flow.events[before].next = flow.events[event].next
            return True
    return False


@inlined
def _unset(flow: Flow, event: int) -> None:
    if not flow.events[event].is_set:
        return
    flow.events[event].is_set = 0
    moment = max(int(flow.events[event].at * MOMENTS_PER_S), 0) & (NUM_MOMENTS - 1)
    if not _unlinked(flow, moment, event):  # set late, into the moment of that time
        _unlinked(flow, flow.counters[MOMENT] & (NUM_MOMENTS - 1), event)


@inlined
def _chance(flow: Flow, num: int) -> int:
    """A number below `num` (xorshift)."""
    x = flow.counters[CHANCE]
    x ^= x << 13
    x ^= (x >> 7) & 0x1FFFFFFFFFFFFFF
    x ^= x << 17
    flow.counters[CHANCE] = x
    return int((x & 0x7FFFFFFFFFFFFFFF) % num)


# -- whom to send to ------------------------------------------------------------------------------------------


@inlined
def _learned(flow: Flow, caller: int, stage: int) -> int:
    """A peer of the stage that the caller learns of; -1 if it knows all, as in a small fleet it does."""
    num_there = flow.stages[stage, MEMBERS]
    first = _chance(flow, num_there)
    if not flow.settings[KNOWS_ALL]:
        return int(flow.members[stage, first])
    for turn in range(num_there):
        peer = flow.members[stage, (first + turn) % num_there]
        is_known = False
        for place in range(flow.known.shape[1]):
            is_known |= flow.known[caller, place].target == peer
        if not is_known:
            return int(peer)
    return -1


@inlined
def choose(flow: Flow, caller: int, stage: int, step: int, now: float) -> int:
    """Place, among those the caller knows, of the peer of `stage` expected to answer first; -1: none is there.

    Who takes work of later steps only has not joined yet, and is passed over.
    """
    num_known = flow.known.shape[1]
    best_s = math.inf
    num_there = flow.stages[stage, MEMBERS]
    for place in range(num_known):
        known = flow.known[caller, place]
        peer = known.target
        if peer < 0 or flow.shown[peer].takes_from == NO_STEP or flow.shown[peer].stage != stage:
            if num_there == 0:
                return -1
            known.target = -1
            known.target = _learned(flow, caller, stage)
            known.duration_s = UNTRIED
        elif known.duration_s >= 0:
            best_s = min(best_s, known.duration_s)
    chosen, soonest_s, first = -1, math.inf, _chance(flow, num_known)
    for turn in range(num_known):
        place = first + turn if first + turn < num_known else first + turn - num_known
        known = flow.known[caller, place]
        if known.target < 0:
            continue
        it = flow.shown[known.target]
        if it.takes_from > step:
            continue
        expected_s = max(0.0, it.backlog_s, it.sends_at - now, it.paced_at - now)  # what it says
        if known.duration_s >= 0:
            expected_s += max(0.0, known.duration_s - BELIEVED * best_s)
        elif known.duration_s == UNTRIED:
            expected_s = 0.0
        if expected_s < soonest_s:
            chosen, soonest_s = place, expected_s
    flow.counters[CHOICES] += 1
    if chosen < 0:  # all it knows are too new: it looks further
        for _ in range(num_known):
            peer = flow.members[stage, _chance(flow, num_there)]
            if flow.shown[peer].takes_from <= step:
                flow.known[caller, first].target = peer
                flow.known[caller, first].duration_s = UNTRIED
                return first
    return chosen


@inlined
def _taken(flow: Flow, caller: int, place: int, now: float) -> None:
    """The chosen peer has a microbatch more to compute."""
    known = flow.known[caller, place]
    if known.duration_s == UNTRIED:
        known.duration_s = UNANSWERED
    it, peer = flow.shown[known.target], flow.peers[known.target]
    sends = 2 if it.stage < flow.holder.shape[0] - 1 else 1
    it.paced_at = max(now, it.paced_at) + max(peer.forward_s + peer.backward_s, sends * peer.send_s)


@inlined
def finished(flow: Flow, caller: int, place: int, duration_s: float) -> None:
    """The peer answered."""
    known = flow.known[caller, place]
    share = SMOOTHING if known.duration_s >= 0 else 1.0
    before_s = known.duration_s if known.duration_s >= 0 else 0.0
    known.duration_s = (1 - share) * before_s + share * duration_s


@inlined
def _is_known(flow: Flow, work: int, hop: int) -> bool:
    """Whether the caller at stage `hop` still knows the peer it sent the microbatch to."""
    place = flow.ways[work, hop].link
    return bool(place >= 0 and flow.known[flow.holder[hop, work], place].target == flow.holder[hop + 1, work])


# -- what a peer does -----------------------------------------------------------------------------------------


@inlined
def _seconds(flow: Flow, peer: int, work: int) -> float:
    """That the peer computes on it next."""
    one = flow.peers[peer]
    if flow.work[work].is_back:
        return float(one.backward_s)
    if flow.shown[peer].stage == flow.holder.shape[0] - 1:
        return float(one.forward_s + one.backward_s)
    return float(one.forward_s)


@inlined
def _tie(flow: Flow, peer: int, before: int, after: int) -> None:
    """In the peer's queue one follows on the other; -1: an end of it."""
    if before < 0:
        flow.peers[peer].queue = after
    else:
        flow.line[before].next = after
    if after < 0:
        flow.peers[peer].last = before
    else:
        flow.line[after].before = before


@inlined
def unlink(flow: Flow, peer: int, work: int) -> None:
    """Out of the queue."""
    flow.work[work].is_queued = 0
    _tie(flow, peer, flow.line[work].before, flow.line[work].next)


@inlined
def link(flow: Flow, peer: int, work: int) -> None:
    """Into the queue: what comes last mostly goes last."""
    one, after, before = flow.line[work], -1, flow.peers[peer].last
    while before >= 0:
        other = flow.line[before]
        if other.step < one.step or (other.step == one.step and other.arrives_at <= one.arrives_at):
            break
        after, before = before, other.before
    flow.work[work].is_queued = 1
    _tie(flow, peer, before, work)
    _tie(flow, peer, work, after)


@inlined
def _send(flow: Flow, sender: int, ready_at: float) -> float:
    """When an activation is through the sender's uplink."""
    through_at = max(ready_at, flow.shown[sender].sends_at) + flow.peers[sender].send_s
    flow.shown[sender].sends_at = through_at
    flow.counters[SENT] += 1
    return float(through_at)


@inlined
def _new(flow: Flow, source: int, now: float) -> int:
    """The microbatch that the source begins, or -1."""
    counters, shown, it = flow.counters, flow.shown[source], flow.peers[source]
    if shown.takes_from == NO_STEP or shown.stage != 0 or it.in_flight >= it.window or counters[FREE] == 0:
        return -1
    if counters[GRANTED] >= counters[TARGET]:
        if counters[STEP] >= counters[LIMIT]:
            return -1
        counters[STEP] += 1
        counters[GRANTED] = 0
    counters[FREE] -= 1
    counters[GRANTED] += 1
    work = flow.free[counters[FREE]]
    counters[USED] = max(counters[USED], work + 1)
    it.in_flight += 1
    flow.holder[0, work] = source
    one = flow.work[work]
    one.at = 0
    one.is_back = 0
    one.step = counters[STEP]
    one.left_at = now
    flow.line[work].arrives_at = now
    one.counted = flow.holder.shape[0]
    one.is_active = 1
    one.is_queued = 0
    one.born = now
    shown.backlog_s += it.forward_s
    return int(work)


@inlined
def _audit(flow: Flow, peer: int, now: float) -> None:
    """The peer does one microbatch of another's again."""
    it = flow.peers[peer]
    seconds = it.forward_s + it.backward_s
    it.owes_s -= seconds
    it.audited_s += seconds
    flow.shown[peer].backlog_s += seconds
    it.current = AUDIT
    it.begins_at = now
    _unset(flow, peer)
    _set(flow, peer, now + seconds)


@borrowing
def _next(flow: Flow, peer: int, now: float) -> None:
    """The peer, which computes nothing, takes the most urgent of what is there, or waits for what comes first."""
    it = flow.peers[peer]
    if it.again_s > 0:
        it.current = LOST
        it.begins_at = now
        _unset(flow, peer)
        _set(flow, peer, now + it.again_s)
        flow.shown[peer].backlog_s -= it.again_s
        it.again_s = 0.0
        return
    if it.owes_s > flow.settings[LATEST_AUDIT_S]:
        _audit(flow, peer, now)
        return
    best, work = -1, it.queue
    soonest, soonest_at = -1, math.inf
    while work >= 0:
        one = flow.line[work]
        if one.arrives_at <= now:
            best = work
            break
        if one.arrives_at < soonest_at:
            soonest, soonest_at = work, one.arrives_at
        work = one.next
    if best < 0 and flow.shown[peer].stage == 0:
        best = _new(flow, peer, now)
        if best >= 0:
            it.current = best
            it.begins_at = now
            _unset(flow, peer)
            _set(flow, peer, now + it.forward_s)
            return
    if best < 0 and it.owes_s > it.forward_s + it.backward_s:
        _audit(flow, peer, now)
        return
    if best < 0:
        best = soonest
    if best < 0:
        return
    unlink(flow, peer, best)
    it.current = best
    it.begins_at = max(now, flow.line[best].arrives_at)
    _unset(flow, peer)
    _set(flow, peer, it.begins_at + _seconds(flow, peer, best))


@inlined
def _put_back(flow: Flow, peer: int, now: float) -> None:
    """What the peer is to begin later it may begin after something else."""
    it = flow.peers[peer]
    if it.current >= 0 and it.begins_at > now:
        _unset(flow, peer)
        link(flow, peer, it.current)
        it.current = NOTHING


@inlined
def _arrive(flow: Flow, work: int, peer: int, arrives_at: float, now: float) -> None:
    """The microbatch is on its way to the peer."""
    it = flow.peers[peer]
    flow.line[work].arrives_at = arrives_at
    flow.line[work].step = flow.work[work].step
    flow.shown[peer].backlog_s += _seconds(flow, peer, work)
    link(flow, peer, work)
    if it.current >= 0 and it.begins_at > now and arrives_at < it.begins_at:
        _put_back(flow, peer, now)
    if it.current == NOTHING:
        _next(flow, peer, now)


@borrowing
def _wake(flow: Flow, peer: int, now: float) -> None:
    """There may be something to begin."""
    _put_back(flow, peer, now)
    if flow.peers[peer].current == NOTHING:
        _next(flow, peer, now)


@borrowing
def _detach(flow: Flow, work: int, now: float) -> None:
    """Whoever has it, or is to get it, does not compute it any more; what has begun is in vain, but not stopped."""
    peer = flow.holder[flow.work[work].at, work]
    if peer < 0:
        _unset(flow, flow.peers.shape[0] + work)
        return
    it = flow.peers[peer]
    if flow.work[work].is_queued:
        unlink(flow, peer, work)
        flow.shown[peer].backlog_s -= _seconds(flow, peer, work)
    elif it.current == work:
        flow.shown[peer].backlog_s -= _seconds(flow, peer, work)
        if it.begins_at > now:
            _unset(flow, peer)
            it.current = NOTHING
            _next(flow, peer, now)
        else:
            it.current = LOST
    else:
        _unset(flow, flow.peers.shape[0] + work)


@inlined
def _onward(flow: Flow, work: int, now: float, ready_at: float) -> None:
    """The peer at stage `at` - 1 sends the microbatch, once it is ready, to a peer that it chooses."""
    stage = flow.work[work].at
    caller = flow.holder[stage - 1, work]
    place = choose(flow, caller, stage, flow.work[work].step, now)
    way = flow.ways[work, stage - 1]
    if place < 0:
        flow.holder[stage, work] = -1
        way.link = -1
        _set(flow, flow.peers.shape[0] + work, max(ready_at, now) + RETRY_S)
        return
    target = flow.known[caller, place].target
    flow.holder[stage, work] = target
    way.link = place
    way.chosen_at = now
    _taken(flow, caller, place, now)
    through_at = _send(flow, caller, ready_at + flow.settings[ASK_S])
    flow.work[work].left_at = through_at
    _arrive(flow, work, target, through_at + flow.settings[DELAY_S], now)


@inlined
def _count(flow: Flow, work: int, stage: int, peer: int) -> None:
    """The stage's peer has it in its sum."""
    if stage >= flow.work[work].counted:
        return
    flow.work[work].counted = stage
    step = flow.work[work].step
    if step < flow.stages[stage, OPEN]:
        return
    flow.stages[stage, DONE + (step & 1)] += 1
    flow.done[peer, step & 1] += 1
    flow.stages[stage, ADDED] += 1


@inlined
def is_full(flow: Flow, stage: int) -> bool:
    """Whether all of the stage's open step that can come has come."""
    counters, row = flow.counters, flow.stages[stage]
    parity = row[OPEN] & 1
    is_granted = counters[STEP] > row[OPEN] or (counters[STEP] == row[OPEN] and counters[GRANTED] >= counters[TARGET])
    return bool(is_granted and row[DONE + parity] + row[VOID + parity] >= counters[TARGET])


@inlined
def _end(flow: Flow, work: int) -> None:
    flow.work[work].is_active = 0
    flow.free[flow.counters[FREE]] = work
    flow.counters[FREE] += 1
    source = flow.holder[0, work]
    if source >= 0 and flow.shown[source].stage == 0:
        flow.peers[source].in_flight -= 1


@borrowing
def kill(flow: Flow, work: int, now: float) -> None:
    """The microbatch is lost to the stages that have not counted it, of which a lost source's is none any more."""
    first = 1 if flow.holder[0, work] < 0 else 0
    for stage in range(first, flow.work[work].counted):
        if flow.work[work].step >= flow.stages[stage, OPEN]:
            flow.stages[stage, VOID + (flow.work[work].step & 1)] += 1
    flow.counters[KILLED] += 1
    _detach(flow, work, now)
    _end(flow, work)


@borrowing
def start_all(flow: Flow, now: float) -> None:
    """Every source that waits begins what it may."""
    for place in range(flow.stages[0, MEMBERS]):
        _wake(flow, flow.members[0, place], now)


@inlined
def _computed(flow: Flow, peer: int, now: float) -> int:
    """The peer has computed what it had, and is free for the next: the stage that counted it, or -1."""
    it = flow.peers[peer]
    work, stage, last = it.current, flow.shown[peer].stage, flow.holder.shape[0] - 1
    it.current = NOTHING
    if work < 0:
        if work == AUDIT:
            flow.shown[peer].backlog_s -= it.forward_s + it.backward_s
        return -1
    seconds = _seconds(flow, peer, work)
    flow.shown[peer].backlog_s -= seconds
    it.owes_s += seconds * flow.settings[AUDITS]
    one = flow.work[work]
    if not one.is_back and stage < last:
        one.at = stage + 1
        _onward(flow, work, now, now)
        return -1
    if stage < last:
        way = flow.ways[work, stage]
        if _is_known(flow, work, stage):
            finished(flow, peer, way.link, flow.line[work].arrives_at - way.chosen_at)
        way.link = -1
    _count(flow, work, stage, peer)
    if stage == 1 and flow.holder[0, work] < 0:  # nobody waits for it
        _end(flow, work)
    elif stage == 0:
        flow.trips_s[flow.counters[TRIPS] % NUM_TRIPS] = now - one.born
        flow.counters[TRIPS] += 1
        flow.counters[COMPLETED] += 1
        _end(flow, work)
    else:
        one.is_back = 1
        one.at = stage - 1
        through_at = _send(flow, peer, now)
        one.left_at = through_at
        _arrive(flow, work, flow.holder[stage - 1, work], through_at + flow.settings[DELAY_S], now)
    return int(stage)


@borrowing
def advance(flow: Flow, until: float) -> tuple[float, int]:
    """Let things happen up to `until`, or until a stage's step is full: the time, and the stage or -1."""
    num_peers = flow.peers.shape[0]
    moment = flow.counters[MOMENT]
    end = int(until * MOMENTS_PER_S)
    while moment <= end:
        first, first_at, event = -1, until, flow.moments[moment & (NUM_MOMENTS - 1)]
        while event >= 0:
            at = flow.events[event].at
            if at <= first_at and int(at * MOMENTS_PER_S) <= moment:
                first, first_at = event, at
            event = flow.events[event].next
        if first < 0:
            if moment == end:
                break
            moment += 1
            flow.counters[MOMENT] = moment
            continue
        _unset(flow, first)
        if first < num_peers:
            stage = -1
            if flow.peers[first].current != NOTHING:
                stage = _computed(flow, first, first_at)
            _next(flow, first, first_at)
            if stage >= 0 and is_full(flow, stage):
                return first_at, stage
        else:
            _onward(flow, first - num_peers, first_at, first_at)
    return until, -1


@borrowing
def expire(flow: Flow, step: int, now: float) -> None:
    """What is still under way of `step` is late: lost to the stages that have not counted it."""
    for work in range(flow.counters[USED]):
        if flow.work[work].is_active and flow.work[work].step == step:
            kill(flow, work, now)


# -- who is there ---------------------------------------------------------------------------------------------


@borrowing
def join(flow: Flow, peer: int, stage: int, now: float, takes_from: int = 0) -> None:
    """The peer serves the stage, from that step on, and some of the stage before learn of it."""
    it, shown = flow.peers[peer], flow.shown[peer]
    it.current = it.queue = it.last = NOTHING
    it.in_flight = 0
    it.begins_at = shown.sends_at = shown.paced_at = now
    shown.backlog_s = it.again_s = it.audited_s = 0.0
    flow.done[peer, 0] = flow.done[peer, 1] = 0
    shown.stage = stage
    shown.takes_from = takes_from
    flow.members[stage, flow.stages[stage, MEMBERS]] = peer
    flow.stages[stage, MEMBERS] += 1
    num_known = flow.known.shape[1]
    for place in range(num_known):
        flow.known[peer, place].target = -1
    if stage > 0 and flow.stages[stage - 1, MEMBERS] > 0 and not flow.settings[KNOWS_ALL]:
        callers = flow.stages[stage - 1, MEMBERS]
        for _ in range(max(1, num_known * callers // flow.stages[stage, MEMBERS])):
            known = flow.known[flow.members[stage - 1, _chance(flow, callers)], _chance(flow, num_known)]
            known.target = peer
            known.duration_s = UNTRIED
    _wake(flow, peer, now)


@borrowing
def drain(flow: Flow, peer: int) -> None:
    """The peer takes no more work."""
    flow.shown[peer].takes_from = NO_STEP
    stage = flow.shown[peer].stage
    for place in range(flow.stages[stage, MEMBERS]):
        if flow.members[stage, place] == peer:
            flow.stages[stage, MEMBERS] -= 1
            flow.members[stage, place] = flow.members[stage, flow.stages[stage, MEMBERS]]
            return


@borrowing
def _again(flow: Flow, work: int, stage: int, now: float, noticed_at: float) -> None:
    """The stage before the lost peer sends the microbatch to another, and all from there on is computed again."""
    _detach(flow, work, now)
    flow.work[work].is_back = 0
    flow.work[work].at = stage
    flow.counters[REDONE] += 1
    _onward(flow, work, now, noticed_at)


@borrowing
def _adopted(flow: Flow, work: int, stage: int, now: float, noticed_at: float) -> None:
    """The stage before sends the microbatch to another peer, which computes it forward and takes the lost one's place:
    what is under way in later stages goes on."""
    caller = flow.holder[stage - 1, work]
    had_gradient = flow.work[work].at <= stage and flow.work[work].is_back == 1
    if had_gradient and (
        stage == flow.holder.shape[0] - 1 or flow.shown[flow.holder[stage + 1, work]].stage != stage + 1
    ):
        _again(flow, work, stage, now, noticed_at)
        return
    place = choose(flow, caller, stage, flow.work[work].step, now)
    if place < 0:
        _again(flow, work, stage, now, noticed_at)
        return
    if had_gradient:
        _detach(flow, work, now)
    peer = flow.known[caller, place].target
    flow.holder[stage, work] = peer
    way = flow.ways[work, stage - 1]
    way.link = place
    way.chosen_at = now
    _taken(flow, caller, place, now)
    flow.ways[work, stage].link = -1
    there_at = _send(flow, caller, noticed_at + flow.settings[ASK_S]) + flow.settings[DELAY_S]
    flow.peers[peer].again_s += flow.peers[peer].forward_s
    flow.shown[peer].backlog_s += flow.peers[peer].forward_s
    flow.counters[REDONE] += 1
    _wake(flow, peer, now)
    if had_gradient:  # the gradient had come to the lost peer, or was on its way: it is sent again
        flow.work[work].at = stage
        left_at = _send(flow, flow.holder[stage + 1, work], noticed_at)
        flow.work[work].left_at = left_at
        _arrive(flow, work, peer, max(there_at, left_at + flow.settings[DELAY_S]), now)


@inlined
def _leave(flow: Flow, work: int) -> None:
    """The microbatch's source is lost: it goes on without it, up to the stage after."""
    if flow.work[work].step >= flow.stages[0, OPEN]:
        flow.stages[0, VOID + (flow.work[work].step & 1)] += 1
    flow.holder[0, work] = -1
    flow.counters[ORPHANED] += 1


@borrowing
def lose(flow: Flow, peer: int, now: float, noticed_at: float) -> float:
    """The peer is gone with all it held; from `noticed_at` others take its place: when the last of them can go on."""
    stage = flow.shown[peer].stage
    if flow.shown[peer].takes_from != NO_STEP:
        drain(flow, peer)
    flow.shown[peer].stage = -1
    flow.done[peer, 0] = 0
    flow.done[peer, 1] = 0
    flow.peers[peer].in_flight = 0
    back_at = now
    for work in range(flow.counters[USED]):
        if flow.holder[stage, work] != peer or not flow.work[work].is_active:
            continue
        at, is_back = flow.work[work].at, flow.work[work].is_back
        if not is_back and at < stage:
            continue
        if stage == 0:
            is_sent = at > 1 or (at == 1 and flow.holder[1, work] >= 0 and now >= flow.work[work].left_at)
            if not is_sent:
                kill(flow, work, now)
            else:
                _leave(flow, work)
            continue
        if stage == 1 and flow.holder[0, work] < 0:  # nobody is there to send it again
            kill(flow, work, now)
            continue
        if is_back and (at < stage - 1 or (at == stage - 1 and now >= flow.work[work].left_at)):
            continue  # it has done its part; the sum is lost, not the microbatch
        left = not is_back and (at > stage + 1 or (at == stage + 1 and now >= flow.work[work].left_at))
        if is_back or left:
            _adopted(flow, work, stage, now, noticed_at)
        else:
            _again(flow, work, stage, now, noticed_at)
        other = flow.holder[stage, work]
        if other >= 0:
            back_at = max(back_at, flow.shown[flow.holder[stage - 1, work]].sends_at, flow.peers[other].begins_at)
    _unset(flow, peer)
    return float(back_at)


def compile_all() -> None:
    """Compile what a simulation calls, so that it is not timed; kept on disk for the next process."""
    flow = empty_flow(4, 2, 2, 4, delay_s=0.1)
    flow.peers["forward_s"] = flow.peers["send_s"] = 1.0
    flow.counters[TARGET], flow.counters[LIMIT] = 1, 0
    flow.peers["window"] = 1
    for peer, stage in ((0, 0), (1, 1), (2, 1)):
        join(flow, peer, stage, 0.0)
    start_all(flow, 0.0)
    advance(flow, 1.5)
    drain(flow, 2)
    lose(flow, 1, 1.5, 1.5)
    expire(flow, 0, 1.5)
