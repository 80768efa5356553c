"""Bulk messages wait for their turn: order, what travels together, how much is under way."""

import asyncio
import math
import random
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.red_team.virtual_time import run_virtually
from peer.round.mail import line as line_module
from peer.round.mail import outbox
from peer.round.mail.fragments import MOST_FRAGMENTS, Fragment
from peer.round.mail.lanes import SELDOM_S, TRY_AGAIN_S
from peer.round.mail.line import UNSURE_BYTES
from peer.round.mail.meter import MOMENT_S, Meter, Turns
from peer.round.mail.outbox import AWAY_S, OnItsWay, Outbox
from peer.round.mail.pace import LEAST_SHARE, SHORTEST_BYTES, Pace
from peer.round.mail.parcel import Parcel
from swarm.core.ids import PeerId
from swarm.core.transfers import LEAST_LANES, MESSAGE_BYTES, MOST_LANES

SHORT_BYTES = 256 << 10
LEAST_BYTES = SHORT_BYTES // LEAST_SHARE
FIRST_PACE = Pace(512 << 10, 8, cuts=False)
ONE, OTHER = PeerId("one"), PeerId("other")
STEP: Any = SimpleNamespace()


class Wire:
    """Takes what is sent and holds it until it is let through."""

    def __init__(self) -> None:
        self.sent: list[tuple[PeerId, list[Parcel]]] = []
        self.ways: list[OnItsWay] = []
        self.tasks: list[asyncio.Future[None]] = []
        self.open = asyncio.Event()
        self.now = 0.0
        self.is_wanted = True
        self.away: set[PeerId] = set()
        self.outbox = Outbox(self.spawn, self.send, first_pace=FIRST_PACE)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.ensure_future(work))

    async def send(self, peer: PeerId, parcels: list[Parcel], way: OnItsWay) -> int | None:
        self.sent.append((peer, parcels))
        self.ways.append(way)
        await self.open.wait()
        if peer in self.away:
            return None
        return sum(len(one.body) for one in parcels) if self.is_wanted else 0

    async def finished(self) -> None:
        self.open.set()
        while pending := [task for task in self.tasks if not task.done()]:  # a lane may begin another
            await asyncio.gather(*pending)


def parcel(number: int, num_bytes: int = 10, *, kind: str = "reduced", state: Any = STEP) -> Parcel:
    return Parcel(state, kind, {"number": number}, bytes(num_bytes))


def is_open(state: Any) -> bool:
    return state is STEP


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


async def on_a_slow_uplink(num_parcels: int) -> Wire:
    """So many long parcels wait for one peer, or have begun to go."""
    wire = Wire()
    wire.outbox._uplink.bytes_per_s = 1e5
    for number in range(num_parcels):
        wire.outbox.put(ONE, parcel(number, FIRST_PACE.message_bytes))
    await asyncio.sleep(0)
    return wire


