"""This is where a run's coordinator stands for a peer: asked again while it is silent, never needed for training."""

import asyncio
import logging

from swarm import PROTOCOL
from swarm.core.canonical import Value, unpack
from swarm.core.errors import SettingsError, TransientError
from swarm.core.ids import PeerId, RunId
from swarm.core.settings import RunSettings
from swarm.host_protocol import MAX_SETTINGS_BYTES, RUN, SignedRun
from swarm.manifest import run_id, settings_from_value
from swarm.network.transport import Message, Transport

log = logging.getLogger(__name__)

HOST_RETRY_S = 0.5


class Host:
    """The coordinator, as a peer sees it. Its absence is never fatal to training."""

    def __init__(self, transport: Transport, peer_id: PeerId, call_s: float = 10.0) -> None:
        self._transport = transport
        self.peer_id = peer_id
        self._call_s = call_s

    async def call(
        self,
        method: str,
        meta: dict[str, Value],
        *,
        max_body_bytes: int = 0,
        timeout_s: float | None = None,
        tries: int = 1,
    ) -> Message:
        """The host's answer. Raises TransientError when it does not answer in `tries` tries."""
        for left in range(tries - 1, -1, -1):
            try:
                return await self._transport.call(
                    self.peer_id,
                    method,
                    Message(meta),
                    timeout_s=timeout_s or self._call_s,
                    max_body_bytes=max_body_bytes,
                )
            except TransientError as error:
                if not left:
                    raise
                log.info("host: %s", error)
                await asyncio.sleep(HOST_RETRY_S)
        raise AssertionError("unreachable")

    async def run(self) -> tuple[SignedRun, RunSettings, RunId]:
        """The run it coordinates, signed. Raises SettingsError when this release does not speak its protocol."""
        reply = await self.call(RUN, {}, tries=20, max_body_bytes=0)
        signed_run = SignedRun.from_value(reply.meta)
        settings = settings_from_value(unpack(signed_run.settings, max_bytes=MAX_SETTINGS_BYTES))
        if settings.protocol != PROTOCOL:
            raise SettingsError(
                f"protocol = {settings.protocol}: this is homeswarm protocol {PROTOCOL}; install the release "
                "the run's host names"
            )
        return signed_run, settings, run_id(settings)
