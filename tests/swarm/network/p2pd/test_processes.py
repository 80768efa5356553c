"""Daemons are killed, and what remains of them is looked for."""

import asyncio
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from swarm.core.errors import LocalError
from swarm.identity.key import Identity
from swarm.network.p2pd import processes
from swarm.network.p2pd.p2p import P2PSettings, P2PTransport
from swarm.network.p2pd.processes import P2PDaemon, runtime_root, sweep
from tests.ports import is_free, own_port

pytestmark = pytest.mark.processes

ARGUMENTS = ["-hostAddrs=/ip4/127.0.0.1/tcp/0", "-b=0"]

DAEMON = """
import asyncio, sys
from swarm.identity.key import Identity
from swarm.network.p2pd.processes import P2PDaemon

async def main():
    arguments = ["-hostAddrs=/ip4/127.0.0.1/tcp/" + sys.argv[1], "-b=0"]
    daemon = await P2PDaemon.start(
        arguments, key_file_bytes=Identity.generate().to_key_file_bytes(), timeout_s=60
    )
    print(daemon.folder, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "not within the deadline"
        time.sleep(0.005)


def is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def started_p2pds() -> list[psutil.Process]:
    """By this process, or by what it has started."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name() == "p2pd":
                found.append(child)
    return found


@contextmanager
def running_daemon(root: Path, port: int) -> Iterator[tuple[subprocess.Popen[str], Path, list[psutil.Process]]]:
    """A process of its own that holds a p2pd: (process, runtime folder, guard and p2pd)."""
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(root)}
    process = subprocess.Popen(
        [sys.executable, "-c", DAEMON, str(port)], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 90)[0], "the daemon did not start"
        folder = Path(process.stdout.readline().strip())
        children = psutil.Process(process.pid).children(recursive=True)
        yield process, folder, children
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty runtime root of this test's own; pytest's folders have paths too long for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        assert runtime_root() == Path(folder) / "homeswarm"
        yield Path(folder)


def test_kill_9_of_the_daemon_leaves_no_process_socket_or_port(root: Path) -> None:
    port = own_port()
    with running_daemon(root, port) as (process, folder, children):
        assert sorted(child.name() for child in children)[0] == "p2pd"
        assert len(children) == 2
        assert (folder / "p2pd.sock").is_socket()
        assert not (folder / "identity.key").exists()
        assert not is_free(port)
        process.send_signal(signal.SIGKILL)
        until(lambda: all(is_gone(child) for child in children))
        until(lambda: not folder.exists())
        until(lambda: is_free(port))
        assert os.listdir(root / "homeswarm") == []


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal exists on Linux only")
def test_kill_9_of_guard_and_daemon_leaves_no_process_and_the_next_start_sweeps(root: Path) -> None:
    with running_daemon(root, 0) as (process, folder, children):
        (p2pd,) = [child for child in children if child.name() == "p2pd"]
        (guard,) = [child for child in children if child.name() != "p2pd"]
        guard.suspend()  # so that it cannot sweep when the daemon dies
        process.kill()
        guard.kill()
        until(lambda: is_gone(p2pd))
        process.wait()
        assert folder.exists()
        assert sweep(root / "homeswarm") == 1
        assert not folder.exists()


def test_sweep_leaves_the_folders_of_the_living_alone(root: Path) -> None:
    with running_daemon(root, 0) as (_, folder, children):
        stale = folder.parent / "p-00000000"
        stale.mkdir()
        unknown = folder.parent / "somebody-elses"
        unknown.mkdir()
        assert sweep(folder.parent) == 1
        assert folder.exists()
        assert unknown.exists()
        assert not stale.exists()
        assert not any(is_gone(child) for child in children)


def test_stop_leaves_nothing_behind_within_two_seconds(root: Path) -> None:
    """Where the processor is not others' the while: in one of three tries."""

    async def main() -> float:
        before = set(psutil.Process().children(recursive=True))  # other tests may have processes of their own
        daemon = await P2PDaemon.start(ARGUMENTS, key_file_bytes=Identity.generate().to_key_file_bytes(), timeout_s=60)
        children = set(psutil.Process().children(recursive=True)) - before
        assert len(children) == 2, "p2pd and its guard"
        assert not daemon.ended.is_set()
        start = time.monotonic()
        await daemon.stop()
        waited = time.monotonic() - start
        assert daemon.ended.is_set()
        until(lambda: all(is_gone(child) for child in children))
        assert os.listdir(root / "homeswarm") == []
        return waited

    assert any(asyncio.run(main()) < 2.0 for _ in range(3))


def test_death_of_p2pd_is_told_and_leaves_nothing_behind(root: Path) -> None:
    async def main() -> None:
        transport = await P2PTransport.create(Identity.generate(), P2PSettings(listen=("/ip4/127.0.0.1/tcp/0",)))
        folder = transport.daemon.folder
        (p2pd,) = started_p2pds()
        p2pd.kill()
        async with asyncio.timeout(10):
            await transport.ended.wait()
            while folder.exists():  # noqa: ASYNC110 - the guard is another process
                await asyncio.sleep(0.005)
        await transport.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("arguments", "key", "said"),
    [
        (["-hostAddrs=/ip4/203.0.113.77/tcp/1"], None, "203.0.113.77|listen"),
        ([], b"not a key", "."),
    ],
)
def test_start_that_fails_gives_p2pds_reason_and_leaves_nothing(
    root: Path, arguments: list[str], key: bytes | None, said: str
) -> None:
    key_file_bytes = key or Identity.generate().to_key_file_bytes()
    with pytest.raises(LocalError, match=f"p2pd did not start: .*({said})"):
        asyncio.run(P2PDaemon.start(arguments, key_file_bytes=key_file_bytes, timeout_s=60))
    assert os.listdir(root / "homeswarm") == []
    assert started_p2pds() == []


def test_port_that_is_taken_is_a_local_error(root: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        settings = P2PSettings(listen=(f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}",))
        with pytest.raises(LocalError, match="p2pd did not start"):
            asyncio.run(P2PTransport.create(Identity.generate(), settings))


def test_cancelled_start_leaves_nothing(root: Path) -> None:
    async def main() -> None:
        task = asyncio.create_task(
            P2PDaemon.start(ARGUMENTS, key_file_bytes=Identity.generate().to_key_file_bytes(), timeout_s=60)
        )
        while not list(root.glob("homeswarm/p-*/identity.key")):  # noqa: ASYNC110, ASYNC240 - caught in the act
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert os.listdir(root / "homeswarm") == []


def test_runtime_root_open_to_others_is_refused(root: Path) -> None:
    (root / "homeswarm").mkdir(mode=0o755)
    with pytest.raises(LocalError, match="0700"):
        asyncio.run(P2PDaemon.start(ARGUMENTS, key_file_bytes=b"", timeout_s=1))


def test_runtime_root_is_short_enough_for_sockets_whatever_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/" + "x" * 200)
    monkeypatch.setattr(processes.tempfile, "tempdir", "/var/" + "y" * 200)
    assert len(str(runtime_root())) < 60
