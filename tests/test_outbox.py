"""This is where bulk messages wait for their turn: order, what travels together, how much is under way."""

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

from peer.outbox import FIRST_PACE, MESSAGE_BYTES, MOST_LANES, SHORTEST_BYTES, Outbox, Pace, Parcel
from swarm.core.ids import PeerId

ONE, OTHER = PeerId("one"), PeerId("other")
STEP: Any = SimpleNamespace()


class Wire:
    """Takes what is sent and holds it until it is let through."""

    def __init__(self) -> None:
        self.sent: list[tuple[PeerId, list[Parcel]]] = []
        self.tasks: list[asyncio.Future[None]] = []
        self.open = asyncio.Event()
        self.outbox = Outbox(self.spawn, self.send)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.ensure_future(work))

    async def send(self, peer: PeerId, parcels: list[Parcel]) -> None:
        self.sent.append((peer, parcels))
        await self.open.wait()

    async def finished(self) -> None:
        self.open.set()
        await asyncio.gather(*self.tasks)


def parcel(number: int, num_bytes: int = 10, *, kind: str = "reduced", state: Any = STEP) -> Parcel:
    return Parcel(state, kind, {"number": number}, bytes(num_bytes))


def numbers(parcels: list[Parcel]) -> list[Any]:
    return [parcel.head["number"] for parcel in parcels]


def test_what_waits_together_goes_together_in_order_and_within_the_limit() -> None:
    async def main() -> None:
        wire = Wire()
        for number in range(10):
            wire.outbox.put(ONE, parcel(number, FIRST_PACE.message_bytes // 4))
        await wire.finished()
        assert [numbers(parcels) for _, parcels in wire.sent] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]

    asyncio.run(main())


def test_parcel_over_the_limit_goes_alone() -> None:
    async def main() -> None:
        wire = Wire()
        for number, size in enumerate((1, MESSAGE_BYTES + 1, 1)):
            wire.outbox.put(ONE, parcel(number, size))
        await wire.finished()
        assert [numbers(parcels) for _, parcels in wire.sent] == [[0], [1], [2]]

    asyncio.run(main())


def test_other_kinds_and_other_steps_do_not_share_a_message() -> None:
    async def main() -> None:
        wire = Wire()
        wire.outbox.put(ONE, parcel(0))
        wire.outbox.put(ONE, parcel(1, kind="contributed"))
        wire.outbox.put(ONE, parcel(2, kind="contributed", state=SimpleNamespace()))
        await wire.finished()
        assert [numbers(parcels) for _, parcels in wire.sent] == [[0], [1], [2]]

    asyncio.run(main())


def test_few_are_under_way_to_each_peer_and_none_waits_for_another_peer() -> None:
    async def main() -> None:
        wire = Wire()
        for peer in (ONE, OTHER):
            for number in range(20):
                wire.outbox.put(peer, parcel(number, MESSAGE_BYTES))
        await asyncio.sleep(0)
        assert [peer for peer, _ in wire.sent] == [ONE] * FIRST_PACE.lanes + [OTHER] * FIRST_PACE.lanes
        await wire.finished()
        for peer in (ONE, OTHER):
            assert [numbers(parcels)[0] for to, parcels in wire.sent if to == peer] == list(range(20))

    asyncio.run(main())


def test_lane_that_was_cancelled_is_free_again() -> None:
    async def main() -> None:
        wire = Wire()
        for number in range(FIRST_PACE.lanes + 1):
            wire.outbox.put(ONE, parcel(number, MESSAGE_BYTES))
        await asyncio.sleep(0)
        for task in wire.tasks:
            task.cancel()
        await asyncio.gather(*wire.tasks, return_exceptions=True)
        wire.tasks.clear()
        wire.outbox.put(ONE, parcel(99))
        await wire.finished()
        assert numbers(wire.sent[-1][1]) == [99]

    asyncio.run(main())


def test_messages_are_long_on_a_fast_line_and_many_on_a_slow_one() -> None:
    assert Pace.of(1e9) == (MESSAGE_BYTES, 2)
    assert Pace.of(2.5e6) == (SHORTEST_BYTES, MOST_LANES)
    assert Pace.of(1.0) == (SHORTEST_BYTES, MOST_LANES)
    for rate in (1e5, 1e6, 5e6, 1e7, 2e7, 1e8):
        size, lanes = Pace.of(rate)
        assert SHORTEST_BYTES <= size <= MESSAGE_BYTES
        assert 2 <= lanes <= MOST_LANES


def test_a_line_changes_its_pace_once_it_has_been_measured() -> None:
    async def main() -> None:
        wire = Wire()
        for number in range(8):
            wire.outbox.put(ONE, parcel(number, SHORTEST_BYTES))
        await wire.finished()  # at once: a fast line
        for number in range(8, 16):
            wire.outbox.put(ONE, parcel(number, SHORTEST_BYTES))
        await wire.finished()
        assert [numbers(parcels) for _, parcels in wire.sent[4:]] == [[*range(8, 16)]]
        wire.outbox.keep(set())
        wire.outbox.put(ONE, parcel(16, SHORTEST_BYTES))
        wire.outbox.put(ONE, parcel(17, SHORTEST_BYTES))
        wire.outbox.put(ONE, parcel(18, SHORTEST_BYTES))
        await wire.finished()
        assert [numbers(parcels) for _, parcels in wire.sent[5:]] == [[16, 17], [18]]

    asyncio.run(main())
