"""A family's trial before it is trusted: do its stages give the whole model's numbers?

A small model with the flags of the real one is built whole and cut; logits must be equal to the bit, gradients to
the order of sums.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from swarm.core.settings import ModelSettings
from swarm.model.families import attention_of, canonical_config_json, family_of, keys_of, whole_config
from swarm.model.layout import ParameterLayout
from swarm.model.stage import Saved, StageModel, _cross_entropy_gradient

CUTS = (((0, 4),), ((0, 2), (2, 4)), ((0, 1), (1, 3), (3, 4)))
MAX_GRADIENT_ERROR = 1e-5
"""Relative L2 of a tensor's gradient: the loss in chunks may add in another order."""

_WINDOW = 8
_SEQUENCE_LENGTH = 40
"""Longer than any window, or a wrong mask would not show."""


@dataclass(frozen=True)
class Exactness:
    """How far a model's stages were from the whole, over all ways to cut it."""

    logits_equal: bool
    gradient_error: float
    """Relative L2 of the tensor that is farthest off."""
    worst: str
    """In words."""


def check_family_is_exact(model: ModelSettings) -> None:
    """Raises AssertionError naming what differs if stages of such a model are not the whole model."""
    found = exactness_of(model)
    assert found.logits_equal, found.worst
    assert found.gradient_error <= MAX_GRADIENT_ERROR, found.worst


def whole_model(config_json: str, seed: int = 0) -> Any:
    """The transformers model, whole, randomly initialized, computed as stages are."""
    import transformers

    config = whole_config(config_json)
    own = type(config).from_dict(config.to_dict())
    whole_class = getattr(transformers, family_of(config_json).causal_class)
    given = {"experts_implementation": "eager"} if family_of(config_json).routed else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # A checkpoint's config names the dtype it was saved in; weights here are fp32 whatever it says.
        whole = whole_class._from_config(own, dtype=torch.float32, attn_implementation=attention_of(own), **given)
    return whole.eval()


def exactness_of(model: ModelSettings) -> Exactness:
    """Of stages of such a model, small, untied, and where it is tied in one stage too."""
    tiny = _tiny_config(model)
    tied = bool(tiny["tie_word_embeddings"])
    found = [
        _compared(model, tiny | {"tie_word_embeddings": False}, CUTS if model.compute_dtype == "fp32" else CUTS[2:])
    ]
    if tied:
        found.append(_compared(model, tiny, CUTS[:1]))
    worst = max(found, key=lambda one: (not one.logits_equal, one.gradient_error))
    return worst


def _compared(model: ModelSettings, tiny: dict[str, Any], cuts: tuple[tuple[tuple[int, int], ...], ...]) -> Exactness:
    config_json = canonical_config_json(tiny)
    whole, chance = whole_model(config_json), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in whole.parameters():
            if value.ndim == 1:  # norms that multiply by 1, and biases of 0, would not be missed
                value.add_(torch.randn(value.shape, generator=chance), alpha=0.2)
    ids = torch.randint(0, tiny["vocab_size"], (2, _SEQUENCE_LENGTH + 1), generator=chance)
    x_BL, targets_BL = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=model.compute_dtype == "bf16"):
        logits_BLV = whole(input_ids=x_BL, use_cache=False).logits
    logits_NV, targets_N = logits_BLV.float().flatten(0, 1), targets_BL.flatten()
    if model.compute_dtype == "fp32":
        loss = functional.cross_entropy(logits_NV, targets_N, reduction="sum")
        torch.autograd.backward((loss,))
    else:  # a last bit of the loss's own gradient would turn roundings to bf16 all the way down
        torch.autograd.backward((logits_NV,), (_cross_entropy_gradient(logits_NV.detach(), targets_N),))
    logits_BLV = logits_BLV.detach()
    gradients = {name: value.grad for name, value in whole.named_parameters()}
    equal, worst, said = True, 0.0, ""
    for cut in cuts:
        settings = ModelSettings(config_json=config_json, stage_layers=cut, compute_dtype=model.compute_dtype)
        staged_BLV, staged_gradients = _staged(settings, whole.state_dict(), x_BL, targets_BL)
        where = f"model_type {tiny['model_type']!r} with this config, cut into {len(cut)} stages"
        if not torch.equal(staged_BLV, logits_BLV):
            off = float((staged_BLV - logits_BLV).abs().max())
            equal, said = False, f"{where}: logits differ from the whole model's by up to {off:.3g}"
        for name, expected in gradients.items():
            off = float((staged_gradients[name] - expected).norm() / expected.norm().clamp_min(1e-30))
            if off > worst:
                worst = off
                said = said if not equal else f"{where}: the gradient of {name} differs by {off:.3g}"
    return Exactness(equal, worst, said)


