"""A host's web page, served: read-only, without foreign assets, to browsers and to Prometheus.

What it shows is in bootstrap/program/dashboard.py. A page that is open is told of changes by server-sent events.
"""

import asyncio
import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web

from swarm.core.directory.address_rates import AddressRates
from swarm.core.errors import SettingsError
from swarm.network.places import Places, caller_of, network_of
from swarm.network.services.front import MOST_CONNECTIONS, Counted, listening, port_of

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_WATCHERS = 200
MAX_WATCHERS_EACH = 8
"""Pages that one address has open."""
TICK_S = 1.0
"""A page hears of changes at most so often."""
HEARTBEAT_S = 15.0
WRITE_S = 10.0
"""In which whoever reads must have taken a piece."""
PIECE_BYTES = 256 << 10
MAX_DOWNLOADS, MAX_DOWNLOADS_EACH = 8, 2
"""Files that are being taken, in all and by one small network: other pages are served besides."""
CALLS_PER_S, BURST = 20.0, 100.0
"""From one address."""


class Shown(Protocol):
    """What there is to see."""

    @property
    def pages(self) -> Mapping[str, tuple[str, bytes]]:
        """(content type, body) of each path."""

    def state(self) -> dict[str, Any]:
        """The run as JSON values; without any volunteer's address."""

    def metrics(self) -> bytes:
        """In Prometheus' text format."""

    def evidence(self, digest: str) -> Path | None:
        """File of the evidence of this digest."""

    def word(self, peer: str) -> bytes | None:
        """What the run key has signed of a peer that is out, beside the settings it has signed."""

    def audits_made(self) -> list[str]:
        """What each member has signed on its audits of honest work, in base64."""

    def checkpoint_file(self, version: int, name: str) -> Path | None: ...


