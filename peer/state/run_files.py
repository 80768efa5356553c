"""The run's tokens on a peer of the first stage: pieces of its files, as they are needed, from whoever has them.

Peers that have a piece, the host's mirrors and the host give piece after piece, each as fast as it can. A piece has the
digest that the run's settings name by the list of all, whoever gave it.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

from peer.directory.host import TRIES, Host
from peer.directory.limited_transport import LimitedTransport
from swarm.core.canonical import Value
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields, integer_item
from swarm.core.ids import PeerId
from swarm.core.settings import RunSettings
from swarm.data.piece_store import PieceFolder
from swarm.data.pieces import HASH_BYTES, MAX_PIECES, PIECE_BYTES, PieceList
from swarm.disk.whole_file import whole_file
from swarm.file_donor import FileDonor
from swarm.host_protocol import FILE, HELD, PIECES
from swarm.network.services.mirror import MAX_MIRRORS, MirrorClient
from swarm.network.transport import Message, Transport

log = logging.getLogger(__name__)

PIECE_S, ASK_S = 60.0, 10.0
PIECE_TRIES = 3
"""Of the host, for one piece; whoever needs it asks again."""
MAX_DONORS = 4
"""Asked at once, beside the host."""
MAX_URL_CHARACTERS = 500

Source = Callable[[int], Awaitable[bytes | bytearray | memoryview]]
"""A piece of a file. Raises TransientError or RemoteError."""
Donors = Callable[[], Awaitable[Sequence[PeerId]]]
"""Other peers of the first stage."""


@dataclass(frozen=True)
class HeldFile:
    """What is here of a file, and where the rest may be had besides from peers and the host."""

    folder: PieceFolder
    mirrors: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """The token files of one run, as they come to this machine and lie on it."""

    settings: RunSettings
    host: Host
    transport: Transport
    limited: LimitedTransport
    """Counts what comes from mirrors, and holds it to the owner's rate."""
    folder: Path
    donors: Donors
    mirrors: MirrorClient = field(default_factory=MirrorClient)

    async def open(self) -> tuple[HeldFile, HeldFile]:
        """Training and held-out tokens, of which others are given from now on what is here.

        Raises RemoteError for a list of pieces that the run's settings do not name, TransientError when nobody gives
        it.
        """
        data = self.settings.data
        train = await self._open("train", data.train_digest, data.num_train_tokens)
        held_out = await self._open("held-out", data.held_out_digest, data.num_held_out_tokens)
        FileDonor({one.folder.pieces.digest: one.folder for one in (train, held_out)}).serve(self.transport)
        return train, held_out

    async def _open(self, label: str, digest: bytes, num_tokens: int) -> HeldFile:
        size_bytes = num_tokens * self.settings.data.token_bytes
        folder = self.folder / f"{label}-{digest.hex()[:16]}"
        kept = folder.with_suffix(".pieces")
        pieces = await asyncio.to_thread(_kept, kept, digest, size_bytes)
        # Where it is kept, the host is asked all the same, once: it says where the mirrors are.
        try:
            found, mirrors = await self._list_of(digest, size_bytes, tries=TRIES if pieces is None else 1)
        except TransientError:
            if pieces is None:
                raise
            found, mirrors = pieces, ()
        if pieces is None:
            with whole_file(kept) as partial_path:
                partial_path.write_bytes(found.hashes)
        opened = await asyncio.to_thread(PieceFolder, folder, found, self.settings.data.token_bytes)
        log.info("%s: %d of %d pieces are here", label, len(opened.held()), len(found))
        return HeldFile(opened, mirrors)

    async def _list_of(self, digest: bytes, size_bytes: int, *, tries: int) -> tuple[PieceList, Sequence[str]]:
        """What each piece is to be, and the URLs of mirrors: as the host says, or else one of the donors.

        Nobody but the host sends this machine to web servers.
        """
        meta = dict[str, Value](digest=digest)

        def read(answer: dict[str, Value]) -> tuple[PieceList, Sequence[str]]:
            fields = Fields("pieces answer", answer)
            pieces = PieceList.from_value(fields.message("pieces"))
            pieces.check(file_digest=digest, size_bytes=size_bytes)
            return pieces, fields.items("mirrors", _url, max_items=MAX_MIRRORS)

        try:
            return read((await self.host.call(PIECES, meta, tries=tries)).meta)
        except TransientError:
            for donor in (await self.donors())[:MAX_DONORS]:
                try:
                    reply = await self.transport.call(donor, PIECES, Message(meta), timeout_s=ASK_S, max_body_bytes=0)
                    return read(reply.meta | {"mirrors": []})
                except (TransientError, RemoteError) as error:
                    log.info("%s does not say what the pieces are: %s", donor[-6:], error)
            raise

    async def fetch(self, file: HeldFile, wanted: Collection[int]) -> None:
        """Have these pieces here. Raises TransientError when nobody gives one."""
        folder = file.folder
        todo = deque(index for index in dict.fromkeys(wanted) if index not in folder)
        if not todo:
            return
        async with AsyncExitStack() as opened:
            sources: dict[str, tuple[Source, set[int]]] = {}
            for donor, held in await self._holders(folder, set(todo)):
                sources[donor] = (partial(self._by_peer, donor, folder), held)
            if file.mirrors:
                client = await opened.enter_async_context(self.mirrors)
                for url in file.mirrors:
                    sources[url] = (partial(self._by_mirror, client, url, folder), set(todo))
            sources["the host"] = (partial(self._by_host, folder), set(todo))
            log.debug("%s: %d pieces from %d sources", folder.name, len(todo), len(sources))
            while todo:
                able = {name: one for name, one in sources.items() if not one[1].isdisjoint(todo)}
                if not able:
                    raise TransientError(f"nobody gives the last {len(todo)} of {len(wanted)} pieces of {folder.name}")
                work = (_take_from(name, source, held, todo, folder) for name, (source, held) in able.items())
                for name, is_good in zip(list(able), await asyncio.gather(*work), strict=True):
                    if not is_good:
                        del sources[name]

    async def _holders(self, folder: PieceFolder, wanted: set[int]) -> list[tuple[PeerId, set[int]]]:
        """Peers that say they have some of the pieces, and which."""
        meta = dict[str, Value](digest=folder.pieces.digest)

        async def ask(donor: PeerId) -> tuple[PeerId, set[int]]:
            try:
                reply = await self.transport.call(donor, HELD, Message(meta), timeout_s=ASK_S, max_body_bytes=0)
                return donor, _held(reply) & wanted
            except (TransientError, RemoteError) as error:
                log.debug("%s does not say what it holds: %s", donor[-6:], error)
                return donor, set()

        found = await asyncio.gather(*(ask(donor) for donor in (await self.donors())[:MAX_DONORS]))
        return [(donor, held) for donor, held in found if held]

    async def _by_peer(self, donor: PeerId, folder: PieceFolder, index: int) -> memoryview:
        meta: dict[str, Value] = {"digest": folder.pieces.digest, "piece": index}
        reply = await self.transport.call(donor, FILE, Message(meta), timeout_s=PIECE_S, max_body_bytes=PIECE_BYTES)
        return memoryview(reply.body)

    async def _by_host(self, folder: PieceFolder, index: int) -> memoryview:
        meta: dict[str, Value] = {"digest": folder.pieces.digest, "piece": index}
        reply = await self.host.call(FILE, meta, tries=PIECE_TRIES, timeout_s=PIECE_S, max_body_bytes=PIECE_BYTES)
        return memoryview(reply.body)

    async def _by_mirror(self, client: MirrorClient, url: str, folder: PieceFolder, index: int) -> bytes:
        data = await client.read(url, *folder.pieces.span(index))
        await self.limited.take_elsewhere(len(data))
        return data


