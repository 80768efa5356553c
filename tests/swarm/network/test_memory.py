"""The in-memory network fails as it is told to: delay, loss, partitions, death."""

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from swarm.core.errors import TransientError
from swarm.core.ids import PeerId
from swarm.core.transfers import ALIVE_SHARE, LEAST_BYTES_PER_S, OWED_BYTES, SHARED_BY
from swarm.identity.key import Identity
from swarm.network.memory import MemoryNetwork, MemoryTransport
from swarm.network.transport import Message

IDENTITIES = [Identity.from_seed(bytes([n]) * 32) for n in range(3)]
A, B, C = (identity.peer_id for identity in IDENTITIES)


class ClockedLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer: waiting costs nothing and is exact."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self._now = max(self._now, self._scheduled[0].when())
        super()._run_once()


def simulate(main: Callable[[], Awaitable[None]]) -> None:
    with asyncio.Runner(loop_factory=ClockedLoop) as runner:
        runner.run(main())
        assert asyncio.all_tasks(runner.get_loop()) == set()


def now() -> float:
    return asyncio.get_running_loop().time()


async def echo(_: PeerId, request: Message) -> Message:
    return request


async def ask(transport: MemoryTransport, peer_id: PeerId, *, timeout_s: float = 5.0) -> Message:
    return await transport.call(peer_id, "echo", Message({"n": 1}), timeout_s=timeout_s, max_body_bytes=0)


def peers(network: MemoryNetwork) -> list[MemoryTransport]:
    transports = [network.transport(identity) for identity in IDENTITIES]
    for transport in transports:
        transport.serve("echo", echo, max_body_bytes=0)
    return transports


def test_delay_is_paid_both_ways_and_deadlines_hold() -> None:
    async def main() -> None:
        a, _, _ = peers(MemoryNetwork(random.Random(1), delay_s=1.5))
        assert (await ask(a, B)).meta == {"n": 1}
        assert now() == 3.0
        with pytest.raises(TransientError, match="no answer to echo in 2 s"):
            await ask(a, B, timeout_s=2.0)
        assert now() == 5.0

    simulate(main)


def test_lost_call_ends_at_its_deadline_and_the_rest_at_once() -> None:
    async def main() -> None:
        handled = []

        async def count(_: PeerId, request: Message) -> Message:
            handled.append(request)
            return request

        a, b, _ = peers(MemoryNetwork(random.Random(5), loss=0.25))
        b.serve("echo", count, max_body_bytes=0)
        num_lost = 0
        for _ in range(400):
            start = now()
            try:
                await ask(a, B, timeout_s=7.0)
                assert now() == start
            except TransientError:
                assert now() == start + 7.0
                num_lost += 1
        # Each way is lost with probability 1/4: 7 of 16 calls in all, 4 of them before the handler.
        assert 400 * 7 / 16 - 50 < num_lost < 400 * 7 / 16 + 50
        assert 400 * 12 / 16 - 45 < len(handled) < 400 * 12 / 16 + 45

    simulate(main)


def test_same_seed_gives_the_same_losses() -> None:
    outcomes: list[list[bool]] = []

    async def main() -> None:
        a, _, _ = peers(MemoryNetwork(random.Random(9), loss=0.3))
        outcomes.append([])
        for _ in range(50):
            try:
                await ask(a, B, timeout_s=1.0)
                outcomes[-1].append(True)
            except TransientError:
                outcomes[-1].append(False)

    simulate(main)
    simulate(main)
    assert outcomes[0] == outcomes[1]
    assert len(set(outcomes[0])) == 2


def test_cut_breaks_and_refuses_calls_of_the_two_only_until_healed() -> None:
    async def main() -> None:
        network = MemoryNetwork(random.Random(1), delay_s=1.0)
        a, b, c = peers(network)
        call = asyncio.create_task(ask(a, B))
        other = asyncio.create_task(ask(a, C))
        await asyncio.sleep(0.5)
        network.cut(B, A)
        with pytest.raises(TransientError, match="broke off"):
            await call
        assert now() == 0.5
        for caller, callee in ((a, B), (b, A)):
            with pytest.raises(TransientError, match="cannot be reached"):
                await ask(caller, callee)
            with pytest.raises(TransientError):
                await caller.connect(callee, [])
        assert now() == 0.5
        await other
        await ask(c, B)
        network.heal(A, B)
        await ask(a, B)

    simulate(main)


