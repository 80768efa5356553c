"""The run's tokens for a peer of the first stage: from peers, the host's mirrors, and the host.

Each source gives piece after piece as fast as it can. A piece has the digest that the run key signs for, whoever gave
it; so has the whole file.
"""

import asyncio
import contextlib
import logging
import os
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO

from peer.directory.host import TRIES, Host
from peer.directory.limited_transport import LimitedTransport
from swarm.core.canonical import Value
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId
from swarm.core.settings import RunSettings
from swarm.data.pieces import PIECE_BYTES, PieceList
from swarm.data.token_file import TokenFile
from swarm.file_donor import FileDonor
from swarm.host_protocol import FILE, PIECES
from swarm.network.services.mirror import MAX_MIRRORS, MirrorClient
from swarm.network.transport import Message, Transport

log = logging.getLogger(__name__)

PIECE_S, ASK_S = 60.0, 10.0
PIECE_TRIES = 20
MAX_DONORS = 4
"""Asked at once, beside the host."""
MAX_URL_CHARACTERS = 500

Source = Callable[[int, int], Awaitable[bytes | bytearray | memoryview]]
"""Bytes [start, stop) of a file. Raises TransientError or RemoteError."""


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """The token files of one run, as they come to this machine and lie on it."""

    settings: RunSettings
    run_key: PeerId
    host: Host
    transport: Transport
    limited: LimitedTransport
    """Counts what comes from mirrors, and holds it to the owner's rate."""
    folder: Path
    mirrors: MirrorClient = field(default_factory=MirrorClient)

    async def get(self, donors: Callable[[], Awaitable[Sequence[PeerId]]]) -> tuple[TokenFile, TokenFile]:
        """Training and held-out tokens, which others are given from now on too.

        `donors`: other peers of the first stage, asked for if something is missing. Raises RemoteError for what the run
        key did not sign, TransientError when nobody gives a piece.
        """
        data, lists, files = self.settings.data, dict[bytes, PieceList](), dict[bytes, TokenFile]()
        others: list[PeerId] | None = None
        for digest, num_tokens, label in (
            (data.train_digest, data.num_train_tokens, "train"),
            (data.held_out_digest, data.num_held_out_tokens, "held-out"),
        ):
            path = self.folder / f"{label}-{digest.hex()[:16]}.tokens"
            is_here = path.exists()
            if not is_here and others is None:
                others = list(await donors())[:MAX_DONORS]
            size_bytes = num_tokens * data.token_bytes
            if is_here:
                with contextlib.suppress(TransientError):  # then others are not given the file
                    lists[digest], _ = await self._list_of(digest, size_bytes, [], tries=1)
            else:
                lists[digest], mirrors = await self._list_of(digest, size_bytes, others or [])
                await self._fetch(lists[digest], path, others or [], mirrors)
            file = TokenFile(path, data.token_bytes)
            await asyncio.to_thread(file.verify, num_tokens=num_tokens, digest=digest)
            files[digest] = file

        async def list_of(digest: bytes) -> PieceList:
            return lists[digest]

        FileDonor({digest: files[digest].path for digest in lists}, list_of).serve(self.transport)
        return files[data.train_digest], files[data.held_out_digest]

    async def _list_of(
        self, digest: bytes, size_bytes: int, donors: Sequence[PeerId], *, tries: int = TRIES
    ) -> tuple[PieceList, Sequence[str]]:
        """What each piece is to be, and the URLs of mirrors: as the host says, or else one of the donors.

        Nobody but the host sends this machine to web servers.
        """
        about, meta = f"pieces {digest.hex()}", dict[str, Value](digest=digest)

        def read(answer: dict[str, Value]) -> tuple[PieceList, Sequence[str]]:
            fields = Fields("pieces answer", answer)
            pieces = PieceList.from_value(fields.message("pieces"))
            pieces.check(file_digest=digest, size_bytes=size_bytes, run_key=self.run_key)
            return pieces, fields.items("mirrors", _url, max_items=MAX_MIRRORS)

        try:
            answer = await self.host.answer(about, PIECES, meta, tries=tries)
        except TransientError:
            for donor in donors:
                try:
                    reply = await self.transport.call(donor, PIECES, Message(meta), timeout_s=ASK_S, max_body_bytes=0)
                    return read(reply.meta | {"mirrors": []})
                except (TransientError, RemoteError) as error:
                    log.info("%s does not say what the pieces are: %s", donor[-6:], error)
            raise
        found = read(answer)
        self.host.kept.keep(about, answer)
        return found

    async def _fetch(self, pieces: PieceList, path: Path, donors: Sequence[PeerId], mirrors: Sequence[str]) -> None:
        partial_path = path.with_suffix(".partial")
        async with AsyncExitStack() as opened:
            sources: dict[str, Source] = {donor: partial(self._by_peer, donor, pieces) for donor in donors}
            if mirrors:
                client = await opened.enter_async_context(self.mirrors)
                sources |= {url: partial(self._by_mirror, client, url) for url in mirrors}
            sources["the host"] = partial(self._by_host, pieces)
            file = opened.enter_context(os.fdopen(os.open(partial_path, os.O_RDWR | os.O_CREAT, 0o600), "r+b"))
            todo = deque(await asyncio.to_thread(pieces.missing, file))
            log.info("%s: %d of %d pieces from %d sources", path.name, len(todo), len(pieces), len(sources))
            while todo:
                if not sources:
                    raise TransientError(f"nobody gives the last {len(todo)} of {len(pieces)} pieces of {path.name}")
                work = (_take_from(name, source, todo, pieces, file) for name, source in sources.items())
                for name, is_good in zip(list(sources), await asyncio.gather(*work), strict=True):
                    if not is_good:
                        del sources[name]
            file.flush()
            await asyncio.to_thread(os.fsync, file.fileno())
        os.replace(partial_path, path)

    async def _by_peer(self, donor: PeerId, pieces: PieceList, start: int, stop: int) -> memoryview:
        meta: dict[str, Value] = {"digest": pieces.file_digest, "offset": start}
        reply = await self.transport.call(donor, FILE, Message(meta), timeout_s=PIECE_S, max_body_bytes=PIECE_BYTES)
        return memoryview(reply.body)

    async def _by_host(self, pieces: PieceList, start: int, stop: int) -> memoryview:
        meta: dict[str, Value] = {"digest": pieces.file_digest, "offset": start}
        reply = await self.host.call(FILE, meta, tries=PIECE_TRIES, timeout_s=PIECE_S, max_body_bytes=PIECE_BYTES)
        return memoryview(reply.body)

    async def _by_mirror(self, client: MirrorClient, url: str, start: int, stop: int) -> bytes:
        data = await client.read(url, start, stop)
        await self.limited.take_elsewhere(len(data))
        return data


async def _take_from(name: str, source: Source, todo: deque[int], pieces: PieceList, file: BinaryIO) -> bool:
    """Write what the source gives of the pieces to do; False, and the piece is still to do, once it gives a wrong one.

    A source that has failed is asked no more: there are others.
    """
    while todo:
        index = todo.popleft()
        is_good = False
        try:
            data = await source(*pieces.span(index))
            is_good = await asyncio.to_thread(pieces.is_piece, index, memoryview(data))
            if not is_good:
                raise RemoteError("digest", f"piece {index} is not what the run key signs for")
            await asyncio.to_thread(os.pwrite, file.fileno(), data, pieces.span(index)[0])
        except (TransientError, RemoteError) as error:
            log.warning("%s gives no piece any more: %s", name, error)
            return False
        finally:
            if not is_good:
                todo.append(index)
    return True


def _url(value: Value) -> str:
    return Fields("mirror", {"url": value}).text("url", max_length=MAX_URL_CHARACTERS)
