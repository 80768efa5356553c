"""The run key's word on an archived checkpoint: every file, the digest of every stage's state, how it does at tasks.

Whoever has the record and the run key's peer id may fetch the files from anybody.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, ClassVar

from swarm.core.errors import RemoteError
from swarm.core.forms import Digest, Integer, Text
from swarm.core.ids import PeerId
from swarm.core.layout import AtMost
from swarm.core.record import Row
from swarm.identity.signed_record import SignedRecord

MAX_FILES = 4096
MAX_FILE_BYTES = 1 << 42
TOKENIZER = "tokenizer"
"""Folder of the tokenizer's files within a checkpoint, where the run has one of its own."""
READ_BYTES = 1 << 20
MAX_SCORES = 1024
MAX_NAME = 128


@dataclass(frozen=True)
class ArchivedFile(Row):
    """One file of a checkpoint's folder."""

    name: Annotated[str, Text(128)]
    """Relative to the folder, with slashes."""
    size_bytes: Annotated[int, Integer(high=MAX_FILE_BYTES)]
    sha256: Digest

    def _check_fields(self) -> None:
        """Refuses a name that would leave the folder."""
        path = PurePosixPath(self.name)
        plain = all(part[0].isalnum() and part.isprintable() and "\\" not in part for part in path.parts)
        if str(path) != self.name or not 1 <= len(path.parts) <= 2 or not plain:
            raise RemoteError(
                "malformed", f"archived file is called {self.name!r}: a plain name below the folder is needed"
            )


@dataclass(frozen=True)
class CheckpointRecord(SignedRecord):
    """A checkpoint that the host keeps."""

    DOMAIN: ClassVar[str] = "checkpoint"
    run_id: str
    version: int
    anchored: bool
    """Whether each stage's state is one that more than two thirds of its certified members have stated."""
    state_digests: Annotated[tuple[Digest, ...], AtMost(1 << 16)]
    """Of each stage."""
    files: Annotated[tuple[ArchivedFile, ...], AtMost(MAX_FILES)]
    """Sorted by name."""

    def check(self, *, run_id: str, run_key: PeerId) -> None:
        """Raises RemoteError unless the run key of this run signed it."""
        if self.run_id != run_id:
            raise RemoteError("protocol", f"checkpoint of run {self.run_id[:12]}, not {run_id[:12]}")
        if not self.is_signed_by(run_key):
            raise RemoteError("signature", f"the record of checkpoint {self.version} is not signed by the run key")

    def _check_fields(self) -> None:
        names = [file.name for file in self.files]
        if names != sorted(set(names)):
            raise RemoteError("malformed", "checkpoint record's files are not in the order of their names, each once")


@dataclass(frozen=True)
class Score(Row):
    """One number."""

    task: Annotated[str, Text(MAX_NAME)]
    metric: Annotated[str, Text(MAX_NAME)]
    """As lm-eval calls it: `acc`, `acc_stderr`, `word_perplexity`."""
    value: float


@dataclass(frozen=True)
class CheckpointScores(SignedRecord):
    """All of one checkpoint. Nobody else has tried it: they are the host's word."""

    DOMAIN: ClassVar[str] = "checkpoint-scores"
    run_id: str
    version: int
    scores: Annotated[tuple[Score, ...], AtMost(MAX_SCORES)]
    """Sorted by task and metric."""


def files_below(folder: Path, pattern: str = "*") -> tuple[ArchivedFile, ...]:
    """Every file below the folder whose name is such, read and hashed."""
    found = [path for path in folder.rglob(pattern) if path.is_file()]
    files = [ArchivedFile(path.relative_to(folder).as_posix(), *_measured(path)) for path in found]
    return tuple(sorted(files, key=lambda file: file.name))


def _measured(path: Path) -> tuple[int, bytes]:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(READ_BYTES):
            found.update(piece)
        return os.fstat(file.fileno()).st_size, found.digest()
