"""What goes wrong in training is noticed, told with step, data and peers, and gone in the next step."""

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest

from bootstrap.audit.justice import Justice
from bootstrap.owner.progress import PeerFigures, RunProgress
from bootstrap.owner.trouble import LOSSES, Notice, Trouble
from bootstrap.program.ledger import Ledger
from swarm.core.errors import LocalError
from swarm.core.ids import MicrobatchId, PeerId
from swarm.core.pipeline.data_order import DataOrder
from tests.bootstrap.state.hosted import hosted
from tests.swarm_in_process import InProcessSwarm, manifest_of, swarm_in_process
from tests.verification.exhibits import small_settings

PEER = PeerId("peer")


def test_a_step_is_taken_for_skipped_by_the_replicas_rule_also_after_a_rollback() -> None:
    settings = small_settings(2)
    trouble = Trouble(settings)
    factor = settings.optimizer.skip_norm_factor
    for step in range(20):
        assert trouble.skipped(1, step, 1.0 + step) is None
    assert trouble.skipped(1, 20, 100 * factor) is not None
    assert trouble.skipped(0, 20, 100 * factor) is None  # another stage has norms of its own
    assert trouble.skipped(1, 21, None) == "the round had no work"
    trouble.begin_again(1, 10)  # as it was at version 10, when ten norms were known
    assert trouble.skipped(1, 30, 100 * factor) is None


def test_a_loss_above_the_last_ones_is_a_spike_and_a_falling_one_is_none() -> None:
    trouble = Trouble(small_settings(2))
    assert not any(trouble.spiked(5.0 - 0.1 * step) for step in range(2 * LOSSES))
    reason = trouble.spiked(4.9)
    assert reason is not None
    assert "4.9" in reason
    assert trouble.spiked(2.0) is None


def test_a_notice_tells_of_its_data_as_ranges_of_the_training_file() -> None:
    order = DataOrder(num_tokens=1000, sequence_length=4, microbatch_size=2, chunk_tokens=100, seed=3)
    notice = Notice("skipped", 7, 1, (PEER,), (4, 5, 6, 30), "too long")
    assert Notice.from_facts(notice.to_facts()) == notice
    told = notice.told(order)
    assert told["ids"] == [[4, 7], [30, 31]]
    read = {token for start, stop in told["tokens"] for token in range(start, stop)}
    starts = [start for number in (4, 5, 6, 30) for start in order.sample_starts(MicrobatchId(number))]
    assert read == {token for start in starts for token in range(start, start + order.sequence_length + 1)}
    across = order.spans(MicrobatchId(number) for number in range(order.microbatches_per_chunk + 1))
    assert [(span.first, span.stop) for span in across] == [
        (0, order.microbatches_per_chunk),
        (order.microbatches_per_chunk, order.microbatches_per_chunk + 1),
    ]


