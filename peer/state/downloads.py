"""What a daemon has of a run's files: opened once, and fetched once, whichever of its peers needs it."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
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
    mirrors: Sequence[str] = ()
    fetching: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the one peer that fetches pieces of it; the others find them here then."""


class Downloads:
    """Files of one run by where they lie, for all peers of a daemon."""

    def __init__(self, peers: Collection[PeerId] = ()) -> None:
        """`peers`: of the daemon. None of them has anything that is not here."""
        self.peers = frozenset(peers)
        self._held: dict[Path, HeldFile[Any]] = {}
        self._opening = asyncio.Lock()

    async def opened(self, path: Path, opens: Callable[[], Awaitable[HeldFile[File]]]) -> HeldFile[File]:
        """The file at `path`, which the first who asks for it `opens`. Raises as that does."""
        async with self._opening:
            held: HeldFile[File] | None = self._held.get(path)
            if held is None:
                held = self._held[path] = await opens()
            return held
