"""The p2pd transport meets peers that keep to no contract, and limits of its own."""

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import pytest

from swarm.core.canonical import pack
from swarm.core.errors import RemoteError, SettingsError, TransientError
from swarm.core.ids import PeerId
from swarm.identity.key import Identity
from swarm.network.bulk.framing import read_request_head
from swarm.network.bulk.sockets import prepare, receive
from swarm.network.loop import new_event_loop
from swarm.network.p2pd.control import ControlClient, read_stream_peer
from swarm.network.p2pd.p2p import P2PSettings, P2PTransport
from swarm.network.p2pd.processes import P2PDaemon
from swarm.network.transport import MAX_META_BYTES, Message
from swarm.release import PROTOCOL

pytestmark = pytest.mark.processes

T = TypeVar("T")
PROTOCOL_ID = f"/homeswarm/{PROTOCOL}/call"
MAGIC = 0x68737731
SETTINGS = P2PSettings(listen=("/ip4/127.0.0.1/tcp/0",), window_s=1.5)


class Stranger:
    """A peer that writes what it likes on the streams it opens, and answers those it is asked on with `script`."""

    def __init__(self, identity: Identity, daemon: P2PDaemon) -> None:
        self.peer_id = identity.peer_id
        self.daemon = daemon
        self.control = ControlClient(daemon.control_path)
        self.script = b""
        self.hang_up = True
        self._listener = socket.socket(socket.AF_UNIX)
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def create(cls) -> "Stranger":
        identity = Identity.generate()
        arguments = ["-hostAddrs=/ip4/127.0.0.1/tcp/0", "-b=0", "-dhtServer=1"]
        key = identity.to_key_file_bytes()
        stranger = cls(identity, await P2PDaemon.start(arguments, key_file_bytes=key, timeout_s=60))
        path = stranger.daemon.folder / "stranger.sock"
        stranger._listener.setblocking(False)
        stranger._listener.bind(str(path))
        stranger._listener.listen()
        await stranger.control.accept_streams(PROTOCOL_ID, path)
        stranger._tasks.add(asyncio.create_task(stranger._serve()))
        return stranger

    async def addresses(self) -> list[str]:
        return [f"{address}/p2p/{self.peer_id}" for address in (await self.control.identify())[1]]

    async def say(self, peer_id: PeerId, data: bytes) -> bytes:
        """Write `data` on a new stream and return all that comes back until the peer hangs up."""
        loop = asyncio.get_running_loop()
        stream = await self.control.open_stream(peer_id, PROTOCOL_ID)
        heard = b""
        try:
            await loop.sock_sendall(stream, data)
            async with asyncio.timeout(30):
                while more := await loop.sock_recv(stream, 65536):
                    heard += more
                    if len(heard) > 13 and len(heard) >= 17 + struct.unpack(">IBIQ", heard[:17])[2]:
                        break
        finally:
            stream.close()
        return heard

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(self.daemon.stop(), *self._tasks, return_exceptions=True)
        self._listener.close()

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            stream, _ = await loop.sock_accept(self._listener)
            prepare(stream)
            self._tasks.add(asyncio.create_task(self._answer(stream)))

    async def _answer(self, stream: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            await read_stream_peer(stream)
            # All of it: closing over unread bytes would make p2pd drop the answer.
            await receive(stream, (await read_request_head(stream)).meta_bytes)
            await loop.sock_sendall(stream, self.script)
            while not self.hang_up and await loop.sock_recv(stream, 65536):
                pass
        finally:
            stream.close()


class Scene:
    """`slow` is answered once `go_on` is set; `all_wait` is set when as many wait as one peer has places."""

    def __init__(self, run: Callable[[Awaitable[T]], T], honest: P2PTransport, stranger: Stranger) -> None:
        self.run = run
        self.honest = honest
        self.stranger = stranger
        self.all_wait, self.go_on = asyncio.Event(), asyncio.Event()
        self._num_slow = 0
        honest.serve("slow", self._slow, max_body_bytes=0)

    async def _slow(self, _: PeerId, __: Message) -> Message:
        self._num_slow += 1
        if self._num_slow == SETTINGS.limits.max_calls_per_peer:
            self.all_wait.set()
        await self.go_on.wait()
        return Message()


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with asyncio.Runner(loop_factory=new_event_loop) as runner:

        async def set_up() -> tuple[P2PTransport, Stranger]:
            honest = await P2PTransport.create(Identity.generate(), SETTINGS)
            stranger = await Stranger.create()
            await honest.connect(stranger.peer_id, await stranger.addresses())

            async def echo(_: PeerId, request: Message) -> Message:
                return request

            honest.serve("echo", echo, max_body_bytes=1000)
            return honest, stranger

        honest, stranger = runner.run(set_up())
        yield Scene(runner.run, honest, stranger)
        runner.run(stranger.close())
        runner.run(honest.close())
        assert asyncio.all_tasks(runner.get_loop()) == set()


def request_bytes(*, magic: int = MAGIC, method: bytes = b"echo", meta: bytes = b"\x80", body: bytes = b"") -> bytes:
    return struct.pack(">IHIIQ", magic, len(method), 10_000, len(meta), len(body)) + method + meta + body


def reply_bytes(*, magic: int = MAGIC, status: int = 0, meta: bytes = b"\x80", body: bytes = b"") -> bytes:
    return struct.pack(">IBIQ", magic, status, len(meta), len(body)) + meta + body


def test_well_formed_request_of_a_stranger_is_answered(scene: Scene) -> None:
    heard = scene.run(scene.stranger.say(scene.honest.peer_id, request_bytes(meta=pack({"a": 1}))))
    assert heard == reply_bytes(meta=pack({"a": 1}))


def test_answer_is_kept_until_its_caller_has_read_it(scene: Scene) -> None:
    answer = reply_bytes(meta=pack({"a": 1}))

    async def main() -> bytes:
        loop = asyncio.get_running_loop()
        stream = await scene.stranger.control.open_stream(scene.honest.peer_id, PROTOCOL_ID)
        with contextlib.closing(stream):
            await loop.sock_sendall(stream, request_bytes(meta=pack({"a": 1})))
            heard = await receive(stream, len(answer))
            # Were the answering side to hang up first, p2pd would drop what is still under way, now and then.
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(SETTINGS.window_s / 3):
                    await loop.sock_recv(stream, 1)
            return bytes(heard)

    assert scene.run(main()) == answer


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (request_bytes(magic=1), b"malformed"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"malformed"),
        (request_bytes(method=b"e" * 65), b"malformed"),
        (request_bytes(method=b"\xff\xfe"), b"malformed"),
        (request_bytes(meta=b""), b"malformed"),
        (request_bytes(meta=b"\x01"), b"malformed"),
        (request_bytes(meta=b"\x81\xa1a"), b"malformed"),
        (request_bytes(body=bytes(1001)), b"too_large"),
        (struct.pack(">IHIIQ", MAGIC, 4, 1, MAX_META_BYTES + 1, 0) + b"echo", b"too_large"),
        (struct.pack(">IHIIQ", MAGIC, 4, 1, 1, 2**64 - 1) + b"echo", b"too_large"),
    ],
)
def test_malformed_request_is_answered_by_an_error_and_nothing_worse(scene: Scene, data: bytes, kind: bytes) -> None:
    heard = scene.run(scene.stranger.say(scene.honest.peer_id, data))
    assert heard[:5] == struct.pack(">IB", MAGIC, 2)
    assert kind in heard
    test_well_formed_request_of_a_stranger_is_answered(scene)


