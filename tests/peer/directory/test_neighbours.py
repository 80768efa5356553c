"""Whoever watches its neighbours asks them now and then, however soon they answer."""

import asyncio
import math
import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from benchmarks.red_team.virtual_time import run_virtually
from peer.directory.neighbours import (
    LONGEST_LEASE_S,
    LONGEST_LOOKUP_S,
    LOOKUP_EVERY_S,
    WATCH,
    WATCH_S,
    Neighbours,
    stage_topic,
)
from peer.round.presence import Presence
from peer.stage.events import Events, PeerLost, PeersChanged
from swarm.core.errors import TransientError
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
        return Message({"serves": True})

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
        return Message({"serves": True})

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


def test_who_has_left_says_so_to_all_who_watch_it() -> None:
    lost: list[PeerLost] = []

    async def main() -> None:
        network, loop = MemoryNetwork(random.Random(0)), asyncio.get_running_loop()
        both = []
        for identity, hear in ((ME, lost.append), (OTHER, lambda event: None)):
            events = Events()
            events.hear(PeerLost, hear)
            events.seal()
            context: Any = SimpleNamespace(
                settings=small_settings(1), run_id=RUN_ID, transport=network.transport(identity), events=events
            )
            one = Neighbours(
                context,
                network.directory(identity),
                STAGE,
                lambda: Version(0),
                lambda peer, fields: True,
                dict,
                lambda: None,
            )
            one.serve()
            both.append(one)
        watching = [asyncio.ensure_future(one.run()) for one in both]
        await asyncio.sleep(3 * LOOKUP_EVERY_S)
        assert both[0].of_stage(STAGE) == {OTHER.peer_id}
        asked_at = loop.time()
        both[1].gone.set()
        while not lost:
            await asyncio.sleep(0.01)
            assert loop.time() < asked_at + 1.0
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)

    run_virtually(main, rng=random.Random(0), on_unhandled=lambda context: None)
    assert lost[0] == PeerLost(OTHER.peer_id, says_so=True)


def test_who_says_that_it_has_left_is_not_asked_whether_it_is_there() -> None:
    """It answers that for a moment, and then a call to it may hang."""

    @dataclass
    class Told(Presence):
        asked: list[PeerId]
        gone: list[PeerId]

        def __post_init__(self) -> None:
            tasks = SimpleNamespace(spawn=asyncio.ensure_future)
            steps: Any = SimpleNamespace(context=SimpleNamespace(tasks=tasks), open={0: None})
            super().__init__(steps)

        async def is_gone(self, peer: PeerId) -> bool:
            self.asked.append(peer)
            return False

        def unreachable(self, state: Any, peer: PeerId) -> None:
            self.gone.append(peer)

    async def main() -> None:
        presence = Told([], [])
        presence.lost(PeerLost(ME.peer_id))
        presence.lost(PeerLost(OTHER.peer_id, says_so=True))
        await asyncio.sleep(0.1)
        assert (presence.asked, presence.gone) == ([ME.peer_id], [OTHER.peer_id])

    run_virtually(main, rng=random.Random(0), on_unhandled=lambda context: None)


