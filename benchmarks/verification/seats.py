"""The price of a third of a stage's votes, in microbatches of certified work, by the rule and by two that it is not.

A third is what it takes to keep a stage from certifying anything. The attacker splits what it does among as many
identities as suits it, in stages of equals and in such where speeds differ; the host votes too.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from statistics import median

import click

from swarm.core.ids import PeerId
from swarm.core.round.voting import electorate
from swarm.core.seats import seats, weight_of
from swarm.core.state.recent_work import RECENT_VERSIONS

HOST = PeerId("host")
Rule = Callable[[Mapping[PeerId, int]], Mapping[PeerId, int]]


@dataclass(frozen=True)
class Price:
    """Of a third of the votes of one stage."""

    members: int
    """Honest ones."""
    speeds: str
    stage_microbatches: int
    """What they do in the last versions."""
    by_heads: int
    """The microbatches that it cost when each member had a vote: ten replays an identity, and nothing after that."""
    by_median: int
    """What it would cost if votes were cut to the median of heads."""
    by_work: int
    """What it costs."""
    share: float
    """Of all the stage's work, the attacker's in it, that it must do."""
    idle_weight: int
    """Weight of a thousand identities that do nothing."""


def price_of(num_honest: int, *, spread: float, each: int = 8) -> Price:
    """Honest members of a stage do `each` microbatches a version on average, the fastest e^spread times as much as the
    middle one."""
    speeds = [math.exp(spread * (2 * number / (num_honest - 1) - 1)) for number in range(num_honest)]
    scale = RECENT_VERSIONS * each * num_honest / sum(speeds)
    honest = {PeerId(f"honest {number:03}"): round(scale * speed) for number, speed in enumerate(speeds)}
    total = sum(honest.values())
    splits = [1, 2, 4, num_honest // 2, num_honest + 1, 2 * num_honest]
    bought = min(cheapest(honest, by_work, num) for num in splits)
    heads = num_honest // 2 + 1
    return Price(
        num_honest,
        "alike" if not spread else f"{math.exp(2 * spread):.0f} to 1",
        total,
        10 * heads,
        min(cheapest(honest, by_median, num) for num in splits),
        bought,
        bought / (bought + total),
        weight_of(by_work({**honest, **dict.fromkeys(_liars(1000), 0)}), _liars(1000)),
    )


def by_work(work: Mapping[PeerId, int]) -> Mapping[PeerId, int]:
    """The rule, with the host's vote."""
    return electorate(work, (), HOST, bytes(32)) if len(work) <= 127 else seats(work)


def by_median(work: Mapping[PeerId, int]) -> Mapping[PeerId, int]:
    done = {peer: tokens for peer, tokens in work.items() if tokens}
    limit = int(median(done.values()))
    return {peer: min(tokens, limit) for peer, tokens in done.items()} | {HOST: limit}


def cheapest(honest: Mapping[PeerId, int], rule: Rule, num_split: int) -> int:
    """Fewest microbatches, split among so many identities, that are a third of all weight."""
    low, high = 0, 4 * sum(honest.values())
    liars = _liars(num_split)
    while low + 1 < high:
        tried = (low + high) // 2
        parts = {peer: tried // num_split + (place < tried % num_split) for place, peer in enumerate(liars)}
        weights = rule({**honest, **parts})
        low, high = (low, tried) if 3 * weight_of(weights, liars) >= sum(weights.values()) else (tried, high)
    return high


def _liars(number: int) -> list[PeerId]:
    return [PeerId(f"liar {place:04}") for place in range(number)]


@click.command()
@click.option("--members", "sizes", multiple=True, type=int, default=(8, 16, 64))
@click.option("--smoke", is_flag=True, help="The smallest alone.")
@click.option("--json", "as_json", is_flag=True)
def main(sizes: tuple[int, ...], smoke: bool, as_json: bool) -> None:
    """Print the price for stages of these sizes."""
    sizes = sizes[:1] if smoke else sizes
    cases = [price_of(size, spread=spread) for size in sizes for spread in (0.0, math.log(4) / 2)]
    if as_json:
        click.echo(json.dumps({"cases": [asdict(case) for case in cases]}))
        return
    click.echo("members  speeds  microbatches in 16 versions  by heads  by median  by work  share  idle")
    for case in cases:
        click.echo(
            f"{case.members:7}  {case.speeds:6}  {case.stage_microbatches:27}  {case.by_heads:8}  {case.by_median:9}"
            f"  {case.by_work:7}  {case.share:5.3f}  {case.idle_weight:4}"
        )


if __name__ == "__main__":
    main()
