"""Whoever brings the run key's word on a beginning, what he leaves out of it is still heard of others."""

import asyncio
import random
from dataclasses import dataclass
from typing import Any

from peer.state.rolling_back import RollingBack
from swarm.core.ids import StageIndex, Version
from swarm.core.pipeline.leases import LeaseTable
from swarm.core.state.stage_chain import Genesis, StageChain
from swarm.host_protocol import ROLLBACK
from swarm.network.memory import MemoryNetwork
from swarm.network.transport import Message
from tests.swarm_in_process import identity_of
from tests.verification.exhibits import small_settings

RUN_KEY, HOST, ME, OTHER, BESIDE = (identity_of(number) for number in range(5))


def genesis(stage: int, era: int, *members: Any) -> Genesis:
    return Genesis(
        "run",
        StageIndex(stage),
        Version(8 * era),
        bytes(32),
        tuple(sorted(member.peer_id for member in members)),
        LeaseTable(),
        HOST.peer_id,
        RUN_KEY.peer_id,
        (),
        bytes(32),
        era,
    ).signed_by(RUN_KEY)


@dataclass
class Steps:
    """As far as a peer looks at its own while it only hears."""

    chain: StageChain


@dataclass
class KnownHost:
    peer_id: Any = HOST.peer_id


def test_a_peer_that_tells_of_a_beginning_before_the_host_keeps_nothing_of_it_back() -> None:
    async def scenario() -> None:
        network = MemoryNetwork(random.Random(0))
        me, host, other = (network.transport(identity) for identity in (ME, HOST, OTHER))
        heard: list[Genesis] = []
        steps: Any = Steps(StageChain.begin(genesis(0, 0, ME, OTHER), small_settings(2)))
        known_host: Any = KnownHost()
        nothing: Any = None
        rolling_back = RollingBack(steps, nothing, known_host, nothing, heard.extend, nothing)
        rolling_back.serve(me)
        begun, beside = genesis(0, 1, ME, OTHER), genesis(1, 1, BESIDE)

        async def tell(transport: Any, to_version: int, *others: Genesis) -> None:
            meta: Any = {
                "genesis": begun.to_value(),
                "to_version": to_version,
                "beside": [one.to_value() for one in others],
            }
            await transport.call(ME.peer_id, ROLLBACK, Message(meta), timeout_s=10.0, max_body_bytes=0)

        await tell(other, 77)
        assert beside not in heard
        await tell(host, 4, beside)
        assert beside in heard
        assert rolling_back._to_version == 4
        await tell(other, 78)
        assert rolling_back._to_version == 4
        for transport in (me, host, other):
            await transport.close()

    asyncio.run(scenario())
