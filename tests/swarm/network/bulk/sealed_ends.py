"""Two sealed ends of one connection, and a clock that jumps for what shares lines."""

import random
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from benchmarks.red_team.virtual_time import run_virtually as run_with
from swarm.network.bulk.sealed_socket import SealedSocket, stream_keys

SECRET = bytes(range(32))


def run_virtually(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    unhandled: list[object] = []
    run_with(main, rng=random.Random(0), on_unhandled=unhandled.append)
    assert not unhandled


def sealed(ours: socket.socket, theirs: socket.socket) -> tuple[SealedSocket, SealedSocket]:
    """The caller's end and the callee's. They own the sockets."""
    for end in (ours, theirs):
        end.setblocking(False)
    one, other = stream_keys(SECRET, b"", b"a" * 32, b"b" * 32)
    return SealedSocket(ours, send_key=one, receive_key=other), SealedSocket(theirs, send_key=other, receive_key=one)


def over_tcp(*, segment_bytes: int | None = None) -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection of this machine, whose segments else are as long as a loopback's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        if segment_bytes is not None:
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment_bytes)
        return socket.create_connection(listener.getsockname()), listener.accept()[0]
