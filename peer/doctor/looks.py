"""A machine looked at for `swarm doctor`: each look has its deadline, and `diagnosis` judges."""

import asyncio
import contextlib
import importlib.metadata
import shutil
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any

from peer.doctor import diagnosis
from peer.doctor.diagnosis import Dialled, Finding, Level
from peer.doctor.probes import DialCheck, congestion_control, driver_gpus, lacking_compiler, unmet_requirements
from peer.machine.gpus import chosen_gpus, torch_cuda
from peer.machine.memory import free_bytes
from peer.program.state_folder import StateFolder
from swarm.core.errors import LocalError, NotRunningError, RemoteError, SettingsError, TransientError
from swarm.core.ids import PeerId
from swarm.core.owner.guest import GIB

NEXT_S = 20.0
"""Without another finding, what has not been told is said not to have been looked at. Where a router is asked in three
ways and is silent, and others compute here, all together take longer."""
PING_S = 3.0


@dataclass
class Examination:
    """Of a machine, with the addresses of a run's host if they are known."""

    folder: StateFolder
    addresses: tuple[str, ...]
    listen: str
    _dialled_at: set[str] = field(default_factory=set)
    """Where the host dialled this machine back, other than on itself."""

    async def findings(self) -> AsyncIterator[Finding]:
        """Each as soon as it is known; all within 15 s, unless the machine has much else to do."""
        found: asyncio.Queue[Finding | None] = asyncio.Queue()
        patience = asyncio.timeout(NEXT_S)

        async def tell(look: AsyncIterator[Finding]) -> None:
            async for finding in look:
                found.put_nowait(finding)
                with contextlib.suppress(RuntimeError):  # it is over
                    patience.reschedule(asyncio.get_running_loop().time() + NEXT_S)

        async def tell_all() -> None:
            try:
                async with patience:
                    await asyncio.gather(*(tell(look) for look in (self._machine(), self._network())))
            except TimeoutError:
                says = f"nothing more was found in {NEXT_S:g} s, and what the other looks would tell is missing"
                found.put_nowait(Finding("doctor", Level.WARNING, says, "try again when this machine is idle"))
            finally:
                found.put_nowait(None)

        looking = asyncio.ensure_future(tell_all())
        try:
            while (finding := await found.get()) is not None:
                yield finding
            await looking  # raises what broke
        finally:
            looking.cancel()

    # -- this machine alone -------------------------------------------------------------------------------

    async def _machine(self) -> AsyncIterator[Finding]:
        owners = list(importlib.metadata.packages_distributions().get("kernels", []))
        for finding in diagnosis.dependencies(unmet_requirements("homeswarm"), owners):
            yield finding
        yield diagnosis.gpu(self.folder.load_limits().gpu, await driver_gpus(), torch_cuda(), lacking_compiler())
        yield diagnosis.congestion(congestion_control())
        if not self.addresses:
            for finding in self._room(None, None):
                yield finding

    def _room(self, memory_bytes: int | None, disk_bytes: int | None) -> list[Finding]:
        limits = self.folder.load_limits()
        memory, disk = (None if gib is None else int(gib * GIB) for gib in (limits.memory_gib, limits.disk_gib))
        place = next(path for path in (self.folder.path, *self.folder.path.parents) if path.exists())
        free_memory = free_bytes()
        return [
            diagnosis.room("memory", free_memory, memory, memory_bytes, "memory-gib"),
            diagnosis.room("disk", shutil.disk_usage(place).free, disk, disk_bytes, "disk-gib"),
        ]

    # -- the network --------------------------------------------------------------------------------------

    async def _network(self) -> AsyncIterator[Finding]:
        """By py-libp2p in a process of its own, and by p2pd under a key of the moment: nothing is disturbed."""
        async with DialCheck() as libp2p:
            async for finding in self._dials(libp2p):
                yield finding

    async def _dials(self, libp2p: "DialCheck") -> AsyncIterator[Finding]:
        seeds = asyncio.ensure_future(libp2p.dial(self.addresses))
        try:
            transport = await asyncio.to_thread(_transport_maker, self.listen)
            opened = await transport()
        except (LocalError, SettingsError) as error:
            remedy = "choose another port with --listen HOST:PORT, or end what uses it"
            yield Finding("listening", Level.PROBLEM, f"{self.listen}: {error}", remedy)
            by_libp2p = await seeds
            for address in self.addresses:
                yield diagnosis.seed(_dialled(address, None, by_libp2p))
            return
        try:
            own = asyncio.ensure_future(libp2p.dial(opened.addresses()))
            by_p2pd = await self._reach(opened)
            by_libp2p = await seeds
            for address in self.addresses:
                yield diagnosis.seed(_dialled(address, by_p2pd, by_libp2p))
            async for finding in self._at_the_host(opened, by_p2pd):
                yield finding
            sees = {str(told["sees_us_at"]) for told in by_libp2p.values() if told.get("sees_us_at")}
            errors = {address: str(told["error"]) for address, told in (await own).items()}
            for finding in diagnosis.announced(opened.addresses(), errors, sorted(sees - self._dialled_at)):
                yield finding
        finally:
            await opened.close()

    async def _reach(self, transport: Any) -> dict[str, str]:
        if not self.addresses:
            return {}
        from peer.directory.reachability import dial_all

        failed = await dial_all(transport, _host(self.addresses), self.addresses)
        return {address: failed.get(address, "") for address in self.addresses}

    async def _at_the_host(self, transport: Any, by_p2pd: dict[str, str]) -> AsyncIterator[Finding]:
        """What only a seed that answers can tell."""
        peer_ids, runs_here = self._own_ids()
        answered = any(error == "" for error in by_p2pd.values())
        if self.addresses:
            yield await self._clock(transport) if answered else diagnosis.clock(None, 0.0)
            if answered:
                yield await self._reach_of_others(transport)
        for peer_id in peer_ids:
            ask = answered and not runs_here
            elsewhere = await self._answers(transport, peer_id) if ask else None
            yield diagnosis.identity(peer_id, runs_here=runs_here, answers_elsewhere=elsewhere)
        if self.addresses:
            for finding in await self._fit(transport) if answered else self._room(None, None):
                yield finding

    def _own_ids(self) -> tuple[list[PeerId], bool]:
        """Of this machine's peers, and whether their daemon runs."""
        from swarm.network.identity_file import load_identity

        try:
            self.folder.running_at()
            runs_here = True
        except NotRunningError:
            runs_here = False
        found = []
        for folder in self.folder.of_all():
            with contextlib.suppress(SettingsError):
                found.append(load_identity(folder.identity).peer_id)
        return found, runs_here

    def _num_peers(self) -> int:
        """That the daemon would have."""
        with contextlib.suppress(SettingsError, TransientError):  # which is told of the GPUs
            return len(chosen_gpus(self.folder.load_limits().gpu))
        return 1

    async def _clock(self, transport: Any) -> Finding:
        from swarm.network.directory.swarm_time import seconds_ahead

        try:
            return diagnosis.clock(*await seconds_ahead(transport, _host(self.addresses), timeout_s=PING_S))
        except (TransientError, RemoteError):
            return diagnosis.clock(None, 0.0)

    async def _reach_of_others(self, transport: Any) -> Finding:
        from peer.directory.reachability import through_router
        from swarm.host_protocol import RELAY, RelayOffer
        from swarm.network.router.port_mapper import PortMapper
        from swarm.network.transport import Message

        host, word = _host(self.addresses), ""
        mapper = PortMapper.of_this_home() if self.folder.load_limits().router_ports == "ask" else None
        try:
            told = await transport.ask_to_be_dialled(host)
            if told.is_silent(4) and mapper is not None:
                told, forwarded, word = await through_router(transport, host, mapper, told)
                if forwarded is not None:
                    await mapper.end(list(forwarded.ports))
            if told.answers:
                self._dialled_at |= {host for host in told.hosts if not ip_address(host).is_loopback}
            answer = await transport.call(host, RELAY, Message(), timeout_s=PING_S, max_body_bytes=0)
            refusal = RelayOffer.from_value(answer.meta).refusal
            return diagnosis.reach(f"{' and '.join(told.hosts)}{word}", told.answers, refusal)
        except (TransientError, RemoteError) as error:
            return Finding("reach", Level.WARNING, f"not looked at: {error}", "try again in a moment")

    async def _answers(self, transport: Any, peer_id: PeerId) -> bool:
        """Whether anybody with our key answers, found through the seeds."""
        from swarm.network.transport import Message

        with contextlib.suppress(TransientError, RemoteError):
            await transport.call(peer_id, "ping", Message(), timeout_s=PING_S, max_body_bytes=0)
            return True
        return False

    async def _fit(self, transport: Any) -> list[Finding]:
        from peer.directory.host import Host
        from swarm.core.pipeline.compute_mode import modes
        from swarm.core.plan import stage_memory_bytes, total_bytes
        from swarm.manifest.model import hidden_size, stage_num_parameters

        try:
            _, settings, _ = await Host(transport, _host(self.addresses)).run()
        except (TransientError, RemoteError, SettingsError) as error:
            return [Finding("run", Level.PROBLEM, str(error), "ask the run's host, or install the release it names")]
        counts, hidden = await asyncio.to_thread(
            lambda: (stage_num_parameters(settings.model), hidden_size(settings.model))
        )
        *_, least = modes(settings)
        items = [
            stage_memory_bytes(settings, count, hidden, "cpu", stage=i, mode=least) for i, count in enumerate(counts)
        ]
        num_peers = await asyncio.to_thread(self._num_peers)
        memory, disk = (min(total_bytes(item, place, num_peers) for item in items) for place in ("host", "disk"))
        return self._room(memory, disk)


def _host(addresses: Sequence[str]) -> PeerId:
    return PeerId(addresses[0].rpartition("/p2p/")[2])


def _transport_maker(listen: str) -> Any:
    """Imports what takes seconds, off the event loop."""
    from swarm.identity.key import Identity
    from swarm.network.addresses import listen_multiaddresses
    from swarm.network.p2pd.p2p import P2PSettings, P2PTransport

    return lambda: P2PTransport.create(Identity.generate(), P2PSettings(listen=listen_multiaddresses(listen)))


def _dialled(address: str, by_p2pd: dict[str, str] | None, by_libp2p: dict[str, dict[str, Any]]) -> Dialled:
    told = by_libp2p.get(address)
    return Dialled(
        address,
        None if by_p2pd is None else by_p2pd.get(address),
        None if told is None else str(told["error"]),
        float(told.get("ping_ms", 0.0)) if told is not None else 0.0,
    )
