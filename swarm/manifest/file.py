"""A run's TOML file, read, and frozen into the settings that every peer agrees on.

manifest = read_manifest(Path("run.toml"))
prepared = prepare_data(manifest.data, folder)
settings = freeze(manifest, prepared, initial_state_digests)
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from swarm.core.errors import SettingsError
from swarm.core.pipeline.data_order import SLICES
from swarm.core.settings import DataSettings, ModelSettings, RunSettings, TrainingSettings
from swarm.core.tables import read_table
from swarm.data.corpus import is_url
from swarm.data.prepare import PreparedData, marks_of
from swarm.data.token_file import token_bytes_for
from swarm.data.tokenizer import BYTES, load_tokenizer
from swarm.manifest.model import model_settings
from swarm.manifest.tables import DataTable, ManifestTables
from swarm.manifest.text import manifest_text
from swarm.manifest.value import checked_settings, settings_to_value
from swarm.release import PROTOCOL

MAX_MANIFEST_BYTES = 1 << 20
DEFAULT_CHUNK_BYTES = 16 << 20
MIN_CHUNKS = 32
"""A small corpus is cut into at least about this many chunks, so that several peers of stage 0 have some to lease."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A checked manifest. Paths are absolute; nothing of the text has been read yet."""

    path: Path
    tables: ManifestTables
    model: ModelSettings

    @classmethod
    def read(cls, path: Path | str) -> "Manifest":
        """The manifest in a file; see `read_manifest`."""
        return read_manifest(Path(path))

    @classmethod
    def write(cls, path: Path | str, **tables: Mapping[str, Any]) -> "Manifest":
        """Write the tables' fields as TOML to `path` and read that; what is left out has its default.

        Raises SettingsError as `read_manifest` does, and then nothing is written.
        """
        text = manifest_text(tables)
        manifest = parse_manifest(text, Path(path))
        Path(path).write_text(text)
        return manifest

    @property
    def initial_checkpoint(self) -> Path | None:
        """Folder of a Hugging Face checkpoint whose weights the run starts from; None for fresh weights."""
        checkpoint = self.tables.model.checkpoint
        return None if checkpoint is None else Path(checkpoint)

    @property
    def data(self) -> DataTable:
        return self.tables.data


def read_manifest(path: Path) -> Manifest:
    """The manifest in a TOML file; its relative paths are taken from the file's folder.

    Raises SettingsError, naming field, value and remedy, for everything that can be wrong with it but the text itself.
    """
    try:
        return parse_manifest(_read(path), path)
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from error


def check_text_is_there(manifest: Manifest) -> None:
    """For a run that is to be made of it: one that is known has its tokens. Raises SettingsError."""
    data = manifest.data
    for path in (*data.text, *(path for source in data.mixture for path in source.text)):
        if not is_url(path) and not Path(path).exists():
            wrong = f'data.text = "{path}" is neither a file nor a folder; correct the path'
            raise SettingsError(f"{manifest.path}: {wrong}")


def parse_manifest(text: str, path: Path) -> Manifest:
    """The manifest in `text`, as if it were read from `path`. Raises SettingsError."""
    try:
        value = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"not TOML: {error}; mend that line (`swarm init` writes an example)") from error
    tables = _resolve(read_table(ManifestTables, value), path.absolute().parent)
    vocab_size = load_tokenizer(tables.data.tokenizer).vocab_size
    model = model_settings(
        tables.model,
        tables.adapters,
        vocab_size=vocab_size,
        sequence_length=tables.data.sequence_length,
        seed=tables.data.seed,
    )
    manifest = Manifest(path=path, tables=tables, model=model)
    # Everything that does not depend on the text shows now, not after the text was read.
    freeze(manifest, assumed_data(manifest), ())
    return manifest