def test_cut_peers_do_not_see_each_others_records() -> None:
    async def main() -> None:
        network = MemoryNetwork(random.Random(1))
        directories = [network.directory(identity) for identity in IDENTITIES]
        for directory in directories:
            await directory.publish("t", {}, ttl_s=10)
        network.cut(A, B)
        assert [sorted(await directory.lookup("t")) for directory in directories] == [
            sorted([A, C]),
            sorted([B, C]),
            sorted([A, B, C]),
        ]

    simulate(main)


def test_killed_peer_comes_back_with_a_new_transport() -> None:
    async def main() -> None:
        network = MemoryNetwork(random.Random(1), delay_s=1.0)
        a, b, _ = peers(network)
        call = asyncio.create_task(ask(a, B))
        await asyncio.sleep(0.5)
        network.kill(B)
        with pytest.raises(TransientError, match="broke off"):
            await call
        with pytest.raises(TransientError, match="cannot be reached"):
            await ask(b, A)
        reborn = network.transport(IDENTITIES[1])
        with pytest.raises(TransientError, match="not served"):
            await ask(a, B)
        reborn.serve("echo", echo, max_body_bytes=0)
        await ask(a, B)
        with pytest.raises(TransientError, match="cannot be reached"):
            await ask(b, A)  # the old one stays dead
        await b.close()
        await ask(a, B)  # and its end is not the new one's

    simulate(main)


def test_records_expire_by_the_networks_clock() -> None:
    async def main() -> None:
        network = MemoryNetwork(random.Random(1), clock=now)
        directory = network.directory(IDENTITIES[0])
        await directory.publish("t", {"n": 1}, ttl_s=15.0)
        await asyncio.sleep(14.9)
        assert await directory.lookup("t") == {A: {"n": 1}}
        await asyncio.sleep(0.2)
        assert await directory.lookup("t") == {}

    simulate(main)


def test_a_body_on_a_slow_line_takes_its_time_and_is_never_given_up_while_it_comes() -> None:
    async def main() -> None:
        network = MemoryNetwork(random.Random(1))
        a, b, _ = peers(network)
        b.serve("echo", echo, max_body_bytes=1 << 20)
        network.limit(A, up_bytes_per_s=10_000.0)
        network.limit(B, up_bytes_per_s=100_000.0)
        reply = await a.call(B, "echo", Message({}, bytes(1_000_000)), timeout_s=2.0, max_body_bytes=1 << 20)
        assert len(reply.body) == 1_000_000
        assert now() == pytest.approx(110.0)
        await ask(a, B, timeout_s=0.1)  # a small call waits for no bulk

    simulate(main)


def test_bodies_that_share_a_line_end_together() -> None:
    async def main() -> None:
        network = MemoryNetwork(random.Random(1))
        a, b, c = peers(network)
        for transport in (b, c):
            transport.serve("echo", echo, max_body_bytes=1 << 20)
        network.limit(A, up_bytes_per_s=20_000.0)
        body = Message({}, bytes(500_000))
        calls = [a.call(peer, "echo", body, timeout_s=2.0, max_body_bytes=1 << 20) for peer in (B, C)]
        ends = []
        for ended in asyncio.as_completed(calls):
            await ended
            ends.append(now())
        assert ends == pytest.approx([50.0, 50.0], abs=1.0)

    simulate(main)


def test_a_broken_line_ends_a_transfer_in_its_time_and_a_mended_one_carries_again() -> None:
    async def main() -> None:
        network = MemoryNetwork(random.Random(1))
        a, b, _ = peers(network)
        b.serve("echo", echo, max_body_bytes=1 << 20)
        network.limit(A, up_bytes_per_s=10_000.0)
        asyncio.get_running_loop().call_later(30.0, network.break_line, A)
        with pytest.raises(TransientError, match="no answer to echo"):
            await a.call(B, "echo", Message({}, bytes(1_000_000)), timeout_s=60.0, max_body_bytes=1 << 20)
        owed_s = OWED_BYTES / 10_000.0  # in which a quarter of the least rate no longer comes
        assert now() == pytest.approx(
            30.0 + owed_s * (1 - ALIVE_SHARE * LEAST_BYTES_PER_S / SHARED_BY / 10_000.0), abs=1.0
        )
        network.mend_line(A)
        await ask(a, B)

    simulate(main)
