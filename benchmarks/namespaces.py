"""This is where tests put processes into network namespaces of their own, joined by a bridge that can be cut.

Each member has one interface, `eth0`, on one private subnet; bridge and ports live in a namespace too, so nothing
touches the machine's own network. A cut drops packets silently, as a broken line does: no connection is refused or
reset. Needs root and `ip` (iproute2).
"""

import contextlib
import ctypes
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

SUBNET = "10.77.0"
_CLONE_NEWNET = 0x40000000
_NETNS = Path("/var/run/netns")
_numbers = itertools.count()


def why_not() -> str | None:
    """Why namespaces cannot be made here; None if they can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need `ip` (iproute2)"
    probe = f"hs{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    try:
        bridged = subprocess.run(
            ["ip", "-n", probe, "link", "add", "probe", "type", "bridge"], capture_output=True, text=True, check=False
        )
        return f"bridges cannot be made here: {bridged.stderr.strip()}" if bridged.returncode else None
    finally:
        subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)


def enter(namespace: str) -> None:
    """Move the calling thread, and all it starts, into the namespace. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(_NETNS / namespace, os.O_RDONLY)
    try:
        if libc.setns(descriptor, _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, f"setns to {namespace}: {os.strerror(number)}")
    finally:
        os.close(descriptor)


def ip(*arguments: str, namespace: str | None = None) -> None:
    """Run `ip`; its complaint is in the error."""
    command = ["ip", *(["-n", namespace] if namespace else []), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def sweep() -> None:
    """Remove the namespaces of processes that were killed before they could."""
    for path in _NETNS.glob("hs*-*") if _NETNS.exists() else ():
        owner = re.match(r"hs(\d+)-", path.name)
        if owner is not None and not Path(f"/proc/{owner.group(1)}").exists():
            with contextlib.suppress(OSError):
                ip("netns", "del", path.name)


class Namespaces:
    """A namespace for each member while the context lasts."""

    def __init__(self, members: Sequence[str], *, bridged: bool = True) -> None:
        """Without the bridge each has its loopback device alone."""
        self._members = tuple(members)
        self._bridged = bridged
        self._prefix = f"hs{os.getpid()}-{next(_numbers)}-"
        self._hub = self._prefix + "hub"
        self._made: list[str] = []

    def __enter__(self) -> Self:
        sweep()
        try:
            for member in self._members:
                self._make(self.namespace(member))
            if self._bridged:
                self._bridge()
        except BaseException:
            self._remove()
            raise
        return self

    def _bridge(self) -> None:
        self._make(self._hub)
        ip("link", "add", "whole", "type", "bridge", namespace=self._hub)
        ip("link", "set", "whole", "up", namespace=self._hub)
        for member in self._members:
            port, name = self._port(member), self.namespace(member)
            ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name, namespace=self._hub)
            ip("link", "set", port, "master", "whole", "up", namespace=self._hub)
            ip("address", "add", f"{self.address(member)}/24", "dev", "eth0", namespace=name)
            ip("link", "set", "eth0", "up", namespace=name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def namespace(self, member: str) -> str:
        """What `enter` takes."""
        assert member in self._members, f"{member} is none of {', '.join(self._members)}"
        return self._prefix + member

    def address(self, member: str) -> str:
        """The member's IPv4 address."""
        return f"{SUBNET}.{self._members.index(member) + 1}"

    def cut(self, *groups: Iterable[str]) -> None:
        """From now on members reach only their own group. Whoever is in none stays with the others in none."""
        bridges = []
        moves = []
        for number, group in enumerate(groups):
            bridges += [f"link add part{number} type bridge", f"link set part{number} up"]
            moves += [f"link set {self._port(member)} master part{number}" for member in group]
        self._batch([*bridges, *moves])

    def heal(self) -> None:
        """Everybody reaches everybody again."""
        self._batch([f"link set {self._port(member)} master whole" for member in self._members])
        shown = subprocess.run(
            ["ip", "-n", self._hub, "-brief", "link", "show", "type", "bridge"],
            capture_output=True,
            text=True,
            check=True,
        )
        parts = [line.split()[0] for line in shown.stdout.splitlines() if line.startswith("part")]
        self._batch([f"link del {part}" for part in parts])

    def _port(self, member: str) -> str:
        return f"port{self._members.index(member)}"

    def _batch(self, lines: list[str]) -> None:
        """All lines within a few milliseconds."""
        subprocess.run(
            ["ip", "-n", self._hub, "-batch", "-"], input="\n".join(lines) + "\n", text=True, check=True, timeout=10
        )

    def _make(self, name: str) -> None:
        ip("netns", "add", name)
        self._made.append(name)
        ip("link", "set", "lo", "up", namespace=name)

    def _remove(self) -> None:
        for name in reversed(self._made):
            with contextlib.suppress(OSError):
                ip("netns", "del", name)
        self._made.clear()
