"""The run's files on a peer: pieces of tokens and of a frozen base, as they are needed, from whoever has them.

Peers that have a piece, the host's mirrors and the host give piece after piece, each as fast as it can. A piece has the
digest that the run's settings name by the list of all, whoever gave it.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

from peer.directory.host import TRIES, Host
from peer.directory.limited_transport import LimitedTransport
from peer.state.downloads import Downloads, HeldFile, Kept
from swarm.core.canonical import Value
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields, integer_item
from swarm.core.ids import PeerId
from swarm.core.settings import RunSettings
from swarm.data.piece_store import Donated, PieceFolder
from swarm.data.pieces import HASH_BYTES, MAX_PIECES, PIECE_BYTES, PieceList
from swarm.disk.whole_file import whole_file
from swarm.file_donor import FileDonor
from swarm.host_protocol import FILE, HELD, PIECES
from swarm.model.adapters.base import base_layout, base_tensors
from swarm.model.adapters.pieces import BasePieces
from swarm.network.services.mirror import MAX_MIRRORS, MirrorClient
from swarm.network.transport import Message, Transport

log = logging.getLogger(__name__)

PIECE_S, ASK_S = 60.0, 10.0
PIECE_TRIES = 3
"""Of the host, for one piece; whoever needs it asks again."""
MAX_DONORS = 4
"""Asked at once, beside the host."""
SAID_SOON_S = 1.0
"""Donors say by then what they have, or others begin without them."""
LATE_TIMES, LATE_S = 4.0, 1.0
"""At the end of some pieces another source is asked for one that is this late: by times what it took who is idle."""
DONORS_KNOWN_S = 30.0
"""The directory is not asked again for who they are, unless a piece was to be had of nobody."""
MAX_URL_CHARACTERS = 500

Source = Callable[[int], Awaitable[bytes | bytearray | memoryview]]
"""A piece of a file. Raises TransientError or RemoteError."""
Donors = Callable[[], Awaitable[Sequence[PeerId]]]
"""Other peers of the stage."""


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """Files of one run, as they come to this machine and lie on it."""

    settings: RunSettings
    host: Host
    transport: Transport
    limited: LimitedTransport
    """Counts what comes from mirrors, and holds it to the owner's rate."""
    folder: Path
    donors: Donors
    downloads: Downloads
    """What came of them for other peers of this daemon is here too."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One fetch at a time."""
    mirrors: MirrorClient = field(default_factory=MirrorClient)
    known: list[tuple[float, tuple[PeerId, ...]]] = field(default_factory=list)
    """The donors that the directory named last, and when; empty before."""
    given: dict[bytes, Donated] = field(default_factory=dict)
    """What others are given pieces of, by digest."""

    async def open(self) -> tuple[HeldFile[PieceFolder], HeldFile[PieceFolder]]:
        """Training and held-out tokens, of which others are given from now on what is here.

        Raises RemoteError for a list of pieces that the run's settings do not name, TransientError when nobody gives
        it.
        """
        data = self.settings.data
        train = await self._open("train", data.train_digest, data.num_train_tokens)
        held_out = await self._open("held-out", data.held_out_digest, data.num_held_out_tokens)
        self._give(train, held_out)
        return train, held_out

    async def open_base(self, stage: int) -> tuple[HeldFile[BasePieces], list[int]]:
        """The frozen base, of which others are given from now on what is here, and the pieces that the stage computes
        with.

        Raises as `open`.
        """
        digest, model = self.settings.base_digest, self.settings.model
        assert digest is not None, "a run with adapters has it"
        layout, path = base_layout(model), self.folder / f"base-{digest.hex()[:16]}"
        pieces, mirrors = await self._pieces_of(path, digest, layout.size_bytes)
        held = await self.downloads.open(path, lambda: BasePieces(path, pieces), mirrors, self.transport.peer_id)
        wanted = await asyncio.to_thread(held.folder.take_up, base_tensors(model, stage))
        here = sum(index in held.folder for index in wanted)
        log.info("frozen base: %d of %d pieces are here", here, len(wanted))
        self._give(held)
        return held, wanted

    def _give(self, *files: HeldFile[Kept]) -> None:
        if not self.given:
            FileDonor(self.given).serve(self.transport)  # of what is given later too
        self.given.update({file.folder.pieces.digest: file.folder for file in files})

    async def _open(self, label: str, digest: bytes, num_tokens: int) -> HeldFile[PieceFolder]:
        size_bytes = num_tokens * self.settings.data.token_bytes
        folder = self.folder / f"{label}-{digest.hex()[:16]}"
        found, mirrors = await self._pieces_of(folder, digest, size_bytes)
        token_bytes = self.settings.data.token_bytes
        held = await self.downloads.open(
            folder, lambda: PieceFolder(folder, found, token_bytes), mirrors, self.transport.peer_id
        )
        log.info("%s: %d of %d pieces are here", label, len(held.folder.held()), len(found))
        return held

    async def _pieces_of(self, folder: Path, digest: bytes, size_bytes: int) -> tuple[PieceList, Sequence[str]]:
        """The list of a file's pieces, kept beside where they come to lie, and the file at mirrors."""
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
        return found, mirrors

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

    async def fetch(self, file: HeldFile[Kept], wanted: Collection[int]) -> None:
        """Have these pieces here. Raises TransientError when nobody gives one."""
        if any(index not in file.folder for index in wanted):
            async with self.turn, file.fetching:
                await self._fetch(file, wanted)

    async def _fetch(self, file: HeldFile[Kept], wanted: Collection[int]) -> None:
        folder = file.folder
        todo = deque(index for index in dict.fromkeys(wanted) if index not in folder)
        if not todo:
            return
        async with AsyncExitStack() as opened:
            fetching, asked = _Fetching(folder, todo), dict[PeerId, asyncio.Future[set[int]]]()
            for donor in await self._known_donors():
                asked[donor] = asyncio.ensure_future(self._held_by(donor, folder))
                opened.callback(asked[donor].cancel)
            if asked:  # the host is for what nobody else gives, but it waits for nobody who is silent
                await asyncio.wait(asked.values(), timeout=SAID_SOON_S)
            for donor, said in asked.items():
                fetching.begin(donor, partial(self._by_peer, donor, folder), said)
            if file.mirrors:
                client = await opened.enter_async_context(self.mirrors)
                for url in file.mirrors:
                    fetching.begin(url, partial(self._by_mirror, client, url, folder))
            fetching.begin("the host", partial(self._by_host, folder))
            try:
                await fetching.all_here()
            except TransientError:
                self.known.clear()
                raise
            self.known[:] = [
                (at, tuple(donor for donor in donors if donor not in fetching.late)) for at, donors in self.known
            ]

    async def _known_donors(self) -> Sequence[PeerId]:
        """Some peers of the stage; the directory is asked for them now and then."""
        now = time.monotonic()
        if not self.known or now > self.known[0][0] + DONORS_KNOWN_S:
            self.known[:] = [(now, tuple(await self.donors())[:MAX_DONORS])]
        return self.known[0][1]

    async def _held_by(self, donor: PeerId, folder: Kept) -> set[int]:
        """The pieces that it says it has. Raises TransientError or RemoteError."""
        meta = dict[str, Value](digest=folder.pieces.digest)
        reply = await self.transport.call(donor, HELD, Message(meta), timeout_s=ASK_S, max_body_bytes=0)
        return _held(reply)

    async def _by_peer(self, donor: PeerId, folder: Kept, index: int) -> memoryview:
        meta: dict[str, Value] = {"digest": folder.pieces.digest, "piece": index}
        reply = await self.transport.call(donor, FILE, Message(meta), timeout_s=PIECE_S, max_body_bytes=PIECE_BYTES)
        return memoryview(reply.body)

    async def _by_host(self, folder: Kept, index: int) -> memoryview:
        meta: dict[str, Value] = {"digest": folder.pieces.digest, "piece": index}
        reply = await self.host.call(FILE, meta, tries=PIECE_TRIES, timeout_s=PIECE_S, max_body_bytes=PIECE_BYTES)
        return memoryview(reply.body)

    async def _by_mirror(self, client: MirrorClient, url: str, folder: Kept, index: int) -> bytes:
        data = await client.read(url, *folder.pieces.span(index))
        await self.limited.take_elsewhere(len(data))
        return data


