"""What every kernel computes from inputs that no library's arithmetic can change, as SHA-256.

    python -m tests.kernels.outputs > tests/kernels/golden.json

writes the golden digests anew. They change only with the protocol's version: peers of one run must agree on the bits.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from kernels import clipping, int8_moments, norms, optimizers, orthogonal, robust, windows
from kernels.codecs import (
    formats,
    hadamard_tiles,
    int2_blocks,
    int4_blocks,
    int4_tokens,
    int8_blocks,
    int8_tokens,
    topk,
)
from kernels.codecs.outliers import num_outliers
from kernels.threads import SMALLEST_RANGE_VALUES, Threads

Floats = NDArray[np.float32]
Output = bytes | float | bool | NDArray[np.generic]

SIZE = SMALLEST_RANGE_VALUES + 4_321
"""Threads share it; neither blocks nor runs fit into it."""
SEED = np.array([1, 2**63, 3, 2**64 - 1], dtype=np.uint64)
FACTOR = np.float32(0.3)


def plain(stream: int, size: int = SIZE) -> Floats:
    """Roughly normal values of deviation about 1: sums of four 16-bit numbers from PCG64, so exact in fp32."""
    draws = np.random.PCG64(stream).random_raw(size).view(np.uint16).reshape(size, 4).astype(np.int64)
    return ((draws.sum(axis=1) - 2 * 65535) * 2.0**-15).astype(np.float32)


def wide(stream: int, size: int = SIZE) -> Floats:
    """The same times powers of two from 2^-140 to 2^51, many subnormal: they make every branch run."""
    exponents = (np.random.PCG64(stream + 1000).random_raw(size) % np.uint64(192)).astype(np.int32) - 140
    return np.ldexp(plain(stream, size), exponents).astype(np.float32)


def digests(threads: Threads) -> dict[str, str]:
    """Of every kernel's outputs, where `threads` share the work."""
    results = {}
    for group in (_formats, _int8, _low_bit, _tokens, _sums, _robust, _optimizers, _orthogonal, _windows):
        for name, outputs in group(threads):
            digest = hashlib.sha256()
            for output in outputs:
                digest.update(output.tobytes() if isinstance(output, np.ndarray) else repr(output).encode())
            results[name] = digest.hexdigest()
    return results


Named = Iterator[tuple[str, list[Output]]]


def _bits(values: Floats) -> NDArray[np.int32]:
    return values.view(np.int32)


def _formats(threads: Threads) -> Named:
    out, halves = np.empty(SIZE, np.float32), np.empty(SIZE, np.uint16)
    for label, values in (("plain", plain(1)), ("wide", wide(2))):
        good = formats.flush(_bits(values), _bits(out), threads=threads)
        yield f"flush {label}", [good, out]
        good = formats.to_bfloat16(_bits(values), halves, threads=threads)
        yield f"bf16 encode {label}", [good, halves]
        good = formats.from_bfloat16(halves, _bits(out), threads=threads)
        yield f"bf16 decode {label}", [good, out, formats.is_valid_bfloat16(halves)]
        total = plain(3)
        formats.add_bfloat16(halves, FACTOR, total, threads=threads)
        formats.add_fp32(_bits(values), FACTOR, total, threads=threads)
        yield f"bf16 and fp32 added {label}", [total, formats.is_valid_fp32(_bits(values))]


