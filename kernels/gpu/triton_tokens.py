# mypy: ignore-errors
"""The GPU's kernels of the activation codecs: a token a program, int8 or int4.

int4 is the one whose `LARGEST_CODE` is 7; the rules of `kernels.gpu.triton_kernels` on rounding hold here too.
"""

import triton
import triton.language as tl

from kernels.gpu.triton_kernels import (
    LIMIT_BITS,
    MAGNITUDE,
    flush_bits,
    load_int4,
    pack,
    round_to_bfloat16,
    scale_and_inverse,
)

SMALLEST_SCALE = tl.constexpr(0x0080)


@triton.jit
def encode_tokens(
    rows,
    scales,
    outliers,
    indices,
    codes,
    valid,
    width,
    NUM_OUTLIERS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
):
    """`BLOCKS`, a power of two, hold a row; `valid`, one a token, is 1 if all its values are below 2^126."""
    token = tl.program_id(0).to(tl.int64)
    row = rows + token * width
    block = tl.arange(0, BLOCKS)
    at = block[:, None] * BLOCK_VALUES + tl.arange(0, BLOCK_VALUES)[None, :]
    value = tl.load(row + at, mask=at < width, other=0.0)
    magnitude = value.to(tl.int32, bitcast=True) & MAGNITUDE
    tl.store(valid + token, (tl.max(magnitude) < LIMIT_BITS).to(tl.int8))

    # Highest for the largest magnitude, of equal ones for the first; -1 for what is put aside or past the row's end.
    rank = tl.where(at < width, (magnitude.to(tl.int64) << 16) | (0xFFFF - at), -1)
    for place in range(NUM_OUTLIERS):
        highest = tl.max(rank)
        index = 0xFFFF - (highest & 0xFFFF)
        rank = tl.where(rank == highest, -1, rank)
        outlier = tl.load(row + index).to(tl.int32, bitcast=True)
        tl.store(outliers + token * NUM_OUTLIERS + place, round_to_bfloat16(outlier))
        tl.store(indices + token * NUM_OUTLIERS + place, index.to(tl.int16))

    scale, inverse = scale_and_inverse(tl.max(tl.where(rank < 0, 0, magnitude), axis=1), LARGEST_CODE)
    tl.store(
        scales + token * tl.cdiv(width, BLOCK_VALUES) + block, scale.to(tl.int16), mask=block * BLOCK_VALUES < width
    )
    # Adding 1.5 * 2^23 leaves no bits for a fraction: the sum is rounded to a whole number.
    whole = tl.where(rank < 0, 0.0, value) * inverse[:, None] + 12582912.0
    code = (whole - 12582912.0).to(tl.int32)
    if LARGEST_CODE == 7:
        byte_at = block[:, None] * (BLOCK_VALUES // 2) + tl.arange(0, BLOCK_VALUES // 2)[None, :]
        byte = pack(code, BLOCKS, BLOCK_VALUES)
        tl.store(codes + token * tl.cdiv(width, 2) + byte_at, byte, mask=byte_at * 2 < width)
    else:
        tl.store(codes + token * width + at, code.to(tl.int8), mask=at < width)


@triton.jit
def decode_tokens(
    scales,
    outliers,
    indices,
    codes,
    rows,
    valid,
    width,
    NUM_OUTLIERS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
    LARGEST_SCALE: tl.constexpr,
):
    """`SIZE`, a power of two, values hold a row; `valid`, one a token, is 0 for what the CPU's `decode` refuses."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, SIZE)
    scale = tl.load(scales + token * tl.cdiv(width, BLOCK_VALUES) + at // BLOCK_VALUES, mask=at < width, other=0)
    scale = scale.to(tl.int32) & 0xFFFF
    bad = (scale != 0) & ((scale < SMALLEST_SCALE) | (scale > LARGEST_SCALE))
    if LARGEST_CODE == 7:
        code = load_int4(codes + token * tl.cdiv(width, 2), at, width)
        bad |= code == -8
    else:
        code = tl.load(codes + token * width + at, mask=at < width, other=0).to(tl.int32)
        bad |= code == -128
    bad |= (scale == 0) & (code != 0)
    value = code.to(tl.float32) * (scale << 16).to(tl.float32, bitcast=True)
    free = code == 0
    for place in range(NUM_OUTLIERS):
        index = tl.load(indices + token * NUM_OUTLIERS + place).to(tl.int32) & 0xFFFF
        outlier = tl.load(outliers + token * NUM_OUTLIERS + place).to(tl.int32) << 16
        here = at == index
        bad |= (index >= width) | ((outlier & MAGNITUDE) > LIMIT_BITS)
        bad |= here & ~free
        free &= ~here
        value = tl.where(here, flush_bits(outlier).to(tl.float32, bitcast=True), value)
    tl.store(valid + token, (tl.max(bad.to(tl.int32), axis=0) == 0).to(tl.int8))
    tl.store(rows + token * width + at, value, mask=at < width)
