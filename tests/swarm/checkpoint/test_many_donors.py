"""Pieces of several donors: who is fast gives more, who fails gives none, and nothing that came is asked for again."""

import asyncio
import random
from collections import Counter
from collections.abc import Collection

import pytest

import swarm.checkpoint.many_donors
from benchmarks.red_team.virtual_time import run_virtually
from swarm.checkpoint.many_donors import MOST_FAILURES, MOST_VAIN_LOOKS, from_donors
from swarm.core.errors import DiskFullError, RemoteError, TransientError
from swarm.core.ids import PeerId
from swarm.core.transfers import LEAST_LANES, MOST_LANES

FAST, SLOW, DEAD, NEW, FALSE = map(PeerId, ("fast", "slow", "dead", "new", "false"))
PIECE_BYTES = 1 << 20


class Lines:
    """Donors that take turns: at each, the fast one answers all that it was asked, the slow one a piece in twenty."""

    def __init__(self) -> None:
        self.given = Counter[PeerId]()
        self.came = Counter[int]()
        self.asked = Counter[PeerId]()
        self.most = Counter[PeerId]()
        self.calls = Counter[PeerId]()

    async def fetch(self, donor: PeerId, piece: int) -> int:
        self.calls[donor] += 1
        self.asked[donor] += 1
        self.most[donor] = max(self.most[donor], self.asked[donor])
        try:
            if donor == DEAD:
                raise TransientError("it is cut off")
            for _ in range(1 if donor == FAST else 20):
                await asyncio.sleep(0)
        finally:
            self.asked[donor] -= 1
        self.given[donor] += 1
        self.came[piece] += 1
        return PIECE_BYTES


def test_a_slow_donor_holds_nobody_up_and_each_piece_comes_once() -> None:
    lines = Lines()
    asyncio.run(from_donors([SLOW, DEAD, FAST], range(200), lines.fetch))
    assert set(lines.came) == set(range(200))
    assert set(lines.came.values()) == {1}
    assert lines.given[FAST] > 150, "by turns the slow one would have had to give a half"
    assert 0 < lines.calls[DEAD] <= LEAST_LANES, "who failed is asked no more"


def test_a_fast_donor_is_asked_for_more_at_a_time() -> None:
    lines = Lines()
    asyncio.run(from_donors([FAST], range(100), lines.fetch))
    assert lines.most[FAST] == MOST_LANES