def test_what_is_there_and_not_answered_leaves_the_uplink_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each answer takes half a second, the few messages for which a slow uplink has room would keep it slow."""
    monkeypatch.setattr(outbox, "lanes_of", lambda rate, *, most: 2)

    async def main() -> None:
        wire = await on_a_slow_uplink(10)
        assert len(wire.sent) == 2
        wire.ways[0].left()
        wire.ways[0].left()  # it is told once more, and nothing comes of that
        await asyncio.sleep(0)
        assert len(wire.sent) == 3
        for number in range(1, FIRST_PACE.lanes):
            wire.ways[number].left()
            await asyncio.sleep(0)
        assert len(wire.sent) == FIRST_PACE.lanes, "all lanes to one peer wait for answers"
        await wire.finished()
        assert sorted(number for _, parcels in wire.sent for number in numbers(parcels)) == [*range(10)]
        assert wire.outbox._leaving == 0

    asyncio.run(main())


def test_a_message_that_goes_once_more_takes_its_share_of_the_uplink_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "lanes_of", lambda rate, *, most: 2)

    async def main() -> None:
        wire = await on_a_slow_uplink(10)
        wire.ways[0].left()
        await asyncio.sleep(0)
        assert len(wire.sent) == 3
        wire.ways[0].leaves()
        wire.ways[0].leaves()
        wire.ways[1].left()
        await asyncio.sleep(0)
        assert len(wire.sent) == 3, "the first one goes again, beside the third"
        wire.ways[0].left()
        await asyncio.sleep(0)
        assert len(wire.sent) == 4
        wire.outbox.keep((), is_open)
        wire.ways[3].leaves()
        assert wire.outbox._leaving == 0
        await wire.finished()
        assert wire.outbox._leaving == 0

    asyncio.run(main())


def test_whose_bytes_are_on_their_way_when_it_is_forgotten_counts_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "lanes_of", lambda rate, *, most: 2)

    async def main() -> None:
        wire = await on_a_slow_uplink(3)
        wire.outbox.put(OTHER, parcel(3))
        wire.outbox.keep({OTHER}, is_open)
        await asyncio.sleep(0)
        assert [peer for peer, _ in wire.sent] == [ONE, ONE, OTHER]
        for way in [*wire.ways]:
            way.left()
        assert wire.outbox._leaving == 0
        await wire.finished()
        assert wire.outbox._leaving == 0

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


def test_what_cannot_be_brought_is_sent_once_its_peer_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line was cut for a minute, and thousands of parcels were given up in the second in which no call could be made:
    the round waited four minutes for them."""
    monkeypatch.setattr(outbox, "AWAY_S", 0.0)

    async def main() -> None:
        wire = Wire()
        wire.away.add(ONE)
        most = FIRST_PACE.lanes + 12
        for number in range(most - 2):
            wire.outbox.put(ONE, parcel(number, MESSAGE_BYTES))
        await asyncio.sleep(0)
        await wire.finished()
        assert len(wire.sent) == FIRST_PACE.lanes, "no more is tried than was under way"
        wire.outbox.put(ONE, parcel(most - 2, MESSAGE_BYTES))
        wire.outbox.put(ONE, parcel(most - 1, MESSAGE_BYTES, state=SimpleNamespace()))
        wire.outbox.put(OTHER, parcel(most))
        await wire.finished()
        assert [peer for peer, _ in wire.sent[FIRST_PACE.lanes :]] == [OTHER]
        assert wire.outbox._leaving == wire.outbox._uplink.busy == 0
        wire.outbox.keep({ONE, OTHER}, is_open)
        wire.outbox.back(OTHER)
        wire.away.clear()
        wire.sent.clear()
        wire.outbox.back(ONE)
        wire.outbox.back(ONE)
        await wire.finished()
        assert sorted(number for _, parcels in wire.sent for number in numbers(parcels)) == [*range(most - 1)]
        assert all(one.may_be_there for _, parcels in wire.sent for one in parcels)
        wire.outbox.put(ONE, parcel(99))
        await wire.finished()
        (peer, (last,)) = wire.sent[-1]
        assert (peer, last.may_be_there) == (ONE, False)

    asyncio.run(main())


def test_who_answers_no_message_and_is_heard_of_all_the_time_is_tried_now_and_then() -> None:
    unhandled: list[Any] = []

    async def main() -> None:
        wire = Wire()
        wire.away.add(ONE)
        wire.open.set()
        for number in range(100):
            wire.outbox.put(ONE, parcel(number, MESSAGE_BYTES))
        num_sent = []
        for _ in range(int(10.5 * AWAY_S / 0.01)):
            wire.outbox.back(ONE)
            await asyncio.sleep(0.01)
            num_sent.append(len(wire.sent))
        assert len(set(num_sent)) == 11
        assert num_sent[-1] <= 11 * FIRST_PACE.lanes
        wire.outbox.keep((), is_open)
        await asyncio.sleep(2 * AWAY_S)
        assert len(wire.sent) == num_sent[-1], "it is no member any more"

    run_virtually(main, rng=random.Random(0), on_unhandled=unhandled.append)
    assert not unhandled


def test_what_waits_for_who_is_away_and_is_no_member_any_more_is_forgotten() -> None:
    async def main() -> None:
        wire = Wire()
        wire.away.add(ONE)
        wire.outbox.put(ONE, parcel(0))
        await wire.finished()
        wire.outbox.keep({OTHER}, is_open)
        wire.away.clear()
        wire.outbox.back(ONE)
        await wire.finished()
        assert len(wire.sent) == 1

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
    assert Pace.of(1e9) == (MESSAGE_BYTES, 2, False)
    assert Pace.of(2.5e6) == (250_000, MOST_LANES, True)
    assert Pace.of(1.0) == (SHORTEST_BYTES, 1, True)
    assert Pace.of(30_000) == (SHORTEST_BYTES, 2, True)
    assert Pace.of(62_500) == (SHORTEST_BYTES, 3, True)  # of 1 Mbit/s, to one of two: all within 1.6 s
    for rate in (1e5, 1e6, 5e6, 1e7, 2e7, 1e8):
        size, lanes, _ = Pace.of(rate)
        assert SHORTEST_BYTES <= size <= MESSAGE_BYTES
        assert 2 <= lanes <= MOST_LANES


