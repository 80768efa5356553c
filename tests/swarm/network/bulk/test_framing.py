"""Bodies on a socket live while they come, whatever they take in all."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from swarm.core.canonical import pack
from swarm.network.bulk import framing
from swarm.network.bulk.framing import RequestHead
from swarm.network.bulk.sealed_socket import SealedSocket
from swarm.network.bulk.sockets import Sending, Stream
from swarm.network.transport import Message

T = TypeVar("T")
META = pack({})
WINDOW_S = 1.0
"""Both ends are here: while this process waits for the processor, nothing comes."""


def on_a_pair(main: Callable[[Stream, Stream], Awaitable[T]], *, sealed: bool) -> T:
    one, other = socket.socketpair()
    keys = bytes(32), bytes(range(32))
    try:
        for end in (one, other):
            end.setblocking(False)
        if not sealed:
            return asyncio.run(_run(main, one, other))
        near = SealedSocket(one, send_key=keys[0], receive_key=keys[1])
        far = SealedSocket(other, send_key=keys[1], receive_key=keys[0])
        return asyncio.run(_run(main, near, far))
    finally:
        one.close()
        other.close()


async def _run(main: Callable[[Stream, Stream], Awaitable[T]], near: Stream, far: Stream) -> T:
    return await main(near, far)


async def drip(stream: Stream, num_bytes: int, *, pieces: int, every_s: float) -> None:
    """META and a body, so much at a time."""
    left = META + bytes(num_bytes)
    size = -(-len(left) // pieces)
    for start in range(0, len(left), size):
        sending = Sending(stream, left[start : start + size])
        await sending.wait()
        await asyncio.sleep(every_s)


@pytest.mark.parametrize("sealed", [False, True])
def test_a_body_that_keeps_coming_is_received_whatever_it_takes(sealed: bool) -> None:
    async def main(near: Stream, far: Stream) -> int:
        head = RequestHead("x", 1, len(META), 100_000)
        dripping = asyncio.ensure_future(drip(near, 100_000, pieces=25, every_s=0.1))
        content = await framing.read_content(far, head, window_s=WINDOW_S)
        await dripping
        return len(content.body)

    assert on_a_pair(main, sealed=sealed) == 100_000  # after two windows and a half


@pytest.mark.parametrize("sealed", [False, True])
def test_a_body_that_stops_or_drips_too_little_is_given_up(sealed: bool) -> None:
    async def main(near: Stream, far: Stream) -> float:
        loop = asyncio.get_running_loop()
        head, begun = RequestHead("x", 1, len(META), 1_000_000), loop.time()
        dripping = asyncio.ensure_future(drip(near, 1_000_000, pieces=100_000, every_s=0.05))
        with pytest.raises(TimeoutError):
            await framing.read_content(far, head, window_s=WINDOW_S)
        dripping.cancel()
        return loop.time() - begun

    assert on_a_pair(main, sealed=sealed) < 10 * WINDOW_S


@pytest.mark.parametrize("sealed", [False, True])
def test_a_request_that_nobody_takes_is_given_up(sealed: bool) -> None:
    async def main(near: Stream, far: Stream) -> None:
        sending = Sending(near, bytes(64 << 20))
        with pytest.raises(TimeoutError):
            await framing.reply_head_after(near, sending, 64 << 20, wait_s=0.3, window_s=WINDOW_S)
        sending.stop()

    on_a_pair(main, sealed=sealed)


@pytest.mark.parametrize("num_bytes", [1000, 1 << 20])
@pytest.mark.parametrize("sealed", [False, True])
def test_who_waits_for_a_request_to_have_left_is_told_before_it_is_answered(num_bytes: int, sealed: bool) -> None:
    """Of p2pd's streams nobody knows what has left: there it is told nothing."""

    async def main(near: Stream, far: Stream) -> None:
        told = list[float]()
        now = asyncio.get_running_loop().time
        sending = Sending(near, bytes(num_bytes))

        async def answered() -> None:
            with framing.telling(near, sending, lambda: told.append(now())):
                await framing.reply_head_after(near, sending, num_bytes, wait_s=5.0, window_s=WINDOW_S)

        awaited = asyncio.ensure_future(answered())
        await asyncio.sleep(0.3)
        assert not told, "nothing of it is taken"
        body = bytearray(num_bytes)
        await framing.receive_into(far, memoryview(body))
        taken_at = now()
        await asyncio.sleep(0.3)
        assert not awaited.done()
        assert len(told) == sealed
        assert all(taken_at - 0.1 < at < taken_at + 0.2 for at in told)
        await Sending(far, framing.encode_reply_head(META, memoryview(b""))).wait()
        await awaited
        assert len(told) == sealed

    on_a_pair(main, sealed=sealed)


@pytest.mark.parametrize("stops", [False, True])
def test_the_first_head_is_awaited_for_as_long_as_more_of_its_record_comes(stops: bool) -> None:
    """On a line of 12.5 KB/s the rosters of a leader took longer than the window: each was cut off and sent anew."""
    request_head, _ = framing.encode_request("roster", Message({"of": bytes(30_000)}), timeout_s=5.0)
    keys = bytes(32), bytes(range(32))

    def sealed() -> bytes:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            near = SealedSocket(ours, send_key=keys[0], receive_key=keys[1])
            near.sendmsg([memoryview(request_head)])
            return theirs.recv(1 << 20)

    async def main() -> RequestHead:
        one, other = socket.socketpair()
        data = sealed()
        with one, other:
            other.setblocking(False)
            far = SealedSocket(other, send_key=keys[1], receive_key=keys[0])
            reading = asyncio.ensure_future(framing.read_first_head(far, window_s=WINDOW_S))
            for start in range(0, len(data) // 2 if stops else len(data), len(data) // 5):
                one.sendall(data[start : start + len(data) // 5])
                await asyncio.sleep(0.5 * WINDOW_S)
            return await reading

    if stops:
        with pytest.raises(TimeoutError):
            asyncio.run(main())
    else:
        assert asyncio.run(main()).meta_bytes > 30_000
