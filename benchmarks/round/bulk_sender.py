"""One end of `benchmarks.homes.bulk`: it sends its peer bulk as a round does, when told to.

    python -m benchmarks.round.bulk_sender ADDRESS --way p2pd|direct --congestion NAME [--answer-ms N]

Says its peer id and addresses in a JSON line, then reads lines: the other's `{"peer_id", "addresses", "dials"}`, and
for each transfer its `{"num_bytes"}`, after which it says `{"start", "stop", "small_s", "slowest_small_s"}`. Ends
with its standard input.
"""

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import click

from peer.round.mail.outbox import OnItsWay, Outbox
from peer.round.mail.parcel import Parcel
from swarm.core.canonical import Value
from swarm.core.errors import TransientError
from swarm.core.ids import PeerId
from swarm.core.transfers import MESSAGE_BYTES
from swarm.identity.key import Identity
from swarm.network.bulk import direct
from swarm.network.loop import new_event_loop
from swarm.network.p2pd.p2p import P2PSettings, P2PTransport
from swarm.network.transport import Message
from verification.round.papers import Bytes

PART_BYTES = 1 << 18
"""A part in int8."""
SMALL_EVERY_S = 0.3
CALL_S = 120.0
CONNECT_S = 20.0


async def run(address: str, way: str, answer_s: float) -> None:
    settings = P2PSettings(listen=(f"/ip4/{address}/tcp/0",), direct_port=0 if way == "direct" else None)
    transport = await P2PTransport.create(Identity.generate(), settings)
    try:

        async def take(_: PeerId, request: Message) -> Message:
            await asyncio.sleep(answer_s)  # hashing and checking a message
            return Message()

        transport.serve("take", take, max_body_bytes=MESSAGE_BYTES)
        _say({"peer_id": transport.peer_id, "addresses": transport.addresses()})
        other = await _told()
        assert other is not None, "it is told where its peer is"
        peer_id = PeerId(other["peer_id"])
        if other["dials"]:
            await transport.connect(peer_id, other["addresses"])
        await _until_connected(transport, peer_id)
        sender = Sender(transport, peer_id)
        while (asked := await _told()) is not None:
            _say(await sender.transfer(asked["num_bytes"]))
    finally:
        await transport.close()


class Sender:
    """Sends one peer bulk, through one outbox: it learns the line as that of a stage's rounds does."""

    def __init__(self, transport: P2PTransport, peer_id: PeerId) -> None:
        self._transport = transport
        self._peer_id = peer_id
        self._sending: list[asyncio.Task[None]] = []
        self._outbox = Outbox(lambda work: self._sending.append(asyncio.ensure_future(work)), self._send)

    async def transfer(self, num_bytes: int) -> dict[str, float]:
        """How it went: from the first byte put to the last message answered; small calls beside it."""
        small_s: list[float] = []
        talking = asyncio.create_task(self._talk(small_s))
        head: dict[str, Value] = {}
        state: Any = None  # of no step
        start = time.time()
        for _ in range(num_bytes // PART_BYTES):
            self._outbox.put(self._peer_id, Parcel(state, "contributed", head, bytes(PART_BYTES)))
        while self._sending:  # what is under way begins others, for fragments of what it has cut
            await self._sending.pop()
        stop = time.time()
        talking.cancel()
        await asyncio.gather(talking, return_exceptions=True)
        usual_s = statistics.median(small_s) if small_s else 0.0
        return {"start": start, "stop": stop, "small_s": usual_s, "slowest_small_s": max(small_s, default=0.0)}

    async def _send(self, _: PeerId, parcels: list[Parcel], way: OnItsWay) -> int:
        await self._call(*(parcel.body for parcel in parcels), on_left=way.left)
        return sum(len(parcel.body) for parcel in parcels)

    async def _talk(self, took_s: list[float]) -> None:
        while True:
            await asyncio.sleep(SMALL_EVERY_S)
            began = time.monotonic()
            await self._call(bytes(200))
            took_s.append(time.monotonic() - began)

    async def _call(self, *bodies: Bytes, on_left: Callable[[], None] | None = None) -> None:
        message = Message(more=bodies, on_left=on_left)
        await self._transport.call(self._peer_id, "take", message, timeout_s=CALL_S, max_body_bytes=0)


async def _until_connected(transport: P2PTransport, peer_id: PeerId) -> None:
    async with asyncio.timeout(CONNECT_S):
        while True:
            if peer_id in await transport.connected_peers():
                return
            await asyncio.sleep(0.05)


async def _told() -> Any:
    line = await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    return json.loads(line) if line else None


def _say(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


@click.command()
@click.argument("address")
@click.option("--way", type=click.Choice(["p2pd", "direct"]), required=True)
@click.option("--congestion", required=True, help="TCP's control of direct streams.")
@click.option("--answer-ms", type=float, default=10.0, show_default=True, help="Until a message is answered.")
def main(address: str, way: str, congestion: str, answer_ms: float) -> None:
    direct.CONGESTION = congestion.encode()
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(run(address, way, answer_ms / 1000))
    except TransientError as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
