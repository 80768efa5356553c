"""Whoever watches its neighbours asks them now and then, however soon they answer."""

import asyncio
import random
from types import SimpleNamespace
from typing import Any

from benchmarks.red_team.virtual_time import run_virtually
from peer.directory.neighbours import LONGEST_LOOKUP_S, LOOKUP_EVERY_S, WATCH, WATCH_S, Neighbours, stage_topic
from peer.stage.events import Events
from swarm.core.ids import PeerId, StageIndex, Version
from swarm.network.memory import MemoryNetwork
from swarm.network.transport import Message
from tests.swarm_in_process import identity_of
from tests.verification.exhibits import RUN_ID, small_settings

STAGE = StageIndex(0)
ME, OTHER = identity_of(0), identity_of(1)
FOR_S = WATCH_S


def test_a_peer_that_answers_at_once_is_watched_as_often_as_others_are_looked_for() -> None:
    asked_at: list[float] = []

    async def on_watch(sender: PeerId, request: Message) -> Message:
        loop = asyncio.get_running_loop()
        asked_at.append(loop.time())
        if len(asked_at) > 10 * FOR_S:
            loop.stop()
        return Message()

    async def main() -> None:
        network = MemoryNetwork(random.Random(0))
        mine, other = network.transport(ME), network.transport(OTHER)
        other.serve(WATCH, on_watch, max_body_bytes=0)
        addresses: list[Any] = [*other.addresses()]
        await network.directory(OTHER).publish(
            stage_topic(RUN_ID, STAGE), {"addresses": addresses, "version": 0}, ttl_s=2 * FOR_S
        )
        events = Events()
        events.seal()
        context: Any = SimpleNamespace(settings=small_settings(1), run_id=RUN_ID, transport=mine, events=events)
        neighbours = Neighbours(
            context, network.directory(ME), STAGE, lambda: Version(0), lambda peer, fields: True, dict, lambda: None
        )
        watching = asyncio.ensure_future(neighbours.run())
        await asyncio.sleep(FOR_S)
        assert neighbours.of_stage(STAGE) == {OTHER.peer_id}
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    run_virtually(main, rng=random.Random(0), on_unhandled=lambda context: None)
    assert len(asked_at) <= FOR_S / LOOKUP_EVERY_S + 2


def test_records_of_peers_that_are_nowhere_keep_nobody_from_being_watched() -> None:
    """As many as are watched at most stand in the directory, for as long as somebody tells it so."""

    async def on_watch(sender: PeerId, request: Message) -> Message:
        return Message()

    async def main() -> set[PeerId]:
        network = MemoryNetwork(random.Random(0))
        mine, settings = network.transport(ME), small_settings(1)
        nowhere = [identity_of(2 + number) for number in range(settings.limits.max_peers_per_stage)]
        topic, lives_s = stage_topic(RUN_ID, STAGE), 300.0
        for identity in nowhere:
            await network.directory(identity).publish(topic, {"addresses": [], "version": 0}, ttl_s=lives_s)
        events = Events()
        events.seal()
        context: Any = SimpleNamespace(settings=settings, run_id=RUN_ID, transport=mine, events=events)
        neighbours = Neighbours(
            context, network.directory(ME), STAGE, lambda: Version(0), lambda peer, fields: True, dict, lambda: None
        )
        watching = asyncio.ensure_future(neighbours.run())
        await asyncio.sleep(2 * LOOKUP_EVERY_S)
        network.transport(OTHER).serve(WATCH, on_watch, max_body_bytes=0)
        await network.directory(OTHER).publish(topic, {"addresses": [], "version": 0}, ttl_s=lives_s)
        await asyncio.sleep(5 * LOOKUP_EVERY_S)
        found = neighbours.of_stage(STAGE)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        return found

    assert run_virtually(main, rng=random.Random(0), on_unhandled=lambda context: None) == {OTHER.peer_id}


def looked_up(usual_s: float | None, *, is_beside: bool) -> int:
    """How often in a minute, by one of two stages, of that or of the other, where a peer of either is there or not."""
    looked = 0

    class Counting:
        async def lookup(self, topic: str) -> dict[PeerId, Any]:
            nonlocal looked
            looked += topic == stage_topic(RUN_ID, 1)
            return {OTHER.peer_id: {"addresses": [], "version": 0}} if is_beside else {}

        async def publish(self, topic: str, fields: Any, *, ttl_s: float) -> None:
            pass

    async def on_watch(sender: PeerId, request: Message) -> Message:
        if request.meta["waits"]:
            await asyncio.sleep(WATCH_S)
        return Message()

    async def main() -> None:
        network = MemoryNetwork(random.Random(0))
        mine, other = network.transport(ME), network.transport(OTHER)
        other.serve(WATCH, on_watch, max_body_bytes=0)
        events = Events()
        events.seal()
        context: Any = SimpleNamespace(settings=small_settings(2), run_id=RUN_ID, transport=mine, events=events)
        directory: Any = Counting()
        neighbours = Neighbours(
            context, directory, STAGE, lambda: Version(0), lambda peer, fields: True, dict, lambda: usual_s
        )
        watching = asyncio.ensure_future(neighbours.run())
        await asyncio.sleep(60.0)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    run_virtually(main, rng=random.Random(0), on_unhandled=lambda context: None)
    return looked


def test_long_steps_are_looked_up_for_seldom_unless_nobody_is_there() -> None:
    assert looked_up(None, is_beside=True) >= 58
    assert looked_up(200.0, is_beside=True) <= 60.0 / LONGEST_LOOKUP_S + 2
    assert looked_up(200.0, is_beside=False) >= 58
