"""This is where the host says what it knows to whoever holds an invite: the answers of its gRPC service."""

import asyncio
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import BinaryIO

from bootstrap.books import Books
from bootstrap.coordinator import Coordinator
from swarm import PROTOCOL, __version__
from swarm.admission_request import MAX_REQUEST_BYTES, AdmissionRequest
from swarm.checkpoint.archive import INFO_FILE, checkpoint_path
from swarm.checkpoint.record import CheckpointRecord
from swarm.core.canonical import pack, unpack
from swarm.core.errors import RemoteError
from swarm.core.ids import PeerId
from swarm.proto import coordinator_pb2 as pb

PIECE_BYTES = 256 << 10
MAX_LEADERS = 100


class CoordinatorAnswers:
    """What `swarm.network.coordinator_service` asks for."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._run = coordinator.run

    async def run(self, request: pb.RunRequest) -> pb.Run:
        return pb.Run(
            signed_run=pack(self._run.signed.to_value()),
            protocol=PROTOCOL,
            release=__version__,
            minimum_release=self._coordinator.settings.minimum_release,
            admission=self._coordinator.admission.policy.kind,
        )

    async def admit(self, request: pb.AdmitRequest) -> pb.Admission:
        asked = AdmissionRequest.from_value(unpack(request.request, max_bytes=MAX_REQUEST_BYTES))
        asked.check(run_id=self._run.run_id, now=time.time())
        if asked.stage is not None:
            self._check_stage(asked.stage)
        ticket = self._coordinator.admission.admit(
            asked.peer_id, asked.stage, asked.chain_end, asked.voucher, asked_at_ms=asked.asked_at_ms
        )
        papers = self._coordinator.justice.papers_for(asked.peer_id)
        return pb.Admission(ticket=pack(ticket.to_value()), papers=pack(papers))

    async def peers(self, request: pb.PeersRequest) -> pb.Peers:
        self._check_stage(request.stage)
        figures = self._coordinator.progress.peers
        return pb.Peers(
            peers=[
                pb.Peer(
                    peer_id=peer,
                    stage=known.stage,
                    version=known.last.version if known.last is not None else 0,
                    present=not known.left,
                )
                for peer, known in sorted(figures.items())
                if known.stage == request.stage
            ]
        )

    async def checkpoints(self, request: pb.CheckpointsRequest) -> pb.Checkpoints:
        held = sorted(self._coordinator.books.checkpoints.items())
        return pb.Checkpoints(records=[pack(record) for version, record in held if self._is_here(version)])

    async def download(self, request: pb.DownloadRequest) -> AsyncGenerator[pb.Piece, None]:
        record = self._coordinator.books.checkpoints.get(request.version)
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
                yield pb.Piece(data=piece)
        finally:
            file.close()

    async def status(self, request: pb.StatusRequest) -> pb.Status:
        progress, books, settings = self._coordinator.progress, self._coordinator.books, self._run.settings
        missing = self._coordinator.missing()
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
            books=books.digest(),
        )

    async def credit(self, request: pb.CreditRequest) -> pb.Credits:
        books = self._coordinator.books
        if not request.peer_id:
            leaders = books.leaders(MAX_LEADERS)
            return pb.Credits(credits=[_credit(books, peer, rank) for rank, (peer, _) in enumerate(leaders, start=1)])
        peer = PeerId(request.peer_id)
        if peer not in books.credit:
            raise RemoteError("unknown", f"{request.peer_id[:60]} has no credit in this run")
        return pb.Credits(credits=[_credit(books, peer, books.ranks().get(peer, 0))])

    def _check_stage(self, stage: int) -> None:
        num_stages = self._run.settings.model.num_stages
        if stage >= num_stages:
            raise RemoteError("malformed", f"stage {stage}: this run has stages 0 to {num_stages - 1}")

    def _folder_of(self, version: int) -> Path:
        return checkpoint_path(self._run.folder.checkpoints, version)

    def _is_here(self, version: int) -> bool:
        return (self._folder_of(version) / INFO_FILE).is_file()


def _credit(books: Books, peer: PeerId, rank: int) -> pb.Credit:
    held = books.credit[peer]
    return pb.Credit(
        peer_id=peer,
        num_tokens=held.num_tokens,
        num_microbatches=held.num_microbatches,
        num_steps=held.num_steps,
        rank=rank,
    )


def _opened(path: Path, offset: int) -> BinaryIO:
    file = path.open("rb")
    file.seek(offset)
    return file
