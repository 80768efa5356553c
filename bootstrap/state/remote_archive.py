"""Checkpoints kept at a URL too: `file:`, `s3:`, `gs:`, `sftp:` and what else fsspec opens.

    <url>/<run id, 12 letters>/step-00000050/...      the files, as they lie in the run's folder
                               step-00000050.record   the run key's record of them

The files are written first, read back and compared with their digests; then the record is published. While there is
none, the checkpoint is not there.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from swarm.checkpoint.archive import INFO_FILE, checkpoint_path
from swarm.checkpoint.record import READ_BYTES, ArchivedFile, CheckpointRecord
from swarm.core.canonical import pack, unpack
from swarm.core.errors import LocalError, SettingsError
from swarm.core.ids import PeerId
from swarm.network.loop import happened

log = logging.getLogger(__name__)

MAX_RECORD_BYTES = 4 << 20
TRY_AGAIN_S = 60.0
COPY_S = 6 * 3600.0
"""A copy of a checkpoint that has not ended by then is given up, and tried again."""
LAST_COPIES_S = 600.0
"""For all that is left to copy when the run is over."""
_RECORD = ".record"


@dataclass(frozen=True)
class ArchivePlace:
    """A URL that fsspec opens. Made by `open_place`."""

    url: str
    files: Any
    """fsspec's file system."""
    root: str
    """Path in it."""


def open_place(url: str) -> ArchivePlace:
    """Raises SettingsError for a URL that nothing installed here opens."""
    from fsspec.core import url_to_fs

    try:
        return ArchivePlace(url, *url_to_fs(url.rstrip("/"), use_listings_cache=False))
    except (ImportError, ValueError) as error:
        raise SettingsError(
            f"--archive {url}: {error}; install the package that it names into homeswarm's environment, or give "
            "another URL, such as file:///mnt/archive"
        ) from error


class RemoteArchive:
    """Checkpoints of one run at a URL. Methods block, and raise LocalError with the URL when it does not serve."""

    def __init__(self, place: ArchivePlace, run_id: str, run_key: PeerId) -> None:
        self.url = place.url
        self._files = place.files
        self._root = f"{place.root}/{run_id[:12]}"
        self._run_id = run_id
        self._run_key = run_key
        self._stopped = threading.Event()

    def stop(self) -> None:
        """What is being copied is given up."""
        self._stopped.set()

    def versions(self) -> list[int]:
        """Of the checkpoints that are there, oldest first."""
        with self._answering("its list"):
            if not self._files.exists(self._root):
                return []
            names = [str(name).rpartition("/")[2] for name in self._files.ls(self._root, detail=False)]
        numbers = [name.removesuffix(_RECORD).rpartition("-")[2] for name in names if name.endswith(_RECORD)]
        return sorted(int(number) for number in numbers if number.isdecimal())

    def put(self, record: CheckpointRecord, folder: Path) -> None:
        """The checkpoint in `folder`, which is what `record` says."""
        at, give_up_at = self._at(record.version), time.monotonic() + COPY_S
        with self._answering(f"keeping checkpoint {record.version}"):
            for file in record.files:
                name = f"{at}/{file.name}"
                self._files.makedirs(name.rpartition("/")[0], exist_ok=True)
                with (folder / file.name).open("rb") as ours, self._files.open(name, "wb") as stored:
                    self._copy(ours, stored, file, give_up_at)
                with self._files.open(name, "rb") as stored, open(os.devnull, "wb") as nowhere:
                    self._copy(stored, nowhere, file, give_up_at)
            self._files.pipe_file(f"{at}.partial", pack(record.to_value()))
            self._files.mv(f"{at}.partial", at + _RECORD)

    def fetch(self, version: int, checkpoints: Path) -> Path:
        """The checkpoint as a folder among `checkpoints`, each file with the digest in its record."""
        give_up_at = time.monotonic() + COPY_S
        partial = checkpoints / f".partial-{version:08d}"
        with self._answering(f"fetching checkpoint {version}"):
            data = self._files.cat_file(self._at(version) + _RECORD, end=MAX_RECORD_BYTES)
            record = CheckpointRecord.from_value(unpack(data, max_bytes=MAX_RECORD_BYTES))
            record.check(run_id=self._run_id, run_key=self._run_key)
            for file in record.files:
                path = partial / file.name
                path.parent.mkdir(parents=True, exist_ok=True)
                with self._files.open(f"{self._at(version)}/{file.name}", "rb") as stored, path.open("wb") as out:
                    self._copy(stored, out, file, give_up_at)
            return partial.rename(checkpoint_path(checkpoints, version))

    @contextlib.contextmanager
    def _answering(self, doing: str) -> Iterator[None]:
        """Each of fsspec's file systems has errors of its own: whatever comes is the URL's."""
        try:
            yield
        except LocalError:
            raise
        except Exception as error:
            raise LocalError(f"--archive {self.url}: {doing}: {error}") from error

    def _at(self, version: int) -> str:
        return f"{self._root}/{checkpoint_path(Path(), version).name}"

    def _copy(self, source: BinaryIO, to: BinaryIO, file: ArchivedFile, give_up_at: float) -> None:
        """A whole file. Raises LocalError unless it is the one of the record."""
        found, size_bytes = hashlib.sha256(), 0
        while (piece := source.read(READ_BYTES)) and size_bytes <= file.size_bytes:
            if self._stopped.is_set() or time.monotonic() > give_up_at:
                raise LocalError(f"--archive {self.url}: {file.name} was not copied to its end in time")
            found.update(piece)
            size_bytes += len(piece)
            to.write(piece)
        if (size_bytes, found.digest()) != (file.size_bytes, file.sha256):
            raise LocalError(
                f"--archive {self.url}: {file.name} is damaged: {size_bytes} bytes with digest "
                f"{found.hexdigest()[:16]}, its record says {file.size_bytes} with {file.sha256.hex()[:16]}"
            )


