"""A peer dialled by another implementation of libp2p than p2pd, to tell whose fault a failure is.

`python -m swarm.network.p2pd.dial_check SECONDS`: a line in is an address, a JSON line out what came of dialling it;
its input's end ends it. Never imported: py-libp2p shares no process with hivemind.
"""

import ipaddress
import json
import sys
import time
from typing import Any

import multiaddr
import trio
from libp2p import new_host
from libp2p.custom_types import TProtocol
from libp2p.identity.identify.identify import ID as IDENTIFY
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.utils.varint import read_length_prefixed_protobuf

PING = TProtocol("/ipfs/ping/1.0.0")
PING_BYTES = 32
MAX_IDENTIFY_BYTES = 1 << 16


async def main(seconds: float) -> None:
    async with trio.open_nursery() as nursery:
        async for line in trio.wrap_file(sys.stdin):
            nursery.start_soon(_report, seconds, line.strip())


async def _report(seconds: float, address: str) -> None:
    found: dict[str, Any] = {"address": address, "error": ""}
    try:
        with trio.fail_after(seconds):
            found |= await _dial(address)
    except trio.TooSlowError:
        found["error"] = f"no answer within {seconds:g} s"
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is what the dial came to
        found["error"] = _cause(error)
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


async def _dial(address: str) -> dict[str, Any]:
    info = info_from_p2p_addr(multiaddr.Multiaddr(address))
    parts = address.split("/")
    # The kernel's own words first, which py-libp2p does not hand on.
    await (await trio.open_tcp_stream(parts[2], int(parts[4]))).aclose()
    host = new_host()
    async with host.run(listen_addrs=[]):
        await host.connect(info)
        stream = await host.new_stream(info.peer_id, [PING])
        started = time.perf_counter()
        sent = bytes(range(PING_BYTES))
        await stream.write(sent)
        answered = b""
        while len(answered) < PING_BYTES:
            more = await stream.read(PING_BYTES - len(answered))
            if not more:
                break
            answered += more
        ping_ms = 1000 * (time.perf_counter() - started)
        if answered != sent:
            raise ValueError("its answer to a ping differs from the ping")
        stream = await host.new_stream(info.peer_id, [IDENTIFY])
        # One read may bring half of the answer, or more than its first message.
        identified = Identify.FromString(await read_length_prefixed_protobuf(stream, max_length=MAX_IDENTIFY_BYTES))
    return {
        "ping_ms": round(ping_ms, 1),
        "agent": identified.agent_version[:100],
        "sees_us_at": _ip(identified.observed_addr),
        "protocols": [name[:100] for name in identified.protocols][:50],
    }


def _ip(observed: bytes) -> str:
    """The address from which the other side sees us; empty if it does not say."""
    try:
        parts = str(multiaddr.Multiaddr(observed)).split("/")
        return str(ipaddress.ip_address(parts[2]))
    except (ValueError, IndexError, multiaddr.exceptions.Error):
        return ""


def _cause(error: BaseException) -> str:
    while True:
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        elif error.__cause__ is not None:
            error = error.__cause__
        else:
            break
    return f"{str(error) or type(error).__name__}"[:200]


if __name__ == "__main__":
    trio.run(main, float(sys.argv[1]))
