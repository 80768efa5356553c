"""Members, who answers beside them and the host have most of a peer's places for calls."""

from types import SimpleNamespace
from typing import Any, cast

from peer.directory.expected import ExpectedCallers
from peer.stage.events import PeersChanged, VersionTurned
from swarm.core.ids import PeerId
from swarm.core.state.stage_chain import StageChain
from swarm.network.transport import Transport


def chain(*members: str) -> StageChain:
    return cast(StageChain, SimpleNamespace(members=members))


def test_who_is_expected_follows_the_stage_and_its_neighbours() -> None:
    told: list[set[str]] = []
    transport = cast(Transport, SimpleNamespace(expect=told.append))
    expected = ExpectedCallers(transport, PeerId("host"), chain("a", "b"))
    expected.changed(PeersChanged(1, cast(Any, frozenset({"c"}))))
    expected.turned(VersionTurned(chain("a", "b"), is_next=True))
    expected.turned(VersionTurned(chain("a", "d"), is_next=True))
    expected.changed(PeersChanged(1, frozenset()))
    assert told == [{"host", "a", "b"}, {"host", "a", "b", "c"}, {"host", "a", "c", "d"}, {"host", "a", "d"}]
