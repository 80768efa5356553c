"""This is where a peer of the first stage gets the run's tokens, from the host, each file checked by its digest."""

import hashlib
import os
from pathlib import Path

from peer.host import Host
from swarm.core.canonical import Value
from swarm.core.errors import RemoteError
from swarm.core.settings import RunSettings
from swarm.data.token_file import TokenFile
from swarm.host_protocol import FILE, FILE_PIECE_BYTES

PIECE_S = 60.0
PIECE_TRIES = 20


async def fetch_files(host: Host, settings: RunSettings, folder: Path) -> tuple[TokenFile, TokenFile]:
    """Training and held-out tokens, as they lie in `folder`. Raises RemoteError for others, TransientError without."""
    data = settings.data
    files = []
    for digest, num_tokens, label in (
        (data.train_digest, data.num_train_tokens, "train"),
        (data.held_out_digest, data.num_held_out_tokens, "held-out"),
    ):
        path = folder / f"{label}-{digest.hex()[:16]}.tokens"
        if not path.exists():
            await _fetch_file(host, digest, num_tokens * data.token_bytes, path)
        file = TokenFile(path, data.token_bytes)
        file.verify(num_tokens=num_tokens, digest=digest)
        files.append(file)
    return files[0], files[1]


async def _fetch_file(host: Host, digest: bytes, size_bytes: int, path: Path) -> None:
    partial = path.with_suffix(f".{os.getpid()}.partial")
    found = hashlib.sha256()
    try:
        with partial.open("wb") as file:
            while file.tell() < size_bytes:
                meta: dict[str, Value] = {"digest": digest, "offset": file.tell()}
                reply = await host.call(
                    FILE, meta, tries=PIECE_TRIES, timeout_s=PIECE_S, max_body_bytes=FILE_PIECE_BYTES
                )
                if not reply.body:
                    break
                found.update(reply.body)
                file.write(reply.body)
        if found.digest() != digest:
            raise RemoteError("digest", f"file {path.name} from the host differs from its digest", host.peer_id)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
