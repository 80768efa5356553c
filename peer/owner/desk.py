"""The daemon keeps to its owner's wishes: it watches the machine, pauses, and answers commands."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import date
from pathlib import Path

from peer.machine.core_share import DaemonThreads
from peer.machine.load import Machine
from peer.owner.limits import gpu_used_bytes, used_bytes
from peer.owner.log_lines import LogLines
from peer.owner.own_peer import OwnPeer
from peer.owner.status import Facts, limits_message, status_message
from peer.owner.usage import Usage
from peer.program.shared import Shared
from peer.program.state_folder import StateFolder
from swarm.core.ids import PeerId
from swarm.core.owner.guest import GIB, Conduct, Decision, Guest, Reading
from swarm.core.owner.limits import OwnerLimits, limit_named
from swarm.core.plan import HEADERS
from swarm.network.loop import happened
from swarm.proto import daemon_pb2 as pb

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
SAVE_EVERY_S = 30.0
RATE_S = 5.0
"""Megabits a second are told over about this long."""


class OwnerDesk:
    """`swarm.network.services.daemon_service.Desk` of a daemon, and the watch over its limits."""

    def __init__(
        self,
        peers: Sequence[OwnPeer],
        threads: DaemonThreads,
        folder: StateFolder,
        limits: OwnerLimits,
        host: PeerId,
        log_lines: LogLines,
        stop: asyncio.Event,
        end_now: Callable[[], object],
    ) -> None:
        """`threads`: those that are dealt out among the peers. `limits` are those in force: the saved ones, changed by
        this start's command line. `stop` asks the daemon to end; `end_now` does it, and nothing is finished first."""
        self.peers = tuple(peers)
        self._threads = threads
        self._folder = folder
        self._limits = limits
        self._saved = folder.load_limits()
        self._host = host
        self._log_lines = log_lines
        self._stop = stop
        self._end_now = end_now
        self._guest = Guest(limits)
        self._gpus = [gpu for peer in peers if (gpu := peer.volunteer.gpu) is not None]
        self._machine = Machine(folder.path, gpus=self._gpus)
        self._usage = Usage.load(folder.usage)
        self._asked_to_pause = False
        self._look_now = asyncio.Event()
        self._started = time.monotonic()
        self._saved_at = self._started
        self._traffic_all = (0, 0)
        self._rates_mbit = (0.0, 0.0)
        self._rates_at = self._started
        self._reading = Reading(minute_of_day=0)
        self.shared = Shared.of(peers[0].volunteer, [peer.identity.peer_id for peer in peers])
        """What the peers have together."""
        self.decision = Decision(Conduct.WORK)
        self.decided = asyncio.Event()
        """Set at the next change of conduct, and replaced."""

    def ended(self, peer: OwnPeer, why: str) -> None:
        """The peer has gone for good; what it had of the owner's means is for the others."""
        peer.end(why)
        self.shared.without_one()
        self._threads.without(peer.threads)

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
        self._threads.look(self._machine, now=now)
        decision = self._guest.decide(self._reading, now=now)
        if decision.conduct is not self.decision.conduct:
            log.info("%s%s", decision.conduct.value, decision.reason and f": {decision.reason}")
        turned = decision.conduct is not self.decision.conduct
        self.decision = decision
        if decision.conduct is Conduct.WORK:
            self.shared.permit.give()
        else:
            self.shared.permit.withhold(decision.reason)
        if turned:
            self.decided.set()
            self.decided = asyncio.Event()
        if now - self._saved_at >= SAVE_EVERY_S:
            self._save_usage()
        return decision

    def _count_traffic(self) -> None:
        news = [peer.new_traffic() for peer in self.peers]
        new = (sum(sent for sent, _ in news), sum(received for _, received in news))
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
        return status_message(
            Facts(
                peers=self.peers,
                host=self._host,
                uptime_s=time.monotonic() - self._started,
                is_leaving=self._stop.is_set(),
                decision=self.decision,
                limits=self.limits(),
                traffic_bytes=self._traffic_all,
                rates_mbit=self._rates_mbit,
                month_bytes=self._usage.month_bytes,
                written_today_bytes=self._usage.written_today_bytes,
                memory_bytes=used_bytes(),
                disk_bytes=self._reading.disk_bytes,
                own_cores=self._machine.own_cores,
            )
        )

    def pause(self) -> None:
        self._asked_to_pause = True
        self.shared.permit.withhold("you asked it to pause")
        self._look_now.set()

    def resume(self) -> None:
        self._asked_to_pause = False
        self._look_now.set()

    def leave(self, *, now: bool) -> None:
        log.info("the owner asked this daemon to leave%s", " at once" if now else "")
        self._stop.set()
        if now:
            self._end_now()

    def limits(self) -> pb.Limits:
        return limits_message(
            self._limits,
            self._reading,
            memory_bytes=used_bytes(),
            gpu_bytes=[gpu_used_bytes(gpu) for gpu in self._gpus],
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
        before = self._limits.upload_mbit, self._limits.download_mbit
        self._limits = self._guest.limits = limits
        if (limits.upload_mbit, limits.download_mbit) != before:
            self.shared.line.set_rates(upload_mbit=limits.upload_mbit, download_mbit=limits.download_mbit)
        self.shared.room.disk_bytes = None if limits.disk_gib is None else int(limits.disk_gib * GIB)
        self._look_now.set()

    def log_lines(self, last: int, *, follow: bool) -> AsyncIterator[tuple[str, int]]:
        return self._log_lines.lines(last, follow=follow)
