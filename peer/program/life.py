"""A peer's life from its daemon's start to its end: it looks for the run, joins it, goes away and comes back.

A session is one transport, one directory and one peer; going away ends it whole, so nothing of it uses the network.
"""

import asyncio
import hashlib
import logging
import random
import time
from collections.abc import Callable, Sequence

from peer.directory.kept_answers import KeptAnswers
from peer.directory.known_peers import KnownPeers
from peer.directory.reachability import Reachability, dial_all, keep_the_hosts_time
from peer.directory.relaying import VolunteerRelay
from peer.owner.desk import OwnerDesk
from peer.owner.own_peer import OwnPeer
from peer.program.daemon import PeerDaemon
from peer.program.joining import OnRun
from swarm.core.errors import NotFreeError, SettingsError, TransientError
from swarm.core.ids import PeerId
from swarm.core.owner.guest import Conduct
from swarm.host_protocol import seed_topic
from swarm.network.directory.dht import DHTDirectory
from swarm.network.directory.records import addresses_in
from swarm.network.loop import happened
from swarm.network.p2pd.p2p import P2PSettings, P2PTransport
from swarm.network.router.port_mapper import PortMapper

log = logging.getLogger(__name__)

FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 20.0
"""A seed that comes back is found within the longer: it is asked at least so often, for ever."""

SEEDS_EVERY_S = 600.0
P2PD_ENDED = "p2pd has ended, and is started again"

MAX_SEEDS = 4
"""Remembered beside the host, of those that say they are."""


