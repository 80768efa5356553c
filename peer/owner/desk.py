"""The daemon keeps to its owner's wishes: it watches the machine, pauses, and answers commands."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from peer.owner.core_share import ComputeThreads, SharedThreads
from peer.owner.limits import VolunteerSettings, gpu_used_bytes, used_bytes
from peer.owner.log_lines import LogLines
from peer.owner.machine import Machine
from peer.owner.permit import Permit
from peer.owner.status import Facts, limits_message, status_message
from peer.owner.usage import Usage
from peer.program.state_folder import StateFolder
from swarm.core.ids import PeerId
from swarm.core.owner.guest import Conduct, Decision, Guest, Reading
from swarm.core.owner.limits import OwnerLimits, limit_named
from swarm.core.plan import HEADERS
from swarm.network.loop import happened
from swarm.network.transport import Transport
from swarm.proto import daemon_pb2 as pb

if TYPE_CHECKING:  # torch takes seconds to import, and the daemon answers its owner before that
    from peer.directory.reachability import Reachability
    from peer.program.daemon import PeerDaemon

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
SAVE_EVERY_S = 30.0
RATE_S = 5.0
"""Megabits a second are told over about this long."""


class OwnerDesk:
    """`swarm.network.services.daemon_service.Desk` of a daemon, and the watch over its limits."""

    def __init__(
        self,
        volunteer: VolunteerSettings,
        folder: StateFolder,
        limits: OwnerLimits,
        peer_id: PeerId,
        host: PeerId,
        log_lines: LogLines,
        stop: asyncio.Event,
    ) -> None:
        """`limits` are those in force: the saved ones, changed by this start's command line."""
        self._volunteer = volunteer
        self._folder = folder
        self._limits = limits
        self._saved = folder.load_limits()
        self._peer_id = peer_id
        self._host = host
        self._log_lines = log_lines
        self._stop = stop
        self._guest = Guest(limits)
        self._machine = Machine(folder.path, gpu=volunteer.gpu)
        self._usage = Usage.load(folder.usage)
        self._asked_to_pause = False
        self._look_now = asyncio.Event()
        self._started = time.monotonic()
        self._saved_at = self._started
        self._transport: Transport | None = None
        self._daemon: PeerDaemon | None = None
        self._reachability: Reachability | None = None
        self._traffic_before = self._traffic_all = (0, 0)
        self._rates_mbit = (0.0, 0.0)
        self._rates_at = self._started
        self._reading = Reading(minute_of_day=0)
        self.permit = Permit()
        self.threads = (
            SharedThreads(volunteer.threads, now=self._started)
            if limits.threads is None
            else ComputeThreads(volunteer.threads)
        )
        """How many the peer computes with."""
        self.decision = Decision(Conduct.WORK)
        self.decided = asyncio.Event()
        """Set at the next change of conduct, and replaced."""
        self.phase, self.waits_for = "starting", ""
        """Until the peer has joined: starting, looking, joining; and for what."""

    @property
    def volunteer(self) -> VolunteerSettings:
        """What a peer that joins now is to keep to."""
        return replace(self._volunteer, upload_mbit=self._limits.upload_mbit, download_mbit=self._limits.download_mbit)

    def attach(self, transport: Transport) -> None:
        """Its traffic counts from now on."""
        self._transport, self._traffic_before = transport, (0, 0)

    def joins(self, daemon: "PeerDaemon", reachability: "Reachability") -> None:
        """The peer that lives now."""
        self._daemon, self._reachability = daemon, reachability

    @property
    def relay_key(self) -> Path:
        """The file of the identity under which a relay of this daemon is known."""
        return self._folder.relay_key

    def relay_left_bytes(self) -> int:
        """What may still be carried for others this month. None where the rate is limited: a relay's cannot be."""
        limits = self._limits
        if limits.relay_gb is None or limits.upload_mbit is not None or limits.download_mbit is not None:
            return 0
        return max(0, int(limits.relay_gb * 1e9) - self._usage.relayed_bytes)

    def relayed(self, num_bytes: int) -> None:
        """Carried for others: it came in, and went out."""
        self._usage.add(
            traffic_bytes=round(2 * num_bytes * HEADERS), written_bytes=0, today=date.today(), relayed_bytes=num_bytes
        )

    def detach(self) -> None:
        """The transport is about to close, and its peer is gone."""
        self._count_traffic()
        self._transport = self._daemon = self._reachability = None

    async def watch(self) -> None:
        """Look at the machine and decide, for ever."""
        try:
            while True:
                await self.look()
                await happened(self._look_now, within_s=LOOK_EVERY_S)
                self._look_now.clear()
        finally:
            self._count_traffic()
            self._save_usage()

    async def look(self) -> Decision:
        """Look once, and do what the guest decides."""
        self._count_traffic()
        self._reading = await self._machine.read(
            month_bytes=self._usage.month_bytes,
            written_today_bytes=self._usage.written_today_bytes,
            asked_to_pause=self._asked_to_pause,
            watch_gpu=self._limits.busy_gpu is not None,
        )
        now = time.monotonic()
        self.threads.look(self._machine, now=now)
        decision = self._guest.decide(self._reading, now=now)
        if decision.conduct is not self.decision.conduct:
            log.info("%s%s", decision.conduct.value, decision.reason and f": {decision.reason}")
        turned = decision.conduct is not self.decision.conduct
        self.decision = decision
        if decision.conduct is Conduct.WORK:
            self.permit.give()
        else:
            self.permit.withhold(decision.reason)
        if turned:
            self.decided.set()
            self.decided = asyncio.Event()
        if now - self._saved_at >= SAVE_EVERY_S:
            self._save_usage()
        return decision

    def _count_traffic(self) -> None:
        counts = self._daemon.limited if self._daemon is not None else self._transport
        sent, received = counts.traffic() if counts is not None else self._traffic_before
        before = self._traffic_before
        self._traffic_before = (sent, received)
        new = (max(0, sent - before[0]), max(0, received - before[1]))
        self._traffic_all = (self._traffic_all[0] + new[0], self._traffic_all[1] + new[1])
        now = time.monotonic()
        elapsed_s, self._rates_at = now - self._rates_at, now
        if elapsed_s > 0:
            weight = min(1.0, elapsed_s / RATE_S)
            up, down = ((1 - weight) * old + weight * size * HEADERS * 8e-6 / elapsed_s
                        for old, size in zip(self._rates_mbit, new, strict=True))  # fmt: skip
            self._rates_mbit = (up, down)
        # What a message adds on the line counts too: it is what the owner's contract counts.
        self._usage.add(
            traffic_bytes=round(sum(new) * HEADERS),
            written_bytes=self._machine.written_since_last(),
            today=date.today(),
        )

    def _save_usage(self) -> None:
        self._saved_at = time.monotonic()
        with contextlib.suppress(OSError):  # a full disk must not end the peer; it is tried again
            self._usage.save(self._folder.usage)

    # -- commands -----------------------------------------------------------------------------------------

    def status(self) -> pb.Status:
        machine = self._machine
        return status_message(
            Facts(
                peer_id=self._peer_id,
                host=self._host,
                uptime_s=time.monotonic() - self._started,
                is_leaving=self._stop.is_set(),
                phase=self.phase,
                waits_for=self.waits_for,
                decision=self.decision,
                limits=self.limits(),
                daemon=self._daemon,
                reachability=self._reachability,
                addresses=tuple(self._transport.addresses()) if self._transport is not None else (),
                ways=self._transport.ways() if self._transport is not None else {},
                traffic_bytes=self._traffic_all,
                rates_mbit=self._rates_mbit,
                month_bytes=self._usage.month_bytes,
                written_today_bytes=self._usage.written_today_bytes,
                memory_bytes=used_bytes(),
                disk_bytes=self._reading.disk_bytes,
                own_cores=machine.own_cores,
            )
        )

    def pause(self) -> None:
        self._asked_to_pause = True
        self.permit.withhold("you asked it to pause")
        self._look_now.set()

    def resume(self) -> None:
        self._asked_to_pause = False
        self._look_now.set()

    def leave(self) -> None:
        log.info("the owner asked this peer to leave")
        self._stop.set()

    def limits(self) -> pb.Limits:
        gpu = self._volunteer.gpu
        return limits_message(
            self._limits,
            self._reading,
            memory_bytes=used_bytes(),
            gpu_bytes=None if gpu is None else gpu_used_bytes(gpu),
            own_cores=self._machine.own_cores,
            month_bytes=self._usage.month_bytes,
            written_today_bytes=self._usage.written_today_bytes,
            relayed_bytes=self._usage.relayed_bytes,
            rates_mbit=self._rates_mbit,
        )

    def set_limit(self, name: str, value: str) -> None:
        limits, saved = self._limits.with_value(name, value), self._saved.with_value(name, value)
        self._folder.save_limits(saved)
        self._saved = saved
        if limit_named(name).at_next_start:
            log.info("limit %s = %s from the next start on", name, value)
            return
        log.info("limit %s = %s", name, value)
        self._limits = self._guest.limits = limits
        if self._daemon is not None:
            self._daemon.limited.set_rates(upload_mbit=limits.upload_mbit, download_mbit=limits.download_mbit)
        self._look_now.set()

    def log_lines(self, last: int, *, follow: bool) -> AsyncIterator[tuple[str, int]]:
        return self._log_lines.lines(last, follow=follow)
