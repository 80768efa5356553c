"""HTTP asked of a stranger: what its answers' heads may take is bounded, and nothing of it is kept or unpacked."""

import ssl
from types import TracebackType
from typing import Self

import aiohttp

MAX_HEADER_BYTES = 8 << 10
CONNECTIONS_EACH = 2
"""Of those that are kept open to one host."""


class WebSession:
    """A context, which keeps its connections open."""

    def __init__(self, timeout: aiohttp.ClientTimeout, context: ssl.SSLContext | None = None) -> None:
        """`context`: whose certificates are trusted; None: as this machine does."""
        self._timeout = timeout
        self._context = context
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                ssl=self._context or ssl.create_default_context(), limit_per_host=CONNECTIONS_EACH
            ),
            timeout=self._timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()