def test_silence_is_told_once_for_each_version_that_is_not_left(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosted(tmp_path) as host:
            itself = host.itself
            itself.progress.peers[PEER] = PeerFigures(1, 0.0, 0.0)
            itself.progress.steps[0].ids[0] = {0}  # stage 0 has ended the step, stage 1 has not
            itself._notice_silence()
            assert not itself.notices  # it has only just begun
            itself._heard_at -= 10_000
            itself._notice_silence()
            itself._notice_silence()
            (notice,) = itself.notices
            assert (notice.kind, notice.step, notice.stage, notice.peers) == ("stalled", 0, 1, (PEER,))
            assert host.events[-1]["kind"] == "stalled"

    asyncio.run(scenario())


def test_how_long_the_last_windows_took_is_known_once_one_has_ended() -> None:
    progress = RunProgress(1, 0)
    assert progress.longest_recent_step_s() == math.inf
    progress.started_at = 100.0
    progress.steps[0].finished_at = 1900.0
    assert progress.longest_recent_step_s() == 1800.0
    progress.steps[1].finished_at, progress.steps[2].finished_at = 2900.0, 4100.0
    assert progress.longest_recent_step_s() == 1200.0


def notices_of(swarm: InProcessSwarm, kind: str) -> list[dict[str, Any]]:
    return [event for event in swarm.events if event["event"] == "notice" and event["kind"] == kind]


def test_planted_faults_are_skipped_by_themselves_and_told_with_step_data_and_peers(tmp_path: Path) -> None:
    """A sum that is not finite at stage 0 in step 4, a gradient far too long at stage 1 in step 17."""
    manifest = manifest_of(
        optimizer={"total_steps": 20},
        averaging={"rule": "mean"},  # the other rules bound what one or two members bring
        checkpoint={"every_steps": 20, "snapshot_every": 10},
    )

    async def scenario() -> None:
        attacks = {(0, 0): "nan_gradient@4", (1, 0): "long_gradient@17"}
        async with swarm_in_process(manifest, tmp_path, peers=(1, 1), attacks=attacks) as swarm:
            report = await swarm.finished()
            first, liar = swarm.peers[0].peer_id, swarm.peers[1].peer_id
            (skipped_first, *others) = sorted(notices_of(swarm, "skipped"), key=lambda told: told["step"])
            assert (skipped_first["stage"], skipped_first["step"]) == (0, 4)
            assert "no work" in skipped_first["reason"]
            (not_finite,) = notices_of(swarm, "not_finite")
            assert (not_finite["stage"], not_finite["step"], not_finite["peers"]) == (0, 4, [first])
            assert sum(stop - start for start, stop in not_finite["ids"]) == 4
            assert len(not_finite["tokens"]) <= 2 * 4, "of the four microbatches' two samples"
            told, *later = others
            assert all(one["step"] > 17 for one in later), "the liar goes on"
            assert (told["stage"], told["step"]) == (1, 17)
            assert told["peers"] == [liar]
            assert sum(stop - start for start, stop in told["ids"]) == 4
            assert "times" in told["reason"]
            # The data of the skipped step was certified, and is not taken again; that of the lost one is.
            used = [number for step in range(20) for number in report["microbatches"][str(step)]]
            assert len(used) == len(set(used))
            assert report["steps"] == 20
            assert all(len(set(digests.values())) == 1 for digests in report["state_digests"].values())
            assert json.loads(json.dumps(report["notices"])) == [
                {name: value for name, value in event.items() if name != "event"}
                for event in swarm.events
                if event["event"] == "notice"
            ]
            held = [Notice.from_facts(event.facts) for event in Ledger(swarm.run.folder.ledger).events("notice")]
            assert held == list(swarm.host.notices)

    asyncio.run(scenario())


def test_a_host_of_which_a_part_dies_ends_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def dies(justice: Justice) -> None:
        raise LocalError("justice is no more")

    monkeypatch.setattr(Justice, "run", dies)

    async def scenario() -> None:
        async with swarm_in_process(manifest_of(optimizer={"total_steps": 100_000}), tmp_path, peers=(1, 1)) as swarm:
            with pytest.raises(LocalError, match="justice is no more"):
                await swarm.finished()

    asyncio.run(scenario())


@pytest.mark.soak
def test_a_loss_that_is_not_finite_costs_its_own_microbatches_and_no_more(tmp_path: Path) -> None:
    manifest = manifest_of(batch={"target_tokens": 512}, optimizer={"total_steps": 6}, limits={"founders_per_stage": 2})

    async def scenario() -> None:
        async with swarm_in_process(manifest, tmp_path, peers=(2, 2), attacks={(1, 0): "nan_weights@3"}) as swarm:
            report = await swarm.finished()
            broken = swarm.of_stage(1)[0].peer_id
            told = notices_of(swarm, "not_finite")
            assert [(one["step"], one["stage"], one["peers"]) for one in told] == [(3, 1, [broken])]
            lost = {number for start, stop in told[0]["ids"] for number in range(start, stop)}
            assert lost
            assert lost <= set(report["microbatches"]["3"])  # certified, so that nobody takes it again
            assert all(loss < 10 for _, loss in report["loss"])
            assert not notices_of(swarm, "skipped")  # the other member's work counts
            assert report["steps"] == 6
            assert all(len(set(digests.values())) == 1 for digests in report["state_digests"].values())

    asyncio.run(scenario())
