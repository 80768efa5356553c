"""Which versions a host may still wait for: those that a live peer keeps a snapshot of."""

import pytest

from bootstrap.progress import HELD_SNAPSHOTS, oldest_held
from peer.snapshots import KEPT
from swarm.core.settings import CheckpointSettings, OptimizerSettings
from tests.exhibits import small_settings


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
            kept = [*kept, version][-KEPT:]
        on_disk = kept if version == last else before  # the newest may still be on its way there
        assert HELD_SNAPSHOTS == KEPT
        due = range(every, version, every)
        gone = [at for at in due if at not in on_disk]
        assert gone == [at for at in due if at < oldest_held(version, settings)], f"at version {version}"
