"""`swarm join --detach`: a daemon is started in the background, and waited for until it can be asked."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Sequence

import click

from peer.program.state_folder import HeldFolder, StateFolder
from swarm.core.errors import LocalError, SettingsError, TransientError
from swarm.core.ids import PeerId
from swarm.core.owner.limits import OwnerLimits
from swarm.core.settings import RunSettings
from swarm.disk.process_lock import holder_of
from swarm.invite import Invite
from swarm.manifest.signed_run import SignedRun

START_S = 30.0
LAST_LINES = 5


def ask_before(
    host: str,
    addresses: Sequence[str],
    invite: Invite | None,
    stage: int | None,
    limits: OwnerLimits,
    num_peers: int,
) -> None:
    """Show the run's offer here, where somebody can be asked. Raises click's Exit, or TransientError without a host."""
    from peer.directory.host import Host
    from peer.directory.reachability import dial_all
    from peer.owner.consent import show_and_ask
    from swarm.identity.key import Identity
    from swarm.network.loop import run
    from swarm.network.p2pd.p2p import P2PSettings, P2PTransport

    async def look(stop: asyncio.Event) -> tuple[SignedRun, RunSettings]:
        transport = await P2PTransport.create(Identity.generate(), P2PSettings(listen=()))
        try:
            failed = await dial_all(transport, PeerId(host), addresses)
            if len(failed) == len(addresses):
                causes = "; ".join(f"{address}: {cause}" for address, cause in failed.items())
                raise TransientError(f"the host does not answer: {causes}; with --yes its return is waited for")
            return (await Host(transport, PeerId(host), invite).run())[:2]
        finally:
            await transport.close()

    show_and_ask(*run(look), stage, limits, num_peers)


def start_detached(state: StateFolder, arguments: Sequence[str]) -> None:
    """Run `swarm ARGUMENTS` in a session of its own; returns when its daemon answers.

    Raises SettingsError where another daemon holds the folder, and SettingsError or LocalError with its last words when
    it ends before it answers.
    """
    with HeldFolder(state):
        pass
    output = state.path / "detached.out"
    with output.open("ab") as said:
        begin = said.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "swarm", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    give_up_at = time.monotonic() + START_S
    while time.monotonic() < give_up_at:
        code = process.poll()
        if code is not None:
            words = "\n".join(output.read_bytes()[begin:].decode(errors="replace").splitlines()[-LAST_LINES:])
            message = words.removeprefix("swarm: ") or f"the daemon ended with exit code {code}"
            raise SettingsError(message) if code == 2 else LocalError(message)
        holder = holder_of(state.lock)
        if holder is not None and holder.pid == process.pid and holder.socket is not None:
            click.echo(f"daemon {process.pid} runs in {state.path}: see `swarm status`, `swarm top`, `swarm leave`")
            return
        time.sleep(0.05)
    raise LocalError(f"the daemon does not answer after {START_S:g} s; see {output} and {state.log}")
