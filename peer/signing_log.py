"""This is where a peer remembers, through a crash, what it has signed: it must never sign a second contribution."""

import hashlib
import json
import os
from pathlib import Path


class SigningLog:
    """The last step signed for each stage of a run, on disk and synced before a signature leaves."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last: dict[str, int] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                entry = json.loads(line)
                self._last[str(entry["stage"])] = max(int(entry["step"]), self._last.get(str(entry["stage"]), -1))
            except (ValueError, KeyError, TypeError):
                continue  # a torn last line: what it was to record was never signed
        self._before_start = dict(self._last)
        self._rewrite()

    def may_sign(self, stage: int, step: int) -> bool:
        """Not within two steps of what an earlier process of this peer signed, and never twice."""
        key = str(stage)
        earlier, last = self._before_start.get(key), self._last.get(key)
        return (earlier is None or step >= earlier + 2) and (last is None or step > last)

    def record(self, stage: int, step: int, statement: bytes) -> None:
        """The statement is about to be signed: returns once that is on disk."""
        entry = {"stage": stage, "step": step, "sha256": hashlib.sha256(statement).hexdigest()}
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._last[str(stage)] = step

    def _rewrite(self) -> None:
        partial = self._path.with_suffix(".partial")
        lines = [json.dumps({"stage": int(stage), "step": step}) + "\n" for stage, step in self._last.items()]
        with partial.open("w") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, self._path)
