"""A peer's own state held against the run key's word: a broken machine finds itself out and mends.

Replicas are exact, so a digest that differs from the anchored one is a fault of this machine. Until it is mended the
peer's work would be taken for lies.
"""

import asyncio
import logging

from peer.round.stage_steps import StageSteps
from peer.stage.events import StateFault
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId, Version
from swarm.host_protocol import ANCHOR
from swarm.network.transport import Message
from verification.state.anchor import Anchor

log = logging.getLogger(__name__)

CHECK_EVERY_S = 1.0


class StateCheck:
    """Compares this peer's snapshots with the anchors of their versions, each once."""

    def __init__(self, steps: StageSteps, host: PeerId) -> None:
        self._steps = steps
        self._host = host
        self.checked: set[int] = set()
        """Versions that are anchored: as they are here, or this state was dropped."""
        self.faults = 0

    async def run(self) -> None:
        """For ever. Without the host's word nothing is known to be wrong."""
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            held = self._steps.context.snapshots.versions()
            self.checked &= set(held)
            for version in sorted(set(held) - self.checked, reverse=True):
                try:
                    await self._check(version)
                except (TransientError, RemoteError) as error:
                    log.debug("state of version %d: %s", version, error)

    async def _check(self, version: int) -> None:
        steps = self._steps
        reply = await steps.context.transport.call(
            self._host,
            ANCHOR,
            Message({"stage": int(steps.chain.stage), "version": version}),
            timeout_s=steps.context.settings.deadlines.call_s,
            max_body_bytes=0,
        )
        anchor = Anchor.from_value(Fields("anchor answer", reply.meta).message("anchor"))
        anchor.check(run_id=steps.context.run_id, run_key=steps.chain.run_key)
        snapshot = steps.context.snapshots.get(version)
        if anchor.version != Version(version) or anchor.stage != steps.chain.stage or snapshot is None:
            return  # its members have not all stated their digest yet
        self.checked.add(version)
        if anchor.name == snapshot.chain.name and anchor.state_digest != snapshot.digest:
            log.error(
                "stage %d: this peer's state of version %d has digest %s, the anchored one is %s: a fault of this "
                "machine (memory, overclocking, disk); the state is loaded anew",
                steps.chain.stage,
                version,
                snapshot.digest.hex()[:16],
                anchor.state_digest.hex()[:16],
            )
            self.is_wrong_from(version)

    def is_wrong_from(self, version: int) -> None:
        """This peer's state is, of that version and later ones."""
        self.faults += 1
        self._steps.context.snapshots.drop(version)
        self._steps.context.events.publish(StateFault(version))
