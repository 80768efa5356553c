"""A run's text made into its two token files: training, and a held-out part nobody trains on.

Whole documents are held out, chosen by the hash of their text, so that copies of a file fall on the same side.
Too few documents for that: the end of the text is held out. The sources of a mixture lie one after another in the
training file, each from the beginning of a piece.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from swarm.core.errors import LocalError, SettingsError
from swarm.data.corpus import Corpus
from swarm.data.encoding import encoded
from swarm.data.pieces import PieceList
from swarm.data.skipped import Skipped, SkippedCount
from swarm.data.token_file import TokenBytes, TokenFile, TokenWriter, partial_path, pieces_path, token_bytes_for
from swarm.data.tokenizer import Tokenizer, load_tokenizer
from swarm.disk.whole_file import whole_file
from swarm.manifest.tables import DataTable

log = logging.getLogger(__name__)

_COPY_TOKENS = 1 << 22
CHECKPOINT_CHARACTERS = 1 << 26
"""So much text between two places from which an interrupted call is gone on with."""
SAY_EVERY_S = 15.0
_RECORD, _CHECKPOINT = "prepared.json", "prepared.partial.json"


@dataclass(frozen=True, kw_only=True)
class MixedSource:
    """Where a source of a mixture lies in the training file, and how much is drawn from it."""

    first_token: int
    num_tokens: int
    weight: int


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    """The token files of a run and what its settings say of them."""

    train_path: Path
    held_out_path: Path
    tokenizer: str
    vocab_size: int
    token_bytes: TokenBytes
    end_of_document: int | None
    """The id that closes each document, if there is one."""
    num_train_tokens: int
    num_held_out_tokens: int
    train_digest: bytes
    held_out_digest: bytes
    mixture: tuple[MixedSource, ...]
    """Empty: the whole file is one source."""
    skipped: tuple[Skipped, ...]

    def train(self) -> TokenFile:
        return TokenFile(self.train_path, self.token_bytes)

    def held_out(self) -> TokenFile:
        return TokenFile(self.held_out_path, self.token_bytes)

    def pieces(self) -> dict[Path, PieceList]:
        """Of both files."""
        return {path: read_pieces(path) for path in (self.train_path, self.held_out_path)}


def prepare_data(data: DataTable, out_dir: Path, say: Callable[[str], None] = log.info) -> PreparedData:
    """Write `train.tokens`, `held_out.tokens`, the lists of their pieces and `prepared.json` to `out_dir`, or find
    them there.

    They are reused if they came from the same files (path, size, time), tokenizer and options, and were not changed
    since. A call that was interrupted is gone on with. `say` is told how far it is, and what is left out.
    Raises SettingsError if the text or the tokenizer is missing, the text is too short, or `out_dir` cannot be written.
    """
    tokenizer = load_tokenizer(data.tokenizer)
    sources = [
        Corpus(source.text, source.text_field or data.text_field, data.max_text_mb * 10**6) for source in data.sources()
    ]
    inputs = _inputs_digest(data, tokenizer, sources)
    prepared = _reusable(out_dir, inputs)
    if prepared is None:
        try:
            out_dir.mkdir(parents=True, exist_ok=True)
            prepared = _Preparing(data, tokenizer, sources, out_dir, inputs, say).whole()
        except OSError as error:
            raise SettingsError(
                f'the data folder "{out_dir}" cannot be written ({error.strerror}); choose a folder that can be'
            ) from error
        except SettingsError:
            _remove_partials(out_dir)
            raise
    _check_length(prepared, data)
    for one in prepared.skipped:
        say(str(one))
    return prepared


@dataclass
class _Place:
    """How far a call has come: documents before this one are in the files."""

    source: int = 0
    file: int = 0
    documents: int = 0
    """Of the file."""
    skipped: list[dict[str, Any]] = field(default_factory=list)
    """Of all sources, as of the file's beginning."""
    sources: list[dict[str, int]] = field(default_factory=list)
    """Those that are in the training file, whole; of the last one only where it begins."""
    train: tuple[int, str] = (0, "")
    """Tokens, and hashes of their whole pieces."""
    held_out: tuple[int, str] = (0, "")
    num_characters: int = 0


