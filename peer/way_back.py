"""This is where a peer that comes back takes the cheaper way: from the state on its disk, or from the others' newest.

From its own it needs the results since, about a byte a parameter each under int8; a state is twelve.
"""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from peer.joining_state import MOST_DONORS
from peer.snapshots import kept_states
from swarm.averaging.codecs import result_codec
from swarm.checkpoint.state import StageState
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId
from swarm.core.plan import FLOAT_BYTES
from swarm.core.settings import RunSettings
from swarm.core.stage_chain import StageChain
from swarm.host_protocol import STANDING
from swarm.model.layout import ParameterLayout
from swarm.network.transport import Message, Transport

log = logging.getLogger(__name__)


async def state_to_go_on_from(
    folder: Path,
    beginning: StageChain,
    layout: ParameterLayout,
    settings: RunSettings,
    transport: Transport,
    donors: Sequence[PeerId],
) -> tuple[StageState, StageChain] | None:
    """The state kept in `folder` and what is certified of it, if `donors` have all results since and these are less.

    A donor's word for where the stage is decides no more than where to begin: what follows is certified.
    """
    kept = kept_states(folder, beginning)
    if not kept:
        return None
    standings = await asyncio.gather(*(_version_of(donor, transport, settings) for donor in donors[:MOST_DONORS]))
    result_bytes = result_codec(settings.codecs.averaging).encoded_bytes(layout.num_values)
    for one in kept:
        behind = max(standings, default=-1) - one.chain.version
        state_bytes = (FLOAT_BYTES + settings.optimizer.moment_bytes) * layout.num_values
        is_worth_it = 0 <= behind <= settings.retained_results and behind * result_bytes < state_bytes
        log.info(
            "stage %d: version %d is on disk here, %d versions ago, %.1f MB of results; a state is %.1f MB: %s",
            one.chain.stage,
            one.chain.version,
            behind,
            behind * result_bytes / 1e6,
            state_bytes / 1e6,
            "they are replayed" if is_worth_it else "a state is fetched",
        )
        state = await asyncio.to_thread(one.load, layout) if is_worth_it else None
        if state is not None:
            return state, one.chain
    return None


async def _version_of(donor: PeerId, transport: Transport, settings: RunSettings) -> int:
    """Where the stage is, by its word; -1 if it does not say."""
    call_s = settings.deadlines.call_s
    try:
        reply = await transport.call(donor, STANDING, Message(), timeout_s=call_s, max_body_bytes=0)
        return Fields("standing", reply.meta).integer("version")
    except (TransientError, RemoteError):
        return -1
