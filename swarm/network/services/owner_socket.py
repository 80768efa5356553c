"""How daemon and host answer their owners: gRPC over a Unix socket whose file permissions are its guard."""

import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # p2pd is started by fork and exec: nothing of ours lives on

import grpc
import grpc.aio

from swarm.core.errors import LocalError, NotRunningError, RemoteError, SettingsError, TransientError

MAX_REQUEST_BYTES = 1 << 16
MAX_CALLS = 32
MAX_ERROR_CHARACTERS = 1000
"""gRPC takes 8 KiB of them, and otherwise loses the status."""
SOCKET_NAME = "owner.sock"


class OwnerSocket:
    """Made by `listen`."""

    def __init__(self, server: grpc.aio.Server, path: Path) -> None:
        self._server = server
        self.path = path

    @classmethod
    async def listen(cls, folder: Path, serve: Callable[[grpc.aio.Server], None]) -> "OwnerSocket":
        """Listen in `folder`, which is this user's alone; `serve` adds the calls. Raises LocalError."""
        path = folder / SOCKET_NAME
        server = grpc.aio.server(
            maximum_concurrent_rpcs=MAX_CALLS, options=[("grpc.max_receive_message_length", MAX_REQUEST_BYTES)]
        )
        serve(server)
        try:
            server.add_insecure_port(f"unix:{path}")
            await server.start()
            os.chmod(path, 0o600)
        except (RuntimeError, OSError) as error:
            raise LocalError(f"{path}: cannot be listened at ({error})") from error
        return cls(server, path)

    async def close(self) -> None:
        """Open calls end, and the socket's file goes."""
        await self._server.stop(grace=0.2)
        self.path.unlink(missing_ok=True)


@contextlib.asynccontextmanager
async def refusing(context: Any) -> AsyncIterator[None]:
    """What is raised within ends the call, with a status that `owners_call` knows."""
    try:
        yield
    except SettingsError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error)[:MAX_ERROR_CHARACTERS])
    except (LocalError, RemoteError, TransientError) as error:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error)[:MAX_ERROR_CHARACTERS])


@contextlib.contextmanager
def owners_channel(socket: Path) -> Iterator[grpc.Channel]:
    """To the program that listens at `socket`."""
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        yield channel


@contextlib.contextmanager
def owners_call(program: str, log: str, *, timeout_s: float) -> Iterator[None]:
    """A call's status becomes the error that it stands for, in words about the program and where its log is.

    Raises SettingsError for what it refuses, LocalError for what it could not do, NotRunningError when it goes away,
    TransientError when it is late.
    """
    try:
        yield
    except grpc.RpcError as error:
        code, details = error.code(), error.details()
        if code is grpc.StatusCode.INVALID_ARGUMENT:
            raise SettingsError(details) from error
        if code is grpc.StatusCode.FAILED_PRECONDITION:
            raise LocalError(details) from error
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            raise NotRunningError(f"the {program} has ended") from error
        if code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED):
            said = f"the {program} does not answer in {timeout_s:g} s; is this machine overloaded?"
            raise TransientError(said) from error
        raise LocalError(f"the {program} failed: {details}; see {log}") from error
