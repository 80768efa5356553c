"""Vectors on a GPU encoded and decoded there, to the same bytes as on the CPU.

Needs the extra `gpu`: importing this module without Triton raises ImportError, so whoever may run without it imports it
where it is used. Under TRITON_INTERPRET=1 the kernels run on the CPU, slowly, for tests.

A codec is a pair of functions here and a pair of kernels in `kernels.gpu.triton_kernels` or, for activations, in
`kernels.gpu.triton_tokens`; each program writes whether what it read was valid. What is uint16 on the CPU is int16
here, of the same bytes. T tokens, D values, K blocks, J outliers, H half as many bytes as values, rounded up.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.bits import key_of_seed
from kernels.codecs import int4_blocks, int4_tokens, int8_blocks, int8_tokens
from kernels.codecs.outliers import num_outliers
from kernels.gpu import triton_kernels, triton_tokens

VALUES_PER_PROGRAM = 2048
INT8_BLOCKS_PER_PROGRAM = VALUES_PER_PROGRAM // int8_blocks.BLOCK_VALUES
INT4_BLOCKS_PER_PROGRAM = VALUES_PER_PROGRAM // int4_blocks.BLOCK_VALUES

Tokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Scales_TK, outliers_TJ and indices_TJ (int16), codes_TD (int8) or packed_TH (uint8)."""


