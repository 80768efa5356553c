"""A claimed tensor graded against its replay: honest, suspicious or fraud.

Only forward and backward differ between honest machines, and only by rounding. The error is relative, in L2: of the
whole tensor, and of each chunk of it, which may be four times as large, so that no lie hides in a small place. Of a
tensor on the wire only that is an error by which it lies beyond the cells of its codec.

What rounding may do is a matter of the work: next to nothing to most gradients, much to those that are what a
cancellation leaves. Past a floor an auditor measures it: its *own error* is how far replays come out that round
otherwise (`swarm.model.rounding`). An honest claim is no further off than such a replay; fraud lies past `CONVICTING`
of them, and past a bound below which no lie is worth a case.
"""

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from swarm.core.errors import LocalError
from swarm.core.settings import RunSettings, TensorKind

Tensor: TypeAlias = NDArray[np.floating[Any]]
Kind: TypeAlias = TensorKind
"""An activation or its gradient, held against what its replay came to before it was encoded; or a contribution, held
against the replay's, both as decoded."""

_HOPS: tuple[Kind, ...] = ("activation", "gradient")

CHUNK_VALUES = 4096
"""A chunk is so many values of the flattened tensor; the last one takes the rest as well."""
CHUNK_FACTOR = 4.0
"""A chunk's error counts as a quarter: few values scatter more than many."""
QUIET_CHUNK = 1e-3
"""A chunk of lower norm than this share of the RMS chunk norm is held to an error of that size."""
QUIET = 2.0**-100
"""Values of lower RMS than this are as good as zero: no division by less."""
OFF = 0.25
"""A value is off by more than this share of itself, or of its chunk's RMS if that is larger."""
LOCAL = 0.25
"""What a fault leaves as it is, is at least all but this share of its tensor. Why: docs/verification.md, section 9."""
ACCEPTED = 1.0
"""Own errors that are accepted without suspicion."""
CONVICTING = 2.5
"""Own errors past which a claim is fraud: honest ones of other make came to 1 (docs/calibration.md)."""
UNLIKE = 1.4
"""An error past which it is fraud in any case up to `ILL_CONDITIONED`: two tensors that have nothing in common are
sqrt(2) apart, one and its opposite 2."""
CLEARLY = 50.0
"""Own errors past which a few replays are enough to know them by."""
ILL_CONDITIONED = 0.5
"""Own error past which nearly nothing but rounding decides what comes out: fraud there is what is `CLEARLY` off."""
NEAR = 0.25
"""Share of its bound past which what an error moves has its own error measured: less is as good as nothing."""
CAUTION = 1.15
"""An accuser wants so much more than who judges: the judge's own error may come out a little larger."""


class Grade(Enum):
    HONEST = "honest"
    SUSPICIOUS = "suspicious"
    """More audits, no verdict."""
    FRAUD = "fraud"


@dataclass(frozen=True)
class Bounds:
    """What errors mean for one way to compute and one codec on the wire."""

    floor: float
    """Accepted without a closer look."""
    fraud: float
    """No less is fraud, however small the auditor's own error."""
    report_only: bool = False
    """Not calibrated: nothing is graded as fraud."""
    factor: float = 1.0
    """What of own errors is accepted, and past how many it is fraud, is so many times as much: the run key's."""


@dataclass(frozen=True)
class Comparison:
    """How far a claim is from its replay, and what that means."""

    grade: Grade
    error: float
    """Of the whole tensor; infinite for a claim that cannot be compared."""
    worst_chunk_error: float
    accept: float
    """Bound on `measured` up to which the claim was accepted here."""
    fraud: float
    own_error: float | None
    """None: not measured."""
    reason: str
    extent: float = 0.0
    """`extent_of` the error, of what is fraud."""
    moved: float = 0.0
    """Of a contribution: what the error moves, in learning rates a step (`verification.audit.amplified`)."""
    moved_fraud: float = math.inf
    """Bound on that."""
    own_moved: float | None = None
    """Of the auditor's own error; None: not measured."""

    @property
    def measured(self) -> float:
        """What is held against the bounds: the error, or a quarter of the worst chunk's if that is larger."""
        return _measured(self.error, self.worst_chunk_error)

    @property
    def share(self) -> float:
        """Of the fraud bounds, of the one that is nearest."""
        return max(self.measured / self.fraud, self.moved / self.moved_fraud)

    @property
    def wants_own_error(self) -> bool:
        """Whether the auditor's own error could still clear the claim, or tell how near its bound it is."""
        is_off = self.measured > self.accept or self.moved > NEAR * self.moved_fraud
        return self.own_error is None and is_off and self.measured < math.inf

    @property
    def is_clear(self) -> bool:
        """Whether what is fraud here is so by far."""
        is_far = self.measured > max(self.fraud, CLEARLY * (self.own_error or 0.0))
        return is_far or self.moved > max(self.moved_fraud, CLEARLY * (self.own_moved or 0.0))


