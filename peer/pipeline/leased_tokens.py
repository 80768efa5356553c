"""The tokens that a peer of the first stage needs: those of its leases, in advance, and what else it is asked about.

Its own leases are here first. Then come the chunks that will be leased next, shared out among the members, so that the
stage outlives its host by as much; last what was needed before. The latter two keep within a bound.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterable

from peer.round.stage_steps import StageSteps
from peer.stage.events import VersionTurned
from peer.state.downloads import HeldFile
from peer.state.run_files import RunFiles
from swarm.core.errors import RemoteError, TransientError
from swarm.core.ids import MicrobatchId, Step
from swarm.core.pipeline.data_order import Run
from swarm.core.plan import SPARE_TOKEN_BYTES
from swarm.data.batches import Batch, BatchReader, held_out_batch, held_out_run
from swarm.data.piece_store import PieceFolder
from swarm.data.pieces import PIECE_BYTES, PieceList

log = logging.getLogger(__name__)

AT_ONCE = 4
"""Pieces fetched in advance between two looks at what is needed now."""
AGAIN_S = 5.0
"""After nobody gave a piece."""
SPARE_SHARE, LEAST_SPARE, MOST_SPARE = 200, 4, SPARE_TOKEN_BYTES // PIECE_BYTES // 2
"""Pieces of what is ahead, and as many of what was needed before: a 200th of the file, within these."""


class LeasedTokens:
    """Microbatches by their ids, once their tokens are here; `run` brings those that will be needed."""

    def __init__(
        self, files: RunFiles, train: HeldFile[PieceFolder], held_out: HeldFile[PieceFolder], steps: StageSteps
    ) -> None:
        self.reader = BatchReader(files.settings, train.folder)
        self.order = self.reader.order
        self._files = files
        self._train = train
        self._held_out = held_out
        self._steps = steps
        self._settings = files.settings
        self._spare = spare_pieces(train.folder.pieces)
        self._used: dict[int, Step] = {}
        """Chunks that this peer's own microbatches were read from, with the last step that they were born for."""
        self._turned = asyncio.Event()

    async def batch(self, microbatch_id: MicrobatchId, *, born_for: Step | None = None) -> Batch:
        """Tokens and targets; `born_for`: of this peer's own, which it may have to show for some versions.

        Raises TransientError if nobody gives the tokens now.
        """
        if born_for is not None:
            self._used[self.order.chunk_of(microbatch_id)] = born_for
        await self._have(self._train, self.order.runs(microbatch_id))
        return self.reader.batch(microbatch_id)

    async def held_out_batch(self, index: int) -> Batch:
        """Of the held-out tokens. Raises IndexError if there are not so many, TransientError as `batch`."""
        run = held_out_run(self._settings, index)
        await self._have(self._held_out, [run] if run is not None else [])
        return held_out_batch(self._settings, self._held_out.folder, index)

    def leave(self) -> None:
        """This peer needs none of them any more."""
        for file in (self._train, self._held_out):
            file.folder.let_go(self._steps.context.me)

    def turned(self, event: VersionTurned) -> None:
        """The leases are others now."""
        self._turned.set()

    async def run(self) -> None:
        """Fetch in advance, and forget what is needed no more."""
        while True:
            self._turned.clear()
            self._forget()
            try:
                for pieces in self._due():
                    await self._files.fetch(self._train, pieces)
                    if self._turned.is_set():
                        break
                else:
                    await self._turned.wait()
            except (TransientError, RemoteError) as error:
                log.info("tokens in advance: %s", error)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._turned.wait(), AGAIN_S)

    async def _have(self, file: HeldFile[PieceFolder], runs: Iterable[Run]) -> None:
        await self._files.fetch(file, _pieces(file, runs))

    def _due(self) -> Iterable[list[int]]:
        """Pieces to fetch, a few at a time, the most urgent first."""
        missing = [index for index in self._leased() + self._ahead() if index not in self._train.folder]
        return (missing[at : at + AT_ONCE] for at in range(0, len(missing), AT_ONCE))

    def _leased(self) -> list[int]:
        """Pieces of this peer's leases, in their order."""
        me, leases = self._steps.context.me, self._steps.chain.leases
        return self._of_chunks(chunk.position for chunk in leases.open_chunks if chunk.holder == me)

    def _ahead(self) -> list[int]:
        """Pieces of those chunks to be leased next that are this member's to have ready for all."""
        chain = self._steps.chain
        members = [*chain.members]
        if self._steps.context.me not in members:
            return []
        mine, found = members.index(self._steps.context.me), list[int]()
        first = chain.leases.next_chunk
        for position in range(first + mine, first + self._spare * len(members), len(members)):
            pieces = self._of_chunks([position])
            found = list(dict.fromkeys([*found, *pieces]))
            if len(found) >= self._spare:
                break
        return found[: self._spare]

    def _of_chunks(self, positions: Iterable[int]) -> list[int]:
        return _pieces(self._train, (run for position in positions for run in self.order.slices_of_chunk(position)))

    def _forget(self) -> None:
        version = self._steps.version
        kept = self._settings.audits.retained_versions if self._settings.replays else 0
        self._used = {chunk: step for chunk, step in self._used.items() if int(step) >= version - 1 - kept}
        needed = {*self._leased(), *self._of_chunks(self._used), *self._ahead()}
        self._train.folder.forget(self._steps.context.me, needed, self._spare)
        self._held_out.folder.forget(self._steps.context.me, (), self._spare)


def spare_pieces(pieces: PieceList) -> int:
    return min(MOST_SPARE, max(LEAST_SPARE, len(pieces) // SPARE_SHARE))


def _pieces(file: HeldFile[PieceFolder], runs: Iterable[Run]) -> list[int]:
    """That hold these tokens, each once, in order of need."""
    return list(dict.fromkeys(index for run in runs for index in file.folder.of_tokens(*run)))