def freeze(
    manifest: Manifest,
    prepared: PreparedData,
    initial_state_digests: Sequence[bytes],
    base_digest: bytes | None = None,
) -> RunSettings:
    """The run's settings. Raises SettingsError if the text does not suit them."""
    data = manifest.data
    run, tables = manifest.tables.run, vars(manifest.tables)
    settings = RunSettings(
        name=run.name,
        protocol=PROTOCOL,
        model=manifest.model,
        data=DataSettings(
            tokenizer=prepared.tokenizer,
            vocab_size=prepared.vocab_size,
            token_bytes=prepared.token_bytes,
            num_train_tokens=prepared.num_train_tokens,
            num_held_out_tokens=prepared.num_held_out_tokens,
            train_digest=prepared.train_digest,
            held_out_digest=prepared.held_out_digest,
            sequence_length=data.sequence_length,
            chunk_tokens=data.chunk_tokens or _default_chunk_tokens(manifest, prepared),
            seed=data.seed,
            documents=data.packing,
            loss_on=data.learnt,
            num_train_targets=prepared.num_train_targets if data.packing == "masked" else None,
            mixture=tuple((source.first_token, source.num_tokens, source.weight) for source in prepared.mixture),
        ),
        trust=run.trust,
        model_licence=run.model_licence,
        data_licence=run.data_licence,
        initial_state_digests=tuple(initial_state_digests),
        base_digest=base_digest,
        **{table.name: tables[table.name] for table in fields(TrainingSettings)},
    )
    return checked_settings(settings_to_value(settings))


def assumed_data(manifest: Manifest) -> PreparedData:
    """Data as if the text were long enough, for plans and checks made before it is read."""
    tokenizer = load_tokenizer(manifest.data.tokenizer)
    num_samples, length = manifest.tables.batch.microbatch_size, manifest.data.sequence_length
    chunk_tokens = max(num_samples * (length + 1), manifest.data.chunk_tokens or 0)
    nowhere = Path("/nonexistent")
    return PreparedData(
        train_path=nowhere,
        held_out_path=nowhere,
        tokenizer=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        token_bytes=token_bytes_for(tokenizer.vocab_size << marks_of(manifest.data).bits),
        end_of_document=tokenizer.end_of_document,
        num_train_tokens=MIN_CHUNKS * chunk_tokens,
        num_train_targets=MIN_CHUNKS * chunk_tokens,
        num_held_out_tokens=chunk_tokens,
        train_digest=bytes(32),
        held_out_digest=bytes(32),
        mixture=(),
        skipped=(),
    )


def _read(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise SettingsError(
            f"the manifest cannot be read ({error.strerror}); correct the path, or write one with `swarm init`"
        ) from error
    if len(data) > MAX_MANIFEST_BYTES:
        raise SettingsError(f"the manifest is larger than {MAX_MANIFEST_BYTES} bytes; give the run's TOML file")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise SettingsError(f"the manifest is not UTF-8 text ({error.reason}); give the run's TOML file") from error


def _resolve(tables: ManifestTables, folder: Path) -> ManifestTables:
    """The same with absolute paths. Whether there is text at them shows when it is read: a run that has its tokens
    needs none."""

    def absolute(path: str) -> str:
        return str((folder / Path(path).expanduser()).resolve())

    def place(path: str) -> str:
        return path if is_url(path) else absolute(path)

    model, data = tables.model, tables.data
    if isinstance(model.config, str):
        model = replace(model, config=absolute(model.config))
    if model.checkpoint is not None:
        model = replace(model, checkpoint=absolute(model.checkpoint))
    if data.tokenizer != BYTES:
        data = replace(data, tokenizer=absolute(data.tokenizer))
    data = replace(
        data,
        text=tuple(map(place, data.text)),
        mixture=tuple(replace(source, text=tuple(map(place, source.text))) for source in data.mixture),
    )
    return replace(tables, model=model, data=data)


def _default_chunk_tokens(manifest: Manifest, prepared: PreparedData) -> int:
    """Slices that hold whole windows and the one token that the last target reads, within 16 MiB and 1/MIN_CHUNKS of
    the text, but a microbatch."""
    most = DEFAULT_CHUNK_BYTES // prepared.token_bytes
    if most * MIN_CHUNKS <= prepared.num_train_tokens:
        return most  # each slice a piece of the file
    length, size = manifest.data.sequence_length, manifest.tables.batch.microbatch_size
    windows = (prepared.num_train_tokens // MIN_CHUNKS // SLICES - 1) // length
    return SLICES * (windows * length + 1) if SLICES * windows >= size else size * (length + 1)
