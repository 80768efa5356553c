"""What members committed to before juries: each charge is to be followed by its case here, or it lapses.

A charge costs its maker nothing but this: whoever brings none of the evidence that it names has said what it could not
show, and so has every juror who convicted by it. Time counts while this host anchors what the stage's members state:
who could not reach it otherwise is not to blame.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from swarm.core.forms import Digest
from swarm.core.ids import PeerId, StageIndex, Step
from swarm.core.kept import keep_newest
from swarm.core.record import Record
from swarm.core.round.contribution import Charge, Result

VERSIONS_TO_BRING = 16
"""A charge lapses with the first anchor of its stage so many versions after it; a peer holds what proves it as long."""
ANCHORS_TO_BRING = 2
"""But not before so many."""
MOST_ANCHORS = 12
"""After so many also if its case keeps coming in, or could not be taken for lack of room."""
MOST_OPEN = 4096


@dataclass(frozen=True)
class OpenCharge(Record):
    """One that is certified, and whose case is not judged yet."""

    stage: StageIndex
    step: Step
    accuser: PeerId
    accused: PeerId
    digest: Digest

    @property
    def charge(self) -> Charge:
        """As the accuser committed to it."""
        return Charge(self.accused, self.digest)


@dataclass
class _Waiting:
    anchors: int = 0
    """Made of the stage since."""
    comes: bool = False
    """Whether something of the case came since the last, or could not be taken."""


class OpenCharges:
    """Those of all stages."""

    def __init__(self, snapshot_every: int) -> None:
        """`snapshot_every`: versions from one anchor to the next, where this host misses none."""
        self._anchors_apart = snapshot_every
        self._open: OrderedDict[OpenCharge, _Waiting] = OrderedDict()
        self._anchored_at: dict[StageIndex, int] = {}
        self._over: OrderedDict[Charge, bool] = OrderedDict()
        """Those that wait for nothing more, and whether they were true."""

    def certified(self, result: Result) -> list[OpenCharge]:
        """The charges of a round that is over, but for those that are judged already: a case may be here before any
        round bears its charge. None are counted while this host misses anchors."""
        roster = result.roster
        if int(roster.step) > self._anchored_at.get(roster.stage, -1) + 2 * self._anchors_apart:
            return []
        made = [
            OpenCharge(roster.stage, roster.step, made.peer_id, charge.accused, charge.digest)
            for made in roster.committed
            for charge in made.charges
            if not self.is_over(charge)
        ]
        for one in made:
            self.open(one)
        return made

    def open(self, charge: OpenCharge) -> None:
        """It is waited for."""
        self._open[charge] = _Waiting()
        keep_newest(self._open, MOST_OPEN)

    def comes(self, accused: PeerId) -> None:
        """A piece of evidence against the peer came, or could not be taken."""
        for charge, waiting in self._open.items():
            waiting.comes = waiting.comes or charge.accused == accused

    def judged(self, accused: PeerId, charges: Iterable[Charge], *, is_true: bool) -> list[Charge]:
        """What the peer is accused of is judged here, by what these are about: what is over."""
        done = dict.fromkeys(charges)
        if is_true:  # and with them all else that the peer is charged with
            done |= dict.fromkeys(one.charge for one in self._open if one.accused == accused)
        self.over(done, is_true=is_true)
        return [*done]

    def over(self, charges: Iterable[Charge], *, is_true: bool) -> None:
        """They wait for nothing more, here and in whatever round bears them yet."""
        done = dict.fromkeys(charges, is_true)
        for one in [one for one in self._open if one.charge in done]:
            del self._open[one]
        self._over.update(done)
        keep_newest(self._over, MOST_OPEN)

    def is_over(self, charge: Charge) -> bool:
        """Whether it has lapsed or is judged: what jurors find comes too late."""
        return charge in self._over

    def was_untrue(self, charge: Charge) -> bool:
        """Whether it has lapsed, or the case that came showed nothing."""
        return not self._over.get(charge, True)

    def was_anchored(self, stage: StageIndex, version: int) -> None:
        """By an earlier process of this host."""
        self._counted(stage, version)

    def _counted(self, stage: StageIndex, version: int) -> list[OpenCharge]:
        """Those that count the stage's next anchor; none where some before it are missing."""
        before, self._anchored_at[stage] = self._anchored_at.get(stage), version
        waiting = [one for one in self._open if one.stage == stage and int(one.step) < version]
        if before is not None and version <= before + 2 * self._anchors_apart:
            return waiting
        for one in waiting:
            del self._open[one]
        return []

    def anchored(self, stage: StageIndex, version: int) -> list[OpenCharge]:
        """The stage has an anchor more: those that lapse with it."""
        lapsed = []
        for one in self._counted(stage, version):
            held = self._open[one]
            held.anchors += 1
            is_late = held.anchors >= ANCHORS_TO_BRING and version >= int(one.step) + VERSIONS_TO_BRING
            if held.anchors >= MOST_ANCHORS or (is_late and not held.comes):
                del self._open[one]
                lapsed.append(one)
            held.comes = False
        self.over([one.charge for one in lapsed], is_true=False)
        return lapsed
