"""A host answers strangers over gRPC: TLS, deadlines, limits and errors are the same for every call.

What is answered is in bootstrap/directory/answers.py. A generic client finds its way by the reflection service.
"""

import asyncio
import contextlib
import ipaddress
import logging
import time
import urllib.parse
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from swarm.core.directory.address_rates import AddressRates
from swarm.core.errors import LocalError, RemoteError, SettingsError, TransientError
from swarm.network.services.certificate import Certificate
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


@dataclass(frozen=True, kw_only=True)
class ServiceLimits:
    """What strangers may take of a host."""

    calls_per_s: float = 20.0
    """Of one address (IPv6: one /64), after `burst` at once."""
    burst: float = 60.0
    call_s: float = 10.0
    download_s: float = 3600.0
    max_calls: int = 256
    """Under way at once, from all addresses."""
    max_downloads: int = 16
    max_downloads_each: int = 2
    """Of one address."""


class Answers(Protocol):
    """What a host says, on the event loop. Raises RemoteError for a caller's fault, TransientError for later."""

    async def run(self, request: pb.RunRequest) -> pb.Run: ...

    async def peers(self, request: pb.PeersRequest) -> pb.Peers: ...

    async def checkpoints(self, request: pb.CheckpointsRequest) -> pb.Checkpoints: ...

    def download(self, request: pb.DownloadRequest) -> AsyncGenerator[pb.Piece, None]: ...

    async def status(self, request: pb.StatusRequest) -> pb.Status: ...


class CoordinatorServer:
    """Made by `start`."""

    def __init__(self, server: grpc.aio.Server, port: int) -> None:
        self._server = server
        self.port = port

    @classmethod
    async def start(
        cls, answers: Answers, listen: str, certificate: Certificate, limits: ServiceLimits | None = None
    ) -> "CoordinatorServer":
        """Listen at HOST:PORT, everywhere without HOST, port 0 for any. Raises SettingsError if that cannot be had."""
        limits = limits or ServiceLimits()
        server = grpc.aio.server(
            maximum_concurrent_rpcs=limits.max_calls,
            options=[
                ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
                ("grpc.max_metadata_size", MAX_METADATA_BYTES),
                ("grpc.max_concurrent_streams", 32),
                ("grpc.max_connection_idle_ms", 300_000),
                ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
                ("grpc.so_reuseport", 0),
            ],
        )
        server.add_generic_rpc_handlers((_Servicer(answers, limits).handlers(),))
        healthy = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        credentials = grpc.ssl_server_credentials([(certificate.key, certificate.chain)])
        try:
            port = server.add_secure_port(f"[::]{listen}" if listen.startswith(":") else listen, credentials)
        except RuntimeError as error:
            raise SettingsError(f"--service {listen}: cannot listen there ({error}); choose another port") from error
        await server.start()
        for name in ("", SERVICE):
            await healthy.set(name, health_pb2.HealthCheckResponse.SERVING)
        return cls(server, port)

    async def close(self) -> None:
        """Within a second; calls under way are cancelled."""
        await self._server.stop(0.5)


class _Servicer:
    """Parses requests itself: gRPC answers one that is no message of its kind by a traceback in the host's log."""

    def __init__(self, answers: Answers, limits: ServiceLimits) -> None:
        self._answers = answers
        self._limits = limits
        self._rates = AddressRates(calls_per_s=limits.calls_per_s, burst=limits.burst)
        self._downloads = Counter[str]()
        """Under way, by address."""

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
            await self._within_rate(context)
            try:
                async with asyncio.timeout(self._limits.call_s):
                    return bytes((await answer(_parsed(kind, data))).SerializeToString())
            except TimeoutError:
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer within {self._limits.call_s:g} s")
            except (RemoteError, TransientError, LocalError) as error:
                await _refuse(context, error)
            raise AssertionError("unreachable")

        return grpc.unary_unary_rpc_method_handler(handle)

    async def _download(self, data: bytes, context: Any) -> AsyncIterator[bytes]:
        await self._within_rate(context)
        address, limits = address_of(context.peer()), self._limits
        if self._downloads.total() >= limits.max_downloads or self._downloads[address] >= limits.max_downloads_each:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{self._downloads.total()} downloads are under way, {self._downloads[address]} of them yours; wait",
            )
        self._downloads[address] += 1
        give_up_at = time.monotonic() + self._limits.download_s
        try:
            async with contextlib.aclosing(self._answers.download(_parsed(pb.DownloadRequest, data))) as pieces:
                async for piece in pieces:
                    if time.monotonic() > give_up_at:
                        await context.abort(
                            grpc.StatusCode.DEADLINE_EXCEEDED, "too slow; go on from where it broke off"
                        )
                    yield piece.SerializeToString()
        except (RemoteError, TransientError, LocalError) as error:
            await _refuse(context, error)
        finally:
            self._downloads -= Counter([address])  # and forgets an address that has none

    async def _within_rate(self, context: Any) -> None:
        wait_s = self._rates.take(address_of(context.peer()), now=time.monotonic())
        if wait_s:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"more than {self._limits.calls_per_s:g} calls a second from your address; wait {wait_s:.1f} s",
            )


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


def address_of(peer: str) -> str:
    """Whose calls are counted together: the IPv4 address, or the IPv6 /64, of gRPC's name of a peer."""
    kind, _, rest = urllib.parse.unquote(peer).partition(":")
    host = rest.rpartition(":")[0].strip("[]")
    if kind == "ipv6":
        with contextlib.suppress(ValueError):
            number = ipaddress.IPv6Address(host)
            if number.ipv4_mapped is not None:
                return str(number.ipv4_mapped)
            return str(ipaddress.IPv6Network((number, 64), strict=False))
    return host or kind
