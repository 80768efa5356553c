"""An owner's megabits a second: nobody whom this peer does not deal with fills the line before its members."""

import asyncio
import random

from peer.directory.limited_transport import LimitedTransport
from peer.directory.line import Line
from swarm.core.ids import PeerId
from swarm.identity.key import Identity
from swarm.network.memory import MemoryNetwork
from swarm.network.transport import Message

ME, MEMBER, *STRANGERS = (Identity.from_seed(bytes([number]) * 32) for number in range(8))
PIECE, CALLS = 1 << 17, 60


def test_of_a_crowd_that_asks_for_bulk_one_answer_has_a_place_in_the_line() -> None:
    given, all_given = list[PeerId](), asyncio.Event()

    async def give(sender: PeerId, request: Message) -> Message:
        given.append(sender)
        if len(given) == CALLS:
            all_given.set()
        return Message({}, bytes(PIECE))

    async def scenario() -> None:
        network = MemoryNetwork(random.Random(0))
        limited = LimitedTransport(network.transport(ME), Line(upload_mbit=1.0))
        limited.serve("give", give, max_body_bytes=0)
        limited.expect([MEMBER.peer_id])
        strangers = [network.transport(identity) for identity in STRANGERS]

        async def ask(number: int) -> None:
            stranger = strangers[number % len(strangers)]
            await stranger.call(ME.peer_id, "give", Message(), timeout_s=600.0, max_body_bytes=PIECE)

        crowd = [asyncio.ensure_future(ask(number)) for number in range(CALLS)]
        async with asyncio.timeout(60):
            await all_given.wait()
        await asyncio.sleep(0.01)
        assert limited._up is not None
        assert limited._up.book(0) <= 2 * limited._up.takes_s(PIECE)
        for asked in crowd:
            asked.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)
        await asyncio.gather(*(transport.close() for transport in (*strangers, limited)))

    asyncio.run(scenario())
