"""What members state of their states, kept by the host: agreement is anchored, and whoever differs is shown.

A statement comes with the hashes of all chunks under its root, or is none. So whoever states something else than its
stage's state has said, under its signature, enough to be proved wrong without being asked again.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from bootstrap.program.ledger import Ledger
from bootstrap.round.followed_stage import FollowedStage
from bootstrap.state.run_folder import PreparedRun
from swarm.checkpoint.state import verify_hashes
from swarm.checkpoint.transfer import MAX_HASH_BYTES, MAX_STATE_BYTES_PER_VALUE
from swarm.core.audit.ticket import Ticket
from swarm.core.canonical import Value
from swarm.core.errors import RemoteError, TransientError
from swarm.core.fields import Fields, value_or_none
from swarm.core.ids import PeerId, StageIndex
from swarm.host_protocol import STATE, STATED, WITHDRAW
from swarm.network.transport import Message, Transport
from verification.audit.standing import FAULT_VERSIONS, FAULTS_TO_STAY_OUT
from verification.state.state_statement import MAX_STATED, StateStatement

log = logging.getLogger(__name__)

KEPT_VERSIONS = 4
"""With a snapshot, of a stage; peers keep three."""
MAX_AHEAD = 16
"""Versions that a statement may be ahead of the results that have come."""


@dataclass(frozen=True)
class Stated:
    """A statement, and the hashes of the chunks under its root."""

    statement: StateStatement
    hashes: bytes


class StatedStates:
    """The statements of the last versions."""

    def __init__(
        self,
        run: PreparedRun,
        ledger: Ledger,
        tickets: Mapping[PeerId, Ticket],
        followed: Mapping[int, FollowedStage],
        on_stated: Callable[[StageIndex], None],
        on_unreliable: Callable[[StateStatement], Awaitable[None]],
    ) -> None:
        """`on_stated` is told of the stage of each statement that is taken or taken back, `on_unreliable` of the last
        statement of who has taken back too many.
        """
        self._run = run
        self._ledger = ledger
        self._tickets = tickets
        self._followed = followed
        self._heard = on_stated
        self._unreliable = on_unreliable
        self._held: dict[int, dict[int, dict[PeerId, Stated]]] = {}
        """By stage, version and peer."""
        self._newest: dict[PeerId, StateStatement] = {}
        """What each peer stated last, to this process."""
        self._withdrawn: dict[PeerId, list[int]] = {}
        """Of each peer, up to which versions it took back what it had stated; the newest."""
        self._taken_back: dict[PeerId, StateStatement] = {}
        """Of who took back any: the last that was known here of it then, also to an earlier process."""

    def serve(self, transport: Transport) -> None:
        """Begin to answer."""
        transport.serve(STATE, self._on_state, max_body_bytes=MAX_HASH_BYTES)
        transport.serve(STATED, self._on_stated, max_body_bytes=0)
        transport.serve(WITHDRAW, self._on_withdraw, max_body_bytes=0)

    async def _on_state(self, sender: PeerId, request: Message) -> Message:
        fields = Fields("state call", request.meta)
        statement = StateStatement.from_value(fields.message("statement"))
        fields.done()
        self._take(sender, statement, bytes(request.body))
        self._heard(statement.stage)
        return Message()

    def _take(self, sender: PeerId, statement: StateStatement, hashes: bytes) -> None:
        """What a peer states of its own. Raises RemoteError if it is none, or of no version of its stage that had a
        snapshot; TransientError if the stage is not known to be near it yet.
        """
        statement.check(run_id=self._run.run_id)
        ticket, stage, version = self._tickets.get(sender), statement.stage, int(statement.version)
        if statement.peer_id != sender or ticket is None or ticket.stage != stage:
            raise RemoteError("standing", f"{sender} states a state of stage {stage}", sender)
        largest = MAX_STATE_BYTES_PER_VALUE * self._run.states[stage].layout.num_values + (1 << 24)
        if statement.total_bytes > largest:
            raise RemoteError("protocol", f"a state of {statement.total_bytes} bytes; none is above {largest}", sender)
        leaves = [hashes[at : at + 32] for at in range(0, len(hashes), 32)]
        verify_hashes(statement.state_digest, leaves, statement.total_bytes)
        self._check_version(statement)
        versions = self._held.setdefault(stage, {})
        stated = versions.setdefault(version, {})
        if sender not in stated and not self.has_withdrawn(sender, version):
            self._newest[sender] = statement
            same = (one.hashes for one in stated.values() if one.statement.state_digest == statement.state_digest)
            stated[sender] = Stated(statement, next(same, hashes))
        oldest = int(self._followed[stage].version) - KEPT_VERSIONS * self._run.settings.checkpoint.snapshot_every
        for old in [old for old in versions if old < oldest]:
            del versions[old]

    def _check_version(self, statement: StateStatement) -> None:
        """By what is certified of the version or, if it is a little ahead of what is known here, by who is a member."""
        followed, version, sender = self._followed.get(statement.stage), int(statement.version), statement.peer_id
        if followed is None or version > int(followed.version) + MAX_AHEAD:
            raise TransientError(f"version {version} of stage {statement.stage} is not known here yet")
        chain = followed.at(version)
        if chain is None and version > int(followed.version):
            if sender not in followed.chain.members:
                raise TransientError(f"{sender} is not known here as a member of stage {statement.stage}")
        elif chain is None or chain.name != statement.name:
            raise RemoteError("fork", f"{sender} states a version {version} that is not the stage's", sender)
        elif sender not in chain.members:
            said = f"{sender} is no member of stage {statement.stage} at version {version}"
            raise RemoteError("standing", said, sender)

    def versions(self, stage: StageIndex) -> list[int]:
        """Those that are stated, sorted."""
        return sorted(self._held.get(stage, ()))

    def digests(self, stage: StageIndex, version: int, name: bytes) -> dict[PeerId, bytes]:
        """What each peer states of the version of that name."""
        held = self._held.get(stage, {}).get(version, {})
        return {peer: one.statement.state_digest for peer, one in held.items() if one.statement.name == name}

    def forget(self, peer: PeerId) -> None:
        """The peer is out: its word counts no more, nor does it stand before others'."""
        for versions in self._held.values():
            for stated in versions.values():
                stated.pop(peer, None)

    def has_withdrawn(self, peer: PeerId, version: int) -> bool:
        """Whether the peer took back what it stated of the version: it had found itself broken."""
        return version <= max(self._withdrawn.get(peer, ()), default=-1)

    async def _on_stated(self, sender: PeerId, request: Message) -> Message:
        """What others state of a version than the asker: at most a few of them."""
        fields = Fields("stated request", request.meta)
        stage, version = fields.integer("stage", high=1 << 16), fields.integer("version")
        own = fields.octets("digest", length=32)
        fields.done()
        held = self._held.get(stage, {}).get(version, {})
        others = [held[peer] for peer in sorted(held) if held[peer].statement.state_digest != own][:MAX_STATED]
        values: list[Value] = [one.statement.to_value() for one in others]
        return Message({"statements": values}, b"".join(one.hashes for one in others))

    async def _on_withdraw(self, sender: PeerId, request: Message) -> Message:
        """A peer has found its own state wrong, perhaps some snapshots late: all it stated till then is one fault."""
        fields = Fields("withdrawal", request.meta)
        version = fields.integer("version")
        fields.done()
        ticket, newest = self._tickets.get(sender), self._newest.get(sender)
        if newest is not None:
            await self._take_back(sender, newest.stage, min(version, int(newest.version)))
        elif ticket is not None and ticket.stage in self._followed:  # perhaps it stated it to an earlier process
            known = int(self._followed[ticket.stage].version) + MAX_AHEAD
            await self._take_back(sender, ticket.stage, min(version, known))
        return Message()

    async def _take_back(self, peer: PeerId, stage: StageIndex, version: int) -> None:
        if self.has_withdrawn(peer, version):
            return
        newest = self._newest.get(peer)
        last = newest or self._taken_back.get(peer)
        withdrawn = _with(self._withdrawn.get(peer, ()), version)
        are_too_many = len(withdrawn) == FAULTS_TO_STAY_OUT and withdrawn[-1] - withdrawn[0] < FAULT_VERSIONS
        if are_too_many and last is None:  # else it would fill the ledger, and never be kept out
            log.warning("%s takes back one state after another, of which none was ever known here", peer)
            return
        facts: Value = {"peer_id": peer, "version": version, "statement": value_or_none(newest)}
        self._ledger.append("withdrawn", facts)
        self.remember(facts)
        for number, stated in self._held.get(stage, {}).items():
            if number <= version:
                stated.pop(peer, None)
        log.warning("%s takes back what it stated up to version %d of stage %d", peer, version, stage)
        self._heard(stage)
        if are_too_many and last is not None:
            await self._unreliable(last)

    def remember(self, facts: Value) -> None:
        """A withdrawal, as the ledger has it."""
        fields = Fields("withdrawn", facts)
        peer, version = fields.peer("peer_id"), fields.integer("version")
        statement = fields.maybe("statement", StateStatement.from_value)
        fields.done()
        self._withdrawn[peer] = _with(self._withdrawn.get(peer, ()), version)
        if statement is not None:
            self._taken_back[peer] = statement


def _with(withdrawn: Sequence[int], version: int) -> list[int]:
    """The newest, with this one."""
    return sorted({*withdrawn, version})[-FAULTS_TO_STAY_OUT:]