def _int8(threads: Threads) -> Named:
    scales, codes = np.empty(-(-SIZE // 128), np.uint16), np.empty(SIZE, np.int8)
    out, total = np.empty(SIZE, np.float32), plain(3)
    for label, values in (("plain", plain(4)), ("wide", wide(5))):
        yield (
            f"int8 blocks encode {label}",
            [int8_blocks.encode(values, SEED, scales, codes, threads=threads), scales, codes],
        )
        good = int8_blocks.decode(scales, codes, out, threads=threads)
        yield f"int8 blocks decode {label}", [good, out, int8_blocks.is_valid(scales, codes)]
        int8_blocks.add_decoded(scales, codes, FACTOR, total, threads=threads)
        square = int8_blocks.sum_of_squares(scales, codes, threads=threads)
        assert square is not None
        yield f"int8 blocks summed {label}", [total, out, square]
        others = np.empty_like(scales), np.empty_like(codes)
        good = int8_blocks.encode(values, SEED, *others, divisor=np.float32(3.0), threads=threads)
        yield f"int8 blocks encode a quotient {label}", [good, *others]
        made = np.empty_like(scales), np.empty_like(codes)
        factors = np.array([0.3, 0.7], np.float32)
        terms = [np.concatenate([one.view(np.uint8) for one in term]) for term in ((scales, codes), others)]
        good = int8_blocks.encode_sum(int8_blocks.Terms(terms), factors, SEED, *made, threads=threads)
        yield f"int8 blocks encode a sum {label}", [good, *made]


def _low_bit(threads: Threads) -> Named:
    size = 50_001
    packed, scales = np.empty(-(-size // 2), np.uint8), np.empty(-(-size // 64), np.uint16)
    marks, chosen = np.zeros(-(-size // 8), np.uint8), np.empty(topk.num_chosen(size), np.float32)
    out = np.empty(size, np.float32)
    for label, values in (("plain", plain(6, size)), ("wide", wide(7, size))):
        good = int4_blocks.encode(values, SEED, scales, packed)
        yield f"int4 blocks {label}", [good, scales, packed, int4_blocks.decode(scales, packed, out), out]
        quarters = np.empty(-(-size // 4), np.uint8)
        good = int2_blocks.encode(values, SEED, scales, quarters)
        yield f"int2 blocks {label}", [good, scales, quarters, int2_blocks.decode(scales, quarters, out), out]
        good = topk.select(values, marks, chosen)
        yield f"topk {label}", [good, marks, chosen, topk.scatter(marks, chosen, out), out]


def _tokens(threads: Threads) -> Named:
    num_tokens, width = 40, 515
    rows_TD = wide(8, num_tokens * width).reshape(num_tokens, width)
    for name, module, code_bytes in (("int8", int8_tokens, width), ("int4", int4_tokens, -(-width // 2))):
        num_of_them, out = num_outliers(width), np.empty_like(rows_TD)
        num_blocks = -(-width // module.BLOCK_VALUES)
        scales = np.empty((num_tokens, num_blocks), np.uint16)
        outliers, indices = np.empty((2, num_tokens, num_of_them), np.uint16)
        codes = np.empty((num_tokens, code_bytes), np.int8 if name == "int8" else np.uint8)
        encode: Callable[..., bool] = module.encode
        decode: Callable[..., bool] = module.decode
        good = encode(rows_TD, scales, outliers, indices, codes)
        decoded = decode(scales, outliers, indices, codes, out)
        yield f"{name} tokens", [good, scales, outliers, indices, codes, decoded, out]
    values_TD = plain(9, num_tokens * width).reshape(num_tokens, width)
    rows_TD = values_TD * values_TD * values_TD  # numpy's ** has other bits with other instruction sets
    turned, flags = np.empty_like(rows_TD), np.empty((num_tokens, -(-width // 32)), np.uint8)
    good = hadamard_tiles.turn(rows_TD, turned, flags)
    scales, indices = np.full(flags.shape, 0x3F80, np.uint16), np.full((num_tokens, 1), width - 1, np.uint16)
    back = turned.copy()
    is_back = hadamard_tiles.turn_back(scales, flags, indices, back)
    yield "turned tiles", [good, turned, flags, is_back, back]


def _sums(threads: Threads) -> Named:
    values, center = wide(9), plain(10)
    yield "norm", [norms.sum_of_squares(values, threads=threads), norms.tree_norm(values, threads=threads)]
    yield "norm of parts", [norms.norm_of_parts(values, part_values=1 << 15, threads=threads)]
    yield "norm of all", [norms.norm_of_sums(map(norms.sum_of_squares, (values[:9], values[9:70_000], center)))]
    yield "distance", [norms.tree_norm(plain(9) - center)]
    total = center.copy()
    robust.add_scaled(values, FACTOR, total, threads=threads)
    yield "add scaled", [total]
    optimizers.divide(values, np.float32(4097), total, threads=threads)
    yield "divide", [total]


def _robust(threads: Threads) -> Named:
    rows_NV = np.stack([plain(20 + row) for row in range(7)])
    out = np.empty(SIZE, np.float32)
    for num_rows in (6, 7):
        robust.median(rows_NV[:num_rows], out, threads=threads)
        yield f"median of {num_rows}", [out]
        robust.trimmed_mean(rows_NV[:num_rows], 1, out, threads=threads)
        yield f"trimmed mean of {num_rows}", [out]
    factors_N = np.array([0.3, 0.1, 0.05, 0.2, 1e-20, 0.01, 0.02], dtype=np.float32)
    yield "distances", [*clipping.distances(rows_NV, out, threads=threads)]
    moved, lengths = clipping.moved(rows_NV, out, factors_N, threads=threads)
    yield "moved", [moved, *lengths]


def _optimizers(threads: Threads) -> Named:
    bounds, keep = np.array([0, 10, 5_000, SIZE]), np.array([1.0, 0.999, 0.5], dtype=np.float32)
    times = np.ones(3, np.float32)
    values = np.array([0.3, 0.9, 0.1, 0.95, 0.05, 1.7, 1e-8, 2e-3, 3e-4, 1.165], dtype=np.float32)
    common, gradients = (bounds, keep, times), [wide(30 + step) * np.float32(2.0**-20) for step in range(3)]
    fp32 = [plain(40), np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32)]
    codes = [np.zeros(SIZE, np.int8), np.zeros(SIZE, np.uint8), np.zeros(int8_moments.num_blocks(SIZE), np.float32)]
    small, velocity, slow = plain(40), np.zeros(SIZE, np.float32), plain(40)
    for step, gradient in enumerate(gradients):
        out = np.empty(SIZE, np.float32)
        optimizers.adamw(fp32[0], gradient, fp32[1], fp32[2], out, *common, values[:9], threads=threads)
        fp32[0], out = out, fp32[0]
        seed = np.array([step, 0, 0, 0], dtype=np.uint64)
        int8_moments.adamw(small, gradient, *codes, out, *common, values, seed, threads=threads)
        small, out = out, small
        optimizers.sgd(slow, gradient, velocity, out, *common, values[:3], threads=threads)
        slow, out = out, slow
    yield "adamw", [*fp32]
    yield "adamw, int8 moments", [small, *codes]
    yield "sgd", [slow, velocity]
    optimizers.extrapolate(fp32[0], slow, small, threads=threads)
    yield "extrapolate", [small]


def _orthogonal(threads: Threads) -> Named:
    """Of a wide and of a tall matrix, whose sides fill no tile."""
    for name, rows, columns in (("wide", 190, 1390), ("tall", 1390, 190)):
        matrix = plain(30, rows * columns)
        turned = orthogonal.turned(matrix.reshape(rows, columns), norms.tree_norm(matrix), threads=threads)
        yield f"turned {name}", [turned]
    gradient, momentum, out = wide(31), wide(32), np.empty(SIZE, np.float32)
    scalars = np.array([0.3, *[0.0] * 8, 0.95, 0.05], dtype=np.float32)
    optimizers.nesterov(gradient, momentum, out, scalars, threads=threads)
    yield "nesterov", [momentum, out]
    optimizers.lessened(gradient, momentum, out, np.float32(0.99), np.float32(0.02))
    yield "lessened", [out]


def _windows(threads: Threads) -> Named:
    out = np.empty(SIZE, np.float32)
    windows.difference(plain(50), wide(51), out, threads=threads)
    yield "window's difference", [out]
    first = plain(50).copy()
    windows.shorten(first, np.abs(wide(51)), np.float32(0.7), threads=threads)
    yield "shortened moments", [first]
    matrix_RC = np.abs(wide(52, 700 * 515)).reshape(700, 515)
    rows, columns, product_RC = np.empty(700, np.float32), np.empty(515, np.float32), np.empty_like(matrix_RC)
    windows.means(matrix_RC, rows, columns, threads=threads)
    windows.product_of_means(rows, columns, product_RC, threads=threads)
    yield "means of rows and columns", [rows, columns, product_RC]


if __name__ == "__main__":
    counts = [int(count) for count in sys.argv[1:]] or [1]
    found = [digests(Threads(count)) for count in counts]
    assert all(each == found[0] for each in found), f"digests differ among {counts} threads"
    print(json.dumps(found[0], indent=2))
