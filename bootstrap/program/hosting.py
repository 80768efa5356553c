"""A host that opens its run to the world, and closes it again: at the end, or while its disk takes no more.

A host must not go on from what it has not written down. While its disk is full it is to all others as if it were down,
at the same ports afterwards; then it takes the run up from its disk, as it does when it is started again.
"""

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bootstrap.directory.doors import Doors, DoorSettings
from bootstrap.directory.relaying import HostRelay, RelaySettings
from bootstrap.owner.desk import HostDesk
from bootstrap.program.held_run import HeldRun
from bootstrap.program.host import Host, HostSettings
from bootstrap.program.last_ports import LastPorts
from bootstrap.program.ledger import Ledger
from bootstrap.state.remote_archive import ArchiveCopies
from bootstrap.state.run_folder import PreparedRun, taken_up_again
from bootstrap.state.task_scores import TaskScores
from bootstrap.tracking.feeding import Job
from bootstrap.tracking.places import TrackerPlace
from bootstrap.tracking.tracker import TrackedRun
from bootstrap.tracking.tracking import Tracking
from swarm.checkpoint.archive import checkpoint_path
from swarm.checkpoint.record import CheckpointRecord
from swarm.core.errors import DiskFullError
from swarm.disk.room import disk_room, full_disk
from swarm.disk.whole_file import whole_file
from swarm.manifest.value import json_of, settings_to_value
from swarm.network.addresses import as_had, at_port, port_of
from swarm.network.directory.dht import DHTDirectory
from swarm.network.loop import happened
from swarm.network.p2pd.p2p import P2PSettings, P2PTransport
from swarm.network.p2pd.processes import RuntimeFolder
from swarm.network.services.host_service import serve_owner_of_host

log = logging.getLogger(__name__)

DIRECT_FURTHER = 4
"""The port of direct streams, and of peers that ask where they are seen, is so much further than the p2p one."""
LOOK_FOR_ROOM_S = 1.0
ENOUGH_ROOM_BYTES = 4 << 20
"""Less would be full again at once."""


@dataclass(frozen=True, kw_only=True)
class HostingSettings:
    """What the owner of a host decides, beside the run's manifest."""

    listen: tuple[str, ...]
    """TCP multiaddresses of p2p, of both versions of IP on the same port where one is named."""
    host: HostSettings
    doors: DoorSettings
    relay: RelaySettings | None = None
    """None: nobody is carried."""
    report: Path | None = None
    """Where the run's figures go at the end, as JSON."""
    ends_with_run: bool = False
    """Whether the host goes when the run is over, instead of serving what came of it until it is told to stop."""
    track: tuple[TrackerPlace, ...] = ()
    """Trackers that are fed with the run's figures."""
    eval_tasks: tuple[str, ...] = ()
    """lm-eval's, at which checkpoints are tried."""


class _NetworkLost(Exception):
    """Nothing of the host can be reached any more."""


class _Amended(Exception):
    """The run goes on under other settings."""


