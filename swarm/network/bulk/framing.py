"""A call's bytes on a stream: a fixed head, then the method's name or status, meta, body.

    request:  magic u32 | method bytes u16 | timeout ms u32 | meta bytes u32 | body bytes u64 | method | meta | body
    reply:    magic u32 | status u8 | meta bytes u32 | body bytes u64 | meta | body

All lengths come first, so both ends check them against their limits before they read or allocate anything. `meta` is
canonical MessagePack; a reply that is an error has meta {"kind", "message"} and no body.
"""

import asyncio
import contextlib
import enum
import fcntl
import math
import struct
import termios
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from swarm.core.canonical import pack
from swarm.core.errors import RemoteError
from swarm.core.transfers import Transfer, shared_longest_s
from swarm.memory.kept_buffers import BUFFERS
from swarm.network.bulk.sealed_socket import RECORD_BYTES, SealedSocket
from swarm.network.bulk.sockets import Sending, Stream, receive, receive_into
from swarm.network.bulk.uplink import UPLINK
from swarm.network.service import (
    MAX_ERROR_CHARACTERS,
    MAX_METHOD_BYTES,
    byte_view,
    decode_meta,
)
from swarm.network.transport import MAX_META_BYTES, Message

LOOKS = 5
"""In a window, at how much has come."""
TELL_S = 0.05
"""Between two looks whether what somebody waits for has gone."""
WORTH_WATCHING_BYTES = 64 << 10
"""Of shorter requests nobody looks how they go."""
_MAGIC = 0x68737731  # "hsw1"
_REQUEST = struct.Struct(">IHIIQ")
_REPLY = struct.Struct(">IBIQ")
_INT = struct.Struct("i")


class Status(enum.IntEnum):
    """How a call went at the peer that was asked."""

    OK = 0
    TRANSIENT = 1
    """Busy, not served here, or failed for a reason of its own: another peer may do better."""
    REMOTE = 2
    """The caller's request was wrong."""
    TRANSIENT_READ = 3
    REMOTE_READ = 4
    """As those, of a request that was read to its last byte."""

    @property
    def was_read(self) -> bool:
        """Whether the stream may carry the next call: no byte of this one's request is left in it."""
        return self not in (Status.TRANSIENT, Status.REMOTE)

    @property
    def is_transient(self) -> bool:
        return self in (Status.TRANSIENT, Status.TRANSIENT_READ)


@dataclass(frozen=True)
class RequestHead:
    method: str
    timeout_ms: int
    meta_bytes: int
    body_bytes: int


@dataclass(frozen=True)
class ReplyHead:
    status: Status
    meta_bytes: int
    body_bytes: int


def encode_request(method: str, request: Message, *, timeout_s: float) -> tuple[bytes, list[memoryview]]:
    """Head with meta, and the buffers that make up the body.

    The callee is told the longest that is waited for an answer that is due after `timeout_s`: it never ends first.
    """
    name, meta = method.encode(), pack(request.meta)
    body = [byte_view(buffer) for buffer in (request.body, *request.more)]
    assert len(name) <= MAX_METHOD_BYTES, f"the name of method {method} is too long"
    assert len(meta) <= MAX_META_BYTES, f"{method}: meta of {len(meta)} bytes is over the limit of {MAX_META_BYTES}"
    body_bytes = sum(map(len, body))
    longest_s = shared_longest_s(_REQUEST.size + len(name) + len(meta) + body_bytes, floor_s=timeout_s)
    timeout_ms = min(max(math.ceil(longest_s * 1000), 1), 0xFFFFFFFF)
    return _REQUEST.pack(_MAGIC, len(name), timeout_ms, len(meta), body_bytes) + name + meta, body


def encode_reply_head(meta: bytes, body: memoryview) -> bytes:
    """What precedes the body of a good answer."""
    return _REPLY.pack(_MAGIC, Status.OK, len(meta), len(body)) + meta


def encode_error(status: Status, kind: str, message: str) -> bytes:
    meta = pack({"kind": kind, "message": message[:MAX_ERROR_CHARACTERS]})
    return _REPLY.pack(_MAGIC, status, len(meta), 0) + meta


