"""The `swarm` command: its verbs, and the exit codes that errors become.

A verb's module is imported only when the verb is used: `swarm --help` must not wait for torch.
"""

import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from enum import IntEnum

import click

from swarm.core.errors import (
    LocalError,
    NotRunningError,
    RemoteError,
    SettingsError,
    ShutOutError,
    TransientError,
    UpgradeNeeded,
)
from swarm.local.compute_pools import wait_asleep
from swarm.log_format import harmless
from swarm.release import __version__

VERBS = {
    # verb: (module whose `command` it is, or module:name, one line of help)
    "init": ("swarm.commands.init", "Write an example manifest."),
    "families": ("swarm.commands.families", "List the model families that can be trained."),
    "plan": ("swarm.commands.plan", "Show what a run needs of each peer: memory, traffic, time."),
    "host": ("bootstrap.program.command", "Start a run and coordinate it."),
    "seed": ("bootstrap.directory.seed_command", "Keep a run's directory open while its host is down."),
    "join": ("peer.program.command", "Train with a run, given its invite."),
    "status": ("peer.program.owner_commands:status", "Tell whether this machine is of use to its run."),
    "top": ("peer.program.owner_commands:top", "Watch this machine's peer live."),
    "pause": ("peer.program.owner_commands:pause", "Begin no more work until resume."),
    "resume": ("peer.program.owner_commands:resume", "Go on after pause."),
    "leave": ("peer.program.owner_commands:leave", "Finish what has begun, hand over, and end."),
    "logs": ("peer.program.owner_commands:logs", "Show what the peer has logged."),
    "config": ("peer.program.owner_commands:config", "Show and set the limits on this machine's use."),
    "identity": ("peer.program.identity_commands", "Show, back up or restore this machine's identity."),
    "install-service": ("peer.program.service_command", "Write a systemd unit that runs this machine's peer."),
    "doctor": ("peer.doctor.command", "Find what keeps this machine from taking part."),
    "invite": ("swarm.commands.invite", "Show what an invite says."),
    "simulate": ("peer.fleet.command", "Simulate a fleet of volunteers on a virtual clock."),
    "ticket": ("bootstrap.owner.ticket_command", "Give away, list and revoke what admits to a run."),
    "amend": ("bootstrap.owner.amend_command", "Change settings of a run that goes on."),
    "rollback": ("bootstrap.owner.rollback_command", "Have a run go on from an earlier state, without some data."),
    "peers": ("swarm.commands.peers", "Show how far a run is, and who has done what."),
    "pull": ("swarm.commands.pull", "Take a run's model away as a Hugging Face folder."),
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
    NOT_RUNNING = 4
    """No daemon or host runs that could be asked."""
    SHUT_OUT = 5
    """The run banned or quarantined this peer."""
    UPGRADE = 6
    """This release cannot take part in the run; the message holds the command that upgrades."""
    INTERRUPTED = 130


_OF_ERRORS = {
    NotRunningError: ExitCode.NOT_RUNNING,
    ShutOutError: ExitCode.SHUT_OUT,
    UpgradeNeeded: ExitCode.UPGRADE,
}


class _Verbs(click.Group):
    """A group whose commands are looked up in VERBS."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module, _, name = VERBS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), name or "command")
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(verb, line) for verb, (_, line) in VERBS.items()])


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="swarm")
def group() -> None:
    """Train one large model together, on machines that come and go.

    \b
    Exit codes: 0 well, 1 failed, 2 a setting or argument is wrong, 3 not proven, 4 no daemon or host runs,
    5 shut out of the run, 6 this release is too old or too new, 130 interrupted.
    """


def run(arguments: Sequence[str], *, of: click.Command = group) -> ExitCode:
    """Carry out one command line, of `swarm` or another program that shares its verbs.

    Errors a user can mend are one message on stderr, never a traceback.

    A verb may return an ExitCode; returning anything but a number means it went well.
    """
    try:
        result = of.main(args=list(arguments), prog_name="swarm", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return ExitCode.BAD_INPUT
    except SettingsError as error:
        click.echo(f"swarm: {harmless(str(error))}", err=True)
        return ExitCode.BAD_INPUT
    except (NotRunningError, ShutOutError, UpgradeNeeded) as error:
        click.echo(f"swarm: {harmless(str(error))}", err=True)
        return next(code for kind, code in _OF_ERRORS.items() if isinstance(error, kind))
    except (LocalError, RemoteError, TransientError) as error:
        click.echo(f"swarm: {harmless(str(error))}", err=True)
        return ExitCode.FAILED
    except OSError as error:
        if error.errno is None:  # a deadline's, which somebody should have heeded
            raise
        place = f"{error.filename}: " if error.filename is not None else ""
        click.echo(f"swarm: {harmless(f'{place}{error.strerror}')}", err=True)
        return ExitCode.FAILED
    except (KeyboardInterrupt, click.Abort):
        click.echo("swarm: interrupted", err=True)
        return ExitCode.INTERRUPTED
    if not isinstance(result, int):
        return ExitCode.OK
    return ExitCode(result) if result in set(ExitCode) else ExitCode.FAILED


def main(of: click.Command = group) -> None:
    """Entry point of the `swarm` command, or of another program that shares its verbs.

    Each verb has closed what it opened. So the process ends here and now: the interpreter's own end costs 1.6 s of
    processor time once torch is loaded, which on a busy machine is more than ten, and an owner waits for it.
    """
    wait_asleep()
    # Every child of ours is another program at once; gRPC would prepare for one that is not, and print that it cannot.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    code = run(sys.argv[1:], of=of)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # whoever read it has gone
            stream.flush()
    os._exit(code)
