"""The owner's pause: nothing new begins, what has begun is finished, and the run goes on with the others."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peer.owner.permit import Permit
from peer.pipeline.compute import Urgency, WorkThread
from tests.swarm_in_process import InProcessSwarm, manifest_of, swarm_in_process


def test_a_change_is_told_once() -> None:
    permit = Permit()
    first = permit.changed
    permit.withhold("on battery")
    second = permit.changed
    assert first.is_set()
    permit.withhold("on battery, and outside the hours")
    assert permit.changed is second
    assert not second.is_set()
    permit.give()
    assert second.is_set()
    third = permit.changed
    permit.give()
    assert permit.changed is third


def test_what_may_not_begin_waits_and_the_rest_goes_on() -> None:
    async def main() -> list[str]:
        done: list[str] = []
        allowed = Urgency.FORWARD
        thread = WorkThread("test", may_begin=lambda urgency: urgency <= allowed)
        audit = asyncio.ensure_future(thread.run(Urgency.AUDIT, lambda: done.append("audit")))
        await thread.run(Urgency.FORWARD, lambda: done.append("forward"))
        assert not audit.done()
        allowed = Urgency.AUDIT
        thread.wake()
        await audit
        thread.close(timeout_s=5)
        return done

    assert asyncio.run(main()) == ["forward", "audit"]


async def _paused(swarm: InProcessSwarm, stage: int) -> tuple[int, int]:
    """Microbatches that one of the stage's two peers had in flight when it was paused, and that it did afterwards."""
    peer = swarm.of_stage(stage)[0]
    daemon: Any = peer.daemon
    await swarm.until_version(2, timeout_s=60)
    daemon.shared.permit.withhold("asked")
    in_flight = daemon.live.server.in_flight + (daemon.live.source.in_flight if daemon.live.source else 0)
    before = daemon.live.counters.microbatches
    version = swarm.host.progress.done_versions()
    await swarm.until_version(version + 3, timeout_s=60)
    after = daemon.live.counters.microbatches
    daemon.shared.permit.give()
    until: Callable[[], bool] = lambda: daemon.live.counters.microbatches > after  # noqa: E731
    await swarm.until(until, timeout_s=60)
    return in_flight, after - before


def test_a_paused_peer_begins_nothing_and_comes_back(tmp_path: Path) -> None:
    async def main() -> None:
        manifest = manifest_of(
            optimizer={"total_steps": 500},
            limits={"founders_per_stage": 2, "max_in_flight": 2},
            checkpoint={"every_steps": 500},
        )
        async with swarm_in_process(manifest, tmp_path, peers=(2, 2), evaluate_tokens=64) as swarm:
            for stage in (0, 1):
                in_flight, done = await _paused(swarm, stage)
                assert done <= in_flight, f"stage {stage}: {done} microbatches after the pause, {in_flight} in flight"

    asyncio.run(main())
