"""Emulated home links: one process carries the packets of namespaces, each at its line's rate.

    python -m benchmarks.homes.router NAMESPACE=ADDRESS[,KIND[,KIND]][,ADDRESS6[,firewall]] ...

Every namespace's default route is a TUN device whose other end is here. A packet leaves through its sender's uplink (a
token bucket and a queue), travels half a round trip, and comes in through its receiver's downlink. A full queue drops.
Of a lossy path each packet is lost behind its uplink with the given probability, drawn from a seed. Rates come as JSON
lines on standard input, `{"up_mbit", "down_mbit", "round_trip_ms", "queue_ms", "loss"}`; until then nothing is held up.
With `"only": [ADDRESS, ...]` the rates are of these homes' lines. `{"cut": [ADDRESS, ...]}` drops all that these homes
send or are sent, until another such line; of `{"apart": [ADDRESS, ...]}` what is sent to these homes is counted by
itself as well. With a KIND a home is behind a router of that kind, or behind two, and has a private address
(`benchmarks.homes.translation`). With an ADDRESS6 it has IPv6 too, behind a firewall if that is said.
Twenty times a second a line goes to standard output: `{"at", "up_bytes", "up_ack_bytes", "up_apart_bytes",
"down_bytes", "dropped", "lost", "busy_s"}`, bytes of IP packets by address since the start, of those sent also those
that bring nothing but TCP's acknowledgements, and of the others those to homes apart, CPU seconds of this process.
Needs root.
"""

import ctypes
import fcntl
import heapq
import itertools
import json
import os
import random
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.homes.namespaces import INSIDE, enter, ip
from benchmarks.homes.translation import Kind, Translator, addresses_in, behind, is_acknowledgement

TUN_NAME = "home0"
MTU_BYTES = 1500
EVERY_S = 0.05
FIREWALL = "firewall"
BURST_S = 0.005
"""A bucket holds this long a rate's worth of tokens: what a late wake-up of this process may catch up."""
LEAST_QUEUE_BYTES = 15_000
"""No modem holds less than ten packets, however slow its line."""
SEED = 1
"""Of which packets are lost."""
_TUNSETIFF, _TUNSETOFFLOAD, _TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_OFFLOAD_CHECKSUM, _OFFLOAD_TSO4 = 0x01, 0x02
_HEADER_BYTES = 10
"""Of virtio: lets the kernel hand over several segments in one packet, to be cut up by the receiver's kernel."""
_WIRE_HEADER_BYTES = 52
"""IP and TCP with timestamps: what each further segment of such a packet would add on a real line."""


def open_tun(namespace: str, address: str, address6: str | None = None) -> int:
    """A descriptor of the namespace's TUN device, which becomes its default route; the namespace is entered."""
    enter(namespace)
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH14s", TUN_NAME.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR, b"")
    fcntl.ioctl(descriptor, _TUNSETIFF, request)
    fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _OFFLOAD_CHECKSUM | _OFFLOAD_TSO4)
    ip("address", "add", f"{address}/32", "dev", TUN_NAME, namespace=namespace)
    ip("link", "set", TUN_NAME, "mtu", str(MTU_BYTES), "txqueuelen", "2000", "up", namespace=namespace)
    ip("route", "add", "default", "dev", TUN_NAME, namespace=namespace)
    if address6 is not None:
        ip("address", "add", f"{address6}/64", "dev", TUN_NAME, "nodad", namespace=namespace)
        ip("-6", "route", "add", "default", "dev", TUN_NAME, namespace=namespace)
    return descriptor


