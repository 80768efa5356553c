"""A daemon's peers, one on each of its devices, each with a life of its own: one's end is not the others'."""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from peer.directory.known_peers import KnownPeers
from peer.owner.desk import OwnerDesk
from peer.owner.own_peer import OwnPeer
from peer.program.daemon import PeerDaemon
from peer.program.joining import OnRun
from peer.program.life import Life
from swarm.core.errors import LocalError, RemoteError, SettingsError, TransientError
from swarm.core.ids import PeerId
from swarm.core.settings import RunSettings
from swarm.log_format import spoken_by
from swarm.manifest.signed_run import SignedRun

log = logging.getLogger(__name__)

EXPECTED = (LocalError, RemoteError, SettingsError, TransientError)
"""What ends a peer without a mistake of the program's."""


class Lives:
    """Of one daemon with one run."""

    def __init__(
        self,
        desk: OwnerDesk,
        host: PeerId,
        addresses: Sequence[str],
        known: KnownPeers,
        stop: asyncio.Event,
        *,
        on_run: OnRun,
        say: Callable[[str], None],
        rng: random.Random,
        waits_for_room: bool = False,
        make_peer: Callable[..., PeerDaemon] = PeerDaemon,
    ) -> None:
        """What `on_run` raises ends all: it is the owner who does not agree. The rest is as `Life` has it."""
        self._desk = desk
        self._stop = stop
        self._on_run = on_run
        self._say = say
        self._failure: Exception | None = None
        """What has ended the last peer that did not end well."""
        self._others_went_on = False
        """Then, and the owner was told."""
        self._of = [
            Life(
                desk,
                peer,
                host,
                addresses,
                known,
                on_run=self._agreed,
                say=partial(self._say_of, peer),
                rng=rng,
                waits_for_room=waits_for_room,
                make_peer=make_peer,
            )
            for peer in desk.peers
        ]

    async def run(self) -> None:
        """Until all have ended: the run is over, they were told to stop, or by what no waiting mends.

        Raises the last of the latter: it is what there is to say of the daemon's end. But where others went on, and
        left when they were told to, that is its end: who has it leave does not want it started again for a failure.
        """
        watching = asyncio.ensure_future(self._desk.watch())
        living = asyncio.gather(*map(self._live, self._desk.peers, self._of))
        waits: set[asyncio.Future[Any]] = {watching, living}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()
            living.result()
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        if self._failure is not None and not (self._others_went_on and self._stop.is_set()):
            raise self._failure

    async def _live(self, peer: OwnPeer, life: Life) -> None:
        with spoken_by(peer.name):
            try:
                await life.run(self._stop)
            except Exception as error:
                self._desk.ended(peer, str(error) or type(error).__name__)
                self._failure = error
                self._others_went_on = not self._stop.is_set() and not all(one.has_ended for one in self._desk.peers)
                if self._others_went_on:
                    log.error("this peer has ended: %s", error, exc_info=not isinstance(error, EXPECTED))
                    self._say_of(peer, f"has ended, and the others go on: {error}")
            else:
                self._desk.ended(peer, "it has left" if self._stop.is_set() else "the run is over")

    async def _agreed(self, signed_run: SignedRun, settings: RunSettings) -> None:
        try:
            await self._on_run(signed_run, settings)
        except Exception:
            self._stop.set()
            raise

    def _say_of(self, peer: OwnPeer, text: str) -> None:
        self._say(f"{peer.name}: {text}" if peer.name else text)