@pytest.mark.parametrize("gave_before", [0, 1])
def test_the_last_pieces_do_not_wait_for_a_donor_that_gives_none(
    gave_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of four lines carried a tenth of the others' rate: of 38 parts the last four took minutes."""
    monkeypatch.setattr(swarm.checkpoint.many_donors, "LOOK_S", 0.05)
    lines = Lines()

    async def fetch(donor: PeerId, piece: int) -> int:
        if donor == SLOW and lines.calls[SLOW] >= gave_before:
            await asyncio.sleep(60.0)
        return await lines.fetch(donor, piece)

    async def main() -> None:
        async with asyncio.timeout(30.0):
            await from_donors([SLOW, FAST], range(40), fetch)

    asyncio.run(main())
    assert set(lines.came) == set(range(40))
    assert lines.given[SLOW] == gave_before


@pytest.mark.parametrize("donors", [[FAST], [FAST, SLOW]])
def test_a_stall_at_the_end_is_waited_for_where_nobody_else_gives_what_stalls(
    donors: list[PeerId], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A donor that had room for one more was held for another, who would give its own last piece at once."""
    monkeypatch.setattr(swarm.checkpoint.many_donors, "LOOK_S", 0.05)
    num_asked = Counter[int]()

    async def fetch(donor: PeerId, piece: int) -> int:
        num_asked[piece] += 1
        await asyncio.sleep(1.0 if piece >= 40 - len(donors) and num_asked[piece] == 1 else 0.01)
        return PIECE_BYTES

    asyncio.run(from_donors(donors, range(40), fetch))
    assert set(num_asked) == set(range(40))
    assert num_asked.total() <= 41


def test_a_donor_of_which_one_piece_stalls_while_others_come_is_asked_for_fewer_for_a_while() -> None:
    """Sixteen chunks at a time came from a full line, one of them too slowly: the donor was asked no more."""
    under_way, most_after = 0, list[int]()

    async def fetch(donor: PeerId, piece: int) -> int:
        nonlocal under_way
        under_way += 1
        if most_after:
            most_after.append(under_way)
        try:
            await asyncio.sleep(0.1 if piece == 50 else 0.01)
            if piece == 50 and not most_after:
                most_after.append(0)
                raise TransientError("too little comes")
        finally:
            under_way -= 1
        return PIECE_BYTES

    asyncio.run(from_donors([FAST], range(600), fetch))
    assert 0 < max(most_after[: 2 * MOST_LANES]) < MOST_LANES
    assert max(most_after) == MOST_LANES, "and for as many as before, when it gives all that it is asked"


def test_what_fails_together_has_failed_once() -> None:
    """A line that was cut for a moment ended sixteen pieces at a time, and a donor that was as good as before."""
    under_way = dict[int, asyncio.Event]()
    cuts, most_after, recent = [30, 90], list[int](), list[int]()

    async def fetch(donor: PeerId, piece: int) -> int:
        if cuts and piece == cuts[0]:
            await asyncio.sleep(0.02)
            cuts.pop(0)
            for cut in under_way.values():
                cut.set()
            recent.clear()
            raise TransientError("it is cut off")
        under_way[piece] = asyncio.Event()
        recent.append(len(under_way))
        if len(recent) == MOST_LANES and len(cuts) < 2:
            most_after.append(max(recent))
        try:
            await asyncio.wait_for(under_way[piece].wait(), 0.01 if not cuts or abs(piece - cuts[0]) > 15 else 1.0)
            raise TransientError("it is cut off")
        except TimeoutError:
            return PIECE_BYTES
        finally:
            del under_way[piece]

    asyncio.run(from_donors([FAST], range(150), fetch))
    assert not cuts
    assert min(most_after) >= MOST_LANES // 2 - 1, "nor is it asked for a sixteenth of what it gave"


def test_donors_whose_pieces_stall_in_turn_on_the_own_full_line_are_asked_again() -> None:
    """On a line of 0.5 Mbit/s three donors gave 266 KB at a time: many were given up, and soon so were all three."""
    asked, given = Counter[PeerId](), Counter[PeerId]()

    async def fetch(donor: PeerId, piece: int) -> int:
        asked[donor] += 1
        await asyncio.sleep(0.01 * (1 + asked[donor] % 3))
        if asked[donor] % 3 == 0 or donor == DEAD:
            raise TransientError("too little comes")
        given[donor] += 1
        return 1 << 10

    asyncio.run(from_donors([SLOW, DEAD, FAST], range(60), fetch))
    assert given.total() == 60
    assert min(given[SLOW], given[FAST]) > 15
    assert asked[DEAD] <= MOST_FAILURES


def test_who_was_cut_off_and_is_back_gives_again_and_who_gave_something_else_is_never_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A state of 100 million parameters took 17 minutes from two donors: the third was cut off for the first one."""
    monkeypatch.setattr(swarm.checkpoint.many_donors, "LOOK_FOR_MORE_S", 0.02)
    monkeypatch.setattr(swarm.checkpoint.many_donors, "FAR_BELOW", 0.0)
    given, is_back, beside, holding = Counter[PeerId](), False, set[PeerId](), set[PeerId]()

    async def fetch(donor: PeerId, piece: int) -> int:
        await asyncio.sleep(0.01)
        given[donor] += 1
        if donor == DEAD and not is_back:
            raise TransientError("it is cut off")
        if donor == FALSE:
            raise RemoteError("digest", "another chunk", FALSE)
        return 1 << 10

    async def more(giving: Collection[PeerId], but: Collection[PeerId]) -> list[PeerId]:
        nonlocal is_back, beside, holding
        is_back, beside, holding = True, {*giving, *but}, set(giving)
        return [DEAD, FALSE, NEW]

    asyncio.run(from_donors([SLOW, DEAD, FALSE], range(400), fetch, more=more))
    assert min(given[DEAD], given[NEW]) > 20
    assert given[FALSE] <= LEAST_LANES
    assert beside == {SLOW, DEAD, FALSE, NEW}, "nobody is asked twice"
    assert FALSE not in holding, "who gave something else holds no place"


@pytest.mark.parametrize(("takes_s", "makes_room"), [(1e5, True), (10.0, True), (2.0, False)])
def test_who_gives_far_less_than_others_makes_room_for_somebody_new(takes_s: float, makes_room: bool) -> None:
    """Strangers took the places of a joiner's donors, and let bytes drip for days."""
    given, num_pieces, places = Counter[PeerId](), 3000, 2

    async def fetch(donor: PeerId, piece: int) -> int:
        await asyncio.sleep(takes_s if donor == SLOW else 1.0)
        given[donor] += 1
        return PIECE_BYTES

    async def more(giving: Collection[PeerId], but: Collection[PeerId]) -> list[PeerId]:
        return [donor for donor in (NEW, SLOW) if donor not in {*giving, *but}][: places - len(giving)]

    async def main() -> None:
        await from_donors([FAST, SLOW], range(num_pieces), fetch, more=more)

    run_virtually(main, rng=random.Random(0), on_unhandled=lambda context: None)
    assert given.total() == num_pieces, "each piece comes once"
    assert (given[NEW] > 0) == makes_room


def test_what_came_before_all_failed_is_not_fetched_again() -> None:
    lines = Lines()

    async def main() -> None:
        with pytest.raises(TransientError, match="cut off"):
            await from_donors([DEAD], range(4), lines.fetch)
        with pytest.raises(TransientError, match="0 donors"):
            await from_donors([], range(1), lines.fetch)
        await from_donors([], (), lines.fetch)

    asyncio.run(main())
    assert not lines.came


def test_where_all_were_cut_off_for_a_while_they_are_looked_for_and_nothing_comes_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A newcomer's own line was away for seconds: every donor failed four times, and the state was begun anew."""
    monkeypatch.setattr(swarm.checkpoint.many_donors, "LOOK_FOR_MORE_S", 0.05)
    monkeypatch.setattr(swarm.checkpoint.many_donors, "LOOK_S", 0.02)
    came, looks, is_away = Counter[int](), 0, False

    async def fetch(donor: PeerId, piece: int) -> int:
        nonlocal is_away
        await asyncio.sleep(0.001)
        is_away = is_away or came.total() == 50
        if is_away and looks < MOST_VAIN_LOOKS:
            raise TransientError("it is cut off")
        came[piece] += 1
        return PIECE_BYTES

    async def more(giving: Collection[PeerId], but: Collection[PeerId]) -> list[PeerId]:
        nonlocal looks
        looks += is_away
        return [] if looks < MOST_VAIN_LOOKS else [FAST]

    asyncio.run(from_donors([FAST, NEW], range(100), fetch, more=more))
    assert came == Counter(range(100))


def test_where_nobody_comes_back_it_ends_after_a_few_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarm.checkpoint.many_donors, "LOOK_FOR_MORE_S", 0.02)
    monkeypatch.setattr(swarm.checkpoint.many_donors, "LOOK_S", 0.01)
    looks, lines = 0, Lines()

    async def more(giving: Collection[PeerId], but: Collection[PeerId]) -> list[PeerId]:
        nonlocal looks
        looks += 1
        return [DEAD]

    with pytest.raises(TransientError, match="cut off"):
        asyncio.run(from_donors([DEAD], range(4), lines.fetch, more=more))
    assert looks == MOST_VAIN_LOOKS


def test_a_full_disk_is_no_donors_fault() -> None:
    asked = Counter[PeerId]()

    async def fetch(donor: PeerId, piece: int) -> int:
        asked[donor] += 1
        await asyncio.sleep(0)
        raise DiskFullError("make room")

    with pytest.raises(DiskFullError):
        asyncio.run(from_donors([FAST, SLOW], range(40), fetch))
    assert asked.total() <= 2 * LEAST_LANES
