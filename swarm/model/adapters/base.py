"""A frozen base in one file: the whole model's tensors in the order of its layers, whatever it is cut into.

A stage's tensors lie in few ranges of it, which is all that a peer fetches and maps. Every peer can work out where each
lies; what it holds is named by a digest.
"""

import warnings
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from math import prod
from typing import Literal

import torch
from torch import nn

from swarm.core.errors import SettingsError
from swarm.core.kept import once
from swarm.core.settings import AdapterSettings, ModelSettings
from swarm.model.adapters.frozen import Frozen
from swarm.model.adapters.nf4 import num_scales, packed_bytes
from swarm.model.families import family_of, validate_config, whole_config
from swarm.model.stack import build_stack, global_name, stage_layout

Kind = Literal["float32", "bfloat16", "float16", "nf4"]
ALIGNED = 64
"""Each tensor, and NF4's scales, begin at a multiple of so many bytes."""


@dataclass(frozen=True)
class BaseTensor:
    """Where a tensor lies in the file."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    first_byte: int

    @property
    def num_values(self) -> int:
        return prod(self.shape)

    @property
    def scales_at(self) -> int:
        """Of NF4, from the tensor's own first byte."""
        return _aligned(packed_bytes(self.num_values))

    @property
    def size_bytes(self) -> int:
        if self.kind == "nf4":
            return self.scales_at + 4 * num_scales(self.num_values)
        dtype: torch.dtype = getattr(torch, self.kind)
        return dtype.itemsize * self.num_values

    @property
    def stop(self) -> int:
        """Where the next may begin."""
        return _aligned(self.first_byte + self.size_bytes)


@dataclass(frozen=True)
class BaseLayout:
    """Of all tensors, in the file's order."""

    tensors: tuple[BaseTensor, ...]

    @property
    def size_bytes(self) -> int:
        return self.tensors[-1].stop

    @once
    def by_name(self) -> dict[str, BaseTensor]:
        return {tensor.name: tensor for tensor in self.tensors}


@dataclass(frozen=True)
class Base:
    """The file's bytes, those of this stage's tensors at least: mapped, and written by nobody."""

    layout: BaseLayout
    data: memoryview

    def tensor(self, name: str) -> Frozen:
        """As it lies there: it shares the file's memory."""
        at = self.layout.by_name[name]
        if at.kind != "nf4":
            kept = self._values(at.first_byte, at.num_values, getattr(torch, at.kind)).view(at.shape)
            return Frozen(at.shape, kept)
        packed = self._values(at.first_byte, packed_bytes(at.num_values), torch.uint8)
        scales = self._values(at.first_byte + at.scales_at, num_scales(at.num_values), torch.float32)
        return Frozen(at.shape, packed, scales)

    def _values(self, first_byte: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.frombuffer(self.data, dtype=dtype, count=count, offset=first_byte)


@lru_cache(maxsize=8)
def base_layout(model: ModelSettings) -> BaseLayout:
    """Of the frozen base of a model with adapters. Raises SettingsError for one that cannot be cut."""
    whole = whole_model(model)
    shapes = stage_layout(whole, 0)
    quantized_names = _quantized_names(whole) if model.adapters.base == "nf4" else frozenset()
    tensors: list[BaseTensor] = []
    at = 0
    for name, shape in sorted(
        zip(shapes.names, shapes.shapes, strict=True), key=lambda one: (*place_of(whole, one[0]), one[0])
    ):
        kind: Kind = "nf4" if name in quantized_names else _plain_kind(model)
        tensors.append(BaseTensor(name, shape, kind, at))
        at = tensors[-1].stop
    return BaseLayout(tuple(tensors))


@lru_cache(maxsize=32)
def base_tensors(model: ModelSettings, stage: int) -> tuple[BaseTensor, ...]:
    """Those that the stage computes with, in the file's order."""
    layout, family = base_layout(model), family_of(model.config_json)
    names = set(stage_layout(replace(model, adapters=AdapterSettings()), stage).names)
    if family.head_name not in layout.by_name and stage == model.num_stages - 1:
        names = names - {family.head_name} | {family.embedding_name}
    return tuple(tensor for tensor in layout.tensors if tensor.name in names)


def base_by_layer(model: ModelSettings) -> list[tuple[BaseTensor, ...]]:
    """All tensors in the file's order: what is before the layers, each layer's, and what is after."""
    whole = whole_model(model)
    return [tuple(of) for _, of in groupby(base_layout(model).tensors, key=lambda tensor: place_of(whole, tensor.name))]


def whole_model(model: ModelSettings) -> ModelSettings:
    """Uncut and without adapters."""
    return replace(
        model, stage_layers=((0, model.stage_layers[-1][1]),), compute_dtype="fp32", adapters=AdapterSettings()
    )


def place_of(whole: ModelSettings, name: str) -> tuple[int, int]:
    """Before the layers, of which layer, or after."""
    family = family_of(whole.config_json)
    layers = f"{family.decoder_prefix}{family.layers}."
    if name.startswith(layers):
        return (1, int(name.removeprefix(layers).split(".")[0]))
    first = [family.embedding] if family.positions is None else [family.embedding, family.positions]
    return (0, 0) if name in [f"{family.decoder_prefix}{part}.weight" for part in first] else (2, 0)


def _quantized_names(whole: ModelSettings) -> frozenset[str]:
    """The matrices of linear modules within layers."""
    stack = build_stack(whole, 0, device=torch.device("cpu"))
    return frozenset(
        global_name(whole, 0, f"layers.{path}.weight")
        for path, module in stack.layers.named_modules()
        if isinstance(module, nn.Linear)
    )


def _plain_kind(model: ModelSettings) -> Kind:
    named = str(whole_config(model.config_json).dtype).removeprefix("torch.")
    return "bfloat16" if named == "bfloat16" else "float16" if named == "float16" else "float32"


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def check_adapters(model: ModelSettings) -> None:
    """Raises SettingsError for adapters that the model has no modules for."""
    if not model.has_base:
        return
    family, shape = family_of(model.config_json), validate_config(model.config_json)
    if family.routed:
        raise SettingsError(
            f"adapters.rank = {model.adapters.rank}: adapters beside routed experts are not tested; "
            f"train the whole {shape.model_type} with adapters.rank = 0"
        )
    stage_layout(model, 0)