class ArchiveCopies:
    """Keeps at the URL what is in the run's folder; what could not be copied is tried again."""

    def __init__(
        self,
        archive: RemoteArchive,
        checkpoints: Path,
        held: Callable[[], list[CheckpointRecord]],
        emit: Callable[[dict[str, Any]], None],
    ) -> None:
        """`held` are the records of all checkpoints that were written, oldest first."""
        self._archive = archive
        self._checkpoints = checkpoints
        self._held = held
        self._emit = emit
        self._copied: set[int] = set()
        self._more = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()

    def wake(self) -> None:
        """There is a new checkpoint."""
        self._more.set()

    async def run(self) -> None:
        """Copy for ever."""
        while True:
            self._more.clear()
            await self._copy_all()
            await happened(self._more, within_s=TRY_AGAIN_S)

    async def finish(self) -> None:
        """Copy what is left, when the run is over."""
        try:
            async with asyncio.timeout(LAST_COPIES_S):
                await self._copy_all()
        except TimeoutError:
            self._emit({"event": "not_archived", "reason": f"not all was copied within {LAST_COPIES_S:g} s"})

    def close(self) -> None:
        """Copy no more."""
        self._archive.stop()

    async def _copy_all(self) -> None:
        async with self._one_at_a_time:
            try:
                if self._due():
                    self._copied |= {*await asyncio.to_thread(self._archive.versions)}
                for record in self._due():
                    await asyncio.to_thread(self._archive.put, record, self._folder_of(record))
                    self._copied.add(record.version)
                    self._emit({"event": "archived", "version": record.version, "url": self._archive.url})
            except LocalError as error:
                log.warning("%s; tried again every %g s", error, TRY_AGAIN_S)
                self._emit({"event": "not_archived", "reason": str(error)})

    def _due(self) -> list[CheckpointRecord]:
        return [
            record
            for record in self._held()
            if record.version not in self._copied and (self._folder_of(record) / INFO_FILE).is_file()
        ]

    def _folder_of(self, record: CheckpointRecord) -> Path:
        return checkpoint_path(self._checkpoints, record.version)
