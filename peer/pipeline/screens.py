"""What a peer knows of the others' standing, and its screens of what they send.

The run key's verdicts are everyone's; suspicions are this peer's own, and make it audit the suspicious more often.
"""

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from kernels.norms import tree_norm
from swarm.averaging.encoded import Encoded, VectorCodec
from swarm.core.ids import PeerId, StageIndex, Version
from swarm.core.kept import keep_newest
from verification.audit.standing import Event, StandingTable, Suspicion
from verification.pipeline.screens import NormScreen, ScreenKind

log = logging.getLogger(__name__)

MOST_SENDERS = 128
SCREENED_PART = 8
"""Parts whose index is a multiple of this are screened: a vector that is too long is so nearly everywhere."""


class KnownStanding:
    """The table of standings as this peer has it. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.table = StandingTable(has_probation=False)

    def begin(self, founders: Iterable[PeerId], *, has_probation: bool) -> None:
        """The run's geneses are known, of the stages that matter here."""
        with self._lock:
            self.table = replace(self.table, founders=self.table.founders | set(founders), has_probation=has_probation)

    def is_out(self, peer: PeerId) -> bool:
        """Whether nothing at all is taken from the peer."""
        return self.table.is_out(peer)

    def may_train(self, peer: PeerId) -> bool:
        """Whether anything is taken from the peer but its replays."""
        return self.table.may_train(peer)

    def take(self, event: Event) -> None:
        """A verdict whose signature was checked, or a suspicion of this peer's own."""
        with self._lock:
            self.table = self.table.after(event, event.version)

    def suspect(self, peer: PeerId, version: Version) -> None:
        """Something of the peer's at that version of its stage asks for a closer look."""
        self.take(Suspicion(peer, version))

    def budget_factor(self, peer: PeerId, stage: StageIndex, version: Version) -> float:
        return self.table.budget_factor(peer, stage, version)


class Screens:
    """Screens of the norms of all that this peer receives."""

    def __init__(self, standing: KnownStanding, version: Callable[[], Version]) -> None:
        """`version` is the stage's now."""
        self._standing = standing
        self._version = version
        self._screens: dict[tuple[ScreenKind, int], NormScreen] = {}
        self._last: dict[tuple[ScreenKind, int], dict[PeerId, float]] = {}
        """The last norm that each sender sent, latest senders last."""
        self.tripped: Counter[ScreenKind] = Counter()
        self._values = np.empty(0, dtype=np.float32)

    def check(self, kind: ScreenKind, sender: PeerId, norm: float, *, part: int = 0) -> None:
        """A norm that came from `sender`. Parts of a contribution have an average each. One thread for each kind.

        Early in a run norms grow tenfold in seconds, at all peers: what is far from the average is suspicious only if
        it is also far from what the others sent last.
        """
        screen = self._screens.get((kind, part))
        if screen is None:
            screen = self._screens[kind, part] = NormScreen.of_kind(kind)
        last = self._last.setdefault((kind, part), {})
        last.pop(sender, None)
        others = sorted(last.values())
        if math.isfinite(norm):
            last[sender] = norm
        keep_newest(last, MOST_SENDERS)
        screened = screen.check(norm)
        if not screened.ok and math.isfinite(norm) and (not others or screen.is_near(norm, others[len(others) // 2])):
            return
        if not screened.ok:
            self.tripped[kind] += 1
            log.warning("%s from %s: %s", kind, sender, screened.reason)
            self._standing.suspect(sender, self._version())

    def check_part(self, sender: PeerId, part: int, codec: VectorCodec, body: Encoded, *, num_values: int) -> None:
        """(exact) A part of a contribution, whose encoding was found valid: one in eight is decoded for its norm."""
        if part % SCREENED_PART:
            return
        if self._values.size < num_values:
            self._values = np.empty(num_values, dtype=np.float32)
        values = self._values[:num_values]
        codec.decode(body, values)
        self.check("contribution_norm", sender, tree_norm(values), part=part)
