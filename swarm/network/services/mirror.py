"""Pieces of a file from a web server that its host names: HTTPS, by byte ranges.

What comes is worth no more than its digest. No request goes anywhere before the server has shown a certificate for its
name that this machine trusts.
"""

import ssl
from collections.abc import Sequence
from urllib.parse import urljoin, urlsplit

import aiohttp

from swarm.core.errors import SettingsError, TransientError
from swarm.network.services.web_session import WebSession

MAX_MIRRORS, MAX_MIRROR_CHARACTERS = 4, 400
"""Of a host; peers keep to it too."""
MAX_REDIRECTS = 3
_MOVED = frozenset({301, 302, 303, 307, 308})


class MirrorClient(WebSession):
    """Takes byte ranges of files; a context, which keeps its connections open."""

    def __init__(self, context: ssl.SSLContext | None = None, *, timeout_s: float = 60.0) -> None:
        """`context`: whose certificates are trusted; None: as this machine does. `timeout_s`: of one range."""
        super().__init__(aiohttp.ClientTimeout(total=timeout_s), context)

    async def read(self, url: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of the file at `url`. Raises TransientError when they do not come from there."""
        try:
            for _ in range(MAX_REDIRECTS + 1):
                if urlsplit(url).scheme != "https":
                    raise TransientError(f"mirror {url[:200]}: only https is asked")
                found = await self._read(url, start, stop)
                if isinstance(found, bytes):
                    return found
                url = found
        except (aiohttp.ClientError, TimeoutError, ValueError, OSError, EOFError) as error:
            raise TransientError(f"mirror {url[:200]}: {error or type(error).__name__}") from error
        raise TransientError(f"mirror {url[:200]}: more than {MAX_REDIRECTS} redirects")

    async def _read(self, url: str, start: int, stop: int) -> bytes | str:
        """The bytes, or where else they are said to be."""
        assert self._session is not None
        headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        async with self._session.get(url, headers=headers, allow_redirects=False) as answer:
            if answer.status in _MOVED:
                return urljoin(url, answer.headers.get("Location", ""))
            is_range = answer.headers.get("Content-Range", "").startswith(f"bytes {start}-{stop - 1}/")
            if answer.status != 206 or not is_range:
                raise TransientError(f"mirror {url[:200]}: status {answer.status}, no range of its bytes")
            return await answer.content.readexactly(stop - start)


def checked_mirrors(urls: Sequence[str]) -> tuple[str, ...]:
    """Raises SettingsError."""
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme != "https" or not parts.hostname or len(url) > MAX_MIRROR_CHARACTERS:
            raise SettingsError(f"--mirror {url[:80]}: give the https:// URL of a folder; peers ask no other")
    if len(urls) > MAX_MIRRORS:
        raise SettingsError(f"--mirror: {len(urls)} were given; {MAX_MIRRORS} is the most")
    return tuple(urls)