_FP32 = Bounds(floor=1e-5, fraud=1e-3)
_FP32_CODED = Bounds(floor=1e-3, fraud=1e-2)
"""Of a contribution a code is off by a whole step or not at all: in a small tensor one is 4e-4."""
_BF16 = Bounds(floor=1e-2, fraud=4e-2)
_CODED_WINDOWS = Bounds(floor=2e-2, fraud=5e-2)
"""An error of the share d of a value's spread moves a code with about that chance, and by a whole step."""
_UNKNOWN = Bounds(floor=1e-1, fraud=4e-1, report_only=True)

TABLE: dict[tuple[str, str, Kind], Bounds] = {
    **{("fp32", "fp32", kind): _FP32 for kind in get_args(Kind)},
    **{("fp32", codec, kind): _FP32_CODED for codec in ("int8", "int4", "int4h") for kind in _HOPS},
    ("fp32", "bf16", "activation"): Bounds(floor=1e-3, fraud=4e-2),
    ("fp32", "bf16", "gradient"): Bounds(floor=1e-3, fraud=8e-2),
    ("fp32", "bf16", "contribution"): Bounds(floor=1e-3, fraud=8e-2),
    ("fp32", "int8", "contribution"): _FP32_CODED,
    ("fp32", "int2", "contribution"): _CODED_WINDOWS,
    **{("bf16", codec, kind): _BF16 for codec in ("fp32", "bf16", "int8", "int4", "int4h") for kind in _HOPS},
    **{("bf16", codec, "contribution"): _BF16 for codec in ("fp32", "bf16", "int8")},
    # Gradients in int4 come with a residual, and cannot be made again: a window in it can.
    **{("bf16", codec, "contribution"): _CODED_WINDOWS for codec in ("int4", "int2")},
}
"""By arithmetic (`ModelSettings.arithmetic`), codec on the wire, and what it carries."""


def bounds_for(arithmetic: str, codec: str, kind: Kind) -> Bounds:
    """The bounds of a computation and a codec; of a contribution, those of the averaging codec.

    Where nothing has been calibrated they are wide and report-only.
    """
    return TABLE.get((arithmetic, codec, kind), _UNKNOWN)


def bounds_in_force(settings: RunSettings, codec: str, kind: Kind) -> Bounds:
    """Those of a run, as its key has them (`audits.*_bounds`): a judgement of what was done under other settings is
    held to those."""
    bounds, factor = bounds_for(settings.model.arithmetic, codec, kind), settings.audits.bounds_factor(kind)
    return replace(bounds, floor=factor * bounds.floor, fraud=factor * bounds.fraud, factor=factor)


def compare(
    claimed: Tensor,
    replayed: Tensor,
    bounds: Bounds,
    *,
    cells: Tensor | None = None,
    own_error: float | None = None,
    caution: float = 1.0,
) -> Comparison:
    """Grade a claim. Raises LocalError if the replay itself is not finite, or too large.

    `cells`: how far a claim's values may lie from the replay's for the codec's sake; None: not at all. `own_error`:
    the largest `relative_error` of replays that round otherwise; without it only the floor is accepted, and
    `wants_own_error` says if it would help. `caution` is an accuser's.
    """
    assert own_error is None or own_error >= 0, f"own error is {own_error}"
    accept = max(bounds.floor, bounds.factor * ACCEPTED * (own_error or 0.0))
    fraud = fraud_bound(bounds.fraud, own_error, caution, convicting=bounds.factor * CONVICTING)

    def graded(grade: Grade, error: float, worst: float, reason: str) -> Comparison:
        extent = 0.0
        if grade is Grade.FRAUD and bounds.report_only:
            grade, reason = Grade.SUSPICIOUS, f"report only: {reason}"
        elif grade is Grade.FRAUD:
            extent = extent_of(claimed, replayed)
            reason = f"{reason}; {extent:.1%} of it is off"
        return Comparison(grade, error, worst, accept, fraud, own_error, reason, extent)

    if _num_broken(replayed):
        raise LocalError("replay holds values that are not finite: no claim can be held against it")
    if claimed.shape != replayed.shape:
        return graded(Grade.FRAUD, math.inf, math.inf, f"shape {claimed.shape}, replayed {replayed.shape}")
    num_broken = _num_broken(claimed)
    if num_broken:
        return graded(Grade.FRAUD, math.inf, math.inf, f"{num_broken} of {claimed.size} values are not finite")
    error, worst = _errors(claimed, replayed, cells)
    measured = _measured(error, worst)
    said = f"error {error:.2e}, worst chunk {worst:.2e}: accepted to {accept:.2e}, fraud past {fraud:.2e}"
    if own_error is not None:
        said = f"{said}, own error {own_error:.2e}"
    if measured <= accept:
        return graded(Grade.HONEST, error, worst, said)
    return graded(Grade.FRAUD if measured > fraud else Grade.SUSPICIOUS, error, worst, said)