@dataclass
class _Preparing:
    """One call, from where the last one with the same inputs was interrupted."""

    data: DataTable
    tokenizer: Tokenizer
    sources: Sequence[Corpus]
    out_dir: Path
    inputs: str
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self.token_bytes = token_bytes_for(self.tokenizer.vocab_size)
        self.train_path, self.held_out_path = self.out_dir / "train.tokens", self.out_dir / "held_out.tokens"
        self.skipped = SkippedCount()

    def whole(self) -> PreparedData:
        place = self._interrupted()
        with ExitStack() as stack:
            try:
                train, held_out = self._writers(stack, place)
            except (LocalError, OSError):  # what was written is not there any more
                place = _Place()
                train, held_out = self._writers(stack, place)
            mixture = self._write(place, train, held_out)
        if min(train.num_tokens, held_out.num_tokens) <= self.data.sequence_length and len(mixture) == 1:
            train, held_out = self._split_at_end()
        prepared = PreparedData(
            train_path=self.train_path,
            held_out_path=self.held_out_path,
            tokenizer=self.tokenizer.name,
            vocab_size=self.tokenizer.vocab_size,
            token_bytes=self.token_bytes,
            end_of_document=self.tokenizer.end_of_document,
            num_train_tokens=train.num_tokens,
            num_held_out_tokens=held_out.num_tokens,
            train_digest=train.pieces.digest if train.num_tokens else b"",
            held_out_digest=held_out.pieces.digest if held_out.num_tokens else b"",
            mixture=mixture if self.data.mixture else (),
            skipped=self.skipped.found(),
        )
        _check_length(prepared, self.data)
        for path, writer in ((self.train_path, train), (self.held_out_path, held_out)):
            with whole_file(pieces_path(path)) as partial:
                partial.write_bytes(writer.pieces.hashes)
        _write_record(self.out_dir, self.inputs, prepared)
        (self.out_dir / _CHECKPOINT).unlink(missing_ok=True)
        return prepared

    def _writers(self, stack: ExitStack, place: _Place) -> tuple[TokenWriter, TokenWriter]:
        train, held_out = (
            stack.enter_context(
                TokenWriter(path, self.token_bytes, num_tokens=num_tokens, hashes=bytes.fromhex(hashes))
            )
            for path, (num_tokens, hashes) in ((self.train_path, place.train), (self.held_out_path, place.held_out))
        )
        return train, held_out

    def _write(self, place: _Place, train: TokenWriter, held_out: TokenWriter) -> tuple[MixedSource, ...]:
        said_at, began_at, began_with = time.monotonic(), time.monotonic(), place.num_characters
        share = self.data.held_out_share
        self.skipped = SkippedCount.of([_skipped(one) for one in place.skipped])
        for index in range(place.source, len(self.sources)):
            source = self.sources[index]
            if index >= len(place.sources):
                train.fill_piece()
                place.source, place.file, place.documents = index, 0, 0
                place.sources.append({"first_token": train.num_tokens})
            source.skipped = self.skipped
            saved_at = place.num_characters
            for (file, before), text, ids in encoded(_from(source, place.file, place.documents), self.tokenizer):
                if file != place.file:
                    place.file, place.documents, place.skipped = file, 0, before
                (held_out if _is_held_out(text, share) else train).write(ids)
                place.documents += 1
                place.num_characters += len(text)
                if place.num_characters - saved_at >= CHECKPOINT_CHARACTERS:
                    saved_at = place.num_characters
                    self._save(place, train, held_out)
                if time.monotonic() > said_at + SAY_EVERY_S:
                    said_at = time.monotonic()
                    rate = (place.num_characters - began_with) / (said_at - began_at)
                    self.say(f"encoded {place.num_characters / 1e6:.0f} MB of text, {rate / 1e6:.1f} MB/s")
            place.sources[index]["num_tokens"] = train.num_tokens - place.sources[index]["first_token"]
            place.source, place.skipped = index + 1, [asdict(one) for one in self.skipped.found()]
            self._save(place, train, held_out)
        weights = [source.weight for source in self.data.sources()]
        return tuple(MixedSource(**where, weight=weight) for where, weight in zip(place.sources, weights, strict=True))

    def _save(self, place: _Place, train: TokenWriter, held_out: TokenWriter) -> None:
        place.train = (train.num_tokens, train.sync().hex())
        place.held_out = (held_out.num_tokens, held_out.sync().hex())
        with whole_file(self.out_dir / _CHECKPOINT) as partial:
            partial.write_text(json.dumps({"inputs": self.inputs, **asdict(place)}))

    def _interrupted(self) -> _Place:
        """Where a call with these inputs was interrupted; the beginning if none was."""
        try:
            fields: dict[str, Any] = json.loads((self.out_dir / _CHECKPOINT).read_text())
            if fields.pop("inputs") != self.inputs:
                return _Place()
            return _Place(**fields)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return _Place()

    def _split_at_end(self) -> tuple[TokenWriter, TokenWriter]:
        """Hold out the last tokens of the text: `held_out_share` of them, at least one sequence."""
        paths = [self.train_path, self.held_out_path]
        files = [TokenFile(path, self.token_bytes) for path in paths if path.stat().st_size]
        whole_path, num_tokens = self.out_dir / "whole.tokens", sum(map(len, files))
        try:
            with TokenWriter(whole_path, self.token_bytes) as whole:
                for file in files:
                    _copy(file, 0, len(file), whole)
            num_held_out = max(self.data.sequence_length + 1, int(num_tokens * self.data.held_out_share))
            cut = max(0, num_tokens - num_held_out)
            with (
                TokenWriter(self.train_path, self.token_bytes) as train,
                TokenWriter(self.held_out_path, self.token_bytes) as held_out,
            ):
                if num_tokens:
                    tokens = TokenFile(whole_path, self.token_bytes)
                    _copy(tokens, 0, cut, train)
                    _copy(tokens, cut, num_tokens, held_out)
        finally:
            whole_path.unlink(missing_ok=True)
        return train, held_out


