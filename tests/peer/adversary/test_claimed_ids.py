"""One liar of five lists twice a step's microbatches: what has no papers counts for nothing, and nobody else loses.

The attack is shown to work where nobody looks at papers: then the liar has most of its stage's credit.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from peer.state.replica import StageReplica
from swarm.core.ids import PeerId
from swarm.core.round.contribution import Contribution, Result, Work
from swarm.drawn_papers import DrawnPapers
from tests.swarm_in_process import manifest_of, swarm_in_process

STEPS, BEGINS = 6, 2
STEPS_TO_A_BAN = 24
"""The liar has to be given work before it can lie about any, and the host to judge it before the run is over: on a busy
machine a peer of five may go without for some steps."""
TABLES: dict[str, dict[str, Any]] = {
    "run": {"name": "claimed", "trust": "public"},
    "averaging": {"rule": "mean", "delay": 0},
    "optimizer": {"learning_rate": 0.01, "warmup_steps": 1},
    "batch": {"microbatch_size": 2, "target_tokens": 320},
    "audits": {"agreements_to_promote": 0},
    "limits": {"founders_per_stage": 3},
}
TOKENS = 32
"""Of a microbatch."""
LIAR = 4
"""Of five, in the order in which they were added."""


@dataclass
class Run:
    liar: PeerId
    credit: Mapping[PeerId, int]
    """Of the liar's stage."""
    received: int
    """Tokens of the microbatches that the liar did, all of which others signed for."""
    end: float
    """Held-out loss."""
    results: Mapping[int, Result]
    bans: list[tuple[PeerId, str]]

    def shares(self) -> dict[int, float]:
        """The liar's part of the work in each round that it contributed to."""
        made = {
            step: {one.peer_id: len(one.work) for one in it.roster.contributions} for step, it in self.results.items()
        }
        return {step: works[self.liar] / sum(works.values()) for step, works in made.items() if self.liar in works}

    @property
    def share(self) -> float:
        return self.credit.get(self.liar, 0) / sum(self.credit.values())


def play(folder: Path, attack: str | None, *, stage: int, monkeypatch: pytest.MonkeyPatch, steps: int = STEPS) -> Run:
    """A run in which the last of a stage's five peers misbehaves."""
    tables = TABLES | {
        "optimizer": TABLES["optimizer"] | {"total_steps": steps},
        "checkpoint": {"every_steps": steps, "snapshot_every": STEPS},
    }
    peers = (5, 3) if stage == 0 else (3, 5)  # one word of two that begin a stage, and of a neighbour, can stop it
    attacks = {(stage, LIAR): f"{attack}@{BEGINS}"} if attack is not None else {}
    received: dict[int, int] = {}
    record = StageReplica.record

    def recorded(replica: StageReplica, step: Any, work: Work) -> None:
        record(replica, step, work)
        received[id(replica)] = received.get(id(replica), 0) + work.num_tokens

    monkeypatch.setattr(StageReplica, "record", recorded)

    async def train() -> Run:
        results: dict[int, Result] = {}
        async with swarm_in_process(manifest_of(**tables), folder, peers=peers, attacks=attacks) as swarm:
            everyone = swarm.of_stage(stage)
            names = {peer.peer_id for peer in everyone}
            swarm.on_applied.append(
                lambda steps, applied: (
                    results.__setitem__(int(applied.result.roster.step), applied.result)
                    if steps.chain.stage == stage
                    else None
                )
            )
            await swarm.until_version(steps, timeout_s=5.0 * steps)
            liar = everyone[LIAR]
            done = received.get(id(liar.steps.replica), 0) if liar.daemon.at is not None else 0
            report = await swarm.finished(timeout_s=60.0)
            bans = [(event["peer_id"], event["kind"]) for event in swarm.events if event["event"] == "banned"]
            credit = {peer: tokens for peer, tokens in report["credit"].items() if peer in names}
            return Run(liar.peer_id, credit, done, report["held_out_loss"]["end"], results, bans)

    return asyncio.run(train())


def see_all_as_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no voter looked."""

    async def lacks_nothing(drawn: DrawnPapers, made: Contribution, **given: Any) -> None:
        return None

    monkeypatch.setattr(DrawnPapers, "lack", lacks_nothing)


@pytest.mark.soak
def test_claimed_microbatches_weigh_nothing_and_cost_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs_the_others_nothing(play(tmp_path, "claimed_ids", stage=1, monkeypatch=monkeypatch))


@pytest.mark.soak
def test_where_microbatches_are_claimed_the_model_learns_as_in_honest_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ends of honest runs this short lie 1 % apart, so two of each are compared."""
    honest = [play(tmp_path / f"honest-{run}", None, stage=1, monkeypatch=monkeypatch).end for run in range(2)]
    runs = [play(tmp_path / f"attacked-{run}", "claimed_ids", stage=1, monkeypatch=monkeypatch) for run in range(2)]
    assert sum(run.end for run in runs) <= 1.03 * sum(honest)
    for attacked in runs:
        costs_the_others_nothing(attacked)


def costs_the_others_nothing(attacked: Run) -> None:
    assert attacked.credit.get(attacked.liar, 0) <= attacked.received
    assert attacked.bans == []
    assert sorted(attacked.results) == list(range(STEPS))
    for step, result in attacked.results.items():
        made = {one.peer_id: one for one in result.roster.contributions}
        assert step < BEGINS or attacked.liar not in made or len(made[attacked.liar].work) <= 10
        assert sum(one.num_tokens for peer, one in made.items() if peer != attacked.liar) > 0, "the step is void"
        assert not {one.peer_id for one in result.roster.leaves} - {attacked.liar}


@pytest.mark.soak
def test_where_nobody_looks_the_same_liar_has_most_of_its_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    see_all_as_shown(monkeypatch)
    shares: list[float] = []
    for again in range(4):  # who gets work of so little is by chance
        taken = play(tmp_path / str(again), "claimed_ids", stage=1, monkeypatch=monkeypatch)
        shares = [share for step, share in taken.shares().items() if step >= BEGINS]
        if shares:
            break
    assert shares, "it got work in some step"
    assert min(shares) > 0.5, "what it has papers for is a tenth to a third of that"


@pytest.mark.soak
@pytest.mark.parametrize("stage", [0, 1])
def test_who_shows_other_microbatches_papers_is_banned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    found = play(tmp_path, "copied_papers", stage=stage, monkeypatch=monkeypatch, steps=STEPS_TO_A_BAN)
    assert found.bans == [(found.liar, "false_work")]
    assert found.share <= found.received / sum(found.credit.values())
