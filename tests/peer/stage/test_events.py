"""Events reach whoever was named before the first of them, in order, and nobody comes late."""

import asyncio

import pytest

from peer.stage.events import Events, Overtaken, PeerLost
from peer.stage.tasks import Tasks
from swarm.core.errors import TransientError
from swarm.core.ids import PeerId, StageIndex

PEER = PeerId("peer")


def test_hearers_of_a_kind_are_told_at_once_in_the_order_in_which_they_were_named() -> None:
    events, told = Events(), list[tuple[str, object]]()
    events.hear(
        PeerLost, lambda event: told.append(("first", event.peer)), lambda event: told.append(("second", event))
    )
    events.hear(PeerLost, lambda event: told.append(("third", event)))
    events.hear(Overtaken, lambda event: told.append(("other", event)))
    events.seal()
    events.publish(PeerLost(PEER))
    assert told == [("first", PEER), ("second", PeerLost(PEER)), ("third", PeerLost(PEER))]


def test_nobody_is_told_before_all_are_named_and_nobody_is_named_after() -> None:
    events = Events()
    with pytest.raises(AssertionError, match="PeerLost is told before all hearers are known"):
        events.publish(PeerLost(PEER))
    events.seal()
    with pytest.raises(AssertionError, match="PeerLost: a hearer came after"):
        events.hear(PeerLost, lambda event: None)
    events.publish(PeerLost(PEER))  # which nobody need hear


def test_what_others_do_wrong_ends_a_task_and_what_breaks_here_is_told_to_the_supervisor() -> None:
    async def main() -> None:
        tasks = Tasks(StageIndex(1))

        async def fail(error: Exception) -> None:
            raise error

        tasks.spawn(fail(TransientError("not now")))
        await asyncio.sleep(0.01)
        assert not tasks.failure.done()
        for number in range(2):
            tasks.spawn(fail(ZeroDivisionError(f"{number}")))
        with pytest.raises(ZeroDivisionError, match="0"):
            await asyncio.wait_for(asyncio.shield(tasks.failure), 5)

    asyncio.run(main())


def test_nothing_is_begun_once_all_was_stopped() -> None:
    async def main() -> None:
        tasks, begun = Tasks(StageIndex(1)), list[int]()

        async def begin(number: int) -> None:
            begun.append(number)
            await asyncio.Event().wait()

        tasks.spawn(begin(1))
        await asyncio.sleep(0.01)
        tasks.spawn(begin(2))
        await tasks.stop()
        tasks.spawn(begin(3))
        await asyncio.sleep(0.01)
        assert begun == [1]
        assert tasks.is_stopped

    asyncio.run(main())
