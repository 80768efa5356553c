"""Whoever watches its neighbours asks them now and then, however soon they answer."""

import asyncio
import random
from types import SimpleNamespace
from typing import Any

from benchmarks.red_team.virtual_time import run_virtually
from peer.directory.neighbours import LOOKUP_EVERY_S, WATCH, WATCH_S, Neighbours, stage_topic
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
            context, network.directory(ME), STAGE, lambda: Version(0), lambda peer, fields: True, dict
        )
        watching = asyncio.ensure_future(neighbours.run())
        await asyncio.sleep(FOR_S)
        assert neighbours.of_stage(STAGE) == {OTHER.peer_id}
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    run_virtually(main, rng=random.Random(0), on_unhandled=lambda context: None)
    assert len(asked_at) <= FOR_S / LOOKUP_EVERY_S + 2