def wire_bytes(packet: bytes) -> int:
    """Bytes on a line of what may be several segments in one."""
    segment_bytes = struct.unpack_from("<H", packet, 4)[0] if packet[1] else 0
    size = len(packet) - _HEADER_BYTES
    return size + _WIRE_HEADER_BYTES * ((size - _WIRE_HEADER_BYTES - 1) // segment_bytes) if segment_bytes else size


@dataclass
class Line:
    """One direction of one home's link: a token bucket before which packets queue. Times are seconds."""

    bytes_per_s: float = float("inf")
    queue_s: float = float("inf")
    """At least as long as `LEAST_QUEUE_BYTES` take."""
    free_at: float = 0.0
    num_bytes: int = 0
    """Carried since the start."""
    dropped: int = 0

    def take(self, size_bytes: int, now: float) -> float | None:
        """When the packet has left the line; None if its queue is full."""
        start = max(self.free_at, now - BURST_S)
        if start - now > self.queue_s:
            self.dropped += 1
            return None
        self.free_at = start + size_bytes / self.bytes_per_s
        self.num_bytes += size_bytes
        return self.free_at


@dataclass
class Home:
    """A namespace's two lines and the TUN device they end in."""

    tun: int
    up: Line = field(default_factory=Line)
    up_ack_bytes: int = 0
    up_apart_bytes: int = 0
    down: Line = field(default_factory=Line)
    translator: Translator = field(default_factory=lambda: Translator([]))
    address6: str | None = None


class Router:
    """Carries packets between homes."""

    def __init__(self, homes: dict[str, Home], *, rng: random.Random) -> None:
        self._homes = homes
        self._rng = rng
        self._loss = 0.0
        self._num_lost = 0
        self._of_address = {socket.inet_aton(address): home for address, home in homes.items()}
        six = {home.address6: home for home in homes.values() if home.address6 is not None}
        self._of_address |= {socket.inet_pton(socket.AF_INET6, address): home for address, home in six.items()}
        self._delay_s = 0.0
        self._cut: frozenset[int] = frozenset()
        self._apart: frozenset[int] = frozenset()
        self._under_way: list[tuple[float, int, bool, Home, bytes]] = []  # due, number, is on the downlink, to, packet
        self._numbers = itertools.count()

    def limit(
        self,
        *,
        up_mbit: float,
        down_mbit: float,
        round_trip_ms: float,
        queue_ms: float,
        loss: float = 0.0,
        only: Sequence[str] = (),
    ) -> None:
        for home in [self._homes[address] for address in only or self._homes]:
            for line, mbit in ((home.up, up_mbit), (home.down, down_mbit)):
                line.bytes_per_s = mbit * 1e6 / 8
                line.queue_s = max(queue_ms / 1000, LEAST_QUEUE_BYTES / line.bytes_per_s)
        self._delay_s = round_trip_ms / 2000
        self._loss = loss

    def cut(self, addresses: Sequence[str]) -> None:
        """From now on the lines of these homes are dead, and no others."""
        self._cut = frozenset(self._homes[address].tun for address in addresses)

    def count_apart(self, addresses: Sequence[str]) -> None:
        """From now on, what is sent to these homes."""
        self._apart = frozenset(self._homes[address].tun for address in addresses)

    def receive(self, home: Home, now: float) -> None:
        """Take what the namespace has sent."""
        for _ in range(64):
            try:
                packet = os.read(home.tun, 1 << 17)
            except BlockingIOError:
                return
            translated = home.translator.out(packet, now)
            if translated is None:
                continue
            packet = translated
            to = self._of_address.get(addresses_in(packet)[1])
            is_cut = to is not None and not self._cut.isdisjoint((home.tun, to.tun))
            size_bytes = wire_bytes(packet)
            left_at = home.up.take(size_bytes, now) if to is not None and not is_cut else None
            if to is None or left_at is None:
                continue
            if is_acknowledgement(packet):
                home.up_ack_bytes += size_bytes
            elif to.tun in self._apart:
                home.up_apart_bytes += size_bytes
            if self._loss and self._rng.random() < self._loss:
                self._num_lost += 1
            else:
                item = (left_at + self._delay_s, next(self._numbers), False, to, packet)
                heapq.heappush(self._under_way, item)

    def carry(self, now: float) -> float | None:
        """Move on what is due; how long until more is, None if nothing is under way."""
        while self._under_way:
            due, _, arrives, home, packet = self._under_way[0]
            if due > now:
                return due - now
            heapq.heappop(self._under_way)
            if arrives:
                try:
                    os.write(home.tun, packet)
                except OSError:  # the namespace is going away, or its kernel has no memory just now
                    home.down.dropped += 1
                continue
            let_in = home.translator.into(packet, due)
            through_at = home.down.take(wire_bytes(let_in), due) if let_in is not None else None
            if let_in is not None and through_at is not None:
                heapq.heappush(self._under_way, (through_at, next(self._numbers), True, home, let_in))
        return None

    def figures(self) -> dict[str, object]:
        used = os.times()
        return {
            "at": time.time(),
            "up_bytes": {address: home.up.num_bytes for address, home in self._homes.items()},
            "up_ack_bytes": {address: home.up_ack_bytes for address, home in self._homes.items()},
            "up_apart_bytes": {address: home.up_apart_bytes for address, home in self._homes.items()},
            "down_bytes": {address: home.down.num_bytes for address, home in self._homes.items()},
            "dropped": {address: home.up.dropped + home.down.dropped for address, home in self._homes.items()},
            "lost": self._num_lost,
            "busy_s": used.user + used.system,
        }


def orders_in(data: bytes) -> tuple[list[dict[str, Any]], bytes]:
    """All whole lines of standard input, and what is there of the next. Nothing may read ahead of `select` and keep a
    line: it would wait there until another comes."""
    *lines, rest = data.split(b"\n")
    return [json.loads(line) for line in lines], rest


def obey(router: Router, homes: dict[str, Home], order: dict[str, Any]) -> None:
    """One line of standard input."""
    if "cut" in order:
        router.cut(order["cut"])
        return
    if "apart" in order:
        router.count_apart(order["apart"])
        return
    if order.get("loss"):
        for home in homes.values():  # or one loss would take the forty segments of a packet
            fcntl.ioctl(home.tun, _TUNSETOFFLOAD, _OFFLOAD_CHECKSUM)
    router.limit(**order)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it closes its standard input
    ctypes.CDLL(None).setpriority(0, 0, -15)  # a router is no program among others: its lateness would be the line's
    homes = {}
    for argument in sys.argv[1:]:
        namespace, _, described = argument.partition("=")
        address, *more = described.split(",")
        kinds = [Kind(kind) for kind in more if ":" not in kind and kind != FIREWALL]
        address6 = next((one for one in more if ":" in one), None)
        routers = behind(kinds, address, seed=len(homes), has_firewall=FIREWALL in more)
        tun = open_tun(namespace, INSIDE if kinds else address, address6)
        homes[address] = Home(tun, translator=routers, address6=address6)
    router = Router(homes, rng=random.Random(SEED))
    by_descriptor = {home.tun: home for home in homes.values()}
    wait_s: float | None = None
    say_at = 0.0
    unread = b""
    while True:
        pause = EVERY_S if wait_s is None else min(wait_s, EVERY_S)
        readable, _, _ = select.select([0, *by_descriptor], [], [], pause)
        now = time.monotonic()
        for descriptor in readable:
            if descriptor == 0:
                said = os.read(0, 1 << 16)
                if not said:
                    return
                orders, unread = orders_in(unread + said)
                for order in orders:
                    obey(router, homes, order)
            else:
                router.receive(by_descriptor[descriptor], now)
        wait_s = router.carry(now)
        if now >= say_at:
            say_at = now + EVERY_S
            sys.stdout.write(json.dumps(router.figures()) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
