"""Who catches up has a share of what the uplink was held for, and the uplink is held for what goes over it."""

import asyncio
import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.red_team.virtual_time import run_virtually
from peer.round.joiners import Joiners
from peer.round.mail.outbox import OnItsWay, Outbox
from peer.round.mail.parcel import Parcel
from peer.round.stage_steps import StageSteps
from swarm.core.ids import PeerId
from swarm.core.transfers import PIECE_BYTES, join_share

ME, NEAR, FAR, SLOW, NEWCOMER = (PeerId(name) for name in ("me", "near", "far", "slow", "newcomer"))
MEMBERS = (ME, NEAR, FAR, SLOW)
RATE, ITS_OWN = 118e3, 40e3
"""Bytes a second of the uplink, and of the slow member's line, which is too fast to be held for narrow."""
ANSWER_S = 0.1
PARCEL_BYTES, STEP_BYTES = 64 << 10, 1 << 10


class Home:
    """Sends in turns over one uplink what three members wait for, and pieces of a state to whom may have some."""

    def __init__(self) -> None:
        self.rate = RATE
        self.sent_bytes = self.joined_bytes = 0
        self.tasks: list[asyncio.Task[None]] = []
        self.outbox = Outbox(self.spawn, self.send, moved=lambda: self.sent_bytes, most=lambda: 1.5 * RATE)
        steps = SimpleNamespace(
            chain=SimpleNamespace(members=MEMBERS), joining=set(), version=3, usual_s=None, open_step=lambda _: None
        )
        self.joiners = Joiners(cast(StageSteps, steps), self.outbox)
        self._to_slow = asyncio.Lock()
        self._free_at = 0.0

    def spawn(self, work: Any) -> None:
        self.tasks.append(asyncio.ensure_future(work))

    async def send(self, peer: PeerId, parcels: list[Parcel], way: OnItsWay) -> int:
        num_bytes = sum(len(one.body) for one in parcels)
        way.leaves()
        if peer == SLOW:
            for _ in range(-(-num_bytes // STEP_BYTES)):
                async with self._to_slow:
                    await asyncio.sleep(STEP_BYTES / ITS_OWN - STEP_BYTES / self.rate)
                    await self._carry(STEP_BYTES)
        else:
            await self._carry(num_bytes)
        await asyncio.sleep(ANSWER_S)
        way.left()
        return num_bytes

    async def _carry(self, num_bytes: int) -> None:
        now = asyncio.get_running_loop().time()
        self._free_at = max(self._free_at, now) + num_bytes / self.rate
        await asyncio.sleep(self._free_at - now)
        self.sent_bytes += num_bytes

    def put(self, peer: PeerId, seconds: float, rate: float) -> None:
        for _ in range(round(seconds * rate / PARCEL_BYTES)):
            self.outbox.put(peer, Parcel(cast(Any, SimpleNamespace()), "contributed", {}, bytes(PARCEL_BYTES)))

    async def join(self) -> None:
        while True:
            async with self.joiners.turn(NEWCOMER, is_of_state=True) as place:
                place.will_go(PIECE_BYTES)
                for _ in range(PIECE_BYTES // STEP_BYTES):
                    due = asyncio.get_running_loop().time() + STEP_BYTES / place.most()
                    await self._carry(STEP_BYTES)
                    await asyncio.sleep(due - asyncio.get_running_loop().time())
                self.joined_bytes += PIECE_BYTES
            await asyncio.sleep(ANSWER_S)

    async def over(self) -> None:
        self.outbox.keep([], lambda _: False)
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


def virtually(main: Any) -> None:
    unhandled: list[object] = []
    run_virtually(main, rng=random.Random(0), on_unhandled=unhandled.append)
    assert not unhandled


async def measured_home() -> Home:
    """A line that two healthy ones have filled."""
    home = Home()
    for peer in (NEAR, FAR):
        home.put(peer, 20.0, RATE / 2)
    await asyncio.sleep(25.0)
    assert home.outbox.uplink_bytes_per_s == pytest.approx(RATE, rel=0.2)
    return home


def test_what_is_kept_from_a_newcomer_is_not_held_for_what_the_line_cannot_carry() -> None:
    """A line of 118 KB/s was held for one of 28 while a round went to one slow member, and a newcomer had a third of
    that."""

    async def main() -> None:
        home = await measured_home()
        home.put(SLOW, 300.0, ITS_OWN)
        home.spawn(home.join())
        for _ in range(60):
            await asyncio.sleep(4.0)
            assert home.outbox.uplink_bytes_per_s is not None
            assert home.outbox.uplink_bytes_per_s > 0.8 * RATE
        assert home.joined_bytes > 0.8 * join_share(len(MEMBERS)) * RATE * 240.0
        await home.over()

    virtually(main)


def test_a_line_that_has_become_slow_is_known_for_it_though_a_newcomer_would_have_more() -> None:
    async def main() -> None:
        home = await measured_home()
        home.rate = RATE / 4
        for peer in (NEAR, FAR):
            home.put(peer, 120.0, home.rate / 2)
        home.spawn(home.join())
        await asyncio.sleep(60.0)
        assert home.outbox.uplink_bytes_per_s == pytest.approx(home.rate, rel=0.3)
        await home.over()

    virtually(main)


def test_what_another_program_takes_at_once_to_carry_it_makes_no_line_fast() -> None:
    """A line of 118 KB/s was held for one of 310 once p2pd had pieces to carry to who was back from a cut."""

    async def main() -> None:
        home = await measured_home()
        home.put(SLOW, 100.0, ITS_OWN)
        home.spawn(home.join())
        for _ in range(16):
            home.sent_bytes += PIECE_BYTES
            await asyncio.sleep(5.0)
            assert home.outbox.uplink_bytes_per_s is not None
            assert home.outbox.uplink_bytes_per_s <= 1.5 * RATE
        await home.over()

    virtually(main)
