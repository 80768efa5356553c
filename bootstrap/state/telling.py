"""How peers that train are told that their stages begin again."""

import asyncio
import logging
import time
from collections.abc import Collection, Sequence

from swarm.core.canonical import Value
from swarm.core.errors import RemoteError, TransientError
from swarm.core.ids import PeerId
from swarm.core.state.stage_chain import Genesis
from swarm.host_protocol import ROLLBACK
from swarm.network.transport import Message, Transport

log = logging.getLogger(__name__)

TELL_FOR_S, TELL_AGAIN_S, TELL_S = 60.0, 1.0, 5.0


async def tell_all(
    transport: Transport, geneses: Sequence[Genesis], to: int, stages: Sequence[Collection[PeerId]]
) -> None:
    """Each of the peers, given by stage, until it has heard; who cannot be reached will find out by itself."""
    give_up_at = time.monotonic() + TELL_FOR_S

    async def tell(peer: PeerId, genesis: Genesis) -> None:
        beside: list[Value] = [one.to_value() for one in geneses if abs(one.stage - genesis.stage) == 1]
        meta: dict[str, Value] = {"genesis": genesis.to_value(), "to_version": to, "beside": beside}
        while time.monotonic() < give_up_at:
            try:
                await transport.call(peer, ROLLBACK, Message(meta), timeout_s=TELL_S, max_body_bytes=0)
                return
            except (TransientError, RemoteError) as error:
                log.info("%s has not heard of the rollback: %s", peer[-6:], error)
                await asyncio.sleep(TELL_AGAIN_S)

    told = [(peer, genesis) for genesis, peers in zip(geneses, stages, strict=True) for peer in sorted(peers)]
    await asyncio.gather(*(tell(peer, genesis) for peer, genesis in told))
