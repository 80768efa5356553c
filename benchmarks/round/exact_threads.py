"""A round's exact work on one thread against several: `python -m benchmarks.round.exact_threads [--json]`.

What a peer does of a round by itself, with the functions that a daemon calls: its contribution encoded and hashed,
parts of eight contributors checked, averaged, encoded and read, the result's bytes hashed and read, and the step taken
from them, decoded part by part, with moments in fp32 and in int8. One thread and several take turns, each first in
every other pair. A pair's ratio is of two runs that follow each other; on a machine that others use, the best pairs are
those that nobody came between.

Where the memory gives one core nearly all it has, more threads gain nothing: `copy` is the ratio of copying as much.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
from swarm.core.round.contribution import ReducedPart
from swarm.core.settings import OptimizerSettings
from swarm.optim.stage_step import StageStep

PEERS = 8
SEED = bytes(32)
GOAL = 1.7


@dataclass
class Pairs:
    """Runs of one piece of work, one thread's and several threads' beside each other."""

    one_s: list[float] = field(default_factory=list)
    many_s: list[float] = field(default_factory=list)
    one_cpu_s: list[float] = field(default_factory=list)
    many_cpu_s: list[float] = field(default_factory=list)

    def run(self, threads: Threads, many: int, work: Callable[[], object], *, many_first: bool) -> None:
        for count in (many, 1) if many_first else (1, many):
            threads.count = count
            began, cpu = time.perf_counter(), time.process_time()
            work()
            seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
            (self.many_s if count == many else self.one_s).append(seconds)
            (self.many_cpu_s if count == many else self.one_cpu_s).append(cpu_s)

    def figures(self) -> dict[str, float]:
        ratios = [one / many for one, many in zip(self.one_s, self.many_s, strict=True)]
        return {
            "ratio_median": statistics.median(ratios),
            "ratio_best": max(ratios),
            "one_thread_ms": 1e3 * statistics.median(self.one_s),
            "threads_ms": 1e3 * statistics.median(self.many_s),
            "cpu_ratio": statistics.median(self.many_cpu_s) / statistics.median(self.one_cpu_s),
        }


class RoundWork:
    """A stage of so many parameters, and what comes from eight peers in a round of it."""

    def __init__(self, num_values: int, threads: Threads, codec: str) -> None:
        rng = np.random.default_rng(0)
        self.threads = threads
        settings, model = settings_of(codec, "mean", PEERS), self._model(num_values)
        state = StageState(0, model.layout, np.zeros(num_values, dtype=np.float32), name=SEED)
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


def measure(num_values: int, many: int, num_pairs: int, codec: str) -> dict[str, Pairs]:
    """Pairs of runs, by what was run."""
    threads = Threads(1)
    work = RoundWork(num_values, threads, codec)
    pairs = {name: Pairs() for name in work.all()}
    for turn in range(num_pairs + 1):
        for name, run in work.all().items():
            into = pairs[name] if turn else Pairs()  # the first compiles, and finds memory
            into.run(threads, many, run, many_first=turn % 2 == 0)
    return pairs


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
    found = {
        name: pairs.figures()
        for name, pairs in measure(options.params, options.threads, options.pairs, options.codec).items()
    }
    if options.json:
        print(json.dumps({"params": options.params, "threads": options.threads, "codec": options.codec, **found}))
        return
    print(f"{options.params} parameters, {options.codec}: {options.threads} threads against one")
    for name, row in found.items():
        verdict = "holds" if row["ratio_best"] >= GOAL else "MISSED"
        print(
            f"{verdict:7}{name:20}{row['ratio_median']:5.2f} times as fast (best pair {row['ratio_best']:.2f}), "
            f"{row['one_thread_ms']:.1f} ms on one thread, CPU time {row['cpu_ratio']:.2f} of one thread's"
        )


if __name__ == "__main__":
    main()
