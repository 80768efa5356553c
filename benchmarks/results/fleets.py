"""Figures of simulated fleets, and of the simulator beside a real swarm."""

from collections.abc import Sequence

from benchmarks.results.entry import SWARM, Command, Entry, Figures, Row, object_of

HOME_FLEET = "swarm simulate examples/scenarios/home_fleet.toml --seed {}"


def _home_fleet(answers: Sequence[str]) -> Figures:
    outcomes = [object_of(answer) for answer in answers]
    percents = [100 * outcome["throughput_vs_ideal"] for outcome in outcomes]
    seconds = [outcome["cpu_seconds"] for outcome in outcomes]
    return {
        **{"least_percent": min(percents), "most_percent": max(percents)},
        **{"least_cpu_s": min(seconds), "most_cpu_s": max(seconds)},
    }


def _fit(answers: Sequence[str]) -> Figures:
    cases = [case["simulated_of_real"] for case in object_of(answers[0])["cases"].values() if not case["is_fitted"]]
    return {
        f"{which}_{what}": choose(case[what] for case in cases)
        for what in ("throughput", "recovery")
        for which, choose in (("least", min), ("most", max))
    }


def _turnover(answers: Sequence[str]) -> Figures:
    found = object_of(answers[0])
    return {"percent": 100 * found["throughput_vs_ideal"], "cpu_s": found["cpu_seconds"]}


FLEETS = (
    Entry(
        name="home fleet",
        commands=tuple(Command(HOME_FLEET.format(seed)) for seed in range(6)),
        read=_home_fleet,
        measures=("peer.fleet.command",),
        minutes=6,
        row=Row(
            "10,000 home peers, 32 stages, 30 % gone every 10 minutes, simulated",
            "{least_percent:.1f} to {most_percent:.1f} % of an oracle's throughput with seeds 0 to 5, 85 % was the "
            "goal ([how](docs/simulator.md)); {least_cpu_s:.0f} to {most_cpu_s:.0f} CPU seconds, 60 were",
            f"`{HOME_FLEET.format(0)}`, with seeds 1 to 5 too",
        ),
    ),
    Entry(
        name="simulator fit",
        commands=(Command("python -m benchmarks.fleet.fit --records records"),),
        read=_fit,
        measures=("benchmarks.fleet.fit", "benchmarks.homes.paced_peer", *SWARM),
        minutes=55,
        row=Row(
            "the simulator against a real swarm of six, fitted on one scenario, checked on three",
            "throughput {least_throughput:.2f} to {most_throughput:.2f} of the real one's, recovery after a kill "
            "{least_recovery:.2f} to {most_recovery:.2f} (0.8 to 1.2 was the goal)",
        ),
    ),
    Entry(
        name="turnover",
        commands=(Command("swarm simulate examples/scenarios/turnover.toml"),),
        read=_turnover,
        measures=("peer.fleet.command",),
        minutes=0.3,
    ),
)
