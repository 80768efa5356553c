"""What a peer has signed a header over it can show, however often a microbatch is sent to it and on by it."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from peer.pipeline.exchange_store import MAX_CALLS, ExchangeStore
from swarm.core.ids import MicrobatchId, PeerId, Step, Version
from tests.verification.exhibits import SmallRun, received, sent, small_settings, work_of
from verification.pipeline.exchanges import Exchange
from verification.pipeline.hop_claim import claims_of
from verification.round.papers import Exhibit

MIDDLE = 1
DESCRIPTORS = Path("/proc/self/fd")


@pytest.fixture(scope="module")
def shown() -> tuple[Exhibit, ...]:
    return SmallRun(small_settings(3)).microbatch(0)


def target_of(shown: Sequence[Exhibit]) -> PeerId:
    header = shown[MIDDLE].papers.forward_header
    assert header is not None
    return header.producer


def numbered(exchange: Exchange, number: int) -> Exchange:
    """The same of another microbatch."""
    return replace(exchange, birth=replace(exchange.birth, microbatch_id=MicrobatchId(number)))


def again(exchange: Exchange, attempt: int) -> Exchange:
    """The same call once more, under another header."""
    return replace(exchange, forward=replace(exchange.forward, attempt=attempt))


def test_a_store_that_is_full_says_so_before_and_counts_what_is_on_its_way(shown: Sequence[Exhibit]) -> None:
    store, came = ExchangeStore(target_of(shown), retained_versions=4, max_microbatches=3), received(shown[1])
    step = came.birth.step
    assert [store.keep(numbered(came, number)) for number in range(2)] == [True, True]
    assert [store.has_room(step, MicrobatchId(2), coming=coming) for coming in (0, 1)] == [True, False]
    assert store.keep(numbered(came, 2))
    assert not store.keep(numbered(came, 3))
    assert store.has_room(step, MicrobatchId(1))
    store.forget(int(step) + 6)
    assert store.keep(numbered(replace(came, birth=replace(came.birth, step=Step(int(step) + 6))), 3))


def test_a_microbatch_comes_so_often_and_what_was_kept_stays(shown: Sequence[Exhibit]) -> None:
    store, came = ExchangeStore(target_of(shown), retained_versions=4, max_microbatches=3), received(shown[1])
    waiting = replace(came, gradient=None, answer=b"")
    assert all(store.keep(again(waiting, attempt)) for attempt in range(MAX_CALLS))
    assert not store.has_room(came.birth.step, came.birth.microbatch_id)
    assert not store.keep(again(waiting, MAX_CALLS))
    assert store.keep(again(came, 3)), "the answer to a call that is kept"


def test_a_header_is_shown_with_what_it_was_made_from_among_many(shown: Sequence[Exhibit]) -> None:
    store = ExchangeStore(target_of(shown), retained_versions=4, max_microbatches=3)
    came, went = received(shown[MIDDLE]), sent(shown[MIDDLE])
    for attempt in range(10, 24):
        assert store.keep(again(replace(came, gradient=None), attempt))
        assert store.keep(again(replace(went, gradient=None), attempt))
    assert store.keep(came)
    assert store.keep(went)
    assert came.gradient is not None
    for header in (went.forward, came.gradient):
        found = store.own(came.birth.microbatch_id, header.digest())
        assert came in found
        assert went in found
        assert len(found) == 2
    assert store.own(came.birth.microbatch_id, bytes(32)) == []


def test_every_gradient_of_an_activation_that_came_again_and_again_is_shown(shown: Sequence[Exhibit]) -> None:
    """Two neighbours in league could have a debt written for a gradient that was not among those shown."""
    store = ExchangeStore(target_of(shown), retained_versions=4, max_microbatches=3)
    came, went = received(shown[MIDDLE]), sent(shown[MIDDLE])
    gradients = []
    while store.has_room(came.birth.step, came.birth.microbatch_id, calls=1):
        assert came.gradient is not None
        assert went.gradient is not None
        answer = replace(went.gradient, attempt=len(gradients))
        gradients.append(replace(came.gradient, parents=(came.forward.digest(), answer.digest())))
        assert store.keep(replace(went, gradient=answer))
        assert store.keep(replace(came, gradient=gradients[-1]))
    assert len(gradients) == MAX_CALLS // 2
    for header in gradients:
        found = store.own(came.birth.microbatch_id, header.digest())
        assert len(found) == 2
        claims = claims_of(target_of(shown), found, found)
        assert header in [claim.header for claim in claims]


def test_where_nobody_audits_nothing_is_kept_and_nothing_refused(shown: Sequence[Exhibit]) -> None:
    store, came = ExchangeStore(target_of(shown), retained_versions=4, max_microbatches=0), received(shown[1])
    assert all(store.keep(numbered(came, number)) for number in range(3))
    assert store.has_room(came.birth.step, MicrobatchId(9), coming=9)
    assert store.with_partner(came.birth.step, MicrobatchId(1), came.forward.producer) == []


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_was_contributed_is_shown_from_the_calls_though_all_was_done_again(
    shown: Sequence[Exhibit], stage: int
) -> None:
    exhibit, calls = shown[stage], list[Exchange]()
    if stage > 0:
        calls.append(received(exhibit))
    if stage < 2:
        calls.append(sent(exhibit))
    ids = np.frombuffer(exhibit.x, dtype="<i4") if stage == 0 else None
    batch = (lambda number: (ids, ids)) if ids is not None else None
    store = ExchangeStore(target_of(shown), retained_versions=4, max_microbatches=3, batch=batch)
    step, work = exhibit.papers.birth.step, work_of(exhibit.papers, Version(0))
    for call in calls:
        assert store.keep(replace(call, gradient=None, answer=b""))
    assert store.exhibit(step, work) is None
    for call in calls:
        assert store.keep(call)
        gradient = call.gradient
        assert gradient is not None
        other = replace(call, gradient=replace(gradient, version=Version(9), parents=gradient.parents[:1]), answer=b"?")
        assert store.keep(replace(call, gradient=None, answer=b""))
        assert store.keep(other)
        assert store.of(step, work.microbatch_id)[-1] is other
    assert store.exhibit(step, work) == exhibit
    assert store.exhibit(step, replace(work, version=Version(8))) is None or stage == 0


def test_what_is_answered_lies_on_disk_until_its_step_is_too_old(shown: Sequence[Exhibit], tmp_path: Path) -> None:
    (tmp_path / "exchanges-00000099-00000000").write_bytes(b"of an earlier process")
    me, came = target_of(shown), received(shown[1])
    store = ExchangeStore(me, retained_versions=4, max_microbatches=3, folder=tmp_path)
    step, number = came.birth.step, came.birth.microbatch_id
    waiting = replace(came, gradient=None, answer=b"")
    assert store.keep(waiting)
    assert store.of(step, number) == [waiting]
    assert store.keep(came)
    assert store._writer is not None
    store._writer.submit(lambda: None).result(20)
    (kept,) = store.of(step, number)
    assert kept is not came
    assert [bytes(body) for body in kept.bodies] == [bytes(body) for body in came.bodies]
    assert replace(kept, activation=b"", targets=b"", answer=b"") == replace(
        came, activation=b"", targets=b"", answer=b""
    )
    assert [path.name for path in tmp_path.iterdir()] == ["exchanges-00000000"]
    store.forget(int(step) + 6)
    del kept
    assert list(tmp_path.iterdir()) == []
    later = replace(came, birth=replace(came.birth, step=Step(int(step) + 6)))
    assert store.keep(later)
    store._writer.submit(lambda: None).result(20)
    assert [path.name for path in tmp_path.iterdir()] == ["exchanges-00000001"]


@pytest.mark.skipif(not DESCRIPTORS.is_dir(), reason="descriptors are counted in /proc")
def test_a_store_that_is_closed_holds_no_thread_and_no_file(shown: Sequence[Exhibit], tmp_path: Path) -> None:
    of_others = {*threading.enumerate()}  # stores of other tests, whose threads end when they are collected

    def held() -> tuple[int, int]:
        """Threads and descriptors."""
        threads = sum(one.name.startswith("exchanges") for one in {*threading.enumerate()} - of_others)
        return threads, sum(link.exists() and tmp_path in link.resolve().parents for link in DESCRIPTORS.iterdir())

    before, came = held(), received(shown[1])
    store = ExchangeStore(target_of(shown), retained_versions=4, max_microbatches=3, folder=tmp_path)
    for number in range(3):
        assert store.keep(numbered(came, number))
    assert store._writer is not None
    store._writer.submit(lambda: None).result(20)
    assert held() > before
    store.close()
    assert held() == before
    assert list(tmp_path.iterdir()) == []
    assert store.own(came.birth.microbatch_id, came.forward.digest()) == []
    assert store.keep(came)
    assert held() == before, "what comes late makes neither anew"
