"""A host for tests, with its doors open and no peers: its services as strangers find them."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bootstrap.directory.admission import AdmissionPolicy
from bootstrap.directory.doors import Doors, DoorSettings
from bootstrap.owner.desk import HostDesk
from bootstrap.program.held_run import HeldRun
from bootstrap.program.host import Host, HostSettings
from bootstrap.program.ledger import Ledger
from bootstrap.state.run_folder import PreparedRun
from swarm.checkpoint.archive import CheckpointMeta, CheckpointWriter
from swarm.checkpoint.record import CheckpointRecord, files_below
from swarm.checkpoint.state import state_digest
from swarm.core.pipeline.leases import LeaseTable
from swarm.network.memory import MemoryNetwork, MemoryTransport
from swarm.network.p2pd.processes import RuntimeFolder
from swarm.network.services.calls_of_strangers import ServiceLimits
from swarm.network.services.host_service import serve_owner_of_host
from swarm.network.transport import Transport
from tests.swarm_in_process import manifest_of, prepare


class Listening:
    """A transport within this process that says it listens somewhere."""

    def __init__(self, inner: MemoryTransport, address: str) -> None:
        self._inner = inner
        self._address = address

    def addresses(self) -> list[str]:
        return [f"{self._address}/p2p/{self._inner.peer_id}"]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@dataclass
class Hosted:
    """A host; made by `hosted`."""

    run: PreparedRun
    itself: Host
    ledger: Ledger
    doors: Doors
    network: MemoryNetwork
    events: list[dict[str, Any]]

    def ledger_size(self) -> int:
        """Events written down so far."""
        return sum(1 for _ in self.ledger.events())

    def archive(self, version: int, *, anchored: bool = True, seed: int = 0) -> CheckpointRecord:
        """A checkpoint of weights that nobody trained."""
        writer = CheckpointWriter(self.run.folder.checkpoints, version)
        digests = []
        for stage, state in enumerate(self.run.states):
            state.version = version
            state.weights = np.random.default_rng((seed, stage)).normal(size=len(state.weights)).astype(np.float32)
            writer.add_stage(stage, state)
            digests.append(state_digest(state))
        position: Any = LeaseTable().to_value()
        run = {} if self.run.base is None else {"base_digest": self.run.base.pieces.digest.hex()}
        meta = CheckpointMeta(model=self.run.settings.model, tokenizer="bytes", run=run, data_position=position)
        path = writer.commit(meta)
        record = CheckpointRecord(self.run.run_id, version, anchored, tuple(digests), files_below(path))
        record = record.signed_by(self.run.run_key)
        self.ledger.append("checkpoint", record.to_value())
        return record


@contextlib.asynccontextmanager
async def commanded(host: Host) -> AsyncIterator[None]:
    """Its run's folder is held, and the host answers its owner."""
    runtime = RuntimeFolder()
    try:
        with HeldRun(host.run.folder.root) as held:
            socket = await serve_owner_of_host(HostDesk(host), runtime.path)
            held.listens_at(socket.path)
            yield
            await socket.close()
    finally:
        runtime.close()


@contextlib.asynccontextmanager
async def hosted(
    folder: Path,
    *,
    policy: AdmissionPolicy | None = None,
    service_limits: ServiceLimits | None = None,
    minimum_release: str = "0",
    **tables: dict[str, Any],
) -> AsyncIterator[Hosted]:
    """A host of a tiny run in `folder`, on 127.0.0.1; `tables` of its manifest."""
    run = prepare(manifest_of(**tables), folder)
    network, events = MemoryNetwork(random.Random(0)), []
    ledger = Ledger(run.folder.ledger)
    inner = network.transport(run.host_key)
    settings = HostSettings(admission=policy or AdmissionPolicy(), minimum_release=minimum_release)
    host = Host(run, inner, ledger, settings, events.append)
    host.serve()
    listener = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    transport: Transport = Listening(inner, f"/ip4/127.0.0.1/tcp/{port}")  # type: ignore[assignment]
    doors = await Doors.open(
        host,
        transport,
        DoorSettings(limits=service_limits or ServiceLimits(calls_per_s=1000, burst=1000)),
        events.append,
    )
    try:
        async with commanded(host):
            yield Hosted(run, host, ledger, doors, network, events)
    finally:
        await doors.close()
        listener.close()
        await inner.close()
        ledger.close()
