"""A message whose answer was lost is asked after before its bytes go again."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from peer.round.fragments import Fragment, Fragments
from peer.round.mail import RoundMail
from swarm.core.canonical import Value
from swarm.core.errors import UnreachableError
from swarm.core.ids import PeerId
from swarm.network.transport import Message

OTHER = PeerId("other")
BODY = bytes(1000)


class Forgetful:
    """A transport that takes messages whose answers are lost; asked whether they came, it says `status`."""

    def __init__(self, status: str) -> None:
        self.kinds: list[Value] = []
        self.carried = 0
        self._status = status

    async def call(
        self, peer_id: PeerId, method: str, request: Message, *, timeout_s: float, max_body_bytes: int
    ) -> Message:
        self.kinds.append(request.meta["kind"])
        self.carried += request.num_bytes
        if request.meta["kind"] == "held":
            return Message({"status": self._status})
        if self.kinds.count("parts") < 2:
            raise UnreachableError("no answer")
        return Message({"status": "ok"})


async def sent(transport: Forgetful) -> int:
    """How many bytes count as sent."""
    deadlines = SimpleNamespace(call_s=1.0)
    context = SimpleNamespace(transport=transport, settings=SimpleNamespace(deadlines=deadlines))
    steps: Any = SimpleNamespace(context=context, chain=SimpleNamespace(stage=0), is_open=lambda state: True)

    async def is_gone(peer: PeerId) -> bool:
        return False

    presence: Any = SimpleNamespace(is_gone=is_gone, heard_of=lambda peer: None, answered=lambda peer, within_s: None)
    logged: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    logged.set_result(None)
    state: Any = SimpleNamespace(step=3, logged=logged, sent_bytes=0)
    await RoundMail(steps, presence).send(state, OTHER, {"kind": "parts"}, (BODY,))
    return int(state.sent_bytes)


@pytest.mark.parametrize(("status", "kinds"), [("held", ["parts", "held"]), ("lacked", ["parts", "held", "parts"])])
def test_bytes_that_came_are_not_sent_again(status: str, kinds: list[str]) -> None:
    transport = Forgetful(status)
    assert asyncio.run(sent(transport)) == len(BODY)
    assert transport.kinds == kinds
    assert transport.carried == kinds.count("parts") * len(BODY)


def test_the_last_fragment_of_a_part_that_was_not_taken_is_wanted_again() -> None:
    fragments, part, body = Fragments(), b"part", memoryview(bytes(5))
    first, last = Fragment(0, 2), Fragment(1, 2)
    assert fragments.put(OTHER, part, first, body, max_bytes=10) is None
    assert fragments.holds(OTHER, part, first)
    assert not fragments.holds(OTHER, part, last)
    assert fragments.put(OTHER, part, last, body, max_bytes=10) is not None
    assert not fragments.holds(OTHER, part, last), "whoever was to take the whole did not say that it has"
