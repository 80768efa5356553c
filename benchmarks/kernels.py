"""Our kernels measured against memcpy and against what torch, bitsandbytes and hivemind offer.

    python -m benchmarks.kernels [--threads 2] [--json]

Every side works on the same fp32 values with the same number of threads; sides take turns, medians are shown. Speeds
are in GB/s of those fp32 values, whatever is read or written. A side whose package is not installed is left out.
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import click
import numpy as np
import torch

from kernels import int8_moments, norms, optimizers
from kernels.cache_hints import zeros_on_lines
from kernels.codecs import formats, int8_blocks
from kernels.threads import Threads
from swarm.averaging.aggregate import Rule, aggregate

NUM_VALUES = 1 << 24
SMOKE_VALUES = 1 << 20
PART_SHAPE = (8, 131_072)
BUDGET_S = 0.5
"""A side is run about this long in all, but at least `FEWEST_ROUNDS` times."""
FEWEST_ROUNDS, MOST_ROUNDS = 3, 9
PAUSE_S = 0.005
"""Between sides: OpenMP's threads wait for more work in a loop for a while, on a core that the next side needs."""
SCALARS = (1.0, 0.9, 0.1, 0.95, 0.05, 1.5, 1e-8, 1e-3, 0.0)
RATIO_LIMIT = 1.165

Sides = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Goal:
    """What a figure of the first side is to be, in figures of the second if there is one."""

    what: str
    measured: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def holds(self) -> bool:
        return (self.at_least is None or self.measured >= self.at_least) and (
            self.at_most is None or self.measured <= self.at_most
        )


