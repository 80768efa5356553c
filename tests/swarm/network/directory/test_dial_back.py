"""Who may have itself dialled back: some at a time, and no network all of them."""

import asyncio
from typing import Any

import pytest

from swarm.core.errors import TransientError
from swarm.core.ids import PeerId
from swarm.network.directory import dial_back
from swarm.network.directory.dial_back import (
    AT_ONCE_OF_A_NETWORK,
    MAX_AT_ONCE,
    MAX_AT_ONCE_EACH,
    DialBack,
    DialBackRequest,
    DialledBack,
)
from swarm.network.transport import Message

ME = PeerId("me")


class Addresses:
    """A p2pd that knows where each peer is seen, by its name."""

    async def remote_host(self, peer_id: PeerId) -> str:
        return f"{peer_id.partition('/')[0]}"


def test_callers_of_one_network_that_never_answer_leave_places_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def knock(address: str, *, timeout_s: float) -> str:
        if "5.0.0." in address:
            await asyncio.sleep(3600)
        return ""

    monkeypatch.setattr(dial_back, "knock", knock)

    async def scenario() -> None:
        control: Any = Addresses()
        asked, request = DialBack(control, ME), Message(DialBackRequest((4000,), (), ()).to_value())
        crowd = [
            asyncio.ensure_future(asked.answer(PeerId(f"5.0.0.{number}/liar"), request))
            for number in range(1, 2 * MAX_AT_ONCE)
        ]
        done, waiting = await asyncio.wait(crowd, timeout=0.05)
        assert len(waiting) == MAX_AT_ONCE_EACH
        assert all(isinstance(one.exception(), TransientError) for one in done)
        answer = await asked.answer(PeerId("6.0.0.1/honest"), request)
        assert DialledBack.from_value(answer.meta).answers
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await asked.answer(PeerId("6.0.0.1/honest"), request)
        assert not asked._under_way

    asyncio.run(scenario())


def test_a_shared_addresss_ports_are_not_looked_through_from_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that refuses answers at once: one caller had thousands of them tried in a minute, of whoever is behind the
    same provider's router."""
    tried = []

    async def knock(address: str, *, timeout_s: float) -> str:
        tried.append(address)
        return "refused"

    monkeypatch.setattr(dial_back, "knock", knock)

    async def scenario() -> None:
        control: Any = Addresses()
        asked, refused = DialBack(control, ME), 0
        for port in range(1, 4001, 2):
            request = Message(DialBackRequest((port, port + 1), (), ()).to_value())
            try:
                await asked.answer(PeerId("5.0.0.1/liar"), request)
            except TransientError:
                refused += 1
        assert refused >= 1900
        assert len(tried) <= 2 * (AT_ONCE_OF_A_NETWORK + 30)
        assert (await asked.answer(PeerId("6.0.0.1/honest"), request)).meta

    asyncio.run(scenario())
