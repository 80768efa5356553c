"""The host's archive: at due versions it fetches each stage's state, and signs for what it has written."""

import asyncio
import logging
import random
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Sequence
from pathlib import Path
from typing import Any

from bootstrap.owner.progress import RunProgress, VersionGone
from bootstrap.program.ledger import Ledger
from bootstrap.state.beginning import StageStart
from bootstrap.state.run_folder import PreparedRun
from swarm.checkpoint.archive import CheckpointMeta, CheckpointWriter, keep_last, latest_checkpoint
from swarm.checkpoint.huggingface import copy_tokenizer
from swarm.checkpoint.parent import PARENT
from swarm.checkpoint.record import TOKENIZER, CheckpointRecord, files_below
from swarm.checkpoint.state import StageState
from swarm.checkpoint.transfer import Offer, fetch_state_by_digest
from swarm.core.errors import RemoteError, TransientError
from swarm.core.ids import PeerId
from swarm.core.pipeline.leases import LeaseTable
from swarm.core.seats import seats, weight_of
from swarm.core.state.stage_chain import StageChain
from swarm.manifest.value import json_of, settings_to_value
from swarm.network.transport import Transport
from verification.state.anchor import Anchor

log = logging.getLogger(__name__)

PAUSE_S = 0.5
SPARED_S = 600.0
"""In which whoever downloads a checkpoint has asked for the next of it, also after a break."""
TRY_AGAIN_S = 5.0
ANCHOR_WAIT_S = 5.0
"""For the members' agreement on a version, before a state is taken that is not anchored: the one that most of those
who report one report, by their certified work."""
REPORTS_WAIT_S = 60.0
"""For the reports of members who do more than half of the work of those who are there."""


class Downloads:
    """When something was last downloaded of each checkpoint: one that is being fetched is not removed."""

    def __init__(self) -> None:
        self._at: dict[int, float] = {}

    def note(self, version: int, *, now: float) -> None:
        self._at[version] = now

    def lately(self, *, now: float) -> list[int]:
        """Versions of which something was in the last SPARED_S, the latest first."""
        self._at = {version: at for version, at in self._at.items() if now < at + SPARED_S}
        return sorted(self._at, key=lambda version: (-self._at[version], version))


