"""Simulated microbatches on their way through the stages, each by itself: compiled, for they are millions.

A peer computes one thing at a time, older steps before newer, of a step what came first, and audits when nothing else
is there; it sends one activation after another. It chooses among the peers it knows of the next stage as
`swarm.core.pipeline.wiring` does, after it has asked them all: `tests/peer/fleet/test_flow.py` holds the two against
each other. What is not about single microbatches (who is a member, when a round begins) is `peer.fleet.fleet`'s, in
Python.

An event is the end of what a peer computes: when it then takes the next of its queue, all that has arrived by then is
there to choose from, so arrivals need no events. Events wait in a ring of short lists, one for each moment.

A call hands over every array of a `Flow` by value, and costs as much as five choices: what each event does is inlined.
Places that are read from records of 32 bits are made wide where they are read: for each width all would be compiled.
"""

import math
from collections.abc import Callable
from typing import cast

import numpy as np

from kernels.cache_hints import CACHE_LINE_BYTES, prefetch
from kernels.compiled import borrowing, inlined
from peer.fleet.layout import EVENT, KNOWN, PEER, SHOWN, WAY, WORK, Flow, on_lines
from swarm.core.pipeline.wiring import BELIEVED, SMOOTHING

wide = cast("Callable[[int], int]", np.int64)
"""A place that was read of a narrower record."""

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
AHEAD = 2
"""Moments from a fetch to what reads it, which may be the next fetch: a few events, in which it comes."""
KNOWN_ON_A_LINE = CACHE_LINE_BYTES // KNOWN.itemsize
NOTHING, LOST, AUDIT = -1, -2, -3
UNTRIED, UNANSWERED = -2.0, -1.0
NO_STEP = 1 << 30

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
    shown = on_lines(num_peers, SHOWN)
    shown["stage"] = -1
    peers = on_lines(num_peers, PEER)
    peers["queue"] = peers["last"] = peers["current"] = -1
    known = on_lines(num_peers * fanout, KNOWN).reshape(num_peers, fanout)
    known["target"], known["duration_s"] = -1, UNTRIED
    ways = np.zeros((num_work, num_stages), WAY)
    ways["holder"] = ways["link"] = -1
    return Flow(
        shown=shown,
        peers=peers,
        done=np.zeros((num_peers, 2), np.int64),
        known=known,
        work=on_lines(num_work, WORK),
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
def _hold(flow: Flow, work: int, stage: int, peer: int) -> None:
    """The microbatch is the peer's in that stage; -1: nobody's."""
    flow.ways[work, stage].holder = peer
    flow.holder[stage, work] = peer


@inlined
def _has_source(flow: Flow, work: int) -> bool:
    """Whether the peer that began the microbatch waits for it: a lost one does not."""
    return bool(flow.ways[work, 0].holder >= 0)


# -- what will be read soon -----------------------------------------------------------------------------------


@inlined
def _fetch_peer(flow: Flow, peer: int) -> None:
    prefetch(flow.peers, peer)
    prefetch(flow.shown, peer)
    prefetch(flow.done, (peer, 0))
    for place in range(0, flow.known.shape[1], KNOWN_ON_A_LINE):
        prefetch(flow.known, (peer, place))


@inlined
def _fetch_work(flow: Flow, peer: int) -> None:
    """What the peer computes and what it may take next."""
    it, stage, last = flow.peers[peer], flow.shown[peer].stage, flow.holder.shape[0] - 1
    prefetch(flow.work, it.queue)
    prefetch(flow.work, it.current)
    prefetch(flow.ways, (it.current, max(0, stage - 1)))
    prefetch(flow.ways, (it.current, min(last, stage + 1)))
    prefetch(flow.holder, (min(last, stage + 1), it.current))


@inlined
def _fetch_target(flow: Flow, peer: int) -> None:
    """Who will get the gradient of what the peer computes; whom an activation goes to is not known before."""
    work, stage = flow.peers[peer].current, flow.shown[peer].stage
    if work >= 0 and stage > 0:
        target = flow.ways[work, stage - 1].holder
        prefetch(flow.peers, target)
        prefetch(flow.shown, target)


@inlined
def _foresee(flow: Flow, moment: int) -> None:
    """Fetch what the events of the next moments will read, each from where what was fetched before it says."""
    prefetch(flow.events, flow.moments[(moment + 4 * AHEAD) & (NUM_MOMENTS - 1)])
    for turn in range(1, 4):
        event = flow.moments[(moment + turn * AHEAD) & (NUM_MOMENTS - 1)]
        while event >= 0:
            if event >= flow.peers.shape[0]:
                pass
            elif turn == 3:
                _fetch_peer(flow, event)
            elif turn == 2:
                _fetch_work(flow, event)
            else:
                _fetch_target(flow, event)
            event = flow.events[event].next


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
    it = flow.peers[peer]
    if before < 0:
        it.queue = after
    else:
        flow.work[before].next = after
    if after >= 0:
        flow.work[after].before = before
        return
    it.last = before
    if before >= 0:
        it.last_step, it.last_arrives_at = flow.work[before].step, flow.work[before].arrives_at


@inlined
def unlink(flow: Flow, peer: int, work: int) -> None:
    """Out of the queue."""
    flow.work[work].is_queued = 0
    _tie(flow, peer, wide(flow.work[work].before), wide(flow.work[work].next))


@inlined
def link(flow: Flow, peer: int, work: int) -> None:
    """Into the queue: what comes last mostly goes last."""
    one, it = flow.work[work], flow.peers[peer]
    after, before, step, arrives_at = wide(-1), wide(it.last), it.last_step, it.last_arrives_at
    while before >= 0 and (step > one.step or (step == one.step and arrives_at > one.arrives_at)):
        after, before = before, wide(flow.work[before].before)
        step, arrives_at = flow.work[before].step, flow.work[before].arrives_at
    one.is_queued = 1
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
    work = wide(flow.free[counters[FREE]])
    counters[USED] = max(counters[USED], work + 1)
    it.in_flight += 1
    _hold(flow, work, wide(0), source)
    one = flow.work[work]
    one.at = 0
    one.is_back = 0
    one.step = counters[STEP]
    one.left_at = now
    one.arrives_at = now
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


@inlined
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
    best, work = -1, wide(it.queue)
    soonest, soonest_at = -1, math.inf
    while work >= 0:
        one = flow.work[work]
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
    it.begins_at = max(now, flow.work[best].arrives_at)
    _unset(flow, peer)
    _set(flow, peer, it.begins_at + _seconds(flow, peer, best))


@inlined
def _put_back(flow: Flow, peer: int, now: float) -> None:
    """What the peer is to begin later it may begin after something else."""
    it = flow.peers[peer]
    if it.current >= 0 and it.begins_at > now:
        _unset(flow, peer)
        link(flow, peer, wide(it.current))
        it.current = NOTHING


@inlined
def _arrive(flow: Flow, work: int, peer: int, arrives_at: float, now: float) -> None:
    """The microbatch is on its way to the peer."""
    it = flow.peers[peer]
    flow.work[work].arrives_at = arrives_at
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
    peer = wide(flow.ways[work, flow.work[work].at].holder)
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
    stage = wide(flow.work[work].at)
    way = flow.ways[work, stage - 1]
    caller = wide(way.holder)
    place = choose(flow, caller, stage, flow.work[work].step, now)
    if place < 0:
        _hold(flow, work, stage, wide(-1))
        way.link = -1
        _set(flow, flow.peers.shape[0] + work, max(ready_at, now) + RETRY_S)
        return
    target = wide(flow.known[caller, place].target)
    _hold(flow, work, stage, target)
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
    source = flow.ways[work, 0].holder
    if source >= 0 and flow.shown[source].stage == 0:
        flow.peers[source].in_flight -= 1


@borrowing
def kill(flow: Flow, work: int, now: float) -> None:
    """The microbatch is lost to the stages that have not counted it, of which a lost source's is none any more."""
    for stage in range(0 if _has_source(flow, work) else 1, flow.work[work].counted):
        if flow.work[work].step >= flow.stages[stage, OPEN]:
            flow.stages[stage, VOID + (flow.work[work].step & 1)] += 1
    flow.counters[KILLED] += 1
    _detach(flow, work, now)
    _end(flow, work)


@borrowing
def start_all(flow: Flow, now: float) -> None:
    """Every source that waits begins what it may."""
    for place in range(flow.stages[0, MEMBERS]):
        _wake(flow, wide(flow.members[0, place]), now)


@inlined
def _computed(flow: Flow, peer: int, now: float) -> int:
    """The peer has computed what it had, and is free for the next: the stage that counted it, or -1."""
    it = flow.peers[peer]
    work, stage, last = wide(it.current), flow.shown[peer].stage, flow.holder.shape[0] - 1
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
        if way.link >= 0 and flow.known[peer, way.link].target == flow.ways[work, stage + 1].holder:
            finished(flow, peer, way.link, flow.work[work].arrives_at - way.chosen_at)
        way.link = -1
    _count(flow, work, stage, peer)
    if stage == 1 and not _has_source(flow, work):  # nobody waits for it
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
        _arrive(flow, work, wide(flow.ways[work, stage - 1].holder), through_at + flow.settings[DELAY_S], now)
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
            _foresee(flow, moment)
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
    way = flow.ways[work, stage - 1]
    caller = wide(way.holder)
    had_gradient = flow.work[work].at <= stage and flow.work[work].is_back == 1
    if had_gradient and (
        stage == flow.holder.shape[0] - 1 or flow.shown[flow.ways[work, stage + 1].holder].stage != stage + 1
    ):
        _again(flow, work, stage, now, noticed_at)
        return
    place = choose(flow, caller, stage, flow.work[work].step, now)
    if place < 0:
        _again(flow, work, stage, now, noticed_at)
        return
    if had_gradient:
        _detach(flow, work, now)
    peer = wide(flow.known[caller, place].target)
    _hold(flow, work, stage, peer)
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
        left_at = _send(flow, wide(flow.ways[work, stage + 1].holder), noticed_at)
        flow.work[work].left_at = left_at
        _arrive(flow, work, peer, max(there_at, left_at + flow.settings[DELAY_S]), now)


@inlined
def _leave(flow: Flow, work: int) -> None:
    """The microbatch's source is lost: it goes on without it, up to the stage after."""
    if flow.work[work].step >= flow.stages[0, OPEN]:
        flow.stages[0, VOID + (flow.work[work].step & 1)] += 1
    _hold(flow, work, wide(0), wide(-1))
    flow.counters[ORPHANED] += 1


@borrowing
def lose(flow: Flow, peer: int, now: float, noticed_at: float) -> float:
    """The peer is gone with all it held; from `noticed_at` others take its place: when the last of them can go on."""
    stage = wide(flow.shown[peer].stage)
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
            is_sent = at > 1 or (at == 1 and flow.ways[work, 1].holder >= 0 and now >= flow.work[work].left_at)
            if is_sent:
                _leave(flow, work)
            else:
                kill(flow, work, now)
            continue
        if stage == 1 and not _has_source(flow, work):  # nobody is there to send it again
            kill(flow, work, now)
            continue
        if is_back and (at < stage - 1 or (at == stage - 1 and now >= flow.work[work].left_at)):
            continue  # it has done its part; the sum is lost, not the microbatch
        left = not is_back and (at > stage + 1 or (at == stage + 1 and now >= flow.work[work].left_at))
        if is_back or left:
            _adopted(flow, work, stage, now, noticed_at)
        else:
            _again(flow, work, stage, now, noticed_at)
        other = flow.ways[work, stage].holder
        if other >= 0:
            back_at = max(back_at, flow.shown[flow.ways[work, stage - 1].holder].sends_at, flow.peers[other].begins_at)
    _unset(flow, peer)
    return float(back_at)


def compile_all() -> None:
    """Compile what a simulation calls, so that it is not timed; kept on disk for the next process."""
    flow = empty_flow(4, 2, 2, 4, delay_s=0.1)
    flow.peers["forward_s"] = flow.peers["send_s"] = 1.0
    flow.counters[TARGET], flow.counters[LIMIT] = 1, 0
    flow.peers["window"] = 1
    for peer, stage in ((0, 0), (1, 1), (2, 1)):
        join(flow, peer, stage, 0.0, 0)
    start_all(flow, 0.0)
    advance(flow, 1.5)
    drain(flow, 2)
    lose(flow, 1, 1.5, 1.5)
    expire(flow, 0, 1.5)
