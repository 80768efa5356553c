"""Whoever holds pieces of a run's token files serves them: the host, and every peer of the first stage."""

import asyncio
from collections.abc import Mapping, Sequence

from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId
from swarm.data.piece_store import Donated
from swarm.host_protocol import FILE, HELD, PIECES
from swarm.network.transport import Message, Transport


class FileDonor:
    """Answers FILE, HELD and PIECES of some files, by their digests."""

    def __init__(self, files: Mapping[bytes, Donated], mirrors: Sequence[str] = ()) -> None:
        """`mirrors` are the URLs of folders that hold the files too."""
        self._files = files
        self._mirrors = [url.rstrip("/") for url in mirrors]

    def serve(self, transport: Transport) -> None:
        transport.serve(FILE, self._on_file, max_body_bytes=0)
        transport.serve(HELD, self._on_held, max_body_bytes=0)
        transport.serve(PIECES, self._on_pieces, max_body_bytes=0)

    async def _on_file(self, sender: PeerId, request: Message) -> Message:
        fields = Fields("file request", request.meta)
        file, index = self._file(fields, sender), fields.integer("piece")
        if index >= len(file.pieces):
            raise RemoteError("protocol", f"piece {index} of {len(file.pieces)}", sender)
        body = await asyncio.to_thread(file.piece, index)
        if body is None:
            raise TransientError(f"piece {index} is not here")
        return Message({}, body)

    async def _on_held(self, sender: PeerId, request: Message) -> Message:
        file = self._file(Fields("held request", request.meta), sender)
        runs: list[int] = []
        for index in file.held():
            if runs and runs[-1] == index:
                runs[-1] = index + 1
            else:
                runs += [index, index + 1]
        return Message({"held": list(runs)})

    async def _on_pieces(self, sender: PeerId, request: Message) -> Message:
        file = self._file(Fields("pieces request", request.meta), sender)
        return Message({"pieces": file.pieces.to_value(), "mirrors": [f"{url}/{file.name}" for url in self._mirrors]})

    def _file(self, fields: Fields, sender: PeerId) -> Donated:
        file = self._files.get(fields.octets("digest", length=32))
        if file is None:
            raise RemoteError("protocol", "no file with that digest", sender)
        return file
