"""A process's votes on the rounds of stages it is no member of: neighbouring peers, and the host.

Whoever leads a round shows what it starts from; its version's name binds that. A vote is recorded on disk before it
leaves, so that a process that is started again stays silent in rounds in which it may have voted.
"""

import asyncio
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from swarm.core.canonical import Value
from swarm.core.errors import RemoteError, TransientError, UnreachableError
from swarm.core.fields import Fields, value_or_none
from swarm.core.ids import PeerId, StageIndex, Step
from swarm.core.round.ballots import Proposal
from swarm.core.round.basis import RoundBasis
from swarm.core.round.contribution import Contribution, Result, Roster
from swarm.core.round.facts import ANY_WORK, RoundFacts, WorkLimits
from swarm.core.round.instructions import AskPromise, SendBallot
from swarm.core.round.voter import NOT_RECONFIGURED, RoundVoter, Witness
from swarm.core.round.voting import MOST_VIEWS, Promise, Proof, Reconfiguration, Vote
from swarm.core.round.words import Words
from swarm.disk.durable_lines import append_line, replace_lines
from swarm.drawn_papers import DISTRUSTED_SHARE, DrawnPapers, WaitedInVain
from swarm.identity.key import Identity, verify
from swarm.left_without import MOST_ASKED, contributed, is_missing, is_outsiders_to_ask
from swarm.network.transport import Message, Transport

WITNESS = "witness"
"""{run_id, stage, step, basis, view, proof | proposal, words} -> {vote, there} or {promise, roster, result}.

None: no vote; `there`: contributions of members, had of themselves, without which a roster is proposed."""
VOTES = "votes"
"""{round} -> {votes}: whether this process votes in the round of that name."""
MAX_OPEN_ROUNDS = 256
MAX_ROUNDS_OF_ONE = 4
"""Rounds that one peer may have opened here; those whose outcome is known do not count."""
KEPT_ENDED = 32
"""Rounds whose outcome is known: their leaders may have missed the answer, and ask once more within seconds."""
KEPT_NAMES = 1024
NOT_WRITTEN = NOT_RECONFIGURED - 1
MOST_SILENT = 8
"""Members whom a voter asks whether they vote, where parts are left empty; where more are silent it waits for them."""
LONGEST_HOLD_S = 120.0
"""So long no vote is given for a roster without a member that answers, for all that it says."""
PAPERS_S = 2.0
"""How long a contribution's papers are waited for: a few kB, of who has just committed to it."""


