"""Files as documents, on disk or at a URL, in an order that depends on names alone."""

import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from swarm.core.errors import SettingsError
from swarm.data.formats import WITHOUT_TEXT, NotRead, documents_of
from swarm.data.skipped import SkippedCount

_SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules", "site-packages", "dist-packages"})
_STANDARD_LIBRARY_TESTS = frozenset({"test", "tests", "idle_test"})
_SAYS_WHICH = ("mtime", "created", "ETag", "etag", "LastModified", "last_modified", "generation", "md5", "blob_id")
"""What file systems say of a file that changes when its content does; a local file's `created` with its mode too."""
OVER_THE_BOUND = "over data.max_text_mb"


@dataclass(frozen=True)
class FoundFile:
    """A file to read, and what its identity was when it was found."""

    name: str
    """For people: its path, or its URL without the protocol."""
    size_bytes: int
    identity: str
    files: Any = field(repr=False, compare=False)
    """fsspec's file system that has it."""


class Document(NamedTuple):
    file: int
    """Index among the corpus's files."""
    text: str


@dataclass
class Corpus:
    """Documents of the text at `paths`; with no paths, of the running Python's standard library.

    A path is a file or a folder, on disk or at a URL that fsspec opens. Folders are walked whole, sorted, without
    hidden files and links. Reading stops after `max_bytes` of text. What was left out is counted and named.
    """

    paths: Sequence[str]
    text_field: str = "text"
    max_bytes: int = 1 << 30
    is_chat: bool = False
    """Rows hold conversations: a document is one, as `swarm.data.documents.rows` writes it."""
    skipped: SkippedCount = field(default_factory=SkippedCount)

    def __post_init__(self) -> None:
        self._found: list[FoundFile] | None = None

    def files(self) -> list[FoundFile]:
        """Every file in reading order. Raises SettingsError for a path that is not there, or that nothing opens."""
        if self._found is None:
            folders = _SKIPPED_FOLDERS if self.paths else _SKIPPED_FOLDERS | _STANDARD_LIBRARY_TESTS
            found = [file for path in self.paths or [sysconfig.get_path("stdlib")] for file in _at(path, folders)]
            self._found = [file for file in found if self.paths or file.name.endswith(".py")]
        return self._found

    def documents(self, *, first_file: int = 0) -> Iterator[Document]:
        """Texts in reading order, none of them empty, from a file on."""
        left_bytes = self.max_bytes
        for index, file in enumerate(self.files()):
            if index < first_file:
                continue
            for text in self._texts(file):
                # Characters are bytes at least: most texts need not be encoded to be counted.
                left_bytes -= len(text) if text.isascii() else len(text.encode())
                if left_bytes < 0:
                    self.skipped.add(OVER_THE_BOUND, f"{file.name} and what follows")
                    return
                yield Document(index, text)

    def _texts(self, file: FoundFile) -> Iterator[str]:
        is_empty = True
        try:
            with file.files.open(file.name, "rb") as opened:
                missing = partial(self.skipped.add, WITHOUT_TEXT, file.name)
                for text in documents_of(opened, file.name, self.text_field, missing, is_chat=self.is_chat):
                    is_empty = False
                    yield text
            if is_empty:
                self.skipped.add("empty", file.name)
        except NotRead as why:
            self.skipped.add(str(why), file.name)
        except OSError:
            self.skipped.add("unreadable", file.name)


def _at(path: str, skipped_folders: frozenset[str]) -> list[FoundFile]:
    """The files at a path, sorted."""
    from fsspec.core import url_to_fs

    try:
        files, root = url_to_fs(path)
        if files.isdir(root):
            return _files_below(files, root, skipped_folders)
        if files.isfile(root):
            return [_file(files, files.info(root))]
    except (ImportError, ValueError) as error:
        raise SettingsError(
            f'data.text = "{path}": {error}; install the package that it names, or correct the URL'
        ) from error
    except OSError as error:
        raise SettingsError(f'data.text = "{path}" cannot be listed ({error}); correct the path') from error
    raise SettingsError(f'data.text = "{path}" is neither a file nor a folder; correct the path')


def _files_below(files: Any, root: str, skipped_folders: frozenset[str]) -> list[FoundFile]:
    found = []
    for _, folders, names in files.walk(root, detail=True):
        for name, info in list(folders.items()):
            if name in skipped_folders or name.startswith(".") or info.get("islink"):
                del folders[name]
        found += [_file(files, info) for name, info in names.items() if _is_plain(name, info)]
    # By parts, not by string: the order is the same whatever the separator and the file system's own order.
    return sorted(found, key=lambda file: PurePosixPath(file.name).parts)


def _is_plain(name: str, info: dict[str, Any]) -> bool:
    return not name.startswith(".") and info.get("type") == "file" and not info.get("islink")


def _file(files: Any, info: dict[str, Any]) -> FoundFile:
    said = {key: str(info[key]) for key in _SAYS_WHICH if key in info and not (key == "created" and "mtime" in info)}
    return FoundFile(info["name"], int(info.get("size") or 0), str(sorted(said.items())), files)


def is_url(path: str) -> bool:
    """Whether fsspec is to open it by a protocol of its own."""
    return "://" in path
