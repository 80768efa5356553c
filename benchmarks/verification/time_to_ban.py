"""The time until a liar is banned, held against the law that predicts it.

    python -m benchmarks.verification.time_to_ban [--keep bans.jsonl] [--json] [--plot docs/time-to-ban.png]
    python -m benchmarks.verification.time_to_ban --seeds 0 --kit [--keep bans.jsonl] [--json]

One peer of eight in a stage lies from step 5 on; seven honest ones audit it. Counted are the versions it lies in, up to
and with the first whose lie is found: geometric, with p = 1 - (1 - q)^7. Draws are revealed, and so bans come, two
versions later; that is a constant and not counted.

*Simulated*, whole: at the manifest's budgets, five seeds of each attack run in `peer.sim` until the ban. Tensors,
attacks, signatures, hash chains, draws, replays, evidence and judgements are the real ones; there are no messages.
*Drawn*: for many seeds at each of three rates, only hash chains and draws are made anew, over the digests of signed
contributions and the microbatches of one simulated liar that nobody audits. Which of them an audit finds wrong has been
established by replaying every one of them. A run longer than what was recorded begins the record again.

The prediction knows the rates and, from the replays, in what share of contributions and of microbatches the lie shows.

With --kit every attack of the kit on work that replays show is simulated. What several liars at once do to the loss is
for `benchmarks.verification.damage_by_liars`.
"""

import hashlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from benchmarks.kept_pieces import KeptPieces
from benchmarks.verification.palette import COLORS, GRID, INK, MUTED, SURFACE
from swarm.core.audit.hash_chain import HashChain
from swarm.core.ids import MicrobatchId, PeerId
from swarm.local.compute_pools import bound_pools
from verification.audit.draws import (
    AuditBudget,
    bound_99,
    contribution_rate,
    draw,
    expected_time_to_ban,
    found_by_one,
    found_within,
    hop_draw,
    microbatch_rate,
)

if TYPE_CHECKING:
    from peer.sim import TinyRun

ATTACKS = (
    "sign_flip",
    "alie",
    "zeros",
    "stale_weights",
    "activation_noise",
    "gradient_negate",
    "sometimes_activation_noise",
)
"""In contributions; in both; in what is sent on; in what is sent back; in a tenth of what is sent on."""
FACTORS = (0.5, 1.0, 2.0)
"""Of the manifest's audit budgets."""
NOT_REPLAYED = (
    "claimed_ids",
    "copied_papers",
    "wrong_reducer",
    "equivocating_reducer",
    "omitting_reducer",
    "omitting_leader",
    "equivocating_leader",
    "two_votes",
    "grinding",
    "charges",
    "framing",
    "written_result",
    "row_bias",
    "slow_bias",
    "wrong_state",
    "false_accuser",
    "lying_juror",
    "forged_records",
    "replayed_records",
    "inflated_records",
    "sybil_flood",
    "nan_weights",
    "nan_gradient",
    "long_gradient",
)
"""These lie elsewhere than in work that replays show at their rates; or, the last three, in one step alone."""
FROM_STEP = 5
LIAR = 3
NUM_REPLICAS = 8
MICROBATCHES = 2
"""In each contribution."""
RECORDED_STEPS = 20
RECORDED_STEPS_SOMETIMES = 60
SMOKE_STEPS = 2
LONGEST = 1 << 11
"""Versions that a drawn run may take."""


@dataclass(frozen=True)
class Case:
    """One attack at one rate."""

    attack: str
    stage: int
    factor: float
    """Of the manifest's budgets."""
    in_contributions: float
    """Share of the liar's contributions that a replay finds wrong."""
    in_hops: float
    """Share of its microbatches whose replay finds what was sent on wrong."""
    rate: float
    """Chance that one auditor finds the lie in a version."""
    predicted_mean: float
    bound_99: float
    seeds: int
    observed_mean: float
    worst: int
    ks_distance: float
    """Largest distance of the observed distribution from the geometric one."""
    observed: tuple[int, ...]
    """Drawn, one a seed."""
    simulated: tuple[int | None, ...]
    """One a seed; None: not banned within the run."""
    quarantined: tuple[int | None, ...]
    """One a seed: versions of the attack before the quarantine, if that is how it ended."""
    steps: int
    """In the simulated runs."""
    others_banned: int
    """Or quarantined, in the simulated runs."""


Recorded = Mapping[str, Any]
"""Of one contribution: its target and digest, whether a replay finds it wrong, and of each of its microbatches the
id and whether a replay finds wrong what was sent on."""


