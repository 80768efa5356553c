"""A lock that ends with its process, and says which process that is and where its owner speaks to it."""

import contextlib
import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path

_MAX_BYTES = 1 << 12


@dataclass(frozen=True)
class Holder:
    """Who holds a lock; None where the disk did not take it, or it is not said yet."""

    pid: int | None = None
    socket: Path | None = None


class HeldElsewhereError(Exception):
    """Another process holds the lock."""

    def __init__(self, holder: Holder) -> None:
        super().__init__(f"process {holder.pid or 'unknown'} holds it")
        self.holder = holder


class ProcessLock:
    """A file that this process holds, and no other until it ends, however it ends."""

    def __init__(self, path: Path) -> None:
        """Raises HeldElsewhereError, or OSError when the file cannot be made."""
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _read(self._descriptor)
            os.close(self._descriptor)
            raise HeldElsewhereError(holder) from None
        with contextlib.suppress(OSError):  # for people to read: a full disk is no reason not to begin
            self._write({"pid": os.getpid()})

    def listens_at(self, socket: Path) -> None:
        """Commands find the process there. Raises OSError where the disk does not take it."""
        self._write({"pid": os.getpid(), "socket": str(socket)})

    def close(self) -> None:
        os.close(self._descriptor)

    def _write(self, value: dict[str, object]) -> None:
        """In one piece over what was there: whoever looks meanwhile finds what it says now, or said before."""
        text = json.dumps(value).encode()
        os.pwrite(self._descriptor, text, 0)
        os.ftruncate(self._descriptor, len(text))


def holder_of(path: Path) -> Holder | None:
    """Who holds the lock; None if nobody does, as far as this user can see."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read(descriptor)
    finally:
        os.close(descriptor)
    return None


def _read(descriptor: int) -> Holder:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        said = json.loads(os.pread(descriptor, _MAX_BYTES, 0))
        return Holder(int(said["pid"]), Path(said["socket"]) if "socket" in said else None)
    return Holder()
