"""A step that all sources wait for (`model.delay = 0`), counted anew when a peer is lost.

As its leader does it in `swarm.core.round.step_progress`: what the lost peer's sum held is missing, and what a source
had not passed on is granted again. A stage that lost a sum is short of it; stage 0 does with so many less, the others
begin their round when a microbatch of the next step tells them that this one has ended. A stage that is full before the
sources are takes no more.
"""

from peer.fleet import flow as flows
from peer.fleet.layout import Flow


def lose(flow: Flow, peer: int, now: float, noticed_at: float) -> tuple[float, int]:
    """`flow.lose`, less what the lost sum held: when the last of what the peer had can go on, and microbatches that are
    to be granted again."""
    stage = int(flow.shown["stage"][peer])
    parity = int(flow.stages[stage, flows.OPEN]) & 1
    missing = int(flow.done[peer, parity])
    flow.stages[stage, flows.DONE + parity] -= missing
    voids = flow.stages[:, flows.VOID : flows.VOID + 2].copy()
    killed, orphaned = int(flow.counters[flows.KILLED]), int(flow.counters[flows.ORPHANED])
    back_at = flows.lose(flow, peer, now, noticed_at)
    flow.stages[:, flows.VOID : flows.VOID + 2] = voids
    if stage > 0:
        return back_at, 0
    again = int(flow.counters[flows.KILLED]) - killed
    void = missing + int(flow.counters[flows.ORPHANED]) - orphaned
    if voids[0, parity] + void > flow.counters[flows.TARGET] // 2:
        return back_at, again + void
    flow.stages[0, flows.VOID + parity] += void
    return back_at, again


def grant_again(flow: Flow, step: int, num: int, now: float) -> None:
    """Sources may begin so many more of the step, if it is open yet."""
    if flow.stages[0, flows.OPEN] == step and flow.counters[flows.STEP] == step:
        flow.counters[flows.GRANTED] -= min(num, int(flow.counters[flows.GRANTED]))
        flows.start_all(flow, now)


def is_refused(flow: Flow, step: int) -> bool:
    """Whether the next stage has closed the step."""
    return bool(flow.stages[1, flows.OPEN] > step)


def give_up(flow: Flow, step: int, num: int) -> None:
    """So many more will not come home."""
    if flow.stages[0, flows.OPEN] == step:
        flow.stages[0, flows.VOID + (step & 1)] += num


def cut_short(flow: Flow, stage: int, step: int, now: float) -> None:
    """The stage has closed the step: what it has not counted does not count in the stages before it either."""
    counters = flow.counters
    if flow.stages[0, flows.OPEN] != step or counters[flows.STEP] != step:
        return
    missing = max(0, int(counters[flows.TARGET] - counters[flows.GRANTED]))
    counters[flows.GRANTED] += missing
    for each in range(stage):
        if flow.stages[each, flows.OPEN] == step:
            flow.stages[each, flows.VOID + (step & 1)] += missing
    for work in range(int(counters[flows.USED])):
        one = flow.work[work]
        if one["is_active"] and one["step"] == step and one["counted"] > stage:
            flows.kill(flow, work, now)
