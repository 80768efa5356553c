"""`swarm amend`: a host's owner changes settings of a run while it goes on."""

from pathlib import Path

import click

from bootstrap.program.held_run import running_at
from bootstrap.state.run_folder import RunFolder
from swarm.core.errors import LocalError, SettingsError
from swarm.network.services.host_client import host_client
from swarm.question import ask

UNASKED = "give --yes to amend the run"


@click.command(short_help="Change steps, learning rate, batch, limits or stages of a run that goes on.")
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option(
    "--set",
    "changes",
    multiple=True,
    required=True,
    metavar="FIELD=VALUE",
    help="A field as the manifest has it, such as optimizer.total_steps=4000. Can be repeated.",
)
@click.option("--at", default="soonest", show_default=True, metavar="VERSION|soonest")
@click.option("--yes", is_flag=True, help="Do not ask.")
def command(folder: Path, changes: tuple[str, ...], at: str, yes: bool) -> None:
    """Have the run in FOLDER, which a `swarm host` is serving, go on under other settings from VERSION on.

    What was learnt stays: weights, moments, credit, the place in the data. At that version all stages stand still, and
    begin anew as soon as their peers have come in under the new settings; they do so by themselves. A run that is over
    goes on if it is given more steps, once peers join again.
    """
    if not RunFolder(folder).ledger.exists():
        raise SettingsError(f"{folder} holds no run; give the folder that `swarm host` made, beside its manifest")
    with host_client(running_at(folder)) as host:
        try:
            for line in host.amend(changes, at, only_show=True):
                click.echo(line)
            if not yes:
                ask("Amend the run?", unasked=UNASKED)
            for line in host.amend(changes, at, only_show=False):
                click.echo(line)
        except SettingsError as error:
            raise SettingsError(f"not amended: {error}") from error
        except LocalError as error:
            raise LocalError(f"not amended: {error}") from error
