"""Seeded runs with mutating liars, on all cores: `python -m benchmarks.red_team.mutating --seeds 0:20000 --json`.

Ends with 1 if an invariant did not hold. A failing seed is run again with less and less of its plan, until nothing more
can be left out.
"""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

from benchmarks.red_team.plan import Plan
from benchmarks.red_team.trial import Trial, run
from swarm.local.compute_pools import bound_pools

ORDERED = "PYTHONHASHSEED"
"""Sets of names are gone through in the same order in every process if this is 0."""
TOLD_EVERY_S = 10.0
RUNS_A_PROCESS = 400
"""What a process has not given back by then goes with it."""

MOST_SHRUNK = 3


def shrunk(trial: Trial, rerun: Callable[..., Trial] = run) -> Trial:
    """The failing trial with as few rules and steps as still fail in the same way; `rerun` as `run`."""
    wanted = {one.what for one in trial.fails}

    def still_fails(plan: Plan) -> Trial | None:
        again = rerun(trial.seed, plan=plan, setting=trial.setting)
        return again if wanted & {one.what for one in again.fails} else None

    for rule in trial.plan.rules:
        smaller = still_fails(trial.plan.without(rule.number)) if len(trial.plan.rules) > 1 else None
        trial = smaller or trial
    last = max((rule.to_step for rule in trial.plan.rules), default=0)
    low, high = 0, last
    while low + 1 < high:  # nothing is done from `high` on, and it fails
        middle = (low + high) // 2
        smaller = still_fails(trial.plan.before(middle))
        trial, low, high = (smaller, low, middle) if smaller is not None else (trial, middle, high)
    return trial


def trials(seeds: Sequence[int], *, processes: int) -> Iterator[Trial]:
    """As they come."""
    if processes == 1:
        yield from map(run, seeds)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, maxtasksperchild=RUNS_A_PROCESS) as pool:
        yield from pool.imap_unordered(run, seeds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.red_team.mutating", description=__doc__)
    parser.add_argument("--seeds", default="0:100", help="A:B, from A up to but without B")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true", help="print what came of it as JSON")
    parser.add_argument("--smoke", action="store_true", help="one seed")
    chosen = parser.parse_args(arguments)
    if chosen.smoke:
        chosen.seeds, chosen.processes = "3:4", 1
    first, _, end = chosen.seeds.partition(":")
    seeds = range(int(first), int(end) if end else int(first) + 1)
    if os.environ.get(ORDERED) != "0":
        again = [
            sys.executable,
            "-m",
            "benchmarks.red_team.mutating",
            *(sys.argv[1:] if arguments is None else arguments),
        ]
        environment = os.environ | {ORDERED: "0"}
        bound_pools(1, environment)
        return subprocess.run(again, env=environment, check=False).returncode
    began = told = time.time()
    broken, done, held, peak = Counter[str](), 0, 0, 0.0
    failing: list[Trial] = []
    for trial in trials(seeds, processes=chosen.processes):
        done, held, peak = done + 1, held + (not trial.broken), max(peak, trial.peak_mib)
        broken.update({one.what for one in trial.broken})
        if trial.fails:
            failing.append(trial)
            print(trial, file=sys.stderr, flush=True)
        if time.time() - told > TOLD_EVERY_S or done == len(seeds):
            told = time.time()
            left_s = (told - began) / done * (len(seeds) - done)
            print(
                f"{done} of {len(seeds)}, {len(failing)} fail; {left_s / 60:.1f} min left", file=sys.stderr, flush=True
            )
    small = [shrunk(trial) for trial in failing[:MOST_SHRUNK]]
    figures = {
        "runs": done,
        "all_held": held,
        "broken": dict(broken),
        "seconds": time.time() - began,
        "peak_mib": peak,
        "failing_seeds": sorted(trial.seed for trial in failing),
        "shrunk": [
            {
                "seed": one.seed,
                "setting": one.setting,
                "broken": [str(what) for what in one.broken],
                "rules": [asdict(rule) for rule in one.plan.rules],
            }
            for one in small
        ],
    }
    print(json.dumps(figures, indent=2) if chosen.json else f"{done} runs, {len(failing)} fail: {dict(broken)}")
    for one in small:
        print(one, file=sys.stderr)
    return 1 if failing else 0


if __name__ == "__main__":
    sys.exit(main())
