"""What a process has signed in a round outlives it: who is started again signs nothing that could contradict it."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest

from swarm.core.errors import RemoteError
from swarm.core.ids import StageIndex, Step
from swarm.core.round.basis import RoundBasis
from swarm.core.round.facts import RoundFacts
from swarm.core.round.instructions import AskPromise
from swarm.core.round.voter import NOT_RECONFIGURED
from swarm.core.round.voting import Promise, Proof, Reconfiguration
from swarm.drawn_papers import DrawnPapers
from swarm.network.memory import MemoryNetwork
from swarm.witness_service import KEPT_NAMES, VoteLog, WitnessService, ask_witness
from tests.swarm.core.audit.chances import UNSAID
from tests.swarm_in_process import identity_of

LEADERS, WITNESS, HOST, RUN_KEY = [identity_of(number) for number in (0, 1)], *map(identity_of, (2, 90, 91))
MEMBERS = tuple(sorted(leader.peer_id for leader in LEADERS))
ALIKE, NOTHING = (1,) * len(MEMBERS), (None,) * len(MEMBERS)
BASIS = RoundBasis(bytes(32), bytes(32), MEMBERS, ALIKE, MEMBERS, ALIKE, (WITNESS.peer_id,), NOTHING, UNSAID)
FACTS = RoundFacts.of_basis(
    BASIS,
    run_id="run",
    stage=StageIndex(0),
    step=Step(7),
    host=HOST.peer_id,
    run_key=RUN_KEY.peer_id,
    num_parts=1,
    phase_s=1.0,
)


def reconfiguration(first_view: int) -> Reconfiguration:
    voters = tuple(sorted((*MEMBERS, WITNESS.peer_id)))
    unsigned = Reconfiguration(FACTS.stage, FACTS.step, BASIS.name, first_view, voters)
    return replace(unsigned, signature=RUN_KEY.sign(unsigned.signed_bytes()))


def promise(log: VoteLog, view: int, changed: Reconfiguration | None = None) -> Promise | None:
    """What a new process of the witness, with this log, promises to the leader of the view."""
    network = MemoryNetwork(random.Random(0))
    transport = network.transport(WITNESS)
    papers = DrawnPapers(transport, lambda made, entry, value: None, random.Random(0))
    anybody = (lambda peer, stage: True, lambda peer: True, lambda peer, stage, step, name: True)
    names = ("run", WITNESS, HOST.peer_id, RUN_KEY.peer_id)
    WitnessService(*names, log, *anybody, num_parts=[1], papers=papers).serve(transport)
    (leader,) = [one for one in LEADERS if one.peer_id == FACTS.leader_of(view)]
    made = []
    for member in sorted(LEADERS, key=lambda one: one.peer_id):
        unsigned = Promise(member.peer_id, view, None, None)
        signature = member.sign(FACTS.election.promised(unsigned, changed))
        made.append(replace(unsigned, signature=signature))
    shown, asked = Proof(tuple(made), None, changed), AskPromise((WITNESS.peer_id,), view)
    line = network.transport(leader)
    found = asyncio.run(ask_witness(line, WITNESS.peer_id, FACTS, BASIS, asked, shown=shown, timeout_s=5.0))
    assert not isinstance(found, Promise)
    return found[0] if isinstance(found, tuple) else None


def test_a_process_that_was_started_again_is_silent_in_the_round_and_votes_under_other_voters(tmp_path: Path) -> None:
    path = tmp_path / "voted.log"
    assert promise(VoteLog(path), 1) is not None
    assert promise(VoteLog(path), 2) is None
    assert promise(VoteLog(path), 64, reconfiguration(64)) is not None


def test_a_process_that_was_started_again_under_a_reconfiguration_signs_nothing_more_under_it(tmp_path: Path) -> None:
    path = tmp_path / "voted.log"
    assert promise(VoteLog(path), 64, reconfiguration(64)) is not None
    for view in (64, 65, 130):
        assert promise(VoteLog(path), view, reconfiguration(64)) is None
    assert promise(VoteLog(path), 128, reconfiguration(128)) is not None
    assert promise(VoteLog(path), 129, reconfiguration(64)) is None
    assert promise(VoteLog(path), 192, reconfiguration(128)) is None


def test_what_the_run_key_did_not_sign_is_not_written_down(tmp_path: Path) -> None:
    path = tmp_path / "voted.log"
    with pytest.raises(RemoteError):
        promise(VoteLog(path), 64, replace(reconfiguration(64), signature=bytes(64)))
    assert not path.read_text()


def test_a_log_keeps_the_last_names_each_with_the_last_reconfiguration(tmp_path: Path) -> None:
    path = tmp_path / "voted.log"
    names = [number.to_bytes(32, "big").hex() for number in range(KEPT_NAMES + 1)]
    path.write_text("\n".join([*names, f"{names[1]} 64", f"{names[1]} 128", names[1], f"{names[2]} x", "torn"]) + "\n")
    log = VoteLog(path)
    found = [log.signed_under(bytes.fromhex(name)) for name in names[:3]]
    assert found == [NOT_RECONFIGURED, 128, NOT_RECONFIGURED]
    assert [log.is_silent(bytes.fromhex(name)) for name in names[:3]] == [False, True, True]
    assert len(path.read_text().splitlines()) == KEPT_NAMES