def tiny_run(factor: float, *, total_steps: int) -> "TinyRun":
    from peer.sim import TinyRun
    from swarm.core.settings import AuditSettings

    plain = AuditSettings()
    audits = AuditSettings(hop_budget=factor * plain.hop_budget, contribution_budget=factor * plain.contribution_budget)
    assert TinyRun().microbatches_per_step == MICROBATCHES * NUM_REPLICAS
    return TinyRun(num_replicas=NUM_REPLICAS, total_steps=total_steps, audits=audits)


def stage_of(kind: str) -> int:
    """The last stage, unless the attack has no place there."""
    from swarm.attacks import Attack

    return 1 if Attack(kind).works_in(1, 2) else 0


def recorded(kind: str, steps: int) -> list[Recorded]:
    """What replays find of each step of a liar whom nobody audits, from its first lie on."""
    from peer.sim import SimulatedSwarm

    if kind == "withholding":
        return []  # nothing is shown, and what is not shown is a debt
    stage = stage_of(kind)
    swarm = SimulatedSwarm(tiny_run(0.0, total_steps=150), attacks={(stage, LIAR): f"{kind}@{FROM_STEP}"}, seed=1000)
    found = []
    for step in range(FROM_STEP + steps):
        swarm.step()
        if step >= FROM_STEP:
            shown = swarm.shown(stage, LIAR, step)
            made = shown.contribution
            found.append(
                {
                    "target": made.peer_id,
                    "digest": made.digest().hex(),
                    "is_wrong": shown.is_wrong,
                    "microbatches": [
                        [int(work.microbatch_id), wrong]
                        for work, wrong in zip(made.work, shown.wrong_microbatches, strict=True)
                    ],
                }
            )
    return found


def simulated(kind: str, seed: int, *, most_steps: int) -> dict[str, Any]:
    """A whole run at the manifest's budgets: versions of lying up to the one found (None: not within `most_steps`),
    or until a quarantine, and how many others were banned."""
    from peer.sim import SimulatedSwarm

    stage = stage_of(kind)
    swarm = SimulatedSwarm(tiny_run(1.0, total_steps=150), attacks={(stage, LIAR): f"{kind}@{FROM_STEP}"}, seed=seed)
    liar, versions, quarantined, others = swarm.peer(stage, LIAR).peer_id, None, None, 0
    while swarm.version < most_steps and versions is None and quarantined is None:
        for ban in swarm.step():
            if ban.peer_id == liar:
                versions = int(ban.step) - FROM_STEP + 1
            else:
                others += 1
        if liar in swarm.outcome().quarantined:
            quarantined = int(swarm.version) - FROM_STEP
    others += len(set(swarm.outcome().quarantined) - {liar})
    return {"versions": versions, "quarantined": quarantined, "others": others, "steps": int(swarm.version)}


def drawn(shown: Sequence[Recorded], factor: float, seed: int) -> int:
    """Versions of lying up to the one found, with hash chains of this seed."""
    hop, contribution = rates(factor)
    target = shown[0]["target"]
    chains = []
    for auditor in range(NUM_REPLICAS - 1):
        chains.append(HashChain(hashlib.sha256(f"time to ban/{factor}/{seed}/{auditor}".encode()).digest(), LONGEST))
    for version in range(LONGEST):
        one = shown[version % len(shown)]
        for auditor, chain in enumerate(chains):
            name, reveal = PeerId(f"auditor {auditor}"), chain.reveal(version)
            whole = draw(reveal, bytes.fromhex(one["digest"]), auditor=name, target=target)
            if one["is_wrong"] and whole.hits_contribution(contribution):
                return version + 1
            for number, is_wrong in one["microbatches"]:
                drawn_hop = hop_draw(reveal, MicrobatchId(number), auditor=name, target=target)
                if is_wrong and drawn_hop.hits_hop(hop):
                    return version + 1
    return LONGEST


def rates(factor: float) -> tuple[float, float]:
    """Of one auditor: for each microbatch, and for the whole contribution."""
    plain = AuditBudget()
    budget = AuditBudget(hop=factor * plain.hop, contribution=factor * plain.contribution)
    return microbatch_rate(NUM_REPLICAS, budget), contribution_rate(NUM_REPLICAS, budget)


