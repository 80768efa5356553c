"""A text that is here anyway, and a byte-level tokenizer trained on it."""

import argparse
import json
import textwrap
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

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


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{% else %}{{ message.content }}<|im_end|>"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The same, and says itself what the answers are."""
THINKING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ message.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As Qwen 3 has it: the last answer is rendered otherwise, and what was thought before the others is not there."""


def small_chat_tokenizer(folder: Path, template: str = CHATML) -> Path:
    """`small_tokenizer` with a chat template and the special tokens of it."""
    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(small_tokenizer(folder / "plain") / "tokenizer.json"), eos_token="<|im_end|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder
