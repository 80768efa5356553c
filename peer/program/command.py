"""`swarm join`: a volunteer's command line becomes a running daemon."""

import asyncio
import contextlib
import logging
import os
import random
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from peer.program.state_folder import HeldFolder, StateFolder
from swarm.core.errors import SettingsError
from swarm.core.owner.guest import GIB
from swarm.core.owner.limits import LIMITS, OwnerLimits
from swarm.log_format import LogFormatter
from swarm.network.addresses import beside, listen_multiaddresses

if TYPE_CHECKING:
    from collections.abc import Callable

    from peer.directory.known_peers import KnownPeers
    from peer.machine.core_share import DaemonThreads
    from peer.owner.limits import VolunteerSettings
    from peer.program.daemon import PeerDaemon
    from peer.program.joining import OnRun
    from peer.program.lives import Lives
    from swarm.invite import Invite

    MakePeer = Callable[..., PeerDaemon]
    """Called as `PeerDaemon` is."""
    LoadPeer = Callable[[], MakePeer]
    """Imports what a peer is made by. Given as the click context's object by a program that makes another peer than
    this one does."""

DEFAULT_FOLDER = Path(os.environ.get("XDG_DATA_HOME", Path.home() / ".local" / "share")) / "homeswarm"

TERMINATED_S = 25.0
"""After SIGTERM: a machine that is switched off waits no longer for its services, and the unit gives it 40 s."""
WAITED_FOR = ("swarm.local.compiling", "kernels.compiled")
"""Loggers of what an owner waits for at the terminal."""


def folder_option(function: "Callable[..., object]") -> "Callable[..., object]":
    """--dir, the same for every command about a daemon."""
    return click.option(
        "--dir",
        "folder",
        type=click.Path(path_type=Path, file_okay=False),
        default=DEFAULT_FOLDER,
        show_default=True,
        envvar="HOMESWARM_DIR",
        help="The daemon's folder: identity, limits, state.",
    )(function)


def listen_option(function: "Callable[..., object]") -> "Callable[..., object]":
    """--listen, the same wherever a peer is started or its start is prepared."""
    return click.option(
        "--listen",
        default=":0",
        show_default=True,
        metavar="[HOST]:PORT",
        help="Where others reach you. Without HOST: at all of this machine's addresses, of IPv6 too if it has one.",
    )(function)


def limit_options(function: "Callable[..., None]") -> "Callable[..., None]":
    """One option for each of the owner's limits."""
    for limit in reversed(LIMITS):
        names = [f"--{limit.name}"] + (["--memory"] if limit.name == "memory-gib" else [])
        option = click.option(*names, limit.field, metavar=limit.example.upper(), help=limit.meaning)
        function = option(function)
    return function


@click.command(name="join", short_help="Train with a run, given its address.")
@click.argument("address", nargs=-1, required=True)
@click.option("--yes", is_flag=True, help="Join without asking; needed where nobody can be asked.")
@click.option("--detach", is_flag=True, help="Go on in the background; `swarm status`, `top` and `leave` are for it.")
@click.option("--stage", type=click.IntRange(min=0), help="Serve this stage. Default: where the run needs a peer most.")
@listen_option
@folder_option
@limit_options
@click.option("--verbose", is_flag=True, help="Log what happens here too; `swarm logs` has it always.")
@click.pass_obj
def command(
    load_peer: "LoadPeer | None",
    /,
    address: tuple[str, ...],
    yes: bool,
    detach: bool,
    stage: int | None,
    listen: str,
    folder: Path,
    verbose: bool,
    **given: str | None,
) -> None:
    """Train with the run that ADDRESS, an invite or a host's own address, leads to, until it ends or Ctrl-C.

    Limits given here hold for this start; `swarm config` sets them for all. "none" lifts one. With --gpu all, or
    several numbers, one daemon has a peer on each GPU, and the limits are those of all together.

    With --yes, memory, disk or a GPU that others hold is waited for.

    Exit codes: 0 the run is over or you left; 1 something failed; 2 a setting is wrong, or this machine does not fit;
    5 the run shut this peer out; 6 this release is too old, or too new; 130 interrupted, or not joined when asked.
    """
    state = StateFolder(folder.absolute())
    limits = state.load_limits().changed(
        {limit.name: text for limit in LIMITS if (text := given[limit.field]) is not None}
    )
    invite, addresses = read_address(address)
    host = host_of(addresses)
    if detach:
        from peer.machine.gpus import chosen_gpus
        from peer.program.detached import ask_before, start_detached

        if not yes:
            ask_before(host, addresses, invite, stage, limits, len(chosen_gpus(limits.gpu)))
        start_detached(state, _rebuilt(address, stage, listen, folder, given))
        return
    from peer.machine.priority import giving_way

    with giving_way(limits.nice):
        volunteers = [replace(volunteer, invite=invite) for volunteer in _volunteers(state, limits, stage, listen)]
        from peer.owner.consent import ask, silent
        from swarm.network.loop import run

        on_run = silent if yes else ask(stage, limits, len(volunteers))
        load = load_peer or _load_peer
        run(
            lambda stop: _join(
                volunteers, state, limits, host, addresses, stop, on_run, load, yes=yes, verbose=verbose
            ),
            terminated_s=TERMINATED_S,
        )


