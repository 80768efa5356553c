"""What members state of their states is kept as they signed it, shown to whoever differs, and may be taken back."""

import asyncio
import hashlib
from types import SimpleNamespace
from typing import Any

import pytest

from bootstrap.audit.stated_states import MAX_AHEAD, StatedStates
from swarm.checkpoint.state import CHUNK_BYTES, merkle_root
from swarm.core.canonical import Value
from swarm.core.errors import RemoteError, TransientError
from swarm.core.ids import PeerId, StageIndex, Version
from swarm.network.transport import Message
from tests.swarm.core.round.round_world import identities, identity_of
from verification.audit.standing import FAULTS_TO_STAY_OUT
from verification.state.state_statement import StateStatement

RUN_ID = "ab" * 32
STAGE = StageIndex(1)
NAME, OTHER_NAME = b"n" * 32, b"o" * 32
TOTAL = 3 * CHUNK_BYTES - 7
EVERYONE = tuple(identity.peer_id for identity in identities(4))
STRANGER, MEMBERS = EVERYONE[-1], EVERYONE[:-1]


class Host:
    """The board of a host that follows stage 1, whose version 8 is certified under `NAME`."""

    def __init__(self) -> None:
        self.heard: list[StageIndex] = []
        self.chain = SimpleNamespace(name=NAME, members=MEMBERS)
        self.followed = SimpleNamespace(version=8, chain=self.chain, at=lambda version: self.chain)
        self._stages: Any = {1: self.followed}
        layout = SimpleNamespace(num_values=1 << 18)
        settings = SimpleNamespace(checkpoint=SimpleNamespace(snapshot_every=2))
        self._run: Any = SimpleNamespace(run_id=RUN_ID, states=[SimpleNamespace(layout=layout)] * 2, settings=settings)
        self._tickets: Any = {peer: SimpleNamespace(stage=STAGE) for peer in (*MEMBERS, STRANGER)}
        self.unreliable: list[PeerId] = []
        self.lines: list[Value] = []
        """Of its ledger."""
        self.begin_again()

    def begin_again(self) -> None:
        """As a process that has nothing but the ledger."""

        async def unreliable(statement: StateStatement) -> None:
            self.unreliable.append(statement.peer_id)

        ledger: Any = SimpleNamespace(append=lambda kind, facts: self.lines.append(facts))
        self.board = StatedStates(self._run, ledger, self._tickets, self._stages, self.heard.append, unreliable)
        for facts in self.lines:
            self.board.remember(facts)

    def withdraw(self, peer: PeerId, version: int) -> None:
        self.call("withdraw", peer, {"version": version})

    def call(self, what: str, sender: PeerId, meta: dict[str, Any], body: bytes = b"") -> Message:
        handler = getattr(self.board, f"_on_{what}")
        reply: Message = asyncio.run(handler(sender, Message(meta, body)))
        return reply

    def state(self, peer: PeerId, content: bytes, **changes: Any) -> StateStatement:
        statement, hashes = stated(peer, content, **changes)
        self.call("state", peer, {"statement": statement.to_value()}, hashes)
        return statement

    def shown(self, digest: bytes, version: int = 8) -> list[PeerId]:
        reply = self.call("stated", MEMBERS[0], {"stage": 1, "version": version, "digest": digest})
        statements: Any = reply.meta["statements"]
        assert len(reply.body) == 32 * 3 * len(statements)
        return [StateStatement.from_value(one).peer_id for one in statements]


def stated(peer: PeerId, content: bytes, **changes: Any) -> tuple[StateStatement, bytes]:
    hashes = [hashlib.sha256(content + bytes([index])).digest() for index in range(3)]
    given: dict[str, Any] = {
        "run_id": RUN_ID,
        "stage": STAGE,
        "version": Version(8),
        "name": NAME,
        "peer_id": peer,
        "state_digest": merkle_root(hashes, TOTAL),
        "total_bytes": TOTAL,
    }
    return StateStatement(**(given | changes)).signed_by(identity_of(peer)), b"".join(hashes)


def test_whoever_states_something_else_is_shown_with_all_hashes() -> None:
    host = Host()
    ours = host.state(MEMBERS[0], b"ours").state_digest
    host.state(MEMBERS[1], b"ours")
    host.state(MEMBERS[2], b"another")
    assert host.heard == [STAGE] * 3
    assert host.shown(ours) == [MEMBERS[2]]
    assert host.shown(bytes(32)) == sorted(MEMBERS)
    assert host.shown(ours, version=9) == []
    digests = host.board.digests(STAGE, 8, NAME)
    assert [digests[peer] == ours for peer in MEMBERS] == [True, True, False]
    assert host.board.digests(STAGE, 8, OTHER_NAME) == {}


def test_a_first_word_stands_until_it_is_taken_back_and_is_not_given_again() -> None:
    host = Host()
    ours = host.state(MEMBERS[0], b"ours").state_digest
    wrong = host.state(MEMBERS[1], b"wrong").state_digest
    host.state(MEMBERS[1], b"ours")
    assert host.board.digests(STAGE, 8, NAME)[MEMBERS[1]] == wrong
    host.withdraw(MEMBERS[1], 8)
    assert host.board.has_withdrawn(MEMBERS[1], 8)
    assert host.shown(ours) == []
    host.state(MEMBERS[1], b"ours")
    assert MEMBERS[1] not in host.board.digests(STAGE, 8, NAME)


