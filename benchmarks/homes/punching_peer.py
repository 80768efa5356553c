"""A peer of `benchmarks.homes.punching`: it does what it is told, and says what came of it.

    python -m benchmarks.homes.punching_peer ADDRESS ... [--relay]

Says `{"peer_id", "addresses"}`, with `--relay` the relay's too; then answers each line with one: `join` a host and its
relay, `connect` to a peer, `punch`, `send` it bulk, `look` how it is reached, `forget` it. Ends with its input.
"""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import click

from benchmarks.round.bulk_sender import Sender
from swarm.core.errors import TransientError
from swarm.core.ids import PeerId
from swarm.identity.key import Identity
from swarm.network.addresses import multiaddress
from swarm.network.directory.dial_back import DialledBack
from swarm.network.loop import new_event_loop
from swarm.network.p2pd.p2p import P2PSettings, P2PTransport
from swarm.network.p2pd.relay import Relay
from swarm.network.transport import Message

RELAYED_BYTES = 1 << 40
MOST_BODY_BYTES = 1 << 22
ASK_AGAIN_S = 1.0


class Told:
    """What each line has this peer do."""

    def __init__(self, transport: P2PTransport) -> None:
        self._transport = transport
        self._senders: dict[PeerId, Sender] = {}
        self._met: set[PeerId] = set()
        transport.serve("take", _taken, max_body_bytes=MOST_BODY_BYTES)

    async def join(self, order: dict[str, Any]) -> dict[str, Any]:
        transport = self._transport
        await transport.connect(PeerId(order["host"]), order["host_addresses"])
        await transport.connect(PeerId(order["relay"]), order["relay_addresses"])
        await transport.take_place(PeerId(order["relay"]))
        transport.host = PeerId(order["host"])
        transport.dialled_back = await self._dialled_back(transport.host)
        at = f"/p2p-circuit/p2p/{transport.peer_id}"
        transport.relayed = tuple(f"{address}{at}" for address in order["relay_addresses"])
        return {"addresses": [*transport.relayed], "dialled_back": transport.can_be_dialled}

    async def _dialled_back(self, host: PeerId) -> DialledBack:
        """The host dials few of one small network at a time, and all homes are of one."""
        while True:
            try:
                return await self._transport.ask_to_be_dialled(host)
            except TransientError:
                await asyncio.sleep(ASK_AGAIN_S)

    async def connect(self, order: dict[str, Any]) -> dict[str, Any]:
        await self._transport.connect(PeerId(order["peer_id"]), order["addresses"])
        return {}

    async def punch(self, order: dict[str, Any]) -> dict[str, Any]:
        began = time.monotonic()
        won = await self._transport.punch(PeerId(order["peer_id"]))
        return {"won": won, "s": time.monotonic() - began}

    async def send(self, order: dict[str, Any]) -> dict[str, Any]:
        peer_id = PeerId(order["peer_id"])
        if peer_id not in self._senders:
            self._senders[peer_id] = Sender(self._transport, peer_id)
        return {**await self._senders[peer_id].transfer(order["num_bytes"])}

    async def look(self, order: dict[str, Any]) -> dict[str, Any]:
        """By which way a peer is reached."""
        self._met.add(PeerId(order["peer_id"]))
        self._transport.expect(self._met)
        await self._transport.connected_peers()
        return {"way": self._transport.ways()[PeerId(order["peer_id"])].value}

    async def forget(self, order: dict[str, Any]) -> dict[str, Any]:
        await self._transport.disconnect(PeerId(order["peer_id"]))
        return {}


async def _taken(_: PeerId, _request: Message) -> Message:
    return Message()


async def run(addresses: Sequence[str], *, relays: bool) -> None:
    settings = P2PSettings(listen=tuple(multiaddress(address, 0) for address in addresses))
    transport = await P2PTransport.create(Identity.generate(), settings)
    relay = None
    try:
        said: dict[str, Any] = {"peer_id": transport.peer_id, "addresses": transport.addresses()}
        if relays:
            relay = await Relay.start(Identity.generate(), settings.listen, RELAYED_BYTES, transport)
            said |= {"relay": relay.peer_id, "relay_addresses": relay.addresses}
        _say(said)
        told = Told(transport)
        while (line := await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)) != "":
            order = json.loads(line)
            if order["do"] == "carried":
                assert relay is not None
                _say({"bytes": await relay.carried_bytes()})
                continue
            try:
                _say(await getattr(told, order["do"])(order))
            except TransientError as error:
                _say({"error": str(error)})
    finally:
        if relay is not None:
            await relay.stop()
        await transport.close()


def _say(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


@click.command()
@click.argument("addresses", nargs=-1, required=True)
@click.option("--relay", "relays", is_flag=True)
def main(addresses: tuple[str, ...], *, relays: bool) -> None:
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(run(addresses, relays=relays))


if __name__ == "__main__":
    main()
