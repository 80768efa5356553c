"""What the GPU's kernels make of the test vectors, as SHA-256, beside what the CPU's make of them.

    [TRITON_INTERPRET=1] python -m tests.kernels.gpu_outputs [cpu|cuda]

runs in a process of its own: Triton reads TRITON_INTERPRET when it is first imported.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.codecs import formats, int4_blocks, int4_tokens, int8_blocks, int8_tokens
from kernels.codecs.outliers import num_outliers
from tests.kernels.outputs import SEED, plain, wide

Floats = NDArray[np.float32]
Encoded = list[NDArray[Any]]

SIZES = (0, 1, 128, 2_049, 20_001)
SHAPES = ((0, 8), (1, 1), (2, 2), (2, 32), (2, 65), (1, 515))
BAD_VALUES = (np.inf, -np.inf, np.nan, 2.0**126)
REFUSED = "refused"


@dataclass(frozen=True)
class Codec:
    """Either gives None for what the kernel refuses; values are decoded to the shape they had."""

    encode: Callable[[Floats], Encoded | None]
    decode: Callable[[Encoded, tuple[int, ...]], Floats | None]


def vectors() -> dict[str, Floats]:
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
    exponents = np.repeat(np.arange(-150, 120, 3), 64)
    found["blocks of every magnitude"] = np.ldexp(plain(6, exponents.size), exponents).astype(np.float32)
    # -7 times a scale whose inverse is rounded up: code -8, were it not limited, where block 532's chance is 0.
    found["all the least code"] = np.full(533 * 64, -7 * float.fromhex("0x1.4ep0"), np.float32)
    for bad in BAD_VALUES:
        values = plain(4, 5_000)
        values[4_321] = bad
        found[f"with {bad}"] = values
    return found


def rows() -> dict[str, Floats]:
    """Tokens narrower than their outliers and wider; of one magnitude, so that the first are put aside; of zeros."""
    found = {}
    for shape in SHAPES:
        size = shape[0] * shape[1]
        found |= {f"wide {shape}": wide(8, size).reshape(shape), f"plain {shape}": plain(9, size).reshape(shape)}
        found[f"tiny {shape}"] = found[f"plain {shape}"] * np.float32(2.0**-123)
    signs = np.where(np.arange(2 * 131) % 3 == 0, np.float32(-0.375), np.float32(0.375))
    found |= {"one magnitude": signs.reshape(2, 131), "zeros": np.zeros((2, 131), np.float32)}
    for bad in BAD_VALUES:
        found[f"with {bad}"] = plain(9, 2 * 131).reshape(2, 131)
        found[f"with {bad}"][1, 130] = bad
    return found


def hostile_blocks() -> dict[str, tuple[str, Encoded, tuple[int, ...]]]:
    """Codec, bodies and shape of what no encoder writes: the last of 40 blocks, or the last half."""
    found: dict[str, tuple[str, Encoded, tuple[int, ...]]] = {}
    for scale, code in ((0x087F, 1), (0x7B03, 1), (0x8880, 1), (0x3F80, -128), (0xFFFF, 0)):
        scales, codes = np.full(40, 0x3F80, np.uint16), np.ones(5_000, np.int8)
        scales[39], codes[4_999] = scale, code
        found[f"scale {scale:#x}, code {code}"] = "int8 blocks", [scales, codes], (5_000,)
    for scale, byte in ((0x7F, 1), (0x7D14, 1), (0x8080, 1), (0xFFFF, 0), (0x3F80, 8), (0x3F80, 0x11), (0, 1)):
        scales, packed = np.full(40, 0x3F80, np.uint16), np.full(1_250, 0x17, np.uint8)
        scales[39], packed[1_249] = scale, byte
        found[f"scale {scale:#x}, byte {byte:#x}"] = "int4 blocks", [scales, packed], (2_499,)
    found["bf16 of 2^127"] = "bf16", [np.array([0x3F80, 0x7F00], np.uint16)], (2,)
    return found


def hostile_tokens() -> dict[str, tuple[str, Encoded, tuple[int, ...]]]:
    """The last of 2 tokens with one thing changed; among that what the codecs do not refuse. Two zeros in one place."""
    found: dict[str, tuple[str, Encoded, tuple[int, ...]]] = {}
    values = plain(9, 2 * 131).reshape(2, 131)
    for codec, largest, smallest_code in (("int8 tokens", 0x7B02, 0x80), ("int4 tokens", 0x7D13, 0x88)):
        encoded = CPU[codec].encode(values)
        assert encoded is not None
        aside, free = int(encoded[2][1, 1]), int(np.flatnonzero(~np.isin(np.arange(131), encoded[2][1]))[0])
        changes = [(0, -1, scale) for scale in (0, 0x7F, 0x80, largest, largest + 1, 0x8080, 0xFFFF)]
        changes += [(1, 0, half) for half in (0x7E80, 0x7E81, 0xFF80, 0x7FC0, 0x8000, 0x0001)]
        changes += [(2, 0, index) for index in (131, 132, 0x8000, 0xFFFF, aside, free)]
        changes += [(3, -1, byte) for byte in (smallest_code, 0x10, 0x01)] + [(3, 0, smallest_code)]
        for array, place, number in changes:
            changed = [part.copy() for part in encoded]
            bits = changed[array].view(np.uint16 if array < 3 else np.uint8)
            bits[1, place] = number
            found[f"{codec}, array {array}, place {place}: {number:#x}"] = codec, changed, values.shape
        zeros = CPU[codec].encode(np.zeros_like(values))
        assert zeros is not None
        zeros[2][1, 1] = zeros[2][1, 0]
        found[f"{codec}, zeros in one place"] = codec, zeros, values.shape
    return found


def outputs(codecs: dict[str, Codec]) -> dict[str, str]:
    """Digests of what is encoded and decoded again, and of what hostile bodies are decoded to."""
    results = {}
    for codec, code in codecs.items():
        for name, values in (rows() if "tokens" in codec else vectors()).items():
            encoded = code.encode(values)
            decoded = None if encoded is None else code.decode(encoded, values.shape)
            results[f"{codec} {name}"] = REFUSED if encoded is None or decoded is None else _digest(*encoded, decoded)
    for name, (codec, encoded, shape) in (hostile_blocks() | hostile_tokens()).items():
        decoded = codecs[codec].decode(encoded, shape)
        results[name] = REFUSED if decoded is None else _digest(decoded)
    return results


def golden(codecs: dict[str, Codec]) -> dict[str, str]:
    """Some of the digests of `tests/kernels/golden.json`, computed with these codecs."""
    inputs = {"int4 blocks wide": wide(7, 50_001), "int4 tokens": wide(8, 40 * 515).reshape(40, 515)}
    results = {}
    for name, values in inputs.items():
        codec = codecs[name.removesuffix(" wide")]
        encoded = codec.encode(values)
        assert encoded is not None
        decoded = codec.decode(encoded, values.shape)
        assert decoded is not None
        good = np.frombuffer(b"True", np.uint8)
        results[name] = _digest(good, *encoded, good, decoded)
    return results


def _on_cpu(module: Any, bodies: Callable[[tuple[int, ...]], Encoded], *seed: NDArray[np.uint64]) -> Codec:
    def encode(values: Floats) -> Encoded | None:
        encoded = bodies(values.shape)
        return encoded if module.encode(values, *seed, *encoded) else None

    def decode(encoded: Encoded, shape: tuple[int, ...]) -> Floats | None:
        values = np.empty(shape, np.float32)
        return values if module.decode(*encoded, values) else None

    return Codec(encode, decode)


def _block_bodies(block_values: int, codes: Callable[[int], NDArray[Any]]) -> Callable[[tuple[int, ...]], Encoded]:
    return lambda shape: [np.empty(-(-shape[0] // block_values), np.uint16), codes(shape[0])]


def _token_bodies(module: Any, codes: Callable[[int, int], NDArray[Any]]) -> Callable[[tuple[int, ...]], Encoded]:
    def bodies(shape: tuple[int, ...]) -> Encoded:
        scales = np.empty((shape[0], -(-shape[1] // module.BLOCK_VALUES)), np.uint16)
        outliers, indices = np.empty((2, shape[0], num_outliers(shape[1])), np.uint16)
        return [scales, outliers, indices, codes(shape[0], shape[1])]

    return bodies


def _encode_bfloat16(values: Floats) -> Encoded | None:
    halves = np.empty(values.size, np.uint16)
    return [halves] if formats.to_bfloat16(values.view(np.int32), halves) else None


def _decode_bfloat16(encoded: Encoded, shape: tuple[int, ...]) -> Floats | None:
    values = np.empty(shape, np.float32)
    return values if formats.from_bfloat16(encoded[0], values.view(np.int32)) else None


CPU = {
    "int8 blocks": _on_cpu(int8_blocks, _block_bodies(128, lambda size: np.empty(size, np.int8)), SEED),
    "int4 blocks": _on_cpu(int4_blocks, _block_bodies(64, lambda size: np.empty(-(-size // 2), np.uint8)), SEED),
    "bf16": Codec(_encode_bfloat16, _decode_bfloat16),
    "int8 tokens": _on_cpu(int8_tokens, _token_bodies(int8_tokens, lambda num, size: np.empty((num, size), np.int8))),
    "int4 tokens": _on_cpu(
        int4_tokens, _token_bodies(int4_tokens, lambda num, size: np.empty((num, -(-size // 2)), np.uint8))
    ),
}


def on_gpu(device: str) -> dict[str, Codec]:
    from kernels.gpu import encoded_there as gpu

    def codec(
        encode: Callable[[torch.Tensor], tuple[torch.Tensor, ...] | None],
        decode: Callable[[list[torch.Tensor], int], torch.Tensor | None],
    ) -> Codec:
        def encoded(values: Floats) -> Encoded | None:
            found = encode(torch.from_numpy(values).to(device))
            return None if found is None else [each.cpu().numpy() for each in found]

        def decoded(bodies: Encoded, shape: tuple[int, ...]) -> Floats | None:
            signed = [each.view(np.int16) if each.dtype == np.uint16 else each for each in bodies]
            values = decode([torch.from_numpy(each).to(device) for each in signed], shape[-1])
            return None if values is None else values.cpu().numpy()

        return Codec(encoded, decoded)

    def encode_bfloat16(values: torch.Tensor) -> tuple[torch.Tensor] | None:
        halves = gpu.encode_bfloat16(values)
        return None if halves is None else (halves,)

    return {
        "int8 blocks": codec(
            lambda values: gpu.encode_int8_blocks(values, SEED), lambda bodies, size: gpu.decode_int8_blocks(*bodies)
        ),
        "int4 blocks": codec(
            lambda values: gpu.encode_int4_blocks(values, SEED),
            lambda bodies, size: gpu.decode_int4_blocks(*bodies, num_values=size),
        ),
        "bf16": codec(encode_bfloat16, lambda bodies, size: gpu.decode_bfloat16(*bodies)),
        "int8 tokens": codec(gpu.encode_int8_tokens, lambda bodies, size: gpu.decode_int8_tokens(*bodies)),
        "int4 tokens": codec(gpu.encode_int4_tokens, lambda bodies, size: gpu.decode_int4_tokens(*bodies, width=size)),
    }


def _digest(*arrays: NDArray[Any]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    codecs = on_gpu(sys.argv[1])
    print(json.dumps({"outputs": outputs(codecs), "golden": golden(codecs)}))