def flat_weights(layout: ParameterLayout, tensors: dict[str, torch.Tensor]) -> NDArray[np.float32]:
    """The layout's tensors, taken by name, as one flat vector."""
    flat = np.empty(layout.num_values, dtype=np.float32)
    for name, view in layout.views(flat).items():
        np.copyto(view, tensors[name].detach().float().numpy())
    return flat


def _staged(
    settings: ModelSettings, tensors: dict[str, torch.Tensor], x_BL: torch.Tensor, targets_BL: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits and gradients by name of a pipeline of the settings' stages."""
    stages = [StageModel(settings, stage) for stage in range(settings.num_stages)]
    versions = [stage.weights(flat_weights(stage.layout, tensors)) for stage in stages]
    sums = [torch.zeros(stage.layout.num_values) for stage in stages]
    x = x_BL
    in_flight: list[Saved] = []
    for stage, version in zip(stages[:-1], versions[:-1], strict=True):
        x, saved = stage.forward(version, x, keep=True)
        assert saved is not None
        in_flight.append(saved)
    logits_BLV = stages[-1].logits(versions[-1], x)
    _, _, saved_loss = stages[-1].loss(versions[-1], x, targets_BL, keep=True)
    assert saved_loss is not None
    grad = stages[-1].loss_backward(saved_loss, sums[-1])
    for index in reversed(range(len(in_flight))):
        assert grad is not None
        grad = stages[index].backward(in_flight[index], grad, sums[index])
    gradients: dict[str, torch.Tensor] = {}
    for stage, values in zip(stages, sums, strict=True):
        gradients.update(stage.layout.views(values))
    return logits_BLV, gradients


def _tiny_config(model: ModelSettings) -> dict[str, Any]:
    """The model's config with every flag kept and every size small."""
    config = whole_config(model.config_json)
    fields: dict[str, Any] = dict(config.to_dict())
    heads, hidden_size = config.num_attention_heads, config.hidden_size
    key_value_heads = getattr(config, "num_key_value_heads", heads)
    usual_head = (getattr(config, "head_dim", None) or hidden_size // heads) * heads == hidden_size
    small = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2 if key_value_heads < heads else 4,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "query_pre_attn_scalar": 24,
        "vocab_size": 97,
        "initializer_range": 0.2,
        # Multipliers of 1 would not show where they are left out, or taken twice.
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
        # The loss of balance is no part of what a whole model is compared by.
        "router_aux_loss_coef": 0.0,
    }
    own_name = config.attribute_map
    fields.update({own_name.get(name, name): value for name, value in small.items()})
    fields.update(dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")))
    if "head_dim" in fields or not usual_head:
        fields["head_dim"] = 16 if usual_head else 32
    if fields.get("layer_types"):
        # Kinds of layer alternate, so that no stage begins where the whole model does.
        kinds = sorted(set(fields["layer_types"]))
        fields["layer_types"] = [kinds[layer % len(kinds)] for layer in range(4)]
    if fields.get("no_rope_layers"):
        fields["no_rope_layers"] = [1, 0, 1, 0]
    if fields.get("mlp_only_layers"):
        fields["mlp_only_layers"] = [2]
    if fields.get("sliding_window"):
        fields["sliding_window"] = _WINDOW
    known = keys_of(fields["model_type"])
    return {name: value for name, value in fields.items() if name in known}
