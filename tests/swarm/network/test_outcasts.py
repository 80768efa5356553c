"""Who is shut out is as good as dead to those above the transport: their calls break off, and they go on."""

import asyncio
import random

import pytest

from swarm.core.errors import UnreachableError
from swarm.core.ids import PeerId
from swarm.network.memory import MemoryNetwork
from swarm.network.outcasts import GuardedTransport
from swarm.network.transport import Message
from tests.swarm.network.test_memory import IDENTITIES, A, B, simulate


async def silence(_: PeerId, request: Message) -> Message:
    await asyncio.sleep(1e9)
    return Message()


@pytest.mark.parametrize("let_in_again", [False, True])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_caller_lives_on_however_often_its_callee_is_shut_out(times: int, let_in_again: bool) -> None:
    async def main() -> None:
        network = MemoryNetwork(random.Random(0))
        guarded, other = GuardedTransport(network.transport(IDENTITIES[0])), network.transport(IDENTITIES[1])
        other.serve("silence", silence, max_body_bytes=0)
        heard: list[str] = []

        async def live() -> None:
            for _ in range(2):
                with pytest.raises(UnreachableError, match="banned"):
                    await guarded.call(B, "silence", Message(), timeout_s=60.0, max_body_bytes=0)
                heard.append("over")
                await asyncio.sleep(0)
            await asyncio.sleep(1.0)
            heard.append("alive")

        task = asyncio.create_task(live())
        await asyncio.sleep(1.0)
        for _ in range(times):
            guarded.shut_out(B)
        if let_in_again:
            guarded.let_in(B)
            await asyncio.sleep(1.0)
            guarded.shut_out(B)
        await task
        assert heard == ["over", "over", "alive"]
        assert task.cancelling() == 0
        await guarded.close()
        await other.close()

    simulate(main)


def test_a_caller_that_is_cancelled_ends_though_its_callee_is_shut_out_too() -> None:
    async def main() -> None:
        network = MemoryNetwork(random.Random(0))
        guarded, other = GuardedTransport(network.transport(IDENTITIES[0])), network.transport(IDENTITIES[1])
        other.serve("silence", silence, max_body_bytes=0)
        assert guarded.peer_id == A
        task = asyncio.create_task(guarded.call(B, "silence", Message(), timeout_s=60.0, max_body_bytes=0))
        await asyncio.sleep(1.0)
        guarded.shut_out(B)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await guarded.close()
        await other.close()

    simulate(main)
