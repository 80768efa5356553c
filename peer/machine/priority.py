"""How a daemon gives way to its owner's programs: by its niceness, and by that of its session.

Linux, where a desktop has it so (`sched_autogroup`), shares cores among sessions first and then among the programs of
each. A daemon's niceness then says nothing to programs of other sessions: the session's own, in `/proc/self/autogroup`,
does. A session is a terminal's as a rule, and the daemon's alone if it was started with `--detach` or by systemd.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

AUTOGROUP = Path("/proc/self/autogroup")


@contextlib.contextmanager
def giving_way(nice: int) -> Iterator[None]:
    """This process, and what it starts, run at least at this niceness from now on, and its session until the end; to be
    called before any thread is."""
    if not hasattr(os, "getpriority"):
        yield
        return
    if os.getpriority(os.PRIO_PROCESS, 0) < nice:
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    with session_giving_way(nice):
        yield


@contextlib.contextmanager
def session_giving_way(nice: int) -> Iterator[None]:
    """This process's session runs at least at this niceness until the end, if it holds nothing else."""
    before = session_nice()
    taken = before is not None and before < nice and _is_sessions_only_work()
    if taken:
        _set_session_nice(nice)
    try:
        yield
    finally:
        if taken and before is not None:
            _set_session_nice(before)


def session_nice() -> int | None:
    """Niceness of this process's session; None where sessions have none."""
    try:
        return int(AUTOGROUP.read_text().rpartition(" nice ")[2])
    except (OSError, ValueError):
        return None


def _set_session_nice(nice: int) -> None:
    with contextlib.suppress(OSError):  # anyone may, but not twice in 100 ms on a machine
        AUTOGROUP.write_text(str(nice))


def _is_sessions_only_work() -> bool:
    """Whether the session holds this process, what it started and what waits for it, and nothing else."""
    me = psutil.Process()
    ours = {me.pid, *(process.pid for process in (*me.parents(), *me.children(recursive=True)))}
    session = os.getsid(0)
    for pid in psutil.pids():
        if pid not in ours:
            with contextlib.suppress(OSError):  # gone meanwhile
                if os.getsid(pid) == session:
                    return False
    return True
