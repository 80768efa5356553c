"""A run's text made into its two token files: training, and a held-out part nobody trains on.

Whole documents are held out, chosen by the hash of their text, so that copies of a file fall on the same side.
Too few documents for that: the end of the text is held out.
"""

import hashlib
import json
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from swarm.core.errors import SettingsError
from swarm.data.corpus import Corpus
from swarm.data.token_file import TokenBytes, TokenFile, TokenWriter, token_bytes_for
from swarm.data.tokenizer import Tokenizer, load_tokenizer
from swarm.disk.whole_file import whole_file
from swarm.manifest.tables import DataTable

_COPY_TOKENS = 1 << 22


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    """The token files of a run and what its settings say of them."""

    train_path: Path
    held_out_path: Path
    tokenizer: str
    vocab_size: int
    token_bytes: TokenBytes
    num_train_tokens: int
    num_held_out_tokens: int
    train_digest: bytes
    held_out_digest: bytes
    skipped: dict[str, int]
    """Files left out, by reason."""

    def train(self) -> TokenFile:
        return TokenFile(self.train_path, self.token_bytes)

    def held_out(self) -> TokenFile:
        return TokenFile(self.held_out_path, self.token_bytes)


def prepare_data(data: DataTable, out_dir: Path) -> PreparedData:
    """Write `train.tokens`, `held_out.tokens` and `prepared.json` to `out_dir`, or find them there.

    They are reused if they came from the same files (path, size, time), tokenizer and options, and are whole.
    Raises SettingsError if the text or the tokenizer is missing, the text is too short, or `out_dir` cannot be written.
    """
    tokenizer = load_tokenizer(data.tokenizer)
    corpus = Corpus([Path(path) for path in data.text], data.jsonl_field, data.max_text_mb * 10**6)
    inputs = _inputs_digest(data, tokenizer, corpus)
    found = _reusable(out_dir, inputs)
    if found is not None:
        _check_length(found, data)
        return found
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        prepared = _write(data, tokenizer, corpus, out_dir)
    except OSError as error:
        raise SettingsError(
            f'the data folder "{out_dir}" cannot be written ({error.strerror}); choose a folder that can be'
        ) from error
    _check_length(prepared, data)
    _write_record(out_dir, inputs, prepared)
    return prepared


def _write(data: DataTable, tokenizer: Tokenizer, corpus: Corpus, out_dir: Path) -> PreparedData:
    token_bytes = token_bytes_for(tokenizer.vocab_size)
    train_path, held_out_path = out_dir / "train.tokens", out_dir / "held_out.tokens"
    needed = data.sequence_length + 1
    with ExitStack() as stack:
        train = stack.enter_context(TokenWriter(train_path, token_bytes))
        held_out = stack.enter_context(TokenWriter(held_out_path, token_bytes))
        for text in corpus.documents():
            side = held_out if _is_held_out(text, data.held_out_share) else train
            side.write(tokenizer.encode_document(text))
    if min(train.num_tokens, held_out.num_tokens) < needed:
        train, held_out = _split_at_end(data, tokenizer, corpus, train_path, held_out_path)
    return PreparedData(
        train_path=train_path,
        held_out_path=held_out_path,
        tokenizer=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        token_bytes=token_bytes,
        num_train_tokens=train.num_tokens,
        num_held_out_tokens=held_out.num_tokens,
        train_digest=train.digest,
        held_out_digest=held_out.digest,
        skipped=dict(sorted(corpus.skipped.items())),
    )


def _split_at_end(
    data: DataTable, tokenizer: Tokenizer, corpus: Corpus, train_path: Path, held_out_path: Path
) -> tuple[TokenWriter, TokenWriter]:
    """Hold out the last tokens of the text: `held_out_share` of them, at least one sequence."""
    token_bytes = token_bytes_for(tokenizer.vocab_size)
    whole_path = train_path.with_name("whole.tokens")
    try:
        with TokenWriter(whole_path, token_bytes) as whole:
            for text in corpus.documents():
                whole.write(tokenizer.encode_document(text))
        num_held_out = max(data.sequence_length + 1, int(whole.num_tokens * data.held_out_share))
        cut = max(0, whole.num_tokens - num_held_out)
        with TokenWriter(train_path, token_bytes) as train, TokenWriter(held_out_path, token_bytes) as held_out:
            if whole.num_tokens:
                tokens = TokenFile(whole_path, token_bytes)
                for side, start, stop in ((train, 0, cut), (held_out, cut, whole.num_tokens)):
                    for at in range(start, stop, _COPY_TOKENS):
                        side.write(tokens.read(at, min(at + _COPY_TOKENS, stop)))
    finally:
        whole_path.unlink(missing_ok=True)
    return train, held_out


def _is_held_out(text: str, share: float) -> bool:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") < share * 2**32


def _check_length(prepared: PreparedData, data: DataTable) -> None:
    needed = data.sequence_length + 1
    if min(prepared.num_train_tokens, prepared.num_held_out_tokens) >= needed:
        return
    for path in (prepared.train_path, prepared.held_out_path):
        path.unlink(missing_ok=True)
    skipped = ", ".join(f"{count} {reason}" for reason, count in prepared.skipped.items()) or "none"
    raise SettingsError(
        f"data.text is too short: {prepared.num_train_tokens + prepared.num_held_out_tokens} tokens (files skipped: "
        f"{skipped}), where training and held-out text need {needed} each for data.sequence_length = "
        f"{data.sequence_length}; add text or shorten the sequences"
    )


def _inputs_digest(data: DataTable, tokenizer: Tokenizer, corpus: Corpus) -> str:
    sources = [[str(source.path), source.size_bytes, source.modified_ns] for source in corpus.sources()]
    inputs = [
        tokenizer.identity,
        data.jsonl_field,
        data.max_text_mb,
        data.held_out_share,
        data.sequence_length,
        sources,
    ]
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()


def _write_record(out_dir: Path, inputs: str, prepared: PreparedData) -> None:
    fields = {
        name: value.hex() if isinstance(value, bytes) else value.name if isinstance(value, Path) else value
        for name, value in asdict(prepared).items()
    }
    with whole_file(out_dir / "prepared.json") as partial:
        partial.write_text(json.dumps({"inputs": inputs, **fields}, indent=2) + "\n")


def _reusable(out_dir: Path, inputs: str) -> PreparedData | None:
    """What an earlier call left, or None if it is of other inputs, damaged or missing."""
    try:
        fields: dict[str, Any] = json.loads((out_dir / "prepared.json").read_text())
        if fields.pop("inputs") != inputs:
            return None
        for name in ("train_path", "held_out_path"):
            fields[name] = out_dir / fields[name]
        for name in ("train_digest", "held_out_digest"):
            fields[name] = bytes.fromhex(fields[name])
        prepared = PreparedData(**fields)
        whole = (
            prepared.train().digest() == prepared.train_digest
            and prepared.held_out().digest() == prepared.held_out_digest
        )
    except Exception:  # noqa: BLE001 - whatever is wrong with the old files, writing them anew mends it
        return None
    return prepared if whole else None
