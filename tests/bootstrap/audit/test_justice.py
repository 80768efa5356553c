"""The host's justice: owed audits and untrue accusations end in quarantine; crashes and answers given late do not."""

import asyncio
import contextlib
import hashlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from bootstrap.audit import justice, pleas
from bootstrap.audit.beacon import HostBeacon, HostChains
from bootstrap.audit.justice import Justice
from bootstrap.program.ledger import Ledger
from bootstrap.round.followed_stage import FollowedStage
from bootstrap.round.following import Following
from bootstrap.state.run_folder import PreparedRun, RunFolder
from peer.audit.hop_desk import message_of
from swarm.bulk_digest import bulk_digest
from swarm.checkpoint.state import state_chunks, state_digest
from swarm.core.audit.hash_chain import HashChain
from swarm.core.canonical import Value
from swarm.core.errors import LocalError, RemoteError, TransientError
from swarm.core.fields import Fields
from swarm.core.ids import PeerId, StageIndex, Step, Version
from swarm.core.pipeline.leases import LeaseTable
from swarm.core.round.contribution import Contribution
from swarm.core.settings import AuditSettings, CheckpointSettings, RunSettings
from swarm.core.state.stage_chain import Genesis, StageChain
from swarm.disk.room import full_disk
from swarm.host_protocol import (
    ACCUSE,
    BAN,
    EXHIBIT,
    HOP,
    MAX_RESULTS_PER_CALL,
    OWED,
    PARDON,
    PAST_IS_GONE,
    PLEA,
    QUARANTINE,
    RESULTS,
    RETURN,
    WITHDRAW,
    AccusationPiece,
)
from swarm.identity.key import Identity
from swarm.manifest.signed_run import SignedRun
from swarm.manifest.value import run_id, settings_bytes
from swarm.network.memory import MemoryNetwork, MemoryTransport
from swarm.network.outcasts import GuardedTransport
from swarm.network.transport import Message
from tests.swarm.core.audit.chances import HOST_CHAIN
from tests.swarm.core.round.round_world import identity_of as named
from tests.swarm.core.round.round_world import run_key, witness_identities
from tests.swarm_in_process import identity_of, manifest_of, swarm_in_process
from tests.verification import exhibits
from tests.verification.exhibits import Done, SmallRun, received, small_settings
from verification.audit import running_bias
from verification.audit.evidence import Evidence
from verification.audit.owed import OwedAudit, read_exhibit, read_hop
from verification.audit.standing import FAULT, StandingTable
from verification.audit.strikes import STRIKE_VERSIONS, Strikes
from verification.audit.verdicts import Debt, Pardon, Plea, Promotion, Quarantine
from verification.kinds.bias import Bias
from verification.kinds.mismatch import charge_of
from verification.kinds.replay_mismatch import ReplayMismatch
from verification.round.papers import Exhibit
from verification.state.anchor import Anchor
from verification.state.past import Past

STAGE = StageIndex(1)
ROUNDS = 6
SEEDS = {"auditor": b"a" * 32, "target": b"t" * 32}
Served = Callable[[int], Message]
"""What the target answers the host about a step."""


def accusation(body: bytes) -> Message:
    """Evidence that goes in one piece."""
    accused = Evidence.from_bytes(body, max_bytes=1 << 26).accused
    return Message(AccusationPiece(accused, body[-32:], len(body), 0).to_value(), body)


@dataclass(frozen=True)
class Past6:
    """A run of two stages with three peers each, everything in it audited, after six rounds of stage 1."""

    prepared: Callable[[Path], PreparedRun]
    signed: SignedRun
    genesis: Genesis
    rounds: Sequence[Done]
    shown: Sequence[dict[PeerId, Exhibit]]
    """Of each round: of the one microbatch that each peer did in it."""
    anchor: Anchor
    state: tuple[bytes, ...]
    members: Sequence[Identity]
    """The auditor, the target and one more."""

    @property
    def auditor(self) -> Identity:
        return self.members[0]

    @property
    def target(self) -> Identity:
        return self.members[1]

    def contribution(self, step: int) -> Contribution:
        return self.rounds[step].contributions[self.target.peer_id]

    def untrue(self, step: int) -> bytes:
        """An accusation of the honest target: all it shows is genuine, and nothing in it is wrong."""
        contribution = self.contribution(step)
        mismatch = ReplayMismatch(
            contribution=contribution,
            parts=tuple(self.rounds[step].parts[self.target.peer_id]),
            exhibits=(self.shown[step][self.target.peer_id],),
            past=Past(beginning=self.anchor, results=tuple(done.result for done in self.rounds[:step])),
            state_chunks=self.state,
            bodies=tuple(tuple(done.bodies) for done in self.rounds[:step]),
        )
        return mismatch.to_evidence(self.signed).to_bytes()

    def hop(self, step: int) -> dict[str, Any]:
        """Of an owed audit: that what the target answered with in a step is not shown beside what it was made from."""
        papers = self.shown[step][self.target.peer_id].papers
        return {"what": "hop", "birth": papers.birth, "header": papers.gradient_out}

    def served_hop(self, step: int) -> Message:
        """The honest answer about its header."""
        return message_of([received(self.shown[step][self.target.peer_id])])

    def served(self, step: int) -> Message:
        """The honest answer to an auditor."""
        exhibit = self.shown[step][self.target.peer_id]
        sizes: list[Value] = [len(body) for body in exhibit.bodies]
        return Message({"papers": exhibit.papers.to_value(), "sizes": sizes}, b"".join(exhibit.bodies))


CHAINS = cast(HostChains, SimpleNamespace(of=lambda stage, era: HOST_CHAIN))
"""As the small run's genesis has it."""


