"""What one peer can do to a host where a run begins, is left, and is gone on with: as much as the others agree to."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bootstrap.state import coming_back, going_on
from bootstrap.state.going_on import _Choice
from kernels.threads import ONE_THREAD
from peer.state.continuing import _Prepared
from swarm.checkpoint.state import UNNAMED, StageState, chunk_hash, merkle_root, state_chunks
from swarm.checkpoint.transfer import CHUNK, SNAPSHOT, Offer
from swarm.core.canonical import Value
from swarm.core.errors import RemoteError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId
from swarm.core.pipeline.leases import LeaseTable
from swarm.core.state.coming_back import AHEAD, Holding, Point, StageSeen
from swarm.core.state.stage_chain import StageChain
from swarm.host_protocol import ADMIT, GENESIS, GOODBYE, HAND_OVER, PREPARE
from swarm.network.transport import Message, Transport
from tests.bootstrap.state.hosted import Hosted, hosted
from tests.swarm_in_process import identity_of

STAGE = 1
MEMBER, LIAR, OTHER_LIAR = 1, 8, 9
"""By number; peer 0 is the founder of stage 0."""


@asynccontextmanager
async def begun(folder: Path, **tables: dict[str, Any]) -> AsyncIterator[Hosted]:
    """A host whose two stages have begun, with a founder each; liars are admitted to the second since."""
    async with hosted(folder, **tables) as host:
        for number in (0, MEMBER):
            await ready(host, number, stage=number)
        for number in (LIAR, OTHER_LIAR):
            await admitted(host, number, stage=STAGE)
        yield host


def transport_of(host: Hosted, number: int) -> Transport:
    known = host.network._transports.get(identity_of(number).peer_id)
    return known if known is not None else host.network.transport(identity_of(number))


async def told(host: Hosted, number: int, method: str, meta: dict[str, Value]) -> Message:
    asked = host.run.host_key.peer_id
    return await transport_of(host, number).call(asked, method, Message(meta), timeout_s=20.0, max_body_bytes=0)


async def admitted(host: Hosted, number: int, *, stage: int) -> None:
    await told(host, number, ADMIT, {"stage": stage, "chain_end": bytes(32)})


async def ready(host: Hosted, number: int, *, stage: int) -> None:
    await admitted(host, number, stage=stage)
    await told(host, number, GENESIS, {"stage": stage, "ready": True, "wait_s": 0.0, "amendments": 0})


def beginning(host: Hosted, *, bent: bool) -> tuple[StageState, StageChain]:
    """The stage's first state, or another one under its name."""
    genesis = host.itself._beginning.geneses[STAGE]
    state = replace(host.run.states[STAGE], name=genesis.name)
    if bent:
        state = replace(state, weights=np.asarray(state.weights) + np.float32(1.0))
    return state, StageChain.begin(genesis, host.run.settings)


def serve_state(
    transport: Transport, state: StageState, chain: StageChain, ready: asyncio.Event | None = None
) -> list[int]:
    """Returns the chunks that were asked for; they are given once it is `ready`."""
    asked_for: list[int] = []
    chunks = state_chunks(state)
    hashes, total = tuple(chunk_hash(chunk) for chunk in chunks), sum(map(len, chunks))
    offer = Offer(STAGE, int(state.version), merkle_root(hashes, total), hashes, total, chain)

    async def on_snapshot(sender: PeerId, request: Message) -> Message:
        return offer.to_message()

    async def on_chunk(sender: PeerId, request: Message) -> Message:
        asked_for.append(Fields("chunk request", request.meta).integer("index"))
        if ready is not None:
            await ready.wait()
        return Message({}, chunks[asked_for[-1]])

    transport.serve(SNAPSHOT, on_snapshot, max_body_bytes=0)
    transport.serve(CHUNK, on_chunk, max_body_bytes=0)
    return asked_for


async def hand_over(host: Hosted, number: int, *, version: int = 0) -> bool:
    """Whether the host is still at it."""
    asked: dict[str, Value] = {"stage": STAGE, "start": version, "version": version, "ready": True}
    return bool((await told(host, number, HAND_OVER, asked)).meta["wanted"])


def handed_over(host: Hosted) -> list[bytes]:
    folder = host.run.folder.root / "handed-over" / f"stage-{STAGE}"
    return [path.read_bytes() for path in sorted(folder.glob("*.state"))]


@pytest.mark.parametrize(("trust", "number"), [("friends", LIAR), ("public", LIAR), ("public", MEMBER)])
def test_a_state_that_nobody_asked_for_is_not_taken(tmp_path: Path, trust: str, number: int) -> None:
    """Else the run would go on from it once its stage is lost."""

    async def scenario() -> None:
        async with begun(tmp_path, run={"trust": trust}) as host:
            serve_state(transport_of(host, number), *beginning(host, bent=True))
            with pytest.raises(RemoteError, match="nobody has asked"):
                await hand_over(host, number)
            assert handed_over(host) == []

    asyncio.run(scenario())