class WebSite:
    """Made by `start`."""

    def __init__(self, shown: Shown) -> None:
        self._shown = shown
        self._rates = AddressRates(calls_per_s=CALLS_PER_S, burst=BURST)
        self._watchers = Counter[str]()
        """Open pages of each address."""
        self._downloads: Places[object] = Places(MAX_DOWNLOADS)
        self._said: tuple[float, str] = (0.0, "")
        self._measured: tuple[float, bytes] = (0.0, b"")
        self._closing = asyncio.Event()
        app = web.Application(middlewares=[self._guard], client_max_size=1024)
        for path, (kind, body) in shown.pages.items():
            app.router.add_get(path, _fixed(kind, body))
        app.router.add_get("/state.json", self._state)
        app.router.add_get("/events", self._events, allow_head=False)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/audits.json", self._audits)
        app.router.add_get("/evidence/{digest:[0-9a-f]{64}}", self._evidence)
        app.router.add_get("/verdict/{peer:[0-9A-Za-z]{1,64}}", self._verdict)
        app.router.add_get("/checkpoints/{version:[0-9]{1,12}}/{name:.{1,128}}", self._checkpoint)
        self._runner = web.AppRunner(app, access_log=None, keepalive_timeout=30.0, shutdown_timeout=0.5)
        self._server: asyncio.Server | None = None

    @classmethod
    async def start(cls, shown: Shown, listen: str) -> "WebSite":
        """Listen at HOST:PORT, everywhere without HOST, port 0 for any. Raises SettingsError if that cannot be had."""
        site = cls(shown)
        await site._runner.setup()
        answering = site._runner.server
        assert answering is not None
        places: Places[asyncio.BaseTransport] = Places(MOST_CONNECTIONS)
        try:
            site._server = await listening(lambda: Counted(answering(), places), listen, "web")
        except SettingsError:
            await site._runner.cleanup()
            raise
        return site

    @property
    def port(self) -> int:
        assert self._server is not None
        return port_of(self._server)

    async def close(self) -> None:
        """Within a second; pages that are open are told to look again later."""
        self._closing.set()
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        wait_s = self._rates.take(caller_of(request.remote), now=time.monotonic())
        if wait_s:
            return web.Response(
                status=429, headers={**HEADERS, "Retry-After": f"{wait_s:.0f}"}, text="too many requests"
            )
        try:
            response = await handler(request)
        except web.HTTPException as error:
            error.headers.update(HEADERS)
            raise
        if not response.prepared:
            response.headers.update(HEADERS)
        return response

    def _json(self) -> str:
        """The state, made at most once a tick however many look."""
        at, text = self._said
        if not text or time.monotonic() - at >= TICK_S:
            text = json.dumps(self._shown.state(), separators=(",", ":"), allow_nan=False)
            self._said = time.monotonic(), text
        return text

    async def _state(self, request: web.Request) -> web.Response:
        return web.Response(text=self._json(), content_type="application/json", headers={"Cache-Control": "no-store"})

    async def _events(self, request: web.Request) -> web.StreamResponse:
        address = caller_of(request.remote)
        if self._watchers.total() >= MAX_WATCHERS or self._watchers[address] >= MAX_WATCHERS_EACH:
            raise web.HTTPServiceUnavailable(text="too many pages are open; look at /state.json")
        response = web.StreamResponse(
            headers={**HEADERS, "Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        )
        self._watchers[address] += 1
        try:
            await response.prepare(request)
            await self._tell(response)
        except (ConnectionError, TimeoutError):
            pass  # the page was closed, or does not read
        finally:
            self._watchers -= Counter([address])  # and forgets an address that has none
        return response

    async def _tell(self, response: web.StreamResponse) -> None:
        told, told_at = "", 0.0
        while not self._closing.is_set():
            text = self._json()
            if text != told or time.monotonic() - told_at > HEARTBEAT_S:
                async with asyncio.timeout(WRITE_S):
                    await response.write(b": here\n\n" if text == told else f"data: {text}\n\n".encode())
                told, told_at = text, time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._closing.wait()

    async def _metrics(self, request: web.Request) -> web.Response:
        at, body = self._measured
        if not body or time.monotonic() - at >= TICK_S:
            body = self._shown.metrics()
            self._measured = time.monotonic(), body
        return web.Response(body=body, headers={"Content-Type": METRICS_TYPE})

    async def _audits(self, request: web.Request) -> web.Response:
        return web.json_response(self._shown.audits_made(), headers={"Cache-Control": "no-store"})

    async def _verdict(self, request: web.Request) -> web.Response:
        body = self._shown.word(request.match_info["peer"])
        if body is None:
            raise web.HTTPNotFound(text="nothing is signed of it")
        return web.Response(body=body, content_type="application/octet-stream", headers={"Cache-Control": "no-store"})

    async def _evidence(self, request: web.Request) -> web.StreamResponse:
        return await self._attached(request, self._shown.evidence(request.match_info["digest"]))

    async def _checkpoint(self, request: web.Request) -> web.StreamResponse:
        path = self._shown.checkpoint_file(int(request.match_info["version"]), request.match_info["name"])
        return await self._attached(request, path)

    async def _attached(self, request: web.Request, path: Path | None) -> web.StreamResponse:
        """A file, as long as its reader takes some of it: few at a time, for the line is the run's too."""
        if path is None:
            raise web.HTTPNotFound(text="not kept here")
        place, who = object(), network_of(request.remote)
        if len(self._downloads) >= MAX_DOWNLOADS or len(self._downloads.of(who)) >= MAX_DOWNLOADS_EACH:
            raise web.HTTPServiceUnavailable(
                text="others are being served; ask again later", headers={"Retry-After": "60"}
            )
        self._downloads.take(place, who)
        response = web.StreamResponse(
            headers={
                **HEADERS,
                "Content-Type": "application/octet-stream",
                "Content-Disposition": f'attachment; filename="{path.name}"',
            }
        )
        try:
            with await asyncio.to_thread(path.open, "rb") as file:
                response.content_length = os.fstat(file.fileno()).st_size
                await response.prepare(request)
                while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
                    async with asyncio.timeout(WRITE_S):
                        await response.write(piece)
        except (ConnectionError, TimeoutError):  # it was closed, or takes nothing: then it gets the rest of nothing
            if request.transport is not None:
                request.transport.abort()
        except OSError as error:
            raise web.HTTPNotFound(text="not kept here any more") from error
        finally:
            self._downloads.leave(place)
        return response


def _fixed(kind: str, body: bytes) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=body, headers={"Content-Type": kind, "Cache-Control": "no-cache"})

    return answer