class _Fetching:
    """Some pieces on their way from several sources at once. Nobody waits for a source that has nothing in hand."""

    def __init__(self, folder: Kept, todo: deque[int]) -> None:
        self._folder = folder
        self._todo = todo
        self._num_wanted = len(todo)
        self._in_hand: dict[str, int] = {}
        """The piece that each source is giving."""
        self._asked_at: dict[str, float] = {}
        self._took_s: dict[str, float] = {}
        """Of each source, by its last piece."""
        self.late = set[str]()
        """Sources that were given up while others waited for them."""
        self._running: dict[asyncio.Task[None], str] = {}
        self._again = asyncio.Event()
        """A piece is to do that was in a source's hand."""

    def begin(self, name: str, source: Source, said: Awaitable[set[int]] | None = None) -> None:
        """Have the source give what it has: all, unless it is `said` which."""
        self._running[asyncio.ensure_future(self._take_from(name, source, said))] = name

    async def all_here(self) -> None:
        """Raises TransientError when nobody gives what is left."""
        try:
            while self._todo or self._in_hand:
                if not self._running:
                    raise TransientError(
                        f"nobody gives the last {len(self._todo)} of {self._num_wanted} pieces of {self._folder.name}"
                    )
                done, _ = await asyncio.wait(self._running, timeout=LATE_S, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    del self._running[task]
                    task.result()
                await self._give_up(self._late_ones())
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    def _late_ones(self) -> "list[asyncio.Task[None]]":
        """Who holds up all that is left, though somebody idle would have given it several times."""
        idle_s = [
            self._took_s[name] for name in self._running.values() if name in self._took_s and name not in self._in_hand
        ]
        if self._todo or not idle_s:
            return []
        due = time.monotonic() - max(LATE_TIMES * min(idle_s), LATE_S)
        return [task for task, name in self._running.items() if name in self._in_hand and self._asked_at[name] < due]

    async def _give_up(self, tasks: "list[asyncio.Task[None]]") -> None:
        for task in tasks:
            self.late.add(self._running.pop(task))
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _take_from(self, name: str, source: Source, said: Awaitable[set[int]] | None) -> None:
        """Keep what the source gives of the pieces to do that it has, until there are none. A source that gives a wrong
        one or none is asked no more: there are others."""
        try:
            held = await said if said is not None else None
            while True:
                self._again.clear()
                index = next((index for index in self._todo if held is None or index in held), None)
                if index is not None:
                    await self._take(name, source, index)
                elif any(one != name for one in self._in_hand):
                    await self._again.wait()  # who has it may fail
                else:
                    return
        except (TransientError, RemoteError) as error:
            log.info("%s gives no piece any more: %s", name, error)

    async def _take(self, name: str, source: Source, index: int) -> None:
        self._todo.remove(index)
        self._in_hand[name], self._asked_at[name] = index, time.monotonic()
        is_good = False
        try:
            data = await source(index)
            await asyncio.to_thread(self._folder.put, index, data)
            self._took_s[name] = time.monotonic() - self._asked_at[name]
            is_good = True
        finally:
            del self._in_hand[name]
            if not is_good:
                self._todo.append(index)
            self._again.set()


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
