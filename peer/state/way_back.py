"""How a peer that comes back takes the cheaper way: from what is on its disk, or from the others' newest state.

From its own it needs the results since, about a byte a parameter each under int8; a state is twelve.
"""

import asyncio
import logging
from collections.abc import Collection, Sequence

from swarm.averaging.parts import Parts
from swarm.checkpoint.kept_past import KeptPast
from swarm.checkpoint.state import StageState
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId
from swarm.core.plan import FLOAT_BYTES
from swarm.core.settings import RunSettings
from swarm.core.state.stage_chain import StageChain
from swarm.core.transfers import MOST_DONORS
from swarm.host_protocol import STANDING
from swarm.model.layout import ParameterLayout
from swarm.network.transport import Message, Transport

log = logging.getLogger(__name__)


async def state_to_go_on_from(
    past: KeptPast, beginning: StageChain, transport: Transport, donors: Sequence[PeerId]
) -> tuple[StageState, StageChain] | None:
    """The newest state that `past` makes again, if `donors` have all results since and these are less than a state.

    Donors' words for where the stage is decide no more than where to begin: what follows is certified. Those of members
    of the newest version here count, and others' only where none of them answers.
    """
    settings, layout = past.settings, past.layout
    newest = await asyncio.to_thread(past.newest, beginning.lineage)
    if newest < 0:
        return None
    chain = await asyncio.to_thread(past.chain_at, beginning.lineage, newest)
    members = [donor for donor in donors if chain is not None and donor in chain.members]
    others = [donor for donor in donors if donor not in members]
    stands_at = stated(await _versions_of(members, transport, settings))
    if stands_at is None:
        stands_at = stated(await _versions_of(others, transport, settings))
    if stands_at is None:
        return None
    behind = max(0, stands_at - newest)
    result_bytes, state_bytes = bytes_of_result_and_state(settings, layout)
    is_worth_it = behind <= settings.retained_results and behind * result_bytes < state_bytes
    log.info(
        "stage %d: version %d is on disk here, %d versions ago, %.1f MB of results; a state is %.1f MB: %s",
        past.stage,
        newest,
        behind,
        behind * result_bytes / 1e6,
        state_bytes / 1e6,
        "they are replayed" if is_worth_it else "a state is fetched",
    )
    return await asyncio.to_thread(past.made_again, beginning.lineage, newest) if is_worth_it else None


def stated(versions: Collection[int]) -> int | None:
    """The highest version that more than a third of those who say one are at, or beyond; None where nobody says one."""
    return sorted(versions, reverse=True)[len(versions) // 3] if versions else None


def bytes_of_result_and_state(settings: RunSettings, layout: ParameterLayout) -> tuple[int, float]:
    """What a peer that is behind receives for one version, or for a whole state instead."""
    state_bytes = (FLOAT_BYTES + settings.state_moment_bytes) * layout.num_values
    return Parts.of(settings, layout).all_result_bytes, state_bytes


async def _versions_of(donors: Sequence[PeerId], transport: Transport, settings: RunSettings) -> list[int]:
    """Where the stage is, by the words of a few of them."""
    said = await asyncio.gather(*(_version_of(donor, transport, settings) for donor in donors[:MOST_DONORS]))
    return [version for version in said if version >= 0]


async def _version_of(donor: PeerId, transport: Transport, settings: RunSettings) -> int:
    """Where the stage is, by its word; -1 if it does not say."""
    call_s = settings.deadlines.call_s
    try:
        reply = await transport.call(donor, STANDING, Message(), timeout_s=call_s, max_body_bytes=0)
        return Fields("standing", reply.meta).integer("version")
    except (TransientError, RemoteError):
        return -1
