"""Which versions a host may still wait for: those that a live peer keeps a snapshot of."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from bootstrap.owner.progress import HELD_SNAPSHOTS, PeerFigures, RunProgress, VersionGone, oldest_held
from swarm.core.ids import PeerId
from swarm.core.settings import KEPT_SNAPSHOTS, CheckpointSettings, OptimizerSettings
from tests.bootstrap.program.test_dashboard import report_of
from tests.bootstrap.state.hosted import hosted
from tests.verification.exhibits import small_settings

PEER = PeerId("peer")


@pytest.mark.parametrize(("last", "every"), [(18, 4), (20, 4), (12, 4), (7, 1), (9, 10)])
def test_what_is_held_is_what_a_peer_has_left(last: int, every: int) -> None:
    settings = small_settings(
        optimizer=OptimizerSettings(total_steps=last),
        checkpoint=CheckpointSettings(every_steps=every, snapshot_every=every),
    )
    kept: list[int] = []
    for version in range(1, last + 1):
        before = list(kept)
        if version % every == 0 or version == last:
            kept = [*kept, version][-KEPT_SNAPSHOTS:]
        on_disk = kept if version == last else before  # the newest may still be on its way there
        assert HELD_SNAPSHOTS == KEPT_SNAPSHOTS
        due = range(every, version, every)
        gone = [at for at in due if at not in on_disk]
        assert gone == [at for at in due if at < oldest_held(version, settings)], f"at version {version}"


def test_who_says_that_it_is_far_behind_has_nobody_wait_for_what_others_hold_no_more() -> None:
    """Anybody may be admitted and report; and a member may stop to report, or say that it is where it was."""
    settings = small_settings(1, checkpoint=CheckpointSettings(every_steps=4, snapshot_every=4))
    progress = RunProgress(num_stages=1, first_version=0)
    said = {"one": 40, "two": 40, "liar": 4, "stranger": 4, "silent": None}
    for name, version in said.items():
        progress.peers[PeerId(name)] = PeerFigures(0, 0.0, 0.0)
        if version is not None:
            report = replace(report_of(0, 1.0), version=version)
            progress.take(PeerId(name), report, is_member=name != "stranger")
    assert progress.is_gone(0, 4, settings)
    assert not progress.is_gone(0, 36, settings)
    progress.peers[PeerId("two")].left = True
    assert not progress.is_gone(0, 4, settings), "one of two says that it holds it"


def test_a_version_that_was_reported_to_a_host_that_died_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    async def wait() -> None:
        every = 2
        async with hosted(tmp_path, checkpoint={"every_steps": every, "snapshot_every": every}) as host:
            settings, progress = host.run.settings, host.itself.progress
            last = replace(report_of(0, 1.0), version=(HELD_SNAPSHOTS + 1) * every + 1)
            assert oldest_held(last.version, settings) > every
            progress.peers[PEER] = PeerFigures(0, 0.0, 0.0, last=last)
            async with asyncio.timeout(10.0):
                with pytest.raises(VersionGone, match=f"holds version {every}"):
                    await host.itself._reached(every)

    asyncio.run(wait())
