"""What the end of a daemon with several peers comes to, by how each of them ended."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from peer.program.lives import Lives
from swarm.core.errors import LocalError


class Peer(SimpleNamespace):
    name = "GPU"
    has_ended = False


class Desk:
    """Of peers of which the first lives until it is told to stop, or the run is over, and the second breaks at once."""

    def __init__(self) -> None:
        self.peers = [Peer(), Peer()]
        self.run_is_over, self.one_has_ended = asyncio.Event(), asyncio.Event()

    async def watch(self) -> None:
        await asyncio.Event().wait()

    def ended(self, peer: Peer, why: str) -> None:
        peer.has_ended = True
        self.one_has_ended.set()


class Life:
    def __init__(self, desk: Desk, peer: Peer, *_: Any, **given: Any) -> None:
        self._desk, self._is_first = desk, peer is desk.peers[0]

    async def run(self, stop: asyncio.Event) -> None:
        if not self._is_first:
            raise LocalError("broke")
        waits = [asyncio.ensure_future(event.wait()) for event in (stop, self._desk.run_is_over)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()


def ended_by(monkeypatch: pytest.MonkeyPatch, end: Callable[[Desk, asyncio.Event], None]) -> list[str]:
    """What was said of the peers; raises what the daemon's end raises."""
    monkeypatch.setattr("peer.program.lives.Life", Life)

    async def main() -> list[str]:
        desk, stop, said = Desk(), asyncio.Event(), list[str]()
        given: Any = (desk, "host", (), None, stop)
        lives = Lives(*given, on_run=None, say=said.append, rng=None)  # type: ignore[arg-type]
        living = asyncio.ensure_future(lives.run())
        await desk.one_has_ended.wait()
        end(desk, stop)
        await living
        return said

    return asyncio.run(main())


def test_a_daemon_that_is_told_to_leave_does_so_though_one_of_its_peers_had_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a service that is started again after failures comes back, against its owner's word."""
    said = ended_by(monkeypatch, lambda desk, stop: stop.set())
    assert said == ["GPU: has ended, and the others go on: broke"]


def test_where_nobody_told_the_others_to_leave_the_failure_is_the_daemons(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LocalError, match="broke"):
        ended_by(monkeypatch, lambda desk, stop: desk.run_is_over.set())
