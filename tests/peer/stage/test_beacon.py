"""A peer and the host's words: asked for, heard from others, never made up; while the host is away nothing is drawn."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peer.round.stage_steps import StageSteps
from peer.stage.beacon import FURTHEST_AHEAD, StageBeacon
from peer.stage.events import Events, VersionTurned
from swarm.core.audit.chance import HostWord
from swarm.core.errors import RemoteError, TransientError
from swarm.core.ids import PeerId, Step
from swarm.core.round.contribution import Roster
from swarm.core.state.stage_chain import StageChain
from swarm.network.transport import Message
from tests.swarm.core.audit.chances import HOST_CHAIN, chain_of, link_of, said_by, ticket_of
from tests.swarm.core.round.round_world import run_key

ME, HOST = PeerId("me"), PeerId("host")


class Line:
    """A transport to a host that has spoken of so many versions; None: it is away."""

    def __init__(self) -> None:
        self.spoken: int | None = None
        self.asked = 0

    async def call(self, peer: PeerId, method: str, request: Message, **limits: Any) -> Message:
        self.asked += 1
        assert (peer, method) == (HOST, "beacon")
        if self.spoken is None:
            raise TransientError("away")
        return Message({"said": said_by(HOST_CHAIN, self.spoken).to_value()})


class Place:
    """A peer at a stage."""

    def __init__(self) -> None:
        self.line, self.events = Line(), Events()
        settings = SimpleNamespace(deadlines=SimpleNamespace(call_s=1.0))
        context = SimpleNamespace(me=ME, events=self.events, transport=self.line, settings=settings)
        self.steps = SimpleNamespace(context=context, chain=self.chain(0), version=0)
        ticket = ticket_of(ME, run_key(), run_id="run", stage=1)
        self.beacon = StageBeacon(cast(StageSteps, self.steps), ticket, chain_of(ME), HOST)
        self.events.seal()

    def chain(self, version: int, *, said: int = 0, known: bool = True, lineage: bytes = bytes(32)) -> StageChain:
        basis = SimpleNamespace(said=said_by(HOST_CHAIN, said), link_of={ME: link_of(ME, 1)} if known else {})
        return cast(StageChain, SimpleNamespace(stage=1, version=version, lineage=lineage, basis=basis))

    def turn(self, version: int, **given: Any) -> None:
        self.steps.chain, self.steps.version = self.chain(version, **given), version
        self.events.publish(VersionTurned(self.steps.chain, is_next=True))


def roster(step: int) -> Roster:
    return Roster("run", cast(Any, 1), Step(step), 0, 0, ME, bytes(32), (ME,), (), (), (), (), "")


def test_while_the_host_is_away_contributions_go_on_and_nothing_is_drawn_until_it_is_back() -> None:
    place = Place()

    async def play() -> None:
        running = asyncio.ensure_future(place.beacon.run())
        for version in range(1, 30):
            place.turn(version)
            chance = place.beacon.chance(place.steps.chain)
            assert (chance.value, chance.said) == (chain_of(ME).reveal(version - 2), said_by(HOST_CHAIN, 0))
            await asyncio.sleep(0)
        with pytest.raises(TransientError, match="has not spoken of step 3"):
            place.beacon.of(roster(3))
        with pytest.raises(TransientError, match="has not spoken"):
            await place.beacon.spoken(Step(3), timeout_s=0.02)
        place.line.spoken = 29  # back: one word tells all that was missed
        await place.beacon.spoken(Step(28), timeout_s=5.0)
        assert len({place.beacon.of(roster(step)) for step in range(29)}) == 29
        assert place.beacon.chance(place.steps.chain).said == said_by(HOST_CHAIN, 29)
        asked = place.line.asked
        await asyncio.sleep(0.3)
        assert place.line.asked == asked, "it is asked for what is not known alone"
        running.cancel()

    asyncio.run(play())


def test_a_roster_brings_the_word_too_and_a_peer_never_says_more_than_its_step_allows() -> None:
    place = Place()
    place.turn(5, said=4)
    assert place.beacon.said == said_by(HOST_CHAIN, 4)
    place.beacon.hear(said_by(HOST_CHAIN, 9))
    assert place.beacon.chance(place.steps.chain).said == said_by(HOST_CHAIN, 5)
    place.beacon.hear(said_by(HOST_CHAIN, 2))
    assert place.beacon.said == said_by(HOST_CHAIN, 9)


def test_a_word_that_is_not_the_host_s_is_refused_and_one_far_ahead_not_even_hashed() -> None:
    place = Place()
    with pytest.raises(RemoteError, match="not on the host's chain"):
        place.beacon.hear(HostWord(3, bytes(32)))
    with pytest.raises(TransientError, match="this stage is at 0"):
        place.beacon.hear(HostWord(FURTHEST_AHEAD + 1, bytes(32)))
    assert place.beacon.said == said_by(HOST_CHAIN, 0)


def test_a_ticket_is_shown_where_nothing_of_the_chain_is_certified() -> None:
    place = Place()
    assert place.beacon.chance(place.chain(3)).ticket is None
    shown = place.beacon.chance(place.chain(3, known=False)).ticket
    assert shown is not None
    assert shown.chain_end == chain_of(ME).end


def test_where_the_stage_begins_again_other_words_count() -> None:
    place = Place()
    place.turn(5, said=5)
    place.turn(9, said=0, lineage=b"2" * 32)
    assert place.beacon.said == said_by(HOST_CHAIN, 0)
