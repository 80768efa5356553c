"""`swarm join`: this is where a volunteer's command line becomes a running daemon."""

import asyncio
import logging
import os
from pathlib import Path

import click

from peer.limits import GIB, VolunteerSettings, apply_thread_limit
from swarm.attacks import DEVELOPER_VARIABLE, Attack, parse_attack
from swarm.core.errors import SettingsError, TransientError
from swarm.network.addresses import listen_multiaddress

DEFAULT_FOLDER = Path(os.environ.get("XDG_DATA_HOME", Path.home() / ".local" / "share")) / "homeswarm"


@click.command(name="join", short_help="Train with a run, given its address.")
@click.argument("address", nargs=-1, required=True)
@click.option("--stage", type=click.IntRange(min=0), help="Serve this stage. Default: where the run needs a peer most.")
@click.option("--threads", type=click.IntRange(min=1), help="Processor threads to use. Default: all.")
@click.option("--memory", "memory_gib", type=click.FloatRange(min=0.01), help="Most memory to use, in GiB.")
@click.option("--upload-mbit", type=click.FloatRange(min=0.01), help="Most upload, in Mbit/s.")
@click.option("--download-mbit", type=click.FloatRange(min=0.01), help="Most download, in Mbit/s.")
@click.option("--gpu", default="none", show_default=True, metavar="N|none", help="Number of the GPU to use.")
@click.option("--listen", default="0.0.0.0:0", show_default=True, metavar="HOST:PORT", help="Where others reach you.")
@click.option("--dir", "folder", type=click.Path(path_type=Path), default=DEFAULT_FOLDER, show_default=True)
@click.option("--adversary", metavar="KIND@STEP", hidden=True, help="Misbehave from STEP on, for tests.")
@click.option("--verbose", is_flag=True, help="Log what happens.")
def command(
    address: tuple[str, ...],
    stage: int | None,
    threads: int | None,
    memory_gib: float | None,
    upload_mbit: float | None,
    download_mbit: float | None,
    gpu: str,
    listen: str,
    folder: Path,
    adversary: str | None,
    verbose: bool,
) -> None:
    """Train with the run whose host listens at ADDRESS, until it ends or Ctrl-C."""
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    threads = threads or os.cpu_count() or 1
    apply_thread_limit(threads)
    if gpu != "none" and not gpu.isdigit():
        raise SettingsError(f"--gpu {gpu}: give the GPU's number, or none")
    volunteer = VolunteerSettings(
        folder=folder,
        threads=threads,
        memory_bytes=None if memory_gib is None else int(memory_gib * GIB),
        upload_mbit=upload_mbit,
        download_mbit=download_mbit,
        gpu=None if gpu == "none" else int(gpu),
        stage=stage,
        listen=(listen_multiaddress(listen),),
        attack=None if adversary is None else _allowed(adversary),
    )
    from swarm.network.loop import run

    run(lambda stop: join(volunteer, address, stop))


def _allowed(adversary: str) -> Attack:
    if os.environ.get(DEVELOPER_VARIABLE) != "1":
        raise SettingsError(
            f"--adversary {adversary}: a peer that misbehaves harms the run and is banned; it is for developers' own "
            f"swarms, with {DEVELOPER_VARIABLE}=1 in the environment"
        )
    try:
        return parse_attack(adversary)
    except SettingsError as error:
        raise SettingsError(f"--adversary {error}") from error


async def join(volunteer: VolunteerSettings, addresses: tuple[str, ...], stop: asyncio.Event) -> None:
    """Open the network, find the host, and live as its peer."""
    from peer.daemon import PeerDaemon
    from swarm.core.ids import PeerId
    from swarm.identity import is_peer_id
    from swarm.network.dht import DHTDirectory
    from swarm.network.identity_file import load_or_create_identity
    from swarm.network.loop import happened
    from swarm.network.p2p import P2PSettings, P2PTransport

    hosts = {address.rpartition("/p2p/")[2] for address in addresses}
    if len(hosts) != 1 or not all(is_peer_id(PeerId(host)) for host in hosts):
        raise SettingsError(
            f"ADDRESS {' '.join(addresses)}: give the line that `swarm host` printed, /ip4/.../tcp/.../p2p/12D3..."
        )
    host = PeerId(hosts.pop())
    identity = load_or_create_identity(volunteer.folder / "identity.key")
    transport = await P2PTransport.create(identity, P2PSettings(listen=volunteer.listen))
    directory = None
    try:
        directory = await DHTDirectory.create(identity, transport)
        while True:
            try:
                await transport.connect(host, list(addresses))
                await directory.join(list(addresses))
                break
            except TransientError as error:
                click.echo(f"the host does not answer yet: {error}", err=True)
                if await happened(stop, within_s=2.0):
                    return
        daemon = PeerDaemon(volunteer, identity, transport, directory, host)
        await daemon.run(stop)
    finally:
        if directory is not None:
            await directory.close()
        await transport.close()