class VoteLog:
    """The rounds, by their names, in which this identity has signed anything.

    A line is a name, and the first view of the last reconfiguration that was signed under, if there was one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        kept: dict[str, int] = {}
        for line in path.read_text().splitlines() if path.exists() else []:
            name, _, view = line.partition(" ")
            if len(name) == 64 and (view.isdecimal() or not view):
                kept[name] = max(int(view or NOT_RECONFIGURED), kept.pop(name, NOT_RECONFIGURED))
        self._before_start = dict(list(kept.items())[-KEPT_NAMES:])
        self._begun: dict[str, int] = {}
        """What is on disk of each; `NOT_WRITTEN` for one that will be."""
        replace_lines(path, [_line(name, view) for name, view in self._before_start.items()])

    def may_vote(self, name: bytes) -> bool:
        """Whether nothing can have been signed yet in the round of this name."""
        return not self.is_silent(name) and name.hex() not in self._begun

    def is_silent(self, name: bytes) -> bool:
        """Whether an earlier process of this identity may have voted in the round, so that this one does not, but
        under a reconfiguration later than `signed_under`."""
        return name.hex() in self._before_start

    def signed_under(self, name: bytes) -> int:
        """First view of the last reconfiguration of the round under which an earlier process may have voted."""
        return self._before_start.get(name.hex(), NOT_RECONFIGURED)

    async def begin(self, name: bytes, changed: Reconfiguration | None = None) -> None:
        """This process is about to vote in the round, under a reconfiguration that was checked: returns once that is on
        disk."""
        view = changed.first_view if changed is not None else NOT_RECONFIGURED
        if view > self._begun.setdefault(name.hex(), NOT_WRITTEN):
            await asyncio.to_thread(append_line, self._path, _line(name.hex(), view))
            self._begun[name.hex()] = max(view, self._begun[name.hex()])


def _line(name: str, view: int) -> str:
    return name if view == NOT_RECONFIGURED else f"{name} {view}"


class _Opened(NamedTuple):
    """A round, and who asked first."""

    opener: PeerId
    stage: StageIndex
    step: Step
    previous_name: bytes


@dataclass(frozen=True)
class AreThere:
    """Instead of a vote: what members have contributed that are missing on the roster."""

    made: tuple[Contribution, ...]


class WitnessService:
    """Answers leaders of rounds elsewhere that ask for this process' promise or vote."""

    def __init__(
        self,
        run_id: str,
        identity: Identity,
        host: PeerId,
        run_key: PeerId,
        log: VoteLog,
        is_of_stage: Callable[[PeerId, int], bool],
        may_join: Callable[[PeerId], bool],
        may_lead: Callable[[PeerId, StageIndex, Step, bytes], bool],
        *,
        num_parts: Sequence[int],
        papers: DrawnPapers,
        limits: Callable[[Step], WorkLimits] = lambda step: ANY_WORK,
        call_s: float = 10.0,
        amendments: int = 0,
    ) -> None:
        """`is_of_stage`: whether a peer may be a member of a stage; `may_join`: whether it is past its probation;
        `may_lead`: whether it may lead the stage's round of the step that starts from the version of the name. All as
        far as is known here. `num_parts`: of each stage's rounds. `papers`: what is looked at of contributions before a
        vote; `limits`: what one may list.
        `call_s`: who asks this peer waits so long. `amendments`: of the run, in force."""
        self._amendments = amendments
        self._num_parts = num_parts
        self._papers = papers
        self._limits = limits
        self._answer_s = call_s / 4
        self._silent_s = call_s / 2
        self._held_until: dict[tuple[PeerId, bytes], float] = {}
        """Until when votes are held back in a round for a member that has answered."""
        self._let_run_out = WaitedInVain()
        """Members that were waited for in vain then."""
        self._run_id = run_id
        self._identity = identity
        self._host = host
        self._run_key = run_key
        self._log = log
        self._is_of_stage = is_of_stage
        self._may_join = may_join
        self._may_lead = may_lead
        self._rounds: dict[bytes, Witness] = {}
        """By their names."""
        self._opened_by: dict[bytes, _Opened] = {}
        """Those that have not ended here."""
        self._transport: Transport | None = None

    def serve(self, transport: Transport) -> None:
        self._transport = transport
        transport.serve(WITNESS, self._on_witness, max_body_bytes=0)
        transport.serve(VOTES, self._on_votes, max_body_bytes=0)

    async def _on_votes(self, sender: PeerId, request: Message) -> Message:
        fields = Fields("votes request", request.meta)
        name = fields.octets("round", length=32)
        fields.done()
        return Message({"votes": not self._log.is_silent(name)})

    async def _on_witness(self, sender: PeerId, request: Message) -> Message:
        fields = Fields("witness request", request.meta)
        if fields.text("run_id") != self._run_id:
            raise RemoteError("protocol", "another run", sender)
        step = Step(fields.integer("step"))
        stage = StageIndex(fields.integer("stage", high=len(self._num_parts) - 1))
        facts = RoundFacts.of_basis(
            RoundBasis.from_value(fields.message("basis")),
            run_id=self._run_id,
            stage=stage,
            step=step,
            host=self._host,
            run_key=self._run_key,
            num_parts=self._num_parts[stage],
            phase_s=1.0,
            limits=self._limits(step),
            amendments=self._amendments,
        )
        facts.check_member(sender)
        witness = self._witness(facts, sender)
        if fields.optional("view"):
            view = fields.integer("view", high=MOST_VIEWS)
            shown = Proof.from_value(fields.message("proof"))
            fields.done()
            await self._log_reconfigured(facts, shown.reconfiguration)
            try:
                promise = witness.on_ask(sender, view, shown, now=time.monotonic())
            except TransientError:
                gone = await self._silent(facts, {promise.voter for promise in shown.promises})
                promise = witness.on_ask(sender, view, shown, gone=gone, now=time.monotonic())
            if promise is not None:
                await self._log.begin(facts.name)
            witness.voter.keep_highest()
            roster, result = witness.voter.roster, witness.voter.result
            return Message(
                {
                    "promise": value_or_none(promise),
                    "roster": value_or_none(roster),
                    "result": value_or_none(result),
                }
            )
        proposal = Proposal.from_value(fields.message("proposal"))
        words = fields.maybe("words", Words.from_value)
        fields.done()
        if proposal.roster is not None:
            for peer in proposal.roster.neighbours:
                if not any(self._is_of_stage(peer, facts.stage + side) for side in (-1, 1)):
                    raise TransientError(f"{peer[-6:]} is not known here as a neighbour of stage {facts.stage}")
        check_joins(proposal, self._may_join)
        await self._log_reconfigured(facts, proposal.proof.shown_reconfiguration)
        facts.check_view(sender, proposal.view)
        if proposal.view >= witness.voter.highest_view:
            num_members = len(facts.members)
            await self._papers.check(proposal, sender, num_members=num_members, within_s=PAPERS_S)
            there = await self._are_there(facts, proposal, witness.voter)
            if there:
                return Message({"vote": None, "there": [made.packed for made in there]})
        gone = await self._gone(facts, proposal, words)
        vote = witness.on_ballot(sender, proposal, words, gone=gone)
        if vote is not None:
            await self._log.begin(facts.name)
        witness.voter.keep_highest()
        if proposal.phase == "commit" and vote is not None:
            self._opened_by.pop(facts.name, None)
        return Message({"vote": value_or_none(vote), "there": []})

    async def _gone(self, facts: RoundFacts, proposal: Proposal, words: Words | None) -> frozenset[PeerId]:
        """Of the members that have not voted for a result which leaves parts empty, those that do not answer."""
        if proposal.result is None or words is None or len(words.said) == len(proposal.result.parts):
            return frozenset()
        return await self._silent(facts, {vote.voter for vote in words.agreed})

    async def _silent(self, facts: RoundFacts, heard: Collection[PeerId]) -> frozenset[PeerId]:
        """Of the members that are not `heard` otherwise, those that do not answer, or that do not vote in the round."""
        silent = [peer for peer in facts.members if peer not in heard]
        if len(silent) > MOST_SILENT:
            return frozenset()
        said = await asyncio.gather(*(self._votes(peer, facts) for peer in silent))
        return frozenset(peer for peer, votes in zip(silent, said, strict=True) if not votes)

    async def _votes(self, peer: PeerId, facts: RoundFacts) -> bool:
        """As far as the member says so: one that was started again answers, and does not."""
        assert self._transport is not None
        asked = Message({"round": facts.name})
        try:
            reply = await self._transport.call(peer, VOTES, asked, timeout_s=self._silent_s, max_body_bytes=0)
            return Fields("votes", reply.meta).boolean("votes")
        except UnreachableError:
            return False
        except (TransientError, RemoteError):
            return True

    async def _are_there(self, facts: RoundFacts, proposal: Proposal, voter: RoundVoter) -> list[Contribution]:
        """What members contribute without whom a new roster is proposed, as if they had not committed.

        A leader's word is all that others have of who is silent. Members need none of it, for none votes for a roster
        without itself; but where they are few the others' votes make a quorum without them.

        Raises TransientError while one that is there has yet to make its contribution, where more than a third are
        missing, but not for ever.
        """
        if not is_outsiders_to_ask(facts, proposal, voter.changed):
            return []
        missing = proposal.left_without & {*facts.members}
        are_many = facts.election.is_more_than_liars(missing, facts.members)
        voter.check(proposal)
        waited_for = [peer for peer in sorted(missing) if self._may_join(peer) and self._may_hold_up(peer, facts)]
        asked = waited_for[:MOST_ASKED]
        said = await asyncio.gather(*(self._is_there(peer, facts, proposal) for peer in asked))
        for peer in [peer for peer, there in zip(asked, said, strict=True) if there is not False]:
            self._held_up_by(peer, facts, shortly=not are_many)
        found = [made for made in said if isinstance(made, Contribution)]
        if not found and True in said and are_many:
            raise TransientError(f"a member without which view {proposal.view} goes on is there")
        return found

    async def _is_there(self, peer: PeerId, facts: RoundFacts, proposal: Proposal) -> Contribution | bool:
        """What a member answers with to a roster without it; or whether it is there and waited for all the same."""
        assert self._transport is not None
        try:
            made = await contributed(self._transport, facts, peer, proposal, answer_s=self._answer_s)
        except (UnreachableError, RemoteError):  # or it has left the stage
            return False
        if isinstance(made, bool):
            return made
        return made if await is_missing(self._papers, facts, made, proposal, papers_s=PAPERS_S) else False

    def _may_hold_up(self, peer: PeerId, facts: RoundFacts) -> bool:
        """Whether a vote is held back for the member's sake: it has its time in each round."""
        if time.monotonic() < self._held_until.get((peer, facts.name), math.inf):
            return True
        self._let_run_out.add(peer, facts.step)
        return False

    def _held_up_by(self, peer: PeerId, facts: RoundFacts, *, shortly: bool) -> None:
        """Its time counts from its first answer. Who is known to be late is waited for as shortly as who let its time
        run out."""
        is_distrusted = shortly or self._let_run_out.names(peer, facts.step) or peer in facts.late
        hold_s = LONGEST_HOLD_S / (DISTRUSTED_SHARE if is_distrusted else 1)
        self._held_until.setdefault((peer, facts.name), time.monotonic() + hold_s)

    def _witness(self, facts: RoundFacts, sender: PeerId) -> Witness:
        if self._identity.peer_id not in facts.voters or self._identity.peer_id in facts.members:
            # A member votes in its own round alone: asked here as well, it would contradict itself, or be silent there.
            raise RemoteError("protocol", "this peer has no vote there, or has it as a member", sender)
        key = facts.name
        if key not in self._rounds:
            # A basis binds nothing but its own name: anybody can make one up in which its keys are the members.
            if not self._may_lead(sender, facts.stage, facts.step, facts.previous_name):
                raise TransientError(f"{sender[-6:]} is not known here to lead step {facts.step} of {facts.stage}")
            self._end_old(sender, facts)
            # Whoever makes up rounds uses up its own share, nobody else's.
            if sum(1 for opened in self._opened_by.values() if opened.opener == sender) >= MAX_ROUNDS_OF_ONE:
                raise TransientError(f"{sender[-6:]} has {MAX_ROUNDS_OF_ONE} rounds open here")
            self._forget()
            if len(self._rounds) >= MAX_OPEN_ROUNDS:
                raise TransientError(f"{MAX_OPEN_ROUNDS} rounds are open here")
            voter = RoundVoter(
                facts,
                self._identity.peer_id,
                self._identity.sign,
                verify,
                votes=self._log.may_vote(key),
                signed_under=self._log.signed_under(key),
            )
            self._rounds[key] = Witness(voter)
            self._opened_by[key] = _Opened(sender, facts.stage, facts.step, facts.previous_name)
        return self._rounds[key]

    async def _log_reconfigured(self, facts: RoundFacts, changed: Reconfiguration | None) -> None:
        """What is signed under it from now on is on record."""
        if changed is not None:
            facts.election.check_reconfiguration(changed, verify)
            await self._log.begin(facts.name, changed)

    def _end_old(self, leader: PeerId, facts: RoundFacts) -> None:
        """Rounds that are over elsewhere, as it seems, though no ballot said so here: a leader that has votes enough
        asks no more. Those of who leads a later one, and those that nobody may begin any more."""
        for key, opened in list(self._opened_by.items()):
            is_its_own = (opened.opener, opened.stage) == (leader, facts.stage)
            leads_another = is_its_own and not facts.step - 1 <= opened.step <= facts.step  # later, or begun again
            if leads_another or not self._may_lead(*opened):
                del self._opened_by[key]

    def _forget(self) -> None:
        """Rounds that ended here go when there are too many: nobody needs this vote again, and none is given twice."""
        ended = [key for key in self._rounds if key not in self._opened_by]
        for key in ended[: max(0, len(ended) - max(KEPT_ENDED, 2 * len(self._num_parts)))]:
            del self._rounds[key]
        self._held_until = {held: until for held, until in self._held_until.items() if held[1] in self._rounds}


