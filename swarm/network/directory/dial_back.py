"""How a peer learns whether others can dial it: whoever it asks dials it back.

p2pd has AutoNAT for that, but tells nobody what came of it, needs a quarter of a minute, and dials no private address.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Annotated

from swarm.core.errors import TransientError
from swarm.core.fields import Fields, integer_item
from swarm.core.forms import Text
from swarm.core.ids import PeerId
from swarm.core.record import Record
from swarm.network.addresses import MAX_PORT, knock
from swarm.network.p2pd.control import ControlClient, ControlError
from swarm.network.places import network_of
from swarm.network.transport import Message

DIAL_BACK = "dial_back"
"""{ports} -> {host, answers}: whether something accepts connections at one of the caller's ports."""
DIAL_S = 3.0
MAX_PORTS = 2
MAX_AT_ONCE, MAX_AT_ONCE_EACH = 8, 4
"""The latter of one small network: who never answers keeps nobody elsewhere from hearing whether it can be dialled."""
_MAX_HOST_CHARACTERS = 64


@dataclass(frozen=True)
class DialledBack(Record, kind="dial-back"):
    """What being dialled back came to."""

    host: Annotated[str, Text(_MAX_HOST_CHARACTERS)]
    """The IP address from which the other peer sees this one."""
    answers: bool


class DialBack:
    """The side that dials: the caller's own address alone, and only so many callers at a time."""

    def __init__(self, control: ControlClient) -> None:
        self._control = control
        self._under_way = Counter[str]()
        """By network."""

    async def answer(self, sender: PeerId, request: Message) -> Message:
        fields = Fields("dial-back request", request.meta)
        ports = fields.items("ports", integer_item, max_items=MAX_PORTS)
        fields.done()
        try:
            host = await self._control.remote_host(sender)
        except ControlError as error:
            raise TransientError(f"its p2pd does not answer: {error}") from error
        if host is None:
            raise TransientError("this peer is reached through a relay alone, and cannot be dialled back")
        network = network_of(host)
        if self._under_way.total() >= MAX_AT_ONCE or self._under_way[network] >= MAX_AT_ONCE_EACH:
            raise TransientError(f"busy: {self._under_way.total()} peers are being dialled back already")
        self._under_way[network] += 1
        try:
            kind = "ip6" if ":" in host else "ip4"
            tried = [f"/{kind}/{host}/tcp/{port}" for port in ports if 0 < port <= MAX_PORT]
            failed = await asyncio.gather(*(knock(address, timeout_s=DIAL_S) for address in tried))
            return Message(DialledBack(host, "" in failed).to_value())
        finally:
            self._under_way -= Counter([network])  # and forgets a network that has none