def _from(source: Corpus, file: int, documents: int) -> Iterator[tuple[tuple[int, list[dict[str, Any]]], str]]:
    """Documents from one of a file on, each with its file, and what was skipped before that."""
    at, before = -1, list[dict[str, Any]]()
    for document in source.documents(first_file=file):
        if document.file != at:
            at, before = document.file, [asdict(one) for one in source.skipped.found()]
        if document.file == file and documents:
            documents -= 1
        else:
            yield (at, before), document.text


def _skipped(fields: dict[str, Any]) -> Skipped:
    return Skipped(fields["reason"], fields["count"], tuple(fields["named"]))


def _copy(tokens: TokenFile, start: int, stop: int, to: TokenWriter) -> None:
    for at in range(start, stop, _COPY_TOKENS):
        to.write(tokens.read(at, min(at + _COPY_TOKENS, stop)))


def read_pieces(path: Path) -> PieceList:
    """Of a token file that was prepared here. Raises OSError."""
    return PieceList(path.stat().st_size, pieces_path(path).read_bytes())


def _is_held_out(text: str, share: float) -> bool:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") < share * 2**32


def _check_length(prepared: PreparedData, data: DataTable) -> None:
    needed = data.sequence_length + 1
    shortest = min([prepared.num_held_out_tokens, *(source.num_tokens for source in prepared.mixture)])
    if min(prepared.num_train_tokens, shortest) >= needed:
        return
    for path in (prepared.train_path, prepared.held_out_path):
        path.unlink(missing_ok=True)
    skipped = "; ".join(map(str, prepared.skipped)) or "nothing was skipped"
    raise SettingsError(
        f"data.text is too short: {prepared.num_train_tokens + prepared.num_held_out_tokens} tokens ({skipped}), where "
        f"held-out text and each source of training text need {needed} for data.sequence_length = "
        f"{data.sequence_length}; add text or shorten the sequences"
    )


def _inputs_digest(data: DataTable, tokenizer: Tokenizer, sources: Sequence[Corpus]) -> str:
    found = [[[file.name, file.size_bytes, file.identity] for file in source.files()] for source in sources]
    fields = [source.text_field for source in sources]
    weights = [source.weight for source in data.sources()]
    inputs = [tokenizer.identity, fields, weights, data.max_text_mb, data.held_out_share, data.sequence_length, found]
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()


def _stamp(path: Path) -> list[int]:
    """What changes when somebody writes to a file."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def _write_record(out_dir: Path, inputs: str, prepared: PreparedData) -> None:
    fields = {
        name: value.hex() if isinstance(value, bytes) else value.name if isinstance(value, Path) else value
        for name, value in asdict(prepared).items()
    }
    stamps = {path.name: _stamp(path) for path in (prepared.train_path, prepared.held_out_path)}
    with whole_file(out_dir / _RECORD) as partial:
        partial.write_text(json.dumps({"inputs": inputs, "stamps": stamps, **fields}, indent=2) + "\n")


def _reusable(out_dir: Path, inputs: str) -> PreparedData | None:
    """What an earlier call left, or None if it is of other inputs, changed or missing."""
    try:
        fields: dict[str, Any] = json.loads((out_dir / _RECORD).read_text())
        if fields.pop("inputs") != inputs:
            return None
        stamps = fields.pop("stamps")
        for name in ("train_path", "held_out_path"):
            fields[name] = out_dir / fields[name]
        for name in ("train_digest", "held_out_digest"):
            fields[name] = bytes.fromhex(fields[name])
        fields["mixture"] = tuple(MixedSource(**source) for source in fields["mixture"])
        fields["skipped"] = tuple(map(_skipped, fields["skipped"]))
        prepared = PreparedData(**fields)
        pieces = prepared.pieces()
        is_whole = all(stamps[path.name] == _stamp(path) for path in pieces) and [
            found.digest for found in pieces.values()
        ] == [prepared.train_digest, prepared.held_out_digest]
    except Exception:  # noqa: BLE001 - whatever is wrong with the old files, writing them anew mends it
        return None
    return prepared if is_whole else None


def _remove_partials(out_dir: Path) -> None:
    for name in ("train.tokens", "held_out.tokens"):
        partial_path(out_dir / name).unlink(missing_ok=True)
    (out_dir / _CHECKPOINT).unlink(missing_ok=True)
