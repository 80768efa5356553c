"""Runs of one stage: each peer holds the whole model, reads its own data and has the loss itself."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peer.audit.exams import EXAM_ANSWER
from swarm.core.errors import RemoteError
from swarm.core.ids import PeerId
from swarm.network.transport import Message, Transport
from tests.peer.stage.state_digests import StateDigests
from tests.reference import train_reference
from tests.swarm_in_process import InProcessSwarm, identity_of, manifest_of, prepare, swarm_in_process
from verification.replay.evidence_file import evidence_in
from verification.replay.judge import judge

EXACT: dict[str, Any] = {
    "codecs": {"activations": "fp32", "activation_gradients": "fp32", "averaging": "fp32"},
    "averaging": {"rule": "mean"},
}


def whole(**tables: dict[str, Any]) -> str:
    """A run of one stage."""
    return manifest_of(**{"model": {"stages": 1}} | tables)


def events(swarm: InProcessSwarm, kind: str) -> list[dict[str, Any]]:
    return [event for event in swarm.events if event["event"] == kind]


def test_it_learns_what_one_process_learns_from_the_same_microbatches(tmp_path: Path) -> None:
    run = prepare(whole(**EXACT, optimizer={"total_steps": 6}), tmp_path)

    async def train() -> dict[str, Any]:
        async with swarm_in_process(run, tmp_path, peers=(3,)) as swarm:
            return await swarm.finished()

    report = asyncio.run(train())
    assert len(set(report["state_digests"]["0"].values())) == 1
    reference = train_reference(run, report["microbatches"], evaluate_tokens=2048)
    assert report["held_out_loss"]["end"] == pytest.approx(reference.held_out_loss, abs=1e-4)
    assert report["held_out_loss"]["end"] < report["held_out_loss"]["start"]


def test_members_die_and_come_and_all_of_a_step_is_done_again_that_died_with_them(tmp_path: Path) -> None:
    async def train() -> dict[str, Any]:
        tables: dict[str, Any] = {
            "optimizer": {"total_steps": 9},
            "batch": {"target_tokens": 8 * 32},
            "limits": {"founders_per_stage": 3},  # or who dies may be the only one that has come so far
        }
        async with swarm_in_process(whole(**tables), tmp_path, peers=(3,)) as swarm:
            await swarm.until_version(3)
            await swarm.kill(swarm.of_stage(0)[1])
            newcomer = await swarm.add_peer(0)
            await swarm.until_version(6)
            report = await swarm.finished()
            assert newcomer.peer_id in report["state_digests"]["0"]
            return report

    report = asyncio.run(train())
    assert report["steps"] == 9
    assert len(set(report["state_digests"]["0"].values())) == 1
    assert all(len(ids) >= 8 for ids in report["microbatches"].values()), report["microbatches"]


@pytest.mark.soak
@pytest.mark.parametrize(
    "attack",
    ["sign_flip@3", "label_flip@3", "copied_gradient@3", "dropped_batch@3", "copied_papers@3", "withholding@3"],
)
def test_a_liar_is_put_out_when_replicas_replay_its_contribution(tmp_path: Path, attack: str) -> None:
    leaves_evidence = attack != "withholding@3"
    liar, digests = identity_of(2).peer_id, StateDigests()
    tables: dict[str, Any] = {
        "run": {"trust": "public"},
        "audits": {"hop_budget": 0.0, "contribution_budget": 8.0},
        "optimizer": {"total_steps": 40},
        "batch": {"target_tokens": 8 * 32},
        "limits": {"founders_per_stage": 3},
    }

    def is_out(swarm: InProcessSwarm) -> bool:
        is_banned = bool(events(swarm, "banned")) or not leaves_evidence
        return is_banned and all(liar not in peer.steps.chain.members for peer in swarm.of_stage(0)[:2])

    async def train() -> InProcessSwarm:
        async with swarm_in_process(whole(**tables), tmp_path, peers=(3,), attacks={(0, 2): attack}) as swarm:
            swarm.on_applied.append(digests.applied)
            await swarm.until_version(3)
            await swarm.until(lambda: is_out(swarm))
            await swarm.until_version(swarm.host.progress.done_versions() + 2)
            return swarm

    swarm = asyncio.run(train())
    banned = events(swarm, "banned")
    assert [event["peer_id"] for event in banned] == [liar] * leaves_evidence
    for ban in banned:
        verdict = judge(
            evidence_in(Path(ban["evidence"])), run_key=swarm.run.run_key.peer_id, data=swarm.run.data.train_path
        )
        assert verdict.guilty
        assert verdict.accused == liar
    assert all(len(same) == 1 for same in digests.values())


class Careless:
    """A transport whose owner answers exams with another's gradient."""

    def __init__(self, inner: Transport, refused: list[str]) -> None:
        self._inner = inner
        self._refused = refused

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def call(self, peer_id: PeerId, method: str, request: Message, **limits: Any) -> Message:
        if method == EXAM_ANSWER:
            said = np.frombuffer(request.body, dtype="<f4")
            request = Message(request.meta, np.roll(said, 1).tobytes())
        try:
            return await self._inner.call(peer_id, method, request, **limits)
        except RemoteError as error:
            if method == EXAM_ANSWER:
                self._refused.append(error.kind)
            raise


def test_a_newcomer_becomes_a_member_by_gradients_that_agree_and_by_no_others(tmp_path: Path) -> None:
    refused: list[str] = []
    tables: dict[str, Any] = {
        "run": {"trust": "public"},
        "audits": {"agreements_to_promote": 3},
        "optimizer": {"total_steps": 400},
        "limits": {"founders_per_stage": 2},
        "checkpoint": {"every_steps": 400, "snapshot_every": 4},
    }

    def wrap(stage: int, index: int, transport: Transport) -> Transport:
        return Careless(transport, refused) if index == 2 else transport  # type: ignore[return-value]

    async def train() -> None:
        async with swarm_in_process(whole(**tables), tmp_path, peers=(2,), wrap=wrap) as swarm:
            await swarm.until_version(2)
            careless, honest = await swarm.add_peer(0), await swarm.add_peer(0)
            await swarm.until(lambda: len(refused) >= 4 and bool(events(swarm, "promoted")))
            assert [event["peer_id"] for event in events(swarm, "promoted")] == [honest.peer_id]
            assert set(refused) == {"exam"}
            assert careless.peer_id not in swarm.of_stage(0)[0].steps.chain.members

    asyncio.run(train())
