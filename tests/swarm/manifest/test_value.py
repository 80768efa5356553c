"""Settings as canonical bytes: exact both ways, one form only, and safe to read from a stranger."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.core.canonical import Value, pack, unpack
from swarm.core.errors import RemoteError
from swarm.core.ids import PeerId
from swarm.core.settings import RunSettings
from swarm.manifest.file import assumed_data, freeze, parse_manifest
from swarm.manifest.value import run_id, settings_bytes, settings_from_value, settings_to_value


def _settings(text: str = "") -> RunSettings:
    manifest = parse_manifest(text, Path("run.toml"))
    return freeze(manifest, assumed_data(manifest), [bytes([stage]) * 32 for stage in range(manifest.model.num_stages)])


SETTINGS = _settings()
KEY = PeerId("12D3KooWRunKey")
VALUE = settings_to_value(SETTINGS)

plain = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(max_size=5)
odd_values = st.recursive(
    plain | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a value."""
    if isinstance(value, dict):
        inner = [_paths(value[key], (*path, key)) for key in sorted(value)]
    elif isinstance(value, list):
        inner = [_paths(item, (*path, at)) for at, item in enumerate(value)]
    else:
        inner = []
    return [path] + [found for paths in inner for found in paths]


def _with(path: tuple[Any, ...], new: Any, value: Value = VALUE) -> Any:
    if not path:
        return new
    changed: Any = copy.deepcopy(value)
    at = changed
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = new
    return changed


def _refused(value: Any) -> str:
    with pytest.raises(RemoteError) as caught:
        settings_from_value(value)
    assert caught.value.kind == "malformed"
    return str(caught.value)


@settings(max_examples=60, deadline=None)
@given(
    rate=st.floats(1e-300, 1e3),
    beta=st.floats(0, 1, exclude_max=True),
    seconds=st.floats(0, 86400, exclude_min=True),
    seed=st.integers(0, (1 << 63) - 1),
)
def test_settings_survive_the_wire_bit_by_bit(rate: float, beta: float, seconds: float, seed: int) -> None:
    sent = replace(
        SETTINGS,
        optimizer=replace(SETTINGS.optimizer, learning_rate=rate, beta1=beta),
        deadlines=replace(SETTINGS.deadlines, hop_s=seconds),
        data=replace(SETTINGS.data, seed=seed),
    )
    data = settings_bytes(sent)
    received = settings_from_value(unpack(data, max_bytes=len(data)))
    assert received == sent
    assert settings_bytes(received) == data
    assert run_id(received, KEY) == run_id(sent, KEY)


def test_run_id_is_the_golden_one() -> None:
    assert run_id(SETTINGS, KEY) == "e863a74e039d2e7e6152f2ed1894556374772c8d1874afcf39b7df72afcac006"


def test_run_id_changes_with_every_field_and_with_the_key() -> None:
    ids = {run_id(SETTINGS, KEY)}
    for text in ("[data]\nseed = 1", "[optimizer]\nbeta1 = 0.91", "[run]\nname = 'b'", "[deadlines]\ncall_s = 10.1"):
        ids.add(run_id(_settings(text), KEY))
    ids.add(run_id(SETTINGS, PeerId("12D3KooWOtherKey")))
    assert len(ids) == 6


def test_whole_number_for_a_float_makes_no_other_run() -> None:
    as_int = replace(SETTINGS, deadlines=replace(SETTINGS.deadlines, call_s=10), optimizer=SETTINGS.optimizer)
    assert settings_bytes(as_int) == settings_bytes(SETTINGS)
    assert "not in normal form" in _refused(_with(("deadlines", "call_s"), 10))


def test_field_left_out_is_refused_even_where_it_has_a_default() -> None:
    for path in _paths(VALUE):
        if path and isinstance(path[-1], str):
            changed: Any = copy.deepcopy(VALUE)
            at = changed
            for key in path[:-1]:
                at = at[key]
            del at[path[-1]]
            with pytest.raises(RemoteError):
                settings_from_value(changed)


def test_unknown_field_is_refused_in_every_table() -> None:
    for path in _paths(VALUE):
        at: Any = VALUE
        for key in path:
            at = at[key]
        if isinstance(at, dict):
            assert "is unknown" in _refused(_with((*path, "surprise"), 1))


@settings(max_examples=250, deadline=None)
@given(st.sampled_from(_paths(VALUE)), odd_values)
def test_value_of_a_stranger_is_refused_or_means_itself(path: tuple[Any, ...], new: Any) -> None:
    value = _with(path, new)
    try:
        received = settings_from_value(value)
    except RemoteError as error:
        if error.kind not in ("malformed", "protocol"):
            raise
    else:
        assert settings_bytes(received) == pack(value)


@pytest.mark.parametrize(
    ("path", "new", "expected"),
    [
        (("data", "train_digest"), bytes(31), "data.train_digest"),
        (("data", "num_train_tokens"), 1000, "hold no microbatch"),
        (("data", "num_held_out_tokens"), 128, "held-out tokens hold no sample"),
        (("data", "vocab_size"), 257, "the 257 ids of data.tokenizer"),
        (("model", "stage_layers"), [[0, 2], [3, 4]], "without gaps"),
        (("model", "stage_layers"), [[0, 2]], "the stages hold 2 layers, the model has 4"),
        (("model", "stage_layers"), [], "model.stage_layers"),
        (("initial_state_digests",), [bytes(32)], "1 digests for 2 stages"),
        (("checkpoint", "snapshot_every"), 7, "does not divide"),
        (("name",), "../../etc", "name"),
        (("data", "tokenizer"), "../x", "data.tokenizer"),
        (("deadlines", "lease_s"), float("inf"), "deadlines.lease_s"),
    ],
)
def test_disagreement_is_refused_by_name(path: tuple[Any, ...], new: Any, expected: str) -> None:
    assert expected in _refused(_with(path, new))


@pytest.mark.parametrize(
    "config_json",
    [
        "",
        "[]",
        "null",
        "[" * 100_000,
        '{"model_type":"llama"}',
        '{"model_type": "llama"}',
        '{"model_type":"llama","num_hidden_layers":1e9}',
        '{"model_type":"qwen3","num_hidden_layers":1000000000}',
        '{"model_type":["llama"],"num_hidden_layers":2}',
        '{"hidden_size":"wide","model_type":"llama","num_hidden_layers":4}',
        '{"model_type":"llama","num_hidden_layers":4,"rope_parameters":"yes"}',
        '{"model_type":"llama","num_hidden_layers":4,"vocab_size":-1}',
        "x" * (1 << 21),
    ],
)
def test_config_of_a_stranger_is_refused(config_json: str) -> None:
    _refused(_with(("model", "config_json"), config_json))


config_fields = sorted(json.loads(SETTINGS.model.config_json))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([*config_fields, "layer_types", "sliding_window", "quantization_config", "dtype"]), odd_values)
def test_odd_config_of_a_stranger_raises_nothing_else(name: str, new: Any) -> None:
    config = json.loads(SETTINGS.model.config_json) | {name: new}
    text = json.dumps(config, sort_keys=True, separators=(",", ":"), default=lambda value: value.hex())
    try:
        settings_from_value(_with(("model", "config_json"), text))
    except RemoteError as error:
        if error.kind != "malformed":
            raise


def test_other_protocol_is_refused_by_name() -> None:
    with pytest.raises(RemoteError, match="protocol 99") as caught:
        settings_from_value({"protocol": 99, "anything": "else"})
    assert caught.value.kind == "protocol"