def test_request_that_stalls_mid_body_is_dropped_and_gives_its_place_back(scene: Scene) -> None:
    most = SETTINGS.limits.max_calls_per_peer
    half = request_bytes(body=bytes(1000))[:-500]

    async def main() -> None:
        # More in all than there are places: each hears nothing but the end of its stream.
        for _ in range(3):
            heard = await asyncio.gather(*(scene.stranger.say(scene.honest.peer_id, half) for _ in range(most // 2)))
            assert heard == [b""] * (most // 2)

    scene.run(main())
    test_well_formed_request_of_a_stranger_is_answered(scene)


def test_who_has_all_places_of_a_peer_is_told_so_at_once(scene: Scene) -> None:
    most = SETTINGS.limits.max_calls_per_peer

    async def main() -> bytes:
        asked = [
            asyncio.ensure_future(scene.stranger.say(scene.honest.peer_id, request_bytes(method=b"slow")))
            for _ in range(most)
        ]
        async with asyncio.timeout(30):
            await scene.all_wait.wait()
        refused = await scene.stranger.say(scene.honest.peer_id, request_bytes(method=b"slow"))
        scene.go_on.set()
        assert await asyncio.gather(*asked) == [reply_bytes()] * most
        return refused

    assert b"busy: 64 open calls of slow, 64 of yours" in scene.run(main())
    test_well_formed_request_of_a_stranger_is_answered(scene)


@pytest.mark.parametrize(
    ("script", "error", "said"),
    [
        (b"", TransientError, "broke off"),
        (reply_bytes()[:10], TransientError, "broke off"),
        (reply_bytes(body=bytes(50))[:-1], TransientError, "broke off"),
        (reply_bytes(magic=0), RemoteError, "begins with"),
        (reply_bytes(status=7), RemoteError, "status 7"),
        (reply_bytes(meta=b"\xc1"), RemoteError, "canonical"),
        (reply_bytes(meta=b"\x90"), RemoteError, "not a map"),
        (reply_bytes(body=bytes(101)), RemoteError, "over the limit of 100"),
        (struct.pack(">IBIQ", MAGIC, 0, 2**32 - 1, 0), RemoteError, "over the limit"),
        (struct.pack(">IBIQ", MAGIC, 0, 1, 2**64 - 1) + b"\x80", RemoteError, "over the limit"),
        (struct.pack(">IBIQ", MAGIC, 2, 1, 100) + b"\x80", RemoteError, "over the limit"),
        (reply_bytes(status=2), RemoteError, "without kind and message"),
        (reply_bytes(status=2, meta=pack({"kind": "a b\n", "message": "\x00x"})), RemoteError, r"\?x"),
        (reply_bytes(status=1, meta=pack({"kind": "transient", "message": "busy"})), TransientError, "busy"),
    ],
)
def test_malformed_answer_is_the_peers_fault_and_a_broken_one_is_transient(
    scene: Scene, script: bytes, error: type[Exception], said: str
) -> None:
    scene.stranger.script, scene.stranger.hang_up = script, True
    with pytest.raises(error, match=said) as info:
        scene.run(scene.honest.call(scene.stranger.peer_id, "anything", Message(), timeout_s=5, max_body_bytes=100))
    if isinstance(info.value, RemoteError):
        assert info.value.peer_id == scene.stranger.peer_id
        assert info.value.kind.isidentifier()


@pytest.mark.parametrize("script", [b"", reply_bytes()[:10], reply_bytes(body=bytes(50))[:-1]])
def test_answer_that_stalls_ends_at_the_deadline(scene: Scene, script: bytes) -> None:
    scene.stranger.script, scene.stranger.hang_up = script, False

    async def main() -> float:
        start = asyncio.get_running_loop().time()
        with pytest.raises(TransientError, match=r"no answer to x in [01]\.\d+ s"):
            await scene.honest.call(scene.stranger.peer_id, "x", Message(), timeout_s=0.1, max_body_bytes=100)
        return asyncio.get_running_loop().time() - start

    assert scene.run(main()) < 2.0


def test_peer_that_does_not_read_ends_at_the_deadline(scene: Scene) -> None:
    # 64 MiB are more than all buffers between the two hold.
    scene.stranger.script, scene.stranger.hang_up = b"", False

    async def main() -> None:
        with pytest.raises(TransientError, match=r"no answer to x in 0\.\d+ s"):
            await scene.honest.call(
                scene.stranger.peer_id, "x", Message({}, bytes(64 << 20)), timeout_s=0.3, max_body_bytes=100
            )

    scene.run(main())
    test_well_formed_request_of_a_stranger_is_answered(scene)


async def dials_too(listener: socket.socket) -> None:
    """Whoever connects finds an end that thinks it has dialled as well: by noise it begins where it should answer."""
    loop = asyncio.get_running_loop()
    connection, _ = await loop.sock_accept(listener)

    async def next_line() -> bytes:
        return await receive(connection, (await receive(connection, 1))[0])

    with connection:
        prepare(connection)
        proposed = [await next_line()]
        await loop.sock_sendall(connection, bytes([len(proposed[0])]) + proposed[0])
        while (line := await next_line()) != b"/noise\n":
            proposed.append(line)
            await loop.sock_sendall(connection, b"\x03na\n")
        await loop.sock_sendall(connection, bytes([len(line)]) + line + struct.pack(">H", 32) + os.urandom(32))
        with contextlib.suppress(ConnectionResetError):
            while await loop.sock_recv(connection, 4096):
                pass


def test_two_that_dial_each_other_at_the_same_moment_are_connected_all_the_same(scene: Scene) -> None:
    """On lines of 40 ms that is whenever both dial within as much."""

    async def main() -> None:
        other = await P2PTransport.create(Identity.generate(), SETTINGS)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            address = f"/ip4/127.0.0.1/tcp/{listener.getsockname()[1]}"
            crossing = asyncio.create_task(dials_too(listener))
            dialling = asyncio.create_task(scene.honest.connect(other.peer_id, [address]))
            await asyncio.wait_for(crossing, 10)
            assert not dialling.done()
            await other.connect(scene.honest.peer_id, scene.honest.addresses())
            await asyncio.wait_for(dialling, 10)
        assert other.peer_id in await scene.honest.connected_peers()
        await other.close()

    scene.run(main())


@pytest.mark.parametrize(
    ("field", "address", "remedy"),
    [
        ("listen", "/ip4/0.0.0.0/udp/0/quic-v1", "plain TCP"),
        ("listen", "0.0.0.0:31000", "no multiaddress"),
        ("listen", "/ip4/1.2.3.4/tcp/1,/ip4/1.2.3.4/udp/1", "no multiaddress"),
        ("announce", "/ip4/300.0.0.1/tcp/1", "no multiaddress"),
        ("announce", "/ip4/203.0.113.5/tcp/0", "port 0"),
        ("announce", "x" * 1000, "no multiaddress"),
        ("announce", "/ip4/203.0.113.5/tcp/4001/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", "Ed25519"),
    ],
)
def test_settings_name_the_field_and_the_remedy(field: str, address: str, remedy: str) -> None:
    with pytest.raises(SettingsError, match=rf"{field}.*{remedy}"):
        P2PSettings(**{field: (address,)})  # type: ignore[arg-type]


def test_settings_take_names_and_both_kinds_of_ip() -> None:
    P2PSettings(listen=("/ip4/0.0.0.0/tcp/31000", "/ip6/::/tcp/31000"), announce=("/dns4/seed.example.org/tcp/31000",))
