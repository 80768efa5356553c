"""`swarm identity show | export | import`: an owner backs up the key that its peer is."""

import os
from pathlib import Path

import click

from peer.program.command import folder_option
from peer.program.state_folder import HeldFolder, StateFolder
from swarm.core.errors import SettingsError
from swarm.identity.backup import open_identity, seal_identity
from swarm.network.identity_file import load_identity, load_or_create_identity, save_identity

_PASSPHRASE_FILE = click.option(
    "--passphrase-file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Read the passphrase from this file's first line instead of asking.",
)


@click.group()
def command() -> None:
    """The key that this machine's peer is: whoever has it can act in its name, and its standing goes with it."""


@command.command()
@folder_option
def show(folder: Path) -> None:
    """Print the peer id; a new identity is made if there is none."""
    click.echo(load_or_create_identity(StateFolder(folder.absolute()).identity).peer_id)


@command.command()
@click.argument("file", type=click.Path(path_type=Path))
@_PASSPHRASE_FILE
@folder_option
def export(file: Path, passphrase_file: Path | None, folder: Path) -> None:
    """Write the identity to FILE, sealed under a passphrase."""
    identity = load_identity(StateFolder(folder.absolute()).identity)
    sealed = seal_identity(identity, _passphrase(passphrase_file, new=True))
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise SettingsError(f"FILE = {file}: cannot be written ({error.strerror}); give another name") from error
    with os.fdopen(descriptor, "w") as out:
        out.write(sealed)
    click.echo(f"{identity.peer_id} is in {file}; two machines must never run it at the same time")


@command.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@_PASSPHRASE_FILE
@folder_option
def import_(file: Path, passphrase_file: Path | None, folder: Path) -> None:
    """Make the identity in FILE this machine's. It must no longer run anywhere else."""
    state = StateFolder(folder.absolute())
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(
            f"FILE = {file}: cannot be read ({error}); give a file of `swarm identity export`"
        ) from error
    with HeldFolder(state):
        identity = open_identity(text, _passphrase(passphrase_file, new=False))
        save_identity(state.identity, identity)
    click.echo(f"this machine's peer is {identity.peer_id} now")


def _passphrase(file: Path | None, *, new: bool) -> str:
    if file is not None:
        try:
            return (file.read_text().splitlines() or [""])[0]
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"--passphrase-file {file}: cannot be read ({error}); give a text file") from error
    asked: str = click.prompt("Passphrase", hide_input=True, confirmation_prompt=new)
    return asked
