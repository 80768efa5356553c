"""`swarm families`: which models can be trained."""

import json

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print an object by model_type.")
def command(as_json: bool) -> None:
    """List the model families that are tested for cutting into stages, by the model_type of a config.json."""
    from swarm.model.families import FAMILIES

    if as_json:
        rows = {name: {"class": row.causal_class, "routed": row.routed} for name, row in sorted(FAMILIES.items())}
        click.echo(json.dumps(rows))
        return
    width = max(map(len, FAMILIES))
    for name, row in sorted(FAMILIES.items()):
        note = "  (routed experts: audits only report)" if row.routed else ""
        click.echo(f"{name:{width}}  {row.causal_class}{note}")
