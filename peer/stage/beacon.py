"""The beacon as one peer knows it: what the host has said of its stage's versions, and what it reveals itself."""

import asyncio
import contextlib
import logging
import time

from peer.round.stage_steps import StageSteps
from peer.stage.events import VersionTurned
from swarm.core.audit.beacon import Beacon
from swarm.core.audit.chance import REVEALED_AFTER, Chance, HostWord
from swarm.core.audit.hash_chain import HashChain
from swarm.core.audit.ticket import Ticket
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId, Step
from swarm.core.round.contribution import Roster
from swarm.core.state.stage_chain import StageChain
from swarm.host_protocol import BEACON
from swarm.network.loop import happened
from swarm.network.transport import Message

log = logging.getLogger(__name__)

ASK_FIRST_S, ASK_LAST_S = 0.1, 30.0
"""The host hears of a version a little after its makers: it is asked again after the first, then twice as long."""
FURTHEST_AHEAD = 4096
"""Versions that the host may be ahead of this peer for its word to be taken."""


class StageBeacon:
    """Of the stage that this peer is at, as long as it is there."""

    def __init__(self, steps: StageSteps, ticket: Ticket, draws: HashChain, host: PeerId) -> None:
        self._steps = steps
        self._ticket = ticket
        self._draws = draws
        self._host = host
        self._lineage, self._said = steps.chain.lineage, steps.chain.basis.said
        self._heard = asyncio.Event()
        self._turned = asyncio.Event()
        steps.context.events.hear(VersionTurned, self._on_version)

    @property
    def said(self) -> HostWord:
        """The host's last word that is known here."""
        return self._said

    def hear(self, said: HostWord) -> None:
        """Somebody says that this is the host's. Raises RemoteError("draw") if it is not on its chain, TransientError
        if it is on versions that are not known here: there is no end to the hashing of those."""
        known = self._said
        if said.num_versions > self._steps.version + FURTHEST_AHEAD:
            raise TransientError(f"a word on {said.num_versions} versions; this stage is at {self._steps.version}")
        if said.num_versions > known.num_versions:
            if not said.follows(known):
                raise RemoteError("draw", f"a word on {said.num_versions} versions is not on the host's chain")
            self._said = said
            self._heard.set()
            self._heard = asyncio.Event()

    def of(self, roster: Roster) -> Beacon:
        """Of the certified roster's round. Raises TransientError while the host has not spoken of it."""
        return Beacon.of(roster, self._said)

    async def spoken(self, step: Step, *, timeout_s: float) -> None:
        """Until the host has spoken of the step. Raises TransientError if it has not in that time."""
        give_up_at = time.monotonic() + timeout_s
        while self._said.num_versions <= step:
            if time.monotonic() >= give_up_at:
                raise TransientError(f"the host has not spoken of step {step} for {timeout_s:.0f} s")
            await happened(self._heard, within_s=max(0.01, give_up_at - time.monotonic()))

    def chance(self, chain: StageChain) -> Chance:
        """What this peer's contribution to the round that starts from the chain's version reveals."""
        step, me = int(chain.version), self._steps.context.me
        ticket = self._ticket if me not in chain.basis.link_of else None
        said = self._said if chain.lineage == self._lineage else chain.basis.said
        return Chance(self._draws.reveal(step - REVEALED_AFTER), said.at_most(step), ticket)

    async def run(self) -> None:
        """Ask the host for its word on each version, for ever: members carry it into the next roster."""
        pause_s = ASK_FIRST_S
        while True:
            turned = self._turned
            if self._said.num_versions >= self._steps.version:
                await turned.wait()
                pause_s = ASK_FIRST_S
                continue
            with contextlib.suppress(TransientError, RemoteError):
                await self._ask()
            if self._said.num_versions < self._steps.version:
                await happened(self._heard, within_s=pause_s)
                pause_s = min(2 * pause_s, ASK_LAST_S)

    async def _ask(self) -> None:
        context, chain = self._steps.context, self._steps.chain
        asked = Message({"stage": chain.stage, "lineage": chain.lineage})
        reply = await context.transport.call(
            self._host, BEACON, asked, timeout_s=context.settings.deadlines.call_s, max_body_bytes=0
        )
        said = HostWord.from_value(Fields("beacon answer", reply.meta).message("said"))
        if chain.lineage == self._lineage:
            self.hear(said)

    def _on_version(self, event: VersionTurned) -> None:
        if event.chain.lineage != self._lineage:
            self._lineage, self._said = event.chain.lineage, event.chain.basis.said
        self.hear(event.chain.basis.said)
        self._turned.set()
        self._turned = asyncio.Event()
