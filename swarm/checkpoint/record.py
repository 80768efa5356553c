"""This is where the run key says what an archived checkpoint is: every file, and the digest of every stage's state.

Whoever has the record and the run key's peer id may fetch the files from anybody.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import ClassVar

from swarm.core.canonical import Value
from swarm.core.errors import RemoteError
from swarm.core.fields import Fields, digest_item
from swarm.core.ids import PeerId
from swarm.signed_record import SignedRecord, opened

MAX_FILES = 4096
MAX_FILE_BYTES = 1 << 42
TOKENIZER = "tokenizer"
"""Folder of the tokenizer's files within a checkpoint, where the run has one of its own."""
READ_BYTES = 1 << 20


@dataclass(frozen=True)
class ArchivedFile:
    """One file of a checkpoint's folder."""

    name: str
    """Relative to the folder, with slashes."""
    size_bytes: int
    sha256: bytes

    def to_value(self) -> Value:
        return [self.name, self.size_bytes, self.sha256]

    @classmethod
    def from_value(cls, value: Value) -> "ArchivedFile":
        """Raises RemoteError("malformed"), also for a name that would leave the folder."""
        fields = Fields.of_list("archived file", value, "name", "size_bytes", "sha256")
        name = fields.text("name", max_length=128)
        path = PurePosixPath(name)
        plain = all(part[0].isalnum() and part.isprintable() and "\\" not in part for part in path.parts)
        if str(path) != name or not 1 <= len(path.parts) <= 2 or not plain:
            raise RemoteError("malformed", f"archived file is called {name!r}: a plain name below the folder is needed")
        return cls(name, fields.integer("size_bytes", high=MAX_FILE_BYTES), fields.octets("sha256", length=32))


@dataclass(frozen=True)
class CheckpointRecord(SignedRecord):
    """A checkpoint that the host keeps."""

    DOMAIN: ClassVar[str] = "checkpoint"
    run_id: str
    version: int
    anchored: bool
    """Whether each stage's state is one that more than two thirds of its certified members have stated."""
    state_digests: tuple[bytes, ...]
    """Of each stage."""
    files: tuple[ArchivedFile, ...]
    """Sorted by name."""

    @property
    def total_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def signed_value(self) -> Value:
        return {
            "run_id": self.run_id,
            "version": self.version,
            "anchored": self.anchored,
            "state_digests": list(self.state_digests),
            "files": [file.to_value() for file in self.files],
        }

    def check(self, *, run_id: str, run_key: PeerId) -> None:
        """Raises RemoteError unless the run key of this run signed it."""
        if self.run_id != run_id:
            raise RemoteError("protocol", f"checkpoint of run {self.run_id[:12]}, not {run_id[:12]}")
        if not self.is_signed_by(run_key):
            raise RemoteError("signature", f"the record of checkpoint {self.version} is not signed by the run key")

    @classmethod
    def from_value(cls, value: Value) -> "CheckpointRecord":
        """Raises RemoteError("malformed")."""
        outer, fields = opened("checkpoint record", value)
        made = cls(
            fields.text("run_id"),
            fields.integer("version"),
            fields.boolean("anchored"),
            fields.items("state_digests", digest_item, max_items=1 << 16),
            fields.items("files", ArchivedFile.from_value, max_items=MAX_FILES),
            signature=outer.octets("signature", length=64),
        )
        fields.done()
        outer.done()
        names = [file.name for file in made.files]
        if names != sorted(set(names)):
            raise RemoteError("malformed", "checkpoint record's files are not in the order of their names, each once")
        return made


def files_below(folder: Path) -> tuple[ArchivedFile, ...]:
    """Every file below the folder, read and hashed."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    files = [ArchivedFile(path.relative_to(folder).as_posix(), *_measured(path)) for path in found]
    return tuple(sorted(files, key=lambda file: file.name))


def _measured(path: Path) -> tuple[int, bytes]:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(READ_BYTES):
            found.update(piece)
        return os.fstat(file.fileno()).st_size, found.digest()
