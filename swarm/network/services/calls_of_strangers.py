"""What strangers may take of a gRPC service, whichever of its methods they call: how many, how often, how long."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from swarm.core.directory.address_rates import AddressRates
from swarm.network.places import Places, caller_of

Outcome = Awaitable[None] | AsyncGenerator[Any, None]
"""Of a method that answers by a stream: gRPC takes both."""


@dataclass(frozen=True, kw_only=True)
class ServiceLimits:
    """What strangers may take of a host."""

    calls_per_s: float = 20.0
    """Of one address (IPv6: one /64), after `burst` at once."""
    burst: float = 60.0
    call_s: float = 10.0
    """Any call but a download, a watch of the service's health too, is over by then."""
    download_s: float = 3600.0
    write_s: float = 10.0
    """In which whoever downloads must have taken a piece."""
    max_calls: int = 256
    """Under way at once, from all addresses: of more, one is ended of the address that has the most."""
    max_downloads: int = 16
    max_downloads_each: int = 2
    """Of one small network."""


class CallsOfStrangers(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Stands before every method: those of the libraries, which hold calls open, are strangers' too."""

    def __init__(self, limits: ServiceLimits, host_of: Callable[[str], str], longest_s: Callable[[str], float]) -> None:
        """`host_of`: the IP address of gRPC's name of a peer. `longest_s`: how long a call of a method may last, by the
        method's path."""
        self._limits = limits
        self._host_of = host_of
        self._longest_s = longest_s
        self._rates = AddressRates(calls_per_s=limits.calls_per_s, burst=limits.burst)
        self._places: Places[asyncio.Task[Any]] = Places(limits.max_calls)

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        longest_s = self._longest_s(handler_call_details.method)
        coded = handler.request_deserializer, handler.response_serializer

        async def answered(request: Any, context: Any) -> Any:
            async with self._admitted(context, longest_s):
                return await (handler.unary_unary or handler.stream_unary)(request, context)

        async def streamed(request: Any, context: Any) -> None:
            async with self._admitted(context, longest_s):
                outcome: Outcome = (handler.unary_stream or handler.stream_stream)(request, context)
                if not isinstance(outcome, AsyncGenerator):
                    await outcome
                    return
                async with contextlib.aclosing(outcome) as replies:
                    async for reply in replies:
                        await context.write(reply)

        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(answered, *coded)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(streamed, *coded)
        if handler.stream_unary:
            return grpc.stream_unary_rpc_method_handler(answered, *coded)
        return grpc.stream_stream_rpc_method_handler(streamed, *coded)

    @asynccontextmanager
    async def _admitted(self, context: Any, longest_s: float) -> AsyncIterator[None]:
        """A place for the call, as long as it may last; whoever has none any more is told so."""
        address = caller_of(self._host_of(context.peer()))
        wait_s = self._rates.take(address, now=time.monotonic())
        if wait_s:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"more than {self._limits.calls_per_s:g} calls a second from your address; wait {wait_s:.1f} s",
            )
        task = asyncio.current_task()
        assert task is not None
        lost = self._places.take(task, address)
        if lost is not None:
            lost.cancel()
        try:
            async with asyncio.timeout(longest_s):
                yield
            return
        except TimeoutError:
            ended = grpc.StatusCode.DEADLINE_EXCEEDED, f"not over within {longest_s:g} s"
        except asyncio.CancelledError:
            if task in self._places:  # its caller is gone, or the service ends
                raise
            task.uncancel()
            ended = grpc.StatusCode.RESOURCE_EXHAUSTED, "your address has more calls under way than any other; end some"
        finally:
            self._places.leave(task)
        await context.abort(*ended)  # without a place: who is cut off while that is sent hears nothing
