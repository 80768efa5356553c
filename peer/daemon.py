"""This is where the volunteer's daemon is put together and lives: join, train, drain, leave."""

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from peer.adversary import HONEST, adversary_of
from peer.adversary.directory import Place
from peer.catch_up import CatchUp, StateDonor
from peer.compute import Urgency, WorkThread
from peer.downstream import Downstream, HopCounters, numeric_class
from peer.exchange_store import ExchangeStore
from peer.exhibits import ExhibitStore
from peer.hops import HopServer
from peer.host import Host
from peer.joining import Joined, Joining, OnRun
from peer.kept_answers import KeptAnswers
from peer.limited_transport import LimitedTransport
from peer.limits import GIB, VolunteerSettings, used_bytes
from peer.moving import MEASURED_AFTER, Mover, say_on_the_way
from peer.neighbours import Neighbours, stage_topic
from peer.permit import Permit
from peer.replica import StageReplica
from peer.reports import Reports
from peer.rolling_back import RollingBack
from peer.rounds import StageRounds
from peer.screening import KnownStanding, Screening
from peer.signing_log import SigningLog
from peer.snapshots import SnapshotStore
from peer.source import Source
from peer.stage_work import StageWork
from peer.step_state import Applied
from peer.tally import WorkTally
from peer.verdicts import Verdicts, Word
from peer.verifying import Verifying
from swarm.core.errors import LocalError, RemoteError, ShutOutError, TransientError, UpgradeNeeded
from swarm.core.ids import PeerId, StageIndex, Step
from swarm.core.settings import RunSettings
from swarm.core.wiring import EarliestFinishWiring
from swarm.data.batches import BatchReader
from swarm.disk_room import disk_room
from swarm.host_protocol import (
    FINISH,
    GOODBYE,
)
from swarm.identity import Identity
from swarm.network.outcasts import GuardedTransport
from swarm.network.transport import Directory, Message, Transport
from swarm.optim.stage_step import stage_clip_norm
from swarm.release import check_release
from swarm.witness_service import VoteLog, WitnessService
from verification.kinds.mismatch import MISMATCHES
from verification.standing import FAULT
from verification.verdicts import Ban, Pardon, Quarantine

log = logging.getLogger(__name__)

MOST_DRAIN_S, MOST_LEAVING_S = 20.0, 26.0
"""A peer leaves within 30 s: it drains, says goodbye and waits for what its threads compute, and then closes its
transport, which takes 2.5 s at most."""
MEDDLES_IN_A_LEASE = 5
"""By an adversary."""
LINGER_S = 60.0
"""After the last step a peer serves evaluations and state until the host says it is over, at most this long alone."""


class Live(NamedTuple):
    """What a peer that has joined lives with; for those who look at it."""

    settings: RunSettings
    rounds: StageRounds
    counters: HopCounters
    neighbours: Neighbours
    server: HopServer
    source: Source | None
    verifying: Verifying
    device: str

    @property
    def in_flight(self) -> int:
        """Microbatches that have begun here and have not ended."""
        return self.server.in_flight + (self.source.in_flight if self.source is not None else 0)