@dataclass
class Bench:
    """The data all sides work on, and what was measured."""

    threads: Threads
    num_values: int = NUM_VALUES
    budget_s: float = BUDGET_S
    speeds: dict[str, dict[str, float]] = field(default_factory=dict)
    times: dict[str, dict[str, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(0)
        self.values, self.other = (zeros_on_lines(self.num_values, np.float32) for _ in range(2))
        rng.standard_normal(dtype=np.float32, out=self.values)
        self.tensor, self.other_tensor = torch.from_numpy(self.values), torch.from_numpy(self.other)

    def memcpy(self) -> None:
        """One copy a thread: a short one would go through the cache, which is slower."""
        step = -(-self.num_values // self.threads.count)

        def copy(start: int) -> None:
            np.copyto(self.other[start : start + step], self.values[start : start + step])

        self.threads.map(copy, range(0, self.num_values, step))

    def measure_speed(self, kernel: str, sides: Sides) -> None:
        seconds = medians({**sides, "memcpy": self.memcpy}, self.budget_s)
        self.speeds[kernel] = {side: self.values.nbytes / taken / 1e9 for side, taken in seconds.items()}

    def measure_time(self, step: str, sides: Sides) -> None:
        self.times[step] = {side: 1e3 * taken for side, taken in medians(sides, self.budget_s).items()}


def medians(sides: Sides, budget_s: float) -> dict[str, float]:
    """Seconds that each side takes, in the median of rounds in which all take turns."""
    for run in sides.values():
        run()  # the first call compiles
    once = {side: timed(run) for side, run in sides.items()}
    rounds = {side: max(FEWEST_ROUNDS, min(MOST_ROUNDS, int(budget_s / taken))) for side, taken in once.items()}
    taken = {side: [first] for side, first in once.items()}
    for turn in range(1, MOST_ROUNDS):
        for side, run in sides.items():
            if turn < rounds[side]:
                if len(sides) > 1:
                    time.sleep(PAUSE_S)
                taken[side].append(timed(run))
    return {side: statistics.median(each) for side, each in taken.items()}


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure_int8(bench: Bench) -> None:
    """Encoding, decoding, and decoding into a sum."""
    values, other, threads = bench.values, bench.other, bench.threads
    num = bench.num_values
    scales, codes = np.empty(num // int8_blocks.BLOCK_VALUES, np.uint16), np.empty(num, np.int8)
    seed, factor = np.arange(4, dtype=np.uint64), np.float32(0.3)
    encode: Sides = {"ours": lambda: int8_blocks.encode(values, seed, scales, codes, threads=threads)}
    decode: Sides = {"ours": lambda: int8_blocks.decode(scales, codes, other, threads=threads)}
    add: Sides = {"ours": lambda: int8_blocks.add_decoded(scales, codes, factor, other, threads=threads)}

    blocks = bench.tensor.view(-1, int8_blocks.BLOCK_VALUES)
    steps = blocks.abs().amax(dim=1, keepdim=True) / 127
    whole = (blocks / steps).round_().to(torch.int8)
    encode["torch"] = lambda: (blocks / (blocks.abs().amax(dim=1, keepdim=True) / 127)).round_().to(torch.int8)
    decode["torch"] = lambda: whole * steps
    add["torch"] = lambda: bench.other_tensor.add_((whole * steps).view(-1), alpha=0.3)

    if library := bitsandbytes(bench):
        functional = library.functional
        quantized, state = functional.quantize_blockwise(bench.tensor, blocksize=256)
        encode["bitsandbytes"] = lambda: functional.quantize_blockwise(bench.tensor, blocksize=256)
        decode["bitsandbytes"] = lambda: functional.dequantize_blockwise(quantized, state)
        add["bitsandbytes"] = lambda: bench.other_tensor.add_(
            functional.dequantize_blockwise(quantized, state), alpha=0.3
        )
    if codec := fastest_of_hivemind(bench):
        sent, info = codec
        encode["hivemind"] = lambda: sent.compress(bench.tensor, info)
        message = sent.compress(bench.tensor, info)
        decode["hivemind"] = lambda: sent.extract(message)
        add["hivemind"] = lambda: bench.other_tensor.add_(sent.extract(message), alpha=0.3)

    bench.measure_speed("int8 encode", encode)
    bench.measure_speed("int8 decode", decode)
    bench.measure_speed("int8 decode-accumulate", add)
    bench.measure_speed(
        "int8 norm",
        {"ours": lambda: int8_blocks.sum_of_squares(scales, codes, threads=threads)},
    )


def measure_formats(bench: Bench) -> None:
    """bf16 and norms."""
    bits, other_bits = bench.values.view(np.int32), bench.other.view(np.int32)
    halves, half_tensor = np.empty(bench.num_values, np.uint16), torch.empty(bench.num_values, dtype=torch.bfloat16)
    threads, factor = bench.threads, np.float32(0.3)
    bench.measure_speed(
        "bf16 encode",
        {
            "ours": lambda: formats.to_bfloat16(bits, halves, threads=threads),
            "torch": lambda: half_tensor.copy_(bench.tensor),
        },
    )
    bench.measure_speed(
        "bf16 decode",
        {
            "ours": lambda: formats.from_bfloat16(halves, other_bits, threads=threads),
            "torch": lambda: bench.other_tensor.copy_(half_tensor),
        },
    )
    bench.measure_speed(
        "bf16 decode-accumulate",
        {
            "ours": lambda: formats.add_bfloat16(halves, factor, bench.other, threads=threads),
            "torch": lambda: bench.other_tensor.add_(half_tensor, alpha=0.3),
        },
    )
    bench.measure_speed(
        "norm",
        {
            "ours": lambda: norms.norm_of_parts(bench.values, part_values=1 << 18, threads=threads),
            "torch": lambda: torch.linalg.vector_norm(bench.tensor),
        },
    )


def measure_optimizers(bench: Bench) -> None:
    """Steps of 2^24 values."""
    gradient, first, second = (zeros_on_lines(bench.num_values, np.float32) for _ in range(3))
    np.multiply(bench.values, np.float32(0.01), out=gradient)
    bounds, keep, times = np.array([0, bench.num_values]), *np.array([[0.999], [1.0]], dtype=np.float32)
    scalars = np.array(SCALARS, dtype=np.float32)
    common = (bounds, keep, times, scalars)
    bench.measure_time(
        "adamw",
        {
            "ours": lambda: optimizers.adamw(
                bench.values, gradient, first, second, bench.other, *common, threads=bench.threads
            ),
            "torch": torch_step(torch.optim.AdamW, gradient, bench, fused=True),
        },
    )
    mixed = (bounds, keep, times, np.array([*SCALARS[:-1], 1e-4], dtype=np.float32))
    bench.measure_time(
        "nadamw",
        {
            "ours": lambda: optimizers.adamw(
                bench.values, gradient, first, second, bench.other, *mixed, threads=bench.threads
            ),
            "torch": torch_step(torch.optim.NAdam, gradient, bench, decoupled_weight_decay=True, foreach=True),
        },
    )
    signed, unsigned = np.zeros(bench.num_values, np.int8), np.zeros(bench.num_values, np.uint8)
    scales = np.zeros(int8_moments.num_blocks(bench.num_values), np.float32)
    limited = np.array([*SCALARS, RATIO_LIMIT], dtype=np.float32)
    seed = np.arange(4, dtype=np.uint64)
    sides: Sides = {
        "ours": lambda: int8_moments.adamw(
            *(bench.values, gradient, signed, unsigned, scales, bench.other, bounds, keep, times, limited, seed),
            threads=bench.threads,
        )
    }
    if library := bitsandbytes(bench):
        sides["bitsandbytes"] = torch_step(library.optim.AdamW8bit, gradient, bench)
    bench.measure_time("adamw, int8 moments", sides)


def torch_step(kind: Any, gradient: Any, bench: Bench, **options: Any) -> Callable[[], object]:
    parameter = torch.nn.Parameter(bench.tensor.clone())
    parameter.grad = torch.from_numpy(gradient)
    step: Callable[[], object] = kind([parameter], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, **options).step
    return step


def measure_rules(bench: Bench) -> None:
    """Aggregates of 8 x 131072 values, two of the eight far off, so that CenteredClip takes all its iterations."""
    rows_NV = bench.values[: PART_SHAPE[0] * PART_SHAPE[1]].reshape(PART_SHAPE).copy()
    rows_NV[-2:] *= np.float32(100)
    weights = [1] * PART_SHAPE[0]
    rows = torch.from_numpy(rows_NV)

    def ours(rule: Rule) -> Callable[[], object]:
        return lambda: aggregate(list(rows_NV), weights, rule=rule, threads=bench.threads)

    bench.measure_time("mean", {"ours": ours("mean"), "torch": lambda: rows.mean(dim=0)})
    bench.measure_time("centered clip", {"ours": ours("centered_clip")})
    bench.measure_time(
        "trimmed mean", {"ours": ours("trimmed_mean"), "torch": lambda: rows.sort(dim=0)[0][2:6].mean(0)}
    )
    bench.measure_time("median", {"ours": ours("median"), "torch": lambda: rows.median(dim=0)})


def bitsandbytes(bench: Bench) -> Any:
    """The package, or None with a note. It takes seconds to import."""
    try:
        import bitsandbytes as library
    except ImportError as error:
        note(bench, f"bitsandbytes is left out ({error}); pip install bitsandbytes")
        return None
    return library


def fastest_of_hivemind(bench: Bench) -> tuple[Any, Any] | None:
    """The codec of hivemind's three in 8 bits that encodes fastest, and what it wants to know of a tensor."""
    try:
        from hivemind import compression
    except ImportError as error:
        note(bench, f"hivemind is left out ({error})")
        return None
    info = compression.CompressionInfo.from_tensor(bench.tensor)
    best: tuple[float, Any] | None = None
    for kind in ("Uniform8BitQuantization", "Quantile8BitQuantization", "BlockwiseQuantization"):
        codec = getattr(compression, kind)()
        try:
            codec.compress(bench.tensor[:1024], info)
            taken = timed(lambda codec=codec: codec.compress(bench.tensor, info))
        except (ImportError, AttributeError, TypeError, ValueError, RuntimeError) as error:
            note(bench, f"hivemind's {kind} is left out ({str(error)[:80]})")
            continue
        note(bench, f"hivemind's {kind} encodes {bench.values.nbytes / taken / 1e9:.2f} GB/s")
        if best is None or taken < best[0]:
            best = taken, codec
    return None if best is None else (best[1], info)


def note(bench: Bench, text: str) -> None:
    if text not in bench.notes:
        bench.notes.append(text)


def goals(bench: Bench) -> list[Goal]:
    speeds, times = bench.speeds, bench.times
    encode, add = speeds["int8 encode"], speeds["int8 decode-accumulate"]
    adamw, adamw_int8 = times["adamw"], times["adamw, int8 moments"]
    found = [
        Goal("int8 encode / memcpy", encode["ours"] / encode["memcpy"], at_least=0.5),
        Goal("int8 decode-accumulate / memcpy", add["ours"] / add["memcpy"], at_least=0.6),
        Goal("adamw, time / torch's fused", adamw["ours"] / adamw["torch"], at_most=1.2),
        Goal("centered clip of 8 x 131072, ms", times["centered clip"]["ours"], at_most=4.0),
    ]
    if "bitsandbytes" in encode:
        found += [
            Goal("int8 encode / bitsandbytes", encode["ours"] / encode["bitsandbytes"], at_least=8.0),
            Goal(
                "adamw, int8 moments, faster than bitsandbytes'", adamw_int8["bitsandbytes"] / adamw_int8["ours"], 8.0
            ),
        ]
    return found


def table(title: str, rows: dict[str, dict[str, float]]) -> list[str]:
    sides = ("ours", "torch", "bitsandbytes", "hivemind", "memcpy")
    lines = ["", f"{title:28}" + "".join(f"{side:>14}" for side in sides)]
    for name, figures in rows.items():
        cells = "".join(f"{figures[side]:14.2f}" if side in figures else f"{'':14}" for side in sides)
        lines.append(f"{name:28}{cells}")
    return lines


@click.command(help=__doc__)
@click.option("--threads", default=2, show_default=True, help="Threads of every side.")
@click.option("--smoke", is_flag=True, help="Few values, once: does it run?")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
def main(threads: int, smoke: bool, as_json: bool) -> None:
    torch.set_num_threads(threads)
    bench = Bench(Threads(threads), SMOKE_VALUES, 0.0) if smoke else Bench(Threads(threads))
    for measure in (measure_int8, measure_formats, measure_optimizers, measure_rules):
        measure(bench)
    reached = goals(bench)
    if as_json:
        verdicts = {goal.what: {"measured": goal.measured, "holds": goal.holds} for goal in reached}
        answer = {"threads": threads, "kernels": bench.speeds, "steps": bench.times, "goals": verdicts}
        click.echo(json.dumps({**answer, "notes": bench.notes}, indent=2))
        return
    lines = table(f"GB/s of fp32, {threads} threads", bench.speeds) + table("milliseconds", bench.times) + [""]
    for goal in reached:
        limit = f"at least {goal.at_least}" if goal.at_least is not None else f"at most {goal.at_most}"
        lines.append(f"{'holds' if goal.holds else 'MISSED':8}{goal.what}: {goal.measured:.2f}, {limit}")
    click.echo("\n".join([*lines, "", *bench.notes]))


if __name__ == "__main__":
    main()
