"""A clock that is off is set right by the host's, but not by what the way there may explain."""

import asyncio
import random
import time

import pytest

from swarm.identity.key import Identity
from swarm.network.directory.swarm_time import SwarmTime, seconds_ahead
from swarm.network.memory import MemoryNetwork
from swarm.network.transport import Message


@pytest.mark.parametrize(
    ("ahead_s", "error_s", "offset_s"),
    [(60.0, 0.1, -60.0), (-60.0, 0.1, 60.0), (0.5, 0.1, 0.0), (4.0, 3.5, 0.0), (2.0, 0.1, -2.0)],
)
def test_what_is_added_to_a_clock(ahead_s: float, error_s: float, offset_s: float) -> None:
    ours = SwarmTime()
    ours.set_by(ahead_s, error_s)
    assert ours.offset_s == offset_s
    assert ours.now() == pytest.approx(time.time() + offset_s, abs=0.5)


def test_a_clock_that_was_set_meanwhile_is_left_alone_again() -> None:
    ours = SwarmTime()
    ours.set_by(60.0, 0.1)
    ours.set_by(60.3, 0.1)
    assert ours.offset_s == -60.0  # each look differs by the way there and back
    ours.set_by(0.01, 0.1)
    assert ours.offset_s == 0.0


def test_the_difference_is_measured_at_the_host() -> None:
    async def scenario() -> None:
        network = MemoryNetwork(random.Random(0), delay_s=0.02)
        host, peer = (network.transport(Identity.from_seed(bytes([n]) * 32)) for n in (1, 2))

        async def on_ping(sender: object, request: Message) -> Message:
            return Message({"now": time.time() + 60.0})

        host.serve("ping", on_ping, max_body_bytes=0)
        ahead_s, error_s = await seconds_ahead(peer, host.peer_id, timeout_s=5.0)
        assert error_s >= 0.02
        assert ahead_s == pytest.approx(-60.0, abs=error_s + 0.5)

    asyncio.run(scenario())
