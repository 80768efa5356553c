"""This is where a daemon answers its owner: gRPC over a Unix socket whose file permissions are its guard."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Protocol

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # p2pd is started by fork and exec: nothing of ours lives on

import grpc.aio

from swarm.core.errors import LocalError, SettingsError
from swarm.proto import daemon_pb2 as pb
from swarm.proto import daemon_pb2_grpc as rpc

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 1 << 16
MAX_CALLS = 32
MAX_LOG_LINES = 2000
MAX_ERROR_CHARACTERS = 1000
"""gRPC takes 8 KiB of them, and otherwise loses the status."""
SHORTEST_WATCH_S, LONGEST_WATCH_S = 0.2, 60.0
SOCKET_NAME = "owner.sock"


class Owner(Protocol):
    """What a daemon does for its owner. All of it on the event loop."""

    def status(self) -> pb.Status: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def leave(self) -> None: ...

    def limits(self) -> pb.Limits: ...

    def set_limit(self, name: str, value: str) -> None:
        """Raises SettingsError."""

    def log_lines(self, last: int, *, follow: bool) -> AsyncIterator[tuple[str, int]]:
        """(line, lines skipped before it): the last ones, then those that follow."""


class OwnerServer:
    """Made by `start`."""

    def __init__(self, server: grpc.aio.Server, path: Path) -> None:
        self._server = server
        self.path = path

    @classmethod
    async def start(cls, owner: Owner, folder: Path) -> "OwnerServer":
        """Listen in `folder`, which is this user's alone. Raises LocalError."""
        path = folder / SOCKET_NAME
        server = grpc.aio.server(
            maximum_concurrent_rpcs=MAX_CALLS, options=[("grpc.max_receive_message_length", MAX_REQUEST_BYTES)]
        )
        rpc.add_DaemonServicer_to_server(_Servicer(owner), server)  # type: ignore[no-untyped-call]
        try:
            server.add_insecure_port(f"unix:{path}")
            await server.start()
            os.chmod(path, 0o600)
        except (RuntimeError, OSError) as error:
            raise LocalError(f"{path}: cannot be listened at ({error})") from error
        return cls(server, path)

    async def stop(self) -> None:
        """Open calls end, and the socket's file goes."""
        await self._server.stop(grace=0.2)
        self.path.unlink(missing_ok=True)


class _Servicer(rpc.DaemonServicer):
    """Each call of the protocol, carried to the owner's object."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner

    async def GetStatus(self, request: pb.StatusRequest, context: Any) -> pb.Status:
        return self._owner.status()

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.Status]:
        every_s = min(LONGEST_WATCH_S, max(SHORTEST_WATCH_S, request.every_s))
        while True:
            yield self._owner.status()
            await asyncio.sleep(every_s)

    async def Pause(self, request: pb.PauseRequest, context: Any) -> pb.Status:
        self._owner.pause()
        return self._owner.status()

    async def Resume(self, request: pb.ResumeRequest, context: Any) -> pb.Status:
        self._owner.resume()
        return self._owner.status()

    async def Leave(self, request: pb.LeaveRequest, context: Any) -> pb.Status:
        self._owner.leave()
        return self._owner.status()

    async def Logs(self, request: pb.LogsRequest, context: Any) -> AsyncIterator[pb.LogLine]:
        last = min(MAX_LOG_LINES, request.last_lines)
        async for text, skipped in self._owner.log_lines(last, follow=request.follow):
            yield pb.LogLine(text=text, skipped=skipped)

    async def GetLimits(self, request: pb.LimitsRequest, context: Any) -> pb.Limits:
        return self._owner.limits()

    async def SetLimit(self, request: pb.SetLimitRequest, context: Any) -> pb.Limits:
        try:
            self._owner.set_limit(request.name, request.value)
        except SettingsError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error)[:MAX_ERROR_CHARACTERS])
        return self._owner.limits()
