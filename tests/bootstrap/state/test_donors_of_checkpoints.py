"""Of whom the host takes a state that is not anchored: of no single peer that is quick to say something."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from bootstrap.owner.progress import PeerFigures, RunProgress, VersionGone
from bootstrap.state import archivist as module
from bootstrap.state.archivist import ANCHOR_WAIT_S, REPORTS_WAIT_S, Archivist, Downloads
from swarm.core.errors import TransientError
from swarm.core.ids import PeerId

LIAR, ONE, OTHER = PeerId("a liar"), PeerId("one"), PeerId("other")
VERSION, LIE, TRUTH = 8, b"l" * 32, b"t" * 32


def archivist(reported: dict[PeerId, bytes], work: dict[PeerId, int] | None) -> Archivist:
    progress = RunProgress(num_stages=1, first_version=0)
    for peer in (LIAR, ONE, OTHER):
        progress.peers[peer] = PeerFigures(0, 0.0, 0.0)
    progress.digests[VERSION][0] = {peer: digest.hex() for peer, digest in reported.items()}
    chain = None if work is None else SimpleNamespace(basis=SimpleNamespace(work_of=work))
    run: Any = SimpleNamespace(settings=None, folder=SimpleNamespace(root=None))
    nothing: Any = None
    known: Any = chain
    return Archivist(run, nothing, nothing, progress, lambda *_: None, lambda *_: known, 3, dict, Downloads())


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[PeerId]:
    """Who was asked for its state: each gives what it holds."""
    asked: list[PeerId] = []

    async def fetch(transport: Any, find: Callable[[], list[PeerId]], *args: Any, **more: Any) -> tuple[None, Any]:
        asked.extend(find())
        return None, SimpleNamespace(digest=LIE if LIAR in asked else TRUTH)

    monkeypatch.setattr(module, "fetch_state_by_digest", fetch)
    return asked


@pytest.mark.parametrize("work", [None, {LIAR: 30, ONE: 35, OTHER: 35}])
def test_the_first_who_reports_a_state_does_not_say_what_is_archived(
    asked: list[PeerId], work: dict[PeerId, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ANCHOR_WAIT_S", 0.0)

    async def main() -> bytes:
        made = archivist({LIAR: LIE, ONE: TRUTH}, work)
        later = asyncio.get_running_loop().call_later
        later(0.2, made._progress.digests[VERSION][0].__setitem__, OTHER, TRUTH.hex())
        start: Any = SimpleNamespace(state=SimpleNamespace(layout=None))
        _, offer, is_anchored = await made.state_of(0, VERSION, start)
        assert not is_anchored
        return offer.digest

    assert asyncio.run(main()) == TRUTH
    assert asked
    assert LIAR not in asked


def test_reports_of_most_who_are_there_are_waited_for_a_while() -> None:
    made = archivist({LIAR: LIE}, {LIAR: 30, ONE: 35, OTHER: 35})
    assert made._most_reported(0, VERSION, ANCHOR_WAIT_S + 1) is None
    assert made._most_reported(0, VERSION, REPORTS_WAIT_S) == LIE, "nobody else says anything"
    made._progress.digests[VERSION][0] |= {ONE: TRUTH.hex(), OTHER: TRUTH.hex()}
    assert made._most_reported(0, VERSION, ANCHOR_WAIT_S) == TRUTH
    assert made._most_reported(0, VERSION, ANCHOR_WAIT_S - 1) is None


def test_who_does_no_work_has_no_voice() -> None:
    idle = {PeerId(f"idle {number}"): LIE for number in range(9)}
    made = archivist(idle | {LIAR: LIE, ONE: TRUTH}, {LIAR: 20, ONE: 40, **dict.fromkeys(idle, 0)})
    assert made._most_reported(0, VERSION, ANCHOR_WAIT_S) == TRUTH


def test_a_donor_that_lets_chunks_drip_keeps_nobody_waiting_for_a_version_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its whole state would come for as long as the least line's, and all checkpoints after this one would wait."""

    async def drips(transport: Any, *args: Any, **more: Any) -> Any:
        made._progress.begin(VERSION + 1)
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(module, "ANCHOR_WAIT_S", 0.0)
    monkeypatch.setattr(module, "fetch_state_by_digest", drips)
    made = archivist({LIAR: TRUTH, ONE: TRUTH}, None)
    start: Any = SimpleNamespace(state=SimpleNamespace(layout=None))

    async def main() -> None:
        async with asyncio.timeout(20.0):
            with pytest.raises(VersionGone):
                await made.state_of(0, VERSION, start)

    asyncio.run(main())


def test_what_came_before_all_donors_broke_off_is_not_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[dict[bytes, memoryview]] = []

    async def fetch(transport: Any, *args: Any, held: dict[bytes, memoryview], **more: Any) -> Any:
        tries.append(dict(held))
        held[b"first"] = memoryview(b"")
        if len(tries) < 2:
            raise TransientError("cut off")
        return None, None

    monkeypatch.setattr(module, "ANCHOR_WAIT_S", 0.0)
    monkeypatch.setattr(module, "fetch_state_by_digest", fetch)
    start: Any = SimpleNamespace(state=SimpleNamespace(layout=None))
    asyncio.run(archivist({LIAR: TRUTH, ONE: TRUTH}, None).state_of(0, VERSION, start))
    assert [[*held] for held in tries] == [[], [b"first"]]
