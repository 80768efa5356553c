"""How long a look at who should move takes, from 100 to 10,000 peers: `python -m benchmarks.churn.rebalancing_cost`.

Each size is planned for a fleet in chance order, even but for one stage that has lost most of its peers, so that there
is much to move; the fastest of some tries counts. `--plot PNG` draws the times beside n log n.
"""

import json
import math
import random
import time
from pathlib import Path

import click

from swarm.core.directory.rebalancing import Placement, RebalancingSettings, plan_moves
from swarm.core.ids import PeerId, StageIndex

SIZES = (100, 200, 400, 1000, 2000, 4000, 10_000)
NUM_STAGES = 32


def fleet(num_peers: int, rng: random.Random) -> list[Placement]:
    """Peers of unequal power, evenly over the stages, of which the fourth has lost three quarters."""
    peers = [
        Placement(PeerId(f"{rng.getrandbits(64):016x}"), StageIndex(number % NUM_STAGES), rng.lognormvariate(0.0, 0.4))
        for number in range(num_peers)
    ]
    peers = [peer for number, peer in enumerate(peers) if peer.stage != 3 or number // NUM_STAGES % 4 == 0]
    rng.shuffle(peers)
    return peers


def measure(num_peers: int, *, tries: int) -> dict[str, float]:
    peers = fleet(num_peers, random.Random(num_peers))
    costs, move_s, settings = [1.0] * NUM_STAGES, [60.0] * NUM_STAGES, RebalancingSettings(min_replicas=2)
    seconds = []
    for _ in range(tries):
        begun = time.process_time()
        moves = plan_moves(peers, costs, move_s, settings)
        seconds.append(time.process_time() - begun)
    return {"peers": num_peers, "seconds": min(seconds), "moves": len(moves)}


@click.command()
@click.option("--tries", type=click.IntRange(min=1), default=7, show_default=True)
@click.option("--smoke", is_flag=True, help="The two smallest sizes: does it run?")
@click.option("--json", "as_json", is_flag=True)
@click.option("--plot", type=click.Path(path_type=Path))
def command(tries: int, smoke: bool, as_json: bool, plot: Path | None) -> None:
    found = [measure(size, tries=tries) for size in (SIZES[:2] if smoke else SIZES)]
    first, last = found[0], found[-1]
    growth = last["seconds"] / first["seconds"]
    n_log_n = last["peers"] * math.log(last["peers"]) / (first["peers"] * math.log(first["peers"]))
    if as_json:
        click.echo(json.dumps({"sizes": found, "growth": growth, "n_log_n": n_log_n}, indent=2))
    else:
        for one in found:
            click.echo(f"{one['peers']:7,.0f} peers  {1000 * one['seconds']:8.2f} ms  {one['moves']:4.0f} moves")
        larger = last["peers"] / first["peers"]
        click.echo(f"{growth:.0f} times the time for {larger:.0f} times the peers; n log n is {n_log_n:.0f}")
    if plot is not None:
        _draw(found, plot)


def _draw(found: list[dict[str, float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    sizes = [one["peers"] for one in found]
    axes.loglog(sizes, [1000 * one["seconds"] for one in found], "o-", label="measured")
    last = found[-1]
    per = last["seconds"] / (last["peers"] * math.log(last["peers"]))
    axes.loglog(sizes, [1000 * per * size * math.log(size) for size in sizes], "--", color="0.5", label="n log n")
    axes.set_xlabel("peers")
    axes.set_ylabel("milliseconds")
    axes.set_title(f"Who should move, {NUM_STAGES} stages")
    axes.legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    command()
