"""A daemon's status: whether the machine is of use, and if it idles, why."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from peer.owner.own_peer import ENDED, OwnPeer
from swarm.core.ids import PeerId
from swarm.core.owner.guest import GIB, Conduct, Decision, Reading
from swarm.core.owner.limits import LIMITS, OwnerLimits, clock
from swarm.manifest.amendment import told, unpacked_changes
from swarm.proto import daemon_pb2 as pb

if TYPE_CHECKING:
    from peer.owner.tally import WorkTally
    from peer.program.at_stage import PeerAtStage
    from peer.program.daemon import PeerDaemon

IDLE_S = 60.0
"""Without certified work for this long a peer says why it idles."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a status is made of."""

    peers: tuple[OwnPeer, ...]
    host: PeerId
    uptime_s: float
    is_leaving: bool
    decision: Decision
    limits: pb.Limits
    traffic_bytes: tuple[int, int]
    rates_mbit: tuple[float, float]
    month_bytes: int
    written_today_bytes: int
    memory_bytes: int
    disk_bytes: int
    own_cores: float


def status_message(facts: Facts) -> pb.Status:
    """The whole status."""
    peers = [_peer_message(peer, facts) for peer in facts.peers]
    state, reason = state_of_all(peers)
    return pb.Status(
        state=state,
        reason=reason,
        uptime_s=facts.uptime_s,
        host=facts.host,
        traffic=pb.Traffic(
            sent_bytes=facts.traffic_bytes[0],
            received_bytes=facts.traffic_bytes[1],
            month_bytes=facts.month_bytes,
            up_mbit=facts.rates_mbit[0],
            down_mbit=facts.rates_mbit[1],
        ),
        machine=pb.Machine(
            memory_bytes=facts.memory_bytes,
            disk_bytes=facts.disk_bytes,
            written_today_bytes=facts.written_today_bytes,
            cpu_cores=facts.own_cores,
        ),
        limits=facts.limits.limits,
        peers=peers,
    )


def state_of_all(peers: Sequence[pb.Peer]) -> tuple[str, str]:
    """(a daemon's state, why it idles) by those of its peers: that of the first which is of most use."""
    best = min(peers, key=lambda peer: _BY_USE.index(peer.state))
    return best.state, best.reason


_BY_USE = ("leaving", "working", "paused", "away", "joining", "looking", "starting", ENDED)
"""Who leaves does so with the whole daemon, and so does who is paused or away, but for those that have ended."""


def _peer_message(peer: OwnPeer, facts: Facts) -> pb.Peer:
    daemon, transport = peer.daemon, peer.transport
    live = daemon.live if daemon is not None else None
    state, reason = state_of(peer, live, facts)
    message = pb.Peer(
        peer_id=peer.identity.peer_id,
        state=state,
        reason=reason,
        name=peer.name,
        device=live.device if live is not None else "",
        addresses=transport.addresses() if transport is not None else (),
        links=[pb.Link(peer_id=to, way=way.value) for to, way in sorted(transport.ways().items())]
        if transport is not None
        else (),
    )
    if peer.reachability is not None:
        message.reach.CopyFrom(pb.Reach(kind=peer.reachability.reach.value, why=peer.reachability.why))
    if daemon is not None and live is not None:
        _add_live(message, daemon, live)
    return message


def state_of(peer: OwnPeer, live: "PeerAtStage | None", facts: Facts) -> tuple[str, str]:
    """(state, why it idles, or what keeps it from doing all it could)."""
    if peer.has_ended:
        return peer.phase, peer.waits_for
    if facts.is_leaving:
        waits_for = live.leaving.waits_for if live is not None else ""
        return "leaving", waits_for or "nothing more begins"
    if facts.decision.conduct is not Conduct.WORK:
        return ("paused" if facts.decision.conduct is Conduct.PAUSE else "away"), facts.decision.reason
    daemon = peer.daemon
    if live is None or daemon is None:
        return peer.phase, peer.waits_for
    if _on_probation(daemon, live):
        agreed = f"{_agreements(live)} of {live.settings.audits.agreements_to_promote}"
        return "working", f"on probation: {agreed} of its replays of others' work agreed; it trains once it is promoted"
    return "working", idle_reason(live, daemon.tally, facts.uptime_s) or live.memory.words()


def _agreements(live: "PeerAtStage") -> int:
    newcomer = live.verifying.newcomer
    return newcomer.agreements if newcomer is not None else 0


def _on_probation(daemon: "PeerDaemon", live: "PeerAtStage") -> bool:
    return daemon.standing.table.standing(daemon.identity.peer_id, live.steps.version).value == "probation"


RUN_ENDED = "the run has taken its last step: waiting for the host to end it"


