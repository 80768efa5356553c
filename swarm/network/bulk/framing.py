"""A call's bytes on a stream: a fixed head, then the method's name or status, meta, body.

    request:  magic u32 | method bytes u16 | timeout ms u32 | meta bytes u32 | body bytes u64 | method | meta | body
    reply:    magic u32 | status u8 | meta bytes u32 | body bytes u64 | meta | body

All lengths come first, so both ends check them against their limits before they read or allocate anything. `meta` is
canonical MessagePack; a reply that is an error has meta {"kind", "message"} and no body.
"""

import asyncio
import enum
import struct
from dataclasses import dataclass

from swarm.core.canonical import pack
from swarm.core.errors import RemoteError
from swarm.memory.kept_buffers import BUFFERS
from swarm.network.bulk.sockets import Sending, Stream, receive, receive_into
from swarm.network.service import (
    MAX_ERROR_CHARACTERS,
    MAX_KIND_CHARACTERS,
    MAX_METHOD_BYTES,
    byte_view,
    decode_meta,
)
from swarm.network.transport import MAX_META_BYTES, Message

STEADY_BYTES = 1 << 20
"""A stream brings that much within each `stall_s`, or all that is left."""
_MAGIC = 0x68737731  # "hsw1"
_REQUEST = struct.Struct(">IHIIQ")
_REPLY = struct.Struct(">IBIQ")


class Status(enum.IntEnum):
    """How a call went at the peer that was asked."""

    OK = 0
    TRANSIENT = 1
    """Busy, not served here, or failed for a reason of its own: another peer may do better."""
    REMOTE = 2
    """The caller's request was wrong."""


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
    """Head with meta, and the buffers that make up the body."""
    name, meta = method.encode(), pack(request.meta)
    body = [byte_view(buffer) for buffer in (request.body, *request.more)]
    assert len(name) <= MAX_METHOD_BYTES, f"the name of method {method} is too long"
    assert len(meta) <= MAX_META_BYTES, f"{method}: meta of {len(meta)} bytes is over the limit of {MAX_META_BYTES}"
    timeout_ms = min(max(int(timeout_s * 1000), 1), 0xFFFFFFFF)
    return _REQUEST.pack(_MAGIC, len(name), timeout_ms, len(meta), sum(map(len, body))) + name + meta, body


def encode_reply_head(meta: bytes, body: memoryview) -> bytes:
    """What precedes the body of a good answer."""
    return _REPLY.pack(_MAGIC, Status.OK, len(meta), len(body)) + meta


def encode_error(status: Status, kind: str, message: str) -> bytes:
    meta = pack({"kind": kind[:MAX_KIND_CHARACTERS], "message": message[:MAX_ERROR_CHARACTERS]})
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


async def read_reply_head(stream: Stream) -> ReplyHead:
    """Raises RemoteError for anything that no peer of ours would send, EOFError when the stream ends."""
    magic, status, meta_bytes, body_bytes = _REPLY.unpack(await receive(stream, _REPLY.size))
    _check_head(magic, meta_bytes)
    if status not in set(Status):
        raise RemoteError("malformed", f"a reply of status {status}")
    return ReplyHead(Status(status), meta_bytes, body_bytes)


async def read_content(stream: Stream, head: RequestHead | ReplyHead, *, stall_s: float) -> Message:
    """Meta and body of the lengths in `head`, which the caller has checked. The body gets a buffer of its own.

    Raises TimeoutError when the next `STEADY_BYTES` take longer than `stall_s`, EOFError when the stream ends.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(stall_s) as deadline:
        meta = decode_meta(await receive(stream, head.meta_bytes))
        body, due_bytes = BUFFERS.take(head.body_bytes), STEADY_BYTES

        def on_progress(num_bytes: int) -> None:
            nonlocal due_bytes
            if num_bytes >= due_bytes:
                due_bytes = num_bytes + STEADY_BYTES
                deadline.reschedule(loop.time() + stall_s)

        deadline.reschedule(loop.time() + stall_s)
        await receive_into(stream, body, on_progress=on_progress)
    return Message(meta, body)


async def send(stream: Stream, head: bytes, body: memoryview, *, stall_s: float) -> None:
    """Head and body, as fast as the other end takes them. Raises TimeoutError when it takes nothing for `stall_s`."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(stall_s) as deadline:
        sending = Sending(stream, head, body, on_progress=lambda: deadline.reschedule(loop.time() + stall_s))
        try:
            await sending.wait()
        finally:
            sending.stop()


def _check_head(magic: int, meta_bytes: int) -> None:
    if magic != _MAGIC:
        raise RemoteError("malformed", f"a message that begins with 0x{magic:08x}")
    if meta_bytes > MAX_META_BYTES:
        raise RemoteError("too_large", f"meta of {meta_bytes} bytes is over the limit of {MAX_META_BYTES}")
