"""The simulator held against a real swarm of six: fitted on one scenario, checked on three others.

    python -m benchmarks.fleet.fit --records FOLDER [--json] [--plot PNG]   # 50 minutes; less what is there
    python -m benchmarks.fleet.fit --records FOLDER --only unequal          # real runs of one: 4 minutes each

Real: processes that really train, with compute emulated at a fixed rate (`benchmarks.churn.kills`). Simulated:
`peer.fleet` with the same peers and steps. Every so often a peer is killed, from the stages by turns, and another of
its power comes, which goes where the swarm thinks best. Kills are spread over the length of a step, and the simulator
has them in the same stages and phases of its own steps. Goal: throughput in that time, and the mean time until the
swarm is back (`benchmarks.churn.recovery`), each within `WITHIN` in all three scenarios that nothing was fitted on.
What is fitted is in `Fitted`; all else is as configured.
"""

import contextlib
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from benchmarks.churn.kills import READY_S, SETTLED_VERSION, Setting, Swarm, story, versions_of
from benchmarks.churn.recovery import LATEST_PHASE, Story
from benchmarks.programs import end_when_told
from peer.fleet.fleet import Stay, simulate
from peer.fleet.scenario import Scenario
from swarm.core.tables import read_table

WITHIN = 0.2
SEEDS = (0, 1, 2)
"""Of real runs of each scenario."""
SIMULATED_SEEDS, FIT_SEEDS = 12, 3
"""Of simulations of each real run."""
CALM_S, CHURN_S = 25.0, 120.0
PRIORITY = -10
"""Of the swarm's processes, where that is allowed: they compute little, and what else runs must not count."""
LONGEST_STEP_S = 20.0
REPLACED_AFTER_S = 6.0
"""Time without the killed. What comes for it has everything imported, and has only to join."""


