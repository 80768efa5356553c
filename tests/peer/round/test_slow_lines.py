"""On slow lines no contribution is lost silently: its parts are waited for, or it is left out whole, by name."""

import asyncio
import math
from pathlib import Path

import pytest

from swarm.core.ids import Step
from swarm.core.round.contribution import Result
from tests.swarm_in_process import Event, InProcessSwarm, manifest_of, swarm_in_process

CALL_S = 0.25
"""A phase of a round is no longer."""
MODEL = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
"""130 kB of int8 in a stage."""
LINES = [pytest.param(60_000.0, id="half"), pytest.param(12_000.0, id="tenth", marks=pytest.mark.soak)]
"""Bytes a second: half and a tenth of what the run asks of a line (`deadlines.least_mbit`). On the slower one even a
ballot takes more phases than members wait for a leader of whom they hear nothing."""


def slow_manifest(**averaging: float) -> str:
    return manifest_of(
        model={"config": MODEL, "stages": 2},
        batch={"microbatch_size": 1, "target_tokens": 96},
        averaging=averaging,
        deadlines={"call_s": CALL_S, "lease_s": 5.0, "step_s": 60.0},
        optimizer={"total_steps": 100},
    )


async def until_all_are_members(swarm: InProcessSwarm) -> None:
    await swarm.until_version(1, timeout_s=60.0)
    second = swarm.of_stage(1)
    await swarm.until(
        lambda: all(peer.daemon.at is not None and len(peer.steps.chain.members) == 3 for peer in second),
        timeout_s=60.0,
    )


def results_of(swarm: InProcessSwarm) -> list[Result]:
    """Of the second stage, by its first peer."""
    return [held[0] for _, held in sorted(swarm.of_stage(1)[0].rounds.context.results.items())]


def no_part_is_without_a_contributor(result: Result) -> bool:
    """Or the round has no work at all: its only contribution came to nothing, and is named as those are left out."""
    if len(result.roster.committed) == 1 and result.unheard:
        return True
    everyone = tuple(made.peer_id for made in result.roster.contributions)
    return all(part.contributors == everyone for part in result.parts)


@pytest.mark.soak
def test_equal_slow_lines_lose_nothing_though_parts_take_many_phases(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with swarm_in_process(slow_manifest(), tmp_path, peers=(1, 3)) as swarm:
            await until_all_are_members(swarm)
            for peer in swarm.of_stage(1):
                swarm.network.limit(peer.peer_id, up_bytes_per_s=320_000.0)
            start = swarm.host.progress.done_versions()
            await swarm.until_version(start + 2, timeout_s=60.0)
            rounds = [event for event in swarm.events if event["event"] == "step" and event["stage"] == 1]
            assert max(event["round_s"] for event in rounds) > 2 * CALL_S
            for result in results_of(swarm):
                assert no_part_is_without_a_contributor(result)
                assert not result.roster.left_out
                assert not result.roster.leaves

    asyncio.run(scenario())


@pytest.mark.parametrize("slow_bytes_per_s", LINES)
def test_a_member_far_slower_than_the_others_is_left_out_whole_and_named(
    slow_bytes_per_s: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with swarm_in_process(slow_manifest(straggler_share=0.1), tmp_path, peers=(1, 3)) as swarm:
            await until_all_are_members(swarm)
            slow = swarm.of_stage(1)[2]

            def told() -> list[Event]:
                return [event for event in swarm.events if event["event"] == "left_out"]

            def has_work_to_bring() -> bool:
                """Who is slow is given none where others are free: it has its work before its line becomes so."""
                state = slow.steps.open_step(Step(slow.steps.version))
                at = state.round if state is not None else None
                return at is not None and not at.is_closing and slow.steps.replica.num_done(at.facts.step) > 0

            start = swarm.host.progress.done_versions()
            while not told():
                await swarm.until(has_work_to_bring, timeout_s=60.0)
                swarm.network.limit(slow.peer_id, up_bytes_per_s=slow_bytes_per_s)
                at = swarm.host.progress.done_versions()
                await swarm.until_version(at + 2, timeout_s=60.0)
                swarm.network.limit(slow.peer_id, up_bytes_per_s=math.inf)
            made = [one for one in results_of(swarm) if int(one.roster.step) >= start]
            assert all(map(no_part_is_without_a_contributor, made))
            lost = {one.peer_id for result in made for one in result.unheard}
            assert lost == {slow.peer_id}
            assert {event["peer_id"] for event in told()} == {slow.peer_id}
            assert all(0 < event["share"] <= 1 for event in told())  # of all, where nobody else has any
            assert f"{slow.peer_id[-6:]} is left out" in caplog.text

    asyncio.run(scenario())
