"""Conversations: read in the forms that people have them in, and learnt from where somebody answers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swarm.core.errors import SettingsError
from swarm.data.documents.chat import NO_ANSWER, NOT_FOUND, NOT_RENDERED, ChatEncoder
from swarm.data.documents.marks import Marks
from swarm.data.documents.rows import NoConversation, conversation_of
from tests.swarm.data.small_tokenizers import CHATML, MARKED, THINKING, small_chat_tokenizer, small_tokenizer

ASKED = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "How long is a piece of string?"},
    {"role": "assistant", "content": "Twice half of it."},
    {"role": "user", "content": "And a list?"},
    {"role": "assistant", "content": "As many as it has items."},
]
MARKS = Marks(documents=True, answers=True)


def _encoded(folder: Path, messages: list[dict[str, Any]], marks: Marks = MARKS) -> Any:
    (found,) = ChatEncoder(folder, marks).encode_documents([conversation_of({"messages": messages}, "messages")])
    return found


def _learnt(folder: Path, values: Any) -> str:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
    learnt = MARKS.learnt(values)
    runs = np.split(values >> MARKS.bits, np.flatnonzero(np.diff(learnt.astype(int))) + 1)
    first = int(not learnt[0])
    return "|".join(tokenizer.decode(run) for run in runs[first::2])


ANSWERS = "Twice half of it.<|im_end|>|As many as it has items.<|im_end|>"


@pytest.mark.parametrize(
    ("template", "answers"),
    [
        (CHATML, ANSWERS),
        (MARKED, ANSWERS),
        (THINKING, ANSWERS.replace("|As", "|<think>\n\n</think>\n\nAs")),
    ],
)
def test_answers_are_learnt_with_what_closes_them_and_nothing_else(tmp_path: Path, template: str, answers: str) -> None:
    folder = small_chat_tokenizer(tmp_path / "t", template)
    assert _learnt(folder, _encoded(folder, ASKED)) == answers


def test_the_rule_for_answers_and_a_template_that_marks_them_agree(tmp_path: Path) -> None:
    found = [
        _encoded(small_chat_tokenizer(tmp_path / name, kind), ASKED) for name, kind in (("a", CHATML), ("b", MARKED))
    ]
    np.testing.assert_array_equal(*found)


def test_all_of_a_conversation_is_learnt_where_that_is_wanted(tmp_path: Path) -> None:
    folder, marks = small_chat_tokenizer(tmp_path / "t"), Marks(documents=True, answers=False)
    values = _encoded(folder, ASKED, marks)
    assert marks.learnt(values).tolist() == [False] + [True] * (len(values) - 1)


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (CHATML, ASKED[:2], NO_ANSWER),
        ("{{ raise_exception('only pairs') }}", ASKED, NOT_RENDERED),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", ASKED, NOT_RENDERED),
        ("{% for message in messages %}{{ message.content | upper }}{{ loop.length }}{% endfor %}", ASKED, NOT_FOUND),
    ],
)
def test_what_cannot_be_learnt_from_is_left_out_with_its_reason(
    tmp_path: Path, template: str, messages: list[dict[str, Any]], reason: str
) -> None:
    assert _encoded(small_chat_tokenizer(tmp_path / "t", template), messages) == reason


def test_what_was_thought_and_is_not_rendered_is_not_taken_for_an_answer(tmp_path: Path) -> None:
    thought = [*ASKED[:2], {"role": "assistant", "content": "<think>hm</think>Twice half of it."}, *ASKED[3:]]
    assert _encoded(small_chat_tokenizer(tmp_path / "t", THINKING), thought) == NOT_FOUND


def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="has no chat template"):
        ChatEncoder(small_tokenizer(tmp_path / "t"), MARKS)


PAIR = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": PAIR},
        {"talk": PAIR, "messages": "no list"},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"prompt": "a", "completion": "b"},
        {"prompt": PAIR[:1], "completion": PAIR[1:]},
        {"instruction": "a", "input": "", "output": "b"},
    ],
)
def test_a_conversation_is_read_in_each_form_that_people_have(row: dict[str, Any]) -> None:
    assert json.loads(conversation_of(row, "talk")) == {"messages": PAIR}


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"messages": []},
        {"messages": ["a"]},
        {"messages": [{"content": "a"}]},
        {"messages": [{"role": "user", "content": [1]}]},
    ],
)
def test_what_is_no_conversation_is_said(row: dict[str, Any]) -> None:
    with pytest.raises(NoConversation):
        conversation_of(row, "messages")
