"""The demo's programs, started, heard and ended: each by its own id, none outliving the demo."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from swarm.core.errors import LocalError
from swarm.local.tied_program import tied

LAST_LINES = 12
LINE_BYTES = 8 << 20
KILL_WAIT_S = 5.0


class Program:
    """One `swarm` process: its standard error goes to a log file, its standard output there or to `on_line`."""

    def __init__(self, name: str, log: Path, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.log = log
        self.killed = False
        """Whether the demo killed it, to show that the others go on."""
        self._process = process
        self._reader: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        name: str,
        arguments: Sequence[str],
        *,
        log: Path,
        on_line: Callable[[str], None] | None = None,
        module: str = "swarm",
        more_environment: Mapping[str, str] = MappingProxyType({}),
    ) -> "Program":
        """Start `python -m MODULE ARGUMENTS` in our environment and more. Raises LocalError when the system cannot."""
        with log.open("ab") as file:
            try:
                process = await asyncio.create_subprocess_exec(
                    *tied(module, *arguments),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=file if on_line is None else asyncio.subprocess.PIPE,
                    stderr=file,
                    # A session of its own: Ctrl-C reaches the demo alone, which then ends the others in order.
                    start_new_session=True,
                    env={**os.environ, **more_environment},
                    limit=LINE_BYTES,
                )
            except OSError as error:
                raise LocalError(f"{name} cannot be started: {error.strerror}") from error
        made = cls(name, log, process)
        if on_line is not None:
            made._reader = asyncio.ensure_future(made._read(on_line))
        return made

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit(self) -> int | None:
        """Exit status, negative for a signal's; None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Its exit status, once all it printed has been read."""
        status = await self._process.wait()
        if self._reader is not None:
            await self._reader
        return status

    def kill(self) -> None:
        """Kill it with no chance to say goodbye, as a power cut would."""
        self.killed = True
        self._signal(signal.SIGKILL)

    async def end(self, *, patience_s: float) -> None:
        """Ask it to end (a peer drains, a host writes its report); kill it once patience is over."""
        for number, wait_s in ((signal.SIGTERM, patience_s), (signal.SIGKILL, KILL_WAIT_S)):
            self._signal(number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.wait(), wait_s)
                return

    def last_lines(self) -> list[str]:
        """The end of its log."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - 8192))
            lines = file.read().decode(errors="replace").splitlines()
        return [line for line in lines if line.strip()][-LAST_LINES:]

    def _signal(self, number: int) -> None:
        if self.exit is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _read(self, on_line: Callable[[str], None]) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            on_line(line.decode(errors="replace").rstrip("\n"))


async def end_all(programs: Sequence[Program], *, patience_s: float) -> None:
    """End these programs side by side."""
    await asyncio.gather(*(program.end(patience_s=patience_s) for program in programs))
