"""Muon's turn of a matrix in integers: each of its singular values made about 1, the same bits on every machine.

Newton and Schulz's iteration, five times: X <- a X + (b G + c G^2) X with G = X X^T (of tall matrices from the other
side), from X = matrix / its norm. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024, whose
a, b and c these are; `torch.optim.Muon` multiplies in bf16.

Here a product's operands are rounded to 16-bit integers, scaled so that no row of either is longer than 32000: by
Cauchy and Schwarz each sum of products is then exact in 32 bits, in whatever order, whatever wraps on the way. So
rounded an operand is as near to itself as in bf16: within 0.1 % at 8192 values a row. All else is element by element,
rounded operation by operation, or a sum of fixed order.
"""

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kernels.bits import flushed
from kernels.compiled import compiled
from kernels.threads import ONE_THREAD, Threads

Floats: TypeAlias = NDArray[np.float32]
Codes: TypeAlias = NDArray[np.int16]

NUM_ITERATIONS = 5
SHORTEST = 1e-7
"""Norm below which a matrix is taken for zeros."""
_A, _B, _C = 3.4445, -4.7750, 2.0315
_LONGEST_ROW = 32000.0
"""With what rounding adds, half a unit for each of 2^22 values at most, the square of it is below 2^31."""
_MOST_DEPTH = 1 << 22
_NEAREST = np.float32(3 << 22)
"""Added and taken away again it leaves the nearest integer, ties to even, of what is below 2^22."""
_ROWS = 32
"""Of the left operand at a time: their sums stay in the cache."""
_DEPTH = 2048
"""Of a row's values at a time: four rows of the right operand stay in the nearest cache."""
_TILE = 4


def scratch_bytes(rows: int, columns: int) -> int:
    """Memory that `turned` takes, its result included."""
    least = min(rows, columns)
    return 8 * rows * columns + 6 * least * least


def products_of(rows: int, columns: int) -> int:
    """Multiplications of two integers that `turned` takes: of symmetrical products half."""
    least, most = min(rows, columns), max(rows, columns)
    return NUM_ITERATIONS * (least * least * most * 3 + least**3) // 2


def turned(matrix: Floats, norm: float, *, threads: Threads = ONE_THREAD) -> Floats:
    """About U V^T of a matrix U S V^T whose norm is `norm`: its singular values lie between 0.7 and 1.2, but for those
    that were nearly none. Zeros of one that is shorter than `SHORTEST`. The matrix itself stays as it is."""
    rows, columns = matrix.shape
    least, is_wide = min(rows, columns), rows <= columns
    assert max(rows, columns) <= _MOST_DEPTH, f"a matrix of {matrix.shape}"
    if norm < SHORTEST:
        return np.zeros_like(matrix)
    values = matrix * np.float32(1.0 / norm)
    by_row, by_column = _codes(rows, columns), _codes(columns, rows)
    gram, of_gram = np.zeros((least, least), dtype=np.float32), _codes(least, least)
    for _ in range(NUM_ITERATIONS):
        scale = _LONGEST_ROW / max(_longest_row(values, threads), _longest_column(values, threads))
        _encode(values, scale, by_row, threads)
        _encode_across(values, scale, by_column, threads)
        _square(by_row if is_wide else by_column, gram, (0.0, 1.0 / scale**2), threads)
        scale_of_gram = _LONGEST_ROW / _longest_row(gram, threads)
        _encode(gram, scale_of_gram, of_gram, threads)
        _square(of_gram, gram, (_B, _C / scale_of_gram**2), threads)
        scale_of_gram = _LONGEST_ROW / _longest_row(gram, threads)
        _encode(gram, scale_of_gram, of_gram, threads)
        left, right = (of_gram, by_column) if is_wide else (by_row, of_gram)
        _multiply(left, right, values, (_A, 1.0 / (scale * scale_of_gram)), threads)
    return values


def _codes(rows: int, columns: int) -> Codes:
    """Room for a matrix, with rows of zeros behind it that fill a tile."""
    made = np.empty((-(-rows // _TILE) * _TILE, columns), dtype=np.int16)
    made[rows:] = 0
    return made


def _longest_row(values: Floats, threads: Threads) -> float:
    squares = threads.over(
        values.shape[0], lambda start, stop: _row_square(values[start:stop]), grain=1, num_rows=values.shape[1]
    )
    return math.sqrt(max(squares))


def _longest_column(values: Floats, threads: Threads) -> float:
    squares = threads.over(
        values.shape[1], lambda start, stop: _column_square(values, start, stop), grain=16, num_rows=values.shape[0]
    )
    return math.sqrt(max(squares))


def _encode(values: Floats, scale: float, codes: Codes, threads: Threads) -> None:
    """codes = values * scale, to the nearest integer."""
    by, (rows, columns) = np.float32(scale), values.shape
    threads.over(rows, lambda start, stop: _round(values[start:stop], by, codes[start:stop]), grain=1, num_rows=columns)


def _encode_across(values: Floats, scale: float, codes: Codes, threads: Threads) -> None:
    """The same of the matrix mirrored at its diagonal."""
    by, (rows, columns) = np.float32(scale), values.shape
    threads.over(columns, lambda start, stop: _round_across(values, by, codes, start, stop), grain=_ROWS, num_rows=rows)


def _square(codes: Codes, out: Floats, factors: tuple[float, float], threads: Threads) -> None:
    """out = factors[0] * out + factors[1] * codes codes^T, which are both symmetrical."""
    size, (keep, share) = out.shape[0], map(np.float32, factors)
    cost = size * codes.shape[1] // 64 + 1
    threads.over(
        size, lambda start, stop: _square_rows(codes, out, keep, share, start, stop), grain=_ROWS, num_rows=cost
    )
    threads.over(size, lambda start, stop: _mirror(out, start, stop), grain=_ROWS, num_rows=size)


def _multiply(left: Codes, right: Codes, out: Floats, factors: tuple[float, float], threads: Threads) -> None:
    """out = factors[0] * out + factors[1] * left right^T."""
    (rows, columns), (keep, share) = out.shape, map(np.float32, factors)
    cost = columns * left.shape[1] // 64 + 1
    threads.over(
        rows, lambda start, stop: _product_rows(left, right, out, keep, share, start, stop), grain=_ROWS, num_rows=cost
    )


@compiled
def _row_square(values: Floats) -> float:
    """The largest sum of squares of a row."""
    largest = 0.0
    lanes = np.empty(8, dtype=np.float64)
    for i in range(values.shape[0]):
        row = values[i]
        lanes[:] = 0.0
        whole = row.size // 8 * 8
        for j in range(0, whole, 8):
            for lane in range(8):
                value = np.float64(row[j + lane])
                lanes[lane] += value * value
        total = ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]))
        for j in range(whole, row.size):
            value = np.float64(row[j])
            total += value * value
        largest = max(largest, total)
    return largest