class Archivist:
    """Writes a run's checkpoints."""

    def __init__(
        self,
        run: PreparedRun,
        transport: Transport,
        ledger: Ledger,
        progress: RunProgress,
        anchor_of: Callable[[int, int], Anchor | None],
        chain_at: Callable[[int, int], StageChain | None],
        kept_checkpoints: int,
        lineage: Callable[[], dict[str, Any]],
        downloads: Downloads,
    ) -> None:
        """`anchor_of` a stage at a version, if there is one by now; `chain_at`: what is certified of it, where that is
        known here; `lineage` of the weights, for the model card."""
        self._run = run
        self._transport = transport
        self._ledger = ledger
        self._progress = progress
        self._anchor_of = anchor_of
        self._chain_at = chain_at
        self._kept_checkpoints = kept_checkpoints
        self._lineage = lineage
        self._downloads = downloads
        self.paths: dict[int, Path] = {}
        """Of what this process has written."""

    async def archive(self, version: int, starts: list[StageStart]) -> Path:
        """Write the checkpoint of this version, from whichever peers have its states.

        Tries again while the disk does not take it. Raises VersionGone when no peer has one of them any more.
        """
        made: tuple[Path, bool, list[bytes]] | None = None
        while True:
            try:
                made = made or await self._written(version, starts)
                return await self._signed(made[0], version, *made[1:])
            except OSError as error:
                log.error("checkpoint %d: %s; it is tried again: look at the disk's free space", version, error)
            await asyncio.sleep(TRY_AGAIN_S)

    async def _written(self, version: int, starts: list[StageStart]) -> tuple[Path, bool, list[bytes]]:
        """The checkpoint where all see it, whether all of its states are anchored, and their digests."""
        leases, digests, anchored = LeaseTable(), list[bytes](), True
        writer = await asyncio.to_thread(CheckpointWriter, self._run.folder.checkpoints, version)
        try:
            for stage, start in enumerate(starts):
                state, offer, agreed = await self.state_of(stage, version, start)
                anchored = anchored and agreed
                digests.append(offer.digest)
                if stage == 0:
                    leases = self._leases_of(version, offer)
                await asyncio.to_thread(writer.add_stage, stage, state)
            await self._seal(writer, leases)
            path = await asyncio.to_thread(writer.show)
        except BaseException:
            writer.abandon()
            raise
        return path, anchored, digests

    def _leases_of(self, version: int, offer: Offer) -> LeaseTable:
        """How far the data was used, as this host has certified it: a version's name binds no leases, and so a donor
        could name any. Its word counts where the host does not know the version."""
        anchor = self._anchor_of(0, version)
        known = self._chain_at(0, version) or (anchor.chain if anchor is not None else offer.chain)
        return known.leases if known is not None else LeaseTable()

    async def archive_beginning(
        self,
        version: int,
        starts: Sequence[StageStart],
        leases: LeaseTable,
        *,
        anchored: bool,
        begin: Callable[[], None],
    ) -> Path:
        """Write where the stages begin again as a checkpoint, which a host that is started again begins from.

        `anchored`: whether the states that these are made of were. `begin` is called when all of it is on disk, before
        anybody can see it: if it raises, nothing is kept. From then on the geneses name these states, and all of it is
        kept, whatever ends this host: the next one makes it visible.
        """
        writer = await asyncio.to_thread(CheckpointWriter, self._run.folder.checkpoints, version)
        try:
            for stage, start in enumerate(starts):
                await asyncio.to_thread(writer.add_stage, stage, start.state)
            await self._seal(writer, leases)
            begin()
        except BaseException:
            writer.abandon()
            raise
        path = await asyncio.to_thread(writer.show)
        return await self._signed(path, version, anchored, [start.offer.digest for start in starts])

    async def sign_newest(self, signed: Collection[int]) -> None:
        """Sign for the newest checkpoint on this disk, if it is none of those `signed`: an earlier process was killed
        when all of it was there, and nobody would ever fetch it."""
        info = await asyncio.to_thread(latest_checkpoint, self._run.folder.checkpoints)
        if info is None or info.version in signed:
            return
        log.warning("checkpoint %d was whole, and not signed yet", info.version)
        digests = [record.digest for record in info.stages]
        anchors = [self._anchor_of(stage, info.version) for stage in range(len(digests))]
        anchored = digests == [None if anchor is None else anchor.state_digest for anchor in anchors]
        await self._signed(info.path, info.version, anchored, digests)

    async def _seal(self, writer: CheckpointWriter, leases: LeaseTable) -> None:
        """All stages are in the checkpoint: now the rest is, too."""
        settings = self._run.settings
        if self._run.tokenizer is not None:
            (writer.folder / TOKENIZER).mkdir()
            await asyncio.to_thread(copy_tokenizer, self._run.tokenizer, writer.folder / TOKENIZER)
        if self._run.parent is not None:
            await asyncio.to_thread(shutil.copytree, self._run.parent, writer.folder / PARENT)
        meta = CheckpointMeta(
            model=settings.model,
            tokenizer=settings.data.tokenizer,
            run=json_of(settings_to_value(settings)),
            data_position=json_of(leases.to_value()),
            lineage=self._lineage(),
        )
        await asyncio.to_thread(writer.seal, meta)

    async def _signed(self, path: Path, version: int, anchored: bool, digests: Sequence[bytes]) -> Path:
        files = await asyncio.to_thread(files_below, path)
        record = CheckpointRecord(self._run.run_id, version, anchored, tuple(digests), files)
        self._ledger.append("checkpoint", record.signed_by(self._run.run_key).to_value())
        spared = self._downloads.lately(now=asyncio.get_running_loop().time())
        await asyncio.to_thread(keep_last, self._run.folder.checkpoints, self._kept_checkpoints, spared)
        self.paths[version] = path
        return path

    async def state_of(self, stage: int, version: int, start: StageStart) -> tuple[StageState, Offer, bool]:
        """The state, what a donor said of it, and whether it is the one that is anchored. Raises VersionGone."""
        loop = asyncio.get_running_loop()
        began, held = loop.time(), dict[bytes, memoryview]()
        while True:
            self._check_is_there(stage, version)
            anchor = self._anchor_of(stage, version)
            waited_s = loop.time() - began
            wanted = anchor.state_digest if anchor is not None else self._most_reported(stage, version, waited_s)
            if wanted is not None and self._holders(stage, version, wanted):
                fetching = self._fetched(stage, version, wanted, start, held)
                found = await self._while_there(stage, version, fetching)
                anchor = self._anchor_of(stage, version)
                if found is not None and (anchor is None or anchor.state_digest == wanted):
                    return *found, anchor is not None
            await asyncio.sleep(PAUSE_S if anchor is not None else PAUSE_S / 5)

    async def _fetched(
        self, stage: int, version: int, digest: bytes, start: StageStart, held: dict[bytes, memoryview]
    ) -> tuple[StageState, Offer] | None:
        """From all who reported it; None where they do not give it now."""
        run = self._run
        try:
            return await fetch_state_by_digest(
                self._transport,
                lambda: self._holders(stage, version, digest),
                digest,
                stage,
                start.state.layout,
                run.settings,
                run.folder.root,
                version=version,
                held=held,
            )
        except (TransientError, RemoteError, TimeoutError) as error:
            log.info("state of stage %d version %d: %s", stage, version, error)
            return None

    def _holders(self, stage: int, version: int, digest: bytes) -> list[PeerId]:
        """Who reported that state and is there, in no order that anybody could choose."""
        stated, peers = self._progress.digests[version].get(stage, {}), self._progress.peers
        found = [peer for peer, said in stated.items() if said == digest.hex() and not peers[peer].left]
        random.SystemRandom().shuffle(found)
        return found

    async def _while_there(
        self, stage: int, version: int, fetching: Coroutine[Any, Any, tuple[StageState, Offer] | None]
    ) -> tuple[StageState, Offer] | None:
        """What is fetched, unless the version is gone before: a donor that lets chunks drip keeps nobody waiting."""
        task = asyncio.ensure_future(fetching)
        try:
            while not task.done():
                self._check_is_there(stage, version)
                await asyncio.wait({task}, timeout=PAUSE_S)
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _check_is_there(self, stage: int, version: int) -> None:
        if self._progress.is_gone(stage, version, self._run.settings):
            raise VersionGone(f"no peer of stage {stage} holds version {version} any more")

    def _most_reported(self, stage: int, version: int, waited_s: float) -> bytes | None:
        """The state that members of the most work report; None while an anchor, or others' reports, may still come.

        Each has one voice where this host knows of nobody's work.
        """
        if waited_s < ANCHOR_WAIT_S:
            return None
        known = self._chain_at(stage, version)
        there = self._progress.present(stage=stage)
        weights = seats(known.basis.work_of) if known is not None else dict.fromkeys(there, 1)
        by_digest = Counter[str]()
        for peer, digest in self._progress.digests[version].get(stage, {}).items():
            by_digest[digest] += weights.get(peer, 0)
        if not by_digest or (2 * by_digest.total() <= weight_of(weights, there) and waited_s < REPORTS_WAIT_S):
            return None
        digest, _ = max(by_digest.items(), key=lambda one: (one[1], one[0]))
        return bytes.fromhex(digest)
