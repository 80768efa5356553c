"""`swarm ticket`: this is where a host gives away, lists and takes back what admits to its run."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from bootstrap.admission import MAX_USES, create_voucher, refusal, revoke_voucher
from bootstrap.books import Books
from bootstrap.doors import INVITE_FILE
from bootstrap.ledger import Ledger
from swarm.core.errors import SettingsError
from swarm.invite import parse_invite

FOLDER = click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))


@click.group()
def command() -> None:
    """Give away, list and revoke vouchers of a run that is hosted with --admission ticket."""


@command.command()
@FOLDER
@click.option("--uses", type=click.IntRange(1, MAX_USES), default=1, show_default=True, help="Peers it admits.")
@click.option("--days", type=click.FloatRange(0.01, 3650), default=14.0, show_default=True, help="How long it is good.")
@click.option("--note", default="", help="For whom it is; only the host sees it.")
def create(folder: Path, uses: int, days: float, note: str) -> None:
    """Print an invite with a new voucher for the run in FOLDER. It is shown this once."""
    with _books(folder) as (ledger, books):
        try:
            invite = parse_invite((folder / INVITE_FILE).read_text())
        except OSError as error:
            raise SettingsError(f"{folder} has no invite yet; start the run with `swarm host` first") from error
        secret = create_voucher(ledger, books, note=note[:256], uses=uses, days=days)
    click.echo(replace(invite, voucher=secret).line())


@command.command("list")
@FOLDER
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def list_vouchers(folder: Path, as_json: bool) -> None:
    """List the vouchers of the run in FOLDER, and whom they admitted."""
    with _books(folder) as (_, books):
        found: list[dict[str, Any]] = [
            {
                "name": name[:12],
                "note": voucher.note,
                "uses": voucher.uses,
                "used_by": list(voucher.used_by),
                "state": refusal(voucher, now=time.time()) or "is good",
            }
            for name, voucher in books.vouchers.items()
        ]
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    if not found:
        click.echo(f"no vouchers in {folder}; `swarm ticket create {folder}` makes one")
    for one in found:
        click.echo(f"{one['name']}  {one['state']}, used {len(one['used_by'])} of {one['uses']}  {one['note']}")
        for peer in one["used_by"]:
            click.echo(f"    {peer}")


@command.command()
@FOLDER
@click.argument("name")
def revoke(folder: Path, name: str) -> None:
    """Let the voucher called NAME (as `list` says, or its secret) admit nobody any more. Who is in stays in."""
    with _books(folder) as (ledger, books):
        click.echo(f"revoked {revoke_voucher(ledger, books, name)[:12]}")


@contextmanager
def _books(folder: Path) -> Iterator[tuple[Ledger, Books]]:
    path = folder / "ledger.sqlite"
    if not path.exists():
        raise SettingsError(f"{folder} holds no run; give the folder that `swarm host` made, beside its manifest")
    ledger, books = Ledger(path), Books()
    try:
        books.catch_up(ledger)
        yield ledger, books
    finally:
        ledger.close()
