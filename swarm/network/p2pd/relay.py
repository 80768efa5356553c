"""A p2pd that does nothing else than carry strangers who cannot be dialled to each other.

Of its own, so that what it carries is counted apart and can be ended without ending us. It sees neither what it
carries, which is sealed between the two ends, nor more of anybody than addresses.
"""

import asyncio
import contextlib
import socket
from collections.abc import Sequence

from swarm.core.errors import LocalError, TransientError
from swarm.core.ids import PeerId
from swarm.identity.key import Identity
from swarm.network.p2pd.control import ControlClient, ControlError
from swarm.network.p2pd.p2p import P2PTransport
from swarm.network.p2pd.processes import P2PDaemon
from swarm.network.p2pd.settings import check_address, is_tcp

MAX_PLACES = 128
MAX_CONNECTIONS_OF_A_PEER = 64
CONNECTION_S = 24 * 3600
_START_S = 60.0
_STARTS = 20
"""About one in five leaves p2pd with limits of its own: two parts of it each set up a relay, and the last one wins."""
_ASK_S = 5.0
_MAX_METRICS_BYTES = 4 << 20
_CARRIED = b"libp2p_relaysvc_data_transferred_bytes_total "


class Relay:
    """A running relay. Made by `start`."""

    def __init__(self, peer_id: PeerId, daemon: P2PDaemon, addresses: list[str], metrics_port: int) -> None:
        self.peer_id = peer_id
        self.addresses = addresses
        """Multiaddresses it listens at, each ending in `/p2p/<peer id>`."""
        self.ended = daemon.ended
        self._daemon = daemon
        self._metrics_port = metrics_port

    @classmethod
    async def start(cls, identity: Identity, listen: Sequence[str], max_bytes: int, asker: P2PTransport) -> "Relay":
        """`max_bytes`: of one connection, each way; `asker` tries the relay. Raises LocalError when it does not start.

        `listen` must have an address that `asker` can dial, or a wildcard.
        """
        for address in listen:
            check_address("listen", address)
        for _ in range(_STARTS):
            made = await cls._start(identity, listen, max_bytes)
            try:
                await asker.connect(made.peer_id, made.addresses)
                place = await asker.take_place(made.peer_id)
                await asker.disconnect(made.peer_id)
                if place.limit_bytes == max_bytes:
                    return made
            except TransientError as error:
                await made.stop()
                raise LocalError(f"the relay at {', '.join(listen)} was started, but: {error}") from error
            except BaseException:
                await made.stop()
                raise
            await made.stop()
        raise LocalError(f"the relay did not keep to {max_bytes} bytes a connection in {_STARTS} starts")

    @classmethod
    async def _start(cls, identity: Identity, listen: Sequence[str], max_bytes: int) -> "Relay":
        metrics_port = _free_port()
        arguments = [
            *("-b=0", "-noise=1", "-tls=1", "-connManager=1"),
            *("-relay=1", "-relayService=1", "-forceReachabilityPublic=1"),
            *(f"-relayMaxReservations={MAX_PLACES}", f"-relayMaxCircuits={MAX_CONNECTIONS_OF_A_PEER}"),
            *(f"-relayDataLimit={max_bytes}", f"-relayTimeLimit={CONNECTION_S}s"),
            *(f"-metricsAddr=127.0.0.1:{metrics_port}", f"-hostAddrs={','.join(listen)}"),
        ]
        daemon = await P2PDaemon.start(arguments, key_file_bytes=identity.to_key_file_bytes(), timeout_s=_START_S)
        try:
            async with asyncio.timeout(_START_S):
                peer_id, addresses = await ControlClient(daemon.control_path).identify()
        except (ControlError, TimeoutError) as error:
            await daemon.stop()
            raise LocalError(f"the relay's p2pd started but does not answer: {error}") from error
        return cls(peer_id, daemon, [f"{at}/p2p/{peer_id}" for at in addresses if is_tcp(at)], metrics_port)

    async def carried_bytes(self) -> int:
        """Both ways together, since its start. Raises LocalError when p2pd does not say."""
        try:
            async with asyncio.timeout(_ASK_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", self._metrics_port, limit=1 << 16)
                try:
                    writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
                    told = await _read_all(reader)
                finally:
                    writer.close()
                    with contextlib.suppress(OSError):
                        await writer.wait_closed()
            _, found, rest = told.partition(b"\n" + _CARRIED)
            if not found:
                raise ValueError("its figures lack what it carried")
            return int(float(rest.split(b"\n", 1)[0]))
        except (OSError, ValueError, TimeoutError) as error:
            raise LocalError(f"the relay's p2pd does not say what it carried: {error}") from error

    async def stop(self) -> None:
        """All connections through it end."""
        await self._daemon.stop()


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    told = bytearray()
    while chunk := await reader.read(1 << 16):
        told += chunk
        if len(told) > _MAX_METRICS_BYTES:
            raise ValueError(f"its figures are over {_MAX_METRICS_BYTES} bytes")
    return bytes(told)


def _free_port() -> int:
    """p2pd tells its figures over TCP alone, and does not choose a port itself."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])
