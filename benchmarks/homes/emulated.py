"""Home links for a benchmark's namespaces: the router's process, its lines, and what it counts.

20 Mbit/s up and 100 down, lines that queue 200 ms; the round trip and the loss between homes are the benchmark's.
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

import click

from benchmarks.homes.namespaces import Namespaces
from benchmarks.homes.router import FIREWALL
from benchmarks.homes.translation import Kind

UPLINK_MBIT, DOWNLINK_MBIT, QUEUE_MS = 20.0, 100.0, 200.0
READY_S = 60.0


class IPv6(Enum):
    """How a home's router passes it on."""

    OPEN = "open"
    FIREWALLED = "firewalled"
    """Nothing comes in that nobody inside has asked for."""


@dataclass(frozen=True)
class Paths:
    """What is between any two homes."""

    round_trip_ms: float
    loss: float
    """Probability of a packet."""


class Router:
    """The process that carries packets, and what it says of them."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.seen: list[dict[str, Any]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.seen.append(json.loads(line))

    def limit(
        self,
        paths: Paths,
        *,
        up_mbit: float = UPLINK_MBIT,
        down_mbit: float = DOWNLINK_MBIT,
        only: Sequence[str] = (),
    ) -> None:
        """From now on the lines are those of homes: all, or `only` those of these addresses."""
        lines = {"up_mbit": up_mbit, "down_mbit": down_mbit, "queue_ms": QUEUE_MS}
        self._tell({**lines, **asdict(paths), "only": [*only]})

    def cut(self, *addresses: str) -> None:
        """From now on these homes' lines are dead, and no others."""
        self._tell({"cut": [*addresses]})

    def count_apart(self, *addresses: str) -> None:
        """From now on, what is sent to these homes."""
        self._tell({"apart": [*addresses]})

    def _tell(self, order: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()


@contextmanager
def routing(
    network: Namespaces,
    members: Sequence[str],
    kinds: Mapping[str, Sequence[Kind]] | None = None,
    ipv6: Mapping[str, IPv6] | None = None,
) -> Iterator[Router]:
    """Packets between the members go through a router, which holds nothing up before it is told to limit the lines.

    `kinds`: of the routers that a member is behind, its own first. `ipv6`: who has IPv6 too, and how.
    """
    homes = []
    for name in members:
        behind = (kinds or {}).get(name, ())
        six = (ipv6 or {}).get(name)
        more = [] if six is None else [network.outside6(name), *([FIREWALL] if six is IPv6.FIREWALLED else [])]
        described = ",".join([network.outside(name), *(kind.value for kind in behind), *more])
        homes.append(f"{network.namespace(name)}={described}")
    command = [sys.executable, "-m", "benchmarks.homes.router", *homes]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            router = Router(process)
            give_up_at = time.monotonic() + READY_S
            while not router.seen:
                if process.poll() is not None or time.monotonic() > give_up_at:
                    raise click.ClickException("the router did not start")
                time.sleep(0.05)
            yield router
        finally:
            assert process.stdin is not None
            process.stdin.close()  # it ends
