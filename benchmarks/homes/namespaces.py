"""Network namespaces for processes of tests, joined by a bridge that can be cut.

Each member has one interface, `eth0`, on one subnet; bridge and ports live in a namespace too, so nothing touches the
machine's own network. A hidden member's is on a home network of its own, behind a router that masquerades (`nat`). A
cut drops packets silently, as a broken line does: no connection is refused or reset. A thin line (`tc`) holds packets
up, and drops those that its queue has no room for. Needs root and `ip` (iproute2).
"""

import contextlib
import ctypes
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import click

from benchmarks.homes.nat import masquerade
from benchmarks.programs import end_when_told, talking

SUBNET = "10.77.0"
PUBLIC_SUBNET = "5.77.0"
"""Of addresses that software takes for anybody's on the Internet, as it does not those of `SUBNET`."""
PUBLIC_PREFIX6 = "2a05:77:0"
"""And of IPv6; each member's is in a /64 of its own."""
_HOME = "192.168.77"
INSIDE = f"{_HOME}.2"
"""What a member behind a router takes for its address."""
_CLONE_NEWNET = 0x40000000
_NETNS = Path("/var/run/netns")
_numbers = itertools.count()


def begin_with_namespaces() -> None:
    """Of a benchmark: told to end, it ends its programs too. Raises ClickException where there can be none."""
    reason = why_not()
    if reason is not None:
        raise click.ClickException(reason)
    end_when_told()


def why_not() -> str | None:
    """Why namespaces cannot be made here; None if they can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "network namespaces need root"
    for program, package in (("ip", "iproute2"), ("nsenter", "util-linux")):
        if shutil.which(program) is None:
            return f"network namespaces need `{program}` ({package})"
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
    _run(["ip", *(["-n", namespace] if namespace else []), *arguments])


def _tc(*arguments: str, namespace: str) -> None:
    _run(["tc", "-n", namespace, *arguments])


def _run(command: list[str]) -> None:
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


def _become_router(namespace: str, answers: bool) -> None:
    enter(namespace)
    masquerade(answers=answers)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def _control_congestion(namespace: str, algorithm: str) -> None:
    enter(namespace)
    Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text(algorithm)


class Namespaces:
    """A namespace for each member while the context lasts."""

    def __init__(
        self,
        members: Sequence[str],
        *,
        bridged: bool = True,
        subnet: str = SUBNET,
        hidden: Sequence[str] = (),
        routed: Sequence[str] = (),
        forwarding: Mapping[str, str] | None = None,
    ) -> None:
        """Without the bridge each has its loopback device alone. Each of `hidden` is behind a router of its own, and
        each of `routed` will be (`emulated.routing`). Of the hidden ones the routers of `forwarding` forward ports when
        they are asked to, by the protocol it names."""
        self._members = tuple(members)
        self._subnet = subnet
        self._hidden = frozenset(hidden)
        self._routed = frozenset(routed)
        self._forwarding = dict(forwarding or {})
        assert self._forwarding.keys() <= self._hidden
        self._programs = contextlib.ExitStack()
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
            outside = self._home(member) if member in self._hidden else name
            ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", outside, namespace=self._hub)
            ip("link", "set", port, "master", "whole", "up", namespace=self._hub)
            ip("address", "add", f"{self.outside(member)}/24", "dev", "eth0", namespace=outside)
            ip("link", "set", "eth0", "up", namespace=outside)
        for member, protocol in self._forwarding.items():
            self._begin_forwarding(member, protocol)

    def _home(self, member: str) -> str:
        """The namespace of a router, with the member behind it."""
        inside, router = self.namespace(member), self.namespace(member) + "-router"
        self._make(router)
        ip("link", "add", "home0", "type", "veth", "peer", "name", "eth0", "netns", inside, namespace=router)
        ip("address", "add", f"{_HOME}.1/24", "dev", "home0", namespace=router)
        ip("link", "set", "home0", "up", namespace=router)
        ip("address", "add", f"{INSIDE}/24", "dev", "eth0", namespace=inside)
        ip("link", "set", "eth0", "up", namespace=inside)
        ip("route", "add", "default", "via", f"{_HOME}.1", namespace=inside)
        with ThreadPoolExecutor(1) as thread:  # which stays in the namespace, to its end
            thread.submit(_become_router, router, member in self._forwarding).result()
        return router

    def _begin_forwarding(self, member: str, protocol: str) -> None:
        at = [self.namespace(member) + "-router", protocol, f"{_HOME}.1", self.outside(member)]
        command = [sys.executable, "-m", "benchmarks.homes.forwarding", *at]
        self._programs.enter_context(talking(command, f"the router of {member}")).hear()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def namespace(self, member: str) -> str:
        """What `enter` takes."""
        assert member in self._members, f"{member} is none of {', '.join(self._members)}"
        return self._prefix + member

    def address(self, member: str) -> str:
        """The member's IPv4 address, as it knows it."""
        return INSIDE if member in self._hidden | self._routed else self.outside(member)

    def inside(self, member: str) -> list[str]:
        """What a command begins with to be begun in the member's namespace, on this machine's own /sys. There daemons
        see which cores others have claimed; `ip netns exec` gives each a /sys to itself, and so all the same core."""
        return ["nsenter", f"--net={_NETNS / self.namespace(member)}"]

    def daemon(self, member: str, folder: Path, *command: str) -> list[str]:
        """A daemon's command as it is begun in the member's namespace: where it listens, and with its own folder in
        `folder`."""
        return [*self.inside(member), *command, "--dir", str(folder / member), "--listen", f"{self.address(member)}:0"]

    def outside(self, member: str) -> str:
        """The IPv4 address from which the others see it."""
        return f"{self._subnet}.{self._members.index(member) + 1}"

    def outside6(self, member: str) -> str:
        """The IPv6 address of a member that has one (`emulated.routing`)."""
        return f"{PUBLIC_PREFIX6}:{self._members.index(member) + 1:x}::1"

    def control_congestion(self, algorithm: str) -> None:
        """The default of TCP connections that members open from now on. Raises OSError for what is not allowed here."""
        for member in self._members:
            with ThreadPoolExecutor(1) as thread:
                thread.submit(_control_congestion, self.namespace(member), algorithm).result()

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

    def thin(self, member: str, *, mbit: float, queue_ms: int) -> None:
        """From now on the member's line carries so much each way, and holds a packet up for so long at most."""
        for namespace, device in self._ends(member):
            bucket = ["rate", f"{mbit}mbit", "burst", "16kb", "latency", f"{queue_ms}ms"]
            _tc("qdisc", "replace", "dev", device, "root", "tbf", *bucket, namespace=namespace)

    def widen(self, member: str) -> None:
        """The member's line is as it was made."""
        for namespace, device in self._ends(member):
            with contextlib.suppress(OSError):  # it was
                _tc("qdisc", "del", "dev", device, "root", namespace=namespace)

    def _ends(self, member: str) -> list[tuple[str, str]]:
        """Of the member's line: where what comes leaves the bridge, and where what goes leaves its house."""
        own = self.namespace(member) + ("-router" if member in self._hidden else "")
        return [(self._hub, self._port(member)), (own, "eth0")]

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
        self._programs.close()
        for name in reversed(self._made):
            with contextlib.suppress(OSError):
                ip("netns", "del", name)
        self._made.clear()