def check_joins(proposal: Proposal, may_join: Callable[[PeerId], bool]) -> None:
    """Raises TransientError if a new roster takes in a peer that may not join, or is not known to.

    One that is proposed again was certified: whoever voted then has looked.
    """
    roster = proposal.new_roster
    for peer in roster.joins if roster is not None else ():
        if not may_join(peer):
            raise TransientError(f"{peer[-6:]} is not known here to be past its probation")


async def ask_witness(
    transport: Transport,
    peer: PeerId,
    facts: RoundFacts,
    basis: RoundBasis,
    what: AskPromise | SendBallot,
    *,
    words: Words | None = None,
    shown: Proof | None = None,
    timeout_s: float,
) -> Vote | AreThere | tuple[Promise, Roster | None, Result | None] | None:
    """The vote, or who is put off and there, or the promise with what it is made of; None if there is none.

    `words`: what the parts of a new result that is voted on were signed for; `shown`: who has promised the view for
    which a promise is asked.

    Raises TransientError or RemoteError as `Transport.call` does.
    """
    meta: dict[str, Value] = {
        "run_id": facts.run_id,
        "stage": facts.stage,
        "step": facts.step,
        "basis": basis.to_value(),
    }
    if isinstance(what, AskPromise):
        meta["view"] = what.view
        meta["proof"] = (shown or Proof()).to_value()
    else:
        meta["proposal"] = what.proposal.packed
        meta["words"] = value_or_none(words)
    reply = await transport.call(peer, WITNESS, Message(meta), timeout_s=timeout_s, max_body_bytes=0)
    fields = Fields("witness answer", reply.meta)
    if isinstance(what, SendBallot):
        vote = fields.maybe("vote", Vote.from_value)
        there = fields.items("there", Contribution.from_value, max_items=MOST_ASKED)
        return AreThere(tuple(there)) if vote is None and there else vote
    if not fields.optional("promise"):
        return None
    return (
        Promise.from_value(fields.message("promise")),
        fields.maybe("roster", Roster.from_value),
        fields.maybe("result", Result.from_value),
    )