def test_a_line_changes_its_pace_once_it_has_been_measured() -> None:
    async def main() -> None:
        wire = Wire()
        for number in range(8):
            wire.outbox.put(ONE, parcel(number, SHORT_BYTES))
        await wire.finished()  # at once: a fast line
        for number in range(8, 16):
            wire.outbox.put(ONE, parcel(number, SHORT_BYTES))
        await wire.finished()
        longest = max(sum(len(one.body) for one in parcels) for _, parcels in wire.sent[4:])
        assert longest == UNSURE_BYTES, "long, but nothing keeps a line busy for minutes that has become slow"
        before = len(wire.sent)
        wire.outbox.keep(set(), is_open)
        wire.outbox.put(ONE, parcel(16, SHORT_BYTES))
        wire.outbox.put(ONE, parcel(17, SHORT_BYTES))
        wire.outbox.put(ONE, parcel(18, SHORT_BYTES))
        await wire.finished()
        assert [numbers(parcels) for _, parcels in wire.sent[before:]] == [[16, 17], [18]]

    asyncio.run(main())


async def measured(
    wire: Wire, rate: float, monkeypatch: pytest.MonkeyPatch, *, peer: PeerId = ONE, num_messages: int = 2
) -> None:
    """Let it find out how fast the line is, by so many messages at a time."""
    monkeypatch.setattr(outbox, "time", SimpleNamespace(monotonic=lambda: wire.now))
    wire.open.clear()
    for _ in range(2 * num_messages):
        wire.outbox.put(peer, parcel(-1, SHORT_BYTES))
    await asyncio.sleep(0)
    wire.now += 2 * num_messages * SHORT_BYTES / rate
    await wire.finished()
    wire.sent.clear()
    wire.tasks.clear()


