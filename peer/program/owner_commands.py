"""`swarm status`, `top`, `pause`, `resume`, `leave`, `logs`, `config`: an owner speaks to its daemon."""

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from google.protobuf.message import Message

from peer.owner.view import limits_table, show_status, show_top
from peer.program.command import folder_option
from peer.program.state_folder import StateFolder
from swarm.core.errors import LocalError, NotRunningError
from swarm.core.owner.limits import LIMITS, NONE, OwnerLimits, limit_named
from swarm.network.services.daemon_client import DaemonClient, daemon_client
from swarm.proto import daemon_pb2 as pb

CLOSES_S = 15.0
"""A daemon that does not answer any more has ended within this time."""
LOOK_EVERY_S = 0.1


@contextlib.contextmanager
def _daemon(folder: Path) -> Iterator[DaemonClient]:
    """Raises NotRunningError when none runs in the folder."""
    with daemon_client(StateFolder(folder.absolute()).running_at()) as client:
        yield client


def as_json(message: pb.Status | pb.Limits) -> str:
    """The message as one JSON object, all its fields by their names."""
    return json.dumps(_value(message), indent=1)


def _value(value: Any) -> Any:
    """Not protobuf's own JSON, which writes 64-bit numbers as texts."""
    if isinstance(value, Message):
        return {field.name: _value(getattr(value, field.name)) for field in value.DESCRIPTOR.fields}
    return value if isinstance(value, str | int | float | bool) else [_value(item) for item in value]


@click.command()
@folder_option
@click.option("--json", "json_", is_flag=True, help="Print one JSON object, for scripts.")
def status(folder: Path, json_: bool) -> None:
    """Tell whether this machine is of use: its work, its limits, and why it idles.

    Exit code 4 when no daemon runs.
    """
    with _daemon(folder) as daemon:
        told = daemon.status()
    click.echo(as_json(told)) if json_ else show_status(told)


@click.command()
@folder_option
@click.option("--every", type=click.FloatRange(0.2, 60), default=1.0, show_default=True, help="Seconds.")
def top(folder: Path, every: float) -> None:
    """Watch the daemon live, until Ctrl-C."""
    with _daemon(folder) as daemon, contextlib.suppress(KeyboardInterrupt):
        show_top(daemon.watch(every))


@click.command()
@folder_option
def pause(folder: Path) -> None:
    """Begin no more work until `swarm resume`; what has begun is finished."""
    with _daemon(folder) as daemon:
        daemon.pause()
    click.echo("paused; `swarm resume` goes on")


@click.command()
@folder_option
def resume(folder: Path) -> None:
    """Go on after `swarm pause`."""
    with _daemon(folder) as daemon:
        daemon.resume()
        time.sleep(0.3)  # the daemon looks at its other limits first
        told = daemon.status()
    click.echo(f"{told.state}{told.reason and f': {told.reason}'}")


@click.command()
@folder_option
@click.option("--now", is_flag=True, help="Finish nothing, also where it is leaving already.")
def leave(folder: Path, now: bool) -> None:
    """Finish what has begun, hand over, and end the daemon.

    That takes as long as the averaging round that is under way, and a moment. Ctrl-C ends this command, not the
    leaving.
    """
    state, started = StateFolder(folder.absolute()), time.monotonic()
    said = ""
    with _daemon(folder) as daemon:
        told = daemon.leave(now=now)
        heard_at = time.monotonic()
        while time.monotonic() < heard_at + CLOSES_S:
            try:
                state.running_at()
            except NotRunningError:
                click.echo(f"left after {time.monotonic() - started:.1f} s")
                return
            if told.reason != said:
                said = told.reason
                click.echo(f"leaving: {said}", err=True)
            time.sleep(LOOK_EVERY_S)
            with contextlib.suppress(LocalError):
                told, heard_at = daemon.status(), time.monotonic()
    raise LocalError(f"the daemon has not answered for {CLOSES_S:g} s; see `swarm logs`, or kill it: nothing is lost")


@click.command()
@folder_option
@click.option("--lines", "-n", type=click.IntRange(0, 2000), default=50, show_default=True, help="Of the past.")
@click.option("--follow", "-f", is_flag=True, help="Go on with what comes, until Ctrl-C.")
def logs(folder: Path, lines: int, follow: bool) -> None:
    """Show the daemon's log: of the running one, or the end of the last one's file."""
    try:
        with _daemon(folder) as daemon, contextlib.suppress(KeyboardInterrupt):
            for line in daemon.logs(lines, follow=follow):
                if line.skipped:
                    click.echo(f"... {line.skipped} lines skipped ...")
                click.echo(line.text)
    except NotRunningError:
        file = StateFolder(folder.absolute()).log
        if follow or not file.exists():
            raise
        click.echo("\n".join(file.read_text(errors="replace").splitlines()[-lines:] if lines else []))


@click.command()
@click.argument("name", required=False)
@click.argument("value", required=False)
@folder_option
@click.option("--json", "json_", is_flag=True, help="Print one JSON object, for scripts.")
def config(name: str | None, value: str | None, folder: Path, json_: bool) -> None:
    """Show the owner's limits, or set the limit NAME to VALUE ("none" lifts it), for now and for later starts.

    \b
      swarm config                     all limits, and what is used of them
      swarm config upload-mbit 10      at most 10 Mbit/s up
      swarm config hours 22:00-07:00   work at night only
      swarm config month-gb none       no limit on the month's traffic
    """
    state = StateFolder(folder.absolute())
    if name is not None:
        limit_named(name)
    try:
        socket = state.running_at()
    except NotRunningError:
        limits = state.load_limits()
        if name is not None and value is not None:
            limits = limits.with_value(name, value)
            state.save_limits(limits)
        told = _message(limits)
    else:
        with daemon_client(socket) as daemon:
            told = daemon.limits() if name is None or value is None else daemon.set_limit(name, value)
    if name is not None:
        (chosen,) = (limit for limit in told.limits if limit.name == name)
        if value is not None and chosen.at_next_start and chosen.value != value:
            click.echo(f"{name} {value}: from the daemon's next start on")
            return
        told = pb.Limits(limits=[chosen])
    click.echo(as_json(told)) if json_ else click.echo(
        chosen.value if name is not None and value is None else limits_table(told),
        nl=name is not None and value is None,
    )


def _message(limits: OwnerLimits) -> pb.Limits:
    return pb.Limits(
        limits=[
            pb.Limit(
                name=limit.name, value=limits.get(limit.name), meaning=limit.meaning, at_next_start=limit.at_next_start
            )
            for limit in LIMITS
        ]
    )


assert NONE == "none", "the help of `config` says so"
