"""How the host notices that a stage has lost its quorum, and names who decides the round that it lost it in.

Only the run key can: that is the price for a stage that never forks. It waits until the stage has been silent for a
lease, asks every voter whether it votes, and if too few do lets those who answer go on. They promise to each other
first, so that whatever the lost ones may have decided with them stays decided; what they decided alone is given up, and
they with it.

Where the stage stands is what is certified, or what more than a third of its members say, by the weight of their votes:
no single one's word is taken for it, nor keeps the host from seeing where it stands.
"""

import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from bootstrap.round.asking import of_each
from swarm.core.canonical import Value
from swarm.core.fields import Fields
from swarm.core.ids import PeerId, StageIndex, Step
from swarm.core.round.basis import RoundBasis, round_name
from swarm.core.round.voting import MOST_VIEWS, Reconfiguration, electorate, quorum
from swarm.core.seats import seats, weight_of
from swarm.host_protocol import RECONFIGURE, STANDING
from swarm.identity.key import Identity
from swarm.network.transport import Message, Transport
from swarm.witness_service import VOTES, VoteLog

log = logging.getLogger(__name__)

PATIENCE = 3
"""After so many leases in which a round is under way those who answer go on, however many say that they vote."""
LOOKS = 3
"""In a lease: each asks every member twice, and most have a full line and a round under way."""
VIEWS_APART = 64
"""A reconfiguration begins this many views past the last, so that no leader of a lower one is in its way."""


class Place(NamedTuple):
    """Where a stage stands."""

    version: int
    basis: RoundBasis


class Standing(NamedTuple):
    """Where a member says that its stage stands, and its round."""

    place: Place
    view: int
    closing: bool


Follow: TypeAlias = Callable[[Sequence[tuple[int, PeerId]]], Awaitable[Place | None]]
"""Given which version each member says that it has: where the stage stands by the certified results that can be had."""


