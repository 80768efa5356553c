"""What an averaging round starts from, and its messages held against that.

Every check raises RemoteError naming who is to blame and changes nothing.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from swarm.core.audit.chance import HostWord, Link
from swarm.core.audit.ticket import Verify
from swarm.core.cohorts import MAX_MEMBERS, num_cohorts
from swarm.core.errors import RemoteError
from swarm.core.ids import PeerId, StageIndex, Step
from swarm.core.kept import once
from swarm.core.round.basis import RoundBasis, round_name
from swarm.core.round.contribution import MAX_WORK, Contribution, Lack, LeftOut, ReducedPart, Result, Roster
from swarm.core.round.voting import Election, Proof, Reconfiguration, electorate

MOST_DELAY = 1
"""Versions that a microbatch may be behind in any run (`averaging.delay`)."""
MOST_VIEWS_AHEAD = 1 << 16
"""So far ahead of where a voter outside signed last it promises a view, and half as far others' word brings a member
from where it came by itself: none that is cut off comes as far, and a liar in a stage of two uses up no views."""
MOST_OWN_TURNS = 3
"""So many turns ahead a leader is followed to a later view of its own, in which it leaves out who shows no papers, or
has who came late."""


class WorkLimits(NamedTuple):
    """What one contribution to a round may list."""

    max_tokens: int = 1 << 32
    """Target tokens a microbatch can have: nobody's weight grows by a number it states."""
    max_work: int = MAX_WORK
    """Microbatches that one contribution may list (`result_size`): so a roster of all that members commit to
    fits into a message, whatever they commit to."""
    work_multiple: int = 1
    """Of so many microbatches one contribution lists a multiple: of what no window is made of none can be replayed."""
    delay: int = MOST_DELAY
    """Versions that a microbatch may be behind the step."""


ANY_WORK = WorkLimits()
"""Of a round of which nothing is known but its basis."""


class EquivocationError(RemoteError):
    """A member signed two contributions to one round, of which it commits to one."""

    def __init__(self, one: Contribution, other: Contribution) -> None:
        super().__init__("equivocation", f"two contributions of {one.peer_id} in step {one.step}", one.peer_id)
        self.one = one
        self.other = other


