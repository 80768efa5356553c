"""What a researcher comes with: a Hugging Face folder, here with random weights and a tokenizer trained on a text."""

import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.families.exactness import whole_model
from swarm.model.families import canonical_config_json, whole_fields

SPECIAL = ("<s>", "</s>", "<pad>")
TEMPLATE = "{% for message in messages %}{{ message['content'] }}</s>{% endfor %}"


def some_text() -> str:
    """Source code that is everywhere."""
    import heapq

    return Path(heapq.__file__).read_text()


def write_given(
    folder: Path, config: dict[str, Any], *, dtype: str = "float32", seed: int = 0, shard_size: str = "200KB"
) -> None:
    """Write a model of the config, in `dtype`, with at least the tokenizer's vocabulary; both by transformers alone."""
    from transformers import GenerationConfig

    vocab_size = max(_write_tokenizer(folder), config.get("vocab_size", 0))
    special = dict(zip(("bos_token_id", "eos_token_id", "pad_token_id"), range(3), strict=True))
    config_json = canonical_config_json(whole_fields(config | special | {"vocab_size": vocab_size}))
    model = whole_model(config_json, seed).to(getattr(torch, dtype))
    model.config.dtype = dtype
    model.generation_config = GenerationConfig(**special, do_sample=True, temperature=0.6)
    model.save_pretrained(folder, max_shard_size=shard_size)


def _write_tokenizer(folder: Path) -> int:
    """Byte-level BPE; how many tokens it has."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=list(SPECIAL), initial_alphabet=letters, show_progress=False
    )
    tokenizer.train_from_iterator([some_text()], trainer)
    names = dict(zip(("bos_token", "eos_token", "pad_token"), SPECIAL, strict=True))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **names)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return int(tokenizer.get_vocab_size())


def special_of(folder: Path) -> dict[str, Any]:
    """What a folder's config, generation config and tokenizer say of special tokens, ties and type."""
    config = json.loads((folder / "config.json").read_text())
    named = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "dtype")
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    return {
        **{name: config.get(name) for name in named},
        "generation": {
            name: value
            for name, value in json.loads((folder / "generation_config.json").read_text()).items()
            if name != "transformers_version"
        },
        "tokenizer": {name: tokenizer.get(name) for name in ("bos_token", "eos_token", "pad_token")},
        "template": (folder / "chat_template.jinja").read_text(),
    }
