"""A swarm of real processes with real p2pd for tests: start, watch, kill, and look for what is left."""

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from benchmarks.homes.namespaces import Namespaces
from swarm.local.compute_pools import bound_pools
from tests import ROOT
from tests.ports import own_port

MANIFEST = """
[run]
name = "kill-test"
trust = "{trust}"
[model]
config = {{ model_type = "llama", vocab_size = 256, hidden_size = {hidden_size}, \
intermediate_size = {intermediate_size}, num_hidden_layers = 2, num_attention_heads = 2, num_key_value_heads = 2, \
max_position_embeddings = 64, tie_word_embeddings = false }}
stages = {stages}
[data]
text = ["text"]
sequence_length = 32
[batch]
microbatch_size = 4
target_tokens = {target_tokens}
[optimizer]
learning_rate = 3e-3
warmup_steps = 2
total_steps = {steps}
[averaging]
rule = "centered_clip"
delay = {delay}
sync_steps = 2
local_steps = {local_steps}
[checkpoint]
every_steps = {every}
snapshot_every = 4
[limits]
founders_per_stage = {founders}
min_replicas = {min_replicas}
max_in_flight = {in_flight}
rebalance_s = {rebalance_s}
[deadlines]
call_s = 5.0
hop_s = 20.0
step_s = 30.0
straggler_s = 1.0
lease_s = 4.0
drain_s = 5.0
"""


class Zygote:
    """Starts `swarm` processes; see tests/zygote.py. Their runtime folder is their own: it marks all that is theirs."""

    def __init__(self) -> None:
        self.runtime = Path(tempfile.mkdtemp(prefix="hs-"))
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(self.runtime)}
        bound_pools(1, environment)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.zygote"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._exits: dict[int, int] = {}
        self._pids: queue.Queue[int] = queue.Queue()
        self._changed = threading.Condition()
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._ready.wait(240), "the zygote did not start"

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            if "pid" in said:
                with self._changed:
                    self._exits.pop(said["pid"], None)  # of an earlier process that had the same number
                self._pids.put(said["pid"])
            elif "exited" in said:
                with self._changed:
                    self._exits[said["exited"]] = said["code"]
                    self._changed.notify_all()
            else:
                self._ready.set()

    def start(
        self,
        argv: list[str],
        log: Path,
        die: dict[str, Any] | None = None,
        *,
        namespace: str | None = None,
        clock: Path | None = None,
        slow_s: float = 0.0,
        pretends: bool = False,
        cwd: Path | None = None,
        out: Path | None = None,
    ) -> int:
        assert self._process.stdin is not None
        order = {"id": 0, "argv": argv, "log": str(log), "die": die, "namespace": namespace, "slow_s": slow_s}
        order["pretends"] = pretends
        order |= {name: path and str(path) for name, path in (("clock", clock), ("cwd", cwd), ("out", out))}
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        return self._pids.get(timeout=30)

    def exit_code(self, pid: int, *, timeout_s: float) -> int:
        with self._changed:
            assert self._changed.wait_for(lambda: pid in self._exits, timeout_s), f"process {pid} did not end"
            return self._exits[pid]

    def has_ended(self, pid: int) -> bool:
        with self._changed:
            return pid in self._exits

    def is_stopped(self, pid: int) -> bool:
        """Whether the process stands still (SIGSTOP)."""
        return not self.has_ended(pid) and psutil.Process(pid).status() == psutil.STATUS_STOPPED

    def leftovers(self, *, timeout_s: float = 10.0) -> list[str]:
        """What is still there after at most `timeout_s`: processes (so their ports), socket files, folders."""
        give_up_at = time.monotonic() + timeout_s
        pause = threading.Event()
        while True:
            # Not rglob: what ends meanwhile takes its folder away.
            found = [f"{at}/{name}" for at, folders, files in os.walk(self.runtime) for name in (*folders, *files)]
            left = [path for path in found if not path.endswith("/homeswarm")]
            for process in self._processes():
                with contextlib.suppress(psutil.Error):
                    left.append(f"process {process.pid} {' '.join(process.cmdline())[:100]}")
            if not left or time.monotonic() > give_up_at:
                return left
            pause.wait(0.1)

    def _processes(self) -> Iterator[psutil.Process]:
        """All that are there of what it has started, and of what those have."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                marked = process.environ().get("XDG_RUNTIME_DIR") == str(self.runtime)
                if marked and process.pid != self._process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    yield process

    def close(self) -> None:
        """Nothing stays of it, whichever test failed before what it had detached was told to leave."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(120)
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        shutil.rmtree(self.runtime, ignore_errors=True)


