"""What a run's audits can prove is said in words, and says no more than they can."""

import json
from dataclasses import replace
from typing import Any

import pytest

from swarm.core.settings import CodecSettings, RunSettings
from swarm.model.families import canonical_config_json
from tests.verification.exhibits import small_settings
from verification.audit.coverage import checks_of, unproved, warning_of

ALL = ("activations", "gradients of activations", "contributions")
INT8 = CodecSettings(activations="int8", activation_gradients="int8", averaging="int8")


def settings_of(trust: Any = "public", *, compute_dtype: Any = "fp32", **codecs: Any) -> RunSettings:
    settings = small_settings(2, codecs=replace(INT8, **codecs), trust=trust)
    return replace(settings, model=replace(settings.model, compute_dtype=compute_dtype))


def routed(settings: RunSettings) -> RunSettings:
    config = json.loads(settings.model.config_json) | {"model_type": "mixtral", "num_experts_per_tok": 2}
    return replace(settings, model=replace(settings.model, config_json=canonical_config_json(config)))


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        (settings_of(), ()),
        (settings_of("friends"), ALL),
        (settings_of(compute_dtype="bf16"), ALL),
        (settings_of(activations="int4"), ALL[:1]),
        (settings_of(averaging="topk"), ALL[2:]),
        (routed(settings_of()), ALL),
    ],
)
def test_whoever_joins_is_promised_only_what_is_proved(settings: RunSettings, found: tuple[str, ...]) -> None:
    assert unproved(settings) == found
    said = checks_of(settings)
    assert ("one that lies is banned for ever" in said) == (not found)
    if settings.replays:
        assert all(what in said for what in found)
        assert all(what in warning_of(settings) for what in found)
        assert bool(warning_of(settings)) == bool(found)
    else:
        assert "nobody computes this machine's other work again" in said
        assert not warning_of(settings)
