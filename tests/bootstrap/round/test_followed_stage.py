"""What the host keeps of a stage's future, and from whom: a little, and not from strangers."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from bootstrap.round.followed_stage import MAX_EARLY
from swarm.core.errors import RemoteError
from swarm.core.ids import StageIndex, Step
from swarm.host_protocol import RESULT
from tests.bootstrap.state.hosted import Hosted
from tests.bootstrap.state.test_handing_over import LIAR, MEMBER, STAGE, begun, told
from tests.swarm.core.round.round_members import facts_and_rounds, result_of, roster_of, signed_result

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
