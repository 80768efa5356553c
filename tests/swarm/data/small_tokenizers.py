"""A text that is here anyway, and a byte-level tokenizer trained on it."""

import argparse
import json
import textwrap
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

TEXT = "\n\n".join(Path(str(module.__file__)).read_text() for module in (argparse, textwrap))


def small_tokenizer(folder: Path, vocab_size: int = 600) -> Path:
    """A folder as `save_pretrained` writes it: byte-level BPE with an end of document, id 0."""
    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return folder