@dataclass(frozen=True)
class Case:
    """A swarm and how often one of its peers is killed."""

    setting: Setting
    every_s: float

    @property
    def num_kills(self) -> int:
        return int(CHURN_S // self.every_s)


FITTED_ON = "three and three"
CASES = {
    FITTED_ON: Case(Setting(forward_s=0.16, microbatches=18), every_s=15.0),
    "unequal": Case(Setting(forward_s=0.16, microbatches=18, powers=(1.0, 1.0, 0.5)), every_s=15.0),
    "three stages of two": Case(Setting(forward_s=0.16, microbatches=12, stages=3, powers=(1.0, 1.0)), every_s=20.0),
    "long microbatches": Case(Setting(forward_s=0.24, microbatches=12), every_s=24.0),
}


@dataclass(frozen=True)
class Fitted:
    """What the simulator is told of this program on this machine, the same in all scenarios."""

    hop_s: float = 0.01
    """From the end of a pass at one peer to when the next peer could begin, besides its queue."""
    round_s: float = 0.2
    """From the last microbatch of a step to the next version."""
    start_s: float = 2.0
    """From a program's wish to join until it could be a member with the next version."""
    notice_s: float = 0.1
    """From a kill until its work is given to others."""


# -- when is killed, on both sides ---------------------------------------------------------------------------


def phases(num: int, rng: random.Random) -> list[float]:
    """Evenly spread over a step, in random order: `num` of them."""
    found = [LATEST_PHASE * (at + rng.random()) / num for at in range(num)]
    rng.shuffle(found)
    return found


# -- real ------------------------------------------------------------------------------------------------------


def measure(case: Case, seed: int, folder: Path) -> dict[str, Any]:
    """One real run: the story, and what was measured beside it."""
    rng = random.Random(f"simulator fit/{seed}")
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    with ExitStack() as stack:
        swarm = Swarm(folder, stack, case.setting)
        swarm.begin(forks=True)
        swarm.events.wait_for(lambda event: event.get("version", 0) >= SETTLED_VERSION, timeout_s=READY_S)
        calm = (time.time(), time.time() + CALM_S)
        swarm.follow(calm[1])
        churn = (time.time(), time.time() + CHURN_S)
        kills = list[float]()
        for number, phase in enumerate(phases(case.num_kills, rng)):
            swarm.follow(churn[0] + number * case.every_s)
            due = time.time()
            swarm.events.wait_for(lambda event, due=due: _is_version_since(event, due), timeout_s=READY_S)
            so_far = Story(versions_of(swarm.events.seen), list(swarm.lives.values()), kills, calm, churn)
            swarm.follow(so_far.moment(due, phase))
            killed = swarm.kill(number % case.setting.stages, rng)
            kills.append(time.time())
            swarm.follow(kills[-1] + REPLACED_AFTER_S)
            swarm.start(killed.power)
            click.echo(f"kill {number + 1} of {case.num_kills}", err=True)
        swarm.follow(churn[1] + LONGEST_STEP_S / 2)
        told = story(swarm, swarm.end(), calm, churn, kills)
    rounds = [e["round_s"] for e in swarm.events.seen if e["event"] == "step" and calm[0] <= e["at"] <= calm[1]]
    return {"story": _to_json(told), "round_s": statistics.median(rounds), "load_average": os.getloadavg()[0]}


def _is_version_since(event: dict[str, Any], due: float) -> bool:
    return bool(event["event"] == "version" and event["at"] >= due)


def _to_json(told: Story) -> dict[str, Any]:
    """Times from the end of the calm."""
    zero = told.calm[1]

    def since(at: float | None) -> float | None:
        return None if at is None else at - zero

    return {
        "versions": [(at - zero, num) for at, num in told.versions],
        "stays": [
            {"stage": s.stage, "power": s.power, "joined_at": s.joined_at - zero, "ended_at": since(s.ended_at)}
            for s in told.stays
        ],
        "kills": [at - zero for at in told.kills],
        "calm": [at - zero for at in told.calm],
        "churn": [at - zero for at in told.churn],
    }


def from_json(value: dict[str, Any]) -> Story:
    calm, churn = value["calm"], value["churn"]
    versions = [(at, num) for at, num in value["versions"]]
    return Story(
        versions, [Stay(**stay) for stay in value["stays"]], value["kills"], (calm[0], calm[1]), (churn[0], churn[1])
    )


# -- simulated -------------------------------------------------------------------------------------------------


def scenario(
    case: Case, fitted: Fitted, seed: int, kills: Sequence[tuple[float, float]], *, until_s: float
) -> Scenario:
    """The same swarm for the simulator, and kills: when, and of a peer of which power. Churn begins at 0."""
    setting = case.setting
    return read_table(
        Scenario,
        {
            "name": "six peers",
            "run": {"seed": seed, "warm_up_s": 2 * CALM_S, "measured_s": until_s, "min_replicas": 1, "decide_s": 1e6},
            "model": {
                "stages": setting.stages,
                "microbatch_compute_s": 3 * setting.forward_s * setting.stages,
                "microbatches": setting.microbatches,
                "delay": 0,
                "activation_mbytes": 0.002,
                "state_mbytes": 0.3,
                "round_mbytes": 0.02,
                "round_s": fitted.round_s,
                "step_s": 120.0,
            },
            "fleet": {
                "peers": setting.num_peers,
                "first_stages": [len(setting.powers)] * setting.stages,
                "powers": setting.powers * setting.stages,
                "up_mbit": 1e4,
                "down_mbit": 1e4,
                "round_trip_ms": 2000 * fitted.hop_s,
                "max_in_flight": setting.max_in_flight,
                "start_s": fitted.start_s,
                "notice_s": fitted.notice_s,
            },
            "sessions": {"law": "exponential", "turnover": 0.0},
            "trust": {"audits": 0.0, "probation_replays": 0},
            "events": [
                {
                    "kind": "crash",
                    "at_s": at,
                    "stage": number % setting.stages,
                    "power": power,
                    "replaced_after_s": REPLACED_AFTER_S,
                }
                for number, (at, power) in enumerate(kills)
            ],
        },
    )


def simulated(case: Case, fitted: Fitted, real: Sequence[Story], *, num: int) -> list[Story]:
    """With the kills that the real runs had, by stage, power and phase of a step; `num` of each."""
    return [_simulated(case, fitted, seed, told) for told in real for seed in range(num)]


def _simulated(case: Case, fitted: Fitted, seed: int, real: Story) -> Story:
    """What a kill does follows from those before it: each is simulated up to the step in which the next is."""
    kills, killed = list[float](), real.killed()

    def story(until_s: float) -> Story:
        crashes = list(zip(kills, killed, strict=False))
        outcome = simulate(scenario(case, fitted, seed, crashes, until_s=until_s))
        return Story(outcome.versions, outcome.stays, kills, (-CALM_S, 0.0), (0.0, CHURN_S))

    for number, phase in enumerate(real.phases()):
        due = number * case.every_s
        kills.append(story(due + LONGEST_STEP_S).moment(due, phase))
    return story(CHURN_S + LONGEST_STEP_S)


# -- both ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figures:
    """Of several runs of one scenario: medians over the runs, so that one which the machine held up does not count."""

    undisturbed_per_s: float
    """Microbatches."""
    per_s: float
    """Microbatches, while peers are killed."""
    back_s: float
    """Mean over all kills after which the swarm was back before the next."""
    living: float
    """Members, while peers are killed."""
    joined_s: float
    """Median, from a kill until another is a member for the killed."""
    of_runs: list[tuple[float, float]]
    """`per_s` and `back_s` of each."""
    num_kills: int
    num_not_back: int


def figures(stories: Sequence[Story]) -> Figures:
    backs = [[back for back in told.backs_s() if back is not None] for told in stories]
    rates = [told.rate_between(*told.churn) for told in stories]
    num_kills = sum(len(told.kills) for told in stories)
    return Figures(
        undisturbed_per_s=statistics.median(told.undisturbed_per_s() for told in stories),
        per_s=statistics.median(rates),
        back_s=statistics.fmean(back for run in backs for back in run),
        living=statistics.median(told.mean_living(*told.churn) for told in stories),
        joined_s=statistics.median(after for told in stories for after in _joined_after(told)),
        of_runs=[(rate, statistics.fmean(run)) for rate, run in zip(rates, backs, strict=True)],
        num_kills=num_kills,
        num_not_back=num_kills - sum(map(len, backs)),
    )


def _joined_after(told: Story) -> list[float]:
    """From each kill to the joining of who came for the killed; in order, as far as they came."""
    joins = sorted(stay.joined_at for stay in told.stays if stay.joined_at > told.churn[0])
    return [join - kill for kill, join in zip(told.kills, joins, strict=False)]


def fit(stories: Sequence[Story], round_s: float, case: Case, *, num: int) -> Fitted:
    """Each of the four follows from one figure of the scenario; the last two move each other a little."""
    fitted, real = replace(Fitted(), round_s=round_s), figures(stories)

    def undisturbed_per_s(changed: Fitted) -> float:
        versions = simulate(scenario(case, changed, 0, [], until_s=LONGEST_STEP_S)).versions
        return Story(versions, (), (), (-CALM_S, 0.0), (0.0, 0.0)).undisturbed_per_s()

    def of(changed: Fitted) -> Figures:
        return figures(simulated(case, changed, stories, num=num))

    fitted = _solved(fitted, "hop_s", 0.001, 0.2, lambda it: real.undisturbed_per_s - undisturbed_per_s(it))
    for _ in range(2):
        fitted = _solved(fitted, "start_s", 0.0, 12.0, lambda it: of(it).joined_s - real.joined_s)
        fitted = _solved(fitted, "notice_s", 0.0, 3.0, lambda it: of(it).back_s - real.back_s)
    return fitted


def _solved(fitted: Fitted, name: str, low: float, high: float, excess: Callable[[Fitted], float]) -> Fitted:
    """The value, within bounds, above which `excess` is positive."""
    for _ in range(6):
        middle = (low + high) / 2
        if excess(replace(fitted, **{name: middle})) > 0:
            high = middle
        else:
            low = middle
    return replace(fitted, **{name: (low + high) / 2})


def compared(records: dict[str, list[dict[str, Any]]], *, num: int, num_to_fit: int) -> dict[str, Any]:
    """The fit, and both sides of every scenario, with so many simulations of each real run."""
    stories = {name: [from_json(record["story"]) for record in runs] for name, runs in records.items()}
    real = {name: figures(told) for name, told in stories.items()}
    round_s = statistics.median(record["round_s"] for record in records[FITTED_ON])
    fitted = fit(stories[FITTED_ON], round_s, CASES[FITTED_ON], num=num_to_fit)
    cases = {}
    for name, case in CASES.items():
        here = figures(simulated(case, fitted, stories[name], num=num))
        ratios = {"throughput": here.per_s / real[name].per_s, "recovery": here.back_s / real[name].back_s}
        cases[name] = {
            "is_fitted": name == FITTED_ON,
            "real": asdict(real[name]),
            "simulated": asdict(here),
            "simulated_of_real": ratios,
            "is_within": all(abs(ratio - 1) <= WITHIN for ratio in ratios.values()),
            "load_average": [record["load_average"] for record in records[name]],
        }
    return {"within": WITHIN, "fitted_on": FITTED_ON, "fitted": asdict(fitted), "cases": cases}


def plot_png(found: dict[str, Any], path: Path) -> None:
    """Real runs as dots, simulated as bars."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    for place, (axes, title) in enumerate(
        zip(figure.subplots(1, 2), ("microbatches a second, with kills", "seconds until back, mean"), strict=True)
    ):
        for at, case in enumerate(found["cases"].values()):
            of_runs = [run[place] for run in case["real"]["of_runs"]]
            value = case["simulated"]["per_s" if place == 0 else "back_s"]
            axes.bar(at, value, width=0.6, color="0.8" if case["is_fitted"] else "tab:blue", alpha=0.6)
            axes.errorbar(at, value, yerr=WITHIN * value, color="0.4", capsize=6)
            axes.plot([at] * len(of_runs), of_runs, "o", color="tab:red", label="real runs" if at == 0 else None)
        axes.set_xticks(range(len(found["cases"])), [name.replace(" ", "\n", 1) for name in found["cases"]])
        axes.set_ylim(bottom=0)
        axes.set_title(title)
        axes.legend(loc="lower right")
    figure.suptitle(f"simulated (bars, ± {100 * WITHIN:.0f} %) and real; fitted on “{found['fitted_on']}”")
    figure.savefig(path, dpi=110)


def real_runs(records: Path, only: str | None, no_runs: bool) -> dict[str, list[dict[str, Any]]]:
    """Those that are kept, and the others unless nothing is to be run; of one scenario or of all."""
    records.mkdir(exist_ok=True)
    runs: dict[str, list[dict[str, Any]]] = {}
    for name, seed in [(name, each) for name in ([only] if only else CASES) for each in SEEDS]:
        path = records / f"{name.replace(' ', '-')}-{seed}.json"
        if not path.exists() and no_runs:
            continue
        if not path.exists():
            folder = records / f"{path.stem}.logs"
            folder.mkdir()
            path.write_text(json.dumps(measure(CASES[name], seed, folder)))
        runs.setdefault(name, []).append(json.loads(path.read_text()))
    return runs


def stand_in(case: Case) -> dict[str, Any]:
    """A record of two kills, as the simulator makes it."""
    told = Story(
        [(at, 1) for at in (-2.0, 0.0, 60.0)], [Stay(0, 1.0, -9.0, 0.5)], [0.5, 61.5], (-9.0, 0.0), (0.0, CHURN_S)
    )
    (made,) = simulated(case, Fitted(), [told], num=1)
    return {"story": json.loads(json.dumps(_to_json(made))), "round_s": Fitted().round_s, "load_average": 0.0}


@click.command()
@click.option(
    "--records", type=click.Path(path_type=Path), required=True, help="Real runs are kept here, and not redone."
)
@click.option("--only", type=click.Choice(list(CASES)), help="Make the real runs of one scenario, and nothing else.")
@click.option("--no-runs", is_flag=True, help="Go by the real runs that are there.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="PNG")
@click.option("--smoke", is_flag=True, help="The simulator in place of the real swarm: does it run?")
@click.option("--json", "as_json", is_flag=True)
def main(records: Path, only: str | None, no_runs: bool, plot: Path | None, smoke: bool, as_json: bool) -> None:
    """Whether the simulator agrees with a real swarm of six peers."""
    end_when_told()
    runs = {name: [stand_in(case)] for name, case in CASES.items()} if smoke else real_runs(records, only, no_runs)
    if only:
        return
    found = compared(runs, num=1 if smoke else SIMULATED_SEEDS, num_to_fit=1 if smoke else FIT_SEEDS)
    if plot is not None:
        plot_png(found, plot)
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    click.echo("  ".join(f"{name} = {value:.3f}" for name, value in found["fitted"].items()))
    for name, case in found["cases"].items():
        real, here, ratio = case["real"], case["simulated"], case["simulated_of_real"]
        click.echo(
            f"{name}: {real['per_s']:.2f} microbatches/s, simulated {here['per_s']:.2f} (x {ratio['throughput']:.2f}); "
            f"back after {real['back_s']:.2f} s, simulated {here['back_s']:.2f} (x {ratio['recovery']:.2f})"
        )


if __name__ == "__main__":
    main()
