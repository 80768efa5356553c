"""Juries in a running swarm: a liar is put out where no host lives, and neither accusers nor jurors can lie well."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from swarm.core.ids import PeerId
from tests.pretend_device import PRETEND
from tests.swarm_in_process import InProcessSwarm, SwarmPeer, manifest_of, swarm_in_process


def audited(**tables: dict[str, Any]) -> str:
    """A run in which every contribution is replayed by everyone. Its second stage will have five replicas."""
    named: dict[str, dict[str, Any]] = {
        "run": {"trust": "public"},
        "audits": {"hop_budget": 0.0, "contribution_budget": 2.0, "agreements_to_promote": 0},
        "optimizer": {"total_steps": 4000},
        "batch": {"target_tokens": 10 * 32},
        "limits": {"founders_per_stage": 2},
        "checkpoint": {"every_steps": 4000, "snapshot_every": 4},
    }
    return manifest_of(**named | tables)


def events(swarm: InProcessSwarm, kind: str) -> list[dict[str, Any]]:
    return [event for event in swarm.events if event["event"] == kind]


async def until_full(swarm: InProcessSwarm, num_members: int) -> None:
    await swarm.until(
        lambda: (
            all(len(peer.steps.chain.members) == num_members for peer in swarm.of_stage(1) if peer.daemon.at)
            and len([peer for peer in swarm.of_stage(1) if peer.daemon.at]) == num_members
        )
    )


def outcasts(peers: list[SwarmPeer]) -> list[set[PeerId]]:
    """Whom each of them shuts out."""
    everyone = {peer.peer_id for peer in peers}
    return [{other for other in everyone if peer.daemon.standing.is_out(other)} for peer in peers]


@pytest.mark.soak
def test_a_liar_is_put_out_when_the_host_is_dead(tmp_path: Path) -> None:
    """One of six. Of five, the liar and the host have a third of the votes where all did as much: then, with neither of
    them heard, the stage waits for the host. Two of the jurors and of the others compute on another device, in bf16."""
    named: dict[str, Any] = {
        "attacks": {(1, 5): "sign_flip@8"},
        "device_of": lambda stage, index: PRETEND if index in (1, 3) else "cpu",
    }

    async def train() -> None:
        manifest = audited(model={"compute_dtype": "bf16"})
        async with swarm_in_process(manifest, tmp_path, peers=(2, 6), **named) as swarm:
            await until_full(swarm, 6)
            swarm.network.kill(swarm.run.host_key.peer_id)
            liar = swarm.of_stage(1)[5]
            honest = [peer for peer in swarm.peers if peer is not liar]
            async with asyncio.timeout(600):  # replays give way to training
                while outcasts(swarm.peers)[:-1] != [{liar.peer_id}] * len(honest):
                    await honest[0].steps.wait_for_version(honest[0].steps.version + 1, timeout_s=1.0)
                while any(liar.peer_id in peer.steps.chain.members for peer in honest if peer.stage == 1):
                    await honest[0].steps.wait_for_version(honest[0].steps.version + 1, timeout_s=1.0)
            version = honest[0].steps.version
            assert await honest[0].steps.wait_for_version(version + 3, timeout_s=120.0), "the others train on"
            assert outcasts(swarm.peers)[:-1] == [{liar.peer_id}] * len(honest)

    asyncio.run(train())


@pytest.mark.soak
def test_charges_without_a_case_put_nobody_out_and_cost_their_bringers_their_place(tmp_path: Path) -> None:
    """Two of seven charge somebody each step, and convict whomever anybody asks about."""
    attacks = {(1, 5): "charges@6", (1, 6): "charges@6"}

    async def train() -> None:
        async with swarm_in_process(audited(), tmp_path, peers=(2, 7), attacks=attacks) as swarm:
            liars = {swarm.peers[7].peer_id, swarm.peers[8].peer_id}
            await swarm.until(
                lambda: liars == {event["peer_id"] for event in events(swarm, "quarantined")}, timeout_s=120.0
            )
            assert {event["kind"] for event in events(swarm, "quarantined")} == {"false_accusation"}
            assert {event["accuser"] for event in events(swarm, "lapsed")} == liars
            honest = [peer for peer in swarm.peers if peer.peer_id not in liars]
            assert all(out <= liars for out in outcasts(honest))
            version = honest[0].steps.version
            assert await honest[0].steps.wait_for_version(version + 3, timeout_s=120.0), "the others train on"

    asyncio.run(train())


@pytest.mark.soak
def test_no_honest_peer_is_out_for_long_when_one_accuses_falsely_and_jurors_lie(tmp_path: Path) -> None:
    """Two of six lie: about others, and as jurors. The host contradicts them all; who accuses is put out in the end."""
    attacks = {(1, 4): "false_accuser@8", (1, 5): "lying_juror"}

    async def train() -> None:
        async with swarm_in_process(audited(), tmp_path, peers=(2, 6), attacks=attacks) as swarm:
            await swarm.until(lambda: len(events(swarm, "acquitted")) >= 3, timeout_s=120.0)
            accuser = swarm.peers[6].peer_id
            liars = {accuser, swarm.peers[7].peer_id}
            await swarm.until(lambda: accuser in [e["peer_id"] for e in events(swarm, "quarantined")], timeout_s=120.0)
            assert events(swarm, "banned") == []
            assert {event["accuser"] for event in events(swarm, "acquitted")} == {accuser}
            pardoned = {event["peer_id"] for event in events(swarm, "pardoned")}
            assert {event["peer_id"] for event in events(swarm, "quarantined")} <= liars | pardoned

    asyncio.run(train())
