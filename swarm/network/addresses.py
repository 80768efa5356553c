"""This is where HOST:PORT, as people write it, becomes a multiaddress, as libp2p does."""

from swarm.core.errors import SettingsError

MAX_PORT = 65535


def listen_multiaddress(listen: str) -> str:
    """`HOST:PORT` of a --listen option as a TCP multiaddress; HOST is a numeric address. Raises SettingsError."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > MAX_PORT:
        raise SettingsError(f"--listen {listen}: give HOST:PORT, such as 0.0.0.0:4001")
    kind = "ip6" if ":" in host else "ip4"
    return f"/{kind}/{host.strip('[]')}/tcp/{port}"
