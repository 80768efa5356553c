"""Real `swarm` processes forked from one that has everything imported already: ready in no time.

Run as `python -m tests.zygote`. A line in, `{"id", "argv", "log", "die", "namespace", "clock", "slow_s", "pretends",
"cwd", "out"}`, starts a process that runs the `swarm` command line `argv` (or, after `-m`, another program) with its
output in `log`, in a network namespace if one is named, by a wall clock that is ahead by the seconds in the file
`clock` if one is named, so that a microbatch takes `slow_s` longer, and with two GPUs that are not there if it
`pretends`; in the folder `cwd` and with its standard output in `out` if those are named. Lines out are `{"id", "pid"}`
and `{"exited", "code"}`. It ends, and its children with it, when its input closes.
"""

import gc
import json
import os
import runpy
import select
import signal
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import hivemind
import torch
from transformers.models.llama import modeling_llama

import bootstrap.program.command
import bootstrap.program.host
import bootstrap.state.run_folder
import peer.program.command
import peer.program.daemon
import swarm.cli
import swarm.network.directory.dht
import swarm.network.p2pd.p2p
from benchmarks.homes.namespaces import enter
from swarm.model.stage import StageModel
from tests import ROOT

PRELOADED: tuple[ModuleType, ...] = (
    bootstrap.program.command,
    bootstrap.program.host,
    bootstrap.state.run_folder,
    hivemind,
    modeling_llama,
    peer.program.command,
    peer.program.daemon,
    swarm.cli,
    swarm.network.directory.dht,
    swarm.network.p2pd.p2p,
    torch,
)
"""All that a daemon imports, lazily or not."""


def main() -> None:
    assert all(PRELOADED)
    gc.collect()
    gc.freeze()  # nor does any of the processes copy all this by looking through it
    out = os.fdopen(os.dup(1), "w", buffering=1)
    out.write(json.dumps({"ready": os.getpid()}) + "\n")
    children: set[int] = set()
    pending = b""
    while True:
        readable, _, _ = select.select([0], [], [], 0.02)
        if readable:
            data = os.read(0, 1 << 16)
            if not data:
                break
            pending += data
            *lines, pending = pending.split(b"\n")
            for line in lines:
                order = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    out.close()
                    _child(order)
                children.add(pid)
                out.write(json.dumps({"id": order["id"], "pid": pid}) + "\n")
        while children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            children.discard(pid)
            out.write(json.dumps({"exited": pid, "code": os.waitstatus_to_exitcode(status)}) + "\n")
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _child(order: dict[str, Any]) -> None:
    code = 70
    try:
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if order["namespace"] is not None:  # before any thread or socket: p2pd and its guard inherit it
            enter(order["namespace"])
        if order["clock"] is not None:
            _go_by(order["clock"])
        if order["slow_s"]:
            _slow_down(order["slow_s"])
        if order["pretends"]:
            _pretend_gpus()
        if order["die"] is not None:
            from tests.peer.state.dying import arm

            arm(**order["die"])

        if order["out"] is not None:
            os.dup2(os.open(order["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), 1)
        if order["cwd"] is not None:
            os.chdir(order["cwd"])
        code = _program(order["argv"]) if order["argv"][0] == "-m" else int(swarm.cli.run(order["argv"]))
    except BaseException:  # noqa: BLE001 - the traceback belongs in the log, whatever it is
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _program(argv: list[str]) -> int:
    """Runs as `python` would run this; its exit code."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])  # it starts others
    sys.argv = argv[1:]
    try:
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


def _go_by(path: str) -> None:
    """All Python code takes the wall clock to be ahead by what the file says at the moment."""
    right, file = time.time, os.open(path, os.O_RDONLY)
    time.time = lambda: right() + float(os.pread(file, 32, 0) or 0)


def _slow_down(seconds: float) -> None:
    """Every microbatch takes so much longer, without any work of this machine's processors."""
    for name in ("forward", "loss"):
        quick = getattr(StageModel, name)

        def slow(*arguments: Any, quick: Callable[..., Any] = quick, **options: Any) -> Any:
            time.sleep(seconds)
            return quick(*arguments, **options)

        setattr(StageModel, name, slow)


def _pretend_gpus() -> None:
    """The driver tells of two GPUs of much memory, and torch has devices by their numbers."""
    import peer.machine.gpus
    import peer.owner.desk
    import peer.owner.room
    from peer.owner.limits import VolunteerSettings
    from tests.pretend_device import DEVICE_TYPE

    peer.machine.gpus.gpu_names = lambda: ["Pretended X", "Pretended Y"]
    peer.owner.room.limit_gpu = lambda gpu, limit_bytes: (1 << 34, 1 << 34)
    peer.owner.desk.gpu_used_bytes = lambda gpu: 0
    VolunteerSettings.devices = property(lambda volunteer: (f"{DEVICE_TYPE}:{volunteer.gpu + 1}",))


if __name__ == "__main__":
    main()
