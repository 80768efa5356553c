"""A digest of a module's text, and of the text of all that it imports from this project."""

import ast
import hashlib
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGES = ("bootstrap", "kernels", "peer", "swarm", "verification")
"""What changes with a release of this program; other packages say their version themselves."""


@cache
def source_stamp(module: str) -> bytes:
    """32 bytes that change with any of the files. Imports within functions do not count."""
    found: dict[str, bytes] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        text = None if name in found else _text(name)
        if text is not None:
            found[name] = hashlib.sha256(text).digest()
            waiting += [imported for imported in _imported(text) if imported.partition(".")[0] in PACKAGES]
    return hashlib.sha256(b"".join(name.encode() + found[name] for name in sorted(found))).digest()


@cache
def _text(module: str) -> bytes | None:
    """None for what is no module in a file."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # a name within a module, or a program that runs as __main__
        return None
    return Path(spec.origin).read_bytes() if spec is not None and spec.has_location and spec.origin else None


def _imported(text: bytes) -> Iterator[str]:
    """Names that may be modules."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
