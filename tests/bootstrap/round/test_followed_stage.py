"""What the host keeps of a stage's future, and from whom: a little, and not from strangers."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from bootstrap.round.followed_stage import MAX_EARLY, FollowedStage
from swarm.core.errors import RemoteError, TransientError
from swarm.core.ids import StageIndex, Step, Version
from swarm.core.state.stage_chain import StageChain
from swarm.host_protocol import RESULT
from tests.bootstrap.state.hosted import Hosted
from tests.bootstrap.state.test_handing_over import LIAR, MEMBER, STAGE, begun, told, transport_of
from tests.swarm.core.round.round_members import facts_and_rounds, result_of, roster_of, signed_result
from tests.swarm.test_witness_service import open_round

STRANGER = 77
FACTS, _ = facts_and_rounds(2)
RESULT_OF_ITS_OWN = result_of(FACTS, roster_of(FACTS))
PUBLIC = {"trust": "public"}


async def bring(host: Hosted, number: int, step: int) -> None:
    """A result that nobody certified, signed by a leader of the peer's own."""
    roster = replace(RESULT_OF_ITS_OWN.roster, run_id=host.run.run_id, stage=StageIndex(STAGE), step=Step(step))
    result = signed_result(replace(RESULT_OF_ITS_OWN, roster=roster))
    await told(host, number, RESULT, {"result": result.to_value()})


def test_early_results_are_a_trainer_s_to_bring_and_of_the_next_steps(tmp_path: Path) -> None:
    """A stranger had the host hold 64 of 8 MiB of each stage, for ever."""

    async def scenario() -> None:
        async with begun(tmp_path, run=PUBLIC) as host:
            early = host.itself._followed[STAGE]._early
            for number in (STRANGER, LIAR, 0):  # on probation is the second, the third trains another stage
                with pytest.raises(RemoteError, match=f"does not train stage {STAGE}"):
                    await bring(host, number, 1)
            assert not early
            for step in (1 << 40, MAX_EARLY + 1, MAX_EARLY, 1):
                await bring(host, MEMBER, step)
            assert sorted(early) == [1, MAX_EARLY]

    asyncio.run(scenario())


def test_who_makes_up_what_its_round_starts_from_has_no_vote_of_the_host(tmp_path: Path) -> None:
    async def asks(host: Hosted, number: int, step: int) -> None:
        voter = host.run.host_key.peer_id
        await open_round(transport_of(host, number), voter, host.run, stage=STAGE, step=step)

    async def scenario() -> None:
        async with begun(tmp_path, run=PUBLIC) as host:
            for number, step in ((STRANGER, 1), (LIAR, 1), (0, 1), (MEMBER, 0), (MEMBER, MAX_EARLY + 1)):
                with pytest.raises(TransientError, match="not known here to lead"):
                    await asks(host, number, step)
            voted = host.run.folder.root / "voted.log"
            assert voted.read_text() == ""
            with pytest.raises(TransientError, match="too few members have turned"):
                await asks(host, MEMBER, 1)
            assert voted.read_text() == "", "it has signed nothing"

    asyncio.run(scenario())


def test_a_round_may_begin_from_the_version_that_is_known_or_the_one_before_or_a_little_later(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with begun(tmp_path) as host:
            chain = StageChain.begin(host.itself._beginning.geneses[STAGE], host.run.settings)
            followed = FollowedStage(replace(chain, version=Version(8)), host.run.settings)
            name, before, other = chain.name, chain.basis.previous_name, b"o" * 32
            allowed = [
                (step, one) for step in range(64) for one in (name, before, other) if followed.may_begin(step, one)
            ]
            later = [(step, one) for step in range(9, 9 + MAX_EARLY) for one in (name, before, other)]
            assert allowed == [(7, before), (8, name), *later]

    asyncio.run(scenario())
