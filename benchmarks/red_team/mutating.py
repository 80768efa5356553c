"""Seeded runs with mutating liars, on all cores: `python -m benchmarks.red_team.mutating --seeds 0:20000 --json`.

Ends with 1 if an invariant did not hold. A failing seed is run again with less and less of its plan, until nothing more
can be left out. With `--keep FILE` runs add up over many calls: what the file has of this commit is not run again. With
`--reversal` a fix is taken out, and runs go on until one has found the hole.
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
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.red_team.invariants import OPEN
from benchmarks.red_team.plan import Plan
from benchmarks.red_team.reversals import REVERSALS
from benchmarks.red_team.trial import Trial, run
from benchmarks.results.staleness import git
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


def tried(seed: int, *, reversal: str = "") -> Trial:
    """The seed's run; with a fix taken out, if one is named."""
    with REVERSALS[reversal]() if reversal else nullcontext():
        return run(seed)


def trials(seeds: Sequence[int], *, processes: int, reversal: str = "") -> Iterator[Trial]:
    """As they come."""
    if processes == 1:
        yield from map(partial(tried, reversal=reversal), seeds)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, maxtasksperchild=RUNS_A_PROCESS) as pool:
        yield from pool.imap_unordered(partial(tried, reversal=reversal), seeds)


class Kept:
    """A file of runs, a line each, which calls add to; those of another commit or reversal are passed over."""

    def __init__(self, path: Path | None, *, reversal: str) -> None:
        self._path = path
        self._made_with = {"commit": _commit(), "reversal": reversal}
        self.runs: dict[int, list[str]] = {}
        """Of each seed, which invariants did not hold."""
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        for line in map(json.loads, lines):
            if {name: line[name] for name in self._made_with} == self._made_with:
                self.runs[line["seed"]] = line["broken"]

    def add(self, trial: Trial) -> None:
        self.runs[trial.seed] = sorted({one.what for one in trial.broken})
        if self._path is not None:
            line: dict[str, Any] = {"seed": trial.seed, "broken": self.runs[trial.seed], **self._made_with}
            line |= {"cpu_s": round(trial.cpu_s, 2), **({"said": str(trial)} if trial.fails else {})}
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")


def _commit() -> str:
    """What is run: a commit, and whether the tree differs from it."""
    return git(Path(__file__).parents[2], "describe", "--always", "--dirty") or ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.red_team.mutating", description=__doc__)
    parser.add_argument("--seeds", default="0:100", help="A:B, from A up to but without B")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--keep", type=Path, help="file that runs are added to, and whose runs are not made again")
    parser.add_argument("--reversal", choices=list(REVERSALS), default="", help="fix to take out; ends when it shows")
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
    kept, peak, cpu_s = Kept(chosen.keep, reversal=chosen.reversal), 0.0, 0.0
    failing: list[Trial] = []
    left = [seed for seed in seeds if seed not in kept.runs]
    for done, trial in enumerate(trials(left, processes=chosen.processes, reversal=chosen.reversal), 1):
        peak, cpu_s = max(peak, trial.peak_mib), cpu_s + trial.cpu_s
        kept.add(trial)
        if trial.fails:
            failing.append(trial)
            print(trial, file=sys.stderr, flush=True)
        if time.time() - told > TOLD_EVERY_S or done == len(left):
            told = time.time()
            left_s = (told - began) / done * (len(left) - done)
            said = f"{done} of {len(left)}, {len(failing)} fail; {left_s / 60:.1f} min left"
            print(said, file=sys.stderr, flush=True)
        if failing and chosen.reversal:
            break
    with REVERSALS[chosen.reversal]() if chosen.reversal else nullcontext():
        small = [shrunk(trial) for trial in failing[:MOST_SHRUNK]]
    of_seeds = {seed: what for seed, what in kept.runs.items() if seed in seeds}
    broken = Counter(what for found in of_seeds.values() for what in found)
    figures = {
        "runs": len(of_seeds),
        "all_held": sum(not found for found in of_seeds.values()),
        "broken": dict(broken),
        "seconds": time.time() - began,
        "cpu_s_a_run": cpu_s / max(1, len(left)),
        "peak_mib": peak,
        "failing_seeds": sorted(seed for seed, found in of_seeds.items() if found),
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
    print(json.dumps(figures, indent=2) if chosen.json else f"{len(of_seeds)} runs: {dict(broken)}")
    for one in small:
        print(one, file=sys.stderr)
    return 1 if set(broken) - OPEN else 0


if __name__ == "__main__":
    sys.exit(main())
