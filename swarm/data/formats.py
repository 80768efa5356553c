"""A file's documents, by what its name ends with: text, lines of JSON, Parquet; as they are, or in gzip, Zstandard.

Raises `NotRead` with the reason for a file that gives no text, or no more; SettingsError where the user can mend it.
"""

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Any, BinaryIO, cast

from swarm.core.errors import SettingsError
from swarm.data.documents.rows import NoConversation, columns_of_conversations, conversation_of

DOCUMENT_BYTES = 1 << 20
"""A longer text is cut into documents of at most this size, after a line where there is one."""
PACKED_BYTES = 1 << 17
"""Read at once."""
ROWS_AT_ONCE = 1024
"""Of a Parquet file in memory."""

WITHOUT_TEXT = "rows without text"
NOT_A_FORMAT = "a format that is not read"
CHATS = '; for conversations set data.kind = "chat"'
NO_ROWS = "neither jsonl nor Parquet, which hold conversations"
_NOT_READ = frozenset(
    {".7z", ".arrow", ".bz2", ".feather", ".h5", ".lz4", ".npy", ".npz", ".orc", ".rar", ".tar", ".tgz", ".xz", ".zip"}
)
_JSON_LINES = frozenset({".jsonl", ".ndjson"})

Missing = Callable[[], None]
"""Told of each row that has no text."""


class NotRead(Exception):
    """Why a file gives no text, or no more."""


def documents_of(
    file: BinaryIO, name: str, text_field: str, missing: Missing, *, is_chat: bool = False
) -> Iterator[str]:
    """Texts of an open file called `name`, none of them empty; `text_field` holds them where there are fields.

    `is_chat`: conversations, as `conversation_of` has them.
    """
    *_, packed = ["", *PurePosixPath(name).suffixes]
    plain = name.removesuffix(packed) if packed in _UNPACKED else name
    suffix = PurePosixPath(plain).suffix.lower()
    if suffix in _NOT_READ:
        raise NotRead(NOT_A_FORMAT)
    try:
        opened = _UNPACKED[packed](file) if packed in _UNPACKED else file
        if suffix == ".parquet":
            texts = _rows(opened, name, text_field, missing, is_chat)
        elif suffix in _JSON_LINES:
            texts = _json_lines(opened, name, text_field, missing, is_chat)
        elif is_chat:
            raise NotRead(NO_ROWS)
        else:
            texts = _pieces(opened)
        for text in texts:
            if text:
                yield text
    except UnicodeDecodeError as error:
        raise NotRead("binary") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise NotRead("damaged") from error


def _pieces(file: BinaryIO) -> Iterator[str]:
    """The file's text in documents of at most DOCUMENT_BYTES, cut after a line feed where there is one."""
    rest = b""
    while block := file.read(DOCUMENT_BYTES - len(rest)):
        rest += block
        if b"\0" in block:
            raise NotRead("binary")
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


def _json_lines(file: BinaryIO, name: str, text_field: str, missing: Missing, is_chat: bool) -> Iterator[str]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        where = f'data.text = "{name}": line {number}'
        try:
            row = json.loads(line)
            text = _conversation(row, text_field, where) if is_chat and isinstance(row, dict) else row[text_field]
        except (ValueError, KeyError, TypeError) as error:
            raise SettingsError(
                f'{where} is no JSON object with a field "{text_field}"; mend the line or set data.text_field'
                f"{CHATS if not is_chat else ''}"
            ) from error
        if text is None:
            missing()
        elif isinstance(text, str):
            yield (_whole_characters(text) if b"\\u" in line else text).replace("\0", "")
        else:
            raise SettingsError(f'{where} has no text in "{text_field}"; set data.text_field')


def _conversation(row: dict[str, Any], text_field: str, where: str) -> str:
    try:
        return conversation_of(row, text_field)
    except NoConversation as error:
        raise SettingsError(f"{where} {error}; see docs/data.md, and set data.text_field or data.kind") from error


def _whole_characters(text: str) -> str:
    """With U+FFFD for halves of surrogate pairs, which JSON can say and UTF-8 cannot."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _rows(file: BinaryIO, name: str, text_field: str, missing: Missing, is_chat: bool) -> Iterator[str]:
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError as error:
        raise SettingsError(f'data.text = "{name}": {_needs("pyarrow")}') from error
    try:
        opened = parquet.ParquetFile(file)
        columns = opened.schema_arrow
        if is_chat:
            yield from _conversations(opened, columns_of_conversations(columns.names, text_field), name, text_field)
            return
        if text_field not in columns.names:
            raise SettingsError(
                f'data.text = "{name}" has no column "{text_field}"; set data.text_field to one of '
                f"{', '.join(columns.names[:20])}{CHATS}"
            )
        kind = columns.field(text_field).type
        if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
            raise SettingsError(
                f'data.text = "{name}": column "{text_field}" holds {kind}, no text; set data.text_field'
            )
        for batch in opened.iter_batches(batch_size=ROWS_AT_ONCE, columns=[text_field]):
            for text in batch.column(0).to_pylist():
                if text is None:
                    missing()
                else:
                    yield text.replace("\0", "")
    except arrow.ArrowException as error:
        raise NotRead("damaged") from error


def _conversations(opened: Any, columns: list[str], name: str, text_field: str) -> Iterator[str]:
    number = 0
    for batch in opened.iter_batches(batch_size=ROWS_AT_ONCE, columns=columns):
        for row in batch.to_pylist():
            number += 1
            yield _conversation(row, text_field, f'data.text = "{name}": row {number}').replace("\0", "")


def _zstandard(file: BinaryIO) -> BinaryIO:
    try:
        import zstandard
    except ImportError as error:
        raise SettingsError(f"data.text holds a .zst file: {_needs('zstandard')}") from error
    return cast(BinaryIO, io.BufferedReader(_Zstandard(zstandard, file)))


class _Zstandard(io.RawIOBase):
    """What frames end to end hold. Raises NotRead where the last one breaks off: the library takes that for an end."""

    def __init__(self, library: Any, file: BinaryIO) -> None:
        self._library = library
        self._file = file
        self._frame: Any = None
        self._packed = b""
        self._held = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        while not self._held:
            packed = self._packed or self._file.read(PACKED_BYTES)
            if not packed:
                if self._frame is not None:
                    raise NotRead("damaged")
                return 0
            self._frame = self._frame or self._library.ZstdDecompressor().decompressobj()
            try:
                self._held = memoryview(self._frame.decompress(packed))
            except self._library.ZstdError as error:
                raise NotRead("damaged") from error
            self._packed = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = None
        count = min(len(into), len(self._held))
        into[:count] = self._held[:count]
        self._held = self._held[count:]
        return count


def _needs(package: str) -> str:
    return f"reading it needs {package}, which is not installed; pip install 'homeswarm[data]'"


_UNPACKED: dict[str, Callable[[BinaryIO], BinaryIO]] = {
    ".gz": lambda file: cast(BinaryIO, gzip.GzipFile(fileobj=file)),
    ".zst": _zstandard,
}
