"""How a peer listens, dials and limits what others ask of it, and what p2pd is told of that."""

import socket
from dataclasses import dataclass, field

from hivemind.utils.multiaddr import Multiaddr

from swarm.core.errors import SettingsError
from swarm.core.ids import PeerId
from swarm.core.transfers import WINDOW_S
from swarm.identity.key import is_peer_id
from swarm.network.service import ServiceLimits

_MAX_ADDRESS_CHARACTERS = 300


@dataclass(frozen=True, kw_only=True)
class P2PSettings:
    """How a peer listens and what it takes on for others."""

    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    """TCP multiaddresses to listen on; port 0 lets the system choose. Empty: dial out only."""
    announce: tuple[str, ...] = ()
    """TCP multiaddresses others should dial instead, such as a forwarded port. Empty: those listened on."""
    direct_port: int | None = 0
    """Port for streams that carry bulk past p2pd, on the hosts in `listen`; 0 lets the system choose. Behind a router
    it must be forwarded too, or bulk goes through p2pd. None: always through p2pd."""
    punch_public_only: bool = True
    """Punched connections go to public addresses alone, whoever names others. Off in tests on one machine."""
    threads: int = 1
    """Cores p2pd may use. One carries some Gbit/s; with more, the same bytes take up to twice the CPU time."""
    start_s: float = 60.0
    """p2pd must listen by then. Nothing is dialled before."""
    connect_s: float = 10.0
    """One attempt to dial a peer at all its addresses."""
    window_s: float = WINDOW_S
    """What is being transferred is given up when too little of it has moved for this long (`swarm.core.transfers`)."""
    longest_call_s: float = 3600.0
    """A handler that takes longer is cancelled, whatever deadline its caller announced."""
    max_streams: int = 512
    """Incoming streams at a time, those being refused included."""
    limits: ServiceLimits = field(default_factory=ServiceLimits)

    def __post_init__(self) -> None:
        for name in ("listen", "announce"):
            for address in getattr(self, name):
                check_address(name, address)
        if any("/tcp/0/" in f"{address}/" for address in self.announce):
            raise SettingsError(f"announce = {list(self.announce)}: port 0 cannot be dialled; name the forwarded port")


def p2pd_arguments(settings: P2PSettings) -> list[str]:
    """p2pd's flags. Those not named keep their defaults: connections pruned above 512, yamux, TLS and noise on."""
    arguments = [
        "-dhtServer=1",  # p2pd's own table only finds addresses of peer ids
        "-connManager=1",
        "-noise=1",
        "-tls=1",
        "-b=0",  # dialling seeds is ours to do and to repeat: a start must not depend on them
        "-natPortMap=0",  # it would tell nobody which, and not of direct streams' (`swarm.network.router`)
        "-relay=0",  # carries nothing for strangers; places at relays are taken all the same (`relay_place`)
        "-relayService=0",
    ]
    if settings.listen:
        arguments.append(f"-hostAddrs={','.join(settings.listen)}")
    else:
        arguments.append("-noListenAddrs=1")
    if settings.announce:
        arguments.append(f"-announceAddrs={','.join(settings.announce)}")
    return arguments


def direct_hosts(settings: P2PSettings) -> list[tuple[socket.AddressFamily, str]]:
    """Where direct streams are listened for: at most one host of each family."""
    hosts: dict[socket.AddressFamily, str] = {}
    for address in settings.listen:
        match address.split("/"):
            case ["", "ip4", host, "tcp", *_]:
                hosts.setdefault(socket.AF_INET, host)
            case ["", "ip6", host, "tcp", *_]:
                hosts.setdefault(socket.AF_INET6, host)
    return list(hosts.items())


def is_relayed(address: str) -> bool:
    """Whether it leads through a relay."""
    return "/p2p-circuit" in address


def is_tcp(address: str) -> bool:
    protocols = address.split("/")
    return "tcp" in protocols and not {"udp", "quic", "quic-v1", "ws", "wss", "webtransport"} & set(protocols)


def check_address(field: str, address: str) -> None:
    try:
        if len(address) > _MAX_ADDRESS_CHARACTERS or "," in address:
            raise ValueError("too long, or several")
        Multiaddr(address)
        for hop in address.split("/p2p/")[1:]:
            if not is_peer_id(PeerId(hop.partition("/")[0])):
                raise ValueError("it names no Ed25519 peer id")
    except ValueError as error:
        raise SettingsError(
            f"{field}: {address[:_MAX_ADDRESS_CHARACTERS]!r} is no multiaddress ({error}); "
            "write for example /ip4/203.0.113.5/tcp/31000"
        ) from error
    if not is_tcp(address):
        raise SettingsError(f"{field}: {address!r} is not plain TCP, the one transport used; write /ip4/.../tcp/...")
