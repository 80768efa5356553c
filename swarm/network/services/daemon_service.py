"""A daemon answers its owner."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Protocol

from swarm.network.services.owner_socket import OwnerSocket, refusing
from swarm.proto import daemon_pb2 as pb
from swarm.proto import daemon_pb2_grpc as rpc

MAX_LOG_LINES = 2000
SHORTEST_WATCH_S, LONGEST_WATCH_S = 0.2, 60.0


class Desk(Protocol):
    """What a daemon does for its owner. All of it on the event loop."""

    def status(self) -> pb.Status: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def leave(self, *, now: bool) -> None:
        """`now`: nothing that has begun is finished."""

    def limits(self) -> pb.Limits: ...

    def set_limit(self, name: str, value: str) -> None:
        """Raises SettingsError."""

    def log_lines(self, last: int, *, follow: bool) -> AsyncIterator[tuple[str, int]]:
        """(line, lines skipped before it): the last ones, then those that follow."""


async def serve_owner_of_daemon(desk: Desk, folder: Path) -> OwnerSocket:
    """Listen in `folder`, which is this user's alone. Raises LocalError."""
    return await OwnerSocket.listen(folder, lambda server: rpc.add_DaemonServicer_to_server(_Servicer(desk), server))


class _Servicer(rpc.DaemonServicer):
    """Each call of the protocol, carried to the desk."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def GetStatus(self, request: pb.StatusRequest, context: Any) -> pb.Status:
        return self._desk.status()

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.Status]:
        every_s = min(LONGEST_WATCH_S, max(SHORTEST_WATCH_S, request.every_s))
        while True:
            yield self._desk.status()
            await asyncio.sleep(every_s)

    async def Pause(self, request: pb.PauseRequest, context: Any) -> pb.Status:
        self._desk.pause()
        return self._desk.status()

    async def Resume(self, request: pb.ResumeRequest, context: Any) -> pb.Status:
        self._desk.resume()
        return self._desk.status()

    async def Leave(self, request: pb.LeaveRequest, context: Any) -> pb.Status:
        self._desk.leave(now=request.now)
        return self._desk.status()

    async def Logs(self, request: pb.LogsRequest, context: Any) -> AsyncIterator[pb.LogLine]:
        last = min(MAX_LOG_LINES, request.last_lines)
        async for text, skipped in self._desk.log_lines(last, follow=request.follow):
            yield pb.LogLine(text=text, skipped=skipped)

    async def GetLimits(self, request: pb.LimitsRequest, context: Any) -> pb.Limits:
        return self._desk.limits()

    async def SetLimit(self, request: pb.SetLimitRequest, context: Any) -> pb.Limits:
        async with refusing(context):
            self._desk.set_limit(request.name, request.value)
        return self._desk.limits()
