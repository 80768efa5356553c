"""The threads that a daemon computes with: chosen each second, taken up between two jobs."""

import logging
from collections.abc import Callable

from kernels.threads import Threads
from peer.machine.cores import Seat, usable_cores
from peer.machine.load import Machine
from swarm.core.owner.core_share import Cores, CoreShare

log = logging.getLogger(__name__)


class ComputeThreads:
    """How many threads a peer computes with now. Changed on the event loop, read on the threads that compute."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.exact = Threads(number)
        """As many for the exact work, which shares these cores with torch's: it comes in bursts, when a round ends."""

    def choose(self, number: int) -> None:
        """So many from now on."""
        self.number = self.exact.count = number

    def follower(self) -> Callable[[], None]:
        """To be called on the thread that computes, before each job: torch has so many threads there from then on.

        Their number may change the last bits of a gradient, as another machine's instructions do.
        """
        taken = 0

        def take_up() -> None:
            nonlocal taken
            number = self.number
            if number != taken:
                import torch  # takes seconds to import; the owner is answered before that

                torch.set_num_threads(number)
                taken = number

        return take_up


def shared_out(number: int, num_peers: int) -> list[int]:
    """So many threads among peers, as evenly as can be; one at least for each."""
    each, more = divmod(number, num_peers)
    return [max(1, each + (place < more)) for place in range(num_peers)]


class DaemonThreads:
    """A daemon's threads, shared out among its peers."""

    def __init__(self, number: int, num_peers: int = 1) -> None:
        """`number`: as the owner has given it."""
        self.number = number
        self.of = [ComputeThreads(1) for _ in range(num_peers)]
        """By peer."""
        self._deal()

    def look(self, machine: Machine, *, now: float) -> None:
        """Choose again; a number that the owner has given stays."""

    def without(self, threads: ComputeThreads) -> None:
        """Their peer has gone for good: the others have what it had."""
        self.of.remove(threads)
        self._deal()

    def _deal(self) -> None:
        for threads, number in zip(self.of, shared_out(self.number, len(self.of)) if self.of else (), strict=True):
            threads.choose(number)


class SharedThreads(DaemonThreads):
    """As many as are this daemon's share of the machine's free cores, `most` at most."""

    def __init__(self, most: int, num_peers: int = 1, *, now: float) -> None:
        self._usable = usable_cores()
        self._seat = Seat(self._usable)
        self._share = CoreShare(most)
        super().__init__(1, num_peers)
        self._choose(0.0, 0.0, now)

    def look(self, machine: Machine, *, now: float) -> None:
        """Choose again."""
        self._choose(machine.foreground_cores, machine.others_cores, now)

    def _choose(self, foreground_cores: float, others_cores: float, now: float) -> None:
        usable = len(self._usable)
        seen = self._seat.look()
        if seen is None:  # other daemons cannot be told from others
            cores = Cores(usable=usable, others_use=others_cores)
        else:
            cores = Cores(
                usable=usable,
                others_use=foreground_cores,
                claimed=seen.claimed,
                daemons=seen.daemons,
                rank=seen.rank,
            )
        chosen = self._share.decide(cores, now=now)
        if chosen.number != self.number:
            log.info("computing with %d threads: %s", chosen.number, chosen.reason)
            self.number = chosen.number
            self._deal()
