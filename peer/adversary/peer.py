"""A peer that misbehaves: an honest one whose parts, calls and records pass through an adversary."""

import asyncio
import contextlib
import logging
from functools import partial
from typing import Any

from peer.adversary.attacked_pass import AttackedPass
from peer.adversary.false_audits import FalseAudits, FalseStanding
from peer.adversary.false_rounds import FalseDriver, FalsePartExchange
from peer.adversary.hooks import HONEST, Place
from peer.adversary.kinds import adversary_of
from peer.adversary.wrapped import FalseDirectory, FalseTransport
from peer.directory.neighbours import stage_topic
from peer.owner.limits import VolunteerSettings
from peer.program.composition import Composition
from peer.program.daemon import PeerDaemon
from swarm.attacks import Attack
from swarm.core.errors import TransientError
from swarm.core.ids import PeerId, Step
from swarm.identity.key import Identity
from swarm.network.transport import Directory, Transport

log = logging.getLogger(__name__)

MEDDLES_IN_A_LEASE = 5
UNTIL_JOINED_S = 0.1


class MisbehavingPeer(PeerDaemon):
    """`PeerDaemon` under an attack. At each stage that it serves the adversary is a new one."""

    def __init__(
        self,
        attack: Attack,
        volunteer: VolunteerSettings,
        identity: Identity,
        transport: Transport,
        directory: Directory,
        host: PeerId,
        **given: Any,
    ) -> None:
        """`given` as `PeerDaemon` has it."""
        self._attack = attack
        self._seed = identity.peer_id
        self.adversary = HONEST
        """Of the stage that is served; before that, none."""
        super().__init__(
            volunteer,
            identity,
            FalseTransport(transport, identity, self),
            FalseDirectory(directory, self),
            host,
            composition=self._composition,
            standing=FalseStanding(self),
            **given,
        )

    @property
    def step(self) -> Step:
        """That its stage is at."""
        return Step(self.at.steps.version) if self.at is not None else Step(0)

    @property
    def members(self) -> tuple[PeerId, ...]:
        """Of its stage."""
        return self.at.steps.chain.members if self.at is not None else ()

    async def run(self, stop: asyncio.Event) -> None:
        meddling = asyncio.ensure_future(self._meddle())
        try:
            await super().run(stop)
            if meddling.done():
                meddling.result()
        finally:
            meddling.cancel()
            await asyncio.gather(meddling, return_exceptions=True)

    def _composition(self) -> Composition:
        log.warning("this peer misbehaves: %s", self._attack)
        self.adversary = adversary_of(self._attack, seed=self._seed)
        return Composition(
            stage_pass=partial(AttackedPass, self.adversary),
            part_exchange=partial(FalsePartExchange, self.adversary),
            round_driver=partial(FalseDriver, self.adversary),
            contribution_audits=partial(FalseAudits, self.adversary),
        )

    async def _meddle(self) -> None:
        """What the adversary does in the directory, for ever."""
        while True:
            live = self.live
            if live is None:
                await asyncio.sleep(UNTIL_JOINED_S)
                continue
            stage, settings = live.stage, live.settings
            lease_s = settings.deadlines.lease_s
            if self.adversary.acts_in(self.step):
                beside = range(max(0, stage - 1), min(stage + 2, settings.model.num_stages))
                topics = [stage_topic(live.context.run_id, of) for of in beside]
                addresses = self.transport.addresses()
                place = Place(self.directory, self.identity, topics, addresses, lease_s, live.steps.joining)
                with contextlib.suppress(TransientError):
                    await self.adversary.meddle(place)
            await asyncio.sleep(lease_s / MEDDLES_IN_A_LEASE)
