"""Conversations as a tokenizer's chat template has them, and which of their tokens are answers.

The template is text from a checkpoint: transformers renders it, in its sandbox. Where it marks answers itself
(`{% generation %}`), they are what it marks. Else an answer begins where the conversation up to it, with the prompt for
an answer, ends; and ends where the conversation up to and with it ends, without the white space that follows, or, where
the template has it otherwise in the middle of a conversation, behind its content and the special token that comes next.
"""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from swarm.core.errors import SettingsError
from swarm.data.documents.marks import Ids, Marks, Values
from swarm.data.documents.rows import Message

NOT_RENDERED = "conversations that the chat template refuses"
NOT_FOUND = "conversations whose answers cannot be found in what the chat template makes of them"
NO_ANSWER = "conversations without an answer"


class ChatEncoder:
    """Conversations as marked tokens, by the chat template of a tokenizer's folder."""

    def __init__(self, path: Path, marks: Marks) -> None:
        """Raises SettingsError if there is no tokenizer there, or none with a template."""
        from swarm.local.transformers_library import transformers

        folder = path if path.is_dir() else path.parent
        if not (folder / "tokenizer.json").is_file():
            raise SettingsError(
                f'data.tokenizer = "{path}" has no chat template, which conversations (data.kind = "chat") need; give '
                "the folder of an instruction model's tokenizer"
            )
        try:
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise SettingsError(f'data.tokenizer = "{path}" cannot be read ({error}); save it again') from error
        template = self._tokenizer.chat_template
        if not isinstance(template, str):
            raise SettingsError(
                f'data.tokenizer = "{path}" has no chat template, or several; write one to chat_template.jinja there'
            )
        self.template = template
        self._marks_answers = re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None
        special = sorted({str(token) for token in self._tokenizer.all_special_tokens}, key=len, reverse=True)
        self._closing = re.compile(r"\s*(?:" + "|".join(map(re.escape, special)) + ")") if special else None
        self._marks = marks
        self._tokenizing = Lock()
        """transformers' tokenizers hold settings of the call that is under way."""

    def encode_documents(self, texts: Sequence[str]) -> list[Values | str]:
        """Of conversations as `conversation_of` has them; a text is why one is left out."""
        with self._tokenizing:
            return [self._encoded(**json.loads(text)) for text in texts]

    def _encoded(self, messages: list[Message], tools: list[Any] | None = None) -> Values | str:
        from jinja2.exceptions import TemplateError

        def rendered(given: list[Message], **options: Any) -> str:
            found: str = self._tokenizer.apply_chat_template(given, tools=tools, tokenize=False, **options)
            return found

        try:
            if self._marks.answers and self._marks_answers:
                found = self._tokenizer.apply_chat_template(
                    messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
                )
                ids, learnt = np.array(found["input_ids"]), np.array(found["assistant_masks"], dtype=bool)
            else:
                ids, learnt = self._by_spans(messages, rendered)
        except (TemplateError, TypeError, KeyError, ValueError, AttributeError):
            return NOT_RENDERED
        except _NotFound:
            return NOT_FOUND
        return self._marks.values(ids, learnt) if learnt.any() else NO_ANSWER

    def _by_spans(self, messages: list[Message], rendered: Callable[..., str]) -> tuple[Ids, Any]:
        """Ids, and which of them reach into an answer."""
        whole = rendered(messages)
        found = self._tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        ids, places = np.array(found["input_ids"]), np.array(found["offset_mapping"]).reshape(-1, 2)
        if not self._marks.answers:
            return ids, np.ones(len(ids), dtype=bool)
        learnt = np.zeros(len(ids), dtype=bool)
        for at, message in enumerate(messages):
            if message["role"] == "assistant":
                start, stop = self._span(messages, at, whole, rendered)
                learnt |= (places[:, 0] < stop) & (places[:, 1] > start)
        return ids, learnt

    def _span(self, messages: list[Message], at: int, whole: str, rendered: Callable[..., str]) -> tuple[int, int]:
        """Characters of an answer, with what closes it. Raises _NotFound."""
        before = rendered(messages[:at], add_generation_prompt=True) if at else ""
        if not whole.startswith(before):
            raise _NotFound
        start, upto = len(before), rendered(messages[: at + 1])
        if whole.startswith(upto) and len(upto) > start:
            return start, start + len(whole[start : len(upto)].rstrip())
        content = messages[at]["content"].strip()
        stop = whole.find(content, start) + len(content)
        if not content or whole[start : stop - len(content)].strip() or stop < start + len(content):
            raise _NotFound
        closing = self._closing.match(whole, stop) if self._closing is not None else None
        return start, closing.end() if closing is not None else stop


class _NotFound(Exception):
    """An answer is not in what the template made of its conversation."""
