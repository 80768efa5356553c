"""Bytes in and out of a stream: straight between kernel and buffer, with few wake-ups.

p2pd passes 32 KiB at a time. What waits for a whole body here is woken once, at its end, and needs no task.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Protocol

_SEND_BUFFER_BYTES = 1 << 20
_WORTH_ASKING_BYTES = 1 << 15
"""After less than what p2pd passes at a time, there is nothing more to receive for now."""


class Stream(Protocol):
    """A non-blocking socket: p2pd's (a `socket.socket`) or a sealed one, `swarm.network.bulk.sealed_socket`."""

    def fileno(self) -> int: ...

    def close(self) -> None: ...

    def recv(self, num_bytes: int, flags: int = 0, /) -> bytes:
        """What has come, as it is on the wire; empty at the end."""

    def recv_into(self, view: memoryview, /) -> int:
        """Bytes put into `view`, 0 at the end. Raises BlockingIOError when nothing has come, OSError when it broke."""

    def sendmsg(self, buffers: Sequence[memoryview], /) -> int:
        """Bytes taken from the beginning of `buffers`. Raises BlockingIOError, to be asked again with the same buffers,
        and OSError when it broke."""


def prepare(connection: socket.socket) -> None:
    """Make a Unix socket ready for the event loop. The larger buffer saves a third of the CPU time of bulk sends."""
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)


class Sending:
    """Buffers on their way out, one after the other, as fast as the other end takes them.

    Begins at once, and goes on by itself until `stop`. Whoever begins one stops it before it closes the socket.
    """

    def __init__(
        self,
        connection: Stream,
        *buffers: bytes | bytearray | memoryview,
    ) -> None:
        self._connection = connection
        self._left = [memoryview(buffer) for buffer in buffers if len(buffer)]
        self._num_bytes = sum(map(len, self._left))
        self._error: OSError | None = None
        self._waiting: asyncio.Future[None] | None = None
        if not self._send_available():
            asyncio.get_running_loop().add_writer(connection, self._on_writable)

    @property
    def is_done(self) -> bool:
        """All is in the kernel's hands."""
        return not self._left and self._error is None

    @property
    def sent_bytes(self) -> int:
        """In the kernel's hands."""
        return self._num_bytes - sum(map(len, self._left))

    async def wait(self) -> None:
        """Until all is in the kernel's hands. Raises OSError when the socket breaks."""
        if self._left and self._error is None:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Send no more of it, and let go of it."""
        if self._left and self._error is None:
            asyncio.get_running_loop().remove_writer(self._connection)
        self._left = []

    def _on_writable(self) -> None:
        if self._send_available():
            asyncio.get_running_loop().remove_writer(self._connection)
            if self._waiting is not None and not self._waiting.done():
                self._waiting.set_result(None)

    def _send_available(self) -> bool:
        """Send what the kernel takes now; whether that was the end of it, for better or worse."""
        try:
            while self._left:
                num_bytes = self._connection.sendmsg(self._left)
                while self._left and num_bytes >= len(self._left[0]):
                    num_bytes -= len(self._left.pop(0))
                if num_bytes:
                    self._left[0] = self._left[0][num_bytes:]
        except BlockingIOError:
            return False
        except OSError as error:
            self._error = error
        return True


async def receive_into(
    connection: Stream, view: memoryview, *, on_progress: Callable[[int], None] = lambda num_bytes: None
) -> None:
    """Fill `view` from the socket. Raises EOFError when the other end closes before that.

    `on_progress` is told how much has come, whenever there is more and not yet all.
    """
    at = _receive_available(connection, view, 0)
    if at == len(view):
        return
    try:
        await _filled(connection, view, at, on_progress)
    finally:
        asyncio.get_running_loop().remove_reader(connection)


def _filled(connection: Stream, view: memoryview, at: int, on_progress: Callable[[int], None]) -> asyncio.Future[None]:
    """Of `view`, from position `at` on; whoever asked for it removes the reader.

    The error that it may hold has no traceback yet: that would hold this frame, which holds the future, and keep alive
    whatever runs when the stream breaks, until the garbage collector comes by.
    """
    loop = asyncio.get_running_loop()
    filled: asyncio.Future[None] = loop.create_future()

    def on_readable() -> None:
        nonlocal at
        if filled.done():
            return
        try:
            at = _receive_available(connection, view, at)
        except (EOFError, OSError) as error:
            filled.set_exception(error.with_traceback(None))
        else:
            if at == len(view):
                filled.set_result(None)
            else:
                on_progress(at)

    loop.add_reader(connection, on_readable)
    return filled


def _receive_available(connection: Stream, view: memoryview, at: int) -> int:
    """Receive into `view` from position `at` what has come already; returns the new position."""
    while at < len(view):
        try:
            num_bytes = connection.recv_into(view[at:])
        except BlockingIOError:
            return at
        if num_bytes == 0:
            raise EOFError(f"the stream ended after {at} of {len(view)} bytes")
        at += num_bytes
        if num_bytes < _WORTH_ASKING_BYTES:
            return at
    return at


async def receive(connection: Stream, num_bytes: int) -> bytearray:
    """The next `num_bytes` of the socket, which the caller has checked against a limit."""
    data = bytearray(num_bytes)
    await receive_into(connection, memoryview(data))
    return data


async def send_all(connection: Stream, data: bytes) -> None:
    """Returns when the kernel has it. Raises OSError when the socket breaks."""
    sending = Sending(connection, data)
    try:
        await sending.wait()
    finally:
        sending.stop()


async def until_closed(connection: Stream) -> None:
    """Drop what comes until the other end closes, or the socket breaks."""
    loop = asyncio.get_running_loop()
    closed: asyncio.Future[None] = loop.create_future()

    def on_readable() -> None:
        try:
            if connection.recv(1 << 16):
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        if not closed.done():
            closed.set_result(None)

    loop.add_reader(connection, on_readable)
    try:
        await closed
    finally:
        loop.remove_reader(connection)


def is_quiet(connection: Stream) -> bool:
    """Whether the socket is open and nothing has come."""
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