def encode_int8_blocks(values: torch.Tensor, seed: NDArray[np.uint64]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Scales (bf16 bits as int16) and codes (int8) as `codecs.int8_blocks.encode` fills them; None where it is False.

    `values`: one-dimensional, contiguous, fp32; the results lie on its device.
    """
    num_blocks = -(-values.numel() // int8_blocks.BLOCK_VALUES)
    scales = torch.empty(num_blocks, dtype=torch.int16, device=values.device)
    codes = torch.empty(values.numel(), dtype=torch.int8, device=values.device)
    key = torch.tensor([int(np.uint64(key_of_seed(seed)).view(np.int64))], dtype=torch.int64, device=values.device)
    arguments = (values, key, scales, codes)
    num_programs = -(-num_blocks // INT8_BLOCKS_PER_PROGRAM)
    if _run(triton_kernels.encode_int8_blocks, num_programs, arguments, values.numel(), BLOCKS=INT8_BLOCKS_PER_PROGRAM):
        return scales, codes
    return None


def decode_int8_blocks(scales: torch.Tensor, codes: torch.Tensor) -> torch.Tensor | None:
    """What `codecs.int8_blocks.decode` makes of them; None where it is False."""
    values = torch.empty(codes.numel(), dtype=torch.float32, device=codes.device)
    num_programs = -(-scales.numel() // INT8_BLOCKS_PER_PROGRAM)
    arguments = (scales, codes, values)
    valid = _run(
        triton_kernels.decode_int8_blocks, num_programs, arguments, codes.numel(), BLOCKS=INT8_BLOCKS_PER_PROGRAM
    )
    return values if valid else None


def encode_int4_blocks(values: torch.Tensor, seed: NDArray[np.uint64]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Scales (bf16 bits as int16) and bytes (uint8) as `codecs.int4_blocks.encode` fills them; None where it is False.

    `values`: one-dimensional, contiguous, fp32; the results lie on its device.
    """
    num_blocks = -(-values.numel() // int4_blocks.BLOCK_VALUES)
    scales = torch.empty(num_blocks, dtype=torch.int16, device=values.device)
    packed = torch.empty(-(-values.numel() // 2), dtype=torch.uint8, device=values.device)
    words = torch.tensor(seed.view(np.int64), device=values.device)
    arguments = (values, words, scales, packed)
    num_programs = -(-num_blocks // INT4_BLOCKS_PER_PROGRAM)
    if _run(triton_kernels.encode_int4_blocks, num_programs, arguments, values.numel(), BLOCKS=INT4_BLOCKS_PER_PROGRAM):
        return scales, packed
    return None


def decode_int4_blocks(scales: torch.Tensor, packed: torch.Tensor, num_values: int) -> torch.Tensor | None:
    """What `codecs.int4_blocks.decode` makes of them; None where it is False."""
    values = torch.empty(num_values, dtype=torch.float32, device=packed.device)
    num_programs = -(-num_values // VALUES_PER_PROGRAM)
    arguments = (scales, packed, values)
    valid = _run(triton_kernels.decode_int4_blocks, num_programs, arguments, num_values, SIZE=VALUES_PER_PROGRAM)
    return values if valid else None


def encode_int8_tokens(rows_TD: torch.Tensor) -> Tokens | None:
    """What `codecs.int8_tokens.encode` fills; None where it is False."""
    return _encode_tokens(rows_TD, torch.empty(rows_TD.shape, dtype=torch.int8, device=rows_TD.device))


def encode_int4_tokens(rows_TD: torch.Tensor) -> Tokens | None:
    """What `codecs.int4_tokens.encode` fills; None where it is False."""
    num_tokens, width = rows_TD.shape
    return _encode_tokens(rows_TD, torch.empty((num_tokens, -(-width // 2)), dtype=torch.uint8, device=rows_TD.device))


def decode_int8_tokens(
    scales_TK: torch.Tensor, outliers_TJ: torch.Tensor, indices_TJ: torch.Tensor, codes_TD: torch.Tensor
) -> torch.Tensor | None:
    """What `codecs.int8_tokens.decode` makes of them; None where it is False."""
    return _decode_tokens((scales_TK, outliers_TJ, indices_TJ, codes_TD), codes_TD.shape[1])


def decode_int4_tokens(
    scales_TK: torch.Tensor, outliers_TJ: torch.Tensor, indices_TJ: torch.Tensor, packed_TH: torch.Tensor, width: int
) -> torch.Tensor | None:
    """What `codecs.int4_tokens.decode` makes of them; None where it is False."""
    return _decode_tokens((scales_TK, outliers_TJ, indices_TJ, packed_TH), width)


def encode_bfloat16(values: torch.Tensor) -> torch.Tensor | None:
    """The 16 bits of each value, as int16, that `kernels.codecs.formats.to_bfloat16` writes; None where it is False."""
    halves = torch.empty(values.numel(), dtype=torch.int16, device=values.device)
    valid = _flags(-(-values.numel() // VALUES_PER_PROGRAM), values.device)
    launch_encode_bfloat16(values, halves, valid)
    return halves if _all(valid) else None


def decode_bfloat16(halves: torch.Tensor) -> torch.Tensor | None:
    """fp32 values as by `kernels.codecs.formats.from_bfloat16`; None where it is False."""
    values = torch.empty(halves.numel(), dtype=torch.float32, device=halves.device)
    valid = _flags(-(-halves.numel() // VALUES_PER_PROGRAM), halves.device)
    launch_decode_bfloat16(halves, values, valid)
    return values if _all(valid) else None


def launch_encode_bfloat16(values: torch.Tensor, halves: torch.Tensor, valid: torch.Tensor) -> None:
    """Into `halves`, and into `valid`, one for each `VALUES_PER_PROGRAM`, whether they are; without waiting."""
    arguments = (values.view(torch.int32), halves)
    _launch(triton_kernels.encode_bfloat16, arguments, valid, values.numel(), SIZE=VALUES_PER_PROGRAM)


def launch_decode_bfloat16(halves: torch.Tensor, values: torch.Tensor, valid: torch.Tensor) -> None:
    """As `launch_encode_bfloat16`, back."""
    arguments = (halves, values.view(torch.int32))
    _launch(triton_kernels.decode_bfloat16, arguments, valid, halves.numel(), SIZE=VALUES_PER_PROGRAM)


def launch_encode_tokens(rows_TD: torch.Tensor, tokens: Tokens, valid: torch.Tensor) -> None:
    """Into `tokens`, whose codes' type tells the codec, and `valid`, one a token; without waiting."""
    scales_TK, outliers_TJ = tokens[:2]
    _launch(
        triton_tokens.encode_tokens,
        (rows_TD, *tokens),
        valid,
        rows_TD.shape[1],
        NUM_OUTLIERS=outliers_TJ.shape[1],
        BLOCKS=_power_of_two(scales_TK.shape[1]),
        BLOCK_VALUES=_module_of(tokens).BLOCK_VALUES,
        LARGEST_CODE=_largest_code(tokens),
    )


def launch_decode_tokens(tokens: Tokens, rows_TD: torch.Tensor, valid: torch.Tensor) -> None:
    """As `launch_encode_tokens`, back."""
    width = rows_TD.shape[1]
    _launch(
        triton_tokens.decode_tokens,
        (*tokens, rows_TD),
        valid,
        width,
        NUM_OUTLIERS=tokens[1].shape[1],
        SIZE=_power_of_two(width + width % 2),  # an odd row's last half is looked at too
        BLOCK_VALUES=_module_of(tokens).BLOCK_VALUES,
        LARGEST_CODE=_largest_code(tokens),
        LARGEST_SCALE=int(_module_of(tokens).LARGEST_SCALE),
    )


def _encode_tokens(rows_TD: torch.Tensor, codes: torch.Tensor) -> Tokens | None:
    num_tokens, width = rows_TD.shape
    block_values = (int8_tokens if codes.dtype is torch.int8 else int4_tokens).BLOCK_VALUES
    scales_TK = torch.empty((num_tokens, -(-width // block_values)), dtype=torch.int16, device=rows_TD.device)
    outliers_TJ = torch.empty((num_tokens, num_outliers(width)), dtype=torch.int16, device=rows_TD.device)
    tokens = scales_TK, outliers_TJ, torch.empty_like(outliers_TJ), codes
    valid = _flags(num_tokens, rows_TD.device)
    launch_encode_tokens(rows_TD, tokens, valid)
    return tokens if _all(valid) else None


def _decode_tokens(tokens: Tokens, width: int) -> torch.Tensor | None:
    num_tokens = tokens[1].shape[0]
    rows_TD = torch.empty((num_tokens, width), dtype=torch.float32, device=tokens[1].device)
    valid = _flags(num_tokens, rows_TD.device)
    launch_decode_tokens(tokens, rows_TD, valid)
    return rows_TD if _all(valid) else None


def _module_of(tokens: Tokens) -> Any:
    return int8_tokens if tokens[3].dtype is torch.int8 else int4_tokens


def _largest_code(tokens: Tokens) -> int:
    return 127 if tokens[3].dtype is torch.int8 else 7


def _power_of_two(size: int) -> int:
    """The smallest that is at least `size`."""
    return 1 << (size - 1).bit_length() if size > 1 else 1


def _run(
    kernel: Callable[..., Any], num_programs: int, arguments: tuple[torch.Tensor, ...], num_values: int, **sizes: int
) -> bool:
    """Launch and wait; whether all programs found their input valid."""
    valid = _flags(num_programs, arguments[0].device)
    _launch(kernel, arguments, valid, num_values, **sizes)
    return _all(valid)


def _launch(
    kernel: Callable[..., Any], arguments: tuple[torch.Tensor, ...], valid: torch.Tensor, num_values: int, **sizes: int
) -> None:
    """As many programs as `valid` has places."""
    if valid.numel():
        launched: Any = kernel
        gpu_of: Any = torch.cuda.device_of
        with gpu_of(valid):  # Triton launches on the thread's present GPU, wherever the tensors lie
            launched[(valid.numel(),)](*arguments, valid, num_values, **sizes, enable_fp_fusion=False)


def _flags(num_programs: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(num_programs, dtype=torch.int8, device=device)


def _all(valid: torch.Tensor) -> bool:
    return bool(valid.all().item())
