"""A run's settings as canonical bytes, and back, checked, for they also come from strangers.

The run id is a SHA-256 over the settings and the run key, so there is one sequence of bytes for equal settings: every
field is written, numbers declared float are float64, and bytes that would be written differently are refused.
"""

import json
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from swarm.core.canonical import Value, digest, pack
from swarm.core.errors import RemoteError, SettingsError
from swarm.core.ids import PeerId, RunId
from swarm.core.pipeline.data_order import DataOrder
from swarm.core.pipeline.targets import MAX_BOUNDS, most_documents
from swarm.core.round.contribution import MAX_WORK
from swarm.core.settings import MOST_STEPS, RunSettings
from swarm.core.tables import read_table
from swarm.data.documents.marks import Marks
from swarm.manifest.model import check_model
from swarm.release import PROTOCOL


def settings_to_value(settings: RunSettings) -> dict[str, Value]:
    """Every field by its name; ints given where a float is declared are written as floats."""
    return _to_value(settings)


def settings_bytes(settings: RunSettings) -> bytes:
    """Canonical bytes of the settings, as they are signed and sent."""
    return pack(settings_to_value(settings))


def run_id(settings: RunSettings, run_key: PeerId) -> RunId:
    """Hex SHA-256 of the settings and of the key that signs them, under the domain "manifest".

    The same settings under another key are another run: what is signed in one is nothing in the other.
    """
    return named_run(settings_to_value(settings), run_key)


def named_run(settings: Value, run_key: PeerId) -> RunId:
    """The same of settings that are not read yet."""
    return RunId(digest("manifest", [settings, run_key]).hex())


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
    settings = read_table(RunSettings, value)
    _check_agreement(settings)
    return settings


def _check_agreement(settings: RunSettings) -> None:
    data, batch = settings.data, settings.batch
    check_model(settings.model, vocab_size=data.vocab_size, sequence_length=data.sequence_length)
    mark_bits = Marks.of(data).bits
    if data.vocab_size << mark_bits > 256**data.token_bytes:
        raise SettingsError(
            f"data.vocab_size = {data.vocab_size} with {mark_bits} marks does not fit data.token_bytes = "
            f"{data.token_bytes}"
        )
    if data.documents == "masked":
        _check_documents(settings)
    if (data.num_train_targets or 0) > data.num_train_tokens:
        raise SettingsError(f"data.num_train_targets = {data.num_train_targets} of {data.num_train_tokens} tokens")
    if data.num_held_out_samples < 1:
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
    least = batch.microbatch_size * (data.sequence_length + 1)
    if data.chunk_tokens < least:
        raise SettingsError(
            f"data.chunk_tokens = {data.chunk_tokens} holds no microbatch of {batch.microbatch_size} samples of "
            f"{data.sequence_length} tokens and one more each; give at least {least}"
        )
    if settings.has_windows:
        _check_windows(settings)
    elif settings.codecs.averaging == "int2":
        raise SettingsError(
            'codecs.averaging = "int2" is for windows of local steps: one step\'s gradient is too noisy for it; set '
            'codecs.averaging = "int4", or averaging.local_steps above 1'
        )
    if any(first + count > data.num_train_tokens for first, count, _ in data.mixture):
        raise SettingsError(f"data.mixture: a source lies past the {data.num_train_tokens} tokens to train on")
    try:
        DataOrder.of_run(settings)
    except ValueError as error:
        raise SettingsError(f"data.text is too short: {error}") from error
    if settings.base_digest is not None and not settings.model.has_base:
        raise SettingsError("base_digest names a frozen base, but adapters.rank = 0: the whole model is trained")
    if settings.model.has_base and settings.initial_state_digests and settings.base_digest is None:
        raise SettingsError("base_digest is missing: adapters stand on a frozen base that everyone knows")
    if settings.initial_state_digests and len(settings.initial_state_digests) != settings.model.num_stages:
        raise SettingsError(
            f"initial_state_digests: {len(settings.initial_state_digests)} digests for {settings.model.num_stages} "
            "stages; give one for each"
        )


def _check_documents(settings: RunSettings) -> None:
    size, each = settings.batch.microbatch_size, most_documents(settings.data.sequence_length)
    if size * each > MAX_BOUNDS:
        raise SettingsError(
            f'batch.microbatch_size = {size}: with data.documents = "masked" a microbatch has up to {each} documents a '
            f"sample, {MAX_BOUNDS} at most; give at most {MAX_BOUNDS // each}"
        )
    if settings.data.sequence_length < 2:
        raise SettingsError("data.sequence_length = 1 holds no document with a target; raise it")


MOST_AUDITED_STEPS = 32
"""Inner steps of a window that replicas replay."""


def _check_windows(settings: RunSettings) -> None:
    """Raises SettingsError for what windows of local steps do not go with."""
    averaging, optimizer = settings.averaging, settings.optimizer
    steps = f"averaging.local_steps = {averaging.local_steps}"
    for is_wrong, other, remedy in (
        (settings.model.num_stages > 1, f"model.stages = {settings.model.num_stages}", "model.stages = 1"),
        (
            settings.trust == "public" and averaging.local_steps > MOST_AUDITED_STEPS,
            f'run.trust = "public": replays of more than {MOST_AUDITED_STEPS} are not calibrated',
            f"averaging.local_steps = {MOST_AUDITED_STEPS} or fewer",
        ),
        (
            averaging.delay > 0 and settings.trust == "public",
            f'averaging.delay = {averaging.delay} and run.trust = "public": no auditor replays such windows',
            "averaging.delay = 0",
        ),
        (optimizer.name != "adamw", f'optimizer.name = "{optimizer.name}"', 'optimizer.name = "adamw"'),
        (optimizer.correction != "none", f'optimizer.correction = "{optimizer.correction}"', 'correction = "none"'),
        (optimizer.moments != "fp32", f'optimizer.moments = "{optimizer.moments}"', 'optimizer.moments = "fp32"'),
        (
            settings.codecs.averaging == "topk",
            'codecs.averaging = "topk"',
            'codecs.averaging = "int2"',
        ),
        (
            averaging.local_steps * optimizer.total_steps > MOST_STEPS,
            f"optimizer.total_steps = {optimizer.total_steps}",
            f"no more than {MOST_STEPS} inner steps in all",
        ),
        (
            settings.microbatches_of_one > MAX_WORK,
            f"{settings.microbatches_per_step} microbatches in batch.target_tokens",
            f"no more than {MAX_WORK} in a window, as with a larger batch.microbatch_size",
        ),
    ):
        if is_wrong:
            raise SettingsError(f"{steps} does not go with {other}; set {remedy}, or averaging.local_steps = 1")


def _to_value(settings: Any) -> dict[str, Value]:
    hints = get_type_hints(type(settings))
    out: dict[str, Value] = {}
    for entry in fields(settings):
        value = getattr(settings, entry.name)
        if hints[entry.name] is float:
            out[entry.name] = float(value)
        else:
            out[entry.name] = _plain(value)
    return out


def _plain(value: Any) -> Value:
    """Tuples as lists: what unpacking gives back."""
    if is_dataclass(value):
        return _to_value(value)
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def json_of(value: Value) -> Any:
    """The value as JSON has it: bytes in hex."""
    return json.loads(json.dumps(value, default=lambda data: bytes(data).hex()))
