"""This is where a program of the demo is tied to its life: the kernel kills it when the demo dies, `kill -9` included.

Run as a script, `child.py DEMO_PID PROGRAM ARGUMENT...`, standard library only; it becomes PROGRAM. The tie is
Linux's; elsewhere the demo ends its programs itself, unless it is killed by SIGKILL.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Never returns."""
    demo_pid, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != int(demo_pid):  # the demo died before the request was in force
            sys.exit(1)
    os.execv(command[0], command)  # noqa: S606 - our own arguments, no shell


if __name__ == "__main__":
    main()
