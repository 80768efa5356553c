"""Every state that a round's votes can reach: no two outcomes are certified, and an honest leader can always finish.

The network is the enemy: it chooses which voter hears what and when, so crashes, partitions, equal splits and leaders
that propose different things to different voters are all in. A liar's votes and promises are whatever helps the enemy.
A voter that is started again is silent, which is the same as hearing nothing. Voters are alike, so a state is how many
of them are in which state of their own; what a message makes of a voter is found out from a real `Voter`, once.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TypeAlias

import pytest

from swarm.core.errors import RemoteError
from swarm.core.ids import PeerId, StageIndex, Step
from swarm.core.round.voting import (
    Certificate,
    Election,
    Phase,
    Promise,
    Proof,
    Vote,
    Voter,
    certificate_of,
    electorate,
    quorum,
)

Choices: TypeAlias = dict[bytes, tuple[bytes, ...]]
"""Facts that leaders propose, and the results that can come of each."""
TWO_ROSTERS: Choices = {b"f" * 32: (b"1" * 32,), b"g" * 32: (b"2" * 32,)}
TWO_RESULTS: Choices = {b"f" * 32: (b"1" * 32, b"2" * 32)}
LESS, MORE = b"l" * 32, b"m" * 32
ONE_LEFT_OUT: Choices = {MORE: (b"1" * 32,), LESS: (b"2" * 32,)}
"""The one comes of the other, for a contribution's parts did not come: also in the view that certified the other."""
Held: TypeAlias = tuple[int, Phase, bytes]
"""View, phase and value of a certificate."""
Message: TypeAlias = tuple[str, int, bytes, bytes, Held | None]
"""Kind, view, facts, root, and what the leader shows for it."""


@cache
def signature_of(voter: PeerId, data: bytes) -> bytes:
    return hashlib.sha512(voter.encode() + data).digest()


def is_signed(voter: PeerId, data: bytes, signature: bytes) -> bool:
    return signature == signature_of(voter, data)


def election_of(num_voters: int) -> Election:
    names = tuple(PeerId(f"voter {number}") for number in range(num_voters))
    return Election("run", StageIndex(0), Step(3), bytes(32), 0, dict.fromkeys(names, 1), PeerId("run key"))


def voter_of(election: Election, index: int) -> Voter:
    me = election.voters[index]
    return Voter(election, me, lambda data: signature_of(me, data), is_signed)


def certificate_by(election: Election, held: Held, num_votes: int) -> Certificate:
    view, phase, value = held
    ballot = election.ballot(phase, view, value)
    votes = tuple(Vote(voter, signature_of(voter, ballot)) for voter in election.voters[:num_votes])
    return Certificate(phase, view, value, votes)


def proof_by(election: Election, view: int, held: Held | None, num_promises: int) -> Proof:
    """Promises of which the last names what is held."""
    promises = []
    for voter in election.voters[:num_promises]:
        promise = Promise(voter, view, None, None)
        if held is not None and voter == election.voters[num_promises - 1]:
            known = (held[0], held[2])
            promise = replace(promise, roster=known) if held[1] == "roster" else replace(promise, result=known)
        promises.append(replace(promise, signature=signature_of(voter, election.promised(promise))))
    return Proof(tuple(promises), certificate_by(election, held, num_promises) if held is not None else None)


def comes_of(facts: bytes, earlier: bytes) -> bool:
    return facts == earlier or (facts, earlier) == (LESS, MORE)


