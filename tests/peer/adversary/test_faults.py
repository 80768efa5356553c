"""Faults in a running swarm: a machine whose bits flip is put out, tests itself, and earns its place again."""

import asyncio
from pathlib import Path

import pytest

from peer.adversary import strengths
from peer.audit import mending
from swarm.core.errors import LocalError
from tests.swarm_in_process import InProcessSwarm, manifest_of, swarm_in_process
from verification.audit.standing import FAULT
from verification.replay.stage_replay import StageReplay

pytestmark = pytest.mark.processes


def told(swarm: InProcessSwarm, kind: str) -> list[str]:
    """Whom events of this kind are about."""
    return [event["peer_id"] for event in swarm.events if event["event"] == kind]


def public(hop: float, contribution: float) -> str:
    """A run of two stages with three replicas each, in which everything is audited."""
    return manifest_of(
        run={"trust": "public"},
        audits={"hop_budget": hop, "contribution_budget": contribution, "agreements_to_promote": 3},
        optimizer={"total_steps": 400},
        batch={"target_tokens": 12 * 32},
        limits={"founders_per_stage": 3},
        checkpoint={"every_steps": 400, "snapshot_every": 4},
    )


@pytest.mark.soak
@pytest.mark.parametrize(("attack", "hop", "contribution"), [("sign_flip", 0.0, 8.0), ("gradient_negate", 8.0, 0.0)])
def test_a_liar_that_pleads_a_fault_is_banned(tmp_path: Path, attack: str, hop: float, contribution: float) -> None:
    attacks = {(1, 2): f"pleading_{attack}@3"}

    async def train() -> None:
        async with swarm_in_process(public(hop, contribution), tmp_path, peers=(3, 3), attacks=attacks) as swarm:
            liar = swarm.of_stage(1)[2].peer_id
            await swarm.until(lambda: bool(told(swarm, "banned")), timeout_s=90.0)
            assert told(swarm, "banned") == [liar]
            assert told(swarm, "quarantined") == told(swarm, "acquitted") == []

    asyncio.run(train())


@pytest.mark.soak
@pytest.mark.parametrize(("hop", "contribution", "forgets"), [(0.0, 8.0, False), (0.0, 8.0, True), (8.0, 0.0, True)])
def test_a_machine_whose_bits_flip_is_put_out_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hop: float, contribution: float, *, forgets: bool
) -> None:
    """Also where it `forgets` the weights that it did wrong work on before it is asked, as on a busy machine it did: it
    was banned."""
    if forgets:

        def gone(*_: object) -> StageReplay:
            raise LocalError("no snapshot is held")

        monkeypatch.setattr(mending, "rebuilt", gone)
    monkeypatch.setattr(strengths, "BIT_FLIP_SHARE", 0.5)  # the first is found at once; what is tested comes after
    attacks = {(1, 2): "bit_flips@3"}

    async def train() -> None:
        async with swarm_in_process(public(hop, contribution), tmp_path, peers=(3, 3), attacks=attacks) as swarm:
            broken = swarm.of_stage(1)[2].peer_id
            for kind in ("quarantined", "pardoned", "promoted"):
                await swarm.until(lambda kind=kind: broken in told(swarm, kind), timeout_s=90.0)  # type: ignore[misc]
                assert set(told(swarm, kind)) == {broken}
            put_out = [event for event in swarm.events if event["event"] == "quarantined"]
            assert put_out[0]["kind"] == FAULT
            await swarm.until(lambda: broken in told(swarm, "joined"), timeout_s=90.0)
            assert told(swarm, "banned") == told(swarm, "acquitted") == []

    asyncio.run(train())
