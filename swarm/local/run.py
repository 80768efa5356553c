"""A swarm on a script's or a notebook's own machine: `swarm host` and `swarm join`, watched.

The programs are the commands themselves, each a process, tied to the life of the script.
"""

import contextlib
import json
import queue
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from swarm.core.errors import LocalError, SettingsError, TransientError
from swarm.local.tied_program import tied
from swarm.manifest.file import Manifest

Event = dict[str, Any]

READY_S = 300.0
DRAIN_S = 40.0
KILL_WAIT_S = 10.0
MAX_EVENTS = 100_000
"""That are kept for `events`; of a longer run that nobody watches the oldest go."""
LAST_LINES = 12
REPORT = "report.json"


@dataclass(eq=False)
class LocalPeer:
    """One peer's process."""

    stage: int
    folder: Path
    process: "subprocess.Popen[bytes]"

    def kill(self) -> None:
        """With no chance to say goodbye, as a power cut would."""
        self.process.kill()
        self.process.wait(KILL_WAIT_S)


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """Where a run is."""

    version: int = 0
    loss: float | None = None
    """Training loss of the last step that was told, nats a token."""
    held_out_loss: float | None = None
    finished: bool = False


@dataclass(eq=False)
class Run:
    """A run of `manifest` with so many `peers` of each stage, on this machine.

    Use it as a context: everything it has started is ended when that is left. Methods raise LocalError, with the last
    lines of its log, when a program that is needed has ended.
    """

    manifest: Manifest
    peers: Sequence[int] = (1, 1)
    folder: Path | None = None
    """Of the run. Default: beside the manifest, with its name."""
    threads: int = 1
    """Of each peer."""
    evaluate_tokens: int = 65536
    """Held-out tokens that each checkpoint is evaluated on: where training sees few, a part of them."""
    members: list[LocalPeer] = field(default_factory=list, init=False)
    invite: str = field(default="", init=False)
    web: str | None = field(default=None, init=False)
    """Address of the run's page."""
    status: RunStatus = field(default_factory=RunStatus, init=False)

    def __post_init__(self) -> None:
        num_stages = self.manifest.model.num_stages
        if len(self.peers) != num_stages or min(self.peers, default=0) < self.manifest.tables.limits.founders_per_stage:
            raise SettingsError(
                f"peers = {tuple(self.peers)}: the manifest has {num_stages} stages, each of which begins with "
                f"limits.founders_per_stage = {self.manifest.tables.limits.founders_per_stage} peers or more"
            )
        self.folder = (self.folder or self.manifest.path.with_suffix("")).absolute()
        self._events: queue.Queue[Event] = queue.Queue(MAX_EVENTS)
        self._host: subprocess.Popen[bytes] | None = None
        self._sums: deque[tuple[int, float, int]] = deque(maxlen=4 * max(self.peers))

    # -- its life -----------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the host and, once it listens, the peers."""
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        report = str(self.folder / REPORT)
        arguments = ["host", str(self.manifest.path), "--dir", str(self.folder), "--listen", "127.0.0.1:0"]
        self._host = self._program(
            [
                *arguments,
                "--json",
                "--ends-with-run",
                "--report",
                report,
                "--evaluate-tokens",
                str(self.evaluate_tokens),
            ],
            self.folder / "host.log",
            stdout=subprocess.PIPE,
        )
        assert self._host.stdout is not None
        threading.Thread(target=self._read, args=(self._host.stdout,), daemon=True).start()
        try:
            for event in self.events(timeout_s=READY_S):
                if event["event"] == "listening":
                    self.invite, self.web = event["invite"], event["web"]
                    break
            for stage, count in enumerate(self.peers):
                for _ in range(count):
                    self.add_peer(stage)
        except BaseException:
            self.stop()
            raise

    def add_peer(self, stage: int) -> LocalPeer:
        """One more peer of the stage; it joins in its own time."""
        assert self.folder is not None
        folder = self.folder / f"peer-{len(self.members)}"
        arguments = ["join", self.invite, "--yes", "--stage", str(stage), "--dir", str(folder)]
        arguments += ["--threads", str(self.threads), "--listen", "127.0.0.1:0"]
        process = self._program(arguments, self.folder / f"peer-{len(self.members)}.log", stdout=None)
        peer = LocalPeer(stage, folder, process)
        self.members.append(peer)
        return peer

    def stop(self) -> None:
        """End peers and host in order, each with time to drain. Nothing is left running."""
        running = [peer.process for peer in self.members]
        _end(running)
        if self._host is not None:
            _end([self._host])

    # -- watching -----------------------------------------------------------------------------------------

    def events(self, *, timeout_s: float | None = None) -> Iterator[Event]:
        """What the host tells, as `swarm host --json` prints it, until the run is over.

        Raises TransientError when nothing came for `timeout_s`.
        """
        while True:
            try:
                event = self._events.get(timeout=0.5 if timeout_s is None else timeout_s)
            except queue.Empty:
                if timeout_s is not None:
                    raise TransientError(f"the host has told nothing for {timeout_s:g} s") from None
                continue
            if event["event"] == "ended":
                self._events.put_nowait(event)  # whoever asks again is told again
                if not self.status.finished:
                    assert self.folder is not None
                    raise LocalError(f"the host ended before the run did:\n{_last_lines(self.folder / 'host.log')}")
                return
            yield event

    def wait(self, *, timeout_s: float) -> dict[str, Any]:
        """The run's report, once it is over. Raises TransientError after `timeout_s`."""
        give_up_at = time.monotonic() + timeout_s
        for _ in self.events(timeout_s=timeout_s):
            if time.monotonic() > give_up_at:
                raise TransientError(f"the run is at version {self.status.version} after {timeout_s:g} s")
        assert self.folder is not None
        assert self._host is not None
        self._host.wait(KILL_WAIT_S)
        report: dict[str, Any] = json.loads((self.folder / REPORT).read_text())
        return report

    def _read(self, lines: IO[bytes]) -> None:
        for line in lines:
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict) and "event" in event:
                    self._take(event)
        self._put({"event": "ended"})

    def _take(self, event: Event) -> None:
        match event:
            case {"event": "version", "version": int(version)}:
                self.status = _changed(self.status, version=version)
            case {"event": "evaluation", "held_out_loss": float(loss)}:
                self.status = _changed(self.status, held_out_loss=loss)
            case {"event": "step", "step": int(step), "loss_sum": float(total), "num_targets": int(count)} if count:
                self._sums.append((step, total, count))
                sums = [(total, count) for at, total, count in self._sums if at == step]
                loss = sum(total for total, _ in sums) / sum(count for _, count in sums)
                self.status = _changed(self.status, loss=loss)
            case {"event": "finished"}:
                self.status = _changed(self.status, finished=True)
        self._put(event)

    def _put(self, event: Event) -> None:
        while True:
            try:
                self._events.put_nowait(event)
                return
            except queue.Full:
                with contextlib.suppress(queue.Empty):
                    self._events.get_nowait()

    def _program(self, arguments: list[str], log: Path, *, stdout: int | None) -> "subprocess.Popen[bytes]":
        with log.open("ab") as file:
            return subprocess.Popen(
                tied("swarm", *arguments),
                stdin=subprocess.DEVNULL,
                stdout=file if stdout is None else stdout,
                stderr=file,
                start_new_session=True,
            )


def _changed(status: RunStatus, **fields: Any) -> RunStatus:
    return RunStatus(**{**status.__dict__, **fields})


def _end(programs: "Sequence[subprocess.Popen[bytes]]") -> None:
    """Side by side: by a signal, and by force once patience is over."""
    for number, patience_s in ((signal.SIGTERM, DRAIN_S), (signal.SIGKILL, KILL_WAIT_S)):
        for program in programs:
            if program.poll() is None:
                program.send_signal(number)
        give_up_at = time.monotonic() + patience_s
        for program in programs:
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(max(0.0, give_up_at - time.monotonic()))


def _last_lines(log: Path) -> str:
    return "\n".join(f"    {line}" for line in log.read_text(errors="replace").splitlines()[-LAST_LINES:])
