"""What keeps a simulated fleet from its ideal: `python -m benchmarks.fleet.shortfall
examples/scenarios/turnover.toml`.

One cause after another, as shares of the ideal; each line is what is left. Capacities are looked at as often as the
simulation samples. A stage can add a little more than the slowest could at each moment: queues and audits that wait
even it out.
"""

from dataclasses import replace
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from peer.fleet.fleet import Fleet
from peer.fleet.scenario import Scenario, read_scenario


class WatchedFleet(Fleet):
    """A fleet whose stages' capacities are noted at every sample."""

    def capacities(self) -> NDArray[np.float64]:
        """Microbatches a second that the members of each stage can do now."""
        found = np.zeros(self._num_stages)
        for peer in self._present.values():
            if peer.state == "member":
                found[peer.stage] += peer.rate * sum(self._costs) / self._costs[peer.stage]
        return found

    def watched(self) -> dict[str, float]:
        """Run; what is left of the ideal after each cause."""
        self.samples: list[NDArray[np.float64]] = []
        outcome = self.run()
        seconds = self.scenario.run.measured_s
        ideal = outcome.ideal / seconds
        lost = (outcome.counts["lost_sums"] + outcome.counts["refuted"]) / self._num_stages / seconds
        useful = outcome.useful / seconds
        by_time = np.array(self.samples)
        return {
            "members can do": float(by_time.mean() / ideal),
            "the stage that is slowest in the mean": float(by_time.mean(axis=0).min() / ideal),
            "the stage that is slowest at each moment": float(by_time.min(axis=1).mean() / ideal),
            "added to sums": (useful + lost) / ideal,
            "kept": useful / ideal,
        }

    def _sample(self) -> None:
        if self._is_measured():
            self.samples.append(self.capacities())
        super()._sample()


@click.command()
@click.argument("scenario", type=click.Path(path_type=Path))
@click.option("--seeds", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--peers", type=int, help="Instead of the scenario's fleet.peers.")
@click.option("--minutes", type=float, help="To measure, after half as many, instead of the scenario's times.")
def command(scenario: Path, seeds: int, peers: int | None, minutes: float | None) -> None:
    """Simulate SCENARIO with seeds 0, 1, ..."""
    read = read_scenario(scenario)
    assert isinstance(read, Scenario), "a pipeline's"
    fleet, run = read.fleet, read.run
    if peers is not None:
        fleet = replace(fleet, peers=peers)
    if minutes is not None:
        run = replace(run, measured_s=60 * minutes, warm_up_s=30 * minutes)
    for seed in range(seeds):
        seeded = replace(run, seed=seed)
        found = WatchedFleet(replace(read, fleet=fleet, run=seeded)).watched()
        click.echo(f"seed {seed}")
        for what, share in found.items():
            click.echo(f"  {100 * share:5.1f} %  {what}")


if __name__ == "__main__":
    command()