@dataclass
class Minute:
    """Of a peer of the first of two stages, that is told of one other peer."""

    usual_s: float | None
    stage: int = 1
    """Of the other."""
    is_there: bool = True
    serves_from_s: float = 0.0
    serves_until_s: float = math.inf
    """When the other begins to answer, and ends."""
    then_usual_s: float | None = None
    """After half of it."""
    looks: int = 0
    """For peers of its stage."""
    leases: list[float] = field(default_factory=list)
    """Of its own record, each time that it was published."""
    published_at: list[float] = field(default_factory=list)
    found_at: float | None = None
    """When the other was live here."""

    async def lookup(self, topic: str) -> dict[PeerId, Any]:
        is_its = topic == stage_topic(RUN_ID, self.stage)
        self.looks += is_its
        return {OTHER.peer_id: {"addresses": [], "version": 0}} if self.is_there and is_its else {}

    async def publish(self, topic: str, fields: Any, *, ttl_s: float) -> None:
        self.leases.append(ttl_s)
        self.published_at.append(asyncio.get_running_loop().time())

    async def _on_watch(self, sender: PeerId, request: Message) -> Message:
        loop = asyncio.get_running_loop()
        if not self.serves_from_s <= loop.time() < self.serves_until_s:
            raise TransientError("not now")
        if request.meta["waits"]:
            await asyncio.sleep(min(WATCH_S, self.serves_until_s - loop.time()))
        return Message({"serves": True})

    async def _main(self) -> None:
        network, loop = MemoryNetwork(random.Random(0)), asyncio.get_running_loop()
        mine, began = network.transport(ME), loop.time()
        self.serves_from_s, self.serves_until_s = began + self.serves_from_s, began + self.serves_until_s
        network.transport(OTHER).serve(WATCH, self._on_watch, max_body_bytes=0)
        events = Events()
        events.hear(PeersChanged, lambda event: setattr(self, "found_at", self.found_at or loop.time() - began))
        events.seal()
        context: Any = SimpleNamespace(settings=small_settings(2), run_id=RUN_ID, transport=mine, events=events)
        directory: Any = self
        neighbours = Neighbours(
            context, directory, STAGE, lambda: Version(0), lambda peer, fields: True, dict, lambda: self.usual_s
        )
        watching = asyncio.ensure_future(neighbours.run())
        await asyncio.sleep(30.0)
        self.usual_s = self.usual_s if self.then_usual_s is None else self.then_usual_s
        await asyncio.sleep(30.0)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    def passes(self) -> "Minute":
        run_virtually(self._main, rng=random.Random(0), on_unhandled=lambda context: None)
        return self


def test_long_steps_are_looked_up_for_seldom_unless_nobody_is_there() -> None:
    assert Minute(None).passes().looks >= 55
    assert Minute(400.0).passes().looks <= 60.0 / LONGEST_LOOKUP_S + 2
    assert Minute(400.0, is_there=False).passes().looks >= 55


def test_records_are_published_seldom_where_steps_are_long_and_live_for_longer() -> None:
    short, long = Minute(None).passes().leases, Minute(400.0).passes().leases
    lease_s = small_settings(2).deadlines.lease_s
    assert {*short} == {lease_s}
    assert len(short) >= 60.0 / (lease_s / 3)
    assert {*long} == {LONGEST_LEASE_S}
    assert len(long) <= 60.0 / (LONGEST_LEASE_S / 3) + 1


def test_a_record_never_expires_before_the_one_that_it_takes_the_place_of() -> None:
    """Of two the one that expires later counts, and what the newer says would not be heard."""
    minute = Minute(400.0, then_usual_s=1.0).passes()
    ends = [at + lease_s for at, lease_s in zip(minute.published_at, minute.leases, strict=True)]
    assert min(minute.leases) == small_settings(2).deadlines.lease_s < LONGEST_LEASE_S
    assert ends == sorted(ends)


def test_who_has_lost_all_of_its_stage_looks_for_it_at_once() -> None:
    alone = Minute(400.0, stage=0, serves_until_s=20.0).passes()
    assert 7 <= alone.looks <= 12, "more and more seldom: nobody may come any more"
    assert Minute(400.0, stage=0, is_there=False).passes().looks <= 60.0 / LONGEST_LOOKUP_S + 1


def test_who_does_not_answer_is_tried_again_between_two_looks() -> None:
    minute = Minute(400.0, stage=0, serves_from_s=2.5).passes()
    assert minute.looks <= 60.0 / LONGEST_LOOKUP_S + 1
    assert minute.found_at is not None
    assert minute.found_at < LONGEST_LOOKUP_S / 2