@dataclass
class ProcessSwarm:
    """One run: its host, its peers by name, and their logs below `root`."""

    zygote: Zygote
    root: Path
    stages: int = 2
    founders: int = 2
    min_replicas: int = 2
    steps: int = 12
    every: int = 4
    delay: int = 0
    local_steps: int = 1
    """More, with one stage: windows of so many inner steps, of `target_tokens` each."""
    target_tokens: int = 1024
    in_flight: int = 2
    hidden_size: int = 32
    rebalance_s: float = 0.0
    trust: str = "friends"
    slow_s: float = 0.0
    """How much longer a microbatch takes a peer than this machine needs for it."""
    seed: int = 0
    stays: bool = False
    """The host serves on after the run's end."""
    loopback: str = "127.0.0.1"
    """At which all listen where there is no network."""
    network: Namespaces | None = None
    """The host is its member "host", peers are members by their names; without it all are on `loopback`."""
    machines: Mapping[str, str] = field(default_factory=dict)
    """By name, on whose machine of the network a peer runs if not on its own."""
    host: int = 0
    peers: dict[str, int] = field(default_factory=dict)
    _log_start: int = 0
    _host_port: int = field(default_factory=own_port)

    def __enter__(self) -> Self:
        text = self.root / "text"
        text.mkdir()
        for name in ("heapq.py", "textwrap.py", "argparse.py", "typing.py"):
            (text / name).write_bytes((Path(os.__file__).parent / name).read_bytes())
        (self.root / "run.toml").write_text(
            MANIFEST.format(
                stages=self.stages,
                target_tokens=self.target_tokens,
                steps=self.steps,
                delay=self.delay,
                local_steps=self.local_steps,
                every=self.every,
                founders=self.founders,
                min_replicas=self.min_replicas,
                rebalance_s=self.rebalance_s,
                trust=self.trust,
                in_flight=self.in_flight,
                hidden_size=self.hidden_size,
                intermediate_size=2 * self.hidden_size,
            )
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pid in [self.host, *self.peers.values()]:
            if pid and not self.zygote.has_ended(pid):
                with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                    os.kill(pid, signal.SIGKILL)
                self.zygote.exit_code(pid, timeout_s=30)
        if kind is not None:
            for log in sorted(self.root.glob("*.log")):
                print(f"--- {log.name}\n{log.read_text()[-3000:]}")

    def _place(self, name: str, port: int = 0) -> tuple[str, str | None]:
        """Where the process listens, and its namespace."""
        if self.network is None:
            return f"{self.loopback}:{port}", None
        machine = self.machines.get(name, name)
        return f"{self.network.address(machine)}:{port}", self.network.namespace(machine)

    def start_host(self, *extra: str) -> None:
        """Again at the same addresses when it was started before."""
        own, namespace = self._place("host", self._host_port)
        argv = ["host", str(self.root / "run.toml"), "--dir", str(self.root / "host"), "--listen", own]
        argv += ["--json", "--verbose", "--evaluate-tokens", "512", "--report", str(self.root / "report.json"), *extra]
        argv += [] if self.stays else ["--ends-with-run"]
        log = self.root / "host.log"
        if log.exists() and not log.read_bytes().endswith(b"\n"):  # it was killed within a line
            os.truncate(log, log.read_bytes().rfind(b"\n") + 1)
        self._log_start = len(self.events())
        self.host = self.zygote.start(argv, log, namespace=namespace)

    def events(self) -> list[dict[str, Any]]:
        """What the host has told so far; a line that is being written is not read yet."""
        log = self.root / "host.log"
        *lines, _ = log.read_bytes().split(b"\n") if log.exists() else [b""]
        return [json.loads(line) for line in lines if line.startswith(b'{"event"')]

    def wait_for(self, kind: str, *, timeout_s: float = 120, **facts: Any) -> dict[str, Any]:
        """The first event of the kind with these facts since the host was (last) started."""
        give_up_at = time.monotonic() + timeout_s
        pause = threading.Event()
        while time.monotonic() < give_up_at:
            has_ended = self.zygote.has_ended(self.host)  # before what it has told is read: it may be its last
            for event in self.events()[self._log_start :]:
                if event["event"] == kind and all(event.get(name) == value for name, value in facts.items()):
                    return event
            assert not has_ended, f"the host ended before {kind} {facts}"
            pause.wait(0.05)
        raise AssertionError(f"no event {kind} {facts} within {timeout_s} s")

    def wait_for_more(self, kind: str, *, after: int, count: int, timeout_s: float) -> None:
        """Until so many events of the kind have come since there were `after` events."""
        give_up_at = time.monotonic() + timeout_s
        pause = threading.Event()
        while sum(1 for event in self.events()[after:] if event["event"] == kind) < count:
            assert time.monotonic() < give_up_at, f"fewer than {count} events {kind} within {timeout_s:.0f} s"
            pause.wait(0.05)

    def set_clock(self, name: str, *, ahead_s: float) -> None:
        """The peer's machine has this clock; to be called before its start, and again at any time."""
        file = os.open(self.root / f"{name}.clock", os.O_RDWR | os.O_CREAT)
        os.pwrite(file, f"{ahead_s:<+32}".encode(), 0)  # in one piece: it may be read meanwhile
        os.close(file)

    def start_peer(self, name: str, stage: int, *, die: dict[str, Any] | None = None) -> None:
        address = self.wait_for("listening")["invite"]
        argv = ["join", address, "--stage", str(stage), "--dir", str(self.root / name), "--threads", "1", "--yes"]
        argv += ["--nice", "0"]  # deadlines count here, whoever else uses the machine
        own, namespace = self._place(name)
        argv += ["--listen", own, "--verbose"]
        log, clock = self.root / f"{name}.log", self.root / f"{name}.clock"
        self.peers[name] = self.zygote.start(
            argv,
            log,
            die,
            namespace=namespace,
            clock=clock if clock.exists() else None,
            slow_s=self.slow_s,
        )

    def start_founders(self, **dying: dict[str, Any]) -> None:
        """All founders, named p<stage><letter>; `dying` says who dies when."""
        for stage in range(self.stages):
            for number in range(self.founders):
                name = f"p{stage}{'abcdefgh'[number]}"
                self.start_peer(name, stage, die=dying.get(name))

    def kill(self, name: str) -> None:
        os.kill(self.peers[name], signal.SIGKILL)

    def leave(self, name: str) -> None:
        """The peer is told to leave in good order, as by Ctrl-C; see `has_left`. It may have gone by itself."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.peers[name], signal.SIGINT)

    def has_left(self, name: str, *, timeout_s: float = 80.0) -> None:
        """Wait until a peer that was told to leave has gone, and well."""
        code = self.zygote.exit_code(self.peers[name], timeout_s=timeout_s)
        assert code == 0, f"{name} left with {code}"

    def finish(self, *, timeout_s: float = 180) -> dict[str, Any]:
        """The report, once the host has ended well."""
        code = self.zygote.exit_code(self.host, timeout_s=timeout_s)
        assert code == 0, f"the host ended with {code}"
        report: dict[str, Any] = json.loads((self.root / "report.json").read_text())
        return report
