"""Streams that say nothing cost those nothing that have a name, from however many addresses they come."""

import asyncio
import contextlib
import socket
from pathlib import Path

import pytest

from swarm.core.errors import TransientError
from swarm.core.ids import PeerId
from swarm.network.answering import Answering, AnsweringLimits
from swarm.network.bulk import framing
from swarm.network.bulk.sockets import Stream, send_all
from swarm.network.loop import new_event_loop
from swarm.network.service import SHORT_META_BYTES, STRANGERS_SHARE, ServiceLimits, Services
from swarm.network.transport import Message

LIMITS = AnsweringLimits(window_s=30.0, longest_call_s=30.0, max_streams=16)
NETWORKS = 200
"""Of one address each: more than there are places for strangers."""


async def _silent(connection: socket.socket) -> tuple[PeerId, Stream]:
    await asyncio.sleep(60)
    raise AssertionError


async def _named(connection: socket.socket) -> tuple[PeerId, Stream]:
    connection.setblocking(False)
    return PeerId("named"), connection


def _listening(family: socket.AddressFamily, place: str | tuple[str, int]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind(place)
    listener.listen(256)
    listener.setblocking(False)
    return listener


async def _echo(sender: PeerId, request: Message) -> Message:
    return request


def test_connections_from_many_networks_take_no_place_from_a_stream_that_was_named(tmp_path: Path) -> None:
    async def main() -> bytes:
        loop = asyncio.get_running_loop()
        services = Services(ServiceLimits())
        services.serve("echo", _echo, max_body_bytes=8)
        answering = Answering(services, framing.Sent(), LIMITS)
        direct = _listening(socket.AF_INET, ("127.0.0.1", 0))
        by_p2pd = _listening(socket.AF_UNIX, str(tmp_path / "calls.sock"))
        answering.start(direct, _silent)
        answering.start(by_p2pd, _named)
        caller = socket.socket(socket.AF_UNIX)
        caller.setblocking(False)
        silent = []
        try:
            await loop.sock_connect(caller, str(tmp_path / "calls.sock"))
            await asyncio.sleep(0.05)  # it was named, and has said nothing yet
            for network in range(NETWORKS):
                one = socket.socket()
                one.bind((f"127.0.{network + 1}.1", 0))
                one.setblocking(False)
                silent.append(one)
                await loop.sock_connect(one, direct.getsockname())
            await asyncio.sleep(0.05)
            return await _asked(caller)
        finally:
            for one in (caller, *silent):
                one.close()
            await answering.stop()
            direct.close()
            by_p2pd.close()

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        assert runner.run(main()) == b"answered"


async def _asked(caller: socket.socket) -> bytes:
    """What a call on the stream is answered with."""
    head, body = framing.encode_request("echo", Message({}, b"answered"), timeout_s=5.0)
    await send_all(caller, head + b"".join(body))
    async with asyncio.timeout(30):
        reply = await framing.read_reply_head(caller)
        return bytes((await framing.read_content(caller, reply, window_s=5.0)).body)


def test_keys_of_one_address_that_prove_nothing_cut_off_neither_members_nor_who_is_elsewhere() -> None:
    names = iter(["member", "elsewhere", *(f"stranger {number}" for number in range(NETWORKS))])

    async def greet(connection: socket.socket) -> tuple[PeerId, Stream]:
        connection.setblocking(False)
        return PeerId(next(names)), connection

    async def main() -> None:
        loop = asyncio.get_running_loop()
        services = Services(ServiceLimits())
        services.expect({PeerId("member")})
        services.serve("echo", _echo, max_body_bytes=8)
        answering = Answering(services, framing.Sent(), LIMITS)
        listener = _listening(socket.AF_INET, ("127.0.0.1", 0))
        answering.start(listener, greet)
        opened = []
        try:
            for number in range(NETWORKS + 2):
                caller = socket.socket()
                caller.bind(("127.0.9.1" if number == 1 else "127.0.0.1", 0))
                caller.setblocking(False)
                opened.append(caller)
                await loop.sock_connect(caller, listener.getsockname())
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.05)
            for caller in opened[:2]:
                assert await _asked(caller) == b"answered"
        finally:
            for one in opened:
                one.close()
            await answering.stop()
            listener.close()

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main())


def test_one_peer_announces_a_quarter_of_what_all_may() -> None:
    services, peer = Services(ServiceLimits(max_incoming_bytes=400)), PeerId("a")
    services.serve("echo", _echo, max_body_bytes=400)
    with services.admitted(peer, "echo", 40):
        with pytest.raises(TransientError, match="busy"), services.admitted(peer, "echo", 61):
            pass
        with services.admitted(peer, "echo", 60), services.admitted(PeerId("b"), "echo", 100):
            pass
    with services.admitted(peer, "echo", 100):
        pass


