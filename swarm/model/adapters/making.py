"""The file of a frozen base made, once, by the host; and what of a checkpoint's values it keeps."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from swarm.core.errors import SettingsError
from swarm.core.settings import ModelSettings
from swarm.disk.whole_file import whole_file
from swarm.model.adapters.base import BaseTensor, base_by_layer, base_layout, whole_model
from swarm.model.adapters.nf4 import dequantized, quantized
from swarm.model.families import family_of
from swarm.model.initial import stage_weights
from swarm.model.layout import ParameterLayout
from swarm.model.stored import read_tensors


def write_base(model: ModelSettings, path: Path, seed: int, source: Path | None) -> None:
    """Make the file from the Hugging Face checkpoint in `source`, layer by layer, or from drawn weights.

    Raises SettingsError naming the file and tensor at fault, OSError.
    """
    layout = base_layout(model)
    with whole_file(path) as partial, partial.open("wb") as file:
        for tensor, values in values_of(model, seed, source):
            file.seek(tensor.first_byte)
            file.write(_stored(tensor, values))
        file.truncate(layout.size_bytes)


def as_kept(tensor: BaseTensor, values: torch.Tensor) -> torch.Tensor:
    """fp32 values of a checkpoint's tensor as the base has them, in fp32 again."""
    if tensor.kind == "nf4":
        return dequantized(*quantized(values), tensor.num_values).view(tensor.shape)
    return values.to(getattr(torch, tensor.kind)).float()


def values_of(model: ModelSettings, seed: int, source: Path | None) -> Iterator[tuple[BaseTensor, torch.Tensor]]:
    """Tensors in the file's order with their fp32 values: of a checkpoint a layer's at a time, else all at once."""
    whole, family = whole_model(model), family_of(model.config_json)
    for tensors in base_by_layer(model) if source is not None else [base_layout(model).tensors]:
        of_group = ParameterLayout.of({tensor.name: tensor.shape for tensor in tensors})
        if source is not None:
            flat = read_tensors(source, family, of_group, None)
        else:
            flat = stage_weights(whole, 0, seed, None)
        views = of_group.views(flat)
        for tensor in tensors:
            yield tensor, torch.from_numpy(np.ascontiguousarray(views[tensor.name]))


def _stored(tensor: BaseTensor, values: torch.Tensor) -> bytes:
    if tensor.kind == "nf4":
        packed, scales = quantized(values)
        return packed.numpy().tobytes().ljust(tensor.scales_at, b"\0") + scales.numpy().tobytes()
    kept = values.to(getattr(torch, tensor.kind))
    if not bool(kept.isfinite().all()):
        raise SettingsError(f"{tensor.name} has values that are not finite, or that {tensor.kind} cannot hold")
    return kept.view(torch.uint8).numpy().tobytes() if kept.dim() else bytes(kept.numpy())
