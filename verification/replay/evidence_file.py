"""A file of evidence, opened: mapped, for what it holds may be larger than memory."""

from pathlib import Path

from swarm.disk.mapped_file import mapped
from verification.audit.evidence import MAX_EVIDENCE_BYTES, Evidence


def evidence_in(path: Path) -> Evidence:
    """What the file holds, read as it is needed. Raises RemoteError("evidence") if it is not whole, or malformed;
    OSError where it cannot be read."""
    return Evidence.from_bytes(mapped(path), max_bytes=MAX_EVIDENCE_BYTES)
