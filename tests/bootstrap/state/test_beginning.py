"""The host gives the states that it holds now, and nobody the bytes of another under the hashes of one it held."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from bootstrap.state import beginning
from bootstrap.state.beginning import stage_start
from swarm.checkpoint.state import Bytes, state_digest
from swarm.checkpoint.transfer import CHUNK
from swarm.core.errors import TransientError
from swarm.network.transport import Message
from tests.bootstrap.state.hosted import hosted
from tests.swarm_in_process import identity_of


def test_a_chunk_of_a_state_that_a_rollback_replaced_is_not_given_out_of_another(tmp_path: Path) -> None:
    """Its hash failed, and whoever was half through asked the host for nothing more."""

    async def scenario() -> None:
        async with hosted(tmp_path) as host:
            peer = host.network.transport(identity_of(7))

            async def chunk(version: int) -> Message:
                asked = Message({"stage": 0, "version": version, "index": 0})
                return await peer.call(host.run.host_key.peer_id, CHUNK, asked, timeout_s=10.0, max_body_bytes=1 << 20)

            before = bytes((await chunk(0)).body)
            host.itself._beginning.begin_from(0, stage_start(0, replace(host.run.states[0], version=24)))
            with pytest.raises(TransientError, match="version 24 is given here, not 0"):
                await chunk(0)
            assert bytes((await chunk(24)).body) != before
            await peer.close()

    asyncio.run(scenario())


def test_a_host_that_opens_has_hashed_its_states_before_anybody_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of all stages together are tens of GB, and the transport was up: nothing was answered meanwhile."""

    def hashed(chunk: Bytes) -> bytes:
        raise AssertionError("a chunk is hashed on the event loop")

    monkeypatch.setattr(beginning, "chunk_hash", hashed)

    async def scenario() -> None:
        async with hosted(tmp_path) as host:
            digests = [start.offer.digest for start in host.itself._beginning.stages]
            assert digests == [state_digest(state) for state in host.run.states]

    asyncio.run(scenario())
