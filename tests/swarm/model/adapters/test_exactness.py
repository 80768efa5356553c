"""Stages with adapters, cut anywhere, are peft's own model on the same base."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from benchmarks.families.exactness import flat_weights
from swarm.core.errors import LocalError, SettingsError
from swarm.core.settings import AdapterSettings, ModelSettings
from swarm.disk.mapped_file import mapped
from swarm.model.adapters.base import Base, base_layout, base_tensors
from swarm.model.adapters.making import as_kept, write_base
from swarm.model.initial import stage_weights
from swarm.model.stack import stage_layout
from swarm.model.stage import Saved, StageModel
from tests.swarm.model.tiny_models import tiny_model, token_batch, whole_model


def base_of(model: ModelSettings, folder: Path, source: Path | None = None) -> Base:
    write_base(model, folder / "base", 0, source)
    return Base(base_layout(model), mapped(folder / "base"))


def keep_as_base(model: ModelSettings, whole: Any) -> None:
    """Every tensor of the whole model as the base has it."""
    named = dict(whole.named_parameters())
    with torch.no_grad():
        for tensor in base_layout(model).tensors:
            named[tensor.name].copy_(as_kept(tensor, named[tensor.name].float()))


def adapted_by_peft(whole: Any, adapters: AdapterSettings) -> tuple[Any, dict[str, torch.Tensor]]:
    """peft's model with adapters that are not zero, and their tensors by our names."""
    import peft

    modules = "all-linear" if adapters.modules == ("all-linear",) else list(adapters.modules)
    lora = peft.LoraConfig(r=adapters.rank, lora_alpha=int(adapters.alpha), target_modules=modules)
    adapted, chance, tensors = peft.get_peft_model(whole, lora), torch.Generator().manual_seed(3), {}
    for name, value in adapted.named_parameters():
        if "lora_" in name:
            with torch.no_grad():
                value.copy_(torch.randn(value.shape, generator=chance) * 0.1)
            tensors[name.removeprefix("base_model.model.").replace(".default", "")] = value
    return adapted, tensors


@pytest.mark.parametrize(
    ("config", "num_stages", "adapters"),
    [
        ("llama", 2, AdapterSettings(rank=4, alpha=12.0, modules=("q_proj", "v_proj"))),
        ("qwen3", 3, AdapterSettings(rank=4, alpha=8.0, base="nf4")),
        ("gemma2", 1, AdapterSettings(rank=2, alpha=2.0)),
        ("gpt_neox", 2, AdapterSettings(rank=3, base="nf4")),
    ],
)
def test_loss_and_gradients_are_pefts(config: str, num_stages: int, adapters: AdapterSettings, tmp_path: Path) -> None:
    model = tiny_model(config, num_stages, adapters=adapters)
    whole = whole_model(model)
    whole.save_pretrained(tmp_path / "checkpoint")
    frozen = base_of(model, tmp_path, tmp_path / "checkpoint")
    before = (tmp_path / "base").read_bytes()
    keep_as_base(model, whole)
    adapted, tensors = adapted_by_peft(whole, adapters)
    ids_BL, targets_BL = token_batch(2, 24)
    logits_BLV = adapted(input_ids=ids_BL, use_cache=False).logits
    loss = functional.cross_entropy(logits_BLV.flatten(0, 1), targets_BL.flatten(), reduction="sum")
    torch.autograd.backward((loss,))

    stages = [StageModel(model, stage).on(frozen) for stage in range(num_stages)]
    assert sorted(name for stage in stages for name in stage.layout.names) == sorted(tensors)
    versions = [stage.weights(flat_weights(stage.layout, tensors)) for stage in stages]
    sums = [torch.zeros(stage.layout.num_values) for stage in stages]
    x, held = ids_BL, list[Saved]()
    for stage, version in zip(stages[:-1], versions[:-1], strict=True):
        x, saved = stage.forward(version, x, keep=True)
        assert saved is not None
        held.append(saved)
    found, _, saved_loss = stages[-1].loss(versions[-1], x, targets_BL, keep=True)
    assert saved_loss is not None
    grad = stages[-1].loss_backward(saved_loss, sums[-1])
    for at in reversed(range(len(held))):
        assert grad is not None
        grad = stages[at].backward(held[at], grad, sums[at])

    assert found == pytest.approx(loss.item(), rel=1e-5)
    for stage, total in zip(stages, sums, strict=True):
        for name, gradient in stage.layout.views(total).items():
            expected = tensors[name].grad
            assert expected is not None
            assert float((gradient - expected).norm() / expected.norm()) < 1e-5, name
    assert (tmp_path / "base").read_bytes() == before


