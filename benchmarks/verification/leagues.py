"""A source and a neighbour in league, and an honest home of two machines, which looks like them.

Both sign for each other as many microbatches as a contribution may list. A rule could count of one member's entries no
more than k times the share that this neighbour has in everybody else's. Here is what such a rule takes from an honest
home, whose machines have a cable between them and one line to the world, at each k; and what it leaves to two liars.
"""

import json
from dataclasses import asdict, dataclass

import click

from verification.audit.draws import contribution_rate, detection

COMPUTE_S = 1.0
"""Of a microbatch, at either machine."""
LINE_S = 1.7
"""Its activation over a home's line: 2,048 tokens of width 2,048 in int8, at 20 Mbit/s."""
FACTORS = (2, 4, 16)
DEBTS = 3
"""That put a peer out."""


@dataclass(frozen=True)
class League:
    """Of a stage with so many members, each in a home with one of the stage after."""

    members: int
    to_partner: float
    """Of a source's microbatches, the share that its own home's machine takes: what finishes soonest."""
    from_others: float
    """That machine's share in the work of each other source."""
    lost: dict[int, float]
    """By k: the share of honest work that would not count."""
    minted: dict[int, float | None]
    """By k: what two liars still mint, in parts of the work they really do; None: as much as a contribution lists."""
    weight: float
    """Their share of the stage's weight without a rule, where the honest do a step's microbatches."""
    found_after: float
    """Versions, on average, until one of the two contributions is drawn, and shows itself false."""
    withheld_until: float
    """Versions, on average, until one of the two has withheld it so often that it is put out."""


def league_of(members: int, *, listed: float = 2.0) -> League:
    """`listed`: microbatches that a contribution may list, in steps."""
    home, world = 1 / COMPUTE_S, 1 / LINE_S
    to_partner = home / (home + world)
    from_others = (1 - to_partner) / (members - 1)
    fair = 1 / members
    lost, minted = {}, {}
    for factor in FACTORS:
        share = min(1.0, factor * from_others)
        counted = (1 - to_partner) / (1 - share) if share < to_partner else 1.0
        lost[factor] = round(1 - counted, 3)
        bound = factor * fair
        minted[factor] = round(bound / (1 - bound), 3) if bound < 1 else None
    one = detection(contribution_rate(members), members - 1)
    either = 1 - (1 - one) ** 2
    return League(
        members,
        round(to_partner, 3),
        round(from_others, 4),
        lost,
        minted,
        round(listed / (listed + 1), 3),
        round(1 / either, 1),
        round(_until_one_owes(one), 1),
    )


def _until_one_owes(chance: float) -> float:
    """Versions until the first of two has `DEBTS` debts, each with this chance a version."""
    left = [[0.0] * DEBTS for _ in range(DEBTS)]
    for one in reversed(range(DEBTS)):
        for other in reversed(range(DEBTS)):
            total = 1.0
            for first in (0, 1):
                for second in (0, 1):
                    owed = one + first, other + second
                    odds = (chance if first else 1 - chance) * (chance if second else 1 - chance)
                    if (first or second) and max(owed) < DEBTS:
                        total += odds * left[owed[0]][owed[1]]
            left[one][other] = total / (1 - (1 - chance) ** 2)
    return left[0][0]


@click.command()
@click.option("--members", "sizes", multiple=True, type=int, default=(8, 16, 64))
@click.option("--smoke", is_flag=True, help="The smallest alone.")
@click.option("--json", "as_json", is_flag=True)
def main(sizes: tuple[int, ...], smoke: bool, as_json: bool) -> None:
    """Print what a rule on shares takes and leaves, for stages of these sizes."""
    cases = [league_of(size) for size in (sizes[:1] if smoke else sizes)]
    if as_json:
        click.echo(json.dumps({"cases": [asdict(case) for case in cases]}))
        return
    for case in cases:
        click.echo(
            f"{case.members} members: {case.to_partner:.0%} to the partner, {case.from_others:.1%} of others' work;"
            f" found after {case.found_after}, or {case.withheld_until} versions;"
            f" {case.weight:.0%} of the weight till then"
        )
        for factor in FACTORS:
            left = case.minted[factor]
            said = "all that is listed" if left is None else f"{left:.2f} of their real work"
            click.echo(f"  k = {factor}: takes {case.lost[factor]:.0%} of an honest home's work; liars mint {said}")


if __name__ == "__main__":
    main()
