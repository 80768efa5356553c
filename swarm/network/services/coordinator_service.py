"""A host answers strangers over gRPC: TLS, limits and errors are the same for every call.

What is answered is in bootstrap/directory/answers.py. A generic client finds its way by the reflection service.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, NoReturn, Protocol, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from swarm.core.errors import LocalError, RemoteError, SettingsError, TransientError
from swarm.network.places import network_of
from swarm.network.services.calls_of_strangers import CallsOfStrangers, ServiceLimits
from swarm.network.services.certificate import Certificate
from swarm.network.services.front import Passage, port_of
from swarm.proto import coordinator_pb2 as pb

Request = TypeVar("Request", bound=Message)

log = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["Coordinator"].full_name
MAX_REQUEST_BYTES = 64 << 10
MAX_METADATA_BYTES = 8 << 10

_CODES = {
    "malformed": grpc.StatusCode.INVALID_ARGUMENT,
    "unknown": grpc.StatusCode.NOT_FOUND,
}
"""Status of a RemoteError's kind; of any other, FAILED_PRECONDITION."""


class Answers(Protocol):
    """What a host says, on the event loop. Raises RemoteError for a caller's fault, TransientError for later."""

    async def run(self, request: pb.RunRequest) -> pb.Run: ...

    async def peers(self, request: pb.PeersRequest) -> pb.Peers: ...

    async def checkpoints(self, request: pb.CheckpointsRequest) -> pb.Checkpoints: ...

    def download(self, request: pb.DownloadRequest) -> AsyncGenerator[pb.Piece, None]: ...

    async def status(self, request: pb.StatusRequest) -> pb.Status: ...


class CoordinatorServer:
    """Made by `start`."""

    def __init__(self, server: grpc.aio.Server, front: asyncio.Server) -> None:
        self._server = server
        self._front = front

    @classmethod
    async def start(
        cls, answers: Answers, listen: str, certificate: Certificate, limits: ServiceLimits | None = None
    ) -> "CoordinatorServer":
        """Listen at HOST:PORT, everywhere without HOST, port 0 for any. Raises SettingsError if that cannot be had."""
        limits, passage = limits or ServiceLimits(), Passage()

        def host_of(peer: str) -> str:
            return passage.host_of(int(peer.rpartition(":")[2]))

        server = grpc.aio.server(
            interceptors=[CallsOfStrangers(limits, host_of, lambda path: _longest_s(path, limits))],
            options=[
                ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
                ("grpc.max_metadata_size", MAX_METADATA_BYTES),
                ("grpc.max_concurrent_streams", 32),
                ("grpc.server_handshake_timeout_ms", 10_000),
                ("grpc.max_connection_idle_ms", 60_000),
                ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
                ("grpc.so_reuseport", 0),
            ],
        )
        server.add_generic_rpc_handlers((_Servicer(answers, limits, host_of).handlers(),))
        healthy = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        credentials = grpc.ssl_server_credentials([(certificate.key, certificate.chain)])
        port = server.add_secure_port("127.0.0.1:0", credentials)
        await server.start()
        for name in ("", SERVICE):
            await healthy.set(name, health_pb2.HealthCheckResponse.SERVING)
        try:
            return cls(server, await passage.lead(listen, "service", to=port))
        except SettingsError:
            await server.stop(None)
            raise

    @property
    def port(self) -> int:
        return port_of(self._front)

    async def close(self) -> None:
        """Within a second; calls under way are cancelled."""
        self._front.close()
        await self._server.stop(0.5)


class _Servicer:
    """Parses requests itself: gRPC answers one that is no message of its kind by a traceback in the host's log."""

    def __init__(self, answers: Answers, limits: ServiceLimits, host_of: Callable[[str], str]) -> None:
        """`host_of`: the IP address of gRPC's name of a peer."""
        self._answers = answers
        self._limits = limits
        self._host_of = host_of
        self._downloads = Counter[str]()
        """Under way, by small network."""

    def handlers(self) -> grpc.GenericRpcHandler:
        answers = self._answers
        made = {
            "GetRun": self._unary(pb.RunRequest, answers.run),
            "ListPeers": self._unary(pb.PeersRequest, answers.peers),
            "ListCheckpoints": self._unary(pb.CheckpointsRequest, answers.checkpoints),
            "GetStatus": self._unary(pb.StatusRequest, answers.status),
            "Download": grpc.unary_stream_rpc_method_handler(self._download),
        }
        assert set(made) == {method.name for method in pb.DESCRIPTOR.services_by_name["Coordinator"].methods}
        return grpc.method_handlers_generic_handler(SERVICE, made)

    def _unary(self, kind: type[Request], answer: Callable[[Request], Awaitable[Message]]) -> grpc.RpcMethodHandler:
        async def handle(data: bytes, context: Any) -> bytes:
            try:
                return bytes((await answer(_parsed(kind, data))).SerializeToString())
            except (RemoteError, TransientError, LocalError) as error:
                await _refuse(context, error)
            raise AssertionError("unreachable")

        return grpc.unary_unary_rpc_method_handler(handle)

    async def _download(self, data: bytes, context: Any) -> None:
        """As long as its reader takes some of it: few at a time, for the line is the run's too."""
        who, limits = network_of(self._host_of(context.peer())), self._limits
        if self._downloads.total() >= limits.max_downloads or self._downloads[who] >= limits.max_downloads_each:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{self._downloads.total()} downloads are under way, {self._downloads[who]} of them yours; wait",
            )
        self._downloads[who] += 1
        try:
            async with contextlib.aclosing(self._answers.download(_parsed(pb.DownloadRequest, data))) as pieces:
                async for piece in pieces:
                    async with asyncio.timeout(limits.write_s):
                        await context.write(piece.SerializeToString())
            return
        except TimeoutError:
            slow = f"a piece was not taken within {limits.write_s:g} s; go on from where it broke off"
        except (RemoteError, TransientError, LocalError) as error:
            await _refuse(context, error)
        finally:
            self._downloads -= Counter([who])  # and forgets a network that has none
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, slow)  # without a place: who takes nothing hears nothing


def _longest_s(path: str, limits: ServiceLimits) -> float:
    return limits.download_s if path == f"/{SERVICE}/Download" else limits.call_s


def _parsed(kind: type[Request], data: bytes) -> Request:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise RemoteError("malformed", f"the request is no {kind.DESCRIPTOR.name}") from error


async def _refuse(context: Any, error: Exception) -> NoReturn:
    """End the call with the error's status; a LocalError's text is for the host's own log."""
    if isinstance(error, RemoteError):
        log.info("refused: %s: %s", error.kind, error)
        await context.abort(_CODES.get(error.kind, grpc.StatusCode.FAILED_PRECONDITION), str(error))
    if isinstance(error, TransientError):
        await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
    log.error("a call failed here: %s", error)
    await context.abort(grpc.StatusCode.INTERNAL, "the host could not answer; its log says why")
    raise AssertionError("unreachable")
