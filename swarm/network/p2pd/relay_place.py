"""A place at a relay for a peer that cannot be dialled: others reach it through that from then on.

libp2p's circuit relay v2, the reservation. p2pd can do it too, but takes its relays at its start alone, asks only when
it believes to be behind a NAT, and does not say what a relay answered. So we ask, over a stream that it opens for us;
connections then come to p2pd. What passes a relay is sealed between the two ends.
https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md
"""

import asyncio
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from swarm.core.errors import TransientError
from swarm.core.ids import PeerId
from swarm.network.p2pd.control import ControlClient, ControlError, delimited, read_delimited
from swarm.proto import circuit_pb2

HOP = "/libp2p/circuit/relay/0.2.0/hop"
_OK = 100
_REFUSALS = {200: "it refuses", 201: "it has no place left", 202: "it does not relay for this peer"}


@dataclass(frozen=True)
class RelayPlace:
    """A place at a relay, for as long as the connection to it lasts and until `expires`."""

    expires: float
    """Seconds since 1970, by the relay's clock."""
    limit_bytes: int
    """Of one connection through the relay, each way; 0: no limit."""


async def take_place(control: ControlClient, relay: PeerId) -> RelayPlace:
    """A place at a relay that p2pd is connected to. Raises TransientError with the relay's reason. No deadline."""
    request = circuit_pb2.HopMessage(type=circuit_pb2.HopMessage.RESERVE)
    try:
        stream = await control.open_stream(relay, HOP)
        try:
            await asyncio.get_running_loop().sock_sendall(stream, delimited(request.SerializeToString()))
            answer = circuit_pb2.HopMessage.FromString(await read_delimited(stream))
        finally:
            stream.close()
    except (ControlError, EOFError, OSError, DecodeError) as error:
        raise TransientError(f"relay {relay}: {error}") from error
    if answer.status != _OK:
        raise TransientError(f"relay {relay}: {_REFUSALS.get(answer.status, f'status {answer.status}')}")
    return RelayPlace(float(answer.reservation.expire), answer.limit.data)
