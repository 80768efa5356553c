"""The swarm's time in a process: its own clock, set right by the host's.

Directory records expire by the clock, and hivemind's DHT refuses whoever is 3 s off, while a volunteer's clock may be
minutes off. What it is off by is measured where the host is reached, and added. The machine's clock is left alone.
"""

import logging
import time

import hivemind.dht.node
import hivemind.dht.protocol
import hivemind.dht.routing
import hivemind.utils.timed_storage

from swarm.core.fields import Fields
from swarm.core.ids import PeerId
from swarm.network.directory.records import CLOCK_SKEW_S
from swarm.network.transport import Message, Transport

log = logging.getLogger(__name__)

LEFT_ALONE_S = CLOCK_SKEW_S / 3
"""A smaller difference is none."""


class SwarmTime:
    """This process's; there is one clock, however many peers run in it."""

    def __init__(self) -> None:
        self.offset_s = 0.0
        """What is added to the machine's clock."""

    def now(self) -> float:
        """Seconds since 1970."""
        return time.time() + self.offset_s

    def set_by(self, ahead_s: float, error_s: float) -> None:
        """The machine's clock is so far ahead of the host's, give or take `error_s`."""
        if abs(-ahead_s - self.offset_s) <= LEFT_ALONE_S + error_s:
            return
        self.offset_s = -ahead_s if abs(ahead_s) > LEFT_ALONE_S + error_s else 0.0
        if abs(ahead_s) > CLOCK_SKEW_S + error_s:
            log.warning(
                "this machine's clock is %.1f s %s the host's: the host's time is used here; set the clock by the "
                "network (timedatectl set-ntp true, or Date & Time in the settings)",
                abs(ahead_s),
                "ahead of" if ahead_s > 0 else "behind",
            )


swarm_time = SwarmTime()
for _module in (hivemind.dht.node, hivemind.dht.protocol, hivemind.dht.routing, hivemind.utils.timed_storage):
    _module.get_dht_time = swarm_time.now


async def seconds_ahead(transport: Transport, host: PeerId, *, timeout_s: float) -> tuple[float, float]:
    """How far this machine's clock is ahead of the host's, and how wrong that may be.

    Raises TransientError or RemoteError.
    """
    asked_at, began = time.time(), time.monotonic()
    reply = await transport.call(host, "ping", Message(), timeout_s=timeout_s, max_body_bytes=0)
    half_way_s = (time.monotonic() - began) / 2
    return asked_at + half_way_s - Fields("ping answer", reply.meta).number("now"), half_way_s
