"""The lines of a log: what peers have said is in them, and a terminal acts on what is no letter."""

import logging
import re
from types import TracebackType
from typing import TypeAlias

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""But for tabs and ends of lines."""

_ExcInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


class LogFormatter(logging.Formatter):
    """One line each, but for tracebacks; nothing in them but letters and signs."""

    def __init__(self) -> None:
        super().__init__(LOG_FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))

    def formatException(self, ei: _ExcInfo) -> str:
        return "\n".join(map(printable, super().formatException(ei).split("\n")))


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
