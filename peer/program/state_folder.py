"""A daemon's folder on disk: its paths, and the lock by which one daemon holds it at a time."""

import json
import logging
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Self

from swarm.core.errors import LocalError, NotRunningError, SettingsError
from swarm.core.owner.limits import OwnerLimits
from swarm.disk.durable_lines import replace_lines
from swarm.disk.process_lock import HeldElsewhereError, ProcessLock, holder_of
from swarm.log_format import LogFormatter

log = logging.getLogger(__name__)

_OF_GPU = "gpu-"
MAX_LOG_BYTES = 4 << 20
"""Of each of the two log files."""


@dataclass(frozen=True)
class StateFolder:
    """Paths of a daemon's identity, downloads, limits, usage and log."""

    path: Path

    @property
    def identity(self) -> Path:
        return self.path / "identity.key"

    @property
    def limits_file(self) -> Path:
        return self.path / "limits.json"

    @property
    def usage(self) -> Path:
        return self.path / "usage.json"

    @property
    def log(self) -> Path:
        return self.path / "daemon.log"

    @property
    def relay_key(self) -> Path:
        return self.path / "relay.key"

    @property
    def lock(self) -> Path:
        return self.path / "daemon.lock"

    def of_gpu(self, number: int) -> "StateFolder":
        """Of a further peer of the daemon, which computes on that GPU: what is its own alone."""
        return StateFolder(self.path / f"{_OF_GPU}{number}")

    def of_all(self) -> "list[StateFolder]":
        """This one and those that further peers of the daemon have had."""
        return [self, *(StateFolder(path) for path in sorted(self.path.glob(f"{_OF_GPU}*")) if path.is_dir())]

    def make(self) -> None:
        """Raises SettingsError when it cannot be written."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(f"--dir {self.path}: cannot be made ({error.strerror}); name another") from error

    def load_limits(self) -> OwnerLimits:
        """What the owner has set. Raises SettingsError that names the file."""
        try:
            read = json.loads(self.limits_file.read_text())
            if not isinstance(read, dict) or not all(isinstance(value, str) for value in read.values()):
                raise ValueError("not an object of texts")
            return OwnerLimits().changed(read)
        except FileNotFoundError:
            return OwnerLimits()
        except (OSError, ValueError) as error:
            raise SettingsError(f"{self.limits_file}: {error}; mend it or delete it") from error

    def save_limits(self, limits: OwnerLimits) -> None:
        """They hold from the next start on, and now in the daemon that saved them."""
        self.make()
        replace_lines(self.limits_file, [json.dumps(limits.written(), indent=1)])

    def log_handler(self) -> logging.Handler:
        """Writes the log, of bounded size."""
        handler = _LogFile(self.log, maxBytes=MAX_LOG_BYTES, backupCount=1, delay=True)
        handler.setFormatter(LogFormatter())
        return handler

    def running_at(self) -> Path:
        """The socket of the daemon that holds this folder. Raises NotRunningError if none does."""
        holder = holder_of(self.lock)
        if holder is None:
            raise NotRunningError(
                f"no daemon is running in {self.path}: start one with `swarm join`, or name its folder with --dir"
            )
        if holder.socket is None:
            raise NotRunningError(f"the daemon of {self.path} is only just starting; try again")
        return holder.socket


class _LogFile(RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """A line that the disk does not take is lost: a traceback for each would bury what is said of it."""


class HeldFolder:
    """A state folder that this process holds, and no other until it ends, however it ends."""

    def __init__(self, folder: StateFolder) -> None:
        """Raises SettingsError when another daemon holds it, or it is not this user's."""
        self.folder = folder
        folder.make()
        try:
            self._lock = ProcessLock(folder.lock)
        except HeldElsewhereError as held:
            raise SettingsError(
                f"--dir {folder.path}: another daemon (process {held.holder.pid or 'unknown'}) runs there; see "
                f"`swarm status --dir {folder.path}`, end it with `swarm leave --dir {folder.path}`, or give this one "
                "a folder of its own"
            ) from None
        except OSError as error:
            raise SettingsError(
                f"--dir {folder.path}: its daemon.lock cannot be opened ({error.strerror}); name a folder of your own"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def listens_at(self, socket: Path) -> None:
        """Commands find the daemon there. Raises LocalError."""
        try:
            self._lock.listens_at(socket)
        except OSError as error:
            raise LocalError(f"{self.folder.lock}: cannot be written ({error.strerror})") from error
