"""A run in this process, from its manifest to its last checkpoint: a host and a peer in each stage."""

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bootstrap.program.host import Host, HostSettings
from bootstrap.program.ledger import Ledger
from bootstrap.state.run_folder import PreparedRun
from peer.directory.kept_answers import KeptAnswers
from peer.owner.limits import VolunteerSettings
from peer.program.daemon import PeerDaemon
from swarm.identity.key import Identity
from swarm.network.memory import MemoryNetwork

DEADLINE_S = 300.0


@dataclass(frozen=True, kw_only=True)
class _Volunteer(VolunteerSettings):
    """One who computes on whatever there is."""

    @property
    def devices(self) -> tuple[str, ...]:
        return ("cpu",)


async def trained(run: PreparedRun, folder: Path) -> dict[str, Any]:
    """The host's report of the run when it is over. Raises what breaks."""
    network = MemoryNetwork(random.Random("network"))
    transport, directory = network.transport(run.host_key), network.directory(run.host_key)
    ledger = Ledger(run.folder.ledger)
    host = Host(run, transport, ledger, HostSettings(evaluate_tokens=256), lambda event: None)
    host.serve()
    tasks = [asyncio.ensure_future(host.conduct())]
    try:
        for stage in range(run.settings.model.num_stages):
            (folder / f"peer{stage}").mkdir(parents=True, exist_ok=True)
            tasks.append(asyncio.ensure_future(_peer(network, run, folder / f"peer{stage}", stage)))
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*tasks)
        return host.report()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await directory.close()
        await transport.close()
        ledger.close()


async def _peer(network: MemoryNetwork, run: PreparedRun, folder: Path, stage: int) -> None:
    identity = Identity.from_seed(random.Random(f"peer {stage}").randbytes(32))
    transport, directory = network.transport(identity), network.directory(identity)
    volunteer = _Volunteer(folder=folder, threads=1, stage=stage)
    rng, kept = random.Random(f"routes {stage}"), KeptAnswers(folder / "host.answers")
    daemon = PeerDaemon(volunteer, identity, transport, directory, run.host_key.peer_id, rng=rng, kept=kept)
    try:
        await daemon.run(asyncio.Event())
    finally:
        await directory.close()
        await transport.close()