def ks_distance(observed: Sequence[int], rate: float) -> float:
    """Kolmogorov and Smirnov's, from the geometric law; 1 where the law knows no end."""
    worst, below = 0.0, 0.0
    for versions in range(1, max(observed) + 1):
        law = found_within(rate, NUM_REPLICAS - 1, versions)
        share = sum(one <= versions for one in observed) / len(observed)
        worst, below = max(worst, abs(share - law)), share
    return max(worst, 1.0 - below)


def cases_of(
    kind: str, pieces: KeptPieces, *, seeds: int, simulated_seeds: int, most_steps: int, recorded_steps: int | None
) -> list[Case]:
    """The attack at every rate. `recorded_steps` None: as many as the attack needs."""
    enough = RECORDED_STEPS_SOMETIMES if kind.startswith("sometimes_") else RECORDED_STEPS
    shown: list[Recorded] = pieces.get(
        f"recorded microbatches/{kind}", partial(recorded, kind, recorded_steps or enough)
    )
    in_contributions = _share([one["is_wrong"] for one in shown])
    in_hops = _share([wrong for one in shown for _, wrong in one["microbatches"]])
    whole = [
        pieces.get(f"each drawn/{kind}/{seed}/{most_steps}", partial(simulated, kind, seed, most_steps=most_steps))
        for seed in range(simulated_seeds)
    ]
    made = []
    for factor in FACTORS:
        hop, contribution = rates(factor)
        rate = found_by_one(hop, contribution, MICROBATCHES, in_hops=in_hops, in_contributions=in_contributions)
        observed = [drawn(shown, factor, seed) for seed in range(seeds if rate > 0 else 0)]
        runs = whole if factor == 1.0 else []
        made.append(
            Case(
                attack=kind,
                stage=stage_of(kind),
                factor=factor,
                in_contributions=in_contributions,
                in_hops=in_hops,
                rate=rate,
                predicted_mean=expected_time_to_ban(rate, NUM_REPLICAS - 1),
                bound_99=bound_99(rate, NUM_REPLICAS - 1),
                seeds=len(observed),
                observed_mean=statistics.mean(observed) if observed else math.nan,
                worst=max(observed, default=0),
                ks_distance=ks_distance(observed, rate) if observed else math.nan,
                observed=tuple(observed),
                simulated=tuple(run["versions"] for run in runs),
                quarantined=tuple(run["quarantined"] for run in runs),
                steps=sum(run["steps"] for run in runs),
                others_banned=sum(run["others"] for run in runs),
            )
        )
    return made


def _share(found: Sequence[bool]) -> float:
    return sum(found) / max(1, len(found))


# -- shown ------------------------------------------------------------------------------------------------


def plot(path: Path, cases: Sequence[Case]) -> None:
    """Observed against predicted, both in versions: law, spread, and a point for each attack, rate and seed."""
    import numpy as np
    from matplotlib.figure import Figure  # no pyplot: no window, no global state

    figure = Figure(figsize=(9.5, 6.5), dpi=150, facecolor=SURFACE, layout="constrained")
    axes = figure.add_subplot(facecolor=SURFACE)
    shown = [case for case in cases if case.observed]
    low, high = (bound(case.predicted_mean for case in shown) for bound in (min, max))
    means = np.geomspace(low / 1.4, high * 1.4, 200)
    misses = 1 - 1 / np.maximum(means, 1.0001)
    edge = {share: np.log(share) / np.log(misses) for share in (0.99, 0.01)}
    axes.fill_between(means, np.maximum(1, edge[0.99]), edge[0.01], color=INK, alpha=0.06, linewidth=0)
    axes.plot(means, means, color=INK, linewidth=1.6, label="the law: mean 1 / p, 98 % of runs in the grey", zorder=3)
    rng = np.random.default_rng(0)
    attacks = list(dict.fromkeys(case.attack for case in shown))
    for color, attack in zip(COLORS, attacks, strict=False):
        for case in (case for case in shown if case.attack == attack):
            spread = case.predicted_mean * np.exp(rng.uniform(-0.035, 0.035, size=case.seeds))
            axes.plot(spread, case.observed, ".", color=color, alpha=0.16, markersize=4, zorder=1)
            banned = [versions for versions in case.simulated if versions is not None]
            axes.plot(
                [case.predicted_mean] * len(banned), banned, "D", color=color, markerfacecolor="none", markersize=5
            )
            axes.plot(
                case.predicted_mean,
                case.observed_mean,
                "o",
                color=color,
                markersize=10,
                markeredgecolor=SURFACE,
                markeredgewidth=1.5,
                zorder=4,
                label=attack if case.factor == 1.0 else None,
            )
    axes.plot([], [], ".", color=MUTED, label="one seed, drawn")
    axes.plot([], [], "D", color=MUTED, markerfacecolor="none", label="one seed, simulated whole")
    axes.set_xscale("log")
    axes.set_yscale("log")
    ticks = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(means[0], means[-1])
    axes.set_ylim(0.9, 1.1 * max(max(case.observed) for case in shown))
    axes.set_title("Time to ban: predicted and observed", loc="left", color=INK, fontsize=13, fontweight="bold", pad=12)
    axes.set_xlabel("predicted mean, versions of lying (audit budgets x 0.5, 1, 2)", color=MUTED)
    axes.set_ylabel("observed, versions of lying until the one that is found", color=MUTED)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#c9c8c2")
    axes.legend(loc="upper left", frameon=False, labelcolor=INK, fontsize=9)
    figure.savefig(path, facecolor=SURFACE)


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """JSON knows no infinity: None, where nobody can find the lie."""
    return {name: None if isinstance(one, float) and not math.isfinite(one) else one for name, one in row.items()}


