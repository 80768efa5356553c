"""Who tells of addresses where nobody answers keeps nobody from those who are there."""

import asyncio
import random
from typing import Any

import pytest

from benchmarks.red_team.virtual_time import run_virtually
from peer.state.donors import LONGEST_S, donors_of
from swarm.core.errors import TransientError
from swarm.core.ids import PeerId
from swarm.network.memory import MemoryNetwork
from tests.swarm_in_process import identity_of

TOPIC, DIAL_S = "stage", 10.0
ME, HONEST = identity_of(0), [identity_of(1), identity_of(2)]


class Dialling:
    """A transport that is connected at once to who is there; nobody answers for the others."""

    peer_id = ME.peer_id

    def __init__(self, there: set[PeerId]) -> None:
        self._there = there

    async def connect(self, peer_id: PeerId, addresses: list[str]) -> None:
        if peer_id not in self._there:
            await asyncio.sleep(DIAL_S)
            raise TransientError("nobody answers")


@pytest.mark.parametrize(("num_silent", "soon_s", "most_s"), [(60, 1.0, 1.0), (250, None, 4 * DIAL_S)])
def test_silent_peers_in_the_directory_hold_nobody_up(num_silent: int, soon_s: float | None, most_s: float) -> None:
    async def main() -> tuple[list[PeerId], float]:
        network = MemoryNetwork(random.Random(0))
        silent = [identity_of(number) for number in range(3, 3 + num_silent)]
        for identity in (*HONEST, *silent):
            await network.directory(identity).publish(TOPIC, {"addresses": []}, ttl_s=300.0)
        there: Any = Dialling({one.peer_id for one in HONEST})
        began = asyncio.get_running_loop().time()
        found = await donors_of(network.directory(ME), there, TOPIC, random.Random(0), soon_s=soon_s)
        return found, asyncio.get_running_loop().time() - began

    found, took_s = run_virtually(main, rng=random.Random(0), on_unhandled=lambda context: None)
    assert set(found[:2]) == {one.peer_id for one in HONEST}
    assert len(found) == 2 + num_silent
    assert took_s <= most_s + 0.1


@pytest.mark.parametrize("num_silent", [0, 3, 250])
def test_where_nobody_is_there_all_are_named_after_a_while(num_silent: int) -> None:
    async def main() -> list[PeerId]:
        began = asyncio.get_running_loop().time()
        network = MemoryNetwork(random.Random(0))
        for number in range(num_silent):
            await network.directory(identity_of(3 + number)).publish(TOPIC, {"addresses": []}, ttl_s=300.0)
        nobody: Any = Dialling(set())
        found = await donors_of(network.directory(ME), nobody, TOPIC, random.Random(0), soon_s=1.0)
        assert asyncio.get_running_loop().time() - began <= 1.0 + LONGEST_S + 0.1
        return found

    assert len(run_virtually(main, rng=random.Random(0), on_unhandled=lambda context: None)) == num_silent
