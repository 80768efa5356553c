"""`swarm install-service`: a systemd unit is written that runs the peer of a user, hardened."""

import shlex
import sys
from pathlib import Path

import click

from peer.program.command import folder_option, host_of, listen_option, read_address
from peer.program.state_folder import StateFolder
from swarm.core.errors import SettingsError
from swarm.disk.durable_lines import replace_lines
from swarm.network.addresses import listen_multiaddresses

UNIT = """\
[Unit]
Description=homeswarm: trains a shared model within its owner's limits (swarm status, swarm config)
After=network-online.target
Wants=network-online.target

[Service]
ExecStart={command}
# SIGTERM: what is in flight is finished and handed over, 25 s at most; `swarm leave` has no such end.
TimeoutStopSec=40
KillMode=mixed
Restart=on-failure
RestartSec=30
# Wrong settings (2), a ban (5) and a release that does not suit (6) are not mended by starting again.
RestartPreventExitStatus=2 5 6
Nice={nice}
IOSchedulingClass=idle
CPUWeight=20
{limits}\
UMask=0077
NoNewPrivileges=yes
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RestrictNamespaces=yes
# By netlink p2pd learns this machine's addresses: without, it knows of 127.0.0.1 alone, and tells others that.
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM
ProtectSystem=strict
ProtectHome=read-only
ReadWritePaths={folder} %t
# Compiled kernels are kept there.
Environment={numba}
Environment={triton}
PrivateTmp=yes
ProtectKernelTunables=yes
ProtectControlGroups=yes

[Install]
WantedBy=default.target
"""


@click.command()
@click.argument("address", nargs=-1, required=True)
@listen_option
@folder_option
@click.option("--print", "only_print", is_flag=True, help="Print the unit instead of writing it.")
def command(address: tuple[str, ...], listen: str, folder: Path, only_print: bool) -> None:
    """Write a systemd user unit that joins the run at ADDRESS whenever this machine runs.

    Limits are those of `swarm config`; see what you agree to with `swarm join ADDRESS` first.
    """
    host_of(read_address(address)[1])
    listen_multiaddresses(listen)
    state = StateFolder(folder.absolute())
    unit = unit_of(address, listen, state)
    if only_print:
        click.echo(unit, nl=False)
        return
    path = Path.home() / ".config" / "systemd" / "user" / "homeswarm.service"
    state.make()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_lines(path, unit.splitlines())
    except OSError as error:
        raise SettingsError(f"{path}: cannot be written ({error.strerror}); see the unit with --print") from error
    click.echo(
        f"{path} is written; now\n"
        "    systemctl --user daemon-reload\n"
        "    systemctl --user enable --now homeswarm\n"
        "    loginctl enable-linger        # so that it runs while you are logged out"
    )


def unit_of(addresses: tuple[str, ...], listen: str, state: StateFolder) -> str:
    """The unit's text. The kernel keeps the limits that it can keep as well."""
    limits = state.load_limits()
    held = [] if limits.threads is None else [f"CPUQuota={100 * limits.threads}%"]
    held += [] if limits.memory_gib is None else [f"MemoryMax={int(limits.memory_gib * (1 << 30))}"]
    arguments = ["-m", "swarm", "join", *addresses, "--yes", "--listen", listen, "--dir", str(state.path)]
    return UNIT.format(
        command=" ".join([_word(sys.executable), *(_word(argument).replace("$", "$$") for argument in arguments)]),
        nice=limits.nice,
        limits="".join(f"{line}\n" for line in held),
        folder=_word(str(state.path)),
        numba=_word(f"NUMBA_CACHE_DIR={state.path}/numba"),
        triton=_word(f"TRITON_CACHE_DIR={state.path}/triton"),
    )


def _word(text: str) -> str:
    """One word to systemd, in a command, a list of paths or an assignment. It takes quotes off as a shell does, but
    reads backslashes within them too; % begins a specifier."""
    return shlex.quote(text).replace("%", "%%").replace("\\", "\\\\")
