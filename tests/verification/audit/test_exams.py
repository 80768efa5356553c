"""Exams: who may ask for what, how often, and that a wrong answer earns nothing."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from peer.audit.exams import EXAMS_A_STEP, Examiner
from peer.pipeline.exchange_store import ExchangeStore
from peer.round.stage_steps import StageSteps
from peer.stage.bases import RecentBases
from peer.stage.beacon import StageBeacon
from peer.stage.events import Events
from swarm.core.audit.beacon import Beacon
from swarm.core.audit.ticket import Ticket
from swarm.core.canonical import Value
from swarm.core.errors import RemoteError, TransientError
from swarm.core.ids import PeerId, StageIndex
from swarm.identity.key import Identity
from swarm.network.transport import Message
from tests.swarm.core.audit.chances import HOST_CHAIN, said_by
from tests.swarm.core.round.round_world import run_key
from tests.verification.exhibits import RUN_ID, SmallRun, received, small_settings
from verification.audit.probation import Agreement, exam_of
from verification.round.papers import Exhibit

STAGE = StageIndex(1)
NEWCOMERS = [Identity.from_seed(bytes([200 + number]) * 32) for number in range(EXAMS_A_STEP + 1)]
SAID = said_by(HOST_CHAIN, 1)


def ticket_of(number: int, stage: StageIndex = STAGE) -> Ticket:
    return Ticket(RUN_ID, NEWCOMERS[number].peer_id, stage, bytes(32)).signed_by(run_key())


class Exact:
    """An exact thread that is this one."""

    async def run(self, urgency: object, work: Any) -> Any:
        return work()


class Hall:
    """The examiner of a stage with one member, after one round."""

    def __init__(self) -> None:
        run = SmallRun(small_settings(2, trust="public"), num_peers=1)
        self.exhibit: Exhibit = run.microbatch(0)[STAGE]
        run.step(0)
        done = run.step(STAGE)
        self.result, self.basis = done.result, done.chain.basis
        self.bases = RecentBases(done.chain, kept=4)
        identity = run.peers[STAGE][0]
        store = ExchangeStore.of_run(run.settings, run.peers[STAGE][0].peer_id)
        store.keep(received(self.exhibit))
        context = SimpleNamespace(
            settings=run.settings,
            run_id=RUN_ID,
            identity=identity,
            me=identity.peer_id,
            results={0: (self.result, [])},
            exact=Exact(),
            events=Events(),
        )
        chain, replica = run.chains[STAGE], run.replicas[STAGE][0]
        self.steps = cast(
            StageSteps, SimpleNamespace(context=context, chain=chain, version=chain.version, replica=replica)
        )
        self.exchanges = store
        self.examiner = self.new_examiner()
        self.settings = run.settings

    def new_examiner(self) -> Examiner:
        """A member that has examined nobody yet, nor heard of the host."""
        beacon = StageBeacon(self.steps, cast(Any, None), cast(Any, None), run_key().peer_id)
        return Examiner(self.steps, self.exchanges, self.bases, beacon)

    def ask(self, number: int, /, **changed: Any) -> Message:
        """A newcomer's request about step 0, answered."""
        newcomer = NEWCOMERS[number]
        meta: dict[str, Value] = {"step": 0, "said": SAID.to_value(), "ticket": ticket_of(number).to_value()}
        meta |= changed
        return asyncio.run(self.examiner._on_exam(newcomer.peer_id, Message(meta)))

    def answer(self, number: int, bodies: Sequence[bytes], *, step: int = 0) -> Message:
        meta: dict[str, Value] = {"step": step, "size": len(bodies[0])}
        return asyncio.run(self.examiner._on_answer(NEWCOMERS[number].peer_id, Message(meta, b"".join(bodies))))


@pytest.fixture(scope="module")
def made() -> Hall:
    return Hall()


@pytest.fixture
def hall(made: Hall) -> Hall:
    """With a member that has examined nobody yet."""
    made.examiner = made.new_examiner()
    return made


def test_a_newcomer_that_answers_as_the_member_did_gets_its_agreement(hall: Hall) -> None:
    shown = hall.ask(0)
    assert bytes(shown.body) == bytes(hall.exhibit.x) + bytes(hall.exhibit.targets) + bytes(hall.exhibit.grad_y)
    reply = hall.answer(0, [bytes(hall.exhibit.y), bytes(hall.exhibit.grad_x)])
    beacon = Beacon.of(hall.result.roster, SAID)
    agreement = Agreement.from_value(cast(dict[str, Value], reply.meta)["agreement"])
    agreement.check(run_id=RUN_ID, ticket=ticket_of(0), roster=hall.result.roster, basis=hall.basis, beacon=beacon)
    with pytest.raises(RemoteError, match="owes no answer"):
        hall.answer(0, [bytes(hall.exhibit.y), bytes(hall.exhibit.grad_x)])


def test_a_wrong_answer_earns_nothing_and_there_is_no_second(hall: Hall) -> None:
    hall.ask(0)
    wrong = (-np.frombuffer(hall.exhibit.grad_x, dtype="<f4")).tobytes()
    with pytest.raises(RemoteError) as caught:
        hall.answer(0, [b"", wrong])
    assert caught.value.kind == "exam"
    with pytest.raises(RemoteError, match="owes no answer"):
        hall.answer(0, [b"", bytes(hall.exhibit.grad_x)])


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"step": 1}, TransientError),
        ({"step": 1 << 40}, TransientError),
        ({"said": said_by(HOST_CHAIN, 0).to_value()}, TransientError),
        ({"said": [1, bytes(32)]}, RemoteError),
        ({"said": said_by(HOST_CHAIN, 2).to_value()[:1]}, RemoteError),
        (
            {"ticket": ticket_of(1).to_value()},
            RemoteError,
        ),
        ({"ticket": replace(ticket_of(0), signature=bytes(64)).to_value()}, RemoteError),
        (
            {"ticket": Ticket(RUN_ID, NEWCOMERS[0].peer_id, StageIndex(0), bytes(32)).signed_by(run_key()).to_value()},
            RemoteError,
        ),
    ],
)
def test_nothing_is_shown_to_others_or_of_what_was_not_drawn(
    hall: Hall, changed: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        hall.ask(0, **changed)
    assert not any(hall.examiner._shown.values()), "it leaves nothing behind"
    with pytest.raises(RemoteError):
        hall.answer(0, [bytes(hall.exhibit.y), bytes(hall.exhibit.grad_x)])


def test_a_member_examines_few_and_shows_each_its_exam_twice(hall: Hall) -> None:
    for _ in range(2):
        hall.ask(0)
    with pytest.raises(RemoteError) as caught:
        hall.ask(0)
    assert caught.value.kind == "served"
    hall.ask(1)
    with pytest.raises(TransientError, match="newcomers are examined"):
        hall.ask(2)


def test_the_examiner_is_the_one_that_was_drawn(hall: Hall) -> None:
    roster, beacon = hall.result.roster, Beacon.of(hall.result.roster, SAID)
    exam = exam_of(roster, hall.basis, beacon, NEWCOMERS[0].peer_id)
    assert exam is not None
    assert exam.examiner == hall.examiner._steps.context.me
    assert exam_of(roster, hall.basis, beacon, PeerId(exam.examiner)) is None, "nobody examines himself"