class Hosting:
    """One host, over as many beginnings as it takes."""

    def __init__(self, settings: HostingSettings, held: HeldRun, show: Callable[[dict[str, Any]], None]) -> None:
        self._settings = settings
        """With the ports that were had, once they are."""
        asked = port_of(settings.listen[0])
        self._direct_port = asked + DIRECT_FURTHER if asked else 0
        self._held = held
        self._show = show

    async def run(self, prepared: PreparedRun, stop: asyncio.Event) -> None:
        """Until the run is over or `stop`. Raises DiskFullError where the disk does not take the end either."""
        self._settings = await _at_last_ports(self._settings, LastPorts(prepared.folder.root))
        async with Tracking([_job(place, prepared) for place in self._settings.track], self._show):
            await self._go_on(prepared, stop)
        self._show({"event": "finished"})

    async def _go_on(self, prepared: PreparedRun, stop: asyncio.Event) -> None:
        folder = prepared.folder.root
        while True:
            try:
                with disk_room(folder):
                    await self._serve(prepared, stop)
                break
            except DiskFullError as full:
                if stop.is_set():
                    raise
                log.error("%s; this host stands still until there is", full)
                self._show({"event": "disk_full", "reason": str(full)})
            except _NetworkLost as lost:
                log.error("%s", lost)
            except _Amended:
                prepared = await asyncio.to_thread(taken_up_again, prepared)
                continue
            await happened(stop, within_s=LOOK_FOR_ROOM_S)
            while not stop.is_set() and not await asyncio.to_thread(_has_room, folder):
                await happened(stop, within_s=LOOK_FOR_ROOM_S)
            if stop.is_set():
                break
            prepared = await asyncio.to_thread(taken_up_again, prepared)

    async def _serve(self, prepared: PreparedRun, stop: asyncio.Event) -> None:
        """Until the run is over or `stop`; the report is written either way. Raises DiskFullError."""
        async with contextlib.AsyncExitStack() as opened:
            settings = self._settings
            network = P2PSettings(listen=settings.listen, direct_port=self._direct_port)
            transport = await P2PTransport.create(prepared.host_key, network)
            opened.push_async_callback(transport.close)
            full = asyncio.Event()
            ledger = Ledger(prepared.folder.ledger, on_full=full.set)
            opened.callback(ledger.close)
            directory = await DHTDirectory.create(prepared.host_key, transport)
            opened.push_async_callback(directory.close)
            host = Host(prepared, transport, ledger, settings.host, self._show)
            host.serve()
            doors = await Doors.open(host, transport, settings.doors, self._show)
            opened.push_async_callback(doors.close)
            settings = replace(settings, listen=as_had(settings.listen, transport.addresses()), doors=doors.settings)
            beside: list[HostRelay | ArchiveCopies] = []
            if settings.relay is not None:
                relay = await HostRelay.open(prepared.folder.root, transport, settings.relay, self._show)
                opened.push_async_callback(relay.close)
                settings = replace(settings, relay=relay.settings)
                host.relay = relay
                beside.append(relay)
            self._settings = settings
            LastPorts(prepared.folder.root).note(_ports(settings))
            if prepared.archive is not None:
                copies = _copies(prepared, host, self._show)
                opened.callback(copies.close)
                host.copies = copies
                beside.append(copies)
            if settings.eval_tasks:
                newest = partial(_newest_untried, host)
                host.scoring = TaskScores(settings.eval_tasks, prepared, ledger, newest, self._show)
                scoring = asyncio.ensure_future(host.scoring.run_for_ever())
                opened.push_async_callback(_ended, scoring)
            await self._answer_owner(host, opened)
            self._tell(prepared, transport, doors)
            try:
                await self._conduct(host, beside, full, transport.ended, stop)
            finally:
                await self._report(host)
            if host.amending.done.is_set():
                raise _Amended
            if not host.is_over:
                total = prepared.settings.optimizer.total_steps
                self._show({"event": "stopped", "version": host.progress.done_versions(), "total_steps": total})
            elif not settings.ends_with_run and not stop.is_set():
                adapters = prepared.settings.model.has_base
                over = {"event": "over", "invite": doors.invite.line(), "adapters": adapters}
                self._show({**over, **host.outcome()})
                await _any_of(stop, full, transport.ended, host.amending.done)
                _check(host, full, transport.ended)
                if host.amending.done.is_set():
                    raise _Amended

    async def _report(self, host: Host) -> None:
        if self._settings.report is not None:
            text = json.dumps(host.report(), indent=1) + "\n"
            await asyncio.to_thread(_write, self._settings.report, text)

    async def _conduct(
        self,
        host: Host,
        beside: list[HostRelay | ArchiveCopies],
        full: asyncio.Event,
        lost: asyncio.Event,
        stop: asyncio.Event,
    ) -> None:
        conducting = asyncio.ensure_future(host.conduct())
        waits = (stop.wait(), full.wait(), lost.wait(), *(one.run() for one in beside))
        ending = [conducting, *map(asyncio.ensure_future, waits)]
        try:
            ended, _ = await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)
            _check(host, full, lost)
            for task in ended:
                task.result()
            if host.copies is not None and conducting in ended:
                await host.copies.finish()
        finally:
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)

    async def _answer_owner(self, host: Host, opened: contextlib.AsyncExitStack) -> None:
        runtime = RuntimeFolder()
        opened.callback(runtime.close)
        socket = await serve_owner_of_host(HostDesk(host), runtime.path)
        opened.push_async_callback(socket.close)
        with disk_room(self._held.folder):
            self._held.listens_at(socket.path)

    def _tell(self, prepared: PreparedRun, transport: P2PTransport, doors: Doors) -> None:
        self._show(
            {
                "event": "listening",
                "addresses": transport.addresses(),
                "run_id": prepared.run_id,
                "invite": doors.invite.line(),
                "web": doors.web,
                "admission": self._settings.host.admission.kind,
                "folder": str(prepared.folder.root),
            }
        )


