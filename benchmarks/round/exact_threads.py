"""A round's exact work on one thread against several: `python -m benchmarks.round.exact_threads [--json]`.

What a peer does of a round by itself, with the functions that a daemon calls: its contribution encoded and hashed,
parts of eight contributors checked, averaged, encoded and read, the result's bytes hashed and read, and the step taken
from them, decoded part by part, with moments in fp32 and in int8. One thread and several take turns, each first in
every other pair, and a pair's ratio is of two runs that follow each other. On a machine that others use a thread waits
for a core now and then: the kernel counts for how long, and a pair in which threads waited for more than
`MOST_WAITED` of the time is left out, and made again.

Where the memory gives one core nearly all it has, more threads gain nothing: `copy` is the ratio of copying memory, and
every row says how many bytes it moves in a second.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.round.averaging_ours import BareModel, settings_of
from kernels.threads import Threads
from peer.round.work import ContributionEncoder, PartReducer
from peer.state.replica import Accumulation, StageReplica
from swarm.averaging.certified_gradient import squares_of
from swarm.averaging.encoded_mean import check_encoded
from swarm.bulk_digest import bulk_digest
from swarm.checkpoint.state import StageState
from swarm.core.ids import PeerId, Step
from swarm.core.plan import CONTRIBUTION_BYTES, FLOAT_BYTES, RESULT_BYTES
from swarm.core.round.contribution import ReducedPart
from swarm.core.settings import OptimizerSettings
from swarm.optim.stage_step import StageStep

PEERS = 8
SEED = bytes(32)
GOAL = 1.7
MOST_WAITED = 0.02
"""Of a run, a thread of it on the average."""
TRIES = 20
"""For each pair that is wanted, at most."""


def waited_s() -> float:
    """For how long this process' threads were ready to run and did not; those that have ended no longer count."""
    if not sys.platform.startswith("linux"):
        return 0.0
    return sum(int(path.read_text().split()[1]) for path in Path("/proc/self/task").glob("*/schedstat")) / 1e9


@dataclass(frozen=True)
class Run:
    """One piece of work, done once."""

    seconds: float
    cpu_s: float
    waited_share: float

    @classmethod
    def of(cls, threads: Threads, count: int, work: Callable[[], object]) -> "Run":
        threads.count = count
        waited, began, cpu = waited_s(), time.perf_counter(), time.process_time()
        work()
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
        return cls(seconds, cpu_s, (waited_s() - waited) / seconds / count)


@dataclass
class Pairs:
    """Runs of one piece of work, one thread's and several threads' beside each other, in which no thread waited."""

    one: list[Run] = field(default_factory=list)
    many: list[Run] = field(default_factory=list)
    disturbed: int = 0
    """Pairs that were left out."""

    def run(self, threads: Threads, many: int, work: Callable[[], object], *, many_first: bool) -> None:
        for _ in range(TRIES):
            runs = {count: Run.of(threads, count, work) for count in ((many, 1) if many_first else (1, many))}
            if all(run.waited_share <= MOST_WAITED for run in runs.values()):
                self.one.append(runs[1])
                self.many.append(runs[many])
                return
            self.disturbed += 1

    def figures(self, moved_bytes: float) -> dict[str, float]:
        """`moved_bytes`: of memory, in one run. Nothing where every pair was disturbed."""
        if not self.one:
            return {"pairs": 0, "disturbed_pairs": self.disturbed}
        one_s, many_s = ([run.seconds for run in runs] for runs in (self.one, self.many))
        ratios = sorted(one / many for one, many in zip(one_s, many_s, strict=True))
        return {
            "ratio_median": statistics.median(ratios),
            "ratio_lowest": ratios[0],
            "ratio_best": ratios[-1],
            "one_thread_ms": 1e3 * statistics.median(one_s),
            "threads_ms": 1e3 * statistics.median(many_s),
            "one_thread_gb_per_s": moved_bytes / statistics.median(one_s) / 1e9,
            "threads_gb_per_s": moved_bytes / statistics.median(many_s) / 1e9,
            "cpu_ratio": sum(run.cpu_s for run in self.many) / sum(run.cpu_s for run in self.one),
            "pairs": len(ratios),
            "disturbed_pairs": self.disturbed,
        }


