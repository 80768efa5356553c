"""Files as documents: text, source code and jsonl, in an order that depends on names alone."""

import json
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from swarm.core.errors import SettingsError

DOCUMENT_BYTES = 1 << 20
"""A longer text is cut into documents of at most this size, after a line where there is one."""

_SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules", "site-packages", "dist-packages"})
_STANDARD_LIBRARY_TESTS = frozenset({"test", "tests", "idle_test"})


@dataclass(frozen=True)
class Source:
    """A file to read, and what its identity was when it was found."""

    path: Path
    size_bytes: int
    modified_ns: int


@dataclass
class Corpus:
    """Documents of the text at `paths`; with no paths, of the running Python's standard library.

    Folders are walked whole, sorted, without hidden files and links. Reading stops after `max_bytes` of text.
    What was skipped is counted by reason while `documents` runs.
    """

    paths: Sequence[Path]
    jsonl_field: str = "text"
    max_bytes: int = 1 << 30
    skipped: Counter[str] = field(default_factory=Counter)

    def sources(self) -> list[Source]:
        """Every file in reading order. Raises SettingsError for a path that is not there."""
        if not self.paths:
            root = Path(sysconfig.get_path("stdlib"))
            files = [
                path for path in _files_below(root, _STANDARD_LIBRARY_TESTS | _SKIPPED_FOLDERS) if path.suffix == ".py"
            ]
        else:
            files = []
            for path in self.paths:
                if path.is_dir():
                    files += _files_below(path, _SKIPPED_FOLDERS)
                elif path.is_file():
                    files.append(path)
                else:
                    raise SettingsError(f'data.text = "{path}" is neither a file nor a folder; correct the path')
        return [source for path in files if (source := self._source(path)) is not None]

    def documents(self) -> Iterator[str]:
        """Texts in reading order. Binary, empty and unreadable files are skipped and counted."""
        left_bytes = self.max_bytes
        self.skipped.clear()
        for source in self.sources():
            for text in self._texts(source.path):
                size_bytes = len(text.encode())
                if size_bytes > left_bytes:
                    self.skipped["over the size bound"] += 1
                    return
                left_bytes -= size_bytes
                yield text

    def _source(self, path: Path) -> Source | None:
        try:
            status = path.stat()
        except OSError:
            self.skipped["unreadable"] += 1
            return None
        return Source(path, status.st_size, status.st_mtime_ns)

    def _texts(self, path: Path) -> Iterator[str]:
        pieces = _json_lines(path, self.jsonl_field) if path.suffix == ".jsonl" else _pieces(path)
        try:
            for piece in pieces:
                if "\0" in piece:
                    self.skipped["binary"] += 1
                    return
                if piece:
                    yield piece
        except UnicodeDecodeError:
            self.skipped["binary"] += 1
        except OSError:
            self.skipped["unreadable"] += 1


def _files_below(root: Path, skipped_folders: frozenset[str]) -> list[Path]:
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in skipped_folders and not name.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    files = [path for path in found if path.is_file() and not path.is_symlink()]
    # By parts, not by string: the order is the same whatever the separator and the file system's own order.
    return sorted(files, key=lambda path: path.relative_to(root).parts)


def _pieces(path: Path) -> Iterator[str]:
    """The file's text in documents of at most DOCUMENT_BYTES, cut after a line feed where there is one."""
    rest = b""
    with open(path, "rb") as file:
        while block := file.read(DOCUMENT_BYTES - len(rest)):
            rest += block
            if len(rest) < DOCUMENT_BYTES:
                continue
            cut = rest.rfind(b"\n") + 1 or _character_boundary(rest)
            yield rest[:cut].decode()
            rest = rest[cut:]
    yield rest.decode()


def _character_boundary(data: bytes) -> int:
    """Where the last character of `data` begins: bytes 10xxxxxx continue one in UTF-8."""
    at = len(data) - 1
    while at > 1 and data[at] & 0xC0 == 0x80:
        at -= 1
    return at


def _json_lines(path: Path, field_name: str) -> Iterator[str]:
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[field_name]
            except (ValueError, KeyError, TypeError) as error:
                raise SettingsError(
                    f'data.text = "{path}": line {number} is no JSON object with a field "{field_name}"; '
                    "mend the line or set data.jsonl_field"
                ) from error
            if not isinstance(text, str):
                raise SettingsError(
                    f'data.text = "{path}": line {number} has no text in "{field_name}"; set data.jsonl_field'
                )
            yield text.replace("\0", "")
