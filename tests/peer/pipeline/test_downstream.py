"""Where a microbatch goes whose next stage says that its step is over."""

import asyncio

import pytest

from peer.pipeline import downstream
from peer.pipeline.downstream import METHOD, Refused
from swarm.core.ids import PeerId
from swarm.network.transport import Message
from tests.peer.pipeline.hop_line import LinePeer, hop_line


def says_closed(peer: LinePeer) -> None:
    """Whatever it is sent."""

    async def refuse(sender: PeerId, request: Message) -> Message:
        return Message({"status": "closed", "reason": "it is over"})

    peer.transport.serve(METHOD, refuse, max_body_bytes=1 << 20)


def test_one_that_says_every_step_is_over_ends_none() -> None:
    async def scenario() -> None:
        async with hop_line() as line:
            says_closed(line.peers[1][0])
            for number in range(4):
                await line.send(number)
            assert line.peers[1][1].counters.microbatches == 4

    asyncio.run(scenario())


@pytest.mark.parametrize("num_there", [1, 2])
def test_what_all_who_are_there_say_is_believed_at_once(num_there: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downstream, "CLOSED_S", 60.0)

    async def scenario() -> None:
        async with hop_line() as line:
            if num_there == 1:
                await line.kill(line.peers[1][1])
            for peer in line.peers[1]:
                says_closed(peer)
            async with asyncio.timeout(30.0):
                with pytest.raises(Refused, match="it is over"):
                    await line.send(0)

    asyncio.run(scenario())
