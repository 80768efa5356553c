"""`swarm rollback`: a host's owner has the run go on from an earlier state, without some of the data."""

from pathlib import Path

import click

from bootstrap.program.held_run import running_at
from bootstrap.state.rolling_back import Wish
from bootstrap.state.run_folder import RunFolder
from swarm.core.errors import LocalError, NotRunningError, SettingsError, TransientError
from swarm.network.services.host_client import host_client

SHOWN = 12
ENDED = "the host has ended without an answer: start it again with `swarm host`, look where the run is, and ask again"


@click.command(short_help="Have a run go on from an earlier state, without some data.")
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--to", default="last-anchor", show_default=True, metavar="VERSION|last-anchor|newest")
@click.option(
    "--skip",
    default="auto",
    show_default=True,
    metavar="auto|none|FIRST:STOP,...",
    help="Microbatches that nobody is to take again; auto: those of the steps that went wrong.",
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--wait", "wait_s", type=click.FloatRange(1, 86400), default=600.0, show_default=True, metavar="SECONDS")
def command(folder: Path, to: str, skip: str, yes: bool, wait_s: float) -> None:
    """Have the run in FOLDER, which a `swarm host` is serving, go on from VERSION.

    What was learnt since is lost. The last state that all stages have anchored before the trouble is taken unless
    VERSION is given; it must be one that peers or the host still keep. "newest" is for a run that waits for peers to
    come back: it goes on with those who are there.
    """
    if not RunFolder(folder).ledger.exists():
        raise SettingsError(f"{folder} holds no run; give the folder that `swarm host` made, beside its manifest")
    Wish.from_texts(to, skip)  # a mistake is said before anything is asked
    with host_client(running_at(folder)) as host:
        for line in host.notices(SHOWN):
            click.echo(line)
        if not yes:
            click.confirm(f"Go back to {to}, skip {skip}? What was learnt since is lost.", abort=True)
        try:
            click.echo(host.roll_back(to, skip, timeout_s=wait_s))
        except NotRunningError as error:
            raise NotRunningError(ENDED) from error
        except TransientError as error:
            raise LocalError(
                f"the host has not answered within {wait_s:.0f} s; it goes on, and prints the end"
            ) from error
        except SettingsError as error:
            raise SettingsError(f"not rolled back: {error}") from error
        except LocalError as error:
            raise LocalError(f"not rolled back: {error}") from error