async def read_request_head(stream: Stream) -> RequestHead:
    """Raises RemoteError for anything that no peer of ours would send, EOFError when the stream ends."""
    magic, name_bytes, timeout_ms, meta_bytes, body_bytes = _REQUEST.unpack(await receive(stream, _REQUEST.size))
    _check_head(magic, meta_bytes)
    if name_bytes > MAX_METHOD_BYTES:
        raise RemoteError("malformed", f"a method's name of {name_bytes} bytes")
    try:
        method = (await receive(stream, name_bytes)).decode()
    except UnicodeDecodeError as error:
        raise RemoteError("malformed", "a method's name that is not UTF-8") from error
    return RequestHead(method, timeout_ms, meta_bytes, body_bytes)


async def read_first_head(stream: Stream, *, window_s: float) -> RequestHead:
    """Of the first request on a stream, for as long as enough of it comes (`swarm.core.transfers`): a sealed one gives
    nothing of a record before it is here whole, which on a slow line takes longer than `window_s`.

    Raises TimeoutError when too little comes, and else as `read_request_head`.
    """
    async with _alive(RECORD_BYTES, window_s, lambda: waiting_bytes(stream)):
        return await read_request_head(stream)


async def read_reply_head(stream: Stream) -> ReplyHead:
    """Raises RemoteError for anything that no peer of ours would send, EOFError when the stream ends."""
    magic, status, meta_bytes, body_bytes = _REPLY.unpack(await receive(stream, _REPLY.size))
    _check_head(magic, meta_bytes)
    if status not in set(Status):
        raise RemoteError("malformed", f"a reply of status {status}")
    return ReplyHead(Status(status), meta_bytes, body_bytes)


async def read_content(stream: Stream, head: RequestHead | ReplyHead, *, window_s: float) -> Message:
    """Meta and body of the lengths in `head`, which the caller has checked. The body gets a buffer of its own.

    Raises TimeoutError when too little of it comes (`swarm.core.transfers`), EOFError when the stream ends.
    """
    meta, body, came = bytearray(head.meta_bytes), BUFFERS.take(head.body_bytes), 0

    def on_progress(num_bytes: int) -> None:
        nonlocal came
        came = num_bytes

    async with _alive(len(meta) + len(body), window_s, lambda: came + waiting_bytes(stream)):
        await receive_into(stream, memoryview(meta), on_progress=on_progress)
        read = decode_meta(meta)
        came = len(meta)
        await receive_into(stream, body, on_progress=lambda num_bytes: on_progress(len(meta) + num_bytes))
    return Message(read, body)


class Sent:
    """Bytes of requests and answers, as they leave: on a slow line a long one takes a minute."""

    def __init__(self) -> None:
        self._before = 0
        self._under_way: set[tuple[Stream, Sending]] = set()

    @property
    def num_bytes(self) -> int:
        for stream, sending in list(self._under_way):
            if sending.is_done and not unsent_bytes(stream):
                self._ended(stream, sending)
        return self._before + sum(_left_bytes(*one) for one in self._under_way)

    @contextlib.contextmanager
    def counting(self, stream: Stream, sending: Sending) -> Iterator[None]:
        """What the kernel has of it at the end counts as sent, if that is all of it."""
        self._under_way.add((stream, sending))
        try:
            yield
        finally:
            if (stream, sending) in self._under_way:
                self._ended(stream, sending)

    def _ended(self, stream: Stream, sending: Sending) -> None:
        self._under_way.remove((stream, sending))
        self._before += sending.sent_bytes if sending.is_done else _left_bytes(stream, sending)


def _left_bytes(stream: Stream, sending: Sending) -> int:
    return max(0, sending.sent_bytes - unsent_bytes(stream))


async def send(
    stream: Stream, head: bytes, body: memoryview, *, window_s: float, sent: Sent, most: Callable[[], float]
) -> None:
    """Head and body, as fast as the other end takes them, and no faster than `most` (bytes a second) where this uplink
    is slow and the stream is no p2pd's. Raises TimeoutError when it takes too little."""
    sending = Sending(stream, head, body)
    held = UPLINK.holding(stream, most) if isinstance(stream, SealedSocket) else contextlib.nullcontext()
    try:
        with sent.counting(stream, sending), held:
            async with _alive(len(head) + len(body), window_s, lambda: _left_bytes(stream, sending)):
                await sending.wait()
    finally:
        sending.stop()