def read_address(lines: tuple[str, ...]) -> "tuple[Invite | None, tuple[str, ...]]":
    """The invite, if one was given, and the host's addresses. Raises SettingsError, or UpgradeNeeded."""
    from swarm.invite import is_invite, parse_invite
    from swarm.release import check_protocol

    if not any(is_invite(line) for line in lines):
        return None, lines
    if len(lines) != 1:
        raise SettingsError(f"ADDRESS: {len(lines)} were given; an invite stands alone, in quotes")
    invite = parse_invite(lines[0])
    check_protocol(invite.protocol)
    return invite, invite.addresses


def host_of(addresses: tuple[str, ...]) -> str:
    """The peer id that all the addresses end in. Raises SettingsError."""
    from swarm.core.ids import PeerId
    from swarm.identity.key import is_peer_id

    hosts = {address.rpartition("/p2p/")[2] for address in addresses}
    if len(hosts) != 1 or not all(is_peer_id(PeerId(host)) for host in hosts):
        raise SettingsError(f"ADDRESS {' '.join(addresses)}: give the line that `swarm host` printed, swarm://...")
    return hosts.pop()


def _volunteers(state: StateFolder, limits: OwnerLimits, stage: int | None, listen: str) -> "list[VolunteerSettings]":
    """Of each peer that the daemon is to have."""
    from peer.machine.core_share import shared_out
    from peer.machine.cores import claim_cores, usable_cores
    from peer.machine.gpus import chosen_gpus, number_as_the_driver_does
    from peer.owner.limits import VolunteerSettings
    from swarm.local.compute_pools import bound_pools, pools_bound_by_owner
    from swarm.memory.allocator import return_large_blocks

    return_large_blocks()
    number_as_the_driver_does()
    if limits.threads is not None:
        threads = limits.threads
        claim_cores(threads)
    else:
        cores = len(usable_cores())
        threads = min(cores, pools_bound_by_owner() or cores)
    bound_pools(threads)
    chosen = chosen_gpus(limits.gpu)
    volunteer = VolunteerSettings(
        folder=state.path,
        threads=threads,
        memory_bytes=None if limits.memory_gib is None else int(limits.memory_gib * GIB),
        upload_mbit=limits.upload_mbit,
        download_mbit=limits.download_mbit,
        gpu_memory_bytes=None if limits.gpu_memory_gib is None else int(limits.gpu_memory_gib * GIB),
        disk_bytes=None if limits.disk_gib is None else int(limits.disk_gib * GIB),
        stage=stage,
        asks_router=limits.router_ports == "ask",
    )
    relay_listen = () if limits.relay_gb is None else listen_multiaddresses(beside(listen, 1))
    return [
        replace(
            volunteer,
            threads=each,
            gpu=gpu.number,
            gpu_is_default=gpu.is_default,
            computes_on=gpu.reason,
            listen=listen_multiaddresses(listens_at),
            relay_listen=() if place else relay_listen,
        )
        for place, (gpu, each, listens_at) in enumerate(
            zip(chosen, shared_out(threads, len(chosen)), places(listen, len(chosen)), strict=True)
        )
    ]


def places(listen: str, num_peers: int) -> list[str]:
    """Where each peer listens, as --listen has it of the first. The next port is the relay's, which that one runs."""
    return [listen, *(beside(listen, 1 + place) for place in range(1, num_peers))]


def _rebuilt(
    address: tuple[str, ...],
    stage: int | None,
    listen: str,
    folder: Path,
    given: "dict[str, str | None]",
) -> list[str]:
    """The command line of the same join in the foreground. What happens is in its log alone, which is of bounded size,
    and not in the file of what it says too, which is not."""
    arguments = ["join", *address, "--yes", "--listen", listen, "--dir", str(folder.absolute())]
    arguments += [] if stage is None else ["--stage", str(stage)]
    for limit in LIMITS:
        text = given[limit.field]
        arguments += [] if text is None else [f"--{limit.name}", text]
    return arguments