def test_bf16_differs_by_its_rounding_only_and_recompute_not_at_all(tmp_path: Path) -> None:
    losses, sums = {}, {}
    for dtype, recompute in (("fp32", False), ("fp32", True), ("bf16", False)):
        model = tiny_model(
            "llama", 1, adapters=AdapterSettings(rank=4, base="nf4"), compute_dtype=dtype, recompute=recompute
        )
        stage = StageModel(model, 0).on(base_of(model, tmp_path))
        flat = np.random.default_rng(0).normal(0, 0.1, stage.layout.num_values).astype(np.float32)
        into = torch.zeros(stage.layout.num_values)
        losses[dtype, recompute], _, saved = stage.loss(stage.weights(flat), *token_batch(2, 16), keep=True)
        assert saved is not None
        stage.loss_backward(saved, into)
        sums[dtype, recompute] = into
    assert torch.equal(sums["fp32", False], sums["fp32", True])
    assert losses["bf16", False] == pytest.approx(losses["fp32", False], rel=1e-2)
    off = (sums["bf16", False] - sums["fp32", False]).norm() / sums["fp32", False].norm()
    assert 1e-4 < float(off) < 0.1


def test_cut_does_not_change_the_file_and_a_stage_needs_its_own_tensors_only(tmp_path: Path) -> None:
    cut = [tiny_model("llama", stages, adapters=AdapterSettings(rank=4, base="nf4")) for stages in (1, 2, 3)]
    files = set()
    for model in cut:
        base_of(model, tmp_path)
        files.add((tmp_path / "base").read_bytes())
    assert len(files) == 1
    first, last = (base_tensors(cut[1], stage) for stage in (0, 1))
    assert not {tensor.name for tensor in first} & {tensor.name for tensor in last}
    assert {tensor.kind for tensor in first} == {"float32", "nf4"}
    assert len(first) + len(last) == len(base_layout(cut[1]).tensors)


def test_first_adapters_add_nothing_and_do_not_depend_on_the_cut(tmp_path: Path) -> None:
    one, two = (tiny_model("llama", stages, adapters=AdapterSettings(rank=4)) for stages in (1, 2))
    whole = stage_layout(one, 0).views(stage_weights(one, 0, 7, None))
    for stage in (0, 1):
        for name, values in stage_layout(two, stage).views(stage_weights(two, stage, 7, None)).items():
            assert np.array_equal(values, whole[name])
            bound = values.shape[1] ** -0.5
            assert (abs(values).max() <= bound and values.std() > bound / 3) if ".lora_A." in name else not values.any()


def test_adapters_are_refused_by_the_names_a_layer_has() -> None:
    with pytest.raises(SettingsError, match=r"no linear module q_prj; it has down_proj, gate_proj, .*q_proj"):
        stage_layout(tiny_model("llama", 1, adapters=AdapterSettings(rank=4, modules=("q_prj", "v_proj"))), 0)
    with pytest.raises(SettingsError, match=r"no linear module at all"):
        stage_layout(tiny_model("gpt2", 1, adapters=AdapterSettings(rank=4)), 0)


def test_weights_without_their_base_are_an_error() -> None:
    stage = StageModel(tiny_model("llama", 1, adapters=AdapterSettings(rank=4)), 0)
    with pytest.raises(LocalError, match="frozen base, which is not here"):
        stage.weights(np.zeros(stage.layout.num_values, dtype=np.float32))
