"""Cells of codecs: what was encoded lies within them, what just came out otherwise does too, and a lie does not."""

import numpy as np
import pytest
import torch

from swarm.averaging.activations import activation_codec
from swarm.core.settings import ActivationCodecName

SHAPE = (2, 16, 96)
CODECS: tuple[ActivationCodecName, ...] = ("fp32", "bf16", "int8", "int4", "int4h")


def _beyond(codec: ActivationCodecName, values: torch.Tensor, said: torch.Tensor) -> float:
    """By how much what `said` decodes to leaves its cells around `values`, beside their root mean square."""
    named = activation_codec(codec)
    body, own = named.encode(said), named.encode(values)
    decoded, exact = (named.laid(part.numpy(), body) for part in (named.decode(body, SHAPE), values))
    away = np.abs(decoded - exact).reshape(-1) - named.cells(body, own, SHAPE)
    return float(np.sqrt(np.mean(np.square(np.maximum(away, 0.0)))) / np.sqrt(np.mean(np.square(values.numpy()))))


@pytest.mark.parametrize("codec", CODECS)
def test_what_a_codec_loses_is_within_its_cells(codec: ActivationCodecName) -> None:
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    values[0, 3] = 0.0
    assert _beyond(codec, values, values) < 1e-6


@pytest.mark.parametrize("codec", CODECS)
def test_what_lies_beyond_the_cells_is_no_more_than_what_was_off_before(codec: ActivationCodecName) -> None:
    """Also where another value is put aside, and a block has another scale for it."""
    chance = torch.Generator().manual_seed(1)
    values = torch.randn(SHAPE, generator=chance)
    for error in (1e-6, 1e-3, 1e-2):
        said = values + error * torch.randn(SHAPE, generator=chance)
        assert _beyond(codec, values, said) < 1.2 * error


@pytest.mark.parametrize("codec", CODECS)
def test_a_claim_cannot_make_its_own_cells_wide(codec: ActivationCodecName) -> None:
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(2))
    assert _beyond(codec, values, -values) > 1.5
    assert _beyond(codec, values, values * 1000) > 500
    wide = values.clone()
    wide[..., ::24] = 1000.0  # whole blocks are rounded away by what is among them
    assert _beyond(codec, values, wide) > 10
