"""NF4, with bitsandbytes' bits."""

import hashlib

import torch

from swarm.model.adapters.nf4 import dequantized, num_scales, packed_bytes, quantized

BITSANDBYTES = "ce6dbc14c9e26b80e9e49b6001727593393e435845e712a3b0cf5b9d4ec114d8"
"""SHA-256 of what bitsandbytes 0.50.2 makes of the values below: packed bytes, scales, values again."""


def drawn() -> torch.Tensor:
    """Values whose bits are the same everywhere, with blocks of zeros, and a last one that is not full."""
    ids = torch.arange(200 * 64 + 17, dtype=torch.int64)
    values = ((ids * 2654435761 + 12345) % 65521 - 32760).float() / 65536
    values[64:128] = 0
    return values


def test_bits_are_those_of_bitsandbytes() -> None:
    values = drawn()
    packed, scales = quantized(values)
    again = dequantized(packed, scales, len(values))
    assert (len(packed), len(scales)) == (packed_bytes(len(values)), num_scales(len(values)))
    made = b"".join(tensor.numpy().tobytes() for tensor in (packed, scales, again))
    assert hashlib.sha256(made).hexdigest() == BITSANDBYTES


def test_quantizing_again_changes_nothing() -> None:
    packed, scales = quantized(drawn())
    again = quantized(dequantized(packed, scales, 200 * 64 + 17))
    assert torch.equal(again[0], packed)
    assert torch.equal(again[1], scales)
