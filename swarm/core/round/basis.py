"""What a round starts from, in a few values that the version's name binds.

A voter outside the stage need not follow its chain: whoever asks for its vote shows the basis, and votes count only
under the version name that the basis hashes to.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, TypeAlias

from swarm.core.audit.chance import HostWord, Link
from swarm.core.canonical import digest
from swarm.core.cohorts import MAX_MEMBERS
from swarm.core.errors import RemoteError
from swarm.core.forms import Digest, Integer
from swarm.core.ids import PeerId, StageIndex, Step
from swarm.core.kept import once
from swarm.core.layout import AtMost
from swarm.core.record import Row
from swarm.core.seats import in_turn, seats

MAX_NEIGHBOURS = 16
WorkOfEach: TypeAlias = Annotated[tuple[Annotated[int, Integer(high=1 << 56)], ...], AtMost(MAX_MEMBERS)]


@dataclass(frozen=True)
class RoundBasis(Row, kind="basis"):
    """What makes a version of a stage, as far as the next round's votes depend on it."""

    previous_name: Digest
    root: Digest
    """Of the result that made the version; digest of the genesis for a stage's first."""
    previous_members: Annotated[tuple[PeerId, ...], AtMost(MAX_MEMBERS)]
    previous_work: WorkOfEach
    """Of each of them, in the versions before that one."""
    members: Annotated[tuple[PeerId, ...], AtMost(MAX_MEMBERS)]
    work: WorkOfEach
    """Tokens that each member did in the last versions (`swarm.core.state.recent_work`): by them votes weigh."""
    neighbours: Annotated[tuple[PeerId, ...], AtMost(MAX_NEIGHBOURS)]
    links: Annotated[tuple[Link | None, ...], AtMost(MAX_MEMBERS)]
    """What each of the members has revealed of its hash chain; None: nothing that is certified."""
    said: HostWord
    """The host's last word that is certified."""
    previous_late: Annotated[tuple[PeerId, ...], AtMost(MAX_MEMBERS)] = ()
    """Of the previous members, as `late`."""
    late: Annotated[tuple[PeerId, ...], AtMost(MAX_MEMBERS)] = ()
    """Members whose parts did not come when they were last awaited, by the words of a quorum of reducers, or come much
    slower than most others', by those of members who weigh more than half of all others: they lead behind all others,
    and reduce nothing while there are others."""

    @once
    def name(self) -> bytes:
        """Name of the version."""
        return digest("version-name", self.to_value())

    @once
    def work_of(self) -> dict[PeerId, int]:
        """Tokens that each member did in the last versions."""
        return dict(zip(self.members, self.work, strict=True))

    @once
    def link_of(self) -> dict[PeerId, Link]:
        """Of the members of whose chains something is certified."""
        held = zip(self.members, self.links, strict=True)
        return {peer: link for peer, link in held if link is not None}

    def leaders(self, step: Step) -> tuple[PeerId, ...]:
        """Who leads the round in which view: in turn, of the members of the certificate before the version's own, and
        at last who is late by the version's own."""
        before = dict(zip(self.previous_members, self.previous_work, strict=True))
        first = leaders_of(before, step, late=self.previous_late)
        order = first + tuple(peer for peer in self.members if peer not in first)
        return tuple(sorted(order, key=lambda peer: peer in self.late))

    def _check_fields(self) -> None:
        if (len(self.members), len(self.previous_members)) != (len(self.work), len(self.previous_work)):
            raise RemoteError("malformed", "basis does not say what each member has done")
        if len(self.links) != len(self.members):
            raise RemoteError("malformed", f"basis of {len(self.members)} members and {len(self.links)} links")
        for late, members in ((self.previous_late, self.previous_members), (self.late, self.members)):
            if late != tuple(peer for peer in members if peer in late):
                raise RemoteError("malformed", "basis calls others late than some of its members, in order")
        for listed in (self.members, self.previous_members):
            if not listed or any(one >= other for one, other in pairwise(listed)):
                raise RemoteError("malformed", "basis without members, or not in order")


def round_name(stage: StageIndex, step: Step, previous_name: bytes) -> bytes:
    """Of the round of a stage's step that starts from the version of that name, which says neither: whoever shows a
    version's true basis may say any step to it."""
    return digest("round-name", [stage, step, previous_name])


def leaders_of(work: Mapping[PeerId, int], step: Step, *, late: Collection[PeerId] = ()) -> tuple[PeerId, ...]:
    """In which order members lead: those who did any work take turns by it; then who did none; at last who is `late`,
    for who leads sends its roster to all others."""
    in_time = {peer: tokens for peer, tokens in work.items() if peer not in late}
    first = in_turn(seats(in_time or work), step)
    rest = [peer for peer in sorted(work) if peer not in first]
    return first + tuple(sorted(rest, key=lambda peer: peer in late))
