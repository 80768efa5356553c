"""`swarm rollback`: this is where a host's owner has the run go on from an earlier state, without some of the data.

The wish is written into the run's ledger, where the host finds it and writes what came of it.
"""

import time
from pathlib import Path
from typing import Any

import click

from bootstrap.command import of_whom
from bootstrap.ledger import Ledger
from bootstrap.rolling_back import ANSWERED, ASKED, Range, Wish
from bootstrap.run_folder import RunFolder
from bootstrap.trouble import Notice
from swarm.core.canonical import unpack
from swarm.core.data_order import DataOrder
from swarm.core.errors import LocalError, SettingsError
from swarm.host_protocol import MAX_SETTINGS_BYTES
from swarm.manifest import settings_from_value

SHOWN = 12
POLL_S = 0.2
MAX_ID = 1 << 62


@click.command(short_help="Have a run go on from an earlier state, without some data.")
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--to", default="last-anchor", show_default=True, metavar="VERSION|last-anchor")
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
    VERSION is given; it must be one that peers or the host still keep.
    """
    paths = RunFolder(folder)
    if not paths.ledger.exists() or not paths.settings.exists():
        raise SettingsError(f"{folder} holds no run; give the folder that `swarm host` made, beside its manifest")
    wish = Wish(read_version(to), read_ranges(skip))
    settings = settings_from_value(unpack(paths.settings.read_bytes(), max_bytes=MAX_SETTINGS_BYTES))
    ledger = Ledger(paths.ledger)
    try:
        for notice in [Notice.from_facts(event.facts) for event in ledger.events("notice")][-SHOWN:]:
            told = notice.told(DataOrder.of_run(settings))
            click.echo(f"{notice.kind.replace('_', ' ')}: step {notice.step}: {notice.reason}{of_whom(told)}")
        if not yes:
            click.confirm(f"Go back to {to}, skip {skip}? What was learnt since is lost.", abort=True)
        click.echo(_answered(ledger, wish, wait_s))
    finally:
        ledger.close()


def _answered(ledger: Ledger, wish: Wish, wait_s: float) -> str:
    """What the host says came of it. Raises LocalError if it did not do it."""
    until = time.time() + wait_s
    before = max((event.number for event in ledger.events()), default=0)
    ledger.append(ASKED, {"wish": wish.to_facts(), "until": until})
    asked = next(event.number for event in ledger.events(ASKED, after=before))
    while time.time() < until:
        for event in ledger.events(ANSWERED, after=asked):
            facts: Any = event.facts
            if facts["asked"] == asked:
                if not facts["done"]:
                    raise LocalError(f"not rolled back: {facts['text']}")
                return str(facts["text"])
        time.sleep(POLL_S)
    raise LocalError(f"no host has answered within {wait_s:.0f} s; is `swarm host` running on this folder?")


def read_version(text: str) -> int | None:
    """Of --to; None: the last anchor. Raises SettingsError."""
    if text == "last-anchor":
        return None
    if text.isdigit() and int(text) < MAX_ID:
        return int(text)
    raise SettingsError(f"--to {text}: give a version, such as 96, or last-anchor")


def read_ranges(text: str) -> tuple[Range, ...] | None:
    """Of --skip, in order; None: the host finds them. Raises SettingsError."""
    if text == "auto":
        return None
    if text == "none":
        return ()
    found: list[Range] = []
    for one in text.split(","):
        first, _, stop = one.partition(":")
        if not (first.isdigit() and stop.isdigit() and int(first) < int(stop) <= MAX_ID):
            raise SettingsError(f"--skip {one}: give FIRST:STOP, such as 480:512, auto or none")
        found.append((int(first), int(stop)))
    return tuple(sorted(found))
