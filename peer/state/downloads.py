"""What a daemon has of a run's files: opened once, and fetched once, whichever of its peers needs it."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from swarm.core.ids import PeerId
from swarm.data.piece_store import Donated


class Kept(Donated, Protocol):
    """Where pieces come to lie."""

    def __contains__(self, index: object) -> bool: ...

    def put(self, index: int, data: bytes | bytearray | memoryview) -> None:
        """Raises RemoteError for bytes that are not the piece's. Blocks."""


Kept_co = TypeVar("Kept_co", bound=Kept, covariant=True)
File = TypeVar("File", bound=Kept)


@dataclass(frozen=True)
class HeldFile(Generic[Kept_co]):
    """What is here of a file, and where the rest may be had besides from peers and the host."""

    folder: Kept_co
    fetching: asyncio.Lock
    """Held by the one peer that fetches pieces of it; the others find them here then."""
    mirrors: Sequence[str] = ()


class Downloads:
    """Files of one run by where they lie, for all peers of a daemon."""

    def __init__(self, peers: Collection[PeerId] = ()) -> None:
        """`peers`: of the daemon. None of them has anything that is not here."""
        self.peers = frozenset(peers)
        self._opened: dict[Path, tuple[Any, asyncio.Lock]] = {}
        self._readers: defaultdict[Path, set[PeerId]] = defaultdict(set)
        self._opening = asyncio.Lock()

    async def open(
        self, path: Path, opens: Callable[[], File], mirrors: Sequence[str], reader: PeerId
    ) -> HeldFile[File]:
        """The file at `path`, which the first reader `opens`, on a thread. Raises as that does."""
        async with self._opening:
            if path not in self._opened:
                self._opened[path] = await asyncio.to_thread(opens), asyncio.Lock()
            self._readers[path].add(reader)
            folder, fetching = self._opened[path]
            return HeldFile(folder, fetching, mirrors)

    def leave(self, reader: PeerId) -> None:
        """It reads none any more. A file without readers is opened anew by the next, as what the disk then has."""
        for path in list(self._opened):
            self._readers[path].discard(reader)
            if not self._readers[path]:
                del self._opened[path], self._readers[path]
