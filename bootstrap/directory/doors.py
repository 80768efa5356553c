"""A host's doors to strangers: its gRPC service, its web page, and the invite that leads to them."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from bootstrap.directory.answers import CoordinatorAnswers
from bootstrap.program.dashboard import Dashboard
from bootstrap.program.host import Host
from swarm.core.errors import SettingsError
from swarm.disk.durable_lines import replace_lines
from swarm.invite import MAX_ADDRESSES, Invite
from swarm.network.directory.reachable import answering, host_and_port
from swarm.network.services.calls_of_strangers import ServiceLimits
from swarm.network.services.certificate import Certificate, load_or_create_certificate
from swarm.network.services.coordinator_service import CoordinatorServer
from swarm.network.services.web_site import WebSite
from swarm.network.transport import Transport
from swarm.release import PROTOCOL

log = logging.getLogger(__name__)

INVITE_FILE = "invite"
CERTIFICATE_FILE = "service.pem"


@dataclass(frozen=True, kw_only=True)
class DoorSettings:
    """Where the host listens besides p2p."""

    service: str = "127.0.0.1:0"
    """HOST:PORT of the gRPC service."""
    web: str | None = "127.0.0.1:0"
    """HOST:PORT of the web page and of Prometheus' metrics; None: neither."""
    public: str | None = None
    """Name or number by which strangers reach this machine; None: whichever of its addresses answers."""
    limits: ServiceLimits = field(default_factory=ServiceLimits)


class Doors:
    """Made by `open`."""

    def __init__(
        self, server: CoordinatorServer, site: WebSite | None, invite: Invite, web: str | None, settings: DoorSettings
    ) -> None:
        self._server = server
        self._site = site
        self.invite = invite
        self.web = web
        """Address of the web page."""
        self.settings = settings
        """With the ports that were had."""

    @classmethod
    async def open(
        cls,
        host: Host,
        transport: Transport,
        settings: DoorSettings,
        emit: Callable[[dict[str, Any]], None],
    ) -> "Doors":
        """Listen, and write the invite into the run's folder. Raises SettingsError."""
        run = host.run
        certificate = load_or_create_certificate(run.folder.root / CERTIFICATE_FILE)
        answers = CoordinatorAnswers(host)
        server = await CoordinatorServer.start(answers, settings.service, certificate, settings.limits)
        site = None
        try:
            if settings.web is not None:
                site = await WebSite.start(Dashboard(host), settings.web)
            addresses = await seed_addresses(transport.addresses(), settings.public, emit)
            invite = _invite(host, certificate, server.port, addresses, settings.public)
        except BaseException:
            await server.close()
            if site is not None:
                await site.close()
            raise
        replace_lines(run.folder.root / INVITE_FILE, [invite.line()])
        settings = replace(settings, service=_at(settings.service, server.port))
        if site is None or settings.web is None:
            return cls(server, None, invite, None, settings)
        listens_at = settings.web.rpartition(":")[0]
        settings = replace(settings, web=_at(settings.web, site.port))
        everywhere = listens_at.strip("[]") in ("0.0.0.0", "::", "")  # noqa: S104 - compared, not listened on
        return cls(server, site, invite, f"http://{invite.host if everywhere else listens_at}:{site.port}/", settings)

    async def close(self) -> None:
        await self._server.close()
        if self._site is not None:
            await self._site.close()


def _at(listen: str, port: int) -> str:
    return f"{listen.rpartition(':')[0]}:{port}"


def _invite(host: Host, certificate: Certificate, port: int, addresses: list[str], public: str | None) -> Invite:
    run = host.run
    name = public or host_and_port(addresses[0])[0]
    return Invite(
        host=f"[{name}]" if ":" in name and not name.startswith("[") else name,
        port=port,
        name=run.settings.name,
        protocol=PROTOCOL,
        run_id=run.run_id,
        run_key=run.run_key.peer_id,
        certificate=certificate.fingerprint,
        host_key=run.host_key.peer_id,
        addresses=tuple(addresses),
    )


async def seed_addresses(listened: list[str], public: str | None, emit: Callable[[dict[str, Any]], None]) -> list[str]:
    """Those that answer; this machine's own only if there is no other. With `public`, that one on top."""
    found = await answering(listened)
    remote = [address for address in found if not _is_loopback(address)]
    chosen = remote or found
    if public is not None:
        kind = _kind(public)
        same = [address for address in listened if address.startswith(f"/{kind}/")]  # whose ports are forwarded
        named = sorted({_with_host(address, public) for address in same or listened})
        answered = await answering(named)
        for address in named:
            if address not in answered:  # a router need not let us in by its outside, so the owner's word is taken
                emit({"event": "unverified", "address": address})
        chosen = [*named, *(address for address in chosen if address not in named)]
    if not chosen:
        raise SettingsError(
            f"none of {', '.join(listened) or 'this host'} takes a connection; give --listen an address of this machine"
        )
    return chosen[:MAX_ADDRESSES]


def _is_loopback(address: str) -> bool:
    host = host_and_port(address)[0]
    return host == "::1" or host.startswith("127.")


def _with_host(address: str, host: str) -> str:
    parts = address.split("/")
    parts[1], parts[2] = _kind(host), host.strip("[]")
    return "/".join(parts)


def _kind(host: str) -> str:
    """Of a multiaddress."""
    return "ip6" if ":" in host else "ip4" if host.replace(".", "").isdigit() else "dns"
