"""What a peer has signed, remembered through a crash: it must never sign a second contribution."""

import hashlib
import json
from pathlib import Path

from swarm.disk.durable_lines import append_line, replace_lines


class SigningLog:
    """The last step signed in each lineage (see StageChain), on disk and synced before a signature leaves."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last: dict[bytes, int] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                entry = json.loads(line)
                lineage = bytes.fromhex(entry["lineage"])
                self._last[lineage] = max(int(entry["step"]), self._last.get(lineage, -1))
            except (ValueError, KeyError, TypeError):
                continue  # a torn last line: what it was to record was never signed
        self._before_start = dict(self._last)
        entries = ({"lineage": name.hex(), "step": step} for name, step in self._last.items())
        replace_lines(path, map(json.dumps, entries))

    def may_sign(self, lineage: bytes, step: int) -> bool:
        """Not within two steps of what an earlier process of this peer signed, and never twice."""
        earlier, last = self._before_start.get(lineage), self._last.get(lineage)
        return (earlier is None or step >= earlier + 2) and (last is None or step > last)

    def record(self, lineage: bytes, step: int, statement: bytes) -> None:
        """The statement is about to be signed: returns once that is on disk."""
        entry = {"lineage": lineage.hex(), "step": step, "sha256": hashlib.sha256(statement).hexdigest()}
        append_line(self._path, json.dumps(entry))
        self._last[lineage] = step
