"""`swarm ticket`: a host gives away, lists and takes back what admits to its run.

The host that serves the run is asked; where none does, what it would find in its ledger is read and written here.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import click

from bootstrap.directory.doors import INVITE_FILE
from bootstrap.directory.vouchers import MAX_DAYS, MAX_USES, Vouchers
from bootstrap.program.books import Books
from bootstrap.program.held_run import HeldRun, is_held, running_at
from bootstrap.program.ledger import Ledger
from bootstrap.state.run_folder import RunFolder
from swarm.core.errors import SettingsError
from swarm.invite import parse_invite
from swarm.network.services.host_client import host_client
from swarm.proto import host_pb2 as pb

FOLDER = click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))


@click.group()
def command() -> None:
    """Give away, list and revoke vouchers of a run that is hosted with --admission ticket."""


@command.command()
@FOLDER
@click.option("--uses", type=click.IntRange(1, MAX_USES), default=1, show_default=True, help="Peers it admits.")
@click.option(
    "--days", type=click.FloatRange(0.01, MAX_DAYS), default=14.0, show_default=True, help="How long it is good."
)
@click.option("--note", default="", help="For whom it is; only the host sees it.")
def create(folder: Path, uses: int, days: float, note: str) -> None:
    """Print an invite with a new voucher for the run in FOLDER. It is shown this once."""
    with _vouchers(folder) as vouchers:
        try:
            invite = parse_invite((folder / INVITE_FILE).read_text())
        except OSError as error:
            raise SettingsError(f"{folder} has no invite yet; start the run with `swarm host` first") from error
        secret = vouchers.create_voucher(uses=uses, days=days, note=note)
    click.echo(replace(invite, voucher=secret).line())


@command.command("list")
@FOLDER
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def list_vouchers(folder: Path, as_json: bool) -> None:
    """List the vouchers of the run in FOLDER, and whom they admitted."""
    with _vouchers(folder) as vouchers:
        found = vouchers.list_vouchers()
    if as_json:
        click.echo(json.dumps([_value(voucher) for voucher in found], indent=2))
        return
    if not found:
        click.echo(f"no vouchers in {folder}; `swarm ticket create {folder}` makes one")
    for one in found:
        click.echo(f"{one.name}  {one.state}, used {len(one.used_by)} of {one.uses}  {one.note}")
        for peer in one.used_by:
            click.echo(f"    {peer}")


@command.command()
@FOLDER
@click.argument("name")
def revoke(folder: Path, name: str) -> None:
    """Let the voucher called NAME (as `list` says, or its secret) admit nobody any more. Who is in stays in."""
    with _vouchers(folder) as vouchers:
        click.echo(f"revoked {vouchers.revoke_voucher(name)}")


class _Kept(Protocol):
    """The run's vouchers, wherever they are kept now."""

    def create_voucher(self, *, uses: int, days: float, note: str) -> str: ...

    def list_vouchers(self) -> list[pb.Voucher]: ...

    def revoke_voucher(self, name: str) -> str: ...


@contextmanager
def _vouchers(folder: Path) -> Iterator[_Kept]:
    """Raises SettingsError where there is no run, NotRunningError while its host can be asked nothing."""
    path = RunFolder(folder).ledger
    if not path.exists():
        raise SettingsError(f"{folder} holds no run; give the folder that `swarm host` made, beside its manifest")
    if is_held(folder):
        with host_client(running_at(folder)) as host:
            yield host
        return
    with HeldRun(folder):
        ledger = Ledger(path)
        try:
            yield Vouchers(ledger, Books())
        finally:
            ledger.close()


def _value(voucher: pb.Voucher) -> dict[str, Any]:
    return {
        "name": voucher.name,
        "note": voucher.note,
        "uses": voucher.uses,
        "used_by": list(voucher.used_by),
        "state": voucher.state,
    }
