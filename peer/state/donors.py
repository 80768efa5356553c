"""Those who can give a joining peer what they hold: the peers that serve a stage by now."""

import contextlib
import random

from swarm.core.errors import RemoteError, TransientError
from swarm.core.ids import PeerId
from swarm.network.directory.records import addresses_in
from swarm.network.transport import Directory, Transport


async def donors_of(directory: Directory, transport: Transport, topic: str, rng: random.Random) -> list[PeerId]:
    """Who serves the stage of this `topic`, in any order; as far as can be, this peer is connected to them.

    Raises TransientError.
    """
    found = await directory.lookup(topic)
    donors = sorted(found.keys() - {transport.peer_id})
    rng.shuffle(donors)
    for donor in donors:
        with contextlib.suppress(TransientError, RemoteError, TimeoutError):
            await transport.connect(donor, addresses_in(found[donor]))
    return donors
