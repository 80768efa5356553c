"""A meeting of two peers' dials leaves no task behind, whether somebody came or not."""

import asyncio
import socket
from collections.abc import Coroutine
from typing import Any

import pytest

from swarm.network.punch.ports import LocalPort
from swarm.network.punch.puncher import _Meeting
from swarm.network.punch.seen import Endpoint


class Port(LocalPort):
    """One that nobody is met by, but for whoever is there at once."""

    def __init__(self, met: socket.socket | None) -> None:
        self._met = met

    async def meet(self, endpoint: Endpoint) -> socket.socket:
        if self._met is None:
            await asyncio.Event().wait()
        assert self._met is not None
        return self._met

    async def accept(self, host: str) -> socket.socket:
        await asyncio.Event().wait()
        raise AssertionError


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("comes", [True, False])
def test_all_tasks_of_a_meeting_have_ended_with_it(near: bool, comes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.network.punch.puncher.DIAL_S", 0.05)
    begun: list[asyncio.Task[Any]] = []

    def start(work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        begun.append(asyncio.create_task(work))
        return begun[-1]

    async def met(connection: socket.socket) -> bool:
        """It is kept."""
        return True

    async def main() -> None:
        one, other = socket.socketpair()
        with one, other:
            ports = [Port(one if comes else None), Port(None)]
            targets = [[Endpoint("127.0.0.1", 4000)], [Endpoint("127.0.0.1", 4001)]]
            ended: list[None] = []
            await _Meeting(ports, targets, met, start, dialled=lambda: ended.append(None), near=near).run()
            assert begun
            assert len(ended) == 1
            assert all(task.done() for task in begun)

    asyncio.run(main())


def test_who_is_slow_to_greet_holds_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.network.punch.puncher.DIAL_S", 0.05)
    monkeypatch.setattr("swarm.network.punch.puncher.GREET_S", 0.5)
    seen: list[str] = []

    async def met(connection: socket.socket) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            seen.append("greeted")

    async def main() -> None:
        one, other = socket.socketpair()
        with one, other:
            targets = [[Endpoint("127.0.0.1", 4000)]]
            start = asyncio.create_task
            await _Meeting([Port(one)], targets, met, start, dialled=lambda: seen.append("dialled"), near=False).run()

    asyncio.run(main())
    assert seen == ["dialled", "greeted"]