def _num_broken(tensor: Tensor) -> int:
    """Values that are not finite."""
    flat = tensor.reshape(-1)
    return flat.size - sum(int(np.isfinite(flat[where]).sum()) for where in _chunks(flat.size))


def fraud_bound(least: float, own_error: float | None, caution: float, *, convicting: float) -> float:
    """Past what a claim is fraud, beside a replay with that own error (None: not measured)."""
    own = own_error or 0.0
    return max(least, caution * (min(convicting * own, UNLIKE) if own <= ILL_CONDITIONED else CLEARLY * own))


def relative_error(tensor: Tensor, reference: Tensor) -> float:
    """What `Comparison.measured` is for these two; both finite and of one shape."""
    return _measured(*_errors(tensor, reference))


def extent_of(claimed: Tensor, replayed: Tensor) -> float:
    """How much of a replay is not to be found in the claim, from 0 to 1.

    The share of the values that are `OFF`, or of the replay's squared norm that lies in them, if that is larger: a lie
    about the few values that matter is as large as one about the many that do not.
    """
    if claimed.shape != replayed.shape:
        return 1.0
    tensor, reference = claimed.reshape(-1), replayed.reshape(-1)
    _, norms_C = _chunk_squares(tensor, reference)
    least, num_off, norm_off = _least_norm(norms_C), 0, 0.0
    for where, norm in zip(_chunks(reference.size), norms_C, strict=True):
        piece = reference[where].astype(np.float64)
        rms = max(math.sqrt(norm), least) / math.sqrt(piece.size)
        off = ~(np.abs(tensor[where] - piece) <= OFF * np.maximum(np.abs(piece), rms))  # so is what is not a number
        num_off, norm_off = num_off + int(off.sum()), norm_off + halved_sum(np.square(piece[off]))
    norms = halved_sum(norms_C)
    return max(num_off / max(1, reference.size), norm_off / norms if norms > 0 else 0.0)


def _least_norm(norms_C: NDArray[np.float64]) -> float:
    """What a chunk of lower norm counts as."""
    return max(QUIET_CHUNK * math.sqrt(halved_sum(norms_C) / len(norms_C)), QUIET * math.sqrt(CHUNK_VALUES))


def _chunks(num_values: int) -> list[slice]:
    """The last takes the rest as well."""
    starts = [chunk * CHUNK_VALUES for chunk in range(max(1, num_values // CHUNK_VALUES))]
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], num_values], strict=True)]


def _measured(error: float, worst_chunk_error: float) -> float:
    return max(error, worst_chunk_error / CHUNK_FACTOR)


def _errors(tensor: Tensor, reference: Tensor, cells: Tensor | None = None) -> tuple[float, float]:
    """Relative error of the whole, and of the chunk where it is largest: the same bits on every machine."""
    if reference.size == 0:
        return 0.0, 0.0
    flat_cells = cells.reshape(-1) if cells is not None else None
    squares_C, norms_C = _chunk_squares(tensor.reshape(-1), reference.reshape(-1), flat_cells)
    all_squares, all_norms = halved_sum(squares_C), halved_sum(norms_C)
    if not math.isfinite(all_norms):
        raise LocalError(f"replay holds values up to {np.abs(reference).max():.2e}: no claim can be held against it")
    error = math.sqrt(all_squares) / max(math.sqrt(all_norms), QUIET * math.sqrt(reference.size))
    worst = np.sqrt(squares_C) / np.maximum(np.sqrt(norms_C), _least_norm(norms_C))
    return error, float(worst.max())


def _chunk_squares(
    tensor: Tensor, reference: Tensor, cells: Tensor | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sums of squares of each chunk: of the difference beyond the cells, and of the reference."""
    chunks = _chunks(reference.size)
    squares_C, norms_C = np.zeros(len(chunks)), np.zeros(len(chunks))
    for chunk, where in enumerate(chunks):
        piece = reference[where].astype(np.float64)
        away = tensor[where].astype(np.float64) - piece
        if cells is not None:
            away = np.maximum(np.abs(away) - cells[where], 0.0)
        with np.errstate(over="ignore"):  # a claim that far away has an infinite error
            squares_C[chunk], norms_C[chunk] = halved_sum(away * away), halved_sum(piece * piece)
    return squares_C, norms_C


def halved_sum(values: NDArray[np.float64]) -> float:
    """Their sum, by halves: the order of the additions does not depend on the machine."""
    sums = np.zeros(1 << max(0, values.size - 1).bit_length())
    sums[: values.size] = values
    while sums.size > 1:
        half = sums.size // 2
        sums = sums[:half] + sums[half:]
    return float(sums[0])