@dataclass(frozen=True, kw_only=True)
class RoundFacts:
    """What a round starts from: the same at every member."""

    run_id: str
    stage: StageIndex
    step: Step
    members: tuple[PeerId, ...]
    """Sorted; those of the last certificate."""
    leaders: tuple[PeerId, ...]
    """Peers in the order in which they lead: view k is led by number k modulo their count. They take turns by the
    certificate before the last, so that it is known while the last round still runs; whoever left since is
    passed over, whoever joined or is late since comes last."""
    weights: Mapping[PeerId, int]
    """Of each vote, in the order of ids: of those who certify the round: members, drawn ones where they are many, and
    others."""
    run_key: PeerId
    """It may name other voters for a round that has lost its quorum."""
    previous_name: bytes
    links: Mapping[PeerId, Link]
    """What members have revealed of their hash chains, as far as it is certified."""
    said: HostWord
    """The host's last word that is certified."""
    num_parts: int
    phase_s: float
    """What the deadlines of the phases are multiples of."""
    limits: WorkLimits = ANY_WORK
    amendments: int = 0
    """Of the run, in force: tickets of before are none any more."""
    late: tuple[PeerId, ...] = ()
    """Members whose lines are too slow (`RoundBasis.late`)."""

    @classmethod
    def of_basis(
        cls,
        basis: RoundBasis,
        *,
        run_id: str,
        stage: StageIndex,
        step: Step,
        host: PeerId,
        run_key: PeerId,
        num_parts: int,
        phase_s: float,
        limits: WorkLimits = ANY_WORK,
        amendments: int = 0,
    ) -> "RoundFacts":
        """Facts of the round that starts from the version with this basis."""
        return cls(
            run_id=run_id,
            stage=stage,
            step=step,
            members=basis.members,
            leaders=basis.leaders(step),
            weights=electorate(basis.work_of, basis.neighbours, host, basis.said.value),
            run_key=run_key,
            previous_name=basis.name,
            links=basis.link_of,
            said=basis.said,
            num_parts=num_parts,
            phase_s=phase_s,
            limits=limits,
            amendments=amendments,
            late=basis.late,
        )

    @once
    def name(self) -> bytes:
        """Of the round."""
        return round_name(self.stage, self.step, self.previous_name)

    @property
    def voters(self) -> tuple[PeerId, ...]:
        """Sorted: who has a vote."""
        return self.election.voters

    @once
    def first_view(self) -> int:
        """The first view that a member leads."""
        return next(view for view in range(len(self.leaders)) if self.leaders[view] in self.members)

    @once
    def election(self) -> Election:
        return Election(
            self.run_id, self.stage, self.step, self.previous_name, self.first_view, self.weights, self.run_key
        )

    def leader_of(self, view: int) -> PeerId:
        return self.leaders[view % len(self.leaders)]

    def check_view(self, leader: PeerId, view: int) -> None:
        """`leader` is a member and leads `view`."""
        if view < 0 or self.leader_of(view) != leader:
            raise RemoteError("protocol", f"{leader} does not lead view {view} of step {self.step}", leader)
        self.check_member(leader)

    def is_near(self, view: int, since: int, *, most: int = MOST_VIEWS_AHEAD) -> bool:
        """Whether a view is no further ahead than members ever are of each other."""
        return view <= max(since, self.first_view) + most

    def members_in(self, view: int, changed: Reconfiguration | None, *, gone: Collection[PeerId] = ()) -> set[PeerId]:
        """The members that vote in a view, but for those that are `gone`."""
        return {*self.members}.intersection(self.election.voters_in(view, changed)).difference(gone)

    def check_promises(self, view: int, shown: Proof, verify: Verify, changed: Reconfiguration | None) -> None:
        """Raises RemoteError unless all that is shown are promises for the view."""
        for promise in shown.promises:
            self.election.check_promise(promise, view, verify, changed)

    def is_turned_to(
        self, view: int, shown: Proof, verify: Verify, changed: Reconfiguration | None, *, gone: Collection[PeerId] = ()
    ) -> bool:
        """Whether a leader shows promises for its view of so many members that one of them is honest, and has turned to
        it in its own time. Raises RemoteError if one of them is no promise for it."""
        self.check_promises(view, shown, verify, changed)
        promised = [promise.voter for promise in shown.promises]
        return self.election.is_more_than_liars(promised, self.members_in(view, changed, gone=gone))

    def check_member(self, peer: PeerId) -> None:
        if peer not in self.members:
            raise RemoteError("standing", f"{peer} is no member of stage {self.stage}", peer)

    def check_contribution(self, made: Contribution, verify: Verify) -> None:
        """The contribution belongs to this round, commits to all parts (none without work), is signed, and reveals what
        it must."""
        peer = made.peer_id
        if (made.run_id, made.stage, made.step) != (self.run_id, self.stage, self.step):
            raise RemoteError("protocol", f"contribution of {peer} names another run, stage or step", peer)
        if made.previous_name != self.previous_name:
            raise RemoteError("fork", f"contribution of {peer} starts from another version", peer)
        self.check_member(peer)
        if len(made.part_digests) != (self.num_parts if made.work else 0):
            raise RemoteError("protocol", f"{len(made.part_digests)} part digests for {self.num_parts} parts", peer)
        if len(made.work) > self.limits.max_work:
            listed = f"{len(made.work)} microbatches, where {self.limits.max_work} are the most"
            raise RemoteError("protocol", f"contribution of {peer} lists {listed}", peer)
        if len(made.work) % self.limits.work_multiple:
            listed = f"{len(made.work)} microbatches, where inner steps are of {self.limits.work_multiple}"
            raise RemoteError("protocol", f"contribution of {peer} lists {listed}", peer)
        if not all(self.step - self.limits.delay <= item.version <= self.step for item in made.work):
            raise RemoteError(
                "protocol", f"contribution of {peer} lists work of versions that are not its step's", peer
            )
        if any(item.num_tokens > self.limits.max_tokens for item in made.work):
            raise RemoteError(
                "protocol", f"contribution of {peer} has more than {self.limits.max_tokens} tokens in one", peer
            )
        if not verify(peer, made.signed_bytes(), made.signature):
            raise RemoteError("signature", f"contribution of {peer} is not signed by it", peer)
        made.chance.check(
            maker=peer,
            run_id=self.run_id,
            stage=self.stage,
            step=self.step,
            link=self.links.get(peer),
            said=self.said,
            run_key=self.run_key,
            amendments=self.amendments,
            verify=verify,
        )

    def check_roster(
        self,
        roster: Roster,
        verify: Verify,
        *,
        certified: bool,
        known: Callable[[Contribution], bool] = lambda made: False,
    ) -> None:
        """The roster starts from this round's version, is consistent, and is signed by the leader of its view.

        If `certified`, its facts have a certificate of that view, or come of facts that have by leaving out more.
        Contributions that are `known` were checked before.
        """
        leader = roster.leader
        if (roster.run_id, roster.stage, roster.step) != (self.run_id, self.stage, self.step):
            raise RemoteError("protocol", "roster names another run, stage or step", leader)
        if roster.previous_name != self.previous_name:
            raise RemoteError("fork", f"roster of step {self.step} starts from another version", leader)
        self.check_view(leader, roster.view)
        if roster.members != self.members:
            raise RemoteError("fork", f"roster of step {self.step} is of other members", leader)
        num_reducers = self.num_parts * num_cohorts(len(self.members)) if roster.contributions else 0
        if len(roster.reducers) != num_reducers:
            raise RemoteError("protocol", f"{len(roster.reducers)} reducers for {num_reducers} places", leader)
        members, left, joins = set(self.members), {departure.peer_id for departure in roster.leaves}, set(roster.joins)
        if len(left) != len(roster.leaves) or not left < members:
            raise RemoteError("protocol", "roster's leaves are not some of the members, each once", leader)
        if len(joins) != len(roster.joins) or joins & members or len(members - left | joins) > MAX_MEMBERS:
            raise RemoteError("protocol", f"roster's {len(roster.joins)} joins are not new peers, each once", leader)
        if not set(roster.reducers) <= members - left:
            raise RemoteError("standing", "a reducer is no member, or leaves", leader)
        for contribution in roster.committed:
            if contribution.peer_id in left or not contribution.work:
                raise RemoteError("protocol", f"{contribution.peer_id} leaves or has no work, but contributes", leader)
            if not known(contribution):
                self.check_contribution(contribution, verify)
        for lost in roster.left_out:
            self._check_left_out(lost, roster, verify)
        if not verify(leader, roster.signed_bytes(), roster.signature):
            raise RemoteError("signature", f"roster is not signed by {leader}", leader)
        if certified:
            certificate = roster.certificate
            if certificate is None or certificate.view != roster.view:
                raise RemoteError("certificate", f"roster of view {roster.view} is not certified", leader)
            if not roster.comes_of(certificate.value):
                raise RemoteError("certificate", f"roster of view {roster.view} is of other facts", leader)
            self.election.check_certificate(certificate, "roster", certificate.value, verify)

    def check_lack(self, lack: Lack, made: Contribution, verify: Verify) -> None:
        """The word is its reducer's own."""
        if not verify(lack.reducer, Lack.signs(made), lack.signature):
            raise RemoteError("signature", f"{lack.reducer} has not signed that it lacks parts", lack.reducer)

    def _check_left_out(self, lost: LeftOut, roster: Roster, verify: Verify) -> None:
        """Enough members that stay say so, or it does itself."""
        stay = set(roster.members) - {departure.peer_id for departure in roster.leaves}
        said, wanted = {one.reducer for one in lost.said}, roster.num_lacks(lost.peer_id)
        if said != {lost.peer_id} and (not said <= stay or len(said) < wanted):
            words = f"{len(said)} members say that its parts do not come, not {wanted} that stay"
            raise RemoteError("protocol", f"{lost.peer_id} is left out: {words}", roster.leader)
        for lack in lost.said:
            self.check_lack(lack, lost.contribution, verify)

    def check_result(
        self,
        result: Result,
        verify: Verify,
        *,
        certified: bool,
        known: Callable[[Contribution], bool] = lambda made: False,
    ) -> None:
        """The result belongs to this round, is of a certified roster, has every part, and is signed by a member.

        If `certified`, it is the round's outcome.
        """
        self.check_roster(result.roster, verify, certified=True, known=known)
        leader = result.leader
        num_parts = self.num_parts if result.roster.contributions else 0
        if len(result.parts) != num_parts:
            raise RemoteError("protocol", f"result of {len(result.parts)} parts, not {num_parts}", leader)
        for reduced in result.parts:
            fits = reduced == ReducedPart.empty(reduced.part) if reduced.is_empty else is_of(reduced, result.roster)
            if reduced.cohort is not None or not fits:
                raise RemoteError("protocol", f"part {reduced.part} names contributors not on the roster", leader)
        self.check_member(leader)
        if not verify(leader, result.signed_bytes(), result.signature):
            raise RemoteError("signature", f"result is not signed by {leader}", leader)
        if certified:
            if result.certificate is None:
                raise RemoteError("certificate", f"result of step {self.step} is not certified", leader)
            self.election.check_certificate(result.certificate, "commit", result.root(), verify)


def is_of(reduced: ReducedPart, roster: Roster) -> bool:
    """Whether the part was made of contributions on the roster, at least one, and says why of the others.

    A cohort's share is of that cohort's contributions, of which there may be none.
    """
    contributors, excluded = set(reduced.contributors), {left_out.peer_id for left_out in reduced.excluded}
    wanted, number = roster.contributors, reduced.cohort
    if number is not None:
        is_share = len(wanted) > 1 and number < len(wanted) and not reduced.shares
        return is_share and bool(wanted[number]) and contributors | excluded == set(wanted[number])
    if not contributors or contributors | excluded != {made.peer_id for made in roster.contributions}:
        return False
    if len(wanted) == 1:
        return not reduced.shares
    heard = [number for number, of in enumerate(wanted) if not contributors.isdisjoint(of)]
    are_members = all(share.reducer in roster.cohort_of for share in reduced.shares)
    return are_members and [share.cohort for share in reduced.shares] == heard
