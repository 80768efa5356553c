"""What a peer makes again of what is on its disk it makes for the host alone."""

import asyncio
import random
from pathlib import Path

import pytest

from peer.state.continuing import Continuing
from swarm.checkpoint.kept_past import KeptPast
from swarm.core.errors import RemoteError
from swarm.core.ids import StageIndex
from swarm.host_protocol import HOLDINGS, PREPARE, RESULTS
from swarm.network.memory import MemoryNetwork
from swarm.network.transport import Message
from tests.swarm_in_process import identity_of, manifest_of, prepare

HOST, ME, STRANGER = (identity_of(number) for number in range(3))


def test_a_stranger_has_a_peers_disk_read_by_nobody(tmp_path: Path) -> None:
    run = prepare(manifest_of(), tmp_path)

    async def scenario() -> None:
        network = MemoryNetwork(random.Random(0))
        me, host, stranger = (network.transport(identity) for identity in (ME, HOST, STRANGER))
        past = KeptPast(tmp_path / "kept", StageIndex(0), run.settings, run.states[0].layout)
        Continuing(past, HOST.peer_id).serve(me)
        asked = {
            HOLDINGS: Message(),
            RESULTS: Message({"from": 0}),
            PREPARE: Message({"lineage": bytes(32), "version": 0, "number": 0}),
        }
        for method, request in asked.items():
            with pytest.raises(RemoteError, match="only the host"):
                await stranger.call(ME.peer_id, method, request, timeout_s=10.0, max_body_bytes=0)
        held = await host.call(ME.peer_id, HOLDINGS, Message(), timeout_s=10.0, max_body_bytes=0)
        assert held.meta == {"held": []}
        for transport in (me, host, stranger):
            await transport.close()

    asyncio.run(scenario())