class LostQuorum:
    """Watches one stage."""

    def __init__(
        self,
        stage: StageIndex,
        transport: Transport,
        host: PeerId,
        run_key: Identity,
        lease_s: float,
        call_s: float,
        longest_round_s: float,
        own_log: VoteLog,
        follow: Follow,
    ) -> None:
        """`call_s`: who says nothing for so long is silent; on a full line small calls wait, too. `longest_round_s`: so
        long bytes may move in a round, of which nobody outside hears. `own_log`: the rounds that the host has voted in.
        """
        self._stage = stage
        self._transport = transport
        self._host = host
        self._run_key = run_key
        self._lease_s = lease_s
        self._call_s = call_s
        self._patience_s = PATIENCE * lease_s + longest_round_s
        self._own_log = own_log
        self._follow = follow
        self._quiet_since = time.monotonic()
        self._looked_at = -math.inf
        self._closing_since: tuple[int, float] | None = None
        """The version whose round was first found under way, and when: its work may have taken any time."""
        self._answers: dict[PeerId, tuple[float, bool]] = {}
        """In the present round: when each voter last answered, and whether it votes."""
        self._answered_in = b""
        """The version's name that the round starts from."""
        self._changed: Reconfiguration | None = None
        """The last: the round is given time under it."""

    def heard(self) -> None:
        """The stage has finished a round."""
        self._quiet_since = time.monotonic()

    async def mend(self, members: list[PeerId]) -> Reconfiguration | None:
        """If the stage is silent and too few of its voters answer, have the others go on."""
        now = time.monotonic()
        if now < max(self._quiet_since + self._lease_s, self._looked_at + self._lease_s / LOOKS):
            return None
        self._looked_at = now
        said = await of_each(members, self._standing)
        place = await self._place(said)
        there = {peer: standing for peer, standing in said.items() if standing.place == place}
        if place is None or not any(standing.closing for standing in there.values()):
            return None  # the step is still open: nobody needs votes
        version, basis = place
        if self._closing_since is None or self._closing_since[0] != version:
            self._closing_since = version, time.monotonic()
        closing_s = time.monotonic() - self._closing_since[1]
        view = _view_of(there, basis)
        weights = electorate(basis.work_of, basis.neighbours, self._host, basis.said.value)
        votes = self._lately(basis, await of_each(weights, lambda peer: self._votes(peer, place, said)))
        live, present = tuple(sorted(votes)), {*votes, *there} & {*basis.members}
        leaders = basis.leaders(Step(version))
        deciding, voting = tuple(weights), {peer for peer in live if votes[peer]}
        if self._changed is not None and self._changed.previous_name == basis.name:
            deciding, voting = self._changed.voters, {*live} & {*self._changed.voters}  # however they began
        enough = weight_of(weights, voting) >= quorum(weight_of(weights, deciding))
        if (enough and closing_s < self._patience_s) or not live or not present:
            return None
        # What was signed under an earlier one binds: by its views none is asked again.
        view = max(view, self._own_log.signed_under(round_name(self._stage, Step(version), basis.name)))
        if self._changed is not None and self._changed.previous_name == basis.name:
            view = max(view, self._changed.first_view)
        first_view = (view // VIEWS_APART + 1) * VIEWS_APART
        while leaders[first_view % len(leaders)] not in present:
            first_view += 1
        unsigned = Reconfiguration(self._stage, Step(version), basis.name, first_view, live)
        signed = unsigned.signed_by(self._run_key)
        log.warning(
            "stage %d: %d of %d voters vote; the %d who answer go on",
            self._stage,
            len(voting),
            len(deciding),
            len(live),
        )

        async def tell(peer: PeerId) -> None:
            told = Message({"reconfiguration": signed.to_value()})
            await self._transport.call(peer, RECONFIGURE, told, timeout_s=self._call_s, max_body_bytes=0)

        await of_each(sorted(present), tell)
        self.heard()
        self._closing_since = version, time.monotonic()
        self._changed = signed
        return signed

    def _lately(self, basis: RoundBasis, votes: Mapping[PeerId, bool]) -> dict[PeerId, bool]:
        """Who has answered within a lease, now or at an earlier look: on a line that a round keeps full one answer may
        be late, and its voter is not lost."""
        now = time.monotonic()
        if self._answered_in != basis.name:
            self._answered_in, self._answers = basis.name, {}
        self._answers.update((peer, (now, vote)) for peer, vote in votes.items())
        return {peer: vote for peer, (at, vote) in self._answers.items() if now - at <= self._lease_s}

    async def _place(self, said: Mapping[PeerId, Standing]) -> Place | None:
        """Where the stage stands, if that is known."""
        certified = await self._follow([(standing.place.version, peer) for peer, standing in said.items()])
        if certified is None:
            return None
        weights = seats(certified.basis.work_of)  # who says so must have weight by what is certified
        for place in sorted({standing.place for standing in said.values()}, key=lambda place: -place.version):
            agreeing = weight_of(weights, [peer for peer, standing in said.items() if standing.place == place])
            if place == certified or (place.version > certified.version and 3 * agreeing > sum(weights.values())):
                return place
        return None

    async def _standing(self, peer: PeerId) -> Standing:
        meant: dict[str, Value] = {"stage": self._stage}
        reply = await self._transport.call(peer, STANDING, Message(meant), timeout_s=self._call_s, max_body_bytes=0)
        fields = Fields("standing", reply.meta)
        version, view = fields.integer("version"), fields.integer("view", high=MOST_VIEWS)
        closing, basis = fields.boolean("closing"), RoundBasis.from_value(fields.message("basis"))
        fields.done()
        return Standing(Place(version, basis), view, closing)

    async def _votes(self, peer: PeerId, place: Place, said: Collection[PeerId]) -> bool:
        """Whether the voter votes in the round: not if it was started again in it, except under other voters. Raises
        RemoteError for a member that has gone to another stage."""
        name = round_name(self._stage, Step(place.version), place.basis.name)
        if peer == self._host:
            return not self._own_log.is_silent(name)
        if peer in place.basis.members and peer not in said:
            await self._standing(peer)
        asked = Message({"round": name})
        reply = await self._transport.call(peer, VOTES, asked, timeout_s=self._call_s, max_body_bytes=0)
        return Fields("votes", reply.meta).boolean("votes")


def _view_of(there: Mapping[PeerId, Standing], basis: RoundBasis) -> int:
    """The highest that less than a third of those who are there, by weight, can have made up."""
    weights = seats({peer: basis.work_of.get(peer, 0) for peer in there})
    above, total = 0, sum(weights.values())
    views = sorted(((there[peer].view, weight) for peer, weight in weights.items()), reverse=True)
    for view, weight in views:
        above += weight
        if 3 * above > total:
            return view
    raise AssertionError("somebody is there")
