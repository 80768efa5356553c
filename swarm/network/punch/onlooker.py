"""An onlooker: who says where it saw a peer's connection come from. Any peer that can be dialled is one.

Asked for over p2pd, as a direct stream is, and answered on a stream of that kind: the word is read by no one else, and
nobody has one made of a connection that is not its own. The connection stays a while, so that the peer's router keeps
the port that was seen.
"""

import asyncio
import socket

from swarm.core.canonical import pack, unpack
from swarm.core.errors import RemoteError
from swarm.core.ids import PeerId
from swarm.identity.key import Identity
from swarm.network.bulk.direct import DirectOffer, answered, opened
from swarm.network.bulk.sealed_socket import SealedSocket
from swarm.network.bulk.sessions import Sessions
from swarm.network.bulk.sockets import receive, send_all, until_closed
from swarm.network.directory.swarm_time import swarm_time
from swarm.network.punch.ports import LocalPort
from swarm.network.punch.seen import Endpoint, Seen

ONLOOKER = "onlooker"
"""{} -> a direct offer, of streams on which a `Seen` comes and nothing else."""
HELD_S = 15.0
_VALID_S = 20.0
_MOST_SESSIONS = 256
_MOST_HELD = 256
_MAX_WORD_BYTES = 1024
_LENGTH_BYTES = 2


class Onlooker:
    """The side that sees."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._sessions = Sessions(_MOST_SESSIONS)
        self._held: set[asyncio.Task[None]] = set()

    def offer(self, peer_id: PeerId, host: str | None, port4: int | None, port6: int | None) -> DirectOffer:
        """For a peer seen at this address, which may connect a few times within `_VALID_S`."""
        now = asyncio.get_running_loop().time()
        session, secret = self._sessions.offer(peer_id, host, now=now, valid_s=_VALID_S)
        return DirectOffer(session, secret, port4, port6)

    def knows(self, session: bytes) -> bool:
        return self._sessions.valid(session, now=asyncio.get_running_loop().time()) is not None

    async def answer(self, session: bytes, connection: socket.socket) -> None:
        """Say where this connection is from. Raises OSError or EOFError. The caller sets a deadline, and closes."""
        known = self._sessions.valid(session, now=asyncio.get_running_loop().time())
        if known is None:
            raise ConnectionRefusedError("a session of an onlooker that was not offered, or is over")
        host, port = connection.getpeername()[:2]
        stream = await answered(connection, session, known.secret, caller=known.peer_id, callee=self._identity.peer_id)
        at_ms = round(swarm_time.now() * 1000)
        word = Seen(self._identity.peer_id, known.peer_id, host, port, at_ms).signed_by(self._identity)
        data = pack(word.to_value())
        await send_all(stream, len(data).to_bytes(_LENGTH_BYTES, "big") + data)
        if len(self._held) < _MOST_HELD:
            task = asyncio.create_task(_hold(connection.dup()), name="a held connection")
            self._held.add(task)
            task.add_done_callback(self._held.discard)

    async def close(self) -> None:
        tasks = list(self._held)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _hold(connection: socket.socket) -> None:
    connection.setblocking(False)
    with connection:
        try:
            async with asyncio.timeout(HELD_S):
                await until_closed(connection)
        except TimeoutError:
            return


async def where_seen(
    port: LocalPort, at: Endpoint, offer: DirectOffer, *, me: PeerId, onlooker: PeerId
) -> tuple[Seen, SealedSocket]:
    """What an onlooker says of a connection from this port, and the connection, to be closed after the punch.

    Raises OSError, EOFError, or RemoteError for a word that is not on this peer. The caller sets a deadline.
    """
    connection = await port.connect(at)
    try:
        stream = await opened(connection, offer, caller=me, callee=onlooker)
        length = int.from_bytes(await receive(stream, _LENGTH_BYTES), "big")
        if length > _MAX_WORD_BYTES:
            raise RemoteError("too_large", f"an onlooker's word of {length} bytes", onlooker)
        word = Seen.from_value(unpack(await receive(stream, length), max_bytes=_MAX_WORD_BYTES))
    except BaseException:
        connection.close()
        raise
    if word.peer_id != me or word.onlooker != onlooker:
        stream.close()
        raise RemoteError("malformed", "an onlooker's word that is another's, or on another", onlooker)
    return word, stream
