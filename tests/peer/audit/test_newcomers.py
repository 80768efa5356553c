"""Newcomers in a public swarm: whoever replays what it drew becomes a member, and nobody else comes near."""

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bootstrap.program.ledger import Ledger
from peer.audit.desk import INPUT
from peer.audit.exams import EXAM_ANSWER
from peer.audit.jury import JURY
from peer.pipeline.downstream import METHOD
from peer.round.mail.mail import ROUND
from peer.round.step_progress import PROGRESS
from peer.state.catch_up import JOIN
from swarm.core.audit.ticket import Ticket
from swarm.core.errors import RemoteError, TransientError
from swarm.core.ids import PeerId, Version
from swarm.host_protocol import EXHIBIT, PART
from swarm.network.transport import Message, Transport
from swarm.witness_service import WITNESS
from tests.pretend_device import OTHERS
from tests.swarm_in_process import InProcessSwarm, manifest_of, swarm_in_process


def public(**tables: dict[str, Any]) -> str:
    named: dict[str, dict[str, Any]] = {
        "run": {"trust": "public"},
        "audits": {"agreements_to_promote": 4},
        "optimizer": {"total_steps": 400},
        "limits": {"founders_per_stage": 2},
        "checkpoint": {"every_steps": 400, "snapshot_every": 4},
    }
    return manifest_of(**named | tables)


def events(swarm: InProcessSwarm, kind: str) -> list[dict[str, Any]]:
    return [event for event in swarm.events if event["event"] == kind]


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_a_newcomer_trains_once_its_replays_agree(tmp_path: Path, stage: int) -> None:
    async def train() -> None:
        async with swarm_in_process(public(), tmp_path, peers=(2, 2)) as swarm:
            await swarm.until_version(2)
            newcomer = await swarm.add_peer(stage)
            await swarm.until(lambda: bool(events(swarm, "promoted")))
            promoted = events(swarm, "promoted")
            assert [event["peer_id"] for event in promoted] == [newcomer.peer_id]
            joined = events(swarm, "joined")
            assert [event["peer_id"] for event in joined if event["peer_id"] == newcomer.peer_id] == []
            await swarm.until(lambda: newcomer.peer_id in [event["peer_id"] for event in events(swarm, "joined")])
            version = swarm.host.progress.done_versions()
            await swarm.until_version(version + 3)
            assert newcomer.peer_id in newcomer.steps.chain.members

    asyncio.run(train())


@pytest.mark.soak
@pytest.mark.parametrize("device", OTHERS)
@pytest.mark.parametrize("places", [range(1, 9, 2), (2,)])
def test_a_newcomer_is_promoted_by_members_on_other_devices(tmp_path: Path, places: Sequence[int], device: str) -> None:
    def device_of(stage: int, index: int) -> str:
        return device if index in places else "cpu"

    async def train() -> None:
        async with swarm_in_process(public(), tmp_path, peers=(2, 2), device_of=device_of) as swarm:
            await swarm.until_version(2)
            newcomer = await swarm.add_peer(1)
            await swarm.until(lambda: bool(events(swarm, "promoted")))
            version = swarm.host.progress.done_versions()
            await swarm.until_version(version + 3)
            assert newcomer.steps.replica.model.device.type == device_of(1, 2).partition(":")[0]
            assert not [event for event in swarm.events if event["event"] in ("banned", "quarantined")]

    asyncio.run(train())


class Careless:
    """A transport whose owner answers exams with zeros."""

    def __init__(self, inner: Transport, refused: list[str]) -> None:
        self._inner = inner
        self._refused = refused

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def call(self, peer_id: PeerId, method: str, request: Message, **limits: Any) -> Message:
        if method != EXAM_ANSWER:
            return await self._inner.call(peer_id, method, request, **limits)
        try:
            return await self._inner.call(peer_id, method, Message(request.meta, bytes(len(request.body))), **limits)
        except RemoteError as error:
            self._refused.append(error.kind)
            raise


def test_a_newcomer_that_does_not_compute_stays_outside(tmp_path: Path) -> None:
    refused: list[str] = []

    def wrap(stage: int, index: int, transport: Transport) -> Transport:
        return Careless(transport, refused) if index == 2 else transport  # type: ignore[return-value]

    async def train() -> None:
        async with swarm_in_process(public(), tmp_path, peers=(2, 2), wrap=wrap) as swarm:
            await swarm.until_version(2)
            newcomer = await swarm.add_peer(1)
            await swarm.until(lambda: len(refused) >= 6)
            assert set(refused) <= {"exam", "malformed"}
            assert events(swarm, "promoted") == []
            member = swarm.of_stage(1)[0]
            assert newcomer.peer_id not in member.steps.chain.members
            assert newcomer.peer_id not in member.steps.joining
            upstream = swarm.of_stage(0)[0]
            assert newcomer.peer_id not in upstream.rounds.neighbours()
            for method in (METHOD, PROGRESS, WITNESS, ROUND, EXHIBIT, PART, INPUT, JURY):
                with pytest.raises(TransientError, match="probation"):
                    await newcomer.transport.call(
                        member.peer_id, method, Message({}), timeout_s=5.0, max_body_bytes=1 << 20
                    )
            with contextlib.closing(Ledger(swarm.run.folder.ledger)) as ledger:
                tickets = [Ticket.from_value(event.facts) for event in ledger.events("ticket")]
            (ticket,) = [ticket for ticket in tickets if ticket.peer_id == newcomer.peer_id]
            asked = Message({"ticket": ticket.to_value(), "promotion": None})
            with pytest.raises(TransientError, match="probation"):
                await newcomer.transport.call(member.peer_id, JOIN, asked, timeout_s=5.0, max_body_bytes=0)

    asyncio.run(train())


@pytest.mark.soak
def test_a_peer_in_debt_leaves_the_roster_and_comes_back_by_replays(tmp_path: Path) -> None:
    async def train() -> None:
        async with swarm_in_process(public(limits={"founders_per_stage": 3}), tmp_path, peers=(3, 3)) as swarm:
            await swarm.until_version(3)
            member, debtor = swarm.of_stage(1)[:2]
            await swarm.host.justice.send_back(debtor.peer_id, Version(2), None)
            await swarm.until(lambda: debtor.peer_id in [event["peer_id"] for event in events(swarm, "left")])
            assert debtor.peer_id not in member.steps.chain.members
            await swarm.until(lambda: debtor.peer_id in [event["peer_id"] for event in events(swarm, "joined")])
            assert [event["peer_id"] for event in events(swarm, "promoted")] == [debtor.peer_id]
            assert events(swarm, "quarantined") == events(swarm, "banned") == []

    asyncio.run(train())
