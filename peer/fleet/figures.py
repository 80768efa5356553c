"""A simulation's outcome in figures: a JSON object, a line of text for people, a plot."""

import io
import statistics
from typing import Any

from peer.fleet.fleet import RECENT, RECOVERED, SAMPLE_S, Outcome, median_and_worst


def figures(outcome: Outcome) -> dict[str, Any]:
    """Everything measured, as JSON has it. Bytes are those of the whole simulation, warm-up included."""
    scenario, counts = outcome.scenario, outcome.counts
    median_s, worst_s = median_and_worst(outcome.recoveries_s)
    decisions = counts["wiring_choices"] + counts["placements"] + counts["plans"]
    peer_s = max(1.0, outcome.peer_seconds)
    control = outcome.stage_bytes["directory"] + outcome.stage_bytes["control"]
    return {
        "scenario": scenario.name,
        "seed": scenario.run.seed,
        "peers": scenario.fleet.peers,
        "stages": scenario.model.stages,
        "virtual_seconds": scenario.run.measured_s,
        "warm_up_seconds": scenario.run.warm_up_s,
        "wall_seconds": round(outcome.wall_s, 3),
        "cpu_seconds": round(outcome.cpu_s, 3),
        "throughput_vs_ideal": round(outcome.throughput_vs_ideal, 4),
        "throughput_microbatches_per_s": round(outcome.useful / scenario.run.measured_s, 4),
        "ideal_microbatches_per_s": round(outcome.ideal / scenario.run.measured_s, 4),
        "trip_seconds": round(outcome.trip_s, 2),
        "recovery_seconds": {"median": round(median_s, 3), "worst": round(worst_s, 3)},
        "disturbances": outcome.disturbances,
        "lost_microbatches": counts["lost_microbatches"],
        "outlived_their_source": counts["outlived_their_source"],
        "stragglers": counts["stragglers"],
        "redone_hops": counts["redone_hops"],
        "lost_sums_share": _share(outcome, "lost_sums"),
        "refuted_share": _share(outcome, "refuted"),
        "joins": counts["joins"],
        "departures": counts["departures"],
        "moves": counts["moves"],
        "bans": counts["bans"],
        "decisions": decisions,
        "decisions_per_second": round(decisions / max(1e-9, outcome.wall_s), 1),
        "seconds_per_plan": round(statistics.median(outcome.decide_s), 5) if outcome.decide_s else 0.0,
        "bytes": {what: round(size) for what, size in sorted(outcome.stage_bytes.items())},
        "control_bytes_per_peer_second": round(control / peer_s, 1),
    }


def summary(found: dict[str, Any]) -> str:
    """What a person wants to know of it."""
    lines = [
        f"{found['scenario']}: {found['peers']:,} peers, {found['stages']} stages, "
        f"{found['virtual_seconds'] / 60:g} virtual minutes in {found['wall_seconds']:.1f} s "
        f"({found['cpu_seconds']:.1f} s of one core)",
        f"  throughput    {100 * found['throughput_vs_ideal']:.1f} % of ideal "
        f"({found['throughput_microbatches_per_s']:.2f} of {found['ideal_microbatches_per_s']:.2f} microbatches/s)",
        f"  wasted        {100 * found['lost_sums_share']:.1f} % in lost sums, "
        f"{found['redone_hops']:,} hops done again, {found['lost_microbatches']:,} microbatches lost",
        f"  recovery      {found['recovery_seconds']['median']:.1f} s median, "
        f"{found['recovery_seconds']['worst']:.1f} s worst after a peer is lost",
        f"  churn         {found['joins']:,} joins, {found['departures']:,} departures, {found['moves']:,} moves, "
        f"{found['bans']:,} bans",
        f"  control       {found['control_bytes_per_peer_second']:.0f} bytes/s a peer",
        f"  decisions     {found['decisions_per_second']:,.0f} a second; who should move: "
        f"{1000 * found['seconds_per_plan']:.1f} ms",
    ]
    for event in found["disturbances"]:
        back = event["recovered_s"]
        when = "not within the time simulated" if back is None else f"after {back:.0f} s"
        share = 100 * RECOVERED
        lines.append(f"  {event['kind']:<13} at {event['at_s']:.0f} s: back at {share:.0f} % of what it was {when}")
    return "\n".join(lines)


def plot_png(outcome: Outcome) -> bytes:
    """Throughput against the ideal, and peers, over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    speed, crowd = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    series = [sample for sample in outcome.series if sample[0] >= 0]
    minutes = [sample[0] / 60 for sample in series]
    done = [statistics.fmean(s[1] for s in series[max(0, at - RECENT + 1) : at + 1]) for at in range(len(series))]
    speed.plot(minutes, [sample[2] for sample in series], color="0.5", label="ideal")
    speed.plot(minutes, done, color="tab:blue", label=f"came home ({RECENT * SAMPLE_S:.0f} s mean)")
    speed.set_ylabel("microbatches a second")
    speed.set_ylim(bottom=0)
    speed.legend(loc="lower right")
    speed.set_title(f"{outcome.scenario.name}: {100 * outcome.throughput_vs_ideal:.1f} % of ideal, lost work deducted")
    crowd.plot(minutes, [sample[3] for sample in series], color="0.5", label="peers")
    crowd.plot(minutes, [sample[4] for sample in series], color="tab:green", label="members")
    crowd.set_ylabel("peers")
    crowd.set_xlabel("minutes")
    crowd.legend(loc="lower right")
    for axes in (speed, crowd):
        for event in outcome.disturbances:
            axes.axvline(float(event["at_s"] or 0.0) / 60, color="tab:red", linewidth=0.8)
    made = io.BytesIO()
    figure.savefig(made, format="png", dpi=110)
    return made.getvalue()


def _share(outcome: Outcome, what: str) -> float:
    """Of a stage's additions to sums, how many were lost in this way."""
    added = outcome.useful + (outcome.counts["lost_sums"] + outcome.counts["refuted"]) / outcome.scenario.model.stages
    return round(outcome.counts[what] / outcome.scenario.model.stages / added, 4) if added > 0 else 0.0