async def _take_from(name: str, source: Source, held: set[int], todo: deque[int], folder: PieceFolder) -> bool:
    """Keep what the source gives of the pieces to do that it has; False, and the piece is still to do, once it gives a
    wrong one or none.

    A source that has failed is asked no more: there are others.
    """
    for index in [index for index in todo if index in held]:
        if index not in todo:
            continue
        todo.remove(index)
        is_good = False
        try:
            data = await source(index)
            await asyncio.to_thread(folder.put, index, data)
            is_good = True
        except (TransientError, RemoteError) as error:
            log.warning("%s gives no piece any more: %s", name, error)
            return False
        finally:
            if not is_good:
                todo.append(index)
    return True


def _held(reply: Message) -> set[int]:
    bounds = Fields("held", reply.meta).items("held", integer_item, max_items=2 * MAX_PIECES)
    if len(bounds) % 2 or any(one >= other for one, other in pairwise(bounds)) or (bounds and bounds[-1] > MAX_PIECES):
        raise RemoteError("malformed", "pieces that are held are not given as runs")
    return {index for start, stop in zip(bounds[::2], bounds[1::2], strict=True) for index in range(start, stop)}


def _kept(path: Path, digest: bytes, size_bytes: int) -> PieceList | None:
    """The list of pieces that an earlier process left; None if there is none, or not this one."""
    try:
        hashes = path.read_bytes()
        pieces = PieceList(size_bytes, hashes)
        if len(hashes) != HASH_BYTES * len(pieces):
            return None
        pieces.check(file_digest=digest, size_bytes=size_bytes)
    except (OSError, RemoteError):
        return None
    return pieces


def _url(value: Value) -> str:
    return Fields("mirror", {"url": value}).text("url", max_length=MAX_URL_CHARACTERS)
