"""Samples packed of documents give what transformers gives of the documents by themselves, padded."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from benchmarks.families.configs import CONFIGS, VOCAB_SIZE
from swarm.core.pipeline.compute_mode import ComputeMode
from swarm.core.pipeline.targets import DOCUMENT_BEGINS, IGNORED_TARGET
from swarm.model.families import FAMILIES
from tests.swarm.model.tiny_models import stages_of, tiny_model, whole_model
from verification.pipeline.headers import document_bounds

ROWS = ((17, 3, 20), (40,), (9, 25, 2), (1 + 12, 27))
"""Lengths of the documents in each sample of 40: longer and shorter than the window of 8; the third is padded."""
LENGTH = 40
UNROUTED = [name for name, config in CONFIGS.items() if not FAMILIES[config["model_type"]].routed]
"""The others' balance is of a sample, whatever it is packed of."""


def packed(seed: int) -> tuple[torch.Tensor, torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Samples, targets, and the documents with labels as transformers takes them: a third is not counted."""
    chance = torch.Generator().manual_seed(seed)
    tokens_BL = torch.zeros(len(ROWS), LENGTH, dtype=torch.int64)
    targets_BL = torch.full((len(ROWS), LENGTH), DOCUMENT_BEGINS)
    targets_BL[:, -1] = IGNORED_TARGET
    documents = []
    for row, lengths in enumerate(ROWS):
        at = 0
        for length in lengths:
            ids = torch.randint(0, VOCAB_SIZE, (length,), generator=chance)
            labels = torch.where(torch.rand(length, generator=chance) < 0.3, IGNORED_TARGET, ids)
            labels[1] = ids[1]
            documents.append((ids, labels))
            tokens_BL[row, at : at + length] = ids
            targets_BL[row, at : at + length - 1] = labels[1:]
            at += length
    return tokens_BL, targets_BL, documents


@pytest.mark.parametrize("config", UNROUTED)
def test_packed_samples_equal_transformers_on_padded_documents(config: str) -> None:
    model = tiny_model(config, 3)
    whole = whole_model(model)
    tokens_BL, targets_BL, documents = packed(1)
    padded = [
        torch.nn.utils.rnn.pad_sequence(list(one), batch_first=True, padding_value=-1)
        for one in zip(*documents, strict=True)
    ]
    is_token = padded[0] >= 0
    ids, labels = padded[0].clamp(min=0), torch.where(is_token, padded[1], IGNORED_TARGET)
    expected = whole(input_ids=ids, attention_mask=is_token.long(), labels=labels, use_cache=False).loss
    expected.backward()
    mean_loss = expected.item()

    loss_sum, count, sums, stages = _staged(model, whole, tokens_BL, targets_BL)
    assert count == sum(int((labels[1:] >= 0).sum()) for _, labels in documents)
    assert loss_sum / count == pytest.approx(mean_loss, rel=1e-6)
    gradients: dict[str, torch.Tensor] = {}
    for stage, values in zip(stages, sums, strict=True):
        gradients |= stage.layout.views(values / count)
    if CONFIGS[config].get("tie_word_embeddings"):
        embedding, head = FAMILIES[CONFIGS[config]["model_type"]].embedding_name, gradients.pop("lm_head.weight")
        gradients[embedding] = gradients[embedding] + head
    for name, parameter in whole.named_parameters():
        error = (gradients[name] - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-5, f"{name}: {error}"


def _staged(model: Any, whole: Any, tokens_BL: torch.Tensor, targets_BL: torch.Tensor, **mode: Any) -> Any:
    bounds = document_bounds(targets_BL.numpy())
    built = stages_of(model, whole)
    stages = [stage.computing(ComputeMode(**mode) if mode else None) for stage, _ in built]
    versions = [stage.weights(flat) for stage, (_, flat) in zip(stages, built, strict=True)]
    hidden, saves = tokens_BL, []
    for stage, version in zip(stages[:-1], versions[:-1], strict=True):
        hidden, saved = stage.forward(version, hidden, keep=True, bounds=bounds)
        saves.append(saved)
    loss_sum, count, saved_loss = stages[-1].loss(versions[-1], hidden, targets_BL, keep=True, bounds=bounds)
    sums = [torch.zeros(stage.layout.num_values) for stage in stages]
    grad = stages[-1].loss_backward(saved_loss, sums[-1])
    for stage, saved, into in reversed(list(zip(stages, saves, sums, strict=False))):
        grad = stage.backward(saved, grad, into)
    return loss_sum, count, sums, stages


def test_a_microbatch_with_documents_computed_in_pieces_differs_by_rounding_alone() -> None:
    model = tiny_model("qwen3-window", 2)
    whole = whole_model(model)
    tokens_BL, targets_BL, _ = packed(2)
    at_once = _staged(model, whole, tokens_BL, targets_BL)
    pieces = _staged(model, whole, tokens_BL, targets_BL, samples_at_once=1, recompute=True)
    assert pieces[0] == pytest.approx(at_once[0], rel=1e-6)
    for one, other in zip(at_once[2], pieces[2], strict=True):
        assert float((one - other).norm() / one.norm()) < 1e-5


def test_documents_see_nothing_of_each_other() -> None:
    model = tiny_model("mistral", 1)
    ((stage, flat),) = stages_of(model, whole_model(model))
    version = stage.weights(flat)
    tokens_BL, targets_BL, _ = packed(3)
    bounds = document_bounds(targets_BL.numpy())
    logits = stage.logits(version, tokens_BL, bounds=bounds)
    for start, stop in pairwise((0, *bounds, tokens_BL.numel())):
        row = start // LENGTH
        if stop <= (row + 1) * LENGTH and stop - start > 1:
            alone = stage.logits(version, tokens_BL[row : row + 1, start % LENGTH : stop - row * LENGTH])
            within = logits[row, start % LENGTH : stop - row * LENGTH]
            assert torch.allclose(alone[0], within, atol=1e-5)
