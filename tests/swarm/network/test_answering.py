"""Streams that say nothing cost those nothing that have a name, from however many addresses they come."""

import asyncio
import socket
from pathlib import Path

import pytest

from swarm.core.errors import TransientError
from swarm.core.ids import PeerId
from swarm.network.answering import Answering, AnsweringLimits
from swarm.network.bulk import framing
from swarm.network.bulk.sockets import Stream, send_all
from swarm.network.loop import new_event_loop
from swarm.network.service import ServiceLimits, Services
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
        answering = Answering(services, LIMITS)
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
            head, body = framing.encode_request("echo", Message({}, b"answered"), timeout_s=5.0)
            await send_all(caller, head + b"".join(body))
            async with asyncio.timeout(5):
                reply = await framing.read_reply_head(caller)
                return bytes((await framing.read_content(caller, reply, window_s=5.0)).body)
        finally:
            for one in (caller, *silent):
                one.close()
            await answering.stop()
            direct.close()
            by_p2pd.close()

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        assert runner.run(main()) == b"answered"


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