def test_what_is_taken_back_is_all_up_to_a_version_held_here_or_not_and_nothing_that_was_not_stated() -> None:
    host = Host()
    for version in range(8, 24, 2):
        host.followed.version = version
        host.state(MEMBERS[1], b"wrong", version=Version(version))
    assert 8 not in host.board.versions(STAGE)
    host.withdraw(MEMBERS[1], 1 << 60)
    assert host.board.has_withdrawn(MEMBERS[1], 8)
    assert host.board.has_withdrawn(MEMBERS[1], 22)
    assert host.shown(bytes(32), version=22) == []
    assert not host.board.has_withdrawn(MEMBERS[1], 24)
    host.followed.version = 24
    host.state(MEMBERS[1], b"wrong", version=Version(24))
    assert host.shown(bytes(32), version=24) == [MEMBERS[1]]
    assert host.unreliable == [], "all of it was one fault"


def test_what_is_taken_back_stays_so_after_the_host_has_begun_again() -> None:
    """Else whoever kept the statement would have an honest machine banned that has mended itself since."""
    host = Host()
    host.state(MEMBERS[1], b"wrong")
    host.withdraw(MEMBERS[1], 8)
    host.begin_again()
    assert host.board.has_withdrawn(MEMBERS[1], 8)
    assert not host.board.has_withdrawn(MEMBERS[1], 9)
    host.withdraw(MEMBERS[1], 8)
    assert len(host.lines) == 1


def test_what_was_stated_to_an_earlier_process_may_be_taken_back_and_little_beyond() -> None:
    host = Host()
    host.state(MEMBERS[1], b"wrong")
    host.begin_again()
    host.withdraw(MEMBERS[1], 8)
    assert host.board.has_withdrawn(MEMBERS[1], 8)
    host.withdraw(MEMBERS[2], 1 << 60)
    assert host.board.has_withdrawn(MEMBERS[2], 8 + MAX_AHEAD)
    assert not host.board.has_withdrawn(MEMBERS[2], 9 + MAX_AHEAD)
    host.withdraw(PeerId("without a ticket"), 8)
    assert not host.board.has_withdrawn(PeerId("without a ticket"), 8)


def test_who_takes_back_what_nobody_knows_fills_no_ledger() -> None:
    host = Host()
    for version in range(8, 108):
        host.followed.version = version
        host.withdraw(STRANGER, version)
    assert len(host.lines) == FAULTS_TO_STAY_OUT - 1
    assert host.unreliable == []


def test_what_was_taken_back_before_the_host_began_again_counts() -> None:
    host = Host()
    for version in (8, 16):
        host.followed.version = version
        host.state(MEMBERS[0], b"wrong", version=Version(version))
        host.withdraw(MEMBERS[0], version)
    host.begin_again()
    assert host.unreliable == []
    host.followed.version = 24
    host.withdraw(MEMBERS[0], 24)
    assert host.unreliable == [MEMBERS[0]]


def test_who_is_out_has_stated_nothing() -> None:
    host = Host()
    ours = host.state(MEMBERS[0], b"ours").state_digest
    host.state(MEMBERS[1], b"wrong")
    host.board.forget(MEMBERS[1])
    assert host.shown(ours) == []
    assert list(host.board.digests(STAGE, 8, NAME)) == [MEMBERS[0]]


@pytest.mark.parametrize(("every", "is_unreliable"), [(8, True), (49, True), (50, False)])
def test_who_takes_back_three_in_a_hundred_versions_is_told_of(every: int, is_unreliable: bool) -> None:
    host = Host()
    for number in range(3):
        assert host.unreliable == []
        host.followed.version = version = 1000 + number * every
        host.state(MEMBERS[0], b"wrong", version=Version(version))
        host.withdraw(MEMBERS[0], version)
        host.withdraw(MEMBERS[0], version)
    assert host.unreliable == ([MEMBERS[0]] if is_unreliable else [])


@pytest.mark.parametrize(
    ("sender", "changes"),
    [
        (STRANGER, {}),
        (MEMBERS[0], {"peer_id": MEMBERS[1]}),
        (MEMBERS[0], {"run_id": "cd" * 32}),
        (MEMBERS[0], {"stage": StageIndex(0)}),
        (MEMBERS[0], {"name": OTHER_NAME}),
        (MEMBERS[0], {"state_digest": bytes(32)}),
        (MEMBERS[0], {"total_bytes": TOTAL - 1}),
        (MEMBERS[0], {"total_bytes": 1 << 40}),
    ],
)
def test_what_is_no_member_s_word_for_a_state_of_its_stage_is_refused(sender: PeerId, changes: dict[str, Any]) -> None:
    host = Host()
    statement, hashes = stated(sender, b"ours", **changes)
    for meta, body in (({"statement": statement.to_value()}, hashes), ({"statement": statement.to_value()}, b"")):
        with pytest.raises(RemoteError):
            host.call("state", sender, meta, body)
    assert host.heard == []


def test_only_the_last_versions_are_kept() -> None:
    host = Host()
    for version in range(8, 40, 2):
        host.followed.version = version
        host.state(MEMBERS[0], b"ours", version=Version(version))
    assert host.board.versions(STAGE) == [30, 32, 34, 36, 38]


def test_a_version_that_is_not_known_yet_is_a_member_s_to_state_and_not_far_ahead() -> None:
    host = Host()
    host.followed.at = lambda version: host.chain if version == 8 else None
    host.state(MEMBERS[0], b"ours", version=Version(8 + MAX_AHEAD))
    for peer, version in ((MEMBERS[0], 9 + MAX_AHEAD), (STRANGER, 10)):
        with pytest.raises(TransientError):
            host.state(peer, b"ours", version=Version(version))
    with pytest.raises(RemoteError, match="not the stage's"):
        host.state(MEMBERS[0], b"ours", version=Version(7))
    assert host.board.versions(STAGE) == [8 + MAX_AHEAD]
