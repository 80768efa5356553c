"""Replicas audit each other in a running swarm: who lies is found, proved and put out, and nobody else is."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bootstrap.owner.honest_spread import spread_by_pair
from swarm.averaging.activations import activation_codec
from swarm.bulk_digest import bulk_digest
from swarm.core.ids import PeerId
from swarm.identity.key import Identity
from swarm.network.transport import Handler, Message, Transport
from tests.peer.stage.state_digests import StateDigests
from tests.pretend_device import PRETEND
from tests.swarm_in_process import DeviceOf, InProcessSwarm, Wrap, identity_of, manifest_of, swarm_in_process
from verification.pipeline.headers import BirthRecord, HopHeader
from verification.replay.evidence_file import evidence_in
from verification.replay.judge import judge

STEPS = 12


def audited(*, hop: float, contribution: float, **tables: dict[str, Any]) -> str:
    """A run of two stages with three replicas each, in which so much is audited."""
    named: dict[str, dict[str, Any]] = {
        "run": {"trust": "public"},
        "audits": {"hop_budget": hop, "contribution_budget": contribution},
        "optimizer": {"total_steps": STEPS},
        "batch": {"target_tokens": 12 * 32},
        "limits": {"founders_per_stage": 3},
        "checkpoint": {"every_steps": 8, "snapshot_every": 4},
    }
    return manifest_of(**named | tables)


def second_on(other: str) -> DeviceOf:
    """The second peer of each stage computes on the other device."""
    return lambda stage, index: other if index == 1 else "cpu"


def run(
    manifest: str, folder: Path, attacks: dict[tuple[int, int], str], wrap: Wrap | None = None
) -> tuple[InProcessSwarm, dict[str, Any]]:
    async def train() -> tuple[InProcessSwarm, dict[str, Any]]:
        named: dict[str, Any] = {} if wrap is None else {"wrap": wrap}
        async with swarm_in_process(manifest, folder, peers=(3, 3), attacks=attacks, **named) as swarm:
            return swarm, await swarm.finished()

    return asyncio.run(train())


def events(swarm: InProcessSwarm, kind: str) -> list[dict[str, Any]]:
    return [event for event in swarm.events if event["event"] == kind]


@pytest.mark.parametrize(
    ("stage", "attack", "hop", "contribution", "dtype", "other"),
    [
        (1, "sign_flip@3", 0.0, 8.0, "fp32", "cpu"),
        pytest.param(1, "sign_flip@3", 0.0, 8.0, "bf16", "cpu", marks=pytest.mark.soak),
        pytest.param(1, "sign_flip@3", 0.0, 8.0, "bf16", PRETEND, marks=pytest.mark.soak),
        pytest.param(1, "gradient_negate@3", 8.0, 0.0, "bf16", PRETEND, marks=pytest.mark.soak),
        pytest.param(0, "activation_noise@3", 8.0, 0.0, "fp32", "cpu", marks=pytest.mark.soak),
        pytest.param(1, "gradient_negate@3", 8.0, 0.0, "fp32", "cpu", marks=pytest.mark.soak),
        pytest.param(0, "label_flip@3", 8.0, 0.0, "fp32", "cpu", marks=pytest.mark.soak),
        pytest.param(0, "row_bias@3", 0.0, 8.0, "fp32", "cpu", marks=pytest.mark.soak),
    ],
)
def test_a_liar_is_banned_and_the_evidence_holds_when_replicas_look(
    tmp_path: Path, stage: int, attack: str, hop: float, contribution: float, dtype: str, other: str
) -> None:
    """Also where peers on another device are among them, none of whom is charged."""
    liar = identity_of(3 * stage + 2).peer_id
    named: dict[str, dict[str, Any]] = {"model": {"compute_dtype": dtype}, "optimizer": {"total_steps": 40}}
    digests = StateDigests()

    async def train() -> InProcessSwarm:
        manifest = audited(hop=hop, contribution=contribution, **named)
        places: dict[str, Any] = {"attacks": {(stage, 2): attack}, "device_of": second_on(other)}
        async with swarm_in_process(manifest, tmp_path, peers=(3, 3), **places) as swarm:
            swarm.on_applied.append(digests.applied)
            await swarm.until(lambda: bool(events(swarm, "banned")), timeout_s=60.0)
            await swarm.until(
                lambda: all(liar not in peer.steps.chain.members for peer in swarm.of_stage(stage)), timeout_s=60.0
            )
            await swarm.until_version(swarm.host.progress.done_versions() + 2, timeout_s=60.0)
            return swarm

    swarm = asyncio.run(train())
    banned = events(swarm, "banned")
    assert [event["peer_id"] for event in banned] == [liar], [swarm.events[-1], banned]
    assert 3 <= banned[0]["step"] <= 6, "it lies from step 3 on, and every step is audited"
    evidence = evidence_in(Path(banned[0]["evidence"]))
    verdict = judge(evidence, run_key=swarm.run.run_key.peer_id, data=swarm.run.data.train_path)
    assert verdict.guilty
    assert verdict.accused == liar
    assert all(len(same) == 1 for same in digests.values())


class TwoFaced:
    """A transport whose owner answers with the negated gradient from step 3 on, and keeps the true one to show."""

    def __init__(self, inner: Transport, identity: Identity) -> None:
        self._inner = inner
        self._identity = identity

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def serve(self, method: str, handler: Handler, *, max_body_bytes: int) -> None:
        async def lying(sender: PeerId, request: Message) -> Message:
            reply = await handler(sender, request)
            if "header" not in reply.meta or BirthRecord.from_value(request.meta["birth"]).step < 3:
                return reply
            header, codec = HopHeader.from_value(reply.meta["header"]), activation_codec("int8")
            shape = (header.shape[0], header.shape[1], header.shape[2])
            body = codec.encode(-codec.decode(reply.body, shape))
            own = replace(header, body_digest=bulk_digest(body)).signed_by(self._identity)
            return Message({**reply.meta, "header": own.to_value()}, body)

        self._inner.serve(method, lying if method == "forward" else handler, max_body_bytes=max_body_bytes)


@pytest.mark.soak
def test_a_liar_that_shows_its_auditors_another_gradient_is_put_out(tmp_path: Path) -> None:
    """As a liar or, since its own machine does the work again rightly, as one with a fault."""

    def wrap(stage: int, index: int, transport: Transport) -> Transport:
        return TwoFaced(transport, identity_of(5)) if (stage, index) == (1, 2) else transport

    swarm, _ = run(audited(hop=8.0, contribution=0.0), tmp_path, {}, wrap)
    out = events(swarm, "banned") + events(swarm, "quarantined")
    assert {event["peer_id"] for event in out} == {identity_of(5).peer_id}, out
    (path, *_) = sorted((swarm.run.folder.root / "evidence").iterdir())
    evidence = evidence_in(path)
    assert judge(evidence, run_key=swarm.run.run_key.peer_id).guilty


@pytest.mark.soak
def test_nobody_is_accused_when_all_are_honest_and_everything_is_audited(tmp_path: Path) -> None:
    swarm, report = run(audited(hop=24.0, contribution=1.0), tmp_path, {})  # half of it whole, the rest by microbatch
    assert report["steps"] == STEPS
    assert events(swarm, "banned") == events(swarm, "acquitted") == events(swarm, "dismissed") == []
    counters = [auditor.counters for peer in swarm.peers if (auditor := peer.verifying.auditor) is not None]
    assert len(counters) == len(swarm.peers)
    assert sum(one.contributions for one in counters) >= 20
    assert sum(one.hops for one in counters) >= 20
    assert sum(one.frauds + one.suspicious + one.debts for one in counters) == 0
    assert max(one.largest_honest_share for one in counters) <= 0.3
    (told,) = spread_by_pair(swarm.host.progress.audits_made())  # one machine, one numeric class
    assert told.reporters == len(swarm.peers)
    for spread in told.by_kind.values():
        assert spread.reporters >= 3
        assert spread.largest_share <= 0.3