@dataclass
class World:
    """`num_liars` of the voters lie; `quorum` is what the enemy's certificates need: the real one unless said."""

    num_voters: int
    num_liars: int
    num_views: int
    choices: Choices
    quorum: int = 0
    election: Election = field(init=False)
    voters: list[Voter] = field(default_factory=list)
    """A voter in each state of its own that was met."""
    _index: dict[str, int] = field(default_factory=dict)
    _after: dict[tuple[int, Message], int] = field(default_factory=dict)
    _without_votes: dict[int, int] = field(default_factory=dict)
    _finished: dict[tuple[int, ...], bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.election = election_of(self.num_voters)
        self.quorum = self.quorum or quorum(self.num_voters)
        self._add(voter_of(self.election, self.num_voters - 1))

    def _add(self, voter: Voter) -> int:
        known = [made and (made.view, made.value) for made in (voter.roster, voter.result)]
        promised = voter._promise and (voter._promise.view, voter._promise.binds)
        key = repr((voter.promised, sorted(voter._cast.items()), known, promised))
        if key not in self._index:
            self._index[key] = len(self.voters)
            self.voters.append(voter)
        return self._index[key]

    def after(self, index: int, message: Message) -> int:
        """The state of its own that a voter comes to by the message."""
        found = self._after.get((index, message))
        if found is None:
            voter = replace(self.voters[index], _cast=dict(self.voters[index]._cast))
            try:
                self._deliver(voter, message)
            except RemoteError:
                voter = self.voters[index]
            found = self._after[index, message] = self._add(voter)
        return found

    def _deliver(self, voter: Voter, message: Message) -> None:
        kind, view, facts, root, held = message
        if kind == "promise":
            voter.promise(view)
        elif kind == "commit":
            assert held is not None
            voter.vote_commit(certificate_by(self.election, held, quorum(self.num_voters)), root)
        else:
            if held is not None and held[0] == view:
                proof = Proof((), certificate_by(self.election, held, quorum(self.num_voters)))
            else:
                proof = proof_by(self.election, view, held, quorum(self.num_voters))
            if kind == "roster":
                voter.vote_roster(view, facts, proof, comes_of=partial(comes_of, facts))
            else:
                voter.vote_result(view, root, proof, comes_of=partial(comes_of, facts))

    def certified(self, state: tuple[int, ...], phase: Phase, view: int, value: bytes) -> bool:
        """Whether votes that were ever cast, and the liars', make a certificate."""
        count = sum(1 for index in state if self.voters[index]._cast.get((view, phase)) == value)
        return count + self.num_liars >= self.quorum

    def outcomes(self, state: tuple[int, ...]) -> set[bytes]:
        roots = {root for made in self.choices.values() for root in made}
        return {r for r in roots for view in range(self.num_views) if self.certified(state, "commit", view, r)}

    def shown(self, state: tuple[int, ...], view: int) -> list[Held | None]:
        """What a leader of the view can prove to be the highest certificate of a quorum."""
        if view == self.election.first_view:
            return [None]
        made = [p.binds for p in (self.voters[i]._promise for i in state) if p is not None and p.view == view]
        found: list[Held | None] = []
        num_free = sum(1 for binds in made if binds is None) + self.num_liars
        if num_free >= self.quorum:
            found.append(None)
        for binds in {binds for binds in made if binds is not None}:
            if num_free + sum(1 for other in made if other is not None and other <= binds) >= self.quorum:
                (certified_view, place), value = binds
                found.append((certified_view, "result" if place else "roster", value))
        return found

    def messages(self, state: tuple[int, ...]) -> Iterator[Message]:
        """Everything the enemy can send."""
        for view in range(self.num_views):
            if view:
                yield ("promise", view, b"", b"", None)
            shown = self.shown(state, view)
            for facts, roots in self.choices.items():
                for held in shown:
                    yield ("roster", view, facts, b"", held)
                for root in roots:
                    for held in shown:
                        if held is not None:
                            yield ("result", view, facts, root, held)
                    for earlier in self.choices:
                        if comes_of(facts, earlier) and self.certified(state, "roster", view, earlier):
                            yield ("result", view, facts, root, (view, "roster", earlier))
                    if self.certified(state, "result", view, root):
                        yield ("commit", view, facts, root, (view, "result", root))

    def states(self, *, limit: int) -> Iterator[tuple[int, ...]]:
        """Every state that can be reached, each once. Fails if there are more than `limit`."""
        start = (0,) * (self.num_voters - self.num_liars)
        seen, frontier = {start}, [start]
        while frontier:
            state = frontier.pop()
            yield state
            messages = list(self.messages(state))
            for place, index in enumerate(state):
                if place and state[place - 1] == index:
                    continue  # a voter like the one before it
                for message in messages:
                    new = self.after(index, message)
                    if new != index:
                        after = tuple(sorted((*state[:place], new, *state[place + 1 :])))
                        if after not in seen:
                            seen.add(after)
                            frontier.append(after)
            assert len(seen) <= limit, f"more than {limit} states"

    def check(self, *, limit: int) -> tuple[int, int]:
        """States, and how many of them have an outcome. Raises AssertionError where there are two."""
        num_states = num_decided = 0
        for state in self.states(limit=limit):
            num_states += 1
            outcomes = self.outcomes(state)
            assert len(outcomes) <= 1, "two outcomes are certified"
            num_decided += bool(outcomes)
            if len(state) >= quorum(self.num_voters) and (outcomes or num_states % 50 == 1):
                root = self.finish(state)
                assert not outcomes or root in outcomes, "a later view certifies another outcome"
        assert num_decided, "nothing was ever certified: this shows nothing"
        return num_states, num_decided

    def finish(self, state: tuple[int, ...]) -> bytes:
        """The result that an honest leader gets certified in one more view, with honest voters alone.

        What they voted in lower views is in their promises or nowhere: states with the same ones end the same.
        """
        for index in state:
            if index not in self._without_votes:
                self._without_votes[index] = self._add(replace(self.voters[index], _cast={}))
        new = tuple(sorted(self._without_votes[index] for index in state))
        if new not in self._finished:
            self._finished[new] = self._finish(new)
        return self._finished[new]

    def _finish(self, state: tuple[int, ...]) -> bytes:
        election, view = self.election, self.num_views
        voters = []
        for number, index in enumerate(state):
            of = self.voters[index]
            me = election.voters[self.num_liars + number]
            voters.append(replace(of, me=me, _cast={}, sign=partial(signature_of, me)))
        promises = [promise for voter in voters if (promise := voter.promise(view)) is not None]
        assert len(promises) == len(voters) >= quorum(len(election.voters))
        highest = max((promise.binds for promise in promises if promise.binds is not None), default=None)
        held: Held | None = None
        if highest is not None:
            held = (highest[0][0], "result" if highest[0][1] else "roster", highest[1])
        proof = Proof(tuple(promises), certificate_by(election, held, quorum(len(election.voters))) if held else None)
        facts = max(self.choices)
        root = self.choices[facts][-1]
        if held is not None and held[1] == "result":
            root = held[2]
            facts = next(f for f, roots in self.choices.items() if root in roots)
        else:
            if held is not None:
                facts = held[2]
                root = self.choices[facts][-1]
            votes = [voter.vote_roster(view, facts, proof) for voter in voters]
            proof = Proof((), certificate_of(election, "roster", view, facts, [v for v in votes if v is not None]))
        cast = [voter.vote_result(view, root, proof, comes_of=partial(comes_of, facts)) for voter in voters]
        result = certificate_of(election, "result", view, root, [vote for vote in cast if vote is not None])
        assert result is not None
        assert all(voter.vote_commit(result, root) is not None for voter in voters)
        return root


@pytest.mark.parametrize(
    ("num_voters", "num_liars", "num_views", "choices"),
    [
        (2, 0, 3, TWO_ROSTERS),
        (2, 0, 3, ONE_LEFT_OUT),
        pytest.param(4, 1, 2, TWO_ROSTERS, marks=pytest.mark.soak),
        pytest.param(4, 1, 2, TWO_RESULTS, marks=pytest.mark.soak),
        pytest.param(3, 0, 2, ONE_LEFT_OUT, marks=pytest.mark.soak),
        pytest.param(3, 0, 2, TWO_ROSTERS, marks=pytest.mark.soak),
        pytest.param(3, 0, 2, TWO_RESULTS, marks=pytest.mark.soak),
    ],
)
def test_no_state_has_two_outcomes_and_each_can_be_finished(
    num_voters: int, num_liars: int, num_views: int, choices: Choices
) -> None:
    num_states, num_decided = World(num_voters, num_liars, num_views, choices).check(limit=2_000_000)
    assert num_states > num_decided > 100


@pytest.mark.parametrize(
    ("world", "why"),
    [
        (World(4, 0, 1, TWO_ROSTERS, quorum=2), "each half of an equal split is a quorum"),
        (World(4, 2, 1, TWO_ROSTERS), "half of the voters lie"),
    ],
)
def test_the_search_finds_a_fork_where_there_is_one(world: World, why: str) -> None:
    with pytest.raises(AssertionError, match="two outcomes"):
        world.check(limit=2_000_000)


def test_two_quorums_share_an_honest_voter() -> None:
    for count in range(1, 100):
        liars = (count - 1) // 3
        assert 2 * quorum(count) - count > liars
        assert quorum(count) <= count - liars, "honest voters alone must be able to certify"


def test_a_voter_votes_once_and_never_below_its_promise() -> None:
    voter = voter_of(election_of(4), 0)
    assert voter.vote_roster(0, b"f" * 32, Proof()) == voter.vote_roster(0, b"f" * 32, Proof()) is not None
    assert voter.vote_roster(0, b"g" * 32, Proof()) is None
    promise = voter.promise(2)
    assert promise is not None
    assert voter.promise(2) == promise
    assert voter.promise(1) is None
    assert voter.vote_roster(0, b"f" * 32, Proof()) is None


def test_what_is_not_genuine_is_refused() -> None:
    election = election_of(4)
    good = certificate_by(election, (0, "roster", b"f" * 32), 3)
    forged = replace(good, votes=(*good.votes[:2], replace(good.votes[2], signature=bytes(64))))
    strange = Vote(PeerId("stranger"), signature_of(PeerId("stranger"), election.ballot("roster", 0, b"f" * 32)))
    for bad in (
        forged,
        replace(good, votes=good.votes[:2]),
        replace(good, votes=(good.votes[0],) * 3),
        replace(good, votes=(strange, *good.votes[1:])),
        replace(good, view=1),
        replace(good, phase="result"),
        replace(good, value=b"g" * 32),
    ):
        with pytest.raises(RemoteError):
            election.check_certificate(bad, "roster", b"f" * 32, is_signed)
    election.check_certificate(good, "roster", b"f" * 32, is_signed)
    proof = proof_by(election, 1, (0, "roster", b"f" * 32), 3)
    assert election.bound(1, proof, is_signed) == good
    for unfit in (
        replace(proof, certificate=None),
        replace(proof, promises=proof.promises[:2]),
        replace(proof, promises=(proof.promises[0],) * 3),
        replace(proof, certificate=forged),
        Proof(),
    ):
        with pytest.raises(RemoteError):
            election.bound(1, unfit, is_signed)
    for value in (good, proof, proof.promises[2], good.votes[0]):
        assert type(value).from_value(value.to_value()) == value


def test_small_stages_have_their_neighbours_votes() -> None:
    a, b, c, d, e, host = (PeerId(letter) for letter in "abcdeh")
    name = bytes(32)

    def voters(members: list[PeerId], neighbours: list[PeerId], host: PeerId | None) -> tuple[PeerId, ...]:
        return tuple(electorate(dict.fromkeys(members, 8), neighbours, host, name))

    assert voters([a], [], host) == (a,)
    assert voters([a], [b], host) == (a, b, host)
    assert voters([b, a], [d, c], host) == (a, b, c, d, host)
    assert voters([a, b, c, d], [e], host) == (a, b, c, d, host)
    assert voters([a, b], [], None) == (a, b)