@contextlib.asynccontextmanager
async def _alive(num_bytes: int, window_s: float, came: Callable[[], int]) -> AsyncIterator[None]:
    """Ends what is in it with TimeoutError once the transfer of so many bytes is given up; `came`: those that moved."""
    loop = asyncio.get_running_loop()
    transfer = Transfer(num_bytes, loop.time(), window_s=window_s)
    looking: asyncio.TimerHandle | None = None
    async with asyncio.timeout_at(transfer.due) as deadline:

        def look() -> None:
            nonlocal looking
            if deadline.expired():
                return
            transfer.progress(came(), now=loop.time())
            deadline.reschedule(transfer.due)
            looking = loop.call_later(window_s / LOOKS, look)

        look()
        try:
            yield
        finally:
            if looking is not None:
                looking.cancel()


async def reply_head_after(
    stream: Stream, sending: Sending, num_bytes: int, *, wait_s: float, window_s: float
) -> ReplyHead:
    """Of the answer to a request that is being sent: due `wait_s` after the last of its bytes has gone.

    What p2pd has taken and has not sent, nobody hears of: it has its time besides. Raises TimeoutError when it does
    not come, or too little of the request goes.
    """
    loop = asyncio.get_running_loop()
    begun = loop.time()
    if num_bytes < WORTH_WATCHING_BYTES:
        async with asyncio.timeout_at(begun + shared_longest_s(num_bytes, floor_s=wait_s)):
            return await read_reply_head(stream)
    transfer = Transfer(num_bytes, begun, window_s=window_s)
    is_seen = isinstance(stream, SealedSocket)
    answer_s = wait_s if is_seen else shared_longest_s(num_bytes, floor_s=wait_s)
    gone_at: float | None = None
    looking: asyncio.TimerHandle | None = None
    async with asyncio.timeout_at(transfer.due) as deadline:

        def look() -> None:
            nonlocal looking, gone_at
            if deadline.expired():
                return
            now = loop.time()
            gone = sending.sent_bytes - unsent_bytes(stream)
            if gone_at is None and sending.is_done and (gone >= num_bytes or not is_seen):
                gone_at = now
            if gone_at is None:
                transfer.progress(gone, now=now)
            deadline.reschedule(transfer.due if gone_at is None else gone_at + answer_s)
            looking = loop.call_later(min(window_s, wait_s) / LOOKS, look)

        look()
        try:
            return await read_reply_head(stream)
        finally:
            if looking is not None:
                looking.cancel()


def waiting_bytes(stream: Stream) -> int:
    """That have come and were not asked for yet."""
    held = stream.held_bytes if isinstance(stream, SealedSocket) else 0
    return held + (_queued(stream, termios.FIONREAD) or 0)


def unsent_bytes(stream: Stream) -> int:
    """That were taken to be sent, and that the other end (of p2pd's socket: p2pd) does not have."""
    held = stream.unsent_bytes if isinstance(stream, SealedSocket) else 0
    return held + (_queued(stream, termios.TIOCOUTQ) or 0)


@contextlib.contextmanager
def telling(stream: Stream, sending: Sending, on_left: Callable[[], None] | None) -> Iterator[None]:
    """`on_left` is told once all of it is there, as the kernel says; of p2pd's streams it is told nothing."""
    if on_left is None or not isinstance(stream, SealedSocket):
        yield
        return
    loop, tell, sealed = asyncio.get_running_loop(), on_left, stream
    looking: asyncio.TimerHandle

    def look() -> None:
        nonlocal looking
        if sending.is_done and not sealed.unsent_bytes and _queued(sealed, termios.TIOCOUTQ) == 0:
            tell()
        else:
            looking = loop.call_later(TELL_S, look)

    looking = loop.call_later(TELL_S, look)
    try:
        yield
    finally:
        looking.cancel()


def _queued(stream: Stream, request: int) -> int | None:
    """In the kernel's queue; None where it does not say."""
    try:
        (num_bytes,) = _INT.unpack(fcntl.ioctl(stream.fileno(), request, _INT.pack(0)))
    except (OSError, ValueError):  # closed meanwhile
        return None
    return int(num_bytes)


def _check_head(magic: int, meta_bytes: int) -> None:
    if magic != _MAGIC:
        raise RemoteError("malformed", f"a message that begins with 0x{magic:08x}")
    if meta_bytes > MAX_META_BYTES:
        raise RemoteError("too_large", f"meta of {meta_bytes} bytes is over the limit of {MAX_META_BYTES}")
