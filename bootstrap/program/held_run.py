"""A run's folder is one host's: a lock that ends with its process, by which its owner's commands find it."""

from pathlib import Path
from typing import Self

from swarm.core.errors import NotRunningError, SettingsError
from swarm.disk.process_lock import HeldElsewhereError, ProcessLock, holder_of

LOCK = "host.lock"


class HeldRun:
    """A run's folder that this process serves, and no other until it ends, however it ends."""

    def __init__(self, folder: Path) -> None:
        """Raises SettingsError when another host holds the folder, or it cannot be written."""
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = ProcessLock(folder / LOCK)
        except HeldElsewhereError as held:
            raise SettingsError(
                f"--dir {folder}: another `swarm host` (process {held.holder.pid or 'unknown'}) serves the run there; "
                "end it first, or give this one a folder of its own"
            ) from None
        except OSError as error:
            raise SettingsError(
                f"--dir {folder}: cannot be written ({error.strerror}); choose another folder"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def listens_at(self, socket: Path) -> None:
        """The owner's commands find the host there. Raises OSError where the disk does not take it."""
        self._lock.listens_at(socket)


def is_held(folder: Path) -> bool:
    """Whether a host serves the run in the folder."""
    return holder_of(folder / LOCK) is not None


def running_at(folder: Path) -> Path:
    """The socket of the host that serves the run in the folder. Raises NotRunningError if none can be asked."""
    holder = holder_of(folder / LOCK)
    if holder is None:
        raise NotRunningError(f"no host serves the run in {folder}: start it again with `swarm host`, then come back")
    if holder.socket is None:
        raise NotRunningError(f"the host of {folder} is only just starting, or has no room on its disk; try again")
    return holder.socket
