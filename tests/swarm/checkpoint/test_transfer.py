"""A state that is known by its digest comes from all who have it, and nothing of it twice."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from swarm.checkpoint import many_donors
from swarm.checkpoint.state import CHUNK_BYTES, StageState, chunk_hash, state_chunks, state_digest
from swarm.checkpoint.transfer import CHUNK, SNAPSHOT, Offer, fetch_state_by_digest
from swarm.core.errors import TransientError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId
from swarm.model.layout import ParameterLayout
from swarm.network.memory import MemoryNetwork
from swarm.network.transport import Message
from tests.swarm_in_process import identity_of
from tests.verification.exhibits import small_settings

LAYOUT = ParameterLayout.of({"a": (5 * CHUNK_BYTES // 4,)})
STATE = StageState(8, LAYOUT, np.random.default_rng(1).standard_normal(LAYOUT.num_values, dtype=np.float32))
CHUNKS = state_chunks(STATE)
HASHES = tuple(chunk_hash(chunk) for chunk in CHUNKS)
OFFER = Offer(0, 8, state_digest(STATE), HASHES, sum(map(len, CHUNKS)), None)
WANTS = identity_of(0)
Give = Callable[[int], bytes]


def given(index: int) -> bytes:
    return bytes(CHUNKS[index])


class Scene:
    """One who wants the state, and donors of it."""

    def __init__(self, folder: Path) -> None:
        self._network = MemoryNetwork(random.Random(0))
        self._wants = self._network.transport(WANTS)
        self._folder = folder
        self.held = dict[bytes, memoryview]()
        self.asked: list[tuple[PeerId, int]] = []

    def donor(self, number: int, give: Give = given, offer: Offer = OFFER) -> PeerId:
        identity = identity_of(number)
        transport = self._network.transport(identity)

        async def on_snapshot(sender: PeerId, request: Message) -> Message:
            return offer.to_message()

        async def on_chunk(sender: PeerId, request: Message) -> Message:
            index = Fields("chunk request", request.meta).integer("index")
            self.asked.append((identity.peer_id, index))
            return Message({}, give(index))

        transport.serve(SNAPSHOT, on_snapshot, max_body_bytes=0)
        transport.serve(CHUNK, on_chunk, max_body_bytes=0)
        return identity.peer_id

    async def fetch(self, *donors: PeerId) -> StageState:
        settings = small_settings(1)
        state, _ = await fetch_state_by_digest(
            *(self._wants, lambda: donors, OFFER.digest, 0, LAYOUT, settings, self._folder), version=8, held=self.held
        )
        return state


def test_what_one_donor_gave_before_it_went_is_not_fetched_again_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(many_donors, "LOOK_FOR_MORE_S", 0.05)

    def first_only(index: int) -> bytes:
        if index > 1:
            raise TransientError("its snapshot is gone")
        return given(index)

    async def play() -> None:
        scene = Scene(tmp_path)
        going, other = scene.donor(1, first_only), scene.donor(2)
        with pytest.raises(TransientError):
            await scene.fetch(going)
        came = {*scene.held}
        assert {HASHES[0], HASHES[1]} <= came
        state = await scene.fetch(other)
        assert state_digest(state) == OFFER.digest
        assert not {HASHES[index] for peer, index in scene.asked if peer == other} & came

    asyncio.run(play())


def test_all_who_have_it_give_it_and_who_gives_other_bytes_changes_nothing(tmp_path: Path) -> None:
    async def play() -> None:
        scene = Scene(tmp_path)
        liar, others = scene.donor(1, lambda index: bytes(9)), [scene.donor(2), scene.donor(3)]
        state = await scene.fetch(liar, *others)
        assert state_digest(state) == OFFER.digest
        assert {peer for peer, _ in scene.asked} == {liar, *others}

    asyncio.run(play())


def test_who_offers_another_state_is_not_asked_for_chunks(tmp_path: Path) -> None:
    async def play() -> None:
        scene = Scene(tmp_path)
        weights = np.zeros(LAYOUT.num_values, np.float32)
        chunks = state_chunks(StageState(8, LAYOUT, weights))
        hashes = tuple(chunk_hash(chunk) for chunk in chunks)
        lie = Offer(0, 8, state_digest(StageState(8, LAYOUT, weights)), hashes, OFFER.total_bytes, None)
        liar, honest = scene.donor(1, offer=lie), scene.donor(2)
        assert state_digest(await scene.fetch(liar, honest)) == OFFER.digest
        assert {peer for peer, _ in scene.asked} == {honest}
        with pytest.raises(TransientError, match="nobody offers version 8"):
            await scene.fetch(liar)

    asyncio.run(play())
