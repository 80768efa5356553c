"""What the host says to whoever holds an invite: the answers of its gRPC service."""

import asyncio
import heapq
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import BinaryIO

from bootstrap.program.books import Credit
from bootstrap.program.host import Host
from swarm.checkpoint.archive import INFO_FILE, checkpoint_path
from swarm.checkpoint.record import CheckpointRecord
from swarm.core.canonical import pack
from swarm.core.errors import RemoteError
from swarm.core.ids import PeerId
from swarm.proto import coordinator_pb2 as pb
from swarm.release import PROTOCOL, __version__

PIECE_BYTES = 256 << 10
LISTED_FOR_S = 2.0
"""Who is there is looked up at most so often, however many ask: anybody may be admitted, and make the list long."""
MAX_LISTED = 1024
"""Peers of a stage."""
NOTHING = Credit()


class CoordinatorAnswers:
    """What `swarm.network.services.coordinator_service` asks for."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._run = host.run
        self._listed: list[pb.Peers] = []
        """By stage, as of the last look."""
        self._listed_at = 0.0

    async def run(self, request: pb.RunRequest) -> pb.Run:
        return pb.Run(
            signed_run=pack(self._run.signed.to_value()),
            protocol=PROTOCOL,
            release=__version__,
            minimum_release=self._host.settings.minimum_release,
            admission=self._host.admission.policy.kind,
        )

    async def peers(self, request: pb.PeersRequest) -> pb.Peers:
        num_stages = self._run.settings.model.num_stages
        if request.stage >= num_stages:
            raise RemoteError("malformed", f"stage {request.stage}: this run has stages 0 to {num_stages - 1}")
        now = time.monotonic()
        if not self._listed or now >= self._listed_at + LISTED_FOR_S:
            self._listed, self._listed_at = self._lists(num_stages), now
        return self._listed[request.stage]

    def _lists(self, num_stages: int) -> list[pb.Peers]:
        """Of each stage those who have done most, and of who has done nothing those who were heard of last."""
        books, ranks = self._host.books, self._host.books.ranks()
        found: list[list[tuple[tuple[int, bool, float], PeerId]]] = [[] for _ in range(num_stages)]
        for peer, known in self._host.progress.peers.items():
            done = books.credit.get(peer, NOTHING).num_tokens
            found[known.stage].append(((done, not known.left, known.last_heard), peer))
        listed = [sorted(peer for _, peer in heapq.nlargest(MAX_LISTED, of_stage)) for of_stage in found]
        return [pb.Peers(peers=[self._told(peer, ranks.get(peer, 0)) for peer in peers]) for peers in listed]

    def _told(self, peer: PeerId, rank: int) -> pb.Peer:
        known, credit = self._host.progress.peers[peer], self._host.books.credit.get(peer, NOTHING)
        last = known.last
        return pb.Peer(
            peer_id=peer,
            stage=known.stage,
            version=last.version if last is not None else 0,
            present=not known.left,
            num_tokens=credit.num_tokens,
            num_microbatches=credit.num_microbatches,
            num_steps=credit.num_steps,
            rank=rank,
            num_direct=last.num_direct if last is not None else 0,
            num_punched=last.num_punched if last is not None else 0,
            num_relayed=last.num_relayed if last is not None else 0,
        )

    async def checkpoints(self, request: pb.CheckpointsRequest) -> pb.Checkpoints:
        held = sorted(self._host.books.checkpoints.items())
        return pb.Checkpoints(records=[pack(record) for version, record in held if self._is_here(version)])

    async def download(self, request: pb.DownloadRequest) -> AsyncGenerator[pb.Piece, None]:
        record = self._host.books.checkpoints.get(request.version)
        if record is None or not self._is_here(request.version):
            raise RemoteError("unknown", f"no checkpoint of version {request.version} is kept here")
        files = {file.name: file for file in CheckpointRecord.from_value(record).files}
        if request.name not in files:
            raise RemoteError("unknown", f"checkpoint {request.version} has no file {request.name[:80]!r}")
        if request.offset > files[request.name].size_bytes:
            raise RemoteError(
                "malformed", f"offset {request.offset} of a file of {files[request.name].size_bytes} bytes"
            )
        try:
            file = await asyncio.to_thread(_opened, self._folder_of(request.version) / request.name, request.offset)
        except OSError as error:
            raise RemoteError("unknown", f"checkpoint {request.version} is not kept here any more") from error
        try:
            while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
                self._host.downloads.note(request.version, now=asyncio.get_running_loop().time())
                yield pb.Piece(data=piece)
        finally:
            file.close()

    async def status(self, request: pb.StatusRequest) -> pb.Status:
        progress, books, settings = self._host.progress, self._host.books, self._run.settings
        missing = self._host.missing()
        return pb.Status(
            run_id=self._run.run_id,
            name=settings.name,
            version=progress.done_versions(),
            total_steps=settings.optimizer.total_steps,
            stages=[
                pb.Stage(
                    stage=stage,
                    version=books.versions.get(stage, (self._run.version, b""))[0],
                    num_present=len(progress.present(stage=stage)),
                    num_missing=missing.get(stage, 0),
                )
                for stage in range(settings.model.num_stages)
            ],
            num_tokens=progress.tokens,
            tokens_per_s=progress.recent_tokens_per_s(),
            loss=progress.last_loss(),
            held_out_loss=books.held_out[max(books.held_out)] if books.held_out else None,
            num_events=books.num_events,
            books=books.history,
        )

    def _folder_of(self, version: int) -> Path:
        return checkpoint_path(self._run.folder.checkpoints, version)

    def _is_here(self, version: int) -> bool:
        return (self._folder_of(version) / INFO_FILE).is_file()


def _opened(path: Path, offset: int) -> BinaryIO:
    file = path.open("rb")
    file.seek(offset)
    return file