class RoundWork:
    """A stage of so many parameters, and what comes from eight peers in a round of it."""

    def __init__(self, num_values: int, threads: Threads, codec: str) -> None:
        rng = np.random.default_rng(0)
        self.threads = threads
        settings, model = settings_of(codec, "mean", PEERS), self._model(num_values)
        # Of zeros that nobody wrote the system has one page for all: to read them is no traffic.
        weights = rng.standard_normal(num_values, dtype=np.float32)
        state = StageState(0, model.layout, weights, name=SEED)
        self.replica = StageReplica(settings, model, state, clip_norm=1.0, threads=threads)
        self.encoder, self.reducer = ContributionEncoder(self.replica), PartReducer(self.replica)
        self.sum: Accumulation = self.replica.sum_of(Step(0))
        rng.standard_normal(dtype=np.float32, out=self.sum.gradient.flat.numpy())
        self.sum.gradient.add_tokens(1024)
        self.sum.work[0] = None  # type: ignore[index,assignment]  # all that is asked is whether there is any
        self.parts = range(self.replica.num_parts)
        self.contribution, _ = self.encode()
        self.result = self.reduce()
        self.steps = {
            moments: StageStep(
                OptimizerSettings(total_steps=1 << 20, moments=moments), model.layout, clip_norm=1.0, threads=threads
            )
            for moments in ("fp32", "int8")
        }
        self.gradient = self.replica.certified_gradient(
            [reduced for reduced, _ in self.result], [body for _, body in self.result]
        )
        self.copied = np.empty_like(state.weights)
        self.codec = codec

    @staticmethod
    def _model(num_values: int) -> Any:
        return BareModel(num_values)

    def encode(self) -> tuple[list[memoryview], list[bytes]]:
        """This peer's contribution."""
        return self.encoder.encode(Step(0), self.sum, [SEED for _ in self.parts])

    def reduce(self) -> list[tuple[ReducedPart, memoryview]]:
        """Contributions to every part: an eighth of a round of eight peers, eight times."""
        parts = self.replica.parts()
        codec, result_codec = parts.contribution_codec(0), parts.result_codec(0)

        def reduce_one(part: int) -> tuple[ReducedPart, memoryview]:
            body, num_values = self.contribution[part], parts[part].stop - parts[part].start
            for _ in range(PEERS):
                bulk_digest(body)
                check_encoded(codec, body, num_values=num_values)
            made, found = self.reducer.reduce(part, [(5, body)] * PEERS, norm_cap=None, seed=SEED)
            return ReducedPart(part, found, (PeerId("peer"),), (), squares_of(result_codec, made, num_values)), made

        return self.threads.map(reduce_one, self.parts)

    def take(self) -> None:
        """Every part of the result that the others reduced, as it comes."""
        parts = self.replica.parts()
        codec = parts.result_codec(0)

        def take_one(one: tuple[ReducedPart, memoryview]) -> None:
            reduced, body = one
            where = parts[reduced.part]
            assert bulk_digest(body) == reduced.digest
            assert squares_of(codec, body, where.stop - where.start) == reduced.squares

        self.threads.map(take_one, self.result)

    def step(self, moments: str) -> None:
        self.steps[moments].next(self.replica.state, self.gradient, SEED)

    def copy(self) -> None:
        """As much memory as there is, and nothing else."""
        weights = self.replica.state.weights

        def copy(start: int, stop: int) -> None:
            np.copyto(self.copied[start:stop], weights[start:stop])

        self.threads.over(weights.size, copy, grain=16)

    def all(self) -> dict[str, Callable[[], object]]:
        return {
            "encoding": self.encode,
            "reduction": self.reduce,
            "result": self.take,
            "step": lambda: self.step("fp32"),
            "step, int8 moments": lambda: self.step("int8"),
            "copy": self.copy,
        }

    def moved_bytes(self) -> dict[str, float]:
        """Of memory that each of them reads and writes, if every value is read and written once, past the cache."""
        said, told = CONTRIBUTION_BYTES[self.codec], RESULT_BYTES[self.codec]
        a_value = {
            "encoding": FLOAT_BYTES + said,
            "reduction": said + told,  # it is eight times the same contribution
            "result": told,
            "step": told + 3 * FLOAT_BYTES + 3 * FLOAT_BYTES,  # weights and moments, old and new
            "step, int8 moments": told + 2 * (FLOAT_BYTES + 2),
            "copy": 2 * FLOAT_BYTES,
        }
        return {name: size * self.replica.state.weights.size for name, size in a_value.items()}


def measure(num_values: int, many: int, num_pairs: int, codec: str) -> dict[str, dict[str, float]]:
    """Figures of pairs of runs, by what was run."""
    threads = Threads(1)
    work = RoundWork(num_values, threads, codec)
    pairs = {name: Pairs() for name in work.all()}
    for turn in range(num_pairs + 1):
        for name, run in work.all().items():
            into = pairs[name] if turn else Pairs()  # the first compiles, and finds memory
            into.run(threads, many, run, many_first=turn % 2 == 0)
    moved = work.moved_bytes()
    return {name: found.figures(moved[name]) for name, found in pairs.items()}


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line says; `arguments` in its place."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=int, default=1 << 26)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--smoke", action="store_true", help="few values, few pairs: does it run?")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.params, options.pairs = 1 << 20, 2
    return options


def main() -> None:
    options = options_of()
    found = measure(options.params, options.threads, options.pairs, options.codec)
    if options.json:
        print(json.dumps({"params": options.params, "threads": options.threads, "codec": options.codec, **found}))
        return
    print(f"{options.params} parameters, {options.codec}: {options.threads} threads against one")
    for name, row in found.items():
        if not row["pairs"]:
            print(f"       {name:20}no pair in which no thread waited for a core, of {row['disturbed_pairs']}")
            continue
        verdict = "holds" if row["ratio_median"] >= GOAL else "MISSED"
        print(
            f"{verdict:7}{name:20}{row['ratio_median']:5.2f} times as fast ({row['ratio_lowest']:.2f} to "
            f"{row['ratio_best']:.2f} in {row['pairs']} pairs, {row['disturbed_pairs']} left out), "
            f"{row['one_thread_ms']:.1f} ms on one thread at {row['one_thread_gb_per_s']:.1f} GB/s, on all at "
            f"{row['threads_gb_per_s']:.1f}, CPU time {row['cpu_ratio']:.2f} of one thread's"
        )


if __name__ == "__main__":
    main()