async def settled() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def test_on_a_slow_line_messages_get_shorter_until_all_lanes_end_together(monkeypatch: pytest.MonkeyPatch) -> None:
    part = 266_240  # of int8

    async def main() -> None:
        wire = Wire()
        await measured(wire, 2.5e6, monkeypatch)
        body = bytes(range(256)) * (part // 256)
        for number in range(23):
            wire.outbox.put(ONE, Parcel(STEP, "contributed", {"number": number}, body))
        await wire.finished()
        assert all(len(parcels) == 1 for _, parcels in wire.sent)
        sent = [parcels[0] for _, parcels in wire.sent]
        numbers = [cast("int", one.head["number"]) for one in sent]
        assert numbers == sorted(numbers)
        cut = [[one for one in sent if one.head["number"] == number] for number in range(23)]
        for fragments in cut:
            assert [one.fragment for one in fragments] == [Fragment(at, len(fragments)) for at in range(len(fragments))]
            assert b"".join(one.body for one in fragments) == body
        assert [len(fragments) for fragments in cut] == sorted(len(fragments) for fragments in cut)
        lengths = [len(one.body) for one in sent]
        assert max(lengths) <= 23 * part / (2 * MOST_LANES)
        assert all(length <= LEAST_BYTES for length in lengths[-MOST_LANES // 2 :])
        assert len(sent) < 150

    asyncio.run(main())


def test_on_a_full_uplink_messages_get_shorter_by_what_is_left_for_all_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of seven waits for 100 KB: cut by that alone, the first ones would be as short as the last."""
    peers, part = [PeerId(f"peer{number}") for number in range(7)], 34_000

    async def main() -> None:
        wire = Wire()
        for peer in peers:
            await measured(wire, 250_000.0, monkeypatch, peer=peer)
        wire.now += 1.0  # nothing is tried on an idle line
        wire.open.clear()
        for number in range(3):
            for peer in peers:
                wire.outbox.put(peer, parcel(number, part))
        await settled()
        wire.sent.clear()
        await wire.finished()
        lengths = [sum(len(one.body) for one in parcels) for _, parcels in wire.sent]
        assert set(lengths[:8]) == {part}, "whole, though a little longer than a message should be"
        assert lengths[-1] < part / 2
        assert len(lengths) < 3 * len(peers) * 1.5

    asyncio.run(main())


def test_all_peers_together_have_no_more_lanes_than_a_slow_uplink_carries(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a line of 1 Mbit/s four messages to each of three peers lost one another's packets, and those of votes."""
    peers = [PeerId(name) for name in ("one", "other", "third")]

    async def under_way(rate: float) -> list[PeerId]:
        wire = Wire()
        await measured(wire, rate, monkeypatch)
        wire.open.clear()
        for number in range(8):
            for peer in peers:
                wire.outbox.put(peer, parcel(number, SHORTEST_BYTES))
        await settled()
        begun = [peer for peer, _ in wire.sent]
        await wire.finished()
        return begun

    assert len(asyncio.run(under_way(12_500.0))) == 1
    assert len(asyncio.run(under_way(60_000.0))) == LEAST_LANES
    begun = asyncio.run(under_way(500_000.0))  # of which half was there when it was measured
    assert len(begun) == 4
    assert set(begun) == set(peers), "whoever has fewest comes first"


def test_a_message_to_a_slow_line_goes_beside_those_that_fill_the_uplink(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1 Mbit/s, two lanes: to a peer with a tenth of that they took all of both, and the others waited."""

    async def main() -> None:
        wire = Wire()
        await measured(wire, 12_500.0, monkeypatch, peer=OTHER)
        await measured(wire, 125_000.0, monkeypatch)
        wire.outbox._uplink.bytes_per_s = 125_000.0  # as soon as it has been full for some seconds
        wire.open.clear()
        for number in range(8):
            wire.outbox.put(OTHER, parcel(number, SHORTEST_BYTES))
            wire.outbox.put(ONE, parcel(number, SHORTEST_BYTES))
        await settled()
        begun = [peer for peer, _ in wire.sent]
        assert (begun.count(ONE), begun.count(OTHER)) == (LEAST_LANES, 1)
        wire.sent.clear()
        wire.open.set()
        await asyncio.sleep(0)
        wire.open.clear()
        await settled()
        assert {peer for peer, _ in wire.sent} == {ONE, OTHER}
        await wire.finished()
        assert [numbers(parcels) for peer, parcels in wire.sent if peer == OTHER][-1] == [7]

    asyncio.run(main())


def test_a_line_that_carries_little_because_it_has_few_lanes_is_given_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """By each, one that had one lane carried more than one that had seven. It kept its one, and for that reason."""
    monkeypatch.setattr(outbox, "lanes_of", lambda rate, *, most: 8)

    async def main() -> None:
        wire = Wire()
        await measured(wire, 10_000.0, monkeypatch, peer=OTHER, num_messages=1)
        await measured(wire, 70_000.0, monkeypatch, num_messages=7)
        wire.outbox._uplink.bytes_per_s = 80_000.0
        wire.open.clear()
        for number in range(32):
            for peer in (ONE, OTHER):
                wire.outbox.put(peer, parcel(number, SHORTEST_BYTES))
                wire.outbox._lines[peer].share = 8
        await settled()
        begun = [peer for peer, _ in wire.sent]
        assert (begun.count(ONE), begun.count(OTHER)) == (4, 4), "none goes beside"
        assert wire.outbox.wanted_bytes_per_s is not None
        await wire.finished()

    asyncio.run(main())


def test_a_line_that_was_found_narrow_with_more_lanes_is_not_held_for_wide_with_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its only message is soon there. Now and then it is tried whether more lanes are worth it."""

    async def main() -> None:
        wire = Wire()
        await measured(wire, 12_500.0, monkeypatch, peer=OTHER)
        await measured(wire, 125_000.0, monkeypatch)
        wire.outbox._uplink.bytes_per_s = 125_000.0
        wire.open.clear()
        wire.outbox.put(ONE, parcel(0, SHORTEST_BYTES))
        wire.outbox.put(OTHER, parcel(0, SHORTEST_BYTES))
        line = wire.outbox._lines[OTHER]
        assert line.is_narrow
        wire.outbox._lines[ONE].sent_bytes, wire.outbox._lines[ONE].sent_s = 60_000.0, 1.0
        held_s = []
        for _ in range(4):
            line.sent_bytes, line.sent_s = 125_000.0, 1.0  # by its one lane
            found_at = wire.now
            while line.is_narrow:
                wire.now += 1.0
                wire.outbox._begin()
            held_s.append(wire.now - found_at)
            line.took(SHORTEST_BYTES, found_at, wire.now)
            wire.outbox._begin()
            assert not line.is_narrow, "what began while it was held tells nothing of it"
            line.took(SHORTEST_BYTES, wire.now, wire.now + SHORTEST_BYTES / 5_000)  # by each of several
            wire.outbox._begin()
            assert line.is_narrow
        assert held_s == pytest.approx([TRY_AGAIN_S, 2 * TRY_AGAIN_S, 4 * TRY_AGAIN_S, SELDOM_S], abs=1.0)
        line.meter.bytes_per_s = 125_000.0
        wire.outbox._begin()
        assert not line.is_narrow, "it carries as much as others, whatever was found before"
        await wire.finished()

    asyncio.run(main())


def test_a_line_of_several_lanes_is_narrow_by_what_it_carries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them is as fast as on other lines, however wide: it has as many as its rate asks for."""

    async def main() -> None:
        wire = Wire()
        await measured(wire, 100_000.0, monkeypatch, peer=OTHER)
        await measured(wire, 4_000_000.0, monkeypatch, num_messages=7)
        wire.outbox._uplink.bytes_per_s = 5_000_000.0
        wire.open.clear()
        for number in range(4):
            wire.outbox.put(OTHER, parcel(number, SHORTEST_BYTES))
        await settled()
        line = wire.outbox._lines[OTHER]
        assert line.pace.lanes > 1
        assert line.is_narrow
        assert line.on_uplink
        assert line.beside
        assert wire.outbox.goes_to_narrow_lines
        wire.now += 10.0
        await wire.finished()
        assert wire.outbox.uplink_bytes_per_s == 5_000_000.0, "what goes to it tells nothing of the uplink"

    asyncio.run(main())


def test_what_an_idle_line_carried_alone_makes_those_that_share_the_uplink_not_narrow() -> None:
    """Eleven lines of 11 KB/s, and one that once had all 125: all messages went beside the two lanes that there are."""

    async def main() -> None:
        wire = Wire()
        wire.outbox._uplink.bytes_per_s = 125_000.0
        wire.outbox.put(ONE, parcel(0))
        await wire.finished()
        wire.open.clear()
        wire.sent.clear()
        wire.outbox._lines[ONE].meter.bytes_per_s = 125_000.0
        peers = [PeerId(f"peer {number}") for number in range(11)]
        for peer in peers:
            wire.outbox.put(peer, parcel(0))
            wire.outbox._lines[peer].meter.bytes_per_s = 11_000.0
        for peer in peers:
            wire.outbox.put(peer, parcel(1))
        await settled()
        assert len(wire.sent) == LEAST_LANES
        assert wire.outbox.wanted_bytes_per_s == 125_000.0
        await wire.finished()

    asyncio.run(main())


def test_what_nobody_wants_any_more_tells_nothing_of_the_uplink() -> None:
    async def main() -> None:
        wire = Wire()
        gone: list[int] = []
        wire.outbox._uplink.gone = lambda num_bytes, now: gone.append(num_bytes)  # type: ignore[method-assign]
        wire.is_wanted = False
        wire.outbox.put(ONE, parcel(0))
        await wire.finished()
        assert not gone
        wire.is_wanted = True
        wire.outbox.put(ONE, parcel(1))
        await wire.finished()
        assert gone == [10]

    asyncio.run(main())


def test_a_round_wants_the_uplink_while_something_goes_that_fills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of a tenth of the others' rate is busy for minutes, and leaves most of the uplink to who joins."""

    async def main() -> None:
        wire = Wire()
        assert wire.outbox.wanted_bytes_per_s is None
        await measured(wire, 12_500.0, monkeypatch, peer=OTHER)
        await measured(wire, 125_000.0, monkeypatch)
        wire.outbox._uplink.bytes_per_s = 125_000.0
        wire.open.clear()
        wire.outbox.put(OTHER, parcel(0, SHORTEST_BYTES))
        await settled()
        assert wire.outbox._lines[OTHER].meter.busy == 1
        assert wire.outbox.wanted_bytes_per_s == 125_000.0
        assert wire.outbox.goes_to_narrow_lines
        wire.outbox.put(ONE, parcel(0, SHORTEST_BYTES))
        assert wire.outbox.wanted_bytes_per_s == 125_000.0
        assert not wire.outbox.goes_to_narrow_lines
        await wire.finished()
        assert wire.outbox.wanted_bytes_per_s is None

    asyncio.run(main())


def test_an_uplink_is_held_for_no_less_than_others_show_of_it() -> None:
    """After a cut one of 118 KB/s, which a newcomer filled, was held for 23 by lines that were slow for a moment."""

    async def send(*_: Any) -> int:
        return 1

    shown = 0.0
    outbox = Outbox(lambda _: None, send, least=lambda: shown)
    assert outbox.uplink_bytes_per_s is None
    outbox._uplink.bytes_per_s = 23_000.0
    few = outbox.uplink_lanes
    shown = 118_000.0
    assert outbox.uplink_bytes_per_s == 118_000.0
    assert outbox.usual_lanes == outbox.uplink_lanes > few
    shown = 0.0
    assert outbox.uplink_bytes_per_s == 23_000.0


def test_an_uplink_that_carries_other_things_too_is_as_fast_as_all_of_them() -> None:
    """While somebody joined, rounds had a tenth of the line, held that for its rate, and left the joiner the rest."""
    moved = 0
    meter = Meter(moved=lambda: moved)
    moved = 5_000_000  # before it is busy
    meter.begin(0.0)
    moved += 2_500_000
    meter.gone(250_000, 1.0)
    assert meter.bytes_per_s == 2_500_000
    moved += 2_500_000
    meter.gone(1, 2.0)
    assert meter.bytes_per_s == 2_500_000


def test_what_hangs_on_the_way_to_who_is_no_member_any_more_keeps_nothing_from_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A member stood still in a round, and the next one left out another whose uplink had no lane free."""

    async def main() -> None:
        wire = Wire()
        await measured(wire, 60_000.0, monkeypatch)
        wire.open.clear()
        for number in range(8):
            wire.outbox.put(OTHER, parcel(number, FIRST_PACE.message_bytes))
        await settled()
        hanging = [*wire.tasks]
        assert [peer for peer, _ in wire.sent] == [OTHER] * LEAST_LANES
        wire.outbox.put(ONE, parcel(8))
        await settled()
        assert len(wire.sent) == LEAST_LANES
        wire.outbox.keep({ONE}, is_open)
        await settled()
        assert [peer for peer, _ in wire.sent[LEAST_LANES:]] == [ONE]
        wire.open.set()
        await asyncio.gather(*hanging)
        for number in range(4):
            wire.outbox.put(ONE, parcel(number, SHORTEST_BYTES))
        await wire.finished()
        assert {peer for peer, _ in wire.sent[LEAST_LANES:]} == {ONE}, "what waited for the other is not sent"
        assert len([parcels for peer, parcels in wire.sent if peer == ONE]) >= 2
        assert wire.outbox._uplink.busy == 0, "each share was given back once"

    asyncio.run(main())


def test_whom_the_step_does_without_gets_what_nobody_else_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what waited for it from before: it was left out in mid-round."""

    async def main() -> None:
        wire = Wire()
        await measured(wire, 4 * SHORTEST_BYTES, monkeypatch)
        await measured(wire, 4 * SHORTEST_BYTES, monkeypatch, peer=OTHER)
        wire.sent.clear()
        wire.open.clear()
        lanes = wire.outbox.uplink_lanes
        for number in range(2 * lanes):
            wire.outbox.put(OTHER, parcel(number, SHORTEST_BYTES))
        for number in range(lanes, 3 * lanes):
            wire.outbox.put(ONE, parcel(number, SHORTEST_BYTES))
        wire.outbox.put(OTHER, parcel(2 * lanes, SHORTEST_BYTES), is_last=True)
        await settled()
        under_way = len(wire.sent)
        await wire.finished()
        later = [peer for peer, _ in wire.sent[under_way:]]
        assert later == sorted(later, key=lambda peer: peer == OTHER)
        assert {ONE, OTHER} == {*later}

    asyncio.run(main())


def test_whom_the_step_does_without_has_one_beside_once_nobody_else_waits_though_its_line_is_narrow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An uplink of 1 Mbit/s has no more lanes than others would have to leave free for it."""

    async def main() -> None:
        wire = Wire()
        await measured(wire, 4 * SHORTEST_BYTES, monkeypatch)
        await measured(wire, SHORTEST_BYTES / 4, monkeypatch, peer=OTHER)
        wire.open.clear()
        for number in range(2):
            wire.outbox.put(OTHER, parcel(number, SHORTEST_BYTES // 8), is_last=True)
        await settled()
        assert [peer for peer, _ in wire.sent] == [OTHER]
        await wire.finished()

    asyncio.run(main())


def test_what_waits_of_a_step_that_is_over_is_forgotten() -> None:
    async def main() -> None:
        wire = Wire()
        over: Any = SimpleNamespace()
        for state in (over, STEP):
            for number in range(2 * FIRST_PACE.lanes):
                wire.outbox.put(ONE, parcel(number, FIRST_PACE.message_bytes, state=state))
        await settled()
        num_under_way = len(wire.sent)
        wire.outbox.keep({ONE}, is_open)
        await wire.finished()
        later = [one.state for _, parcels in wire.sent[num_under_way:] for one in parcels]
        assert later == [STEP] * (2 * FIRST_PACE.lanes)

    asyncio.run(main())


def test_with_one_lane_peers_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each was served until nothing waited for it, and the last one heard nothing for minutes."""
    peers = [ONE, OTHER, PeerId("third")]

    async def main() -> None:
        wire = Wire()
        for peer in peers:
            await measured(wire, 12_500.0, monkeypatch, peer=peer)
        for number in range(4):
            for peer in peers:
                wire.outbox.put(peer, parcel(number, SHORTEST_BYTES))
        await wire.finished()
        to = [peer for peer, _ in wire.sent]
        assert all(set(to[at : at + 3]) == set(peers) for at in range(0, len(to) - 2, 3)), to

    asyncio.run(main())


def test_what_hangs_on_the_way_to_a_silent_member_gives_back_its_share_of_the_uplink(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The one lane of a slow line waited for a member that was cut off, and nobody else was sent anything."""

    async def main() -> None:
        wire = Wire()
        await measured(wire, 12_500.0, monkeypatch)
        wire.open.clear()
        monkeypatch.setattr(line_module, "HANGS_S", 0.05)
        for number in range(4):
            wire.outbox.put(OTHER, parcel(number, 100))
        await settled()
        wire.outbox.put(ONE, parcel(4, 100))
        await settled()
        assert [peer for peer, _ in wire.sent] == [OTHER]
        await asyncio.sleep(0.2)
        assert [peer for peer, _ in wire.sent][1] == ONE
        lanes = wire.outbox.uplink_lanes
        assert wire.outbox._uplink.busy <= lanes
        await wire.finished()
        assert wire.outbox._uplink.busy == 0, "each share is given back once"
        assert sorted(number for _, parcels in wire.sent for number in numbers(parcels)) == [0, 1, 2, 3, 4]

    asyncio.run(main())


def test_lanes_that_hung_and_come_back_to_a_narrow_line_do_not_stay_beside_the_uplink(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        wire = Wire()
        await measured(wire, 2_000_000.0, monkeypatch, peer=OTHER)
        await measured(wire, 9_000_000.0, monkeypatch)
        wire.outbox._uplink.bytes_per_s = 9_000_000.0
        monkeypatch.setattr(line_module, "HANGS_S", 0.02)
        wire.open.clear()
        for number in range(400):
            wire.outbox.put(OTHER, parcel(number, 50_000, kind=str(number)))
        await settled()
        line = wire.outbox._lines[OTHER]
        before = wire.outbox._uplink.bytes_per_s
        await asyncio.sleep(line_module.HANGS_S + 4 * 16 * 50_000 / 2_000_000 + 0.3)
        assert line.meter.busy - line.on_uplink > 1, "they hang"
        assert wire.outbox._uplink.bytes_per_s == before, "and tell nothing of the uplink"
        hung, wire.open = wire.open, asyncio.Event()
        hung.set()
        await settled()
        assert line.waiting
        assert line.meter.busy - line.on_uplink <= 1
        await wire.finished()
        assert wire.outbox._uplink.busy == 0

    asyncio.run(main())


def test_a_line_that_was_fast_is_not_given_long_messages_before_it_is_known_to_be_fast_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of messages of 4 MB, two to each peer, a line that had become slow was busy for minutes."""

    async def main() -> None:
        wire = Wire()
        await measured(wire, 1e9, monkeypatch)
        wire.open.clear()
        wire.outbox.put(ONE, parcel(0, MESSAGE_BYTES))
        for _ in range(50):
            await asyncio.sleep(0)
        assert sum(len(one.body) for _, parcels in wire.sent for one in parcels) <= LEAST_LANES * UNSURE_BYTES
        await wire.finished()

    asyncio.run(main())


@pytest.mark.parametrize(("pause_s", "is_known"), [(0.0, True), (MOMENT_S / 2, True), (5 * MOMENT_S, False)])
def test_one_lane_that_turns_from_one_to_the_next_is_measured_as_if_it_had_never_ended(
    pause_s: float, is_known: bool
) -> None:
    """An uplink that was slow for a moment had one lane for whole rounds: no message of it takes a second."""
    now, moved = 100.0, 0
    meter = Meter(moved=lambda: moved)
    meter.bytes_per_s = 19_000.0
    for _ in range(60):
        meter.begin(now)
        now, moved = now + 0.2, moved + (24 << 10)
        meter.gone(24 << 10, now)
        meter.end(now)
        now += pause_s
    assert meter.bytes_per_s == (pytest.approx((24 << 10) / (0.2 + pause_s), rel=0.1) if is_known else 19_000.0)


def test_a_line_that_has_become_slow_is_known_at_once() -> None:
    meter = Meter()
    for at, rate in ((0.0, 1e8), (10.0, 1e5)):
        meter.begin(at)
        meter.gone(int(rate), at + 1.0)
        meter.end(at + 1.0)
    assert meter.bytes_per_s is not None
    assert meter.bytes_per_s < 2e5


def test_what_nobody_wants_any_more_is_no_measure_of_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A roster changed, a slow peer's parts went nowhere in no time, and its line was taken for one of megabytes."""

    async def main() -> None:
        wire = Wire()
        await measured(wire, 12_500.0, monkeypatch)
        before = wire.outbox._lines[ONE].meter.bytes_per_s
        wire.is_wanted = False
        for number in range(64):
            wire.outbox.put(ONE, parcel(number, 1 << 20))
        await wire.finished()
        assert wire.outbox._lines[ONE].meter.bytes_per_s == before

    asyncio.run(main())


def test_a_line_that_was_dead_is_known_to_be_back_at_once() -> None:
    """Its rate while it was dead halved what was measured after, and halved it again: for 17 s a round had a lane."""
    meter, found = Meter(), []
    for at, rate in enumerate([2.5e6, 1e2, 3e5, 6e5, 1.2e6, 2.4e6, 2.5e6, 2.5e6]):
        meter.begin(2.0 * at)
        meter.gone(int(rate), 2.0 * at + 1.0)
        meter.end(2.0 * at + 1.0)
        assert meter.bytes_per_s is not None
        found.append(meter.bytes_per_s)
    assert found[2] < 1e3, "once may be chance"
    assert found[3] == 3e5
    assert found[-1] > 1.2e6


def test_what_is_fetched_takes_turns() -> None:
    """Of a result that a peer lacked all 115 parts were asked for at once, and none came in time."""
    turns, most, busy = Turns(most=8), 0, 0

    async def fetch() -> None:
        nonlocal most, busy
        async with turns.turn() as came:
            busy += 1
            most = max(most, busy)
            await asyncio.sleep(0)
            came(1)
            busy -= 1

    async def main() -> None:
        await asyncio.gather(*(fetch() for _ in range(50)))

    asyncio.run(main())
    assert LEAST_LANES <= most <= 8


def test_fragments_of_one_parcel_go_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        wire = Wire()
        await measured(wire, 2.6215e6, monkeypatch)
        wire.open.clear()
        wire.outbox.put(ONE, parcel(0, SHORT_BYTES))
        for _ in range(MOST_LANES):
            await asyncio.sleep(0)
        assert len(wire.sent) == SHORT_BYTES // LEAST_BYTES, "nobody has been answered yet"
        await wire.finished()

    asyncio.run(main())


def test_nothing_is_cut_on_a_fast_line_nor_what_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(rate: float, sizes: list[int]) -> list[int]:
        wire = Wire()
        await measured(wire, rate, monkeypatch)
        for number, size in enumerate(sizes):
            wire.outbox.put(ONE, parcel(number, size))
        await wire.finished()
        assert all(one.fragment is None for _, parcels in wire.sent for one in parcels)
        return [len(parcels) for _, parcels in wire.sent]

    assert asyncio.run(main(1e9, [LEAST_BYTES, 10, 10])) == [3]
    assert asyncio.run(main(2.6215e6, [LEAST_BYTES // 4] * 10)) == [4, 4, 2]


@pytest.mark.parametrize("size", [1, 2, 7, 100, 1000, MOST_FRAGMENTS * 10 + 1])
@pytest.mark.parametrize("at_most", [1, 3, 10, 99])
def test_a_parcel_is_cut_into_equal_fragments(size: int, at_most: int) -> None:
    body = bytes(number % 251 for number in range(size))
    cut = Parcel(STEP, "reduced", {}, body).cut(at_most)
    assert b"".join(one.body for one in cut) == body
    assert len(cut) <= MOST_FRAGMENTS
    assert [one.fragment for one in cut] == [Fragment(number, len(cut)) for number in range(len(cut))]
    lengths = [len(one.body) for one in cut]
    assert set(lengths[:-1]) <= {max(lengths)}
    assert 0 < lengths[-1] <= max(lengths)
    assert max(lengths) <= max(at_most, math.ceil(size / MOST_FRAGMENTS))
