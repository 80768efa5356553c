"""What is learnt of a chat file is what transformers learns of the same conversations, padded, by the same template."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benchmarks.families.configs import CONFIGS
from benchmarks.families.exactness import flat_weights, whole_model
from swarm.core.ids import MicrobatchId
from swarm.core.settings import RunSettings
from swarm.data.batches import Batch, BatchReader, held_out_batches
from swarm.data.prepare import prepare_data
from swarm.manifest.file import Manifest, freeze
from swarm.model.stage import StageModel
from tests.swarm.data.small_tokenizers import MARKED, small_chat_tokenizer
from verification.pipeline.headers import document_bounds

LENGTH = 128


def _conversations() -> list[list[dict[str, str]]]:
    return [
        [
            {"role": role, "content": f"{number} {role} {turn} " * (1 + (number * 7 + turn) % 5)}
            for turn in range(number % 3 + 1)
            for role in ("user", "assistant")
        ]
        for number in range(40)
    ]


@pytest.mark.parametrize(
    "config", ["llama", *(pytest.param(family, marks=pytest.mark.soak) for family in ("gemma2", "qwen3", "mistral"))]
)
def test_a_lap_of_a_chat_file_is_transformers_loss_and_gradients_of_it(config: str, tmp_path: Path) -> None:
    folder = small_chat_tokenizer(tmp_path / "t", MARKED)
    lines = [json.dumps({"messages": one}) for one in _conversations()]
    (tmp_path / "chat.jsonl").write_text("\n".join(lines))
    (tmp_path / "config.json").write_text(
        json.dumps(CONFIGS[config] | {"vocab_size": 602, "tie_word_embeddings": False})
    )
    manifest = Manifest.write(
        tmp_path / "run.toml",
        model={"config": "config.json", "stages": 2},
        data={"text": ["chat.jsonl"], "kind": "chat", "tokenizer": "t", "sequence_length": LENGTH},
        batch={"microbatch_size": 1, "target_tokens": LENGTH},
    )
    prepared = prepare_data(manifest.data, tmp_path / "data")
    settings = freeze(manifest, prepared, ())
    reader = BatchReader(settings, prepared.train())
    batches = [reader.batch(MicrobatchId(number)) for number in range(reader.order.microbatches_per_lap)]
    batches += held_out_batches(settings, prepared.held_out(), limit_tokens=1 << 20)
    whole = whole_model(settings.model.config_json)
    expected, num_expected = _of_transformers(whole, folder)

    found, count, gradients = _staged(settings, whole, batches)
    assert count == num_expected
    assert found / count == pytest.approx(expected, rel=1e-5)
    for name, parameter in whole.named_parameters():
        error = (gradients[name] / count - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-5, f"{name}: {error}"


def _of_transformers(whole: Any, folder: Path) -> tuple[float, int]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
    tokenizer.pad_token = tokenizer.eos_token
    batch = tokenizer.apply_chat_template(
        _conversations(), return_dict=True, return_assistant_tokens_mask=True, padding=True, return_tensors="pt"
    )
    ids = batch["input_ids"][:, :LENGTH]
    labels = torch.where(torch.as_tensor(batch["assistant_masks"])[:, :LENGTH].bool(), ids, -100)
    loss = whole(input_ids=ids, attention_mask=batch["attention_mask"][:, :LENGTH], labels=labels).loss
    loss.backward()
    return loss.item(), int((labels[:, 1:] >= 0).sum())


def _staged(settings: RunSettings, whole: Any, batches: list[Batch]) -> tuple[float, int, dict[str, torch.Tensor]]:
    first, last = (StageModel(settings.model, stage) for stage in range(2))
    weights = [stage.weights(flat_weights(stage.layout, whole.state_dict())) for stage in (first, last)]
    sums = [torch.zeros(stage.layout.num_values) for stage in (first, last)]
    total, count = 0.0, 0
    for tokens_BL, targets_BL in batches:
        bounds = document_bounds(targets_BL)
        y, saved = first.forward(weights[0], torch.from_numpy(tokens_BL), keep=True, bounds=bounds)
        found, num, kept = last.loss(weights[1], y, torch.from_numpy(targets_BL), keep=True, bounds=bounds)
        assert saved is not None
        assert kept is not None
        grad = last.loss_backward(kept, sums[1])
        assert grad is not None
        first.backward(saved, grad, sums[0])
        total, count = total + found, count + num
    return total, count, first.layout.views(sums[0]) | last.layout.views(sums[1])
