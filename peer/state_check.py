"""This is where a peer holds its own state against the run key's word: a broken machine finds itself out and mends.

Replicas are exact, so a digest that differs from the anchored one is a fault of this machine. Until it is mended the
peer's work would be taken for lies.
"""

import asyncio
import logging
from collections.abc import Callable

from peer.rounds import StageRounds
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId, Version
from swarm.host_protocol import ANCHOR
from swarm.network.transport import Message
from verification.anchor import Anchor

log = logging.getLogger(__name__)

CHECK_EVERY_S = 1.0


class StateCheck:
    """Compares this peer's snapshots with the anchors of their versions, each once."""

    def __init__(self, rounds: StageRounds, coordinator: PeerId, on_fault: Callable[[], None]) -> None:
        self._rounds = rounds
        self._coordinator = coordinator
        self._on_fault = on_fault
        self.on_dropped: Callable[[], None] = lambda: None
        """What was stated is to be taken back."""
        self.checked: set[int] = set()
        """Versions that are anchored: as they are here, or this state was dropped."""
        self.faults = 0

    async def run(self) -> None:
        """For ever. Without the host's word nothing is known to be wrong."""
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            held = self._rounds.snapshots.versions()
            self.checked &= set(held)
            for version in sorted(set(held) - self.checked, reverse=True):
                try:
                    await self._check(version)
                except (TransientError, RemoteError) as error:
                    log.debug("state of version %d: %s", version, error)

    async def _check(self, version: int) -> None:
        rounds = self._rounds
        reply = await rounds.transport.call(
            self._coordinator,
            ANCHOR,
            Message({"stage": int(rounds.chain.stage), "version": version}),
            timeout_s=rounds.settings.deadlines.call_s,
            max_body_bytes=0,
        )
        anchor = Anchor.from_value(Fields("anchor answer", reply.meta).message("anchor"))
        anchor.check(run_id=rounds.run_id, run_key=rounds.chain.run_key)
        snapshot = rounds.snapshots.get(version)
        if anchor.version != Version(version) or anchor.stage != rounds.chain.stage or snapshot is None:
            return  # its members have not all stated their digest yet
        self.checked.add(version)
        if anchor.name == snapshot.chain.name and anchor.state_digest != snapshot.digest:
            log.error(
                "stage %d: this peer's state of version %d has digest %s, the anchored one is %s: a fault of this "
                "machine (memory, overclocking, disk); the state is loaded anew",
                rounds.chain.stage,
                version,
                snapshot.digest.hex()[:16],
                anchor.state_digest.hex()[:16],
            )
            self.is_wrong_from(version)

    def is_wrong_from(self, version: int) -> None:
        """This peer's state is, of that version and later ones."""
        self.faults += 1
        self._rounds.snapshots.drop(version)
        self._on_fault()
        self.on_dropped()
