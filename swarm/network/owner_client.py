"""This is where the owner's commands call the daemon that runs on this machine."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc

from swarm.core.errors import LocalError, NotRunningError, SettingsError, TransientError
from swarm.proto import daemon_pb2 as pb
from swarm.proto import daemon_pb2_grpc as rpc

CALL_S = 10.0


class OwnerClient:
    """The daemon's calls. Each raises NotRunningError when the daemon goes away, TransientError when it is late."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub: Any = rpc.DaemonStub(channel)  # type: ignore[no-untyped-call]

    def status(self) -> pb.Status:
        return self._told(self._stub.GetStatus, pb.StatusRequest())

    def watch(self, every_s: float) -> Iterator[pb.Status]:
        with _errors():
            yield from self._stub.Watch(pb.WatchRequest(every_s=every_s))

    def pause(self) -> pb.Status:
        return self._told(self._stub.Pause, pb.PauseRequest())

    def resume(self) -> pb.Status:
        return self._told(self._stub.Resume, pb.ResumeRequest())

    def leave(self) -> pb.Status:
        return self._told(self._stub.Leave, pb.LeaveRequest())

    def logs(self, last_lines: int, *, follow: bool) -> Iterator[pb.LogLine]:
        with _errors():
            yield from self._stub.Logs(pb.LogsRequest(last_lines=last_lines, follow=follow))

    def limits(self) -> pb.Limits:
        return self._limits(self._stub.GetLimits, pb.LimitsRequest())

    def set_limit(self, name: str, value: str) -> pb.Limits:
        """Raises SettingsError when the daemon refuses the value."""
        return self._limits(self._stub.SetLimit, pb.SetLimitRequest(name=name, value=value))

    def _told(self, method: Callable[..., pb.Status], request: object) -> pb.Status:
        with _errors():
            return method(request, timeout=CALL_S)

    def _limits(self, method: Callable[..., pb.Limits], request: object) -> pb.Limits:
        with _errors():
            return method(request, timeout=CALL_S)


@contextlib.contextmanager
def owner_client(socket: Path) -> Iterator[OwnerClient]:
    """A client of the daemon that listens at `socket`."""
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        yield OwnerClient(channel)


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        code, details = error.code(), error.details()
        if code is grpc.StatusCode.INVALID_ARGUMENT:
            raise SettingsError(details) from error
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            raise NotRunningError("the daemon has ended") from error
        if code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED):
            raise TransientError(f"the daemon does not answer in {CALL_S:g} s; is this machine overloaded?") from error
        raise LocalError(f"the daemon failed: {details}; see `swarm logs`") from error
