"""This is where vectors on a GPU are encoded and decoded there, to the same bytes as on the CPU.

Needs the extra `gpu`: importing this module without Triton raises ImportError, so whoever may run without it imports it
where it is used. Under TRITON_INTERPRET=1 the kernels run on the CPU, slowly, for tests.

A codec of blocks is a pair of functions here and a pair of kernels in `kernels.gpu_triton`; each program writes whether
what it read was valid.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kernels import gpu_triton, int8_blocks

BLOCKS_PER_PROGRAM = 16
VALUES_PER_PROGRAM = 2048


def encode_int8_blocks(values: torch.Tensor, seed: NDArray[np.uint64]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Scales (bf16 bits as int16) and codes (int8) as `kernels.int8_blocks.encode` fills them; None where it is False.

    `values`: one-dimensional, contiguous, fp32; the results lie on its device.
    """
    num_blocks = -(-values.numel() // int8_blocks.BLOCK_VALUES)
    scales = torch.empty(num_blocks, dtype=torch.int16, device=values.device)
    codes = torch.empty(values.numel(), dtype=torch.int8, device=values.device)
    key = torch.tensor([int8_blocks.key_of_seed(seed)], dtype=torch.int64, device=values.device)
    arguments = (values, key, scales, codes)
    num_programs = -(-num_blocks // BLOCKS_PER_PROGRAM)
    if _run(gpu_triton.encode_int8_blocks, num_programs, arguments, values.numel(), BLOCKS=BLOCKS_PER_PROGRAM):
        return scales, codes
    return None


def decode_int8_blocks(scales: torch.Tensor, codes: torch.Tensor) -> torch.Tensor | None:
    """What `kernels.int8_blocks.decode` makes of them; None where it is False."""
    values = torch.empty(codes.numel(), dtype=torch.float32, device=codes.device)
    num_programs = -(-scales.numel() // BLOCKS_PER_PROGRAM)
    arguments = (scales, codes, values)
    valid = _run(gpu_triton.decode_int8_blocks, num_programs, arguments, codes.numel(), BLOCKS=BLOCKS_PER_PROGRAM)
    return values if valid else None


def encode_bfloat16(values: torch.Tensor) -> torch.Tensor | None:
    """The 16 bits of each value, as int16, that `kernels.formats.to_bfloat16` writes; None where it is False."""
    halves = torch.empty(values.numel(), dtype=torch.int16, device=values.device)
    arguments = (values.view(torch.int32), halves)
    num_programs = -(-values.numel() // VALUES_PER_PROGRAM)
    valid = _run(gpu_triton.encode_bfloat16, num_programs, arguments, values.numel(), SIZE=VALUES_PER_PROGRAM)
    return halves if valid else None


def decode_bfloat16(halves: torch.Tensor) -> torch.Tensor | None:
    """fp32 values as by `kernels.formats.from_bfloat16`; None where it is False."""
    bits = torch.empty(halves.numel(), dtype=torch.int32, device=halves.device)
    num_programs = -(-halves.numel() // VALUES_PER_PROGRAM)
    valid = _run(gpu_triton.decode_bfloat16, num_programs, (halves, bits), halves.numel(), SIZE=VALUES_PER_PROGRAM)
    return bits.view(torch.float32) if valid else None


def _run(
    kernel: Callable[..., Any], num_programs: int, arguments: tuple[torch.Tensor, ...], num_values: int, **sizes: int
) -> bool:
    """Launch and wait; whether all programs found their input valid."""
    if num_programs == 0:
        return True
    valid = torch.zeros(num_programs, dtype=torch.int8, device=arguments[0].device)
    launched: Any = kernel
    launched[(num_programs,)](*arguments, valid, num_values, **sizes, enable_fp_fusion=False)
    return bool(valid.all().item())
