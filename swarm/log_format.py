"""The lines of a log: what peers have said is in them, and a terminal acts on what is no letter."""

import contextlib
import logging
import re
from collections.abc import Iterator
from contextvars import ContextVar
from types import TracebackType
from typing import TypeAlias

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s%(speaker)s: %(message)s"

_speaker: ContextVar[str] = ContextVar("speaker", default="")
"""Of several that log in this process, who does; empty where there is one."""

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""But for tabs and ends of lines."""

_ExcInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


class LogFormatter(logging.Formatter):
    """One line each, but for tracebacks; nothing in them but letters and signs."""

    def __init__(self) -> None:
        super().__init__(LOG_FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        speaker = _speaker.get()
        record.speaker = f" ({speaker})" if speaker else ""
        return printable(super().formatMessage(record))

    def formatException(self, ei: _ExcInfo) -> str:
        return "\n".join(map(printable, super().formatException(ei).split("\n")))


@contextlib.contextmanager
def spoken_by(speaker: str) -> Iterator[None]:
    """What is logged within, and by tasks and work threads begun within, names the speaker."""
    token = _speaker.set(speaker)
    try:
        yield
    finally:
        _speaker.reset(token)


def printable(text: str) -> str:
    """The text with whatever is no letter or sign written as Python writes it, ends of lines too."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def harmless(text: str) -> str:
    """The text, of any number of lines and in any script, with what a terminal acts on written as Python writes it."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def log_to_terminal(*, verbose: bool) -> None:
    """What goes wrong, or all that happens."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter())
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, handlers=[handler])
