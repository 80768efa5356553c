"""Whose tries a peer takes part in: one of each asker, and few of those that nobody expects."""

import asyncio
import socket
from contextlib import ExitStack
from typing import Any

import pytest

from swarm.core.errors import TransientError
from swarm.core.ids import PeerId
from swarm.identity.key import Identity
from swarm.network.bulk.direct import DirectListener
from swarm.network.directory.swarm_time import swarm_time
from swarm.network.punch.ports import LocalPort
from swarm.network.punch.puncher import DIAL_S, MOST_AT_ONCE, Asked, Port, Puncher, Side, Surroundings, _Seat
from swarm.network.punch.seen import Endpoint, Judge, Seen
from swarm.network.transport import Message

HOST, ME = Identity.from_seed(b"host".ljust(32)), Identity.from_seed(b"me".ljust(32))
MEMBERS = [Identity.from_seed(f"member {number}".encode().ljust(32)) for number in range(MOST_AT_ONCE)]
STRANGERS = [Identity.from_seed(f"stranger {number}".encode().ljust(32)) for number in range(MOST_AT_ONCE)]


def seen(peer: PeerId) -> Seen:
    return Seen(HOST.peer_id, peer, "5.0.0.9", 4000, round(swarm_time.now() * 1000)).signed_by(HOST)


class NowhereToDial(LocalPort):
    """A port whose connections never come."""

    async def meet(self, endpoint: Endpoint) -> socket.socket:
        await asyncio.Event().wait()
        raise AssertionError


class SeatedPuncher(Puncher):
    """One that an onlooker has seen already."""

    async def _sit_down(self, closing: ExitStack, version: int, *, near: bool) -> _Seat:
        port = NowhereToDial("127.0.0.1")
        closing.callback(port.close)
        return _Seat([port], [(seen(ME.peer_id),)])


def puncher() -> SeatedPuncher:
    members = {member.peer_id for member in MEMBERS}
    nothing: Any = None
    around = Surroundings(
        bind_hosts={4: "127.0.0.1"},
        call=nothing,
        onlookers=nothing,
        versions=nothing,
        judge=lambda: Judge(HOST.peer_id, members.__contains__),
        is_stranger=lambda peer: peer not in members,
        answer=nothing,
        greet=nothing,
        take=nothing,
    )
    return SeatedPuncher(ME.peer_id, DirectListener(ME.peer_id, [], 0), around)


async def asks(asked: Puncher, by: Identity, number: int, *, near: bool = False) -> bool:
    """Whether the try is taken part in."""
    offer = DirectListener(by.peer_id, [], 0).offer(ME.peer_id, None, now=0.0, is_punched=True)
    side = Side(offer, (Port((seen(by.peer_id),)),), False, 0, 0)
    request = Message(Asked(number.to_bytes(16, "big"), near, side).to_value())
    try:
        await asked.asked(by.peer_id, request)
    except TransientError:
        return False
    return True


def test_one_asker_holds_one_place_and_strangers_a_fourth_of_them() -> None:
    async def scenario() -> None:
        asked = puncher()
        assert all([await asks(asked, STRANGERS[0], number) for number in range(MOST_AT_ONCE + 1)])
        took = [await asks(asked, stranger, 0) for stranger in STRANGERS[1:]]
        assert sum(took) == MOST_AT_ONCE // 4 - 1
        took = [await asks(asked, member, 0) for member in MEMBERS]
        assert sum(took) == MOST_AT_ONCE - MOST_AT_ONCE // 4
        await asked.close()

    asyncio.run(scenario())


@pytest.mark.timeout(20)
def test_an_askers_next_try_near_by_does_not_wait_for_its_earlier_one() -> None:
    async def scenario() -> None:
        asked = puncher()
        assert await asks(asked, STRANGERS[0], 0, near=True)
        assert await asks(asked, STRANGERS[0], 1, near=True)
        await asked.close()

    asyncio.run(scenario())


@pytest.mark.timeout(20)
def test_strangers_tries_near_by_keep_no_member_from_one() -> None:
    """One try at a time is at ports that are counted up: who is not expected gives its turn up to who is."""

    async def scenario() -> None:
        asked = puncher()
        assert await asks(asked, STRANGERS[0], 0, near=True)
        assert await asks(asked, MEMBERS[0], 0, near=True)
        assert not await asks(asked, STRANGERS[1], 0, near=True)
        await asked.close()

    asyncio.run(scenario())


@pytest.mark.timeout(20)
def test_a_try_that_is_dialled_has_its_place_until_nothing_is_dialled_any_more() -> None:
    """Else who goes on with each try at once has as many dialled at a time as a minute allows."""

    async def scenario() -> None:
        asked = puncher()
        took = 0
        for stranger in STRANGERS:
            if await asks(asked, stranger, 0):
                took += 1
                await asked.go(stranger.peer_id, Message({"session": bytes(16)}))
        assert took == MOST_AT_ONCE // 4
        await asyncio.sleep(DIAL_S + 0.5)
        assert await asks(asked, STRANGERS[-1], 0)
        await asked.close()

    asyncio.run(scenario())
