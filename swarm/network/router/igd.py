"""Asks the home's router by UPnP to forward TCP ports to this machine, or to end it: a program.

    python -m swarm.network.router.igd ask|end INTERFACE PORT ...

It prints one object: {"outside", "inside", "ports": {inner: outer}}, or {"why"} if nothing is forwarded.
"""

import json
import random
import signal
import sys
from contextlib import suppress

import miniupnpc

from swarm.network.router.forwarded import LIFETIME_S

WITHIN_S = 30
"""It ends by itself, whatever becomes of whoever began it."""
SEARCH_MS = 1200
OTHER_PORTS = 4
"""Tried where a port's own number is taken."""
NAME = "homeswarm"
MAX_WHY = 160


def ask(igd: miniupnpc.UPnP, ports: list[int]) -> dict[str, object]:
    """Raises Exception, the library's own, with the router's reason."""
    outside, inside = igd.externalipaddress(), igd.lanaddr
    return {"outside": outside, "inside": inside, "ports": {port: _forward(igd, inside, port) for port in ports}}


def _forward(igd: miniupnpc.UPnP, inside: str, port: int) -> int:
    """The router's port."""
    why: Exception | None = None
    for outer in (port, *(random.randrange(20_000, 60_000) for _ in range(OTHER_PORTS))):
        for lifetime_s in (LIFETIME_S, 0):  # many older ones forward only until they are told to end
            try:
                igd.addportmapping(outer, "TCP", inside, port, NAME, "", lifetime_s)
            except Exception as error:  # noqa: BLE001 - the library has no class of its own
                why = error
            else:
                return outer
    assert why is not None
    raise why


def end(igd: miniupnpc.UPnP, ports: list[int]) -> dict[str, object]:
    """Every port of ours that leads to one of these, by the router's own list."""
    found, index = [], 0
    while (entry := igd.getgenericportmapping(index)) is not None:
        outer, protocol, (inside, inner), *_ = entry
        if (protocol, inside) == ("TCP", igd.lanaddr) and inner in ports:
            found.append(outer)
        index += 1
    for outer in found:
        igd.deleteportmapping(outer, "TCP")
    return {"ended": found}


def main(what: str, interface: str, *ports: str) -> None:
    signal.alarm(WITHIN_S)
    igd = miniupnpc.UPnP(discoverdelay=SEARCH_MS, multicastif=interface or None)
    try:
        with suppress(Exception):  # of the library's own making, also where nobody answers
            igd.discover()
        igd.selectigd()
        told = {"ask": ask, "end": end}[what](igd, [int(port) for port in ports])
    except Exception as error:  # noqa: BLE001
        told = {"why": f"no router forwards a port: {error}"[:MAX_WHY]}
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