def _show(cases: Sequence[Case]) -> None:
    click.echo("| attack | budgets | predicted mean | observed mean | bound 99 % | worst | seeds | KS | simulated |")
    click.echo("|---" * 9 + "|")
    for case in cases:
        runs = ", ".join("not" if versions is None else str(versions) for versions in case.simulated) or "-"
        click.echo(
            f"| {case.attack} | x {case.factor} | {case.predicted_mean:.1f} | {case.observed_mean:.1f} "
            f"| {case.bound_99:.0f} | {case.worst} | {case.seeds} | {case.ks_distance:.3f} | {runs} |"
        )


@click.command()
@click.option("--attack", "attacks", multiple=True, help="Of swarm.attacks; several times.  [default: the figure's]")
@click.option("--kit", is_flag=True, help="Every attack that is simulated.")
@click.option("--seeds", type=click.IntRange(min=0), default=200, show_default=True, help="Drawn, at each rate.")
@click.option("--simulated-seeds", type=click.IntRange(min=0), default=5, show_default=True)
@click.option("--most-steps", type=click.IntRange(min=1, max=150), default=150, show_default=True)
@click.option("--plot", "plot_path", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--keep", type=click.Path(dir_okay=False, path_type=Path), help="Keep pieces here, and go on from them.")
@click.option("--stop-after", type=click.FloatRange(min=0), help="Seconds after which no new piece is begun.")
@click.option("--smoke", is_flag=True, help="One attack, for a few steps: does it run?")
@click.option("--json", "as_json", is_flag=True)
def main(
    attacks: tuple[str, ...],
    kit: bool,
    seeds: int,
    simulated_seeds: int,
    most_steps: int,
    plot_path: Path | None,
    keep: Path | None,
    stop_after: float | None,
    smoke: bool,
    as_json: bool,
) -> None:
    """Versions until liars are banned: predicted and observed."""
    bound_pools(1)  # before torch is first imported
    kinds, recorded_steps = kit_kinds() if kit else attacks or ATTACKS, None
    if smoke:
        kinds = kinds[-1:] if kit else kinds[:1]  # of the kit one that shows no replay anything
        seeds, simulated_seeds, recorded_steps = min(seeds, 2), 1, SMOKE_STEPS
        most_steps = FROM_STEP + SMOKE_STEPS
    cases: list[Case] = []
    with KeptPieces(keep, total=len(kinds) * (1 + simulated_seeds), stop_after_s=stop_after) as pieces:
        for kind in kinds:
            cases += cases_of(
                kind,
                pieces,
                seeds=seeds,
                simulated_seeds=simulated_seeds,
                most_steps=most_steps,
                recorded_steps=recorded_steps,
            )
    if plot_path is not None:
        plot(plot_path, cases)
    if as_json:
        click.echo(json.dumps({"cases": [_finite(asdict(case)) for case in cases]}))
    else:
        _show(cases)


def kit_kinds() -> list[str]:
    """Those of the figure, and the others."""
    from swarm.attacks import KINDS

    left = (*NOT_REPLAYED, *ATTACKS, "lazy_auditor")  # which does its own work as it should
    others = [kind for kind, stages in KINDS.items() if kind not in left and stages != "the only"]
    return [*ATTACKS, *others]


if __name__ == "__main__":
    main()
