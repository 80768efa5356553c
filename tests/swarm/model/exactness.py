"""A family's trial before it is trusted: do its stages give the whole model's numbers?

A small model with the flags of the real one is built whole and cut; logits must be equal to the bit, gradients to
the order of sums.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from swarm.core.settings import ModelSettings
from swarm.model.families import canonical_config_json, family_of, keys_of, whole_config
from swarm.model.layout import ParameterLayout
from swarm.model.stage import Saved, StageModel

CUTS = (((0, 4),), ((0, 2), (2, 4)), ((0, 1), (1, 3), (3, 4)))
MAX_GRADIENT_ERROR = 1e-5
"""Relative L2 of a tensor's gradient: the loss in chunks may add in another order."""

_WINDOW = 8
_SEQUENCE_LENGTH = 40
"""Longer than any window, or a wrong mask would not show."""


def check_family_is_exact(model: ModelSettings) -> None:
    """Raises AssertionError naming what differs if stages of such a model are not the whole model."""
    import transformers

    tiny = _tiny_config(model)
    config_json = canonical_config_json(tiny)
    whole_class = getattr(transformers, family_of(config_json).causal_class)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = whole_config(config_json)
        # A checkpoint's config names the dtype it was saved in; weights here are fp32 whatever it says.
        whole: Any = whole_class._from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
        ids = torch.randint(0, tiny["vocab_size"], (2, _SEQUENCE_LENGTH + 1))
    x_BL, targets_BL = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=model.compute_dtype == "bf16"):
        logits_BLV = whole(input_ids=x_BL, use_cache=False).logits
    loss = functional.cross_entropy(logits_BLV.float().flatten(0, 1), targets_BL.flatten(), reduction="sum")
    torch.autograd.backward((loss,))
    logits_BLV = logits_BLV.detach()
    gradients = {name: value.grad for name, value in whole.named_parameters()}
    for cut in CUTS:
        settings = ModelSettings(config_json=config_json, stage_layers=cut, compute_dtype=model.compute_dtype)
        staged_BLV, staged_gradients = _staged(settings, whole.state_dict(), x_BL, targets_BL)
        where = f"model_type {tiny['model_type']!r} with this config, cut into {len(cut)} stages"
        off = float((staged_BLV - logits_BLV).abs().max())
        assert torch.equal(staged_BLV, logits_BLV), f"{where}: logits differ from the whole model's by up to {off:.3g}"
        for name, expected in gradients.items():
            off = float((staged_gradients[name] - expected).norm() / expected.norm().clamp_min(1e-30))
            assert off <= MAX_GRADIENT_ERROR, f"{where}: the gradient of {name} differs by {off:.3g}"


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
    fields: dict[str, Any] = dict(whole_config(model.config_json).to_dict())
    heads_share = fields["num_key_value_heads"] < fields["num_attention_heads"]
    usual_head = fields["head_dim"] * fields["num_attention_heads"] == fields["hidden_size"]
    small = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2 if heads_share else 4,
        "head_dim": 16 if usual_head else 32,
        "vocab_size": 97,
        "initializer_range": 0.2,
        # The whole is compared with its head untied, as it is trained and exported.
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    fields.update(small)
    layer_types = fields.get("layer_types")
    if layer_types:
        # Kinds of layer alternate, so that no stage begins where the whole model does.
        kinds = sorted(set(layer_types))
        fields["layer_types"] = [kinds[layer % len(kinds)] for layer in range(4)]
    if fields.get("sliding_window"):
        fields["sliding_window"] = _WINDOW
    known = keys_of(fields["model_type"])
    return {name: value for name, value in fields.items() if name in known}
