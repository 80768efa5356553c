"""What the GPU's kernels make of the test vectors, as SHA-256, beside what the CPU's make of them.

    [TRITON_INTERPRET=1] python -m tests.gpu_outputs [cpu|cuda]

runs in a process of its own: Triton reads TRITON_INTERPRET when it is first imported.
"""

import hashlib
import json
import sys

import numpy as np
import torch
from numpy.typing import NDArray

from kernels import formats, int8_blocks
from tests.kernel_outputs import SEED, plain, wide

SIZES = (0, 1, 128, 2_049, 20_001)
BAD_VALUES = (np.inf, -np.inf, np.nan, 2.0**126)
NEVER_WRITTEN = ((0x087F, 1), (0x7B03, 1), (0x8880, 1), (0x3F80, -128), (0xFFFF, 0))
REFUSED = "refused"
NUM_REFUSED = 2 * len(BAD_VALUES) + len(NEVER_WRITTEN) + 1


def vectors() -> dict[str, NDArray[np.float32]]:
    """Values of every magnitude, some extreme, some equal to their block's largest, and blocks of zeros; plain ones."""
    found = {}
    for size in SIZES:
        values = wide(5, size)
        extremes = np.array(
            [0.0, -0.0, 1e-45, -1e-39, 127.0, np.nextafter(np.float32(2.0**126), np.float32(0))], dtype=np.float32
        )
        values[::7] = np.resize(extremes, values[::7].size)
        values[256:384] = 0.0
        found |= {f"edges {size}": values, f"plain {size}": plain(4, size)}
    for bad in BAD_VALUES:
        values = plain(4, 5_000)
        values[4_321] = bad
        found[f"with {bad}"] = values
    return found


def never_written() -> dict[str, tuple[NDArray[np.uint16], NDArray[np.int8]]]:
    """Scales and codes of 40 blocks, the last of which no encoder writes."""
    found = {}
    for scale, code in NEVER_WRITTEN:
        scales, codes = np.full(40, 0x3F80, np.uint16), np.ones(5_000, np.int8)
        scales[39], codes[4_999] = scale, code
        found[f"scale {scale:#x}, code {code}"] = scales, codes
    return found


def by_cpu() -> dict[str, str]:
    results = {}
    for name, values in vectors().items():
        scales, codes = np.empty(-(-values.size // 128), np.uint16), np.empty(values.size, np.int8)
        halves, decoded = np.empty(values.size, np.uint16), np.empty_like(values)
        good = int8_blocks.encode(values, SEED, scales, codes)
        assert not good or int8_blocks.decode(scales, codes, decoded)
        results[f"int8 {name}"] = _digest(scales, codes, decoded) if good else REFUSED
        good = formats.to_bfloat16(values.view(np.int32), halves)
        assert not good or formats.from_bfloat16(halves, decoded.view(np.int32))
        results[f"bf16 {name}"] = _digest(halves, decoded) if good else REFUSED
    return results | dict.fromkeys(never_written(), REFUSED) | {"bf16 of 2^127": REFUSED}


def by_gpu(device: str) -> dict[str, str]:
    from kernels import gpu

    results = {}
    for name, values in vectors().items():
        tensor = torch.from_numpy(values).to(device)
        encoded = gpu.encode_int8_blocks(tensor, SEED)
        decoded = None if encoded is None else gpu.decode_int8_blocks(*encoded)
        results[f"int8 {name}"] = REFUSED if encoded is None or decoded is None else _digest(*encoded, decoded)
        halves = gpu.encode_bfloat16(tensor)
        decoded = None if halves is None else gpu.decode_bfloat16(halves)
        results[f"bf16 {name}"] = REFUSED if halves is None or decoded is None else _digest(halves, decoded)
    for name, (scales, codes) in never_written().items():
        tensors = torch.from_numpy(scales.view(np.int16)).to(device), torch.from_numpy(codes).to(device)
        decoded = gpu.decode_int8_blocks(*tensors)
        results[name] = REFUSED if decoded is None else _digest(decoded)
    decoded = gpu.decode_bfloat16(torch.tensor([0x3F80, 0x7F00], dtype=torch.int16, device=device))
    return results | {"bf16 of 2^127": REFUSED if decoded is None else _digest(decoded)}


def _digest(*arrays: torch.Tensor | NDArray[np.generic]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update((array.cpu().numpy() if isinstance(array, torch.Tensor) else array).tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    print(json.dumps(by_gpu(sys.argv[1])))
