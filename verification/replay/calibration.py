"""Honest spread over instruction sets, each in a process of its own, as it is chosen once.

Such a process gets the work and gives back the outcomes as files in a folder, and lines on its standard input and
output say when. It ends when its input does.
"""

import contextlib
import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from swarm.core.errors import LocalError
from verification.replay.spread import (
    DTYPES,
    SCENES,
    SPLITS,
    THREADS,
    Bench,
    Dtype,
    Material,
    Outcome,
    Row,
    Scene,
    Setting,
    Spread,
    Weights,
    Work,
    drawn_outcomes,
)

NATIVE = "native"
"""All that this machine has."""
INSTRUCTION_SETS: dict[str, dict[str, str]] = {
    NATIVE: {},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"},
    "baseline": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"},
}
"""By name, with the environment that confines PyTorch, oneDNN and MKL to them."""
ANSWER_S = 300.0
STOP_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be compared with what."""

    audits: int
    """Comparisons in each row, at least."""
    dtypes: tuple[Dtype, ...] = DTYPES
    scenes: tuple[Scene, ...] = SCENES
    instruction_sets: tuple[str, ...] = (NATIVE,)
    threads: tuple[int, ...] = THREADS
    splits: tuple[int, ...] = SPLITS
    subspace: int = 1
    """By so many a hop has fewer values (`swarm.model.subspace`)."""

    @property
    def settings(self) -> tuple[Setting, ...]:
        return tuple(
            Setting(instructions, threads, splits)
            for instructions in self.instruction_sets
            for threads in self.threads
            for splits in self.splits
        )

    @property
    def num_microbatches(self) -> int:
        """Every scene is in it, at each stage."""
        count = len(self.settings)
        return max(2 * len(self.scenes), -(-self.audits // max(1, count * (count - 1) // 2)))


def available_instruction_sets() -> tuple[str, ...]:
    """Those that this machine can be confined to, the native one first."""
    capability = torch.backends.cpu.get_cpu_capability()
    return tuple(name for name in INSTRUCTION_SETS if name != "avx2" or capability.startswith("AVX512"))


def measure(plan: Plan, on_progress: Callable[[int], None] = lambda done: None) -> list[Row]:
    """Compare all settings of the plan; `on_progress` gets the microbatches that are done.

    Raises LocalError if a process fails.
    """
    material = Material.make(scenes=plan.scenes, subspace=plan.subspace)
    spread = Spread(plan.dtypes)
    with tempfile.TemporaryDirectory(prefix="homeswarm-calibrate-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        for scene, weights in material.weights.items():
            np.savez(folder / f"weights-{scene}.npz", *weights)
        processes = [
            stack.enter_context(_confined(folder, replace(plan, instruction_sets=(instructions,))))
            for instructions in plan.instruction_sets
        ]

        def begin(number: int) -> None:
            work = material.work(number, plan.scenes)
            _write_work(folder / "work.npz", work)
            for process in processes:
                process.begin(work.scene)

        benches = {dtype: Bench(dtype, plan.subspace) for dtype in plan.dtypes}
        begin(0)
        for number in range(plan.num_microbatches):
            answers = [process.outcomes() for process in processes]
            if number + 1 < plan.num_microbatches:
                begin(number + 1)  # computed there while these are compared here
            work = material.work(number, plan.scenes)
            for dtype in plan.dtypes:
                drawn = drawn_outcomes(benches[dtype], material.weights[work.scene], work)
                outcomes = [outcome for answer in answers for outcome in answer[dtype]]
                spread.add(dtype, outcomes, drawn, stage=number // len(plan.scenes) % 2)
            on_progress(number + 1)
    return spread.rows()


class _Confined:
    """A process that computes with one instruction set."""

    def __init__(self, folder: Path, plan: Plan, process: "subprocess.Popen[str]") -> None:
        self._folder = folder
        self._plan = plan
        self._process = process

    def begin(self, scene: Scene) -> None:
        """Compute the work that lies in the folder."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `outcomes` says why
            self._process.stdin.write(f"{scene}\n")
            self._process.stdin.flush()

    def outcomes(self) -> dict[Dtype, list[Outcome]]:
        """Of each setting of the plan, in order. Raises LocalError if the process has failed or is silent."""
        (name,), stdout = self._plan.instruction_sets, self._process.stdout
        assert stdout is not None
        ready = has_answered(stdout, within_s=ANSWER_S)
        if not ready or stdout.readline() != "done\n":
            what = "ended" if ready else f"was silent for {ANSWER_S:g} s"
            raise LocalError(f"the process that computes with {name} instructions {what}; leave that set out")
        return {
            dtype: [
                Outcome.of_arrays(_read(_outcome_file(self._folder, name, dtype, number)))
                for number in range(len(self._plan.settings))
            ]
            for dtype in self._plan.dtypes
        }


def has_answered(stdout: IO[Any], *, within_s: float) -> bool:
    """Whether there is something to read of a process, or it has ended; also where many files are open."""
    with selectors.DefaultSelector() as waiting:
        waiting.register(stdout, selectors.EVENT_READ)
        return bool(waiting.select(within_s))


@contextlib.contextmanager
def _confined(folder: Path, plan: Plan) -> Iterator[_Confined]:
    (name,) = plan.instruction_sets
    numbers = [",".join(map(str, of)) for of in (plan.threads, plan.splits)]
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, str(folder), name, ",".join(plan.dtypes), *numbers, str(plan.subspace)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **INSTRUCTION_SETS[name]},
    )
    with process:
        try:
            yield _Confined(folder, plan, process)
        finally:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _serve(folder: Path, plan: Plan) -> None:
    """In the process: compute whatever is asked for, until the input ends."""
    benches = {dtype: Bench(dtype, plan.subspace) for dtype in plan.dtypes}
    weights: dict[str, Weights] = {}
    for line in sys.stdin:
        scene = line.strip()
        if scene not in weights:
            first, last = _read(folder / f"weights-{scene}.npz")
            weights[scene] = (first, last)
        work = _read_work(folder / "work.npz", scene)
        for dtype, bench in benches.items():
            for number, setting in enumerate(plan.settings):
                made = bench.compute(weights[scene], work, setting)
                np.savez(_outcome_file(folder, setting.instructions, dtype, number), *made.arrays)
        sys.stdout.write("done\n")
        sys.stdout.flush()


def _outcome_file(folder: Path, instructions: str, dtype: str, number: int) -> Path:
    return folder / f"outcome-{instructions}-{dtype}-{number}.npz"


def _read(path: Path) -> list[NDArray[Any]]:
    with np.load(path, allow_pickle=False) as arrays:
        return [arrays[name] for name in arrays.files]


def _write_work(path: Path, work: Work) -> None:
    np.savez(path, work.tokens_BL, work.targets_BL, work.x_BLD, work.grad_y_BLD)


def _read_work(path: Path, scene: str) -> Work:
    tokens_BL, targets_BL, x_BLD, grad_y_BLD = _read(path)
    (known,) = (name for name in SCENES if name == scene)
    return Work(known, tokens_BL, targets_BL, x_BLD, grad_y_BLD)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _plan_of(name: str, dtypes: Sequence[str], threads: str, splits: str, subspace: str) -> Plan:
    return Plan(
        audits=0,
        dtypes=tuple(dtype for dtype in DTYPES if dtype in dtypes),
        instruction_sets=(name,),
        threads=_numbers(threads),
        splits=_numbers(splits),
        subspace=int(subspace),
    )


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), _plan_of(sys.argv[2], sys.argv[3].split(","), *sys.argv[4:7]))
