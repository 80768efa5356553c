"""A run's host as a peer has it: asked again while it is silent, never needed for training."""

import asyncio
import logging

from peer.directory.kept_answers import KeptAnswers
from swarm.core.canonical import Value
from swarm.core.errors import TransientError, UnreachableError
from swarm.core.ids import PeerId, RunId
from swarm.core.settings import RunSettings
from swarm.host_protocol import RUN
from swarm.invite import Invite
from swarm.manifest.signed_run import SignedRun
from swarm.network.transport import Message, Transport
from swarm.release import check_protocol

log = logging.getLogger(__name__)

HOST_RETRY_S = 0.5
TRIES, FEW_TRIES = 20, 2
"""The latter where there is an answer already."""


class Host:
    """The host, as a peer sees it. Its absence is never fatal to training."""

    def __init__(
        self,
        transport: Transport,
        peer_id: PeerId,
        invite: Invite | None = None,
        call_s: float = 10.0,
        kept: KeptAnswers | None = None,
    ) -> None:
        """`invite`: names the run and the run key that the host must serve. `kept`: what it has said before."""
        self._invite = invite
        self._transport = transport
        self.peer_id = peer_id
        self._call_s = call_s
        self.kept = kept or KeptAnswers(None)

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

    async def answer(
        self, about: str, method: str, meta: dict[str, Value], *, timeout_s: float | None = None, tries: int = TRIES
    ) -> dict[str, Value]:
        """The host's answer; while it cannot be reached, what is kept `about` it. Raises TransientError without both.

        Whoever finds it signed as it must be hands it to `kept.keep`.
        """
        kept = self.kept.get(about)
        if kept is not None:
            try:
                return (await self.call(method, meta, timeout_s=timeout_s, tries=FEW_TRIES)).meta
            except UnreachableError as error:
                log.info("%s; what it has said of %s before holds", error, about)
                return kept
            except TransientError as error:  # it is there, and says "not now"
                log.info("host: %s", error)
        return (await self.call(method, meta, timeout_s=timeout_s, tries=tries)).meta

    async def run(self) -> tuple[SignedRun, RunSettings, RunId]:
        """The run it coordinates, signed.

        Raises UpgradeNeeded when this release does not speak its protocol, RemoteError if the invite is to another.
        """
        answer = await self.answer("run", RUN, {})
        signed_run, settings = self._read_run(answer)
        self.kept.keep("run", answer)
        return signed_run, settings, signed_run.run_id

    async def hear_run_of(self, peer: PeerId) -> None:
        """Keep what another peer says of the run, if it knows more amendments than are known here.

        Raises TransientError if it does not answer, or knows no more, RemoteError for what the run key did not sign.
        """
        reply = await self._transport.call(peer, RUN, Message(), timeout_s=self._call_s, max_body_bytes=0)
        told, _ = self._read_run(reply.meta)
        before = self.kept.get("run")
        known = SignedRun.from_value(before) if before is not None else told.under(0)
        if told.run_id != known.run_id or len(told.amendments) <= len(known.amendments):
            raise TransientError(f"{peer[-6:]} knows no more of the run")
        self.kept.keep("run", reply.meta)

    def _read_run(self, answer: dict[str, Value]) -> tuple[SignedRun, RunSettings]:
        signed_run = SignedRun.from_value(answer)
        if isinstance(protocol := signed_run.protocol, int):
            check_protocol(protocol)  # before all else: settings of another protocol cannot be read
        if self._invite is not None:
            self._invite.check_run(signed_run)
        return signed_run, signed_run.in_force
