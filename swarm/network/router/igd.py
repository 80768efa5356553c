"""Asks the home's router by UPnP to forward TCP ports to this machine, or to end it: a program.

    python -m swarm.network.router.igd ask|end INTERFACE PORT ...

It prints one object: {"outside", "inside", "ports": {inner: outer}}, or {"why"} if nothing is forwarded.
"""

import json
import random
import resource
import signal
import sys
from contextlib import suppress

import miniupnpc

from swarm.network.router.forwarded import LIFETIME_S

WITHIN_S = 30
"""It ends by itself, whatever becomes of whoever began it."""
MOST_BYTES = 256 << 20
"""Of its memory: the library keeps whatever a device of the home answers, until it ends."""
SEARCH_MS = 1200
OTHER_PORTS = 4
"""Tried where a port's own number is taken."""
NAME = "homeswarm"
FOR_GOOD_ALONE = "OnlyPermanentLeasesSupported"
"""The library's words for the router's error 725."""
MAX_WHY = 160


def ask(igd: miniupnpc.UPnP, ports: list[int]) -> dict[str, object]:
    """All of the ports or none: what is forwarded before one is refused is ended again.

    Raises Exception, the library's own, with the router's reason.
    """
    outside, inside = igd.externalipaddress(), igd.lanaddr
    given: dict[int, int] = {}
    try:
        for port in ports:
            given[port] = _forward(igd, inside, port)
    except Exception:
        for outer in given.values():
            with suppress(Exception):  # why it forwards nothing says more
                igd.deleteportmapping(outer, "TCP")
        raise
    return {"outside": outside, "inside": inside, "ports": given}


def _forward(igd: miniupnpc.UPnP, inside: str, port: int) -> int:
    """The router's port."""
    why: Exception | None = None
    for outer in (port, *(random.randrange(20_000, 60_000) for _ in range(OTHER_PORTS))):
        try:
            _add(igd, outer, inside, port)
        except Exception as error:  # noqa: BLE001 - the library has no class of its own
            why = error
        else:
            return outer
    assert why is not None
    raise why


def _add(igd: miniupnpc.UPnP, outer: int, inside: str, port: int) -> None:
    """For a time; for good where the router says that it knows nothing else, as many older ones do."""
    try:
        igd.addportmapping(outer, "TCP", inside, port, NAME, "", LIFETIME_S)
    except Exception as error:
        if str(error) != FOR_GOOD_ALONE:
            raise
        igd.addportmapping(outer, "TCP", inside, port, NAME, "", 0)


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
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
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
