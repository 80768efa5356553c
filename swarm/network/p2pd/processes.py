"""p2pd's process, started so that nothing of it remains when this one is gone, `kill -9` included.

Each p2pd gets a runtime folder (control sockets, key file) of its own and a guard process (`p2pd_guard`) that kills it
and removes the folder when we die. A folder is locked by its process for as long as that lives; folders
whose lock is free are leftovers (of a machine that lost power, say) and are swept at the next start.
"""

import asyncio
import collections
import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from swarm.core.errors import LocalError
from swarm.network.p2pd import guard as p2pd_guard

logger = logging.getLogger(__name__)

_MAX_SOCKET_PATH_BYTES = 100
"""A Unix socket's path holds 104 bytes on macOS, 108 on Linux."""
_CONFIG = '{"Relay": {"Enabled": false}}'
"""Without it p2pd relays for strangers whatever its flags say: 128 KiB and two minutes a connection."""
_LONGEST_SOCKET_NAME = "/p-00000000/p2pclient-xxxxxxxxxxx.sock"


class RuntimeFolder:
    """A folder for this process's sockets, its user's alone. It goes with `close`, or when this process dies.

    p2pd's guard sees to the latter; without one, the next start of any daemon.
    """

    def __init__(self) -> None:
        self.path, self._lock = _make_runtime_folder()

    def close(self) -> None:
        """Remove it with all in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


class P2PDaemon:
    """A running p2pd, its guard and its runtime folder."""

    def __init__(self, folder: Path, lock: int, process: asyncio.subprocess.Process, peer_id_line: str) -> None:
        self.folder = folder
        self.control_path = folder / "p2pd.sock"
        self.peer_id = peer_id_line
        self.ended = asyncio.Event()
        """Set when p2pd has ended, whatever the reason."""
        self.last_lines: collections.deque[str] = collections.deque(maxlen=20)
        self._lock = lock
        self._process = process
        self._reader = asyncio.create_task(self._read_output(), name="p2pd output")

    @classmethod
    async def start(
        cls, arguments: list[str], *, key_file_bytes: bytes, timeout_s: float, threads: int = 1
    ) -> "P2PDaemon":
        """Start p2pd with our key and `arguments`, on at most `threads` cores; returns when it listens.

        Raises LocalError with p2pd's own words when it does not.
        """
        folder, lock = _make_runtime_folder()
        process = None
        try:
            key_path = folder / "identity.key"
            key_path.write_bytes(key_file_bytes)  # private: the folder's mode is 0700
            config_path = folder / "p2pd.json"
            config_path.write_text(_CONFIG)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", p2pd_guard.__file__, str(folder), str(os.getpid())),
                *(str(_p2pd_path()), f"-f={config_path}", f"-listen=/unix{folder / 'p2pd.sock'}", f"-id={key_path}"),
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                # A session of its own: Ctrl-C in a terminal reaches us, who drain first, and not p2pd.
                start_new_session=True,
                env={**os.environ, "GOLOG_LOG_LEVEL": "error", "GOMAXPROCS": str(threads)},
            )
            async with asyncio.timeout(timeout_s):
                peer_id = await _read_peer_id(process)
            key_path.unlink()
            return cls(folder, lock, process, peer_id)
        except BaseException as error:
            if process is not None:
                await _end(process)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
            if isinstance(error, TimeoutError):
                raise LocalError(f"p2pd did not start within {timeout_s:.0f} s; is this machine overloaded?") from error
            raise

    async def stop(self) -> None:
        """Kill p2pd; returns when it, the guard and the folder are gone."""
        await _end(self._process)
        await self._reader
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    async def _read_output(self) -> None:
        assert self._process.stdout is not None
        try:
            async for line in _lines(self._process.stdout):
                self.last_lines.append(line)
                logger.debug("p2pd: %s", line)
        finally:
            self.ended.set()


async def _read_peer_id(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    said: collections.deque[str] = collections.deque(maxlen=5)
    async for line in _lines(process.stdout):
        said.append(line)
        if line.startswith("Peer ID: "):
            return line.removeprefix("Peer ID: ").strip()
    raise LocalError(f"p2pd did not start: {' / '.join(said) or 'it said nothing'}")


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    while True:
        try:
            line = await stream.readline()
        except ValueError:  # longer than the stream's limit, which readline has dropped
            continue
        if not line:
            return
        yield line.decode(errors="replace").rstrip()


async def _end(process: asyncio.subprocess.Process) -> None:
    """Tell the guard to stop, close its standard input, as our death would, and wait for it to have swept up."""
    assert process.stdin is not None
    if not process.stdin.is_closing():
        process.stdin.write(p2pd_guard.STOP)
    process.stdin.close()
    try:
        async with asyncio.timeout(1.5):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()  # the kernel then kills p2pd
        await process.wait()


def _p2pd_path() -> Path:
    import hivemind.hivemind_cli

    return Path(hivemind.hivemind_cli.__path__[0]) / "p2pd"


def runtime_root() -> Path:
    """Where this user's runtime folders are: `$XDG_RUNTIME_DIR/homeswarm`, or `homeswarm-<uid>` in a temporary one."""
    candidates = []
    if os.environ.get("XDG_RUNTIME_DIR"):
        candidates.append(Path(os.environ["XDG_RUNTIME_DIR"]) / "homeswarm")
    candidates.append(Path(tempfile.gettempdir()) / f"homeswarm-{os.getuid()}")
    for root in candidates:
        if len(os.fsencode(root)) + len(_LONGEST_SOCKET_NAME) <= _MAX_SOCKET_PATH_BYTES:
            return root
    return Path(f"/tmp/homeswarm-{os.getuid()}")  # noqa: S108 - ownership and mode are checked before use


def sweep(root: Path) -> int:
    """Remove the runtime folders of dead processes below `root`; returns how many. Kills nothing."""
    with _locked(root):
        return _sweep_locked(root)


def _make_runtime_folder() -> tuple[Path, int]:
    root = runtime_root()
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = root.lstat()
    if root.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise LocalError(f"{root} is not a folder of this user alone (mode 0700); remove it or set XDG_RUNTIME_DIR")
    with _locked(root):
        _sweep_locked(root)
        folder = root / f"p-{secrets.token_hex(4)}"
        folder.mkdir(mode=0o700)
        lock = os.open(folder, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return folder, lock


def _sweep_locked(root: Path) -> int:
    num_swept = 0
    for folder in root.glob("p-*"):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # its process lives
        else:
            shutil.rmtree(folder, ignore_errors=True)
            num_swept += 1
        finally:
            os.close(lock)
    return num_swept


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    """One process at a time makes or sweeps folders, so that none is swept between its making and its locking."""
    lock = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
