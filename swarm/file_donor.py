"""Whoever holds a run's token files serves them: the host, and every peer of the first stage."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from swarm.core.errors import RemoteError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId
from swarm.data.pieces import PIECE_BYTES, PieceList
from swarm.host_protocol import FILE, PIECES
from swarm.network.transport import Message, Transport

ListOf = Callable[[bytes], Awaitable[PieceList]]


class FileDonor:
    """Answers FILE and PIECES of some files, by their digests."""

    def __init__(self, files: Mapping[bytes, Path], list_of: ListOf, mirrors: Sequence[str] = ()) -> None:
        """`list_of` a file is signed; `mirrors` are the URLs of folders that hold the files too."""
        self._files = files
        self._list_of = list_of
        self._mirrors = [url.rstrip("/") for url in mirrors]

    def serve(self, transport: Transport) -> None:
        transport.serve(FILE, self._on_file, max_body_bytes=0)
        transport.serve(PIECES, self._on_pieces, max_body_bytes=0)

    async def _on_file(self, sender: PeerId, request: Message) -> Message:
        fields = Fields("file request", request.meta)
        path, offset = self._path(fields, sender), fields.integer("offset")
        return Message({}, await asyncio.to_thread(_piece, path, offset, sender))

    async def _on_pieces(self, sender: PeerId, request: Message) -> Message:
        fields = Fields("pieces request", request.meta)
        path = self._path(fields, sender)
        held = await self._list_of(fields.octets("digest", length=32))
        return Message({"pieces": held.to_value(), "mirrors": [f"{url}/{path.name}" for url in self._mirrors]})

    def _path(self, fields: Fields, sender: PeerId) -> Path:
        path = self._files.get(fields.octets("digest", length=32))
        if path is None:
            raise RemoteError("protocol", "no file with that digest", sender)
        return path


def _piece(path: Path, offset: int, sender: PeerId) -> bytes:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if offset > size:
            raise RemoteError("protocol", f"offset {offset} of a file of {size} bytes", sender)
        file.seek(offset)
        return file.read(PIECE_BYTES)
