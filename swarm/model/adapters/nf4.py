"""NF4: values in 4 bits, 64 to a scale, with the bits that bitsandbytes makes of them.

A block's scale is its largest magnitude, and a value the nearest of sixteen shares of it, which lie as a normal
distribution's values do (Dettmers et al. 2023, "QLoRA"). Of two values in a byte the first has the upper four bits. All
of it is exact: an inverse, products and comparisons, each rounded once, so the same everywhere.
"""

from functools import lru_cache

import torch
from torch import nn

BLOCK = 64
"""Values that share a scale."""
SHARES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634),
    *(0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def packed_bytes(num_values: int) -> int:
    """Of that many values, without their scales."""
    return (num_values + 1) // 2


def num_scales(num_values: int) -> int:
    return (num_values + BLOCK - 1) // BLOCK


def quantized(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed bytes and fp32 scales of fp32 values."""
    flat = values.reshape(-1)
    padded = nn.functional.pad(flat, (0, num_scales(len(flat)) * BLOCK - len(flat))).view(-1, BLOCK)
    scales = padded.abs().amax(dim=1)
    # Times the inverse, as bitsandbytes has it: now and then a quotient is another number. Zeros have no shares.
    shares = torch.nan_to_num(padded * (1 / scales).unsqueeze(1), nan=0.0)
    table = torch.tensor(SHARES)
    codes = torch.bucketize(shares, (table[1:] + table[:-1]) / 2).to(torch.uint8).view(-1)
    packed = codes[0::2] << 4 | codes[1::2]
    return packed[: packed_bytes(len(flat))].contiguous(), scales


def dequantized(packed: torch.Tensor, scales: torch.Tensor, num_values: int) -> torch.Tensor:
    """The fp32 values, flat, on the device that both are on."""
    pairs = torch.index_select(_pairs(packed.device), 0, packed.to(torch.int32)).view(-1)
    if num_values % BLOCK:
        pairs = nn.functional.pad(pairs, (0, len(scales) * BLOCK - len(pairs)))
    return pairs.view(-1, BLOCK).mul_(scales.unsqueeze(1)).view(-1)[:num_values]


@lru_cache(maxsize=4)
def _pairs(device: torch.device) -> torch.Tensor:
    """Both shares of each byte, (256, 2)."""
    table, codes = torch.tensor(SHARES), torch.arange(256)
    return torch.stack([table[codes >> 4], table[codes & 15]], dim=1).to(device)
