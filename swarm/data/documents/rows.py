"""Conversations as rows of jsonl and Parquet files have them."""

import json
from collections.abc import Iterable
from typing import Any

Message = dict[str, Any]

_ROLES = {"human": "user", "gpt": "assistant", "bard": "assistant", "model": "assistant", "chatgpt": "assistant"}
"""Of ShareGPT; all others are as they stand."""
_FIELDS = ("messages", "conversations", "conversation")
_OTHERS = ("prompt", "completion", "instruction", "input", "output", "tools")


class NoConversation(Exception):
    """What is wrong with a row."""


def conversation_of(row: dict[str, Any], field: str) -> str:
    """A row's conversation as canonical JSON: its messages, and its tools if it has any.

    The messages of `field`, or else of `messages`, `conversations` or `conversation`, each with `role` and `content`
    or with `from` and `value`; or made of `prompt` and `completion`, which are texts or such messages; or of
    `instruction`, `input` and `output`. Raises NoConversation.
    """
    known: dict[str, Any] = {"messages": [_message(one) for one in _given(row, field)]}
    if not known["messages"]:
        raise NoConversation("holds no message")
    if row.get("tools"):
        tools = row["tools"]
        known["tools"] = json.loads(tools) if isinstance(tools, str) else tools
    return json.dumps(known, ensure_ascii=False, sort_keys=True)


def _given(row: dict[str, Any], field: str) -> list[Any]:
    for name in (field, *_FIELDS):
        if isinstance(row.get(name), list):
            found: list[Any] = row[name]
            return found
    prompt, completion = row.get("prompt"), row.get("completion")
    if prompt is not None and completion is not None:
        return [*_messages("user", prompt), *_messages("assistant", completion)]
    if row.get("instruction") is not None and row.get("output") is not None:
        asked = "\n\n".join(str(row[name]) for name in ("instruction", "input") if row.get(name))
        return [{"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}]
    raise NoConversation(f'has no list of messages in "{field}"')


def _messages(role: str, given: Any) -> list[Any]:
    return given if isinstance(given, list) else [{"role": role, "content": given}]


def _message(given: Any) -> Message:
    if not isinstance(given, dict):
        raise NoConversation("holds a message that is no object")
    said = given if "role" in given else {"role": given.get("from"), "content": given.get("value")}
    role, content = said["role"], said.get("content")
    if not isinstance(role, str):
        raise NoConversation("holds a message without a role")
    if content is not None and not isinstance(content, str):
        raise NoConversation("holds a message whose content is no text")
    others = {name: value for name, value in said.items() if name not in ("role", "content") and value is not None}
    return {**others, "role": _ROLES.get(role, role), "content": content or ""}


def columns_of_conversations(names: Iterable[str], field: str) -> list[str]:
    """Of a table's columns, those that `conversation_of` looks at."""
    return [name for name in names if name in (field, *_FIELDS, *_OTHERS)]
