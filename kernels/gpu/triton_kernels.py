# mypy: ignore-errors
"""The GPU's kernels, in Triton: each does on a tile what the CPU's kernel of that name does.

Divisions are rounded correctly (`div_rn`), and `encoded_there` launches with `enable_fp_fusion=False`, so that no
product and sum are rounded as one. Triton's own language is not checked by mypy.
"""

import triton
import triton.language as tl

MAGNITUDE = tl.constexpr(0x7FFFFFFF)
LIMIT_BITS = tl.constexpr(0x7E800000)
SMALLEST_BITS = tl.constexpr(0x00800000)
SMALLEST_INT8_SCALE = tl.constexpr(0x0880)
LARGEST_INT8_SCALE = tl.constexpr(0x7B02)
HALF_BLOCK = tl.constexpr(64)
SMALLEST_INT4_SCALE = tl.constexpr(0x0080)
LARGEST_INT4_SCALE = tl.constexpr(0x7D13)
INT4_BLOCK = tl.constexpr(64)


@triton.jit
def mix64(state):
    """Finalizer of splitmix64."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)


@triton.jit
def draw(lane, low, high):
    """32 random bits: two rounds of lowbias32, the block's key entering before each."""
    state = lane * 0x9E3779B9 + low
    state = (state ^ (state >> 16)) * 0x7FEB352D
    state = state ^ high
    state = (state ^ (state >> 15)) * 0x846CA68B
    return state ^ (state >> 16)


@triton.jit
def flush_bits(bits):
    return tl.where((bits & MAGNITUDE) >= SMALLEST_BITS, bits, 0)


@triton.jit
def round_to_bfloat16(bits):
    """Upper halves, rounded to nearest even, flushed."""
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & MAGNITUDE) >= SMALLEST_BITS, rounded, 0).to(tl.int16)


@triton.jit
def scale_and_inverse(largest, LARGEST_CODE: tl.constexpr):
    """bf16 bits of largest / `LARGEST_CODE`, rounded up, and 1 / scale; both 0 where the first is below 2^-126."""
    divisor = tl.full(largest.shape, LARGEST_CODE, tl.float32)
    exact = tl.div_rn(largest.to(tl.float32, bitcast=True), divisor).to(tl.int32, bitcast=True)
    is_zero = exact < SMALLEST_BITS
    scale = tl.where(is_zero, 0, (exact + 0xFFFF) >> 16)
    divisor = tl.where(is_zero, 1.0, (scale << 16).to(tl.float32, bitcast=True))
    return scale, tl.where(is_zero, 0.0, tl.div_rn(tl.full(largest.shape, 1.0, tl.float32), divisor))