class PeerDaemon:
    """One peer of one stage of one run."""

    def __init__(
        self,
        volunteer: VolunteerSettings,
        identity: Identity,
        transport: Transport,
        directory: Directory,
        host: PeerId,
        *,
        rng: random.Random | None = None,
        permit: Permit | None = None,
        kept: KeptAnswers | None = None,
    ) -> None:
        """`kept`: what the host has said before."""
        self.volunteer = volunteer
        self.identity = identity
        self.permit = permit or Permit()
        self.tally = WorkTally(identity.peer_id)
        self.on_run: OnRun | None = None
        self.live: Live | None = None
        """Once this peer has joined."""
        self.limited = LimitedTransport(
            transport, upload_mbit=volunteer.upload_mbit, download_mbit=volunteer.download_mbit
        )
        self.transport = GuardedTransport(self.limited)
        self.directory = directory
        self.host = Host(self.transport, host, volunteer.invite, kept=kept)
        self.finished = asyncio.Event()
        self._rng = rng or random.Random(secrets.randbits(64))
        self._host_id = host
        self.reports = Reports(self.host, self.transport, directory)
        self.reports.on_minimum_release = self._check_release
        self._outdated: UpgradeNeeded | None = None
        self._shut_out_by: Ban | Quarantine | None = None
        """What is said of this peer itself."""
        self.standing = KnownStanding()
        self.verdicts = Verdicts(identity.peer_id, host, self.standing, self.transport)
        self.verdicts.on_self = self._on_self
        self._joining = Joining(
            volunteer, identity, self.transport, self.limited, directory, self.host, self.verdicts, self._rng
        )
        self._on_fault: Callable[[], None] = lambda: None
        self._on_pardon: Callable[[], None] = lambda: None
        self.rounds: StageRounds | None = None
        self._serves: StageIndex | None = None
        """The stage, or where this peer is on its way to; None until it has joined: it may be a member come back."""

    async def run(self, stop: asyncio.Event) -> None:
        """Join, train until the run is over or `stop`, then drain and leave.

        Raises SettingsError when this machine cannot serve the run, LocalError when something here broke,
        DiskFullError when the disk took no more.
        """
        with disk_room(self.volunteer.folder):
            await self._run(stop)

    async def _run(self, stop: asyncio.Event) -> None:
        torch.set_num_threads(self.volunteer.threads)
        self.transport.serve("ping", self._on_ping, max_body_bytes=0)
        self.transport.serve(FINISH, self._on_finish, max_body_bytes=0)
        joining = asyncio.ensure_future(self._joining.join(self.volunteer.stage, self.on_run))
        stopping = asyncio.ensure_future(stop.wait())
        try:
            while True:
                await asyncio.wait({joining, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if not joining.done():
                    break
                joined = joining.result()
                target = await self._live(joined, stop)
                if target is None or stop.is_set() or self.finished.is_set():
                    break
                joining = asyncio.ensure_future(self._join_from_elsewhere(joined, target))
            if self._outdated is not None:
                raise self._outdated
            verdict = self._shut_out_by
            if verdict is not None:
                raise ShutOutError(
                    f"this peer is {_what(verdict)} from the run: {verdict.kind} at step {verdict.version} of stage "
                    f"{verdict.stage}; the host keeps the evidence {verdict.evidence_digest.hex()[:16]}"
                )
        finally:
            stopping.cancel()
            if not joining.done():
                joining.cancel()
                await asyncio.gather(joining, return_exceptions=True)

    async def _join_from_elsewhere(self, joined: Joined, target: StageIndex) -> Joined:
        """Join another stage, counting there from now on."""
        topic = stage_topic(joined.run_id, target)
        on_the_way = asyncio.ensure_future(say_on_the_way(self.directory, topic, joined.settings.deadlines.lease_s))
        try:
            return await self._joining.join(target, self.on_run)
        finally:
            on_the_way.cancel()
            await asyncio.gather(on_the_way, return_exceptions=True)

    def _on_self(self, word: Word) -> None:
        """The run key's word on this peer."""
        if isinstance(word, Quarantine) and word.kind in MISMATCHES:
            log.warning("jurors have found this peer guilty of %s: it waits for the host's word", word.kind)
        elif isinstance(word, Quarantine) and word.kind == FAULT:
            self._on_fault()
        elif isinstance(word, Pardon):
            self._on_pardon()
        elif isinstance(word, Ban | Quarantine):
            self._shut_out_by = word
            self.finished.set()

    def _check_release(self, minimum: str) -> None:
        """Drain and go, keeping what is here, if the host takes in newer releases only."""
        try:
            check_release(minimum)
        except UpgradeNeeded as outdated:
            self._outdated = outdated
            self.finished.set()

    # -- living -------------------------------------------------------------------------------------------

    async def _live(self, joined: Joined, stop: asyncio.Event) -> StageIndex | None:
        """Train until the run is over or `stop`, or until this peer is to go to the stage that is returned."""
        settings, name, chain = joined.settings, joined.run_id, joined.chain
        model, folder, files = joined.model, joined.folder, joined.files
        stage = chain.stage
        compute = WorkThread("compute", on_start=lambda: torch.set_num_threads(self.volunteer.threads))
        compute.audits_wait_s = settings.deadlines.step_s
        exact = WorkThread("exact")
        replica = StageReplica(settings, model, joined.state, clip_norm=stage_clip_norm(settings, stage))
        snapshots = SnapshotStore(joined.snapshots, stage)
        signing_log = SigningLog(folder / f"signed-{self.identity.peer_id[-8:]}.log")
        vote_log = VoteLog(folder / f"voted-{self.identity.peer_id[-8:]}.log")
        rounds = StageRounds(
            settings,
            name,
            self.identity,
            self.transport,
            replica,
            chain,
            compute,
            exact,
            snapshots,
            signing_log,
            vote_log,
        )
        self.rounds = rounds
        rounds.screening = Screening(self.standing, lambda: rounds.version)
        counters = HopCounters()
        neighbours = Neighbours(settings, name, self.transport, self.directory, stage, lambda: rounds.version)
        kind = numeric_class(str(model.device), settings.model.compute_dtype)
        downstream = None
        if not model.is_last:
            downstream = Downstream(
                settings,
                self.identity,
                self.transport,
                compute,
                EarliestFinishWiring(StageIndex(stage + 1), self._rng),
                counters,
                kind,
                lambda peer: None,
            )
        attack = self.volunteer.attack
        adversary = HONEST if attack is None else adversary_of(attack, seed=self.identity.peer_id)
        if attack is not None:
            log.warning("this peer misbehaves: %s", attack)
        rounds.adversary = adversary
        exhibits = ExhibitStore.of_run(settings)
        exchanges = ExchangeStore.of_run(settings, self.identity.peer_id)
        if downstream is not None:
            downstream.keep = exchanges.keep
        rounds.on_contributed = exhibits.keep_parts
        work = StageWork(
            settings,
            name,
            self.identity,
            replica,
            compute,
            rounds,
            counters,
            kind,
            exhibits,
            exchanges,
            rounds.screening,
            permit=self.permit,
            adversary=adversary,
        )
        server = HopServer(work, downstream, self.limited)
        # Paused, what is begun is finished, and audits and evaluations wait.
        compute.may_begin = lambda urgency: urgency <= Urgency.BIRTH or not self.permit.withheld
        self.permit.on_change = [compute.wake]
        source = None
        if files is not None and downstream is not None:
            source = Source(work, rounds, downstream, *files)

        def peers_changed(of_stage: int, peers: set[PeerId]) -> None:
            if of_stage == stage + 1 and downstream is not None:
                downstream.update_peers(peers)

        def is_of_stage(peer: PeerId, of_stage: int) -> bool:
            """As far as this peer can know: it knows its own stage."""
            return of_stage != stage or peer in rounds.chain.members or peer in neighbours.of_stage(stage)

        neighbours.on_change = peers_changed
        server.is_before = lambda peer: peer in neighbours.of_stage(stage - 1)
        rounds.neighbours = lambda: neighbours.of_stage(stage - 1) | neighbours.of_stage(stage + 1)
        neighbours.on_lost = rounds.peer_lost
        mover = None
        if settings.limits.rebalance_s and settings.trust == "friends":
            mover = Mover(
                settings,
                self.directory,
                self.identity.peer_id,
                stage,
                lambda of_stage: stage_topic(name, of_stage),
                lambda: compute.visit_s if counters.microbatches >= MEASURED_AFTER else 0.0,
                lambda: rounds.chain.members,
            )
        neighbours.takes = self.verdicts.is_shown_to_train
        neighbours.more_to_say = lambda: adversary.says(
            Step(rounds.version), {**self.verdicts.said_of_self(), **(mover.said() if mover is not None else {})}
        )
        rounds.may_join = self.verdicts.may_train

        def lost(peer: PeerId) -> None:
            neighbours.drop(peer)
            rounds.peer_lost(peer)

        self.verdicts.on_lost = lost

        async def report(applied: Applied) -> None:
            self.reports.add(applied, rounds, work, source.losses if source is not None else {})

        rounds.on_applied.append(report)
        self._serves = stage
        await snapshots.save(await exact.run(Urgency.ROUND, replica.frozen_state), chain)
        rounds.start()
        rolling_back = RollingBack(rounds, self._host_id, partial(self.verdicts.begin, settings))
        rolling_back.serve(self.transport)
        server.serve(self.transport)
        StateDonor(rounds, self.verdicts.take).serve(self.transport)
        WitnessService(
            name, self.identity, chain.coordinator, chain.run_key, vote_log, is_of_stage, self.verdicts.may_train
        ).serve(self.transport)
        neighbours.serve()
        if source is not None:
            source.serve(self.transport)
        catch_up = CatchUp(rounds, self.transport, lambda: neighbours.of_stage(stage), joined.ticket, self._rng)
        with contextlib.suppress(TransientError):  # announced again soon
            await neighbours.announce_once()
        log.info(
            "stage %d at version %d, %s of %d members",
            stage,
            chain.version,
            "one" if rounds.is_member else "not one",
            len(chain.members),
        )
        draining = asyncio.Event()
        services = [
            asyncio.ensure_future(neighbours.run()),
            asyncio.ensure_future(catch_up.run()),
            asyncio.ensure_future(self.reports.send()),
            asyncio.ensure_future(rolling_back.run()),
        ]
        if source is not None:
            services.append(asyncio.ensure_future(source.run(draining)))
        verifying = Verifying(
            rounds=rounds,
            server=server,
            downstream=downstream,
            neighbours=neighbours,
            catch_up=catch_up,
            exhibits=exhibits,
            exchanges=exchanges,
            verdicts=self.verdicts,
            ticket=joined.ticket,
            draws=joined.draws,
            signed_run=joined.signed_run,
            host=self._host_id,
            reader=BatchReader(settings, files[0]) if files is not None else None,
        )
        rounds.on_applied += [self.tally.applied, server.applied]
        verifying.serve()
        if verifying.mending is not None:
            self._on_fault, self._on_pardon = verifying.mending.fault, catch_up.load_anew
        services += [asyncio.ensure_future(run()) for run in verifying.services]
        if mover is not None:
            services.append(asyncio.ensure_future(mover.run()))
        if attack is not None:
            services.append(asyncio.ensure_future(self._meddle(rounds, settings.model.num_stages)))
        self.live = Live(settings, rounds, counters, neighbours, server, source, verifying, str(model.device))
        leave_by = 0.0
        try:
            await self._until_over(stop, rounds, services, mover)
            leave_by = time.monotonic() + MOST_LEAVING_S
            if not self.finished.is_set():
                neighbours.leaving = server.draining = True
                draining.set()
                await self._drain(settings, rounds, server, source)
        finally:
            draining.set()
            for service in services:
                service.cancel()
            await asyncio.gather(*services, return_exceptions=True)
            if mover is not None and mover.target is not None:
                self._serves = mover.target
            neighbours.gone.set()
            await server.stop()
            await rounds.stop()
            with contextlib.suppress(TransientError, RemoteError):
                await self.host.call(GOODBYE, {}, timeout_s=2.0)
            for thread in (compute, exact):
                thread.close(timeout_s=max(0.5, leave_by - time.monotonic()))
        return mover.target if mover is not None else None

    async def _meddle(self, rounds: StageRounds, num_stages: int) -> None:
        """What an adversary does in the directory, for ever."""
        stage, lease_s = rounds.chain.stage, rounds.settings.deadlines.lease_s
        topics = [stage_topic(rounds.run_id, of) for of in range(max(0, stage - 1), min(stage + 2, num_stages))]
        while True:
            if rounds.adversary.acts_in(Step(rounds.version)):
                addresses = self.transport.addresses()
                place = Place(self.directory, self.identity, topics, addresses, lease_s, rounds.joining)
                with contextlib.suppress(TransientError):
                    await rounds.adversary.meddle(place)
            await asyncio.sleep(lease_s / MEDDLES_IN_A_LEASE)

    async def _until_over(
        self,
        stop: asyncio.Event,
        rounds: StageRounds,
        services: Sequence[asyncio.Future[None]],
        mover: Mover | None,
    ) -> None:
        """Until the run is finished, or this peer is told to stop or is to move; raises what broke."""
        waits = [asyncio.ensure_future(event.wait()) for event in (stop, self.finished)]
        over_since: float | None = None
        try:
            while not stop.is_set() and not self.finished.is_set():
                watched: list[asyncio.Future[Any]] = [*waits, *services, rounds.failure]
                await asyncio.wait(watched, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                if rounds.failure.done():
                    raise _broken(f"stage {rounds.chain.stage}", rounds.failure.exception())
                for service in services:
                    if service.done() and service.exception() is not None:
                        raise _broken("a service of this peer died", service.exception())
                if mover is not None and mover.target is not None:
                    return
                limit = self.volunteer.memory_bytes
                if limit is not None and used_bytes() > limit:
                    raise LocalError(
                        f"this peer holds {used_bytes() / GIB:.2f} GiB, more than --memory {limit / GIB:.2f}: it leaves"
                    )
                if rounds.is_over:
                    over_since = over_since or time.monotonic()
                    if time.monotonic() - over_since > LINGER_S and not await self._host_lives():
                        return
        finally:
            for wait in waits:
                wait.cancel()

    async def _host_lives(self) -> bool:
        try:
            await self.host.call("ping", {}, timeout_s=5.0)
        except (TransientError, RemoteError):
            return False
        return True

    async def _drain(
        self, settings: RunSettings, rounds: StageRounds, server: HopServer, source: Source | None
    ) -> None:
        """Finish what is in flight and see its gradients averaged, within the drain deadline."""
        give_up_at = time.monotonic() + min(MOST_DRAIN_S, settings.deadlines.drain_s)
        while time.monotonic() < give_up_at:
            if not (self.live is not None and self.live.in_flight) and not rounds.owes_work():
                return
            await asyncio.sleep(0.05)

    async def _on_ping(self, sender: PeerId, request: Message) -> Message:
        return Message({"now": time.time(), "stage": self._serves})

    async def _on_finish(self, sender: PeerId, request: Message) -> Message:
        if sender != self._host_id:
            raise RemoteError("standing", "only the host ends a run", sender)
        self.finished.set()
        return Message()


def _broken(what: str, error: BaseException | None) -> Exception:
    """What is raised where something of this peer's has ended by `error`."""
    return error if isinstance(error, OSError) else LocalError(f"{what}: {error!r}")


def _what(verdict: Ban | Quarantine) -> str:
    return "banned" if isinstance(verdict, Ban) else "quarantined"
