"""This is where the `swarm` command finds its verbs, and turns errors into exit codes.

A verb's module is imported only when the verb is used: `swarm --help` must not wait for torch.
"""

import importlib
import sys
from collections.abc import Sequence
from enum import IntEnum

import click

from swarm import __version__
from swarm.core.errors import LocalError, RemoteError, SettingsError, TransientError

VERBS = {
    # verb: (module whose `command` it is, one line of help)
    "init": ("swarm.commands.init", "Write an example manifest."),
    "plan": ("swarm.commands.plan", "Show what a run needs of each peer: memory, traffic, time."),
    "host": ("bootstrap.command", "Start a run and coordinate it."),
    "join": ("peer.command", "Train with a run, given its invite."),
    "demo": ("bootstrap.demo.command", "Train a small model with a swarm on this machine."),
    "export": ("swarm.commands.export", "Turn a checkpoint into a Hugging Face model folder."),
    "generate": ("swarm.commands.generate", "Continue a prompt with a Hugging Face model folder."),
    "calibrate": ("swarm.commands.calibrate", "Measure how far this machine's honest results spread."),
    "evidence": ("swarm.commands.evidence", "List, show and verify evidence of misbehaviour."),
}


class ExitCode(IntEnum):
    OK = 0
    FAILED = 1
    """What was asked for could not be done."""
    BAD_INPUT = 2
    """A setting, argument or file is wrong; the message names it and the remedy."""
    NOT_PROVEN = 3
    """Evidence does not show what it accuses a peer of."""
    INTERRUPTED = 130


class _Verbs(click.Group):
    """A group whose commands are looked up in VERBS."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command = importlib.import_module(VERBS[cmd_name][0]).command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(verb, line) for verb, (_, line) in VERBS.items()])


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="swarm")
def group() -> None:
    """Train one large model together, on machines that come and go."""


def run(arguments: Sequence[str]) -> ExitCode:
    """Carry out one command line. Errors a user can mend are one message on stderr, never a traceback.

    A verb may return an ExitCode; returning anything but a number means it went well.
    """
    try:
        result = group.main(args=list(arguments), prog_name="swarm", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return ExitCode.BAD_INPUT
    except SettingsError as error:
        click.echo(f"swarm: {error}", err=True)
        return ExitCode.BAD_INPUT
    except (LocalError, RemoteError, TransientError) as error:
        click.echo(f"swarm: {error}", err=True)
        return ExitCode.FAILED
    except (KeyboardInterrupt, click.Abort):
        click.echo("swarm: interrupted", err=True)
        return ExitCode.INTERRUPTED
    if not isinstance(result, int):
        return ExitCode.OK
    return ExitCode(result) if result in set(ExitCode) else ExitCode.FAILED


def main() -> None:
    """Entry point of the `swarm` command."""
    sys.exit(run(sys.argv[1:]))
