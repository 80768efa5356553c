"""The commands that stand in README and docs."""

import re
from collections.abc import Iterator

from tests import ROOT

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
PROGRAMS = ("swarm", "python", "make", "pip", "pipx", ".venv/bin/swarm")


def commands_in(page: str) -> Iterator[str]:
    """Those in indented blocks, without what is said of them, and those in backticks."""
    for block in re.findall(r"(?:^ {4}\S.*\n?)+", page, re.MULTILINE):
        for line in block.splitlines():
            yield from _split(re.split(r" {2,}|\s+#", line.strip())[0])
    for span in re.findall(r"`([^`]+)`", page):
        yield from _split(" ".join(span.split()))


def _split(text: str) -> Iterator[str]:
    """`a; b` and `swarm pause | resume` are two; what is in brackets may be left out, and is tried."""
    first, *others = re.split(r"; | \| ", re.sub(r"[\[\]]", "", text))
    program = first.partition(" ")[0]
    if program in PROGRAMS and " " in first:
        yield first
        yield from (other if other.startswith(program) else f"{program} {other}" for other in others)


def is_mention(command: str) -> bool:
    """`swarm plan` or `swarm rollback FOLDER ...` in a sentence names a verb, and is no command line."""
    words = command.split()
    return words[0] == "swarm" and (len(words) == 2 or words[2] == "...")


ALL = sorted({command for page in PAGES for command in commands_in(page.read_text(encoding="utf-8"))})
COMMANDS = [command for command in ALL if not is_mention(command)]