def test_strangers_share_a_quarter_of_each_limit_once_somebody_is_expected() -> None:
    services, member = Services(ServiceLimits(max_calls_per_method=8, max_incoming_bytes=400)), PeerId("member")
    services.serve("echo", _echo, max_body_bytes=400)
    with contextlib.ExitStack() as held:
        for number in range(4):
            held.enter_context(services.admitted(PeerId(f"{number}"), "echo", 20))
    services.expect({member})
    with contextlib.ExitStack() as held:
        for number in range(2):
            held.enter_context(services.admitted(PeerId(f"{number}"), "echo", 20))
        with pytest.raises(TransientError, match="not known here"), services.admitted(PeerId("2"), "echo", 1):
            pass
        for _ in range(5):
            held.enter_context(services.admitted(member, "echo", 20))
    with services.admitted(PeerId("2"), "echo", 60):
        with pytest.raises(TransientError, match="not known here"), services.admitted(PeerId("3"), "echo", 41):
            pass
        with services.admitted(PeerId("3"), "echo", 40), services.admitted(member, "echo", 100):
            pass


def test_one_stranger_and_those_with_long_headers_have_a_quarter_of_strangers_places_each() -> None:
    """64 streams of one key, each with a header that drips, held all of a method's for an hour."""
    services, long = Services(ServiceLimits(max_calls_per_method=64)), SHORT_META_BYTES + 1
    services.serve("echo", _echo, max_body_bytes=8)
    services.expect({PeerId("member")})
    with contextlib.ExitStack() as held:
        for _ in range(4):
            held.enter_context(services.admitted(PeerId("liar"), "echo", 0))
        with pytest.raises(TransientError, match="not known here"), services.admitted(PeerId("liar"), "echo", 0):
            pass
        for number in range(4):
            held.enter_context(services.admitted(PeerId(f"{number}"), "echo", 0, meta_bytes=long))
        with (
            pytest.raises(TransientError, match="not known here"),
            services.admitted(PeerId("other"), "echo", 0, meta_bytes=long),
        ):
            pass
        held.enter_context(services.admitted(PeerId("other"), "echo", 0, meta_bytes=SHORT_META_BYTES))
        for _ in range(8):
            held.enter_context(services.admitted(PeerId("member"), "echo", 0, meta_bytes=long))
    with services.admitted(PeerId("liar"), "echo", 0, meta_bytes=long):
        pass
    assert not services._calls_of_stranger


def test_a_header_that_drips_leaves_places_to_other_strangers(tmp_path: Path) -> None:
    names = iter(["one", "two", "three"])

    async def greet(connection: socket.socket) -> tuple[PeerId, Stream]:
        connection.setblocking(False)
        return PeerId(next(names)), connection

    async def main() -> None:
        loop = asyncio.get_running_loop()
        services = Services(ServiceLimits(max_calls_per_method=4 * STRANGERS_SHARE))
        services.expect({PeerId("member")})
        services.serve("echo", _echo, max_body_bytes=8)
        answering = Answering(services, framing.Sent(), LIMITS)
        listener = _listening(socket.AF_UNIX, str(tmp_path / "calls.sock"))
        answering.start(listener, greet)
        opened = [socket.socket(socket.AF_UNIX) for _ in range(3)]
        long, _ = framing.encode_request("echo", Message({"": bytes(SHORT_META_BYTES)}), timeout_s=5.0)
        try:
            for caller in opened:
                caller.setblocking(False)
                await loop.sock_connect(caller, str(tmp_path / "calls.sock"))
            for caller in opened[:2]:
                await send_all(caller, long[:100])
                await asyncio.sleep(0.05)
            async with asyncio.timeout(30):
                assert (await framing.read_reply_head(opened[1])).status is framing.Status.TRANSIENT
            assert await _asked(opened[2]) == b"answered"
        finally:
            for one in opened:
                one.close()
            await answering.stop()
            listener.close()

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main())


def test_a_crowd_of_keys_with_calls_that_never_end_leaves_most_streams_to_members(tmp_path: Path) -> None:
    """Each stranger has one stream and one call on it: none of them rests, and none has more than the member."""
    names = iter([PeerId(f"stranger {number}") for number in range(NETWORKS)])

    async def greet(connection: socket.socket) -> tuple[PeerId, Stream]:
        connection.setblocking(False)
        return next(names, PeerId("member")), connection

    async def wait(sender: PeerId, request: Message) -> Message:
        await asyncio.sleep(60)
        return request

    async def main() -> bytes:
        loop = asyncio.get_running_loop()
        services = Services(ServiceLimits())
        services.expect({PeerId("member")})
        services.serve("echo", _echo, max_body_bytes=8)
        services.serve("wait", wait, max_body_bytes=8)
        answering = Answering(services, framing.Sent(), LIMITS)
        listener = _listening(socket.AF_UNIX, str(tmp_path / "calls.sock"))
        answering.start(listener, greet)
        opened = []
        try:
            for number in range(NETWORKS + 1):
                caller = socket.socket(socket.AF_UNIX)
                caller.setblocking(False)
                opened.append(caller)
                await loop.sock_connect(caller, str(tmp_path / "calls.sock"))
                method = "wait" if number < NETWORKS else "echo"
                head, body = framing.encode_request(method, Message({}, b"answered"), timeout_s=50.0)
                await send_all(caller, head + b"".join(body))
                await asyncio.sleep(0)
            async with asyncio.timeout(30):
                reply = await framing.read_reply_head(opened[-1])
                return bytes((await framing.read_content(opened[-1], reply, window_s=5.0)).body)
        finally:
            for one in opened:
                one.close()
            await answering.stop()
            listener.close()

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        assert runner.run(main()) == b"answered"