@pytest.fixture(scope="module")
def past() -> Iterator[Past6]:
    audits = AuditSettings(hop_budget=4.0, contribution_budget=4.0, retained_versions=8)
    settings = SmallRun(small_settings(2, audits=audits, trust="public")).settings
    unsigned = SignedRun(settings_bytes(settings), run_key().peer_id)
    signed = replace(unsigned, signature=run_key().sign(unsigned.signed_bytes()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exhibits, "RUN_ID", run_id(settings, run_key().peer_id))
        run = SmallRun(settings, num_peers=3)
        state, chain = run.snapshot(STAGE)
        anchor = Anchor.of_chain(chain, state_digest(state)).signed_by(run_key())
        chunks = tuple(bytes(chunk) for chunk in state_chunks(state))
        rounds, shown = [], []
        for number in range(ROUNDS):
            peers = enumerate(run.peers[STAGE])
            shown.append({one.peer_id: run.microbatch(10 * number + at, index=at)[STAGE] for at, one in peers})
            run.step(0)
            rounds.append(run.step(STAGE))
        genesis = Genesis(
            run_id=run_id(settings, run_key().peer_id),
            stage=STAGE,
            version=Version(0),
            state_digest=settings.initial_state_digests[STAGE],
            members=chain.members,
            leases=LeaseTable(),
            host=witness_identities(1)[0].peer_id,
            run_key=run_key().peer_id,
            neighbours=(),
            host_chain_end=HOST_CHAIN.end,
        )

        def prepared(root: Path) -> PreparedRun:
            data, host = cast(Any, SimpleNamespace(train_path=root / "train.tokens")), witness_identities(1)[0]
            folder, name = RunFolder(root), run_id(settings, run_key().peer_id)
            return PreparedRun(folder, settings, name, host, run_key(), signed, data, run.states, LeaseTable())

        yield Past6(prepared, signed, genesis, rounds, shown, anchor, chunks, run.peers[STAGE])


@dataclass
class Court:
    """A host with its justice, an auditor, and a target that answers as it likes."""

    past: Past6
    folder: Path
    network: MemoryNetwork = field(default_factory=lambda: MemoryNetwork(random.Random(0)))
    events: list[dict[str, Any]] = field(default_factory=list)
    told: list[Quarantine | Pardon] = field(default_factory=list)
    """What the auditor heard from the host."""
    serve: Served = lambda step: Message()
    heard: asyncio.Event = field(default_factory=asyncio.Event)

    def open(self) -> None:
        """(in a loop) Begin, or begin again with the ledger of before."""
        self.prepared = self.past.prepared(self.folder)
        self.ledger = Ledger(self.folder / "ledger.sqlite")
        self.host = GuardedTransport(self.network.transport(self.prepared.host_key))
        self.followed: dict[int, FollowedStage] = {}
        self.chains = {name: HashChain(seed, 64) for name, seed in SEEDS.items()}
        peers = (self.past.auditor, self.past.target)
        present = [identity.peer_id for identity in peers]
        beacon = HostBeacon(CHAINS, self.followed)
        self.justice = Justice(self.prepared, self.host, self.ledger, self.emit, lambda: present, self.followed, beacon)
        self.justice.serve()
        self.auditor, self.target = (self.network.transport(identity) for identity in peers)
        self.auditor.serve(QUARANTINE, self._on_quarantine, max_body_bytes=0)
        self.auditor.serve(PARDON, self._on_pardon, max_body_bytes=0)
        self.start_target()
        for name, identity in zip(SEEDS, peers, strict=True):
            self.justice.admit(identity.peer_id, STAGE, self.chains[name].end)
        self.followed[STAGE] = stage = FollowedStage(
            StageChain.begin(self.past.genesis, self.prepared.settings), self.prepared.settings
        )
        for done in self.past.rounds:
            stage.take(done.result)

    def start_target(self) -> MemoryTransport:
        self.target = self.network.transport(self.past.target)
        self.target.serve("ping", self._on_ping, max_body_bytes=0)
        self.target.serve(EXHIBIT, self._on_exhibit, max_body_bytes=0)
        self.target.serve(HOP, self._on_exhibit, max_body_bytes=0)
        return self.target

    async def owed(self, step: int, /, **changed: Any) -> Message:
        """The auditor's call about what the target did in a step."""
        owed = OwedAudit(
            run_id=self.prepared.run_id,
            stage=STAGE,
            step=Step(step),
            auditor=self.past.auditor.peer_id,
            target=self.past.target.peer_id,
            reveal=self.chains["auditor"].reveal(step),
            what="exhibit",
            number=int(self.past.contribution(step).work[0].microbatch_id),
            reason="no answer",
        )
        signed = replace(owed, **changed).signed_by(self.past.auditor)
        request = Message({"owed": signed.to_value()})
        return await self.auditor.call(self.host.peer_id, OWED, request, timeout_s=30.0, max_body_bytes=1 << 24)

    async def accuse(self, *evidence: bytes) -> None:
        """The auditor's accusations, each until it is judged and everyone has been told."""
        for body in evidence:
            self.heard.clear()
            await self.bring(body)
            await self.judge()

    async def bring(self, body: bytes) -> None:
        await self.auditor.call(self.host.peer_id, ACCUSE, accusation(body), timeout_s=30.0, max_body_bytes=0)

    async def judge(self) -> None:
        """Until something is said of what was brought."""
        judging = asyncio.ensure_future(self.justice.run())
        await asyncio.wait_for(self.heard.wait(), 10.0)
        for _ in range(100):  # a message of a MemoryNetwork takes some turns of the loop
            await asyncio.sleep(0)
        judging.cancel()
        await asyncio.gather(judging, return_exceptions=True)

    def open_again(self) -> None:
        """(in a loop) As another process of the host."""
        self.ledger.close()
        self.network = MemoryNetwork(random.Random(0))
        self.open()

    def emit(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        self.heard.set()

    @property
    def judged(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] in ("acquitted", "dismissed", "banned")]

    @property
    def quarantined(self) -> list[tuple[PeerId, str]]:
        return [(event["peer_id"], event["kind"]) for event in self.events if event["event"] == "quarantined"]

    def debts(self) -> int:
        return sum(1 for _ in self.ledger.events("debt"))

    async def _on_ping(self, sender: PeerId, request: Message) -> Message:
        return Message()

    async def _on_exhibit(self, sender: PeerId, request: Message) -> Message:
        assert sender == self.host.peer_id
        return self.serve(Fields("request of what is owed", request.meta).integer("step"))

    async def _on_quarantine(self, sender: PeerId, request: Message) -> Message:
        self.told.append(Quarantine.from_value(request.meta["quarantine"]))
        return Message()

    async def _on_pardon(self, sender: PeerId, request: Message) -> Message:
        self.told.append(Pardon.from_value(request.meta["pardon"]))
        return Message()


def withheld(step: int) -> Message:
    raise TransientError("not now")


@pytest.fixture
def court(past: Past6, tmp_path: Path) -> Court:
    return Court(past, tmp_path)


# -- audits owed ------------------------------------------------------------------------------------------


def test_what_the_target_shows_the_host_reaches_the_auditor_and_is_no_debt(court: Court) -> None:
    async def play() -> None:
        court.open()
        court.serve = court.past.served
        for step in (1, 2, 3, 4):
            reply = await court.owed(step)
            contribution = court.past.contribution(step)
            name = court.prepared.run_id
            found = read_exhibit(reply.meta, reply.body, contribution, contribution.work[0], run_id=name, num_stages=2)
            assert found.papers == court.past.shown[step][contribution.peer_id].papers
        assert court.debts() == 0
        assert court.quarantined == []

    asyncio.run(play())


@pytest.mark.parametrize("lie", ["silence", "junk", "another step's"])
def test_three_steps_that_are_not_shown_to_the_host_either_end_in_quarantine(court: Court, lie: str) -> None:
    answers: dict[str, Served] = {
        "silence": withheld,
        "junk": lambda step: Message({"papers": 7, "sizes": []}),
        "another step's": lambda step: court.past.served(step + 1),
    }

    async def play() -> None:
        court.open()
        court.serve = answers[lie]
        for step in (1, 1, 2):
            with pytest.raises(RemoteError, match="owes exhibit") as raised:
                await court.owed(step)
            assert raised.value.kind == "debt"
        assert court.quarantined == [], "two steps, one of them twice, are not three"
        with pytest.raises(RemoteError, match="owes exhibit"):
            await court.owed(3)
        await court.justice.told()
        target = court.past.target.peer_id
        assert court.quarantined == [(target, "withholding")]
        assert [one.peer_id for one in court.told] == [target]
        assert isinstance(court.told[0], Quarantine)
        court.told[0].check(court.prepared.run_id, run_key().peer_id)
        with pytest.raises(RemoteError, match="banned"):
            await court.target.call(court.host.peer_id, OWED, Message(), timeout_s=5.0, max_body_bytes=0)

    asyncio.run(play())


def test_who_shows_what_its_header_was_made_from_owes_nothing(court: Court) -> None:
    async def play() -> None:
        court.open()
        court.serve, settings = court.past.served_hop, court.prepared.settings
        for step in (1, 2, 3, 4):
            owed = court.past.hop(step)
            reply = await court.owed(step, **owed)
            claim = read_hop(reply.meta, reply.body, owed["header"], settings, run_id=court.prepared.run_id)
            assert claim.header == owed["header"]
        assert court.debts() == 0

    asyncio.run(play())


@pytest.mark.parametrize("lie", ["silence", "junk", "another step's", "without what came in"])
def test_three_headers_over_what_nobody_shows_end_in_quarantine(court: Court, lie: str) -> None:
    past = court.past
    answers: dict[str, Served] = {
        "silence": withheld,
        "junk": lambda step: Message({"exchanges": 7}),
        "another step's": lambda step: past.served_hop(step + 1),
        "without what came in": lambda step: message_of([]),
    }

    async def play() -> None:
        court.open()
        court.serve = answers[lie]
        for step in (1, 2, 3):
            assert court.quarantined == []
            with pytest.raises(RemoteError, match="owes hop") as raised:
                await court.owed(step, **past.hop(step))
            assert raised.value.kind == "debt"
        assert court.quarantined == [(past.target.peer_id, "withholding")]

    asyncio.run(play())


def test_a_crash_after_a_header_is_no_debt(court: Court) -> None:
    async def play() -> None:
        court.open()
        court.serve = withheld
        court.network.kill(court.past.target.peer_id)
        with pytest.raises(TransientError):
            await court.owed(1, **court.past.hop(1))
        court.start_target()
        court.justice.admit(court.past.target.peer_id, STAGE, court.chains["target"].end)  # at version 6
        for step in (1, 2, 3):
            with pytest.raises(TransientError, match="has begun at version 6"):
                await court.owed(step, **court.past.hop(step))
        assert court.debts() == 0

    asyncio.run(play())


def test_a_header_that_an_honest_peer_need_not_keep_is_no_debt(court: Court) -> None:
    """Of an evaluation, of another step, of another peer, under another birth record, or not its own at all."""
    past = court.past

    async def play() -> None:
        court.open()
        court.serve = withheld
        owed, other = past.hop(1), past.hop(2)
        auditors = past.shown[1][past.auditor.peer_id].papers
        evaluated = replace(owed["birth"], kind="evaluate").signed_by(named(owed["birth"].source))
        for changed in (
            owed | {"birth": evaluated},
            owed | {"birth": other["birth"]},
            owed | {"header": other["header"]},
            owed | {"header": replace(owed["header"], signature=bytes(64))},
            owed | {"birth": auditors.birth, "header": auditors.gradient_out},
            owed | {"birth": None},
            owed | {"header": None},
            other,
        ):
            with pytest.raises(RemoteError) as raised:
                await court.owed(1, **changed)
            assert raised.value.kind in ("papers", "draw", "signature"), changed
        assert court.debts() == 0

    asyncio.run(play())


@pytest.mark.parametrize("what", ["exhibit", "hop"])
def test_an_auditor_that_asks_again_for_what_it_was_shown_makes_no_debt(court: Court, what: str) -> None:
    past = court.past

    def show_once(step: int) -> Message:
        court.serve = withheld
        return past.served(step) if what == "exhibit" else past.served_hop(step)

    async def play() -> None:
        court.open()
        court.serve = show_once
        changed = {} if what == "exhibit" else past.hop(1)
        answers = await asyncio.gather(*(court.owed(1, **changed) for _ in range(4)), return_exceptions=True)
        assert sorted(getattr(one, "kind", "shown") for one in answers) == ["served"] * 3 + ["shown"]
        for _ in range(3):
            with pytest.raises(RemoteError, match="owes it no more") as raised:
                await court.owed(1, **changed)
            assert raised.value.kind == "served"
        assert court.debts() == 0

    asyncio.run(play())


def test_a_quarantine_outlasts_the_host_and_ends_with_a_pardon(court: Court) -> None:
    async def play() -> None:
        court.open()
        court.serve = withheld
        target = court.past.target.peer_id
        for step in (1, 2, 3):
            with pytest.raises(RemoteError):
                await court.owed(step)
        await court.justice.told()
        court.ledger.close()

        court.open()
        assert set(court.justice.quarantines) == {target}
        await court.justice.pardon(target, acquitted=False)
        await court.justice.told()
        assert [type(one) for one in court.told] == [Quarantine, Pardon]
        court.serve = court.past.served
        await court.owed(4)
        with pytest.raises(LocalError, match="is not quarantined"):
            await court.justice.pardon(target, acquitted=False)
        court.ledger.close()
        court.open()
        assert court.justice.quarantines == {}

    asyncio.run(play())


def test_a_long_ledger_is_folded_at_once_when_the_host_begins_again(
    court: Court, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with a copy of the table, a host of many peers would take ever longer to begin."""
    folded, fold = [], StandingTable.after_all

    def counted(table: StandingTable, events: Any) -> StandingTable:
        taken = list(events)
        folded.append(len(taken))
        return fold(table, taken)

    async def play() -> None:
        court.open()
        peers = [PeerId(f"peer-{number}") for number in range(50)]
        for number, peer in enumerate(peers):
            promotion = Promotion(court.prepared.run_id, peer, STAGE, Version(number))
            court.ledger.append("promotion", promotion.signed_by(court.prepared.run_key).to_value())
        court.ledger.close()

        monkeypatch.setattr(StandingTable, "after_all", counted)
        court.open()
        assert all(court.justice.may_train(peer) for peer in peers)
        assert folded == [len(peers)]
        court.ledger.close()

    asyncio.run(play())


def test_a_crash_is_no_debt(court: Court) -> None:
    async def play() -> None:
        court.open()
        court.network.kill(court.past.target.peer_id)
        for step in (1, 2, 3):
            with pytest.raises(TransientError):
                await court.owed(step)
        assert court.debts() == 0

    asyncio.run(play())


def test_what_was_lost_in_the_first_crash_is_no_debt(court: Court) -> None:
    async def play() -> None:
        court.open()
        court.serve = withheld
        court.justice.admit(court.past.target.peer_id, STAGE, court.chains["target"].end)  # at version 6
        with pytest.raises(TransientError, match="has begun at version 6"):
            await court.owed(2)
        assert court.debts() == 0

    asyncio.run(play())


class Followed:
    """The stage at whatever version."""

    def __init__(self, inner: Any, version: int) -> None:
        self._inner = inner
        self.version = version

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_being_admitted_again_and_again_does_not_help(court: Court) -> None:
    async def play() -> None:
        court.open()
        court.serve = withheld
        stage = Followed(court.followed[STAGE], 0)
        followed: Any = {STAGE: stage}
        justice = Justice(
            court.prepared, court.host, court.ledger, court.events.append, list, followed, HostBeacon(CHAINS, followed)
        )
        justice.serve()
        for version in (0, 1, 2, 6):
            stage.version = version
            justice.admit(court.past.target.peer_id, STAGE, court.chains["target"].end)
        with pytest.raises(RemoteError, match="owes"):
            await court.owed(2)
        assert court.debts() == 1

    asyncio.run(play())


def test_who_asks_for_admission_again_and_misses_no_round_owes_what_it_owed(court: Court) -> None:
    async def play() -> None:
        court.open()
        court.serve = withheld
        stage = Followed(court.followed[STAGE], 0)
        followed: Any = {STAGE: stage}
        beacon = HostBeacon(CHAINS, followed)
        justice = Justice(court.prepared, court.host, court.ledger, court.events.append, list, followed, beacon)
        justice.serve()
        for version in (0, 4, 6):  # its contributions are in rounds 3, 4 and 5
            stage.version = version
            justice.admit(court.past.target.peer_id, STAGE, court.chains["target"].end)
        with pytest.raises(RemoteError, match="owes"):
            await court.owed(3)
        assert court.debts() == 1

    asyncio.run(play())


def test_who_was_admitted_before_the_host_began_again_owes_what_came_since(court: Court) -> None:
    """It was asked for nothing any more, however much it withheld."""

    class Since(Followed):
        """Its older results are gone with the process that had them."""

        def roster(self, step: int) -> Any:
            return self._inner.roster(step) if step >= 2 else None

    async def play() -> None:
        court.open()
        court.serve = withheld
        stage = Since(court.followed[STAGE], 2)
        followed: Any = {STAGE: stage}
        beacon = HostBeacon(CHAINS, followed)
        Justice(court.prepared, court.host, court.ledger, court.events.append, list, followed, beacon).serve()
        stage.version = ROUNDS
        with pytest.raises(TransientError, match="has begun at version 2"):
            await court.owed(2)
        with pytest.raises(RemoteError, match="owes"):
            await court.owed(3)
        assert court.debts() == 1

    asyncio.run(play())


def test_a_withdrawal_outlasts_the_host(court: Court) -> None:
    async def play() -> None:
        court.open()
        target = court.past.target.peer_id
        request = Message({"version": ROUNDS})
        await court.target.call(court.host.peer_id, WITHDRAW, request, timeout_s=5.0, max_body_bytes=0)
        assert court.justice.stated.has_withdrawn(target, ROUNDS)
        court.ledger.close()
        court.open()
        assert court.justice.stated.has_withdrawn(target, ROUNDS)
        assert not court.justice.stated.has_withdrawn(court.past.auditor.peer_id, 0)
        court.ledger.close()

    asyncio.run(play())


@pytest.mark.parametrize(
    ("changed", "error", "match"),
    [
        ({"reveal": bytes(32)}, RemoteError, "not on the chain"),
        ({"number": 999}, RemoteError, "not drawn"),
        ({"what": "part", "number": 99}, RemoteError, "not drawn"),
        ({"run_id": "another"}, RemoteError, "another"),
        ({"step": Step(40)}, TransientError, "not known here"),
        ({"target": "nobody"}, TransientError, "nobody has begun at version None"),
        ({"stage": StageIndex(0)}, TransientError, "not known here"),
    ],
)
def test_what_was_not_drawn_is_no_debt(
    court: Court, changed: dict[str, Any], error: type[Exception], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bootstrap.audit.owed_audits.REVEAL_WAITS", 1)

    async def play() -> None:
        court.open()
        court.serve = withheld
        with pytest.raises(error, match=match):
            await court.owed(1, **changed)
        assert court.debts() == 0

    asyncio.run(play())


@pytest.mark.parametrize("all_over", [True, False])
def test_an_accused_that_does_not_answer_keeps_no_other_case_waiting(
    court: Court, all_over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its ban nor the question whether it can do its work again is waited for."""
    monkeypatch.setattr(justice, "TELL_S", 60.0)
    is_over = asyncio.Event()

    async def never(sender: PeerId, request: Message) -> Message:
        await is_over.wait()
        return Message()

    async def play() -> None:
        court.open()
        for method in (BAN, PLEA):
            court.target.serve(method, never, max_body_bytes=1 << 24)
        case = wrong_work(court.past, 1, all_over=all_over)
        judging = asyncio.ensure_future(court.justice.run())
        began = time.monotonic()
        for body in (case.to_evidence(court.past.signed).to_bytes(), court.past.untrue(2)):
            while time.monotonic() < began + justice.TELL_S:  # one place an accuser
                with contextlib.suppress(TransientError):
                    await court.auditor.call(
                        court.host.peer_id, ACCUSE, accusation(body), timeout_s=30.0, max_body_bytes=0
                    )
                    break
                await asyncio.sleep(0.01)
        while not court.judged:
            await asyncio.wait_for(court.heard.wait(), justice.TELL_S)
            court.heard.clear()
        assert time.monotonic() < began + justice.TELL_S
        assert [event["event"] for event in court.judged] == ["banned" if all_over else "acquitted"]
        is_over.set()
        judging.cancel()
        await asyncio.gather(judging, return_exceptions=True)

    asyncio.run(play())


# -- untrue accusations -----------------------------------------------------------------------------------


def test_three_untrue_accusations_keep_the_accuser_out(court: Court) -> None:
    async def play() -> None:
        court.open()
        first, second, third = (court.past.untrue(step) for step in (1, 2, 3))
        await court.accuse(first)
        with pytest.raises(RemoteError, match="judged already"):
            await court.bring(first)
        await court.accuse(second)
        assert [event["event"] for event in court.judged] == ["acquitted"] * 2
        assert court.quarantined == [], "one of them was brought twice"
        await court.accuse(third)
        assert court.quarantined == [(court.past.auditor.peer_id, "false_accusation")]
        assert court.justice.bans == {}
        with pytest.raises(RemoteError, match="banned"):
            await court.accuse(first)

    asyncio.run(play())


def _leaning(past: Past6, step: int, share: float) -> bytes:
    """A contribution of the target to one step; by this share of it off, the same way in every step."""
    made = past.contribution(step)
    parts, digests = [], []
    for part in past.rounds[step].parts[past.target.peer_id]:
        values = np.frombuffer(part, dtype=np.float32)
        signs = np.where(np.arange(values.size) % 3 == 0, np.float32(1), np.float32(-1))
        rms = np.float32(np.sqrt(np.mean(np.square(values))))
        parts.append((values + np.float32(share) * rms * signs).astype(np.float32).tobytes())
        digests.append(bulk_digest(parts[-1]))
    unsigned = replace(made, part_digests=tuple(digests))
    signed = replace(unsigned, signature=past.target.sign(unsigned.signed_bytes()))
    whole = ReplayMismatch.from_evidence(Evidence.from_bytes(past.untrue(step), max_bytes=1 << 26))
    return Bias.of(replace(whole, contribution=signed, parts=tuple(parts))).to_evidence(past.signed).to_bytes()


def test_contributions_that_lead_one_way_add_up_to_a_quarantine(court: Court, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_bias, "MOST_SPREADS", 6.0)  # fewer audits are enough

    async def play() -> None:
        court.open()
        for step in range(1, ROUNDS):
            if court.quarantined:
                break
            await court.accuse(_leaning(court.past, step, 3e-4))
        leaning = [event for event in court.events if event["event"] == "leaning"]
        *before, last = [event["share_of_law"] for event in leaning]
        assert before, "one audit is no law"
        assert max(before) <= 1.0 < last
        assert [event["replays"] for event in leaning] == [*range(1, len(leaning) + 1)]
        assert court.quarantined == [(court.past.target.peer_id, "bias")], court.events
        assert court.judged == []
        assert court.justice.bans == {}

    asyncio.run(play())


def test_who_brings_honest_contributions_as_biased_is_struck(court: Court) -> None:
    async def play() -> None:
        court.open()
        for step in (1, 2, 3):
            await court.accuse(_leaning(court.past, step, 0.0))
        assert [event["event"] for event in court.judged] == ["acquitted"] * 3
        assert court.quarantined == [(court.past.auditor.peer_id, "false_accusation")]

    asyncio.run(play())


def test_what_is_wrong_by_itself_is_no_case_of_bias_for_its_maker_may_have_had_a_fault(court: Court) -> None:
    async def play() -> None:
        court.open()
        await court.accuse(_leaning(court.past, 1, 0.5))
        assert [event["event"] for event in court.judged] == ["dismissed"]
        assert court.quarantined == []

    asyncio.run(play())


def test_the_same_evidence_brought_by_many_in_one_moment_is_filed_whole_and_once(court: Court) -> None:
    async def play() -> None:
        court.open()
        body = court.past.untrue(1)
        bring = (court.auditor, court.target) * 4
        calls = (
            one.call(court.host.peer_id, ACCUSE, accusation(body), timeout_s=30.0, max_body_bytes=0) for one in bring
        )
        await asyncio.gather(*calls)
        (path,) = (court.prepared.folder.root / "unjudged").iterdir()
        assert path.read_bytes() == body

    asyncio.run(play())


def test_what_a_host_has_taken_and_not_judged_its_next_process_judges(court: Court) -> None:
    """Its accuser is done, and would be struck for a charge without a case."""

    async def play() -> None:
        court.open()
        await court.bring(court.past.untrue(1))
        assert court.judged == []
        court.open_again()
        await court.judge()
        assert [(event["event"], event["accuser"]) for event in court.judged] == [
            ("acquitted", court.past.auditor.peer_id)
        ]
        assert [*(court.prepared.folder.root / "unjudged").iterdir()] == []

    asyncio.run(play())


def test_a_verdict_that_the_disk_does_not_take_is_found_again(court: Court, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        court.open()
        case = wrong_work(court.past, 1, all_over=True).to_evidence(court.past.signed).to_bytes()
        with monkeypatch.context() as full:

            def append(*given: object, **named: object) -> bool:
                court.heard.set()
                raise full_disk(court.folder)

            full.setattr(court.ledger, "append", append)
            await court.accuse(case)
            assert court.judged == []
        court.open_again()
        court.heard.clear()
        await court.judge()
        assert [event["event"] for event in court.judged] == ["banned"]
        kept.append(court.judged[0]["evidence"])

    kept: list[str] = []
    asyncio.run(play())
    assert Evidence.from_bytes(Path(kept[0]).read_bytes(), max_bytes=1 << 26).accused == court.past.target.peer_id


def test_evidence_that_the_judge_breaks_on_costs_that_case_alone(court: Court, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended the host: whoever has a ticket may bring a file."""

    def breaks(*given: object, **named: object) -> None:
        raise ValueError("array is too big")

    async def play() -> None:
        court.open()
        with monkeypatch.context() as broken:
            broken.setattr("bootstrap.audit.justice.judge", breaks)
            await court.accuse(court.past.untrue(1))
        await court.accuse(court.past.untrue(2))
        assert [event["event"] for event in court.judged] == ["dismissed", "acquitted"]
        assert court.quarantined == []

    asyncio.run(play())


def test_strikes_count_within_a_hundred_versions_and_until_the_pardon() -> None:
    accuser = PeerId("accuser")
    evidence = [hashlib.sha256(bytes([number])).digest() for number in range(6)]

    def struck(*versions: int) -> Strikes:
        strikes = Strikes()
        for version, found in zip(versions, evidence, strict=False):
            strikes = strikes.after(accuser, Version(version), found)
        return strikes

    assert not struck(1, 2).are_too_many(accuser)
    assert struck(1, 1, 1).are_too_many(accuser)
    assert struck(1, 50, STRIKE_VERSIONS).are_too_many(accuser)
    assert not struck(1, 50, STRIKE_VERSIONS + 1).are_too_many(accuser)
    assert struck(1, 90, 150, 180).are_too_many(accuser)
    assert not struck(1, 50, 60).are_too_many(accuser, pardoned_at=1)
    assert not struck(1, 2, 3).are_too_many(PeerId("another"))


# -- faults, juries, probation ------------------------------------------------------------------------------


def wrong_work(past: Past6, step: int, *, all_over: bool = False) -> ReplayMismatch:
    """What the target really did in a step, but for its contribution: in that it signed it negated a few values."""
    true = ReplayMismatch.from_evidence(Evidence.from_bytes(past.untrue(step), max_bytes=1 << 26))
    parts = [np.frombuffer(part, dtype="<f4").copy() for part in true.parts]
    for part in parts:
        largest = np.argsort(np.abs(part))[0 if all_over else -5 :]
        part[largest] *= -1
    lies = tuple(part.tobytes() for part in parts)
    unsigned = replace(true.contribution, part_digests=tuple(bulk_digest(lie) for lie in lies))
    signed = replace(unsigned, signature=past.target.sign(unsigned.signed_bytes()))
    return replace(true, contribution=signed, parts=lies)


def plea_of(court: Court, case: ReplayMismatch, evidence: Evidence, bodies: Sequence[bytes]) -> Message:
    digests = tuple(bulk_digest(body) for body in bodies)
    plea = Plea(court.prepared.run_id, case.accused, STAGE, evidence.version, evidence.digest(), digests)
    sizes: list[Value] = [len(body) for body in bodies]
    return Message({"plea": plea.signed_by(court.past.target).to_value(), "sizes": sizes}, b"".join(bodies))


def pleading(court: Court, case: ReplayMismatch, bodies: Sequence[bytes]) -> None:
    """The target answers the host that its work comes to this now."""

    async def on_plea(sender: PeerId, request: Message) -> Message:
        evidence = Evidence.from_bytes(request.body, max_bytes=1 << 26)
        assert ReplayMismatch.from_evidence(evidence) == case.without_past()
        return plea_of(court, case, evidence, bodies)

    court.target.serve(PLEA, on_plea, max_body_bytes=1 << 26)


def test_who_does_its_work_again_rightly_had_a_fault_and_begins_again(court: Court) -> None:
    async def play() -> None:
        court.open()
        target = court.past.target.peer_id

        async def accuse(step: int) -> None:
            case = wrong_work(court.past, step)
            pleading(court, case, [bytes(part) for part in court.past.rounds[step].parts[target]])
            await court.accuse(case.to_evidence(court.past.signed).to_bytes())

        async def come_back() -> Pardon:
            reply = await court.target.call(court.host.peer_id, RETURN, Message(), timeout_s=5.0, max_body_bytes=0)
            return Pardon.from_value(reply.meta["pardon"])

        await accuse(1)
        assert court.quarantined == [(target, FAULT)]
        await accuse(2)
        pardon = await come_back()
        pardon.check(court.prepared.run_id, run_key().peer_id)
        assert not pardon.acquitted
        assert not court.justice.may_train(target)
        await accuse(3)
        assert court.quarantined == [(target, FAULT)], "what came before the pardon is the same fault"
        assert {event["event"] for event in court.judged} == {"dismissed"}
        with pytest.raises(RemoteError, match="not out for a fault"):
            await come_back()

    asyncio.run(play())


def test_two_cases_of_one_broken_machine_are_both_true(court: Court) -> None:
    """The second comes while it does its work again: whoever brought it was struck, sixteen versions later."""

    async def play() -> None:
        court.open()
        first, second = (wrong_work(court.past, step) for step in (1, 2))
        pleading(court, first, [bytes(part) for part in court.past.rounds[1].parts[first.accused]])
        justice = court.justice
        charge = charge_of(second.to_evidence(court.past.signed))
        assert charge is not None
        justice._pleading[second.accused] = []
        brought = court.prepared.folder.root / "brought"
        brought.write_bytes(second.to_evidence(court.past.signed).to_bytes())
        await justice._judge(court.past.auditor.peer_id, brought)
        assert justice._pleading.pop(second.accused) == [charge]
        await court.accuse(first.to_evidence(court.past.signed).to_bytes())
        assert court.quarantined == [(first.accused, FAULT)]
        assert [*(court.prepared.folder.root / "unjudged").iterdir()] == []

    asyncio.run(play())


def test_nobody_makes_a_fault_of_what_it_is_out_for(court: Court) -> None:
    """An accomplice brings a small fault of a peer that leans one way: it came back as if that had been all."""

    async def play() -> None:
        court.open()
        case = wrong_work(court.past, 1)
        pleading(court, case, [bytes(part) for part in court.past.rounds[1].parts[case.accused]])
        court.justice._keep_out(case.accused, STAGE, Version(1), Bias.KIND, bytes(32), "all of it leads one way")
        await court.accuse(case.to_evidence(court.past.signed).to_bytes())
        await court.judge()
        assert court.quarantined == [(case.accused, Bias.KIND)]
        assert court.justice.quarantines[case.accused].kind == Bias.KIND
        with pytest.raises(RemoteError, match="not out for a fault"):
            await court.target.call(court.host.peer_id, RETURN, Message(), timeout_s=5.0, max_body_bytes=0)

    asyncio.run(play())


def test_who_is_asked_again_or_needs_the_weights_that_it_worked_on_is_heard(
    court: Court, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One broken stream made a broken machine a liar, and so did a judgement that took longer than weights are kept."""
    monkeypatch.setattr(pleas, "ASK_AGAIN_S", 0.01)

    async def play() -> None:
        court.open()
        case = wrong_work(court.past, 1)
        assert case.past is not None
        shown: list[bool] = []

        async def on_plea(sender: PeerId, request: Message) -> Message:
            evidence = Evidence.from_bytes(request.body, max_bytes=1 << 26)
            shown.append(ReplayMismatch.from_evidence(evidence).past is not None)
            if len(shown) == 1:
                raise TransientError("not now")
            if not shown[-1]:
                raise RemoteError(PAST_IS_GONE, "no snapshot is held", sender)
            return plea_of(court, case, evidence, [bytes(part) for part in court.past.rounds[1].parts[case.accused]])

        court.target.serve(PLEA, on_plea, max_body_bytes=1 << 26)
        await court.accuse(case.to_evidence(court.past.signed).to_bytes())
        assert shown == [False, False, True]
        assert court.quarantined == [(case.accused, FAULT)]

    asyncio.run(play())


@pytest.mark.parametrize("plea", ["the same again", "of another key", "too little", "none"])
def test_who_does_not_do_its_work_again_rightly_lied(court: Court, monkeypatch: pytest.MonkeyPatch, plea: str) -> None:
    monkeypatch.setattr(pleas, "ASK_TIMES_S", 0.0)

    async def play() -> None:
        court.open()
        case = wrong_work(court.past, 1)
        honest = [bytes(part) for part in court.past.rounds[1].parts[case.accused]]
        if plea == "the same again":
            pleading(court, case, [bytes(part) for part in case.parts])
        elif plea == "of another key":
            auditor, _, third = court.past.members
            court.past = replace(court.past, members=[auditor, auditor, third])
            pleading(court, case, honest)
        elif plea == "too little":
            pleading(court, case, [])
        await court.accuse(case.to_evidence(court.past.signed).to_bytes())
        assert [event["event"] for event in court.judged] == ["banned"]
        assert court.quarantined == []

    asyncio.run(play())


def test_who_lies_all_over_is_banned_though_it_pleads(court: Court) -> None:
    async def play() -> None:
        court.open()
        case = wrong_work(court.past, 1, all_over=True)
        pleading(court, case, [bytes(part) for part in court.past.rounds[1].parts[case.accused]])
        await court.accuse(case.to_evidence(court.past.signed).to_bytes())
        assert [event["event"] for event in court.judged] == ["banned"]
        assert court.quarantined == []

    asyncio.run(play())


def test_a_debt_is_told_and_the_debtor_is_no_member_until_it_is_promoted(court: Court) -> None:
    async def play() -> None:
        court.open()
        court.justice.anchor_genesis(STAGE, court.followed[STAGE], bytes(32))
        target = court.past.target.peer_id
        assert court.justice.may_train(target)
        shown = Promotion.from_value(court.justice.papers_for(target)["promotion"])
        shown.check(court.prepared.run_id, run_key().peer_id)
        assert shown.peer_id == target, "a founder may show itself elsewhere"
        court.serve = withheld
        with pytest.raises(RemoteError):
            await court.owed(1)
        assert not court.justice.may_train(target)
        debts = court.justice.papers_for(court.past.auditor.peer_id)["debts"]
        assert isinstance(debts, list)
        assert court.justice.papers_for(target)["promotion"] is None
        debt = Debt.from_value(debts[0])
        debt.check(court.prepared.run_id, run_key().peer_id)
        assert (debt.peer_id, debt.version) == (target, 1)
        court.ledger.close()
        court.open()
        assert not court.justice.may_train(target), "the ledger keeps it"

    asyncio.run(play())


# -- in a running swarm -----------------------------------------------------------------------------------


@pytest.mark.soak
def test_a_peer_that_withholds_is_quarantined_and_the_others_train_on(tmp_path: Path) -> None:
    manifest = manifest_of(
        run={"trust": "public"},
        audits={"hop_budget": 0.0, "contribution_budget": 8.0, "retained_versions": 12, "agreements_to_promote": 0},
        optimizer={"total_steps": 10},
        batch={"target_tokens": 6 * 32},
        limits={"founders_per_stage": 3},
        checkpoint={"every_steps": 10, "snapshot_every": 5},
    )
    liar = identity_of(5).peer_id

    async def train() -> tuple[list[dict[str, Any]], dict[str, Any]]:
        async with swarm_in_process(
            manifest, tmp_path, peers=(3, 3), attacks={(1, 2): "withholding@1"}, evaluate_tokens=64
        ) as swarm:
            report = await swarm.finished()
            return swarm.events, report

    events, report = asyncio.run(train())
    verdicts = [event for event in events if event["event"] in ("quarantined", "banned", "acquitted", "dismissed")]
    assert [(event["event"], event["peer_id"]) for event in verdicts] == [("quarantined", liar)]
    assert verdicts[0]["kind"] == "withholding"
    assert verdicts[0]["stage"] == 1
    assert report["steps"] == 10
    assert {"signature", "digest", "malformed"}.isdisjoint(report["screens"]), report["screens"]
    assert liar not in report["state_digests"]["1"]


def test_a_host_that_was_away_follows_on_from_what_it_wrote_down(past: Past6, tmp_path: Path) -> None:
    settings = replace(past.prepared(tmp_path).settings, checkpoint=CheckpointSettings(every_steps=2, snapshot_every=2))
    ledger = Ledger(tmp_path / "ledger.sqlite")
    network = MemoryNetwork(random.Random(0))
    results = [done.result for done in past.rounds]

    async def on_results(sender: PeerId, request: Message) -> Message:
        start = Fields("results request", request.meta).integer("from")
        some: list[Value] = [result.to_value() for result in results[start : start + MAX_RESULTS_PER_CALL]]
        return Message({"version": len(results), "oldest": 0, "results": some})

    async def follow() -> None:
        host, peer = network.transport(witness_identities(1)[0]), network.transport(past.auditor)
        peer.serve(RESULTS, on_results, max_body_bytes=0)
        before = Following(settings, ledger, host, lambda certified: None)
        ledger.append("genesis", replace(past.genesis, signature=bytes(64)).to_value())
        before.begin(past.genesis)
        for result in (*results[:2], results[3]):  # one does not come: what is after it waits
            before.take(result)
        assert before[STAGE].version == 2
        again = Following(settings, ledger, host, lambda certified: None)
        again.take_up()
        assert again[STAGE].version == 2, "what was written down at the version of a snapshot"
        await again.catch_up(STAGE, [(2, peer.peer_id)])
        assert again[STAGE].version == 2, "what is under way is waited for"
        await again.catch_up(STAGE, [(len(results), peer.peer_id)])
        assert again[STAGE].version == len(results)
        assert again[STAGE].chain == followed_throughout(past, settings)
        for transport in (host, peer):
            await transport.close()

    asyncio.run(follow())
    ledger.close()


def followed_throughout(past: Past6, settings: RunSettings) -> StageChain:
    """The chain that a host has which missed nothing."""
    stage = FollowedStage(StageChain.begin(past.genesis, settings), settings)
    for done in past.rounds:
        stage.take(done.result)
    return stage.chain
