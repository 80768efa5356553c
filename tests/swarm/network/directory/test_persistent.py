"""hivemind's connection to p2pd goes on whatever comes on it, and keeps nothing of what has ended."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from uuid import UUID, uuid4

from hivemind.p2p import P2PDaemonError, PeerID
from hivemind.p2p.p2p_daemon_bindings.control import ControlClient, DaemonConnector
from hivemind.proto import p2pd_pb2

from swarm.identity.key import Identity, peer_id_bytes
from swarm.network.directory import persistent
from swarm.network.p2pd.control import delimited

LIMIT = 1000
"""Of a message's bytes, on this connection."""


class Connection:
    """hivemind's end of it, and what p2pd says."""

    def __init__(self) -> None:
        self.control = ControlClient(
            DaemonConnector(), _initialized_with_create=True, persistent_conn_max_msg_size=LIMIT
        )
        self._from_p2pd = asyncio.StreamReader()
        self.control._read_task = asyncio.ensure_future(self.control._read_from_persistent_conn(self._from_p2pd))
        self.reading = persistent.mend(SimpleNamespace(_client=self))

    def says(self, call_id: UUID, **what: object) -> None:
        message = p2pd_pb2.PersistentConnectionResponse(callId=call_id.bytes, **what)
        self._from_p2pd.feed_data(delimited(message.SerializeToString()))

    def asks(self, method: str) -> None:
        self.says(uuid4(), requestHandling=p2pd_pb2.CallUnaryRequest(peer=PEER, proto=method, data=b""))


PEER = peer_id_bytes(Identity.generate().peer_id)


def test_an_answer_to_a_question_that_was_given_up_in_the_same_moment_does_not_end_the_reading() -> None:
    async def main() -> None:
        connection = Connection()
        ask = connection.control.call_unary_handler
        given_up, goes_on = [asyncio.ensure_future(ask(PeerID(PEER), "ping", b"")) for _ in range(2)]
        await asyncio.sleep(0)
        late, other = connection.control._pending_calls
        for answer in (
            {"callUnaryResponse": p2pd_pb2.CallUnaryResponse(response=b"late")},
            {"callUnaryResponse": p2pd_pb2.CallUnaryResponse(error=b"late")},
            {"daemonError": p2pd_pb2.DaemonError(message="late")},
            {},
        ):
            connection.says(late, **answer)
        await asyncio.sleep(0)  # the reader is about to take it
        given_up.cancel()
        connection.says(other, callUnaryResponse=p2pd_pb2.CallUnaryResponse(response=b"in time"))
        async with asyncio.timeout(30):
            assert await goes_on == b"in time"
        assert not connection.reading.done()
        assert not dict.__len__(connection.control._pending_calls)
        connection.control.close()

    asyncio.run(main())


def test_handlers_that_fail_are_cancelled_or_answer_too_much_leave_nothing_behind() -> None:
    begun = asyncio.Event()

    async def raises(data: bytes, peer: PeerID) -> bytes:
        raise P2PDaemonError("no")

    async def is_long(data: bytes, peer: PeerID) -> bytes:
        return bytes(2 * LIMIT)

    async def waits(data: bytes, peer: PeerID) -> bytes:
        begun.set()
        await asyncio.sleep(60)
        return b""

    async def main() -> None:
        connection = Connection()
        handlers: dict[str, Callable[[bytes, PeerID], Awaitable[bytes]]]
        handlers = {"raises": raises, "long": is_long, "waits": waits}
        connection.control.unary_handlers.update(handlers)
        for method in (*handlers, "not served"):
            connection.asks(method)
        async with asyncio.timeout(30):
            await begun.wait()
            while len(connection.control._handler_tasks) > 1:  # noqa: ASYNC110 - tasks end
                await asyncio.sleep(0.01)
        (waiting,) = connection.control._handler_tasks
        connection.says(waiting, cancel=p2pd_pb2.Cancel())
        async with asyncio.timeout(30):
            while connection.control._handler_tasks:  # noqa: ASYNC110 - tasks end
                await asyncio.sleep(0.01)
        assert not connection.reading.done()
        connection.control.close()

    asyncio.run(main())
