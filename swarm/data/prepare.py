"""A run's text made into its two token files: training, and a held-out part nobody trains on.

Whole documents are held out, chosen by the hash of their text, so that copies of a file fall on the same side.
Too few documents for that: the end of the text is held out. The sources of a mixture lie one after another in the
training file, each from the beginning of a piece. What is marked of tokens besides their ids is in
`swarm.data.documents`.
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

from swarm.core.errors import LocalError, RemoteError, SettingsError
from swarm.data.corpus import Corpus
from swarm.data.documents.marks import Marks, Values
from swarm.data.documents.samples import DocumentWriter
from swarm.data.encoding import Encoder, TextEncoder, encoded
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
CUT = "conversations cut at data.sequence_length"
TOO_LONG = "conversations without an answer within data.sequence_length"
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
    num_train_targets: int
    """Of them, those that are to be learnt."""
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
    since. A call that was interrupted is gone on with. `say` hears how far it is, what is left out, and how much is in.
    Raises SettingsError if the text or the tokenizer is missing, the text is too short, or `out_dir` cannot be written.
    """
    tokenizer = load_tokenizer(data.tokenizer)
    sources = [
        Corpus(source.text, source.text_field or "", data.max_text_mb * 10**6, source.kind == "chat")
        for source in data.sources()
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
    say(_counted(prepared, of_answers=data.learnt == "answers"))
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
    num_train_targets: int = 0
    left_out: list[dict[str, Any]] = field(default_factory=list)
    """Of what was encoded: conversations, and ends of them."""


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
        self.marks = marks_of(self.data)
        self.token_bytes = token_bytes_for(self.tokenizer.vocab_size << self.marks.bits)
        self.train_path, self.held_out_path = self.out_dir / "train.tokens", self.out_dir / "held_out.tokens"
        self.skipped, self.left_out = SkippedCount(), SkippedCount()

    def whole(self) -> PreparedData:
        place = self._interrupted()
        with ExitStack() as stack:
            try:
                train, held_out = self._writers(stack, place)
            except (LocalError, OSError):  # what was written is not there any more
                place = _Place()
                train, held_out = self._writers(stack, place)
            mixture = self._write(place, self._documents(train), self._documents(held_out))
        num_targets = place.num_train_targets
        if min(train.num_tokens, held_out.num_tokens) < _sample_tokens(self.data) and len(mixture) == 1:
            train, held_out, num_targets = self._split_at_end()
        prepared = PreparedData(
            train_path=self.train_path,
            held_out_path=self.held_out_path,
            tokenizer=self.tokenizer.name,
            vocab_size=self.tokenizer.vocab_size,
            token_bytes=self.token_bytes,
            end_of_document=self.tokenizer.end_of_document,
            num_train_tokens=train.num_tokens,
            num_train_targets=num_targets,
            num_held_out_tokens=held_out.num_tokens,
            train_digest=train.pieces.digest if train.num_tokens else b"",
            held_out_digest=held_out.pieces.digest if held_out.num_tokens else b"",
            mixture=mixture if self.data.mixture else (),
            skipped=tuple(sorted((*self.skipped.found(), *self.left_out.found()), key=lambda one: one.reason)),
        )
        _check_length(prepared, self.data)
        for path, writer in ((self.train_path, train), (self.held_out_path, held_out)):
            with whole_file(pieces_path(path)) as partial:
                partial.write_bytes(writer.pieces.hashes)
        _write_record(self.out_dir, self.inputs, prepared)
        (self.out_dir / _CHECKPOINT).unlink(missing_ok=True)
        return prepared

    def _documents(self, file: TokenWriter) -> DocumentWriter:
        padding = self.tokenizer.end_of_document or 0
        return DocumentWriter(file, self.marks, self.data.sequence_length, padding=padding)

    def _writers(self, stack: ExitStack, place: _Place) -> tuple[TokenWriter, TokenWriter]:
        train, held_out = (
            stack.enter_context(
                TokenWriter(path, self.token_bytes, num_tokens=num_tokens, hashes=bytes.fromhex(hashes))
            )
            for path, (num_tokens, hashes) in ((self.train_path, place.train), (self.held_out_path, place.held_out))
        )
        return train, held_out

    def _write(self, place: _Place, train: DocumentWriter, held_out: DocumentWriter) -> tuple[MixedSource, ...]:
        said_at, began_at, began_with = time.monotonic(), time.monotonic(), place.num_characters
        share = self.data.held_out_share
        self.skipped = SkippedCount.of([_skipped(one) for one in place.skipped])
        self.left_out = SkippedCount.of([_skipped(one) for one in place.left_out])
        for index in range(place.source, len(self.sources)):
            source = self.sources[index]
            if index >= len(place.sources):
                train.file.fill_piece()
                place.source, place.file, place.documents = index, 0, 0
                place.sources.append({"first_token": train.file.num_tokens})
            source.skipped, encoder = self.skipped, self._encoder(source)
            saved_at = place.num_characters
            for (file, before), text, values in encoded(_from(source, place.file, place.documents), encoder):
                if file != place.file:
                    place.file, place.documents, place.skipped = file, 0, before
                found = self._fitting(source, file, values)
                if found is not None and _is_held_out(text, share):
                    held_out.write(found)
                elif found is not None:
                    place.num_train_targets += train.write(found)
                place.documents += 1
                place.num_characters += len(text)
                if place.num_characters - saved_at >= CHECKPOINT_CHARACTERS:
                    saved_at = place.num_characters
                    self._save(place, train, held_out)
                if time.monotonic() > said_at + SAY_EVERY_S:
                    said_at = time.monotonic()
                    rate = (place.num_characters - began_with) / (said_at - began_at)
                    self.say(f"encoded {place.num_characters / 1e6:.0f} MB of text, {rate / 1e6:.1f} MB/s ...")
            train.flush()
            place.sources[index]["num_tokens"] = train.file.num_tokens - place.sources[index]["first_token"]
            place.source, place.skipped = index + 1, [asdict(one) for one in self.skipped.found()]
            self._save(place, train, held_out)
        weights = [source.weight for source in self.data.sources()]
        return tuple(MixedSource(**where, weight=weight) for where, weight in zip(place.sources, weights, strict=True))

    def _encoder(self, source: Corpus) -> Encoder:
        if source.is_chat:
            from swarm.data.documents.chat import ChatEncoder  # with transformers

            return ChatEncoder(Path(self.data.tokenizer), self.marks)
        return TextEncoder(self.tokenizer, self.marks)

    def _fitting(self, source: Corpus, file: int, values: Values | str) -> Values | None:
        """What of a document is written; None if nothing is. A conversation loses what is over a sample's length."""
        name, length = source.files()[file].name, self.data.sequence_length
        if isinstance(values, str):
            self.left_out.add(values, name)
            return None
        if source.is_chat and len(values) > length:
            values = values[:length]
            has_answer = bool(self.marks.learnt(values).any())
            self.left_out.add(CUT if has_answer else TOO_LONG, name)
            return values if has_answer else None
        return values

    def _save(self, place: _Place, train: DocumentWriter, held_out: DocumentWriter) -> None:
        for documents in (train, held_out):
            documents.flush()  # a call that goes on from here knows of none that wait
        place.train = (train.file.num_tokens, train.file.sync().hex())
        place.held_out = (held_out.file.num_tokens, held_out.file.sync().hex())
        place.left_out = [asdict(one) for one in self.left_out.found()]
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

    def _split_at_end(self) -> tuple[TokenWriter, TokenWriter, int]:
        """Hold out the last tokens of the text: `held_out_share` of them, at least one sample; whole samples of
        documents. Also the number of targets that are left to train on."""
        paths = [self.train_path, self.held_out_path]
        files = [TokenFile(path, self.token_bytes) for path in paths if path.stat().st_size]
        whole_path, num_tokens = self.out_dir / "whole.tokens", sum(map(len, files))
        try:
            with TokenWriter(whole_path, self.token_bytes) as whole:
                for file in files:
                    _copy(file, 0, len(file), whole)
            num_held_out = max(_sample_tokens(self.data), int(num_tokens * self.data.held_out_share))
            cut, num_targets = max(0, num_tokens - num_held_out), 0
            if self.marks.documents:
                cut -= cut % self.data.sequence_length
            with (
                TokenWriter(self.train_path, self.token_bytes) as train,
                TokenWriter(self.held_out_path, self.token_bytes) as held_out,
            ):
                if num_tokens:
                    tokens = TokenFile(whole_path, self.token_bytes)
                    _copy(tokens, 0, cut, train)
                    num_targets = sum(
                        int(self.marks.learnt(tokens.read(at, min(at + _COPY_TOKENS, cut))).sum())
                        for at in range(0, cut, _COPY_TOKENS)
                    )
                    _copy(tokens, cut, num_tokens, held_out)
        finally:
            whole_path.unlink(missing_ok=True)
        return train, held_out, num_targets


def marks_of(data: DataTable) -> Marks:
    """What the files of such a run say of tokens."""
    return Marks(data.packing == "masked", data.learnt == "answers")


def _sample_tokens(data: DataTable) -> int:
    return data.sequence_length + (data.packing == "packed")


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


def _counted(prepared: PreparedData, *, of_answers: bool) -> str:
    some = f", {prepared.num_train_targets:,} of which are learnt" if of_answers else ""
    return f"{prepared.num_train_tokens:,} tokens to train on{some}; {prepared.num_held_out_tokens:,} held out"


def _skipped(fields: dict[str, Any]) -> Skipped:
    return Skipped(fields["reason"], fields["count"], tuple(fields["named"]))


def _copy(tokens: TokenFile, start: int, stop: int, to: TokenWriter) -> None:
    for at in range(start, stop, _COPY_TOKENS):
        to.write(tokens.read(at, min(at + _COPY_TOKENS, stop)))


def read_pieces(path: Path) -> PieceList:
    """Of a token file that was prepared here. Raises OSError."""
    return PieceList(path.stat().st_size, pieces_path(path).read_bytes())


def is_as_written(path: Path, digest: bytes) -> bool:
    """Whether a token file of this digest was prepared here, and nobody wrote to it since."""
    try:
        stamps = json.loads((path.parent / _RECORD).read_text())["stamps"]
        return bool(stamps[path.name] == _stamp(path)) and read_pieces(path).digest == digest
    except (OSError, ValueError, KeyError, TypeError, RemoteError):
        return False


def _is_held_out(text: str, share: float) -> bool:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") < share * 2**32


def _check_length(prepared: PreparedData, data: DataTable) -> None:
    needed = _sample_tokens(data)
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
    kinds, template = [source.is_chat for source in sources], _template_identity(data)
    marks = [data.packing, data.learnt, kinds, template]
    options = [data.max_text_mb, data.held_out_share, data.sequence_length]
    inputs = [tokenizer.identity, fields, weights, *options, marks, found]
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()


def _template_identity(data: DataTable) -> str:
    """Of a folder that conversations are encoded by: all that says how."""
    if not data.has_chats:
        return ""
    path = Path(data.tokenizer)
    folder = path if path.is_dir() else path.parent
    names = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json")
    found = [(folder / name).read_bytes() for name in names if (folder / name).is_file()]
    return hashlib.sha256(b"".join(hashlib.sha256(one).digest() for one in found)).hexdigest()


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
