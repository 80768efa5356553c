"""Runs with liars whose records and messages are changed at random: what must hold, holds."""

import asyncio
import json
import logging
import random
import threading
from pathlib import Path

import pytest

from benchmarks.red_team.__main__ import main as red_team
from benchmarks.red_team.invariants import Broken, broken
from benchmarks.red_team.mutating import Kept, shrunk
from benchmarks.red_team.plan import Plan, Rule
from benchmarks.red_team.records import declared, slots_of
from benchmarks.red_team.trial import HONEST_LOSS, MADE, METHODS, SETTINGS, Trial, run, run_honestly
from benchmarks.red_team.virtual_time import MOST_AT_ONCE, StandsStillError, run_virtually
from swarm.core.record import Signed

SEED = 3
"""In every test run; soaks go through them all."""
FEW_AT_WORK = 30304
"""A seed whose first leader lies, and grants all microbatches to itself and one more: nobody else waited for its round,
nor turned from it."""
CLOSES_ALWAYS = 4411
"""A seed whose first leader says "close" whatever it has to say, and was answered with a commitment each time."""
DRAWS_DIFFER = 20183
"""A seed whose liars have no papers for some of their work: voters draw different entries, and not all see it."""
DESCRIPTORS = Path("/proc/self/fd")
NUM_SOAKED, AT_ONCE = 20_000, 100


def test_all_invariants_hold_whatever_a_liar_changes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)  # what it keeps tells of errors, whose frames hold the run
    threads, files = held_by_runs()
    trial = run(SEED)
    assert not trial.fails, f"python -m benchmarks.red_team.mutating --seeds {SEED}: {trial}"
    threads_after, files_after = held_by_runs()  # what other tests have left may be collected meanwhile
    assert threads_after <= threads, "thousands of runs are made in one process"
    assert files_after <= files


def test_a_leader_that_gives_work_to_few_and_begins_no_round_stops_nobody() -> None:
    silent = Plan(FEW_AT_WORK, (Rule(1, "message", "round", deed="drop", to_step=2),))
    trial = run(FEW_AT_WORK, plan=silent, setting="two of 8, the first stage")
    assert trial.applied[1]
    assert not trial.fails, str(trial)


def test_a_leader_that_asks_for_commitments_without_end_is_answered_at_times() -> None:
    trial = run(CLOSES_ALWAYS)
    assert not trial.fails, str(trial)


def test_who_shows_papers_to_some_as_they_have_drawn_stops_nobody() -> None:
    trial = run(DRAWS_DIFFER)
    assert not trial.fails, str(trial)


def test_what_goes_on_without_end_and_takes_no_time_ends_a_run() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()

        def again() -> None:
            loop.call_soon(again)

        again()
        await loop.create_future()

    with pytest.raises(StandsStillError, match=f"no time passes in {MOST_AT_ONCE} turns"):
        run_virtually(main, rng=random.Random(0), on_unhandled=lambda _: None)


def held_by_runs() -> tuple[int, int]:
    """Threads of this process, and descriptors of files that are gone."""
    links = [link.resolve() for link in DESCRIPTORS.iterdir() if link.exists()] if DESCRIPTORS.is_dir() else []
    return threading.active_count(), sum(link.name.endswith("(deleted)") for link in links)


@pytest.mark.soak
@pytest.mark.drawn(2)
@pytest.mark.parametrize("first", range(0, NUM_SOAKED, AT_ONCE))
def test_all_invariants_hold_in_many_runs(first: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    failing = [trial for trial in map(run, range(first, first + AT_ONCE)) if trial.fails]
    assert not failing, "\n".join(map(str, failing))


def test_an_honest_run_breaks_nothing_and_comes_to_the_loss_that_others_are_held_against() -> None:
    name = "one of 5, the last stage"
    swarm = run_honestly(SETTINGS[name])
    assert not broken(swarm, honest_loss=HONEST_LOSS[name])
    assert swarm.seen.held_out == pytest.approx(HONEST_LOSS[name], rel=0.02)


def test_a_plan_follows_from_its_seed_and_names_declared_fields_alone() -> None:
    fields = {kind.__name__: {name for name, _, _ in slots_of(kind)} for kind in declared()}
    for seed in range(200):
        plan = Plan.of_seed(seed, made=MADE, methods=METHODS)
        assert plan == Plan.of_seed(seed, made=MADE, methods=METHODS)
        assert all(rule.field in fields[rule.kind] for rule in plan.rules if rule.where in ("made", "sent"))


def test_every_signed_field_is_changed_by_some_plan() -> None:
    rules = [rule for seed in range(4_000) for rule in Plan.of_seed(seed, made=MADE, methods=METHODS).rules]
    changed = {(rule.kind, rule.field) for rule in rules if rule.where in ("made", "sent")}
    signed = [kind for kind in declared() if issubclass(kind, Signed) and kind.__name__ in MADE]
    assert {(kind.__name__, name) for kind in signed for name, _, _ in slots_of(kind)} <= changed


def test_a_failing_plan_is_made_as_small_as_still_fails() -> None:
    rules = tuple(Rule(number, "made", "Work", "attempt", to_step=10) for number in range(4))

    def rerun(seed: int, *, plan: Plan, setting: str) -> Trial:
        guilty = any(rule.number == 2 and rule.to_step > 6 for rule in plan.rules)
        return Trial(seed, setting, plan, tuple(broken_if(guilty)))

    small = shrunk(rerun(5, plan=Plan(5, rules), setting=""), rerun)
    assert [(rule.number, rule.to_step) for rule in small.plan.rules] == [(2, 7)]


def test_runs_that_are_kept_count_in_later_calls_with_what_failed(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    kept = Kept(path, reversal="")
    kept.add(Trial(4, "a setting", Plan(4, ()), tuple(broken_if(guilty=False))))
    kept.add(Trial(5, "a setting", Plan(5, ()), tuple(broken_if(guilty=True))))
    assert Kept(path, reversal="").runs == {4: [], 5: ["stopped"]}
    assert Kept(path, reversal="framing").runs == {}
    assert [json.loads(line).get("said", "")[:6] for line in path.read_text().splitlines()] == ["", "seed 5"]


def broken_if(guilty: bool) -> list[Broken]:
    return [Broken("stopped", "for the test")] if guilty else []


@pytest.mark.soak
def test_the_kits_attacks_shut_nobody_out_and_end_no_process(capsys: pytest.CaptureFixture[str]) -> None:
    found = red_team(["--smoke", "--json"])
    assert set(found) == {"written_result"}
    for row in found.values():
        assert (row["honest_shut_out"], row["processes_ended"]) == (0, 0)
        assert row["credit_share"] <= row["receipt_share"]
        assert row["worst_loss_ratio"] <= 1.2
    assert "credit_share" in capsys.readouterr().out
