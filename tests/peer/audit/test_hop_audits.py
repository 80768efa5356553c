"""What a liar hides, its neighbours show: omission, two faces, silence and death help it nothing, and harm no other."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from bootstrap.program.ledger import Ledger
from swarm.averaging.activations import activation_codec
from swarm.bulk_digest import bulk_digest
from swarm.core.errors import RemoteError, TransientError
from swarm.core.ids import PeerId
from swarm.host_protocol import EXHIBIT, HOP, PART
from swarm.identity.key import Identity
from swarm.network.transport import Handler, Message, Transport
from tests.peer.audit.test_audits import audited, events, run
from tests.swarm_in_process import InProcessSwarm, identity_of, prepare, swarm_in_process
from verification.audit.verdicts import Debt
from verification.pipeline.headers import BirthRecord, HopHeader
from verification.replay.evidence_file import evidence_in
from verification.replay.judge import judge


def assert_guilty(swarm: InProcessSwarm, liar: PeerId, *kinds: str) -> None:
    """The liar alone is banned, for one of these, and the file proves it."""
    banned = events(swarm, "banned")
    assert [event["peer_id"] for event in banned] == [liar]
    assert banned[0]["kind"] in kinds
    evidence = evidence_in(Path(banned[0]["evidence"]))
    assert judge(evidence, run_key=swarm.run.run_key.peer_id).guilty


@pytest.mark.parametrize(
    ("stage", "attack"),
    [
        (1, "unlisted_gradient_negate@3"),
        pytest.param(0, "unlisted_activation_noise@3", marks=pytest.mark.soak),
    ],
)
def test_a_liar_that_leaves_its_lies_out_of_its_contribution_is_banned(tmp_path: Path, stage: int, attack: str) -> None:
    async def train() -> InProcessSwarm:
        # A stage waits for what its member did and does not list.
        manifest = audited(hop=8.0, contribution=0.0, deadlines={"step_s": 4.0, "straggler_s": 0.3})
        async with swarm_in_process(manifest, tmp_path, peers=(3, 3), attacks={(stage, 2): attack}) as swarm:
            await swarm.until(lambda: bool(events(swarm, "banned")), timeout_s=90.0)
            return swarm

    assert_guilty(asyncio.run(train()), identity_of(3 * stage + 2).peer_id, "hop_mismatch")


class TwiceSent:
    """A transport whose owner also sends every microbatch, negated, to a peer that it does not tell of it."""

    def __init__(self, inner: Transport, identity: Identity, other: PeerId) -> None:
        self._inner = inner
        self._identity = identity
        self._other = other

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def call(
        self, peer_id: PeerId, method: str, request: Message, *, timeout_s: float, max_body_bytes: int
    ) -> Message:
        if method == "forward" and peer_id != self._other and BirthRecord.from_value(request.meta["birth"]).step >= 3:
            header, codec = HopHeader.from_value(request.meta["header"]), activation_codec("int8")
            shape = (header.shape[0], header.shape[1], header.shape[2])
            size = codec.encoded_bytes(shape)
            body = codec.encode(-codec.decode(memoryview(request.body)[:size], shape))
            own = replace(header, consumer=self._other, body_digest=bulk_digest(body)).signed_by(self._identity)
            lie = Message({**request.meta, "header": own.to_value()}, b"".join((body, memoryview(request.body)[size:])))
            with contextlib.suppress(TransientError, RemoteError):
                await self._inner.call(self._other, method, lie, timeout_s=timeout_s, max_body_bytes=max_body_bytes)
        return await self._inner.call(peer_id, method, request, timeout_s=timeout_s, max_body_bytes=max_body_bytes)


@pytest.mark.soak
def test_a_liar_that_sends_two_peers_two_things_for_one_is_banned(tmp_path: Path) -> None:
    def wrap(stage: int, index: int, transport: Transport) -> Transport:
        if (stage, index) != (0, 2):
            return transport
        return TwiceSent(transport, identity_of(2), identity_of(5).peer_id)

    swarm, _ = run(audited(hop=8.0, contribution=0.0), tmp_path, {}, wrap)
    # Two signed things for one, of which one is a lie: whichever is found first.
    assert_guilty(swarm, identity_of(2).peer_id, "equivocation", "hop_mismatch")


@pytest.mark.soak
def test_a_liar_that_dies_after_its_lie_is_banned(tmp_path: Path) -> None:
    async def train() -> InProcessSwarm:
        manifest = audited(hop=8.0, contribution=0.0)
        async with swarm_in_process(manifest, tmp_path, peers=(3, 3), attacks={(1, 2): "gradient_negate@3"}) as swarm:
            await swarm.until_version(4)
            await swarm.kill(swarm.of_stage(1)[2])
            await swarm.until(lambda: bool(events(swarm, "banned")))
            return swarm

    assert_guilty(asyncio.run(train()), identity_of(5).peer_id, "hop_mismatch")


class Mute:
    """A transport whose owner answers neither the host nor an auditor: to them it seems dead."""

    def __init__(self, inner: Transport, host: Callable[[], PeerId]) -> None:
        self._inner = inner
        self._host = host

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def serve(self, method: str, handler: Handler, *, max_body_bytes: int) -> None:
        async def silent(sender: PeerId, request: Message) -> Message:
            if method in (EXHIBIT, PART, HOP) or sender == self._host():
                raise TransientError("not now")
            return await handler(sender, request)

        self._inner.serve(method, silent, max_body_bytes=max_body_bytes)


@pytest.mark.soak
def test_a_liar_that_answers_neither_auditors_nor_the_host_is_banned(tmp_path: Path) -> None:
    """Its contribution is put together from its neighbours' exchanges and from what its parts' reducers got."""
    prepared = prepare(audited(hop=0.0, contribution=8.0), tmp_path)

    def wrap(stage: int, index: int, transport: Transport) -> Transport:
        if (stage, index) != (1, 2):
            return transport
        return Mute(transport, lambda: prepared.host_key.peer_id)

    async def train() -> InProcessSwarm:
        attacks = {(1, 2): "sign_flip@3"}
        async with swarm_in_process(prepared, tmp_path, peers=(3, 3), attacks=attacks, wrap=wrap) as swarm:
            await swarm.until(lambda: bool(events(swarm, "banned")), timeout_s=60.0)
            return swarm

    assert_guilty(asyncio.run(train()), identity_of(5).peer_id, "replay_mismatch")


@pytest.mark.soak
def test_who_signs_for_what_a_liar_before_it_hides_and_it_does_not_show_owes_it(tmp_path: Path) -> None:
    """Nobody can replay what the second of two silent neighbours sends on: it is in debt, and nobody else is."""
    manifest = audited(hop=8.0, contribution=0.0, model={"stages": 3}, optimizer={"total_steps": 400})
    attacks = {(0, 2): "withholding@3", (1, 2): "withholding@3"}

    async def train() -> InProcessSwarm:
        async with swarm_in_process(manifest, tmp_path, peers=(3, 3, 3), attacks=attacks) as swarm:
            left = partial(events, swarm, "left")
            await swarm.until(lambda: bool(left()), timeout_s=60.0)
            await swarm.until_version(swarm.host.progress.done_versions() + 4, timeout_s=60.0)
            assert {event["peer_id"] for event in left()} == {identity_of(5).peer_id}
            return swarm

    swarm = asyncio.run(train())
    assert events(swarm, "banned") == events(swarm, "dismissed") == []
    with contextlib.closing(Ledger(swarm.run.folder.ledger)) as ledger:
        debts = [Debt.from_value(event.facts["debt"]) for event in ledger.events("debt")]
    assert {debt.peer_id for debt in debts} == {identity_of(5).peer_id}


class LostAnswers:
    """A transport that loses one answer in eight, after the work is done."""

    def __init__(self, inner: Transport, seed: str) -> None:
        self._inner = inner
        self._rng = random.Random(seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def serve(self, method: str, handler: Handler, *, max_body_bytes: int) -> None:
        async def lossy(sender: PeerId, request: Message) -> Message:
            reply = await handler(sender, request)
            if method == "forward" and self._rng.random() < 0.125:
                raise TransientError("the line broke")
            return reply

        self._inner.serve(method, lossy, max_body_bytes=max_body_bytes)


@pytest.mark.soak
def test_nobody_is_punished_when_answers_are_lost_and_peers_die_and_come(tmp_path: Path) -> None:
    """What is not answered is sent on again: microbatches are done twice, late, or by the dead, and all is audited."""
    manifest = audited(hop=24.0, contribution=2.0, optimizer={"total_steps": 10})

    def wrap(stage: int, index: int, transport: Transport) -> Transport:
        return LostAnswers(transport, f"{stage}/{index}")

    async def train() -> tuple[InProcessSwarm, dict[str, Any]]:
        async with swarm_in_process(manifest, tmp_path, peers=(3, 3), wrap=wrap) as swarm:
            await swarm.until_version(3)
            await swarm.kill(swarm.of_stage(0)[0])
            await swarm.kill(swarm.of_stage(1)[2])
            await swarm.add_peer(1)
            return swarm, await swarm.finished(timeout_s=90.0)

    swarm, report = asyncio.run(train())
    assert report["steps"] == 10
    assert [event for kind in ("banned", "quarantined", "acquitted") for event in events(swarm, kind)] == []
    counters = [auditor.counters for peer in swarm.peers if (auditor := peer.verifying.auditor) is not None]
    assert sum(one.hops for one in counters) >= 20
    assert sum(one.frauds for one in counters) == 0


class Slow:
    """A transport whose owner's answers to microbatches take so long that it is asked for room first."""

    def __init__(self, inner: Transport, waiting: Counter[PeerId]) -> None:
        """`waiting` counts whose microbatches are done, and not yet answered."""
        self._inner = inner
        self._waiting = waiting

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def serve(self, method: str, handler: Handler, *, max_body_bytes: int) -> None:
        async def slow(sender: PeerId, request: Message) -> Message:
            reply = await handler(sender, request)
            self._waiting[sender] += "header" in reply.meta
            try:
                await asyncio.sleep(1.2)
            finally:
                self._waiting[sender] -= "header" in reply.meta
            return reply

        self._inner.serve(method, slow if method == "forward" else handler, max_body_bytes=max_body_bytes)