def idle_reason(live: "PeerAtStage", tally: "WorkTally", uptime_s: float) -> str:
    """Why no work of this peer was certified lately; empty if some was."""
    steps, neighbours = live.steps, live.neighbours
    stage, last = int(steps.chain.stage), live.settings.model.num_stages - 1
    if steps.is_over:
        ending = live.ending
        if ending is None or steps.is_run_over:
            return RUN_ENDED
        changes = "; ".join(told(live.settings, unpacked_changes(ending.changes)))
        return f"the run is amended at version {ending.version}, its host begins the stages anew: {changes}"
    if not steps.is_member:
        return f"waiting to be put on the roster of stage {stage}: that takes a step or two"
    if 0 <= tally.since_last_s < IDLE_S or (tally.since_last_s < 0 and uptime_s < IDLE_S):
        return ""
    if live.settings.has_windows:  # one lasts as long as it will
        replica = steps.replica
        is_done = replica.num_done(replica.present_step) >= live.settings.microbatches_of_one
        return "its window is done: it waits for the others, and for the round" if is_done else ""
    for beside in (stage - 1, stage + 1):
        if 0 <= beside <= last and not neighbours.of_stage(beside):
            return f"no peer of stage {beside} answers: the run waits for one"
    if not live.in_flight:
        return "no microbatch comes: other stages are slower, or their owners have paused them"
    return f"{live.in_flight} microbatches are in flight, but no step was certified: too few voters may answer"


def _add_live(message: pb.Peer, daemon: "PeerDaemon", live: "PeerAtStage") -> None:
    steps, tally, settings = live.steps, daemon.tally, live.settings
    stage = int(steps.chain.stage)
    message.run_name, message.run_id = settings.name, steps.context.run_id
    message.place.CopyFrom(
        pb.Place(
            stage=stage,
            num_stages=settings.model.num_stages,
            version=int(steps.version),
            total_steps=settings.optimizer.total_steps,
            num_members=len(steps.chain.members),
            is_member=steps.is_member,
            standing=f"probation {_agreements(live)}/{settings.audits.agreements_to_promote}"
            if _on_probation(daemon, live)
            else daemon.standing.table.standing(daemon.identity.peer_id, steps.version).value,
        )
    )
    if settings.has_windows:
        _add_window(message.place, live)
    credit = daemon.reports.credit
    if credit is not None:
        message.credit.CopyFrom(
            pb.Credit(
                tokens=credit.num_tokens,
                microbatches=credit.num_microbatches,
                steps=credit.num_steps,
                rank=credit.rank,
                num_ranked=credit.num_ranked,
            )
        )
    rank, num_ranked = tally.rank()
    message.work.CopyFrom(
        pb.Work(
            computed=live.counters.microbatches,
            certified_microbatches=tally.microbatches,
            certified_tokens=tally.tokens,
            last_step=tally.last_step,
            last_step_tokens=tally.last_step_tokens,
            last_step_all_tokens=tally.last_step_all_tokens,
            rank=rank,
            num_ranked=num_ranked,
            since_last_s=tally.since_last_s,
            tokens_per_s=tally.tokens_per_s,
        )
    )
    verifying = live.verifying
    replays = verifying.auditor.counters if verifying.auditor is not None else None
    parts = verifying.reducer_auditor.counters
    message.audits.CopyFrom(
        pb.Audits(
            passed=verifying.desk.num_served + verifying.hop_desk.num_served,
            made=(replays.hops + replays.contributions if replays else 0) + parts.parts,
            frauds_found=(replays.frauds if replays else 0) + parts.frauds,
        )
    )
    sides = range(max(0, stage - 1), min(settings.model.num_stages, stage + 2))
    message.num_neighbours = sum(len(live.neighbours.of_stage(beside)) for beside in sides)


def _add_window(place: pb.Place, live: "PeerAtStage") -> None:
    steps, settings = live.steps, live.settings
    step = steps.replica.present_step
    place.local_steps = settings.averaging.local_steps
    place.inner_steps_taken = steps.replica.inner_steps_taken(step)
    each_s = steps.context.compute.busy_s / live.counters.microbatches if live.counters.microbatches else -1.0
    place.window_left_s = each_s * max(0, settings.microbatches_of_one - steps.replica.num_done(step))


def limits_message(
    limits: OwnerLimits,
    reading: Reading,
    *,
    memory_bytes: int,
    gpu_bytes: Sequence[int],
    own_cores: float,
    month_bytes: int,
    written_today_bytes: int,
    relayed_bytes: int,
    rates_mbit: tuple[float, float],
) -> pb.Limits:
    """Every limit as it is in force, beside what is used of it; `gpu_bytes` of each GPU that is asked for."""
    used = {
        "threads": f"{own_cores:.1f}",
        "memory-gib": f"{memory_bytes / GIB:.2f}",
        "gpu-memory-gib": ", ".join(f"{size / GIB:.2f}" for size in gpu_bytes),
        "disk-gib": f"{reading.disk_bytes / GIB:.2f}",
        "disk-writes-gib": f"{written_today_bytes / GIB:.2f}",
        "upload-mbit": f"{rates_mbit[0]:.1f}",
        "download-mbit": f"{rates_mbit[1]:.1f}",
        "month-gb": f"{month_bytes / 1e9:.2f}",
        "relay-gb": f"{relayed_bytes / 1e9:.2f}"
        + (", no more while a rate is limited" if limits.upload_mbit or limits.download_mbit else ""),
        "hours": f"it is {clock(reading.minute_of_day)}",
        "on-battery": {None: "no battery", True: "on battery", False: "plugged in"}[reading.on_battery],
        "busy-cpu": _percent(reading.others_cpu_percent),
        "busy-gpu": _percent(reading.others_gpu_percent),
    }
    return pb.Limits(
        limits=[
            pb.Limit(
                name=limit.name,
                value=limits.get(limit.name),
                used=used.get(limit.name, ""),
                meaning=limit.meaning,
                at_next_start=limit.at_next_start,
            )
            for limit in LIMITS
        ]
    )


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0f} %"