def _say(text: str) -> None:
    """To whoever reads it: a file whose disk is full, or a terminal that is gone, must not end the peer."""
    with contextlib.suppress(OSError):
        click.echo(text, err=True)


async def _join(
    volunteers: "Sequence[VolunteerSettings]",
    state: StateFolder,
    limits: OwnerLimits,
    host: str,
    addresses: tuple[str, ...],
    stop: asyncio.Event,
    on_run: "OnRun",
    load_peer: "LoadPeer",
    *,
    yes: bool,
    verbose: bool,
) -> None:
    """Hold the folder, answer the owner, and live."""
    from peer.owner.desk import OwnerDesk
    from peer.owner.log_lines import LogLines
    from peer.owner.own_peer import OwnPeer
    from swarm.core.ids import PeerId
    from swarm.network.identity_file import load_or_create_identity
    from swarm.network.p2pd.processes import RuntimeFolder
    from swarm.network.services.daemon_service import serve_owner_of_daemon

    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(HeldFolder(folder)) for folder in _folders(state, volunteers)]
        _say("starting, and asking the run's host ...")  # on a busy machine that takes a minute
        lines = LogLines()
        with _logging(state, lines, verbose=verbose):
            threads = _threads(volunteers, limits)
            peers = [
                OwnPeer(
                    f"GPU {volunteer.gpu}" if len(volunteers) > 1 else "",
                    load_or_create_identity(one.folder.identity),
                    volunteer,
                    one.folder.path,
                    of,
                )
                for one, volunteer, of in zip(held, volunteers, threads.of, strict=True)
            ]
            this = asyncio.current_task()
            assert this is not None
            desk = OwnerDesk(peers, threads, state, limits, PeerId(host), lines, stop, this.cancel)
            runtime = RuntimeFolder()
            server = await serve_owner_of_daemon(desk, runtime.path)
            try:
                for one in held:
                    one.listens_at(server.path)
                # Torch takes seconds to import; the owner is answered meanwhile.
                lives, known = await asyncio.to_thread(_imported)
                make_peer = await asyncio.to_thread(load_peer)
                await lives(
                    desk,
                    PeerId(host),
                    addresses,
                    known(state.path / "known-peers.json"),
                    stop,
                    on_run=on_run,
                    say=_say,
                    rng=random.Random(secrets.randbits(64)),
                    waits_for_room=yes,
                    make_peer=make_peer,
                ).run()
            finally:
                await server.close()
                runtime.close()


def _folders(state: StateFolder, volunteers: "Sequence[VolunteerSettings]") -> list[StateFolder]:
    """Of each peer: the daemon's own of the first, so that it is the same peer with one GPU and with several, and
    folders below it of the others."""
    further = [volunteer.gpu for volunteer in volunteers[1:]]
    return [state, *(state.of_gpu(gpu) for gpu in further if gpu is not None)]


def _threads(volunteers: "Sequence[VolunteerSettings]", limits: OwnerLimits) -> "DaemonThreads":
    from peer.machine.core_share import DaemonThreads, SharedThreads

    most, num_peers = sum(volunteer.threads for volunteer in volunteers), len(volunteers)
    if limits.threads is None:
        return SharedThreads(most, num_peers, now=time.monotonic())
    return DaemonThreads(most, num_peers)


def _imported() -> "tuple[type[Lives], type[KnownPeers]]":
    from peer.directory.known_peers import KnownPeers
    from peer.program.lives import Lives

    return Lives, KnownPeers


def _load_peer() -> "MakePeer":
    from peer.program.daemon import PeerDaemon

    return PeerDaemon


@contextlib.contextmanager
def _logging(state: StateFolder, lines: logging.Handler, *, verbose: bool) -> Iterator[None]:
    """The log goes to its file and to `swarm logs`; to the terminal what is serious and what its owner waits for, or
    all if `verbose`."""
    terminal = logging.StreamHandler(sys.stderr)
    terminal.addFilter(lambda record: verbose or record.levelno >= logging.ERROR or record.name in WAITED_FOR)
    handlers = (terminal, lines, state.log_handler())
    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.INFO)
    for handler in handlers:
        handler.setFormatter(LogFormatter())
        root.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()
        root.setLevel(before)
