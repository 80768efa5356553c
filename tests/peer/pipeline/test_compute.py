"""The work thread's order, failures and end."""

import asyncio
import threading

import pytest

from peer.pipeline.compute import PATIENCE, Urgency, WorkThread
from swarm.core.errors import TransientError


async def _held_thread(audits_wait_s: float = 0.0) -> tuple[WorkThread, threading.Event, asyncio.Future[None]]:
    """A thread whose first job waits for the event, so that what follows queues up."""
    thread, gate = WorkThread("test", audits_wait_s=audits_wait_s), threading.Event()
    began = asyncio.Event()
    loop = asyncio.get_running_loop()

    def hold() -> None:
        loop.call_soon_threadsafe(began.set)
        assert gate.wait(10)

    first = asyncio.ensure_future(thread.run(Urgency.ROUND, hold))
    await asyncio.wait_for(began.wait(), 10)
    return thread, gate, first


async def _order(*jobs: tuple[Urgency, int]) -> list[tuple[str, int]]:
    """In which order a busy thread does what comes in this one."""
    thread, gate, first = await _held_thread()
    order: list[tuple[str, int]] = []
    waiting = [
        asyncio.ensure_future(thread.run(urgency, lambda it=(urgency.name, step): order.append(it), step=step))
        for urgency, step in jobs
    ]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.wait_for(asyncio.gather(first, *waiting), 10)
    thread.close(timeout_s=10)
    return order


def test_the_most_urgent_goes_first() -> None:
    come = (Urgency.EVALUATE, Urgency.BIRTH, Urgency.FORWARD, Urgency.CODEC, Urgency.ROUND)
    order = asyncio.run(_order(*((urgency, 0) for urgency in come)))
    assert [name for name, _ in order] == ["ROUND", "CODEC", "FORWARD", "BIRTH", "EVALUATE"]


def test_of_hops_the_older_step_goes_first_and_of_a_step_whatever_came_first() -> None:
    come = [(urgency, step) for step in (8, 7) for urgency in (Urgency.BIRTH, Urgency.FORWARD, Urgency.BACKWARD)]
    found = asyncio.run(_order(*come, (Urgency.FORWARD, 7)))
    of_a_step = ["FORWARD", "BACKWARD", "FORWARD", "BIRTH"]
    assert found == [*((name, 7) for name in of_a_step), ("FORWARD", 8), ("BACKWARD", 8), ("BIRTH", 8)]


@pytest.mark.parametrize("audits_wait_s", [0.0, 60.0])
def test_young_audits_fill_gaps_only(audits_wait_s: float) -> None:
    async def main() -> int:
        thread, gate, first = await _held_thread(audits_wait_s)
        order: list[str] = []
        jobs = [asyncio.ensure_future(thread.run(Urgency.AUDIT, lambda: order.append("audit")))]
        jobs += [asyncio.ensure_future(thread.run(Urgency.FORWARD, lambda: order.append("forward"))) for _ in range(40)]
        await asyncio.sleep(0)
        gate.set()
        await asyncio.wait_for(asyncio.gather(first, *jobs), 10)
        thread.close(timeout_s=10)
        return order.index("audit")

    assert asyncio.run(main()) == 40 if audits_wait_s else asyncio.run(main()) < PATIENCE


def test_the_backlog_is_what_waits_at_the_seconds_it_has_taken() -> None:
    async def main() -> tuple[float, float]:
        thread = WorkThread("test")
        await asyncio.wait_for(thread.run(Urgency.FORWARD, lambda: threading.Event().wait(0.1)), 10)
        idle_s = thread.backlog_s
        gate = threading.Event()
        jobs = [asyncio.ensure_future(thread.run(Urgency.FORWARD, lambda: gate.wait(10))) for _ in range(4)]
        await asyncio.sleep(0)
        waits_s = thread.backlog_s
        gate.set()
        await asyncio.wait_for(asyncio.gather(*jobs), 10)
        thread.close(timeout_s=10)
        return idle_s, waits_s

    idle_s, waits_s = asyncio.run(main())
    assert idle_s == 0
    assert waits_s >= 0.3


def test_evaluation_is_served_under_full_load() -> None:
    async def main() -> int:
        thread, gate, first = await _held_thread()
        order: list[str] = []
        jobs = [asyncio.ensure_future(thread.run(Urgency.EVALUATE, lambda: order.append("evaluate")))]
        jobs += [asyncio.ensure_future(thread.run(Urgency.FORWARD, lambda: order.append("forward"))) for _ in range(40)]
        await asyncio.sleep(0)
        gate.set()
        await asyncio.wait_for(asyncio.gather(first, *jobs), 10)
        thread.close(timeout_s=10)
        return order.index("evaluate")

    assert asyncio.run(main()) < PATIENCE


def test_a_jobs_error_reaches_its_waiter_and_the_thread_lives_on() -> None:
    async def main() -> int:
        thread = WorkThread("test")

        def fail() -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(thread.run(Urgency.FORWARD, fail), 10)
        result = await asyncio.wait_for(thread.run(Urgency.FORWARD, lambda: 7), 10)
        thread.close(timeout_s=10)
        return result

    assert asyncio.run(main()) == 7


def test_closing_drops_what_waits_and_refuses_more() -> None:
    async def main() -> None:
        thread, gate, first = await _held_thread()
        waiting = asyncio.ensure_future(thread.run(Urgency.FORWARD, lambda: None))
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(asyncio.to_thread(thread.close, timeout_s=10))
        with pytest.raises(TransientError):
            await asyncio.wait_for(waiting, 10)
        gate.set()
        await asyncio.wait_for(asyncio.gather(first, closing), 10)
        with pytest.raises(TransientError):
            await thread.run(Urgency.FORWARD, lambda: None)

    asyncio.run(main())


def test_a_cancelled_job_is_skipped() -> None:
    async def main() -> list[str]:
        thread, gate, first = await _held_thread()
        order: list[str] = []
        skipped = asyncio.ensure_future(thread.run(Urgency.FORWARD, lambda: order.append("skipped")))
        kept = asyncio.ensure_future(thread.run(Urgency.FORWARD, lambda: order.append("kept")))
        await asyncio.sleep(0)
        skipped.cancel()
        await asyncio.sleep(0)
        gate.set()
        await asyncio.wait_for(asyncio.gather(first, kept), 10)
        thread.close(timeout_s=10)
        return order

    assert asyncio.run(main()) == ["kept"]


def test_before_each_job_the_thread_takes_up_what_has_changed() -> None:
    numbers, seen = [4, 2], []
    taken: list[int] = []

    async def main() -> None:
        thread = WorkThread("test", before_job=lambda: taken.append(numbers.pop(0)))
        for _ in range(2):
            await thread.run(Urgency.FORWARD, lambda: seen.append(list(taken)))
        thread.close(timeout_s=10)

    asyncio.run(main())
    assert seen == [[4], [4, 2]]
