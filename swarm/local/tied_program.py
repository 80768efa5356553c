"""A program tied to the life of who starts it: the kernel kills it with that one, `kill -9` included.

Run as a script, `tied_program.py STARTER_PID PROGRAM ARGUMENT...`, standard library only; it becomes PROGRAM. The tie
is Linux's; elsewhere the starter ends its programs itself, unless it is killed by SIGKILL.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def tied(module: str, *arguments: str) -> list[str]:
    """`python -m MODULE ARGUMENTS`, to be started by the thread that calls this: it ends with that.

    Modules of the folder we stand in do not pass for ours there (-P).
    """
    tie = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
    return [*tie, sys.executable, "-P", "-m", module, *arguments]


def main() -> None:
    """Never returns."""
    starter_pid, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != int(starter_pid):  # the starter died before the request was in force
            sys.exit(1)
    os.execv(command[0], command)  # noqa: S606 - our own arguments, no shell


if __name__ == "__main__":
    main()
