"""A small parent process that keeps p2pd from outliving its daemon: it ends it and sweeps up.

Run as a script, `p2pd_guard.py RUNTIME_FOLDER DAEMON_PID P2PD ARGUMENT...`, standard library only. Its standard
input is a pipe whose other end the daemon holds: it closes when the daemon dies, however it dies. Then p2pd is
killed, the runtime folder with its sockets is removed and the guard exits. A daemon that ends in order says so first;
of one that died, whatever other runtime folders it held are removed too.
"""

import contextlib
import ctypes
import fcntl
import os
import select
import shutil
import signal
import sys
import time

STOP = b"stop"
"""What a daemon says that ends in order."""
SWEEP_AFTER_S = (0.0, 0.5, 2.0)
CHECK_PARENT_EVERY_S = 1.0
"""A forked child of the daemon may keep the pipe open after the daemon's death; its parent's id tells."""

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Exit status: p2pd's own, or 0 when the daemon went first."""
    runtime_folder, daemon_pid, *command = sys.argv[1:]
    _give_way()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _leave)
    # p2pd alone holds the writing end, so that it closes when p2pd dies.
    alive_read, alive_write = os.pipe()
    child = os.fork()
    if child == 0:
        _become(command, alive_write)
    os.close(alive_write)
    # Our standard output is p2pd's: were it open here too, the daemon would miss p2pd's last word.
    silence = os.open(os.devnull, os.O_RDWR)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    p2pd_died = daemon_died = False
    try:
        while not p2pd_died:
            ready, _, _ = select.select([0, alive_read], [], [], CHECK_PARENT_EVERY_S)
            p2pd_died = alive_read in ready
            if 0 in ready or os.getppid() != int(daemon_pid):
                daemon_died = 0 not in ready or os.read(0, len(STOP)) != STOP
                break
    finally:
        if not p2pd_died:
            os.kill(child, signal.SIGKILL)  # it holds nothing worth a goodbye: connections are closed by the kernel
        _, status = os.waitpid(child, 0)
        shutil.rmtree(runtime_folder, ignore_errors=True)
        if p2pd_died and not daemon_died:  # of the daemon's end, perhaps: its log has no reader any more
            ready, _, _ = select.select([0], [], [], CHECK_PARENT_EVERY_S)
            daemon_died = os.read(0, len(STOP)) != STOP if ready else os.getppid() != int(daemon_pid)
        if daemon_died:
            _sweep(os.path.dirname(runtime_folder), int(daemon_pid))
    return os.waitstatus_to_exitcode(status) & 0xFF if p2pd_died else 0


def _give_way() -> None:
    """This session, which the daemon made for p2pd, is as nice as the daemon (Linux; see `peer.machine.priority`)."""
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    if nice > 0:
        with contextlib.suppress(OSError), open("/proc/self/autogroup", "w", encoding="ascii") as file:
            file.write(str(nice))


def _sweep(root: str, daemon_pid: int) -> None:
    """Remove the runtime folders that no living process holds (see `swarm.network.p2pd.processes`).

    More than once: the last threads of a daemon that was killed may hold its locks for a moment on a busy machine.
    """
    for pause_s in SWEEP_AFTER_S:
        give_up_at = time.monotonic() + CHECK_PARENT_EVERY_S
        while os.getppid() == daemon_pid and time.monotonic() < give_up_at:  # until then its locks are held
            time.sleep(0.01)
        time.sleep(pause_s)
        with contextlib.suppress(OSError):
            _sweep_once(root)


def _sweep_once(root: str) -> None:
    whole = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(whole, fcntl.LOCK_EX)
        for name in os.listdir(root):
            if not name.startswith("p-"):
                continue
            with contextlib.suppress(OSError):
                lock = os.open(os.path.join(root, name), os.O_RDONLY | os.O_NOFOLLOW)
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(os.path.join(root, name), ignore_errors=True)
                os.close(lock)
    finally:
        os.close(whole)


def _become(command: list[str], alive_write: int) -> None:
    """In the child: turn into p2pd, to be killed by the kernel (Linux) should the guard itself be killed."""
    guard_pid = os.getppid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != guard_pid:  # the guard died before the request was in force
            os._exit(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.set_inheritable(alive_write, True)
    try:
        os.execv(command[0], command)  # noqa: S606 - our own arguments, no shell
    except OSError as error:
        os.write(2, f"cannot start {command[0]}: {error.strerror}\n".encode())
        os._exit(127)


def _leave(_number: int, _frame: object) -> None:
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(main())