def _check(host: Host, full: asyncio.Event, lost: asyncio.Event) -> None:
    """Raises DiskFullError or _NetworkLost where the host cannot go on."""
    if full.is_set():
        raise full_disk(host.run.folder.ledger)
    if lost.is_set():
        raise _NetworkLost("this host's p2pd has ended, and is started again")


async def _any_of(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


def _newest_untried(host: Host) -> int | None:
    """The newest checkpoint, unless its scores are known or it is not there."""
    version = max(host.books.checkpoints, default=None)
    if version is None or version in host.books.scores:
        return None
    return version if checkpoint_path(host.run.folder.checkpoints, version).is_dir() else None


async def _ended(task: asyncio.Future[None]) -> None:
    """Raises what it has ended by, if it has by itself."""
    task.cancel()
    (found,) = await asyncio.gather(task, return_exceptions=True)
    if isinstance(found, Exception):
        raise found


async def _at_last_ports(settings: HostingSettings, last: LastPorts) -> HostingSettings:
    """With those that the run's host had, where any port is asked for."""
    listen, doors = [], settings.doors
    for address in settings.listen:
        port = port_of(address) or await last.free(_name_of(address), address.split("/")[2])
        listen.append(at_port(address, port))
    service = await _at_last_port("service", doors.service, last)
    web = None if doors.web is None else await _at_last_port("web", doors.web, last)
    return replace(settings, listen=tuple(listen), doors=replace(doors, service=service, web=web))


async def _at_last_port(what: str, asked: str, last: LastPorts) -> str:
    """HOST:PORT."""
    host, _, port = asked.rpartition(":")
    return asked if port != "0" else f"{host}:{await last.free(what, host.strip('[]'))}"


def _name_of(address: str) -> str:
    return "listen6" if address.startswith("/ip6/") else "listen"


def _ports(settings: HostingSettings) -> dict[str, int]:
    doors = settings.doors
    ports = {_name_of(address): port_of(address) for address in settings.listen}
    ports |= {"service": int(doors.service.rpartition(":")[2])}
    return ports if doors.web is None else ports | {"web": int(doors.web.rpartition(":")[2])}


def _job(place: TrackerPlace, prepared: PreparedRun) -> Job:
    settings = prepared.settings
    run = TrackedRun(
        run_id=prepared.run_id,
        name=settings.name,
        settings=json_of(settings_to_value(settings)),
        folder=prepared.folder.root,
    )
    return Job(place, prepared.folder.ledger, run)


def _copies(prepared: PreparedRun, host: Host, show: Callable[[dict[str, Any]], None]) -> ArchiveCopies:
    def held() -> list[CheckpointRecord]:
        return [CheckpointRecord.from_value(value) for _, value in sorted(host.books.checkpoints.items())]

    assert prepared.archive is not None
    return ArchiveCopies(prepared.archive, prepared.folder.checkpoints, held, show)


def _write(path: Path, text: str) -> None:
    with whole_file(path) as partial:
        partial.write_text(text)


def _has_room(folder: Path) -> bool:
    """Whether the disk takes some more; tried, for what is free to others need not be free to this user."""
    probe = folder / f".room-{os.getpid()}"
    try:
        with disk_room(folder), probe.open("wb") as file:
            file.write(bytes(ENOUGH_ROOM_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except DiskFullError:
        return False
    finally:
        probe.unlink(missing_ok=True)
    return True
