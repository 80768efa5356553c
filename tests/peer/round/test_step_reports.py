"""What peers report of a step is added up from members, once, and only what can be of this run."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from swarm.core.errors import RemoteError
from swarm.core.ids import PeerId
from swarm.host_protocol import ADMIT, REPORT, StepReport
from swarm.identity.key import Identity
from swarm.network.transport import Message
from tests.swarm_in_process import InProcessSwarm, identity_of, manifest_of, swarm_in_process

STEPS = 3
OUTSIDER = identity_of(99)


async def told(swarm: InProcessSwarm, sender: PeerId, report: StepReport) -> None:
    host = swarm.network._transports[swarm.run.host_key.peer_id]
    async with host.answered(sender, REPORT, Message({"report": report.to_value()})):
        pass


async def refused(swarm: InProcessSwarm, sender: PeerId, report: StepReport, *, kind: str) -> None:
    with pytest.raises(RemoteError) as error:
        await told(swarm, sender, report)
    assert error.value.kind == kind


def said_by(identity: Identity, report: StepReport) -> StepReport:
    """The same, with that peer's word on its audits."""
    audits = replace(report.audits, auditor=identity.peer_id, stage=report.stage, version=report.version)
    return replace(report, audits=audits.signed_by(identity))


def test_reports_that_are_no_members_or_come_again_change_nothing(tmp_path: Path) -> None:
    manifest = manifest_of(
        run={"trust": "public"}, optimizer={"total_steps": STEPS}, checkpoint={"every_steps": 1, "snapshot_every": 1}
    )

    async def train() -> None:
        async with swarm_in_process(manifest, tmp_path, peers=(1, 1), evaluate_tokens=64) as swarm:
            outsider = swarm.network.transport(OUTSIDER)
            wish = Message({"stage": 0, "chain_end": bytes(32), "voucher": None})
            await outsider.call(swarm.run.host_key.peer_id, ADMIT, wish, timeout_s=5.0, max_body_bytes=0)
            before = await swarm.finished()
            progress, member, key = swarm.host.progress, swarm.peers[0].peer_id, swarm.peers[0].identity
            assert before["steps"] == STEPS
            assert all(len(replicas) == 1 for replicas in before["state_digests"].values())
            report = progress.peers[member].last
            assert report is not None
            assert report.state_digest
            lie = replace(report, loss_sum=1e9, state_digest=bytes(32))

            stranger = Identity.generate().peer_id
            await refused(swarm, stranger, lie, kind="standing")
            assert stranger not in progress.peers
            await told(swarm, OUTSIDER.peer_id, said_by(OUTSIDER, lie))  # anybody is admitted here, to probation
            await told(swarm, member, report)  # again: its answer was lost
            await refused(swarm, member, said_by(key, replace(report, stage=1)), kind="standing")
            for version in (0, STEPS + 1, 1 << 40):
                await refused(swarm, member, said_by(key, replace(lie, version=version)), kind="protocol")

            after = swarm.host.report()
            for figure in ("loss", "state_digests", "round_bytes", "stale_share", "overlap"):
                assert after[figure] == before[figure], figure
            assert sorted(progress.steps) == list(range(STEPS))

    asyncio.run(train())
