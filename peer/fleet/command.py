"""`swarm simulate`: a scenario is simulated from the command line."""

import json
from dataclasses import replace
from pathlib import Path

import click


@click.command(name="simulate", short_help="Simulate a fleet of volunteers.")
@click.argument("scenario", type=click.Path(path_type=Path))
@click.option("--seed", type=int, help="Instead of the scenario's run.seed.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object for scripts.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="PNG", help="Draw throughput and peers over time.")
def command(scenario: Path, seed: int | None, as_json: bool, plot: Path | None) -> None:
    """Simulate the fleet that SCENARIO (a TOML file) describes, on a virtual clock: see examples/scenarios.

    The first simulation after an installation compiles for some seconds, which its wall seconds do not count.
    """
    from peer.fleet.figures import figures, plot_png, summary
    from peer.fleet.fleet import simulate
    from peer.fleet.scenario import read_scenario
    from peer.fleet.window_fleet import simulate_windows, window_figures, window_summary
    from peer.fleet.window_scenario import WindowScenario
    from swarm.core.errors import SettingsError

    read = read_scenario(scenario)
    if isinstance(read, WindowScenario):
        if plot is not None:
            raise SettingsError(f"--plot {plot}: windows are not drawn; leave it out")
        if seed is not None:
            read = replace(read, run=replace(read.run, seed=seed))
        of_windows = window_figures(simulate_windows(read))
        click.echo(json.dumps(of_windows, indent=2) if as_json else window_summary(of_windows))
        return
    if seed is not None:
        read = replace(read, run=replace(read.run, seed=seed))
    outcome = simulate(read)
    found = figures(outcome)
    if plot is not None:
        plot.write_bytes(plot_png(outcome))
    click.echo(json.dumps(found, indent=2) if as_json else summary(found))
