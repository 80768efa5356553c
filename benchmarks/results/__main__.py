"""README's figures measured again, those that are older than their code: `make results`.

    python -m benchmarks.results [NAME ...] [--force] [--at-most MINUTES]
    python -m benchmarks.results --stale        # which are older, and what they would take
    python -m benchmarks.results --render       # docs/results.json into README's table

Figures go to docs/results.json one by one, so it can be broken off: the same command goes on.
"""

import click

from benchmarks.results.measuring import measure
from benchmarks.results.record import ROOT, minutes, read_records
from benchmarks.results.staleness import stale
from benchmarks.results.table import ENTRIES, write_readme
from swarm.core.errors import LocalError


@click.command()
@click.argument("names", nargs=-1, type=click.Choice([entry.name for entry in ENTRIES]), metavar="[NAME]...")
@click.option("--force", is_flag=True, help="Measure also what is newer than its code.")
@click.option("--at-most", type=click.FloatRange(min=0), metavar="MINUTES", help="Leave out what takes longer.")
@click.option("--stale", "only_stale", is_flag=True, help="Say which figures are older than the code they are of.")
@click.option("--render", "only_render", is_flag=True, help="Write README's table from docs/results.json.")
def main(names: tuple[str, ...], force: bool, at_most: float | None, only_stale: bool, only_render: bool) -> None:
    """Measure README's figures."""
    records = read_records()
    takes = {entry.name: minutes(entry, records.get(entry.name)) for entry in ENTRIES}
    chosen = [entry for entry in ENTRIES if not names or entry.name in names]
    chosen = [entry for entry in chosen if at_most is None or takes[entry.name] <= at_most]
    try:
        if only_stale:
            found = stale(chosen, records, ROOT)
            for name in sorted(found, key=lambda name: takes[name]):
                click.echo(f"{name}: {found[name]} (about {takes[name]:g} min)")
            total = sum(takes[name] for name in found)
            click.echo(f"{len(found)} of {len(chosen)} are older than their code: about {total:.0f} min")
            return
        failed = [] if only_render else measure(chosen, force=force, say=lambda line: click.echo(line, err=True))
        write_readme(read_records())
    except LocalError as error:
        raise click.ClickException(str(error)) from error
    if failed:
        raise click.ClickException("not measured:\n" + "\n".join(failed))


if __name__ == "__main__":
    main()
