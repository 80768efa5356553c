"""What a host's web page hands out, fetched: over plain HTTP, so that nothing counts but what a signature names.

How much may come is known before anything does; a transfer is given up when nothing comes for a while, not when it is
long.
"""

from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import aiohttp

from swarm.core.errors import RemoteError, SettingsError, TransientError
from swarm.network.services.web_session import WebSession

STALL_S = 30.0
"""Nothing came for so long: it is given up."""
CONNECT_S = 10.0
PIECE_BYTES = 1 << 20


class WebClient(WebSession):
    """Asks one host's page; a context, which keeps its connection open. No redirect is followed."""

    def __init__(self, url: str, *, stall_s: float = STALL_S) -> None:
        """`url` is the page's. Raises SettingsError for what is none."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SettingsError(f"{url[:80]}: give the http:// URL of a host's page, as the host prints it")
        self._url = f"{parts.scheme}://{parts.netloc}"
        super().__init__(aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=stall_s))

    async def read(self, path: str, *, max_bytes: int) -> bytes:
        """All that is there. Raises as `pieces`."""
        return b"".join([piece async for piece in self.pieces(path, max_bytes=max_bytes)])

    async def pieces(self, path: str, *, max_bytes: int) -> AsyncIterator[bytes]:
        """What is there, as it comes.

        Raises TransientError where it does not come, or ends early; RemoteError("too_large") before a byte past
        `max_bytes` is taken, at once where the answer's head says that there are more.
        """
        assert self._session is not None
        where = f"{self._url}{path}"
        try:
            headers = {"Accept-Encoding": "identity"}
            async with self._session.get(where, headers=headers, allow_redirects=False) as answer:
                if answer.status != 200:
                    raise TransientError(f"{where[:200]}: status {answer.status}")
                if answer.content_length is None:
                    raise RemoteError("malformed", f"{where[:200]}: does not say how long it is")
                if answer.content_length > max_bytes:
                    raise RemoteError("too_large", f"{where[:200]}: {answer.content_length} bytes, {max_bytes} at most")
                left = answer.content_length
                async for piece in answer.content.iter_chunked(PIECE_BYTES):
                    left -= len(piece)
                    if left < 0:
                        raise RemoteError("too_large", f"{where[:200]}: more bytes than it said")
                    yield piece
                if left:
                    raise TransientError(f"{where[:200]}: ended {left} bytes early")
        except (aiohttp.ClientError, TimeoutError, ValueError, OSError, EOFError) as error:
            raise TransientError(f"{where[:200]}: {error or type(error).__name__}") from error