@pytest.mark.soak
def test_nobody_is_punished_for_what_is_taken_up_after_lost_peers(tmp_path: Path) -> None:
    steps = 8
    manifest = audited(
        hop=24.0,
        contribution=2.0,
        model={"stages": 3},
        optimizer={"total_steps": steps},
        limits={"founders_per_stage": 2},
    )

    waiting = Counter[PeerId]()

    def wrap(stage: int, index: int, transport: Transport) -> Transport:
        return cast(Transport, Slow(transport, waiting)) if stage == 2 else transport

    async def train() -> tuple[InProcessSwarm, dict[str, Any]]:
        async with swarm_in_process(manifest, tmp_path, peers=(2, 4, 3), wrap=wrap) as swarm:
            for version in (2, 3):
                await swarm.until_version(version, timeout_s=60.0)
                async with asyncio.timeout(20.0):
                    while not waiting.total():  # noqa: ASYNC110 - others then take up what a peer waits for
                        await asyncio.sleep(0.05)
                await swarm.kill(next(peer for peer in swarm.of_stage(1) if waiting[peer.peer_id]))
            return swarm, await swarm.finished(timeout_s=120.0)

    swarm, report = asyncio.run(train())
    assert report["steps"] == steps
    assert [event for kind in ("banned", "quarantined", "acquitted") for event in events(swarm, kind)] == []
    last = [cast(Any, peer.daemon.live).counters for peer in swarm.of_stage(2)]
    assert sum(one.adopted for one in last) > 0
    assert [one.bad_messages for one in last] == [{}] * len(last)
    counters = [auditor.counters for peer in swarm.peers if (auditor := peer.verifying.auditor) is not None]
    assert sum(one.hops for one in counters) >= 20
    assert sum(one.frauds + one.suspicious for one in counters) == 0
