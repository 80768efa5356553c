"""Activations encoded and decoded on a GPU as one body, with nothing waited for.

A body is what the CPU's codec writes: for int8 and int4 scales, outliers, indices and codes one after the other.
"""

import torch

from kernels.codecs import int4_tokens, int8_tokens
from kernels.codecs.outliers import num_outliers
from kernels.gpu.encoded_there import (
    VALUES_PER_PROGRAM,
    Tokens,
    launch_decode_bfloat16,
    launch_decode_tokens,
    launch_encode_bfloat16,
    launch_encode_tokens,
)


def encoded(rows_TD: torch.Tensor, codec: str) -> torch.Tensor:
    """uint8: the body, then bytes that are 1 where what was encoded is valid."""
    num_tokens, width = rows_TD.shape
    size = _body_bytes(num_tokens, width, codec)
    out = torch.empty(size + _num_programs(num_tokens, width, codec), dtype=torch.uint8, device=rows_TD.device)
    valid = out[size:].view(torch.int8)
    if codec == "bf16":
        launch_encode_bfloat16(rows_TD.view(-1), out[:size].view(torch.int16), valid)
    else:
        launch_encode_tokens(rows_TD, _arrays(out[:size], num_tokens, width, codec), valid)
    return out


def decoded(body: torch.Tensor, codec: str, num_tokens: int, width: int) -> list[torch.Tensor]:
    """fp32 rows, and int8 that are 1 where what was decoded is valid."""
    valid = torch.empty(_num_programs(num_tokens, width, codec), dtype=torch.int8, device=body.device)
    rows_TD = torch.empty((num_tokens, width), dtype=torch.float32, device=body.device)
    if codec == "bf16":
        launch_decode_bfloat16(body.view(torch.int16), rows_TD.view(-1), valid)
    else:
        launch_decode_tokens(_arrays(body, num_tokens, width, codec), rows_TD, valid)
    return [rows_TD, valid]


def _num_programs(num_tokens: int, width: int, codec: str) -> int:
    return -(-num_tokens * width // VALUES_PER_PROGRAM) if codec == "bf16" else num_tokens


def _body_bytes(num_tokens: int, width: int, codec: str) -> int:
    if codec == "bf16":
        return 2 * num_tokens * width
    return num_tokens * sum(columns * dtype.itemsize for dtype, columns in _columns(width, codec))


def _arrays(body: torch.Tensor, num_tokens: int, width: int, codec: str) -> Tokens:
    """Views of the body's arrays."""
    found, at = [], 0
    for dtype, columns in _columns(width, codec):
        size = num_tokens * columns * dtype.itemsize
        found.append(body[at : at + size].view(dtype).view(num_tokens, columns))
        at += size
    scales_TK, outliers_TJ, indices_TJ, codes = found
    return scales_TK, outliers_TJ, indices_TJ, codes


def _columns(width: int, codec: str) -> list[tuple[torch.dtype, int]]:
    outliers = num_outliers(width)
    block_values, code, columns = {
        "int8": (int8_tokens.BLOCK_VALUES, torch.int8, width),
        "int4": (int4_tokens.BLOCK_VALUES, torch.uint8, -(-width // 2)),
    }[codec]
    return [
        (torch.int16, -(-width // block_values)),
        (torch.int16, outliers),
        (torch.int16, outliers),
        (code, columns),
    ]
