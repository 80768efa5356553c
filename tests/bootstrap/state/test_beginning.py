"""The host gives the states that it holds now, and nobody the bytes of another under the hashes of one it held."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from bootstrap.state.beginning import stage_start
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
