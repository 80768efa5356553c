"""The commands of a machine's owner call the daemon that runs on this machine."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import grpc

from swarm.network.services.owner_socket import owners_call, owners_channel
from swarm.proto import daemon_pb2 as pb
from swarm.proto import daemon_pb2_grpc as rpc

CALL_S = 10.0


class DaemonClient:
    """The daemon's calls. Each raises as `owners_call` does."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub: Any = rpc.DaemonStub(channel)

    def status(self) -> pb.Status:
        return self._told(self._stub.GetStatus, pb.StatusRequest())

    def watch(self, every_s: float) -> Iterator[pb.Status]:
        with _errors():
            yield from _until_interrupted(self._stub.Watch(pb.WatchRequest(every_s=every_s)))

    def pause(self) -> pb.Status:
        return self._told(self._stub.Pause, pb.PauseRequest())

    def resume(self) -> pb.Status:
        return self._told(self._stub.Resume, pb.ResumeRequest())

    def leave(self, *, now: bool) -> pb.Status:
        return self._told(self._stub.Leave, pb.LeaveRequest(now=now))

    def logs(self, last_lines: int, *, follow: bool) -> Iterator[pb.LogLine]:
        with _errors():
            yield from _until_interrupted(self._stub.Logs(pb.LogsRequest(last_lines=last_lines, follow=follow)))

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
def daemon_client(socket: Path) -> Iterator[DaemonClient]:
    """A client of the daemon that listens at `socket`."""
    with owners_channel(socket) as channel:
        yield DaemonClient(channel)


def _until_interrupted(call: Any) -> Iterator[Any]:
    """What a call brings, until it ends, or Ctrl-C ends it.

    gRPC waits under locks of its own, where an exception that a signal raises may be lost: the signal cancels the call.
    """
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield from call
        return
    interrupted = False

    def cancel(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        call.cancel()

    before = signal.signal(signal.SIGINT, cancel)
    try:
        yield from call
    except grpc.RpcError:
        if not interrupted:
            raise
    finally:
        signal.signal(signal.SIGINT, before)


def _errors() -> contextlib.AbstractContextManager[None]:
    return owners_call("daemon", "`swarm logs`", timeout_s=CALL_S)
