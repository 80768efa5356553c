"""`swarm seed`: a second machine keeps a run's directory open, so that its host may be down.

A seed holds no key of the run, admits nobody and says nothing of its own. Peers that have joined before find it in the
directory, remember it, and come back through it.
"""

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarm.core.errors import LocalError, SettingsError, TransientError
from swarm.log_format import log_to_terminal
from swarm.network.addresses import listen_multiaddresses

if TYPE_CHECKING:
    from swarm.core.canonical import Value
    from swarm.identity.key import Identity
    from swarm.invite import Invite

log = logging.getLogger(__name__)

LOOK_EVERY_S = 10.0
TOLD_FOR_S = 120.0


@click.command(name="seed", short_help="Keep a run's directory open while its host is down.")
@click.argument("invite")
@click.option(
    "--dir", "folder", type=click.Path(path_type=Path), default="seed", show_default=True, help="For its key."
)
@click.option("--listen", default=":0", show_default=True, metavar="[HOST]:PORT", help="Where peers reach it.")
@click.option("--public", metavar="NAME", help="Name or number by which strangers reach this machine.")
@click.option("--verbose", is_flag=True, help="Log what happens.")
def command(invite: str, folder: Path, listen: str, public: str | None, verbose: bool) -> None:
    """Serve the directory of INVITE's run from this machine too, until Ctrl-C. It needs no key of the run.

    Peers that have joined the run before come back through it while the host is down; who is new waits for the host.
    """
    log_to_terminal(verbose=verbose)
    from swarm.invite import parse_invite
    from swarm.network.identity_file import load_or_create_identity
    from swarm.network.loop import run

    read, addresses = parse_invite(invite), listen_multiaddresses(listen)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"--dir {folder}: cannot be made ({error.strerror}); name another") from error
    identity = load_or_create_identity(folder / "seed.key")
    run(lambda stop: serve(read, identity, addresses, public, stop))


async def serve(
    invite: "Invite", identity: "Identity", listen: tuple[str, ...], public: str | None, stop: asyncio.Event
) -> None:
    """Until `stop`. Raises LocalError when p2pd ends, SettingsError when nobody can reach this machine."""
    from bootstrap.directory.doors import seed_addresses
    from swarm.host_protocol import seed_topic
    from swarm.network.directory.dht import DHTDirectory
    from swarm.network.loop import happened
    from swarm.network.p2pd.p2p import P2PSettings, P2PTransport

    transport = await P2PTransport.create(identity, P2PSettings(listen=listen))
    directory = None
    try:
        directory = await DHTDirectory.create(identity, transport)
        reached_at = await seed_addresses(transport.addresses(), public, lambda event: log.warning("%s", event))
        click.echo(f"seed of {invite.name} at {', '.join(reached_at)}")
        while not stop.is_set():
            if transport.ended.is_set():
                raise LocalError("p2pd has ended: start the seed again")
            try:
                if invite.host_key not in await transport.connected_peers() or not directory.num_neighbours:
                    await directory.join(invite.addresses)
            except TransientError as error:  # the host is down: what else is in the table goes on
                log.info("%s", error)
            try:
                said: dict[str, Value] = {"addresses": [*reached_at]}
                await directory.publish(seed_topic(invite.host_key), said, ttl_s=TOLD_FOR_S)
            except TransientError as error:
                log.info("%s", error)
            await happened(stop, within_s=LOOK_EVERY_S)
    finally:
        if directory is not None:
            await directory.close()
        await transport.close()
