"""Liars in the directory and a crowd of made up peers, in a running swarm: what they say moves nobody."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from peer.adversary.directory import SybilFlood
from peer.adversary.kinds import parse
from peer.pipeline.downstream import METHOD
from peer.state.catch_up import JOIN
from swarm.core.audit.ticket import Ticket
from swarm.core.errors import TransientError
from swarm.core.ids import PeerId
from swarm.host_protocol import ADMIT
from swarm.network.transport import Handler, Message, Transport
from tests.swarm_in_process import InProcessSwarm, identity_of, manifest_of, swarm_in_process


def events(swarm: InProcessSwarm, kind: str) -> list[dict[str, Any]]:
    return [event for event in swarm.events if event["event"] == kind]


def named(total_steps: int, **tables: dict[str, Any]) -> str:
    fields: dict[str, dict[str, Any]] = {
        "optimizer": {"total_steps": total_steps},
        "batch": {"target_tokens": 6 * 32},
        "limits": {"founders_per_stage": 3},
        "checkpoint": {"every_steps": total_steps, "snapshot_every": 4},
        "deadlines": {"call_s": 1.0, "lease_s": 5.0},
    }
    return manifest_of(**fields | tables)


def test_a_swarm_trains_on_while_peers_forge_replay_and_inflate_records(tmp_path: Path) -> None:
    attacks = {(0, 2): "forged_records@0", (1, 1): "replayed_records@0", (1, 2): "inflated_records@0"}

    async def train() -> None:
        async with swarm_in_process(named(400), tmp_path, peers=(3, 3), attacks=attacks) as swarm:
            honest = [swarm.peers[number] for number in (0, 1, 3)]
            await swarm.until(lambda: all(peer.directory.refused >= 3 for peer in honest))
            await swarm.until_version(swarm.host.progress.done_versions() + 1)
            for stage in (0, 1):
                members = {peer.peer_id for peer in swarm.of_stage(stage)}
                for peer in swarm.of_stage(stage):
                    assert {*peer.steps.chain.members} == members, "nobody has moved away"
            for kind in ("banned", "quarantined", "left", "dismissed"):
                assert events(swarm, kind) == []

    asyncio.run(train())


class Slow:
    """A transport whose owner takes so long for each microbatch; who served how many is counted."""

    def __init__(
        self, inner: Transport, seconds: float, name: tuple[int, int], served: Counter[tuple[int, int]]
    ) -> None:
        self._inner, self._seconds, self._name, self._served = inner, seconds, name, served

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def serve(self, method: str, handler: Handler, *, max_body_bytes: int) -> None:
        async def slowly(sender: PeerId, request: Message) -> Message:
            reply = await handler(sender, request)
            if reply.meta.get("status") == "ok":
                await asyncio.sleep(self._seconds)
                self._served[self._name] += 1
            return reply

        self._inner.serve(method, slowly if method == METHOD else handler, max_body_bytes=max_body_bytes)


@pytest.mark.soak
@pytest.mark.timeout(200)
def test_who_says_that_nothing_waits_gets_work_by_what_is_measured(tmp_path: Path) -> None:
    """All are slow enough to be asked; the one that says it has room takes three times as long as the others."""
    served: Counter[tuple[int, int]] = Counter()

    def wrap(stage: int, index: int, transport: Transport) -> Transport:
        if stage == 0:
            return transport
        return Slow(transport, 4.5 if index == 2 else 1.5, (stage, index), served)  # type: ignore[return-value]

    manifest = named(400, batch={"target_tokens": 24 * 32}, deadlines={"step_s": 60.0, "straggler_s": 10.0})

    async def train() -> None:
        attacks = {(1, 2): "inflated_records@0"}
        async with swarm_in_process(manifest, tmp_path, peers=(3, 3), attacks=attacks, wrap=wrap) as swarm:
            await swarm.until(lambda: sum(served.values()) >= 150, timeout_s=180.0)

    asyncio.run(train())
    honest = min(served[1, 0], served[1, 1])
    assert served[1, 2] <= honest, served


@pytest.mark.soak
@pytest.mark.parametrize("crowd", [4, 32])
def test_a_flood_of_made_up_peers_gains_no_seat_and_keeps_nobody_out(tmp_path: Path, crowd: int) -> None:
    """A founder names 32 of them to every leader and on its own rosters; some ask for tickets, and to be let in."""
    manifest = named(400, run={"trust": "public"}, audits={"agreements_to_promote": 2}, batch={"target_tokens": 4 * 32})
    flood = parse("sybil_flood", seed=identity_of(5).peer_id)
    assert isinstance(flood, SybilFlood)
    sybils = {sybil.peer_id for sybil in flood.identities}

    async def knock(swarm: InProcessSwarm, number: int) -> None:
        """Ask for a ticket, which is given, and for a seat, which is not."""
        identity = flood.identities[number]
        transport, host = swarm.network.transport(identity), swarm.run.host_key.peer_id
        meta = {"stage": 1, "chain_end": bytes(32), "voucher": ""}
        reply = await transport.call(host, ADMIT, Message(meta), timeout_s=10.0, max_body_bytes=0)
        ticket = Ticket.from_value(reply.meta["ticket"])
        for member in swarm.of_stage(1)[:2]:
            asked = Message({"ticket": ticket.to_value(), "promotion": None})
            with pytest.raises(TransientError, match="probation"):
                await transport.call(member.peer_id, JOIN, asked, timeout_s=10.0, max_body_bytes=0)

    async def train() -> None:
        async with swarm_in_process(manifest, tmp_path, peers=(3, 3), attacks={(1, 2): "sybil_flood@0"}) as swarm:
            await swarm.until_version(2)
            for number in range(crowd):
                await knock(swarm, number)
            newcomer = await swarm.add_peer(1)
            await swarm.until(
                lambda: newcomer.peer_id in [event["peer_id"] for event in events(swarm, "joined")], timeout_s=60.0
            )
            await swarm.until_version(swarm.host.progress.done_versions() + 2)
            everyone = {peer.peer_id for peer in swarm.peers}
            for peer in swarm.peers:
                rounds, facts = peer.rounds, peer.steps.chain
                assert {*facts.members} <= everyone
                assert not sybils & {*facts.basis.neighbours, *rounds.neighbours()}
                if peer.peer_id != identity_of(5).peer_id:
                    assert not sybils & peer.steps.joining, "a place for each of them is one for nobody else"
            assert not sybils & {event["peer_id"] for kind in ("joined", "promoted") for event in events(swarm, kind)}

    asyncio.run(train())