@compiled
def _column_square(values: Floats, start: int, stop: int) -> float:
    """The largest sum of squares of these columns."""
    sums = np.zeros(stop - start, dtype=np.float64)
    for i in range(values.shape[0]):
        row = values[i][start:stop]
        for j in range(row.size):
            value = np.float64(row[j])
            sums[j] += value * value
    return float(sums.max())


@compiled
def _code(value: np.float32, scale: np.float32) -> np.int16:
    return np.int16(np.int32((value * scale + _NEAREST) - _NEAREST))


@compiled
def _round(values: Floats, scale: np.float32, codes: Codes) -> None:
    for i in range(values.shape[0]):
        row, target = values[i], codes[i]
        for j in range(row.size):
            target[j] = _code(row[j], scale)


@compiled
def _round_across(values: Floats, scale: np.float32, codes: Codes, start: int, stop: int) -> None:
    rows = values.shape[0]
    for first in range(0, rows, _ROWS):
        for j in range(start, stop):
            target = codes[j][first : min(first + _ROWS, rows)]
            for i in range(target.size):
                target[i] = _code(values[first + i, j], scale)


@compiled
def _square_rows(codes: Codes, out: Floats, keep: np.float32, share: np.float32, start: int, stop: int) -> None:
    sums = np.empty((_ROWS, codes.shape[0]), dtype=np.int32)
    for first in range(start, stop, _ROWS):
        last = min(first + _ROWS, stop)
        _sum_products(codes[first : -(-last // _TILE) * _TILE], codes, first, sums)
        for i in range(first, last):
            row, of_row = out[i][i:], sums[i - first][i : out.shape[1]]
            for j in range(row.size):
                row[j] = flushed(row[j] * keep + np.float32(of_row[j]) * share)


@compiled
def _mirror(out: Floats, start: int, stop: int) -> None:
    """Rows `start` to `stop` left of the diagonal, which the others are right of it."""
    for first in range(start, stop, _ROWS):
        for above in range(0, min(first + _ROWS, stop), _ROWS):
            for i in range(first, min(first + _ROWS, stop)):
                for j in range(above, min(above + _ROWS, i)):
                    out[i, j] = out[j, i]


@compiled
def _product_rows(
    left: Codes, right: Codes, out: Floats, keep: np.float32, share: np.float32, start: int, stop: int
) -> None:
    sums = np.empty((_ROWS, right.shape[0]), dtype=np.int32)
    for first in range(start, stop, _ROWS):
        last = min(first + _ROWS, stop)
        _sum_products(left[first : -(-last // _TILE) * _TILE], right, 0, sums)
        for i in range(first, last):
            row, of_row = out[i], sums[i - first][: out.shape[1]]
            for j in range(row.size):
                row[j] = flushed(row[j] * keep + np.float32(of_row[j]) * share)


@compiled
def _sum_products(left: Codes, right: Codes, first: int, sums: NDArray[np.int32]) -> None:
    """sums[i, j] = left[i] right[j] for all of `right` from `first` on: whole tiles."""
    sums[: left.shape[0], first:] = 0
    for start in range(0, left.shape[1], _DEPTH):
        stop = min(start + _DEPTH, left.shape[1])
        for j in range(first, right.shape[0], 4):
            p, q, r, s = (
                right[j][start:stop],
                right[j + 1][start:stop],
                right[j + 2][start:stop],
                right[j + 3][start:stop],
            )
            for i in range(0, left.shape[0], 2):
                a, b = left[i][start:stop], left[i + 1][start:stop]
                ap = aq = ar = as_ = bp = bq = br = bs = np.int32(0)
                for k in range(a.size):
                    x, y = np.int32(a[k]), np.int32(b[k])
                    ap = np.int32(ap + np.int32(x * np.int32(p[k])))
                    aq = np.int32(aq + np.int32(x * np.int32(q[k])))
                    ar = np.int32(ar + np.int32(x * np.int32(r[k])))
                    as_ = np.int32(as_ + np.int32(x * np.int32(s[k])))
                    bp = np.int32(bp + np.int32(y * np.int32(p[k])))
                    bq = np.int32(bq + np.int32(y * np.int32(q[k])))
                    br = np.int32(br + np.int32(y * np.int32(r[k])))
                    bs = np.int32(bs + np.int32(y * np.int32(s[k])))
                one, two = sums[i][j : j + 4], sums[i + 1][j : j + 4]
                one[0] += ap
                one[1] += aq
                one[2] += ar
                one[3] += as_
                two[0] += bp
                two[1] += bq
                two[2] += br
                two[3] += bs
