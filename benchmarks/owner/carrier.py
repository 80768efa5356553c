"""The memory of a p2pd that carries bulk for many peers: `python -m benchmarks.owner.carrier [--peers 40] [--json]`.

Bulk goes from peer to peer past p2pd where they can be dialled; here none of it does. So many peers, each with a p2pd
of its own, send one peer messages of a round's length at the same time, two each, as to a fast line. Held against what
`swarm.core.plan` reckons for that peer's p2pd with its guard: the most that the kernel counted for both, without mapped
files, looked at every fiftieth of a second.
"""

import argparse
import asyncio
import json
from collections.abc import Sequence
from typing import Any

import psutil

from peer.owner.limits import held_bytes
from swarm.core.ids import PeerId
from swarm.core.plan import p2pd_bytes
from swarm.core.transfers import LEAST_LANES, MESSAGE_BYTES
from swarm.identity.key import Identity
from swarm.network.loop import new_event_loop
from swarm.network.p2pd.p2p import P2PSettings, P2PTransport
from swarm.network.transport import Message

LOOK_EVERY_S = 0.02
CALL_S = 120.0
MIB = 1 << 20
SETTINGS = P2PSettings(listen=("/ip4/127.0.0.1/tcp/0",), direct_port=None)


async def measure(num_peers: int, rounds: int) -> dict[str, Any]:
    """Of the p2pd of a peer that so many send to."""
    one = await P2PTransport.create(Identity.generate(), SETTINGS)
    carrier, others = psutil.Process().children(recursive=True), list[P2PTransport]()
    most = 0
    try:

        async def take(sender: PeerId, request: Message) -> Message:
            return Message()

        one.serve("take", take, max_body_bytes=MESSAGE_BYTES)
        for _ in range(num_peers):
            others.append(await P2PTransport.create(Identity.generate(), SETTINGS))
            await others[-1].connect(one.peer_id, one.addresses())
        connected = sum(map(held_bytes, carrier))
        message = Message(body=bytes(MESSAGE_BYTES))
        for _ in range(rounds):
            sent = asyncio.gather(
                *(
                    other.call(one.peer_id, "take", message, timeout_s=CALL_S, max_body_bytes=0)
                    for other in others
                    for _ in range(LEAST_LANES)
                )
            )
            while not sent.done():
                most = max(most, sum(map(held_bytes, carrier)))
                await asyncio.sleep(LOOK_EVERY_S)
            await sent
    finally:
        for transport in (*others, one):
            await transport.close()
    plan = p2pd_bytes(num_peers)
    return {
        "peers": num_peers,
        "connected_bytes": connected,
        "held_bytes": most,
        "plan_bytes": plan,
        "held_share": most / plan,
    }


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line says; `arguments` in its place."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=int, action="append", help="that send to one; 2, 8 and 40 unless said")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="one peer, one round: does it run?")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.peers, options.rounds = [1], 1
    options.peers = options.peers or [2, 8, 40]
    return options


def main() -> None:
    options, found = options_of(), []
    for num_peers in options.peers:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            found.append(runner.run(measure(num_peers, options.rounds)))
    if options.json:
        print(json.dumps({"rows": found}))
        return
    for row in found:
        print(
            f"{row['peers']} peers: {row['connected_bytes'] / MIB:.0f} MiB when connected, at most "
            f"{row['held_bytes'] / MIB:.0f} while they send, {row['plan_bytes'] / MIB:.0f} reckoned "
            f"({row['held_share']:.2f})"
        )


if __name__ == "__main__":
    main()