class Backoff:
    """Waits that double, each drawn from the upper half of its span, so that many peers do not come back at once."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._span_s = FIRST_RETRY_S

    def next_s(self) -> float:
        wait_s = self._span_s * self._rng.uniform(0.5, 1.0)
        self._span_s = min(LONGEST_RETRY_S, 2 * self._span_s)
        return wait_s

    def reset(self) -> None:
        self._span_s = FIRST_RETRY_S


class Life:
    """The life of one of a daemon's peers with one run."""

    def __init__(
        self,
        desk: OwnerDesk,
        peer: OwnPeer,
        host: PeerId,
        addresses: Sequence[str],
        known: KnownPeers,
        *,
        on_run: OnRun,
        say: Callable[[str], None],
        rng: random.Random,
        waits_for_room: bool = False,
        make_peer: Callable[..., PeerDaemon] = PeerDaemon,
    ) -> None:
        """`waits_for_room`: nobody is there who would end what holds the machine's memory or disk. `make_peer` is
        called as `PeerDaemon` is, for each session."""
        self._desk = desk
        self._peer = peer
        self._host = host
        self._addresses = list(addresses)
        self._known = known
        self._on_run = on_run
        self._say = say
        self._backoff = Backoff(rng)
        self._waits_for_room = waits_for_room
        self._make_peer = make_peer
        self._seeds: dict[PeerId, list[str]] = {}
        self._seeds_at = 0.0
        self._kept = KeptAnswers(peer.folder / f"host-{host[-12:]}.answers")
        self._has_fitted = False
        """A peer of this run has lived on this machine."""

    async def run(self, stop: asyncio.Event) -> None:
        """Until the run is over or `stop`. Raises what no waiting mends: SettingsError, LocalError, RemoteError."""
        while not stop.is_set():
            if self._desk.decision.conduct is Conduct.AWAY:
                await self._until_decided(stop)
                continue
            try:
                if await self._session(stop):
                    return
            except (TransientError, SettingsError) as error:
                # What fitted once will fit again, when others leave the machine's memory and disk alone.
                waits = self._has_fitted or (self._waits_for_room and isinstance(error, NotFreeError))
                if isinstance(error, SettingsError) and not waits:
                    raise
                if await self._wait_to_retry(str(error), stop):
                    return

    async def _session(self, stop: asyncio.Event) -> bool:
        """Join and live; whether the run is over. Raises TransientError when the run's host cannot be reached."""
        desk, peer, volunteer = self._desk, self._peer, self._peer.volunteer
        peer.phase, peer.waits_for = "starting", "the network's start"
        transport = await P2PTransport.create(peer.identity, P2PSettings(listen=volunteer.listen))
        peer.attach(transport)
        directory = None
        try:
            directory = await DHTDirectory.create(peer.identity, transport)
            if not await self._find_run(transport, directory, stop):
                return False
            daemon = self._make_peer(
                volunteer,
                peer.identity,
                transport,
                directory,
                self._host,
                shared=desk.shared,
                kept=self._kept,
                threads=peer.threads,
                on_run=self._on_run,
                say=self._say,
                waits_for=self._waits_for,
            )
            peer.phase, peer.waits_for = "joining", "the run's data and state"
            mapper = PortMapper.of_this_home() if volunteer.asks_router else None
            reachability = Reachability(transport, directory, self._host, self._addresses, mapper=mapper)
            peer.joins(daemon, reachability)
            enough = asyncio.Event()
            works = [self._mind(daemon, stop), reachability.run(), _until_lost(transport)]
            if volunteer.relay_listen:
                relay = VolunteerRelay(
                    desk.relay_key,
                    volunteer.relay_listen,
                    transport,
                    directory,
                    self._host,
                    left_bytes=desk.relay_left_bytes,
                    carried=desk.relayed,
                )
                works.append(relay.run())
            minding = [asyncio.ensure_future(work) for work in works]
            for task in minding:
                task.add_done_callback(lambda _: enough.set())
            try:
                await daemon.run(enough)
            finally:
                self._has_fitted = self._has_fitted or daemon.live is not None
                for task in minding:
                    task.cancel()
                await asyncio.wait(minding)
            for task in minding:
                if not task.cancelled():
                    task.result()
            if daemon.finished.is_set():
                self._say("the run is over")
            return daemon.finished.is_set()
        finally:
            peer.detach()
            if directory is not None:
                await directory.close()
            await transport.close()

    def _waits_for(self, what: str) -> None:
        """What stands between this peer and its work, once it has found the run."""
        if what and what != self._peer.waits_for:
            self._say(what)
        self._peer.waits_for = what or "the run's data and state"

    async def _find_run(self, transport: P2PTransport, directory: DHTDirectory, stop: asyncio.Event) -> bool:
        """Connect to the host, trying for ever; False when told to stop or to go away meanwhile.

        Who has joined before needs the host no more: peers met then, or another seed, will do.
        """
        desk = self._desk
        while not stop.is_set() and desk.decision.conduct is not Conduct.AWAY:
            if transport.ended.is_set():
                raise TransientError(P2PD_ENDED)
            failed = await dial_all(transport, self._host, self._addresses)
            if len(failed) < len(self._addresses):
                try:
                    await keep_the_hosts_time(transport, self._host)
                    await directory.join([address for address in self._addresses if address not in failed])
                except TransientError as error:  # without the directory this peer would find nobody
                    if await self._wait_to_retry(f"the host answers, but not its directory: {error}", stop):
                        return False
                    continue
                self._backoff.reset()
                return True
            # Only now: peers that are gone since take a dial's whole deadline to say so.
            met = await self._known.meet(directory)
            if met and self._kept.is_enough:
                self._say(f"the host does not answer, but {met} peers or seeds met before do: going on with them")
                return True
            others = f"; {met} peers met before answer" if met else ""
            causes = "; ".join(f"{address}: {cause}" for address, cause in failed.items())
            if await self._wait_to_retry(f"the host does not answer{others}: {causes}", stop):
                return False
        return False

    async def _wait_to_retry(self, why: str, stop: asyncio.Event) -> bool:
        """Whether it was told to stop meanwhile."""
        wait_s = self._backoff.next_s()
        if (self._peer.phase, self._peer.waits_for) != ("looking", why):
            self._say(f"{why} (tried again for ever; `swarm status` tells more)")
            log.warning("%s", why)
        self._peer.phase, self._peer.waits_for = "looking", why
        return await happened(stop, within_s=wait_s)

    async def _mind(self, daemon: PeerDaemon, stop: asyncio.Event) -> None:
        """Ends when the owner's limits, or the owner, end the session; remembers whom the peer met."""
        told, before = False, self._desk.decision.conduct
        while not stop.is_set() and self._desk.decision.conduct is not Conduct.AWAY:
            if daemon.live is not None:
                await self._look_for_seeds(daemon)
                self._known.remember({**daemon.live.neighbours.addresses, **self._seeds})
            if daemon.live is not None and not told:
                told, steps = True, daemon.live.steps
                at = f"stage {steps.chain.stage} of {daemon.live.settings.name} at step {steps.version}"
                self._say(f"joined {at}; `swarm status` and `swarm top` tell more, Ctrl-C leaves")
            await self._until_decided(stop, within_s=10.0 if told else 0.5)
            if self._desk.decision.conduct is not before:
                before = self._desk.decision.conduct
                self._say(self._desk.decision.reason or "working again")
        if not stop.is_set():
            self._say("away: it comes back by itself")
            return
        first = "what has begun is finished first, and the averaging round that is under way"
        self._say(f"leaving: {first}; Ctrl-C again leaves at once")

    async def _look_for_seeds(self, daemon: PeerDaemon) -> None:
        """Now and then: where the host's other seeds listen, as the directory has it."""
        if time.monotonic() < self._seeds_at:
            return
        self._seeds_at = time.monotonic() + SEEDS_EVERY_S
        try:
            found = await daemon.directory.lookup(seed_topic(self._host))
        except TransientError:
            return
        drawn = sorted(found, key=lambda seed: hashlib.sha256(f"{daemon.identity.peer_id} {seed}".encode()).digest())
        self._seeds |= {seed: addresses_in(found[seed], named=True) for seed in drawn[:MAX_SEEDS]}
        self._seeds = dict(list(self._seeds.items())[-MAX_SEEDS:])

    async def _until_decided(self, stop: asyncio.Event, *, within_s: float = 3600.0) -> None:
        waits = [asyncio.ensure_future(event.wait()) for event in (stop, self._desk.decided)]
        try:
            await asyncio.wait(waits, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


async def _until_lost(transport: P2PTransport) -> None:
    """Raises TransientError when there is no network under this session any more: another one is begun."""
    await transport.ended.wait()
    raise TransientError(P2PD_ENDED)
