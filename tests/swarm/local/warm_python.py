"""Workers of a test session forked from one process that has imported what they all import: once, and not by each.

`WarmPython` starts that process. A worker is started by `python warm_python.py SOCKET -u -c CODE`, which xdist takes
for a Python: its standard files go to the fork, and it ends as that does.
"""

import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

STANDARD_FILES = 3
ROOT = Path(__file__).parents[3]  # not of `tests`: whoever asks imports nothing of ours


class WarmPython:
    """The process, from the side of whoever deals out the tests."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="hs-"))
        at = self._folder / "forks"
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(at))
            listening.listen()  # whoever asks before all is imported waits
            file = listening.fileno()
            begin = [sys.executable, "-m", "tests.swarm.local.warm_python", str(file)]
            self._process = subprocess.Popen(begin, cwd=ROOT, stdin=subprocess.PIPE, pass_fds=[file])
        self.command = f"{sys.executable} {__file__} {at}"
        """Takes a Python's place."""

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(120)
        shutil.rmtree(self._folder)


def serve(file: int) -> None:
    """Fork whenever somebody connects, until the input closes."""
    import gc

    import pytest

    import tests.zygote

    assert all((pytest, tests.zygote))
    gc.collect()
    gc.freeze()  # nor does any of the workers copy all this by looking through it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who asked hears of an end by its connection's
    with socket.socket(fileno=file) as listening:
        while True:
            readable, _, _ = select.select([0, listening], [], [])
            if 0 in readable:
                return
            asked, _ = listening.accept()
            code, files, _, _ = socket.recv_fds(asked, 1 << 16, STANDARD_FILES)
            if os.fork() == 0:
                listening.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _run(asked, code.decode(), files)
            for file in files:
                os.close(file)
            asked.close()


def _run(asked: socket.socket, code: str, files: list[int]) -> None:
    """As `python -c` would, with these standard files; tells its exit code."""
    status = 1
    try:
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        with tempfile.NamedTemporaryFile("w", suffix=".py") as program:
            program.write(code)
            program.flush()
            runpy.run_path(program.name, run_name="__main__")
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:  # noqa: BLE001 - said before the fork ends, whatever it is
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        asked.sendall(bytes([status & 0xFF]))
        os._exit(status)


def ask(path: str, code: str) -> int:
    """Have `code` run in a fork; its exit code."""
    with socket.socket(socket.AF_UNIX) as asked:
        asked.connect(path)
        socket.send_fds(asked, [code.encode()], [*range(STANDARD_FILES)])
        told = asked.recv(1)
    return told[0] if told else 1


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(ask(sys.argv[1], sys.argv[-1]))
    serve(int(sys.argv[1]))
