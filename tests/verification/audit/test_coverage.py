"""What a run's audits can prove is said in words, and says no more than they can."""

import json
from dataclasses import replace
from typing import Any

import pytest

from swarm.core.errors import SettingsError
from swarm.core.settings import AveragingSettings, CodecSettings, RunSettings
from swarm.model.families import canonical_config_json
from tests.verification.exhibits import small_settings
from verification.audit.coverage import check_proved, checks_of, unproved

ALL = ("activations", "gradients of activations", "contributions")
INT8 = CodecSettings(activations="int8", activation_gradients="int8", averaging="int8")


def settings_of(trust: Any = "public", *, compute_dtype: Any = "fp32", **codecs: Any) -> RunSettings:
    settings = small_settings(2, codecs=replace(INT8, **codecs), trust=trust)
    return replace(settings, model=replace(settings.model, compute_dtype=compute_dtype))


def windows_of(averaging: Any, *, compute_dtype: Any) -> RunSettings:
    settings = small_settings(
        1,
        codecs=replace(INT8, averaging=averaging),
        averaging=AveragingSettings(local_steps=10),
        trust="public",
    )
    return replace(settings, model=replace(settings.model, compute_dtype=compute_dtype))


def routed(settings: RunSettings) -> RunSettings:
    config = json.loads(settings.model.config_json) | {"model_type": "mixtral", "num_experts_per_tok": 2}
    return replace(settings, model=replace(settings.model, config_json=canonical_config_json(config)))


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        (settings_of(), ()),
        (settings_of("friends"), ALL),
        (settings_of(compute_dtype="bf16"), ()),
        (settings_of(compute_dtype="bf16", activations="int4", activation_gradients="int4"), ()),
        (settings_of(activations="int4"), ()),
        (settings_of(averaging="topk"), ALL[2:]),
        (settings_of(compute_dtype="bf16", averaging="int4"), ALL[2:]),
        *((windows_of(averaging, compute_dtype="bf16"), ()) for averaging in ("fp32", "bf16", "int8", "int4", "int2")),
        (windows_of("int4", compute_dtype="fp32"), ALL[2:]),
        (routed(settings_of()), ALL),
        (routed(windows_of("int2", compute_dtype="bf16")), ALL),
    ],
)
def test_whoever_joins_is_promised_only_what_is_proved(settings: RunSettings, found: tuple[str, ...]) -> None:
    assert unproved(settings) == found
    said = checks_of(settings)
    assert ("one that lies is banned for ever" in said) == (not found)
    if settings.replays:
        assert all(what in said for what in found)
    else:
        assert "nobody computes this machine's other work again" in said


@pytest.mark.parametrize("settings", [settings_of(averaging="topk"), routed(settings_of())])
def test_a_run_of_strangers_in_which_not_every_lie_is_proved_is_not_started(settings: RunSettings) -> None:
    with pytest.raises(SettingsError, match='trust = "friends"') as refused:
        check_proved(settings)
    assert all(what in str(refused.value) for what in unproved(settings))


@pytest.mark.parametrize("settings", [settings_of(compute_dtype="bf16"), settings_of("friends", averaging="topk")])
def test_any_other_is(settings: RunSettings) -> None:
    check_proved(settings)