def test_a_friends_state_is_taken_where_it_leads_to_what_is_certified(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with begun(tmp_path) as host:
            state, chain = beginning(host, bent=False)
            serve_state(transport_of(host, MEMBER), state, chain)
            await hand_over(host, MEMBER)
            kept = handed_over(host)
            assert len(kept) == 1
            other = replace(chain, basis=replace(chain.basis, root=b"r" * 32))
            serve_state(transport_of(host, MEMBER), replace(state, name=other.name), other)
            with pytest.raises(RemoteError, match="does not lead to"):
                await hand_over(host, MEMBER)
            assert handed_over(host) == kept

    asyncio.run(scenario())


def test_a_state_that_takes_long_is_asked_about_until_it_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was one call, of an hour at most, and given up where 20 seconds brought nothing whole."""
    monkeypatch.setattr(coming_back, "HANDED_OVER_WITHIN_S", 0.2)

    async def scenario() -> None:
        async with begun(tmp_path) as host:
            given = asyncio.Event()
            asked_for = serve_state(transport_of(host, MEMBER), *beginning(host, bent=False), given)
            assert [await hand_over(host, MEMBER) for _ in range(3)] == [True] * 3
            given.set()
            async with asyncio.timeout(20):
                while await hand_over(host, MEMBER):
                    pass
            assert len(handed_over(host)) == 1
            assert asked_for == [*range(len(asked_for))]

    asyncio.run(scenario())


def test_what_came_of_a_state_is_not_handed_over_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with begun(tmp_path) as host:
            state, chain = beginning(host, bent=False)
            serve_state(transport_of(host, MEMBER), state, replace(chain, leases=LeaseTable(7)))
            with pytest.raises(RemoteError, match="does not lead to"):
                await hand_over(host, MEMBER)
            again = serve_state(transport_of(host, MEMBER), state, chain)
            assert not await hand_over(host, MEMBER)
            assert again == []
            assert len(handed_over(host)) == 1

    asyncio.run(scenario())


def serve_prepared(transport: Transport, state: StageState, chain: StageChain) -> None:
    async def on_prepare(sender: PeerId, request: Message) -> Message:
        said, body = (await asyncio.to_thread(_Prepared.of, state, chain, ONE_THREAD)).said()
        return Message({"newest": int(state.version), "state": said}, body)

    transport.serve(PREPARE, on_prepare, max_body_bytes=0)


def choice_of(host: Hosted, *numbers: int) -> _Choice:
    held = Holding(host.itself._beginning.geneses[STAGE].name, 0, 0)
    holders = {identity_of(number).peer_id: held for number in numbers}
    return _Choice(Point(0, 0), True, 0, 0, ({}, holders), (None, None))


def seen_by(*numbers: int) -> StageSeen:
    nobody = frozenset[PeerId]()
    waiting = frozenset(identity_of(number).peer_id for number in numbers)
    return StageSeen(members=nobody, training=nobody, waiting=waiting, left=nobody, silent=nobody)


def test_who_never_has_its_state_ready_keeps_no_run_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(going_on, "PREPARE_CALL_S", 1.0)

    async def never(sender: PeerId, request: Message) -> Message:
        return Message({"newest": 0, "state": None})

    async def scenario() -> None:
        async with begun(tmp_path, run={"trust": "public"}) as host:
            state, chain = beginning(host, bent=False)
            serve_prepared(transport_of(host, MEMBER), replace(state, name=UNNAMED), chain)
            transport_of(host, LIAR).serve(PREPARE, never, max_body_bytes=0)
            choice = choice_of(host, MEMBER, LIAR)
            async with asyncio.timeout(60):
                source, members, _ = await host.itself._coming_back.going_on._source(STAGE, choice, seen_by())
            assert members == [identity_of(MEMBER).peer_id]
            assert source.version == 0

    asyncio.run(scenario())


def test_many_who_have_done_nothing_do_not_outvote_those_who_did_the_work(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with begun(tmp_path, run={"trust": "public"}) as host:
            state, chain = beginning(host, bent=False)
            serve_prepared(transport_of(host, MEMBER), replace(state, name=UNNAMED), chain)
            lie, _ = beginning(host, bent=True)
            for number in (LIAR, OTHER_LIAR):
                serve_prepared(transport_of(host, number), replace(lie, name=UNNAMED), chain)
            choice = choice_of(host, MEMBER, LIAR, OTHER_LIAR)
            _, members, _ = await host.itself._coming_back.going_on._source(STAGE, choice, seen_by())
            assert members == [identity_of(MEMBER).peer_id]

    asyncio.run(scenario())


def test_a_donor_chooses_no_leases_of_a_checkpoint(tmp_path: Path) -> None:
    """A version's name does not bind them."""

    async def scenario() -> None:
        async with begun(tmp_path) as host:
            genesis = host.itself._beginning.geneses[0]
            chain = replace(StageChain.begin(genesis, host.run.settings), leases=LeaseTable(7))
            assert chain.name == genesis.name
            offer = Offer(0, 0, bytes(32), (), 0, chain)
            assert host.itself._archivist._leases_of(0, offer) == StageChain.begin(genesis, host.run.settings).leases

    asyncio.run(scenario())


def test_no_crowd_of_founders_makes_a_genesis_that_nobody_can_read(tmp_path: Path) -> None:
    limits = {"founders_per_stage": 1, "min_replicas": 1, "max_peers_per_stage": 2}

    async def scenario() -> None:
        async with hosted(tmp_path, limits=limits) as host:
            for number in (4, 3, 2, 5):
                await ready(host, number, stage=0)
            await ready(host, MEMBER, stage=STAGE)
            geneses = host.itself._beginning.geneses
            assert geneses[0].members == tuple(sorted(identity_of(number).peer_id for number in (4, 3)))
            assert set(geneses[STAGE].neighbours) == set(geneses[0].members)

    asyncio.run(scenario())


def test_a_member_that_says_goodbye_time_and_again_does_not_fill_the_ledger(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with begun(tmp_path) as host:
            before = host.ledger_size()
            for version in (0, 1, 0, 1 << 40, 1, *range(1 << 20, (1 << 20) + 40)):
                await told(host, MEMBER, GOODBYE, {"version": version})
            assert host.ledger_size() <= before + AHEAD + 1

    asyncio.run(scenario())
