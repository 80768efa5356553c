"""This is where a run's settings become canonical bytes and come back checked, for they also come from strangers.

The settings' SHA-256 is the run id, so there is one sequence of bytes for equal settings: every field is written,
numbers declared float are float64, and bytes that would be written differently are refused.
"""

from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import Field, Strict, ValidationError

from swarm import PROTOCOL
from swarm.core.canonical import Value, digest, pack
from swarm.core.data_order import DataOrder
from swarm.core.errors import RemoteError, SettingsError
from swarm.core.ids import RunId
from swarm.core.settings import (
    AuditSettings,
    AveragingSettings,
    BatchSettings,
    CheckpointSettings,
    CodecSettings,
    DataSettings,
    DeadlineSettings,
    LimitSettings,
    ModelSettings,
    OptimizerSettings,
    RunSettings,
)
from swarm.manifest_model import check_model
from swarm.manifest_problems import describe
from swarm.manifest_tables import (
    MAX_TOKENS,
    AuditTable,
    AveragingTable,
    BatchTable,
    CheckpointTable,
    CodecTable,
    DeadlineTable,
    Licence,
    LimitTable,
    OptimizerTable,
    RunName,
    Table,
    Trust,
)

MAX_CONFIG_CHARACTERS = 1 << 20
Digest = Annotated[bytes, Field(min_length=32, max_length=32)]
Layers = Annotated[tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=1)]], Strict(False)]


class ModelValue(Table):
    config_json: str = Field(max_length=MAX_CONFIG_CHARACTERS)
    stage_layers: Annotated[tuple[Layers, ...], Strict(False), Field(min_length=1, max_length=1024)]
    compute_dtype: Literal["fp32", "bf16"]
    recompute: bool


class DataValue(Table):
    tokenizer: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,254}$")  # it names a folder
    vocab_size: int = Field(ge=1, le=1 << 32)
    token_bytes: Literal[1, 2, 4]
    num_train_tokens: int = Field(ge=2, le=MAX_TOKENS)
    num_held_out_tokens: int = Field(ge=2, le=MAX_TOKENS)
    train_digest: Digest
    held_out_digest: Digest
    sequence_length: int = Field(ge=1, le=1 << 20)
    chunk_tokens: int = Field(ge=2, le=MAX_TOKENS)
    seed: int = Field(ge=0, lt=1 << 63)


class RunValue(Table):
    name: RunName
    protocol: int
    model: ModelValue
    data: DataValue
    batch: BatchTable
    optimizer: OptimizerTable
    codecs: CodecTable
    averaging: AveragingTable
    audits: AuditTable
    checkpoint: CheckpointTable
    limits: LimitTable
    deadlines: DeadlineTable
    trust: Trust
    model_licence: Licence
    data_licence: Licence
    initial_state_digests: Annotated[tuple[Digest, ...], Strict(False)]


def settings_to_value(settings: RunSettings) -> dict[str, Value]:
    """Every field by its name; ints given where a float is declared are written as floats."""
    return _to_value(settings)


def settings_bytes(settings: RunSettings) -> bytes:
    """Canonical bytes of the settings, as they are signed and sent."""
    return pack(settings_to_value(settings))


def run_id(settings: RunSettings) -> RunId:
    """Hex SHA-256 of the settings under the domain "manifest"."""
    return RunId(digest("manifest", settings_to_value(settings)).hex())


def settings_from_value(value: Value) -> RunSettings:
    """Settings a stranger sent, checked as strictly as a user's own file.

    Raises RemoteError("protocol") for another wire protocol, RemoteError("malformed") for anything else wrong.
    """
    if isinstance(value, dict) and value.get("protocol") != PROTOCOL:
        raise RemoteError("protocol", f"the run speaks protocol {value.get('protocol')!r}, this program {PROTOCOL}")
    try:
        settings = checked_settings(value)
    except SettingsError as error:
        raise RemoteError("malformed", f"run settings: {error}") from error
    if settings_bytes(settings) != pack(value):
        raise RemoteError("malformed", "run settings are not in normal form: a field is missing or an int for a float")
    return settings


def checked_settings(value: Value) -> RunSettings:
    """Settings of a value, every bound and agreement between fields checked. Raises SettingsError."""
    try:
        run = RunValue.model_validate(value)
    except ValidationError as error:
        raise SettingsError(describe(error, RunValue)) from error
    settings = RunSettings(
        name=run.name,
        protocol=run.protocol,
        model=ModelSettings(**run.model.model_dump()),
        data=DataSettings(**run.data.model_dump()),
        batch=BatchSettings(**run.batch.model_dump()),
        optimizer=OptimizerSettings(**run.optimizer.model_dump()),
        codecs=CodecSettings(**run.codecs.model_dump()),
        averaging=AveragingSettings(**run.averaging.model_dump()),
        audits=AuditSettings(**run.audits.model_dump()),
        checkpoint=CheckpointSettings(**run.checkpoint.model_dump()),
        limits=LimitSettings(**run.limits.model_dump()),
        deadlines=DeadlineSettings(**run.deadlines.model_dump()),
        trust=run.trust,
        model_licence=run.model_licence,
        data_licence=run.data_licence,
        initial_state_digests=run.initial_state_digests,
    )
    _check_agreement(settings)
    return settings


def _check_agreement(settings: RunSettings) -> None:
    data, batch = settings.data, settings.batch
    check_model(settings.model, vocab_size=data.vocab_size, sequence_length=data.sequence_length)
    if data.vocab_size > 256**data.token_bytes:
        raise SettingsError(f"data.vocab_size = {data.vocab_size} does not fit data.token_bytes = {data.token_bytes}")
    if data.num_held_out_tokens <= data.sequence_length:
        raise SettingsError(
            f"data.text is too short: {data.num_held_out_tokens} held-out tokens hold no sample of "
            f"data.sequence_length = {data.sequence_length}; add text or shorten the sequences"
        )
    if batch.target_tokens < settings.microbatch_tokens:
        raise SettingsError(
            f"batch.target_tokens = {batch.target_tokens} is less than one microbatch of batch.microbatch_size = "
            f"{batch.microbatch_size} x data.sequence_length = {data.sequence_length} = {settings.microbatch_tokens} "
            "tokens; raise it or make microbatches smaller"
        )
    if data.chunk_tokens <= settings.microbatch_tokens:
        raise SettingsError(
            f"data.chunk_tokens = {data.chunk_tokens} holds no microbatch of {settings.microbatch_tokens} tokens and "
            f"one more; give at least {settings.microbatch_tokens + 1}"
        )
    try:
        DataOrder.of_run(settings)
    except ValueError as error:
        raise SettingsError(f"data.text is too short: {error}") from error
    if settings.initial_state_digests and len(settings.initial_state_digests) != settings.model.num_stages:
        raise SettingsError(
            f"initial_state_digests: {len(settings.initial_state_digests)} digests for {settings.model.num_stages} "
            "stages; give one for each"
        )


def _to_value(settings: Any) -> dict[str, Value]:
    hints = get_type_hints(type(settings))
    out: dict[str, Value] = {}
    for entry in fields(settings):
        value = getattr(settings, entry.name)
        if is_dataclass(value):
            out[entry.name] = _to_value(value)
        elif hints[entry.name] is float:
            out[entry.name] = float(value)
        else:
            out[entry.name] = _plain(value)
    return out


def _plain(value: Any) -> Value:
    """Tuples as lists: what unpacking gives back."""
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value