@triton.jit
def pack(code, NUM_ROWS: tl.constexpr, ROW_VALUES: tl.constexpr):
    """Codes of 4 bits, two a byte, the first in the low half."""
    low, high = tl.split(tl.reshape(code & 15, [NUM_ROWS, ROW_VALUES // 2, 2]))
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def load_int4(packed, at, num_values):
    """Codes at `at`, the half past an odd last one among them."""
    byte = tl.load(packed + (at >> 1), mask=((at >> 1) << 1) < num_values, other=0).to(tl.int32)
    return (((byte >> ((at & 1) * 4).to(tl.int32)) & 15) ^ 8) - 8


@triton.jit
def encode_int8_blocks(values, key, scales, codes, valid, num_values, BLOCKS: tl.constexpr):
    """`BLOCKS` blocks of 128 a program; `valid`, one a program, is 1 if all its values are below 2^126."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    lane = tl.arange(0, HALF_BLOCK)
    one_at = block.to(tl.int64)[:, None] * 2 * HALF_BLOCK + lane[None, :]
    two_at = one_at + HALF_BLOCK
    one = tl.load(values + one_at, mask=one_at < num_values, other=0.0)
    two = tl.load(values + two_at, mask=two_at < num_values, other=0.0)
    one_largest = tl.max(one.to(tl.int32, bitcast=True) & MAGNITUDE, axis=1)
    two_largest = tl.max(two.to(tl.int32, bitcast=True) & MAGNITUDE, axis=1)
    largest = tl.maximum(one_largest, two_largest)
    tl.store(valid + tl.program_id(0), (tl.max(largest, axis=0) < LIMIT_BITS).to(tl.int8))

    exact_scale = tl.div_rn(largest.to(tl.float32, bitcast=True), tl.full([BLOCKS], 127.0, tl.float32))
    is_zero = exact_scale < 7.70371977754894341222391177033970927e-34  # 2^-110
    scale = tl.where(is_zero, 0, (exact_scale.to(tl.int32, bitcast=True) + 0xFFFF) >> 16)
    tl.store(scales + block, scale.to(tl.int16), mask=block.to(tl.int64) * 2 * HALF_BLOCK < num_values)
    divisor = tl.where(is_zero, 1.0, (scale << 16).to(tl.float32, bitcast=True))
    factor = tl.where(is_zero, 0.0, tl.div_rn(tl.full([BLOCKS], 32768.0, tl.float32), divisor))[:, None]

    block_key = mix64(tl.load(key).to(tl.uint64, bitcast=True) + block.to(tl.uint64) * 0x9E3779B97F4A7C15)
    low, high = block_key.to(tl.uint32)[:, None], (block_key >> 32).to(tl.uint32)[:, None]
    chance = draw(lane.to(tl.uint32)[None, :], low, high)
    one_bits = (one * factor + 12582912.0).to(tl.int32, bitcast=True) + (chance >> 17).to(tl.int32)
    two_bits = (two * factor + 12582912.0).to(tl.int32, bitcast=True) + (chance & 0x7FFF).to(tl.int32)
    tl.store(codes + one_at, (((one_bits >> 15) & 0xFF) - 128).to(tl.int8), mask=one_at < num_values)
    tl.store(codes + two_at, (((two_bits >> 15) & 0xFF) - 128).to(tl.int8), mask=two_at < num_values)


@triton.jit
def decode_int8_blocks(scales, codes, values, valid, num_values, BLOCKS: tl.constexpr):
    """`valid`, one a program, is 1 if no scale or code is one that is never written."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    lane = tl.arange(0, 2 * HALF_BLOCK)
    at = block.to(tl.int64)[:, None] * 2 * HALF_BLOCK + lane[None, :]
    code = tl.load(codes + at, mask=at < num_values, other=0)
    scale = (
        tl.load(scales + block, mask=block.to(tl.int64) * 2 * HALF_BLOCK < num_values, other=0).to(tl.int32) & 0xFFFF
    )
    bad_scale = (scale != 0) & ((scale < SMALLEST_INT8_SCALE) | (scale > LARGEST_INT8_SCALE))
    bad = tl.maximum(
        tl.max(bad_scale.to(tl.int32), axis=0), tl.max(tl.max((code == -128).to(tl.int32), axis=1), axis=0)
    )
    tl.store(valid + tl.program_id(0), (bad == 0).to(tl.int8))
    decoded = code.to(tl.float32) * (scale << 16).to(tl.float32, bitcast=True)[:, None] + 0.0
    tl.store(values + at, decoded, mask=at < num_values)


@triton.jit
def encode_int4_blocks(values, seed, scales, packed, valid, num_values, BLOCKS: tl.constexpr):
    """`BLOCKS` blocks of 64 a program; `seed` is four words; `valid` as above."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    lane = tl.arange(0, INT4_BLOCK)
    at = block[:, None] * INT4_BLOCK + lane[None, :]
    value = tl.load(values + at, mask=at < num_values, other=0.0)
    largest = tl.max(value.to(tl.int32, bitcast=True) & MAGNITUDE, axis=1)
    tl.store(valid + tl.program_id(0), (tl.max(largest, axis=0) < LIMIT_BITS).to(tl.int8))
    scale, inverse = scale_and_inverse(largest, 7.0)
    tl.store(scales + block, scale.to(tl.int16), mask=block * INT4_BLOCK < num_values)

    key = block.to(tl.uint64) * 0x9E3779B97F4A7C15
    for word in tl.static_range(4):
        key = mix64(key ^ tl.load(seed + word).to(tl.uint64, bitcast=True))
    low, high = key.to(tl.uint32)[:, None], (key >> 32).to(tl.uint32)[:, None]
    chance = (draw(lane.to(tl.uint32)[None, :], low, high) >> 16).to(tl.int32)
    # Zeros, and all of a block with scale 0, stay 0 whatever the chance.
    fixed = (value * inverse[:, None] * 65536.0 + 524288.0).to(tl.int32)
    code = tl.maximum(tl.minimum(((fixed + chance) >> 16) - 8, 7), -7)
    byte_at = block[:, None] * (INT4_BLOCK // 2) + tl.arange(0, INT4_BLOCK // 2)[None, :]
    tl.store(packed + byte_at, pack(code, BLOCKS, INT4_BLOCK), mask=byte_at * 2 < num_values)


@triton.jit(do_not_specialize=["num_values"])
def decode_int4_blocks(scales, packed, values, valid, num_values, SIZE: tl.constexpr):
    """`valid`, one a program, is 1 if no scale, code or last half is one that is never written.

    Compiled for the constant 1 as `num_values`, Triton 3.6 refuses on an H100 what is valid.
    """
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    code = load_int4(packed, at, num_values)
    scale = tl.load(scales + at // INT4_BLOCK, mask=at < num_values, other=0).to(tl.int32) & 0xFFFF
    bad_scale = (scale != 0) & ((scale < SMALLEST_INT4_SCALE) | (scale > LARGEST_INT4_SCALE))
    bad = bad_scale | (code == -8) | ((scale == 0) & (code != 0))
    tl.store(valid + tl.program_id(0), (tl.max(bad.to(tl.int32), axis=0) == 0).to(tl.int8))
    tl.store(values + at, code.to(tl.float32) * (scale << 16).to(tl.float32, bitcast=True), mask=at < num_values)


@triton.jit
def encode_bfloat16(values, halves, valid, num_values, SIZE: tl.constexpr):
    """`valid`, one a program, is 1 if all its values are below 2^126."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    bits = tl.load(values + at, mask=at < num_values, other=0)
    tl.store(valid + tl.program_id(0), (tl.max(bits & MAGNITUDE, axis=0) < LIMIT_BITS).to(tl.int8))
    tl.store(halves + at, round_to_bfloat16(bits), mask=at < num_values)


@triton.jit
def decode_bfloat16(halves, values, valid, num_values, SIZE: tl.constexpr):
    """fp32 bits, flushed; `valid` if no magnitude is above 2^126."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    bits = tl.load(halves + at, mask=at < num_values, other=0).to(tl.int32) << 16
    tl.store(valid + tl.program_id(0), (tl.max(bits & MAGNITUDE, axis=0) <= LIMIT_BITS).to(tl.int8))
    tl.store(values + at, flush_bits(bits), mask=at < num_values)
