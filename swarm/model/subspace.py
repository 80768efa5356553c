"""A residual stream that leaves each token's fixed row only within a subspace, so that a hop carries k values of D.

U (D, k) is orthonormal and F (V, D) random; both follow from a seed, are trained by nobody and sent to nobody. A
token's embedding is its row of E U' + F, and a layer's projections that add to the residual stream are Z U', where E
and Z are trained; the last layer, norm and head are ordinary. So between two stages x - F[token] lies in span(U): its k
coordinates and the token's id say all of it, and of a gradient only what lies there is asked for (ReparamSSN,
arXiv 2506.01260). E and Z stand under the names of what they are multiplied out to. They are multiplied by
sqrt(D / k) besides, so that their values, and what a learning rate does to them, are as large as those of an ordinary
model.

U and F are made of integers by rules without a library's functions: equal bits on every machine. A row of F is made
when its token comes: nobody holds V times D values.
Shapes: B samples, L tokens, D hidden values, K of the subspace, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from swarm.core.errors import SettingsError
from swarm.core.settings import ModelSettings
from swarm.model.families import Family, family_of, validate_config, whole_config
from swarm.model.layout import ParameterLayout

MOST_ODD = 255
"""Largest odd divisor of D: U consists of so many squares of signs on a side, and is no better spread than they are."""

_MASK = (1 << 32) - 1
_BYTE_SPREAD = (65535 / 12) ** 0.5
"""Standard deviation of the whole numbers from -128 to 127, each half a unit further."""
_ROWS, _PLACES, _SIGNS, _COLUMNS = range(4)
ROWS_AT_ONCE = 4096
"""Of F, where all are made: each takes 24 bytes a value on the way."""


@dataclass(frozen=True, eq=False)
class WithinSubspace:
    """What a stage that is not the first is given of such a model: both on its device, or yet to be."""

    values_BLK: torch.Tensor
    """fp32: coordinates of x - F[ids]."""
    ids_BL: torch.Tensor
    """int64."""

    @property
    def shape(self) -> torch.Size:
        return self.values_BLK.shape

    @property
    def device(self) -> torch.device:
        return self.values_BLK.device


StageInput: TypeAlias = torch.Tensor | WithinSubspace
"""Token ids at the first stage; at the others hidden values, or where they lie in a subspace their coordinates."""


def given_on(model: ModelSettings, values: torch.Tensor, ids_BL: torch.Tensor) -> StageInput:
    """What a later stage is given: values as they were sent, with the ids where they mean nothing without them."""
    return WithinSubspace(values, ids_BL) if model.sends_ids else values


@dataclass(frozen=True, eq=False)
class Subspace:
    """Of one model, on one device."""

    basis_DK: torch.Tensor
    """U."""
    seed: int
    scale: float
    """Standard deviation of F: what the family begins its embedding with."""
    factor: float
    """What the family multiplies embeddings by, F's rows with them."""

    @classmethod
    def of(cls, model: ModelSettings, device: torch.device) -> "Subspace | None":
        """None for an ordinary model. Raises SettingsError as `check_subspace`."""
        if model.subspace == 1:
            return None
        check_subspace(model)
        config, family = whole_config(model.config_json), family_of(model.config_json)
        factor = 1.0 if family.embedding_factor is None else getattr(config, family.embedding_factor)
        width = config.hidden_size
        basis = torch.from_numpy(basis_of(width, width // model.subspace, model.subspace_seed))
        return cls(basis.to(device), model.subspace_seed, config.initializer_range, factor)

    @property
    def lift_DK(self) -> torch.Tensor:
        """What trained values are multiplied by: U and sqrt(D / k)."""
        width, size = self.basis_DK.shape
        lift_DK: torch.Tensor = self.basis_DK * (width / size) ** 0.5
        return lift_DK

    def fixed(self, ids_BL: torch.Tensor) -> torch.Tensor:
        """(B, L, D) fp32: rows of F, as they are in x."""
        spread = self.scale * self.factor / _BYTE_SPREAD
        return fixed_rows(ids_BL, self.basis_DK.shape[0], self.seed) * spread

    def entered(self, values_BLK: torch.Tensor, fixed_BLD: torch.Tensor) -> torch.Tensor:
        """x of its coordinates."""
        with torch.autocast(values_BLK.device.type, enabled=False):
            x_BLD: torch.Tensor = nn.functional.linear(values_BLK, self.basis_DK) + fixed_BLD
            return x_BLD

    def left(self, hidden_BLD: torch.Tensor, fixed_BLD: torch.Tensor) -> torch.Tensor:
        """Coordinates of x."""
        with torch.autocast(hidden_BLD.device.type, enabled=False):
            values_BLK: torch.Tensor = (hidden_BLD.float() - fixed_BLD) @ self.basis_DK
            return values_BLK


def check_subspace(model: ModelSettings) -> None:
    """Raises SettingsError for a subspace that the model cannot have."""
    if model.subspace == 1:
        return
    shape, family = validate_config(model.config_json), family_of(model.config_json)
    width, wrong = shape.hidden_size, None
    if width % model.subspace:
        wrong = f"it does not divide hidden_size = {width}"
    elif width // (width & -width) > MOST_ODD:
        wrong = f"hidden_size = {width} is an odd number above {MOST_ODD} times a power of two"
    elif model.has_base:
        wrong = "adapters stand on a frozen model, whose values lie in no subspace; set adapters.rank = 0"
    elif family.no_subspace is not None:
        wrong = f"{shape.model_type} has {family.no_subspace}"
    elif shape.tied:
        wrong = "the head would have to lie in the subspace with the embedding; set tie_word_embeddings = false"
    elif shape.num_layers == 1:
        wrong = "of one layer there is none but the last, which has no subspace"
    if wrong is not None:
        raise SettingsError(f"model.subspace = {model.subspace}: {wrong}")


# -- U and F ----------------------------------------------------------------------------------------------


def _mixed(words: Any) -> Any:
    """A bijection of the numbers below 2^32, in 64 bits: no product of it overflows (Wellons' hash prospector)."""
    words = ((words ^ (words >> 16)) * 0x21F0AAAD) & _MASK
    words = ((words ^ (words >> 15)) * 0x735A2D97) & _MASK
    return words ^ (words >> 15)


def _key(seed: int, what: int) -> int:
    low, high = seed & _MASK, (seed >> 32) & _MASK
    return int(_mixed(_mixed(_mixed(low ^ 0x53554253) ^ high) ^ what))


@lru_cache(maxsize=8)
def basis_of(width: int, size: int, seed: int) -> NDArray[np.float32]:
    """U (D, K): columns of a Hadamard matrix with random signs; where D is no power of two, of several such, mixed by a
    reflection."""
    square = width & -width
    blocks, places = width // square, np.arange(width, dtype=np.int64)
    columns = np.argsort(_mixed(places ^ _key(seed, _COLUMNS)), kind="stable")[:size]
    bits = (places[:, None] % square) & (columns[None, :] % square)
    for shift in (16, 8, 4, 2, 1):
        bits ^= bits >> shift
    signs_D = 1.0 - 2.0 * (_mixed(places ^ _key(seed, _SIGNS)) & 1)
    same = (places[:, None] // square) == (columns[None, :] // square)
    made = signs_D[:, None] * (1.0 - 2.0 * (bits & 1)) * (same - 2.0 / blocks) / np.sqrt(np.float64(square))
    basis: NDArray[np.float32] = np.ascontiguousarray(made.astype(np.float32))
    return basis


def fixed_rows(ids: torch.Tensor, width: int, seed: int) -> torch.Tensor:
    """Rows of F before they are scaled, (..., D): whole numbers from -128 to 127, each half a unit further."""
    places = torch.arange(-(-width // 4), device=ids.device, dtype=torch.int64)
    words = _mixed(_mixed(ids ^ _key(seed, _ROWS)).unsqueeze(-1) ^ _mixed(places ^ _key(seed, _PLACES)))
    bytes_ = torch.stack([(words >> shift) & 255 for shift in (0, 8, 16, 24)], dim=-1)
    return bytes_.flatten(start_dim=-2)[..., :width].float() - 127.5


# -- modules ----------------------------------------------------------------------------------------------


class SubspaceLinear(nn.Linear):
    """A product whose result lies in the subspace."""

    lift_DK: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(super().forward(input), self.lift_DK)


class SubspaceEmbedding(nn.Embedding):
    """Rows in the subspace."""

    lift_DK: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.lift_DK.device.type, enabled=False):
            return nn.functional.linear(super().forward(input), self.lift_DK)


@lru_cache(maxsize=1)
def _conv1d() -> Any:
    from swarm.local.transformers_library import transformers

    class SubspaceConv1D(transformers.pytorch_utils.Conv1D):  # type: ignore[misc]
        """GPT-2's product, whose result lies in the subspace."""

        lift_DK: torch.Tensor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(super().forward(x), self.lift_DK)

    return SubspaceConv1D


def narrowed(module: nn.Module, subspace: Subspace) -> nn.Module:
    """An embedding, or a product, of which so many values are trained as the subspace has; on the meta device."""
    from swarm.local.transformers_library import without_data

    size = subspace.basis_DK.shape[1]
    made: Any
    with without_data():
        if isinstance(module, nn.Embedding):
            made = SubspaceEmbedding(module.num_embeddings, size, module.padding_idx)
        elif isinstance(module, nn.Linear):
            made = SubspaceLinear(module.in_features, size, bias=module.bias is not None)
        else:
            made = _conv1d()(size, module.nx)
    made.register_buffer("lift_DK", subspace.lift_DK, persistent=False)
    return made  # type: ignore[no-any-return]


def narrow_layers(layers: nn.ModuleList, family: Family, subspace: Subspace) -> None:
    """Put such products in the place of those of the layers that add to the residual stream."""
    for layer in layers:
        for path in family.writers:
            above, _, name = path.rpartition(".")
            setattr(layer.get_submodule(above), name, narrowed(layer.get_submodule(path), subspace))


# -- the ordinary model -----------------------------------------------------------------------------------


def multiplied_out(
    model: ModelSettings, tensors: Mapping[str, NDArray[np.float32]], whole: ParameterLayout
) -> NDArray[np.float32]:
    """A stage's trained tensors by name as the flat vector of the same stage of an ordinary model, whose layout is
    `whole`."""
    subspace, embedding = Subspace.of(model, torch.device("cpu")), family_of(model.config_json).embedding_name
    assert subspace is not None, "an ordinary model has nothing to multiply out"
    flat = np.empty(whole.num_values, dtype=np.float32)
    for name, view in whole.views(flat).items():
        values, out = torch.from_numpy(np.array(tensors[name])), torch.from_numpy(view)
        if values.shape == out.shape:
            out.copy_(values)
        elif values.shape[0] != out.shape[0]:
            torch.matmul(subspace.lift_DK, values, out=out)
        else:
            torch.matmul(values, subspace.lift_DK.T, out=out)
        if name == embedding:
            for start in range(0, len(out), ROWS_AT_ONCE):
                rows = torch.arange(start, min(start + ROWS_AT_ONCE, len(out)))
                out[rows] += subspace.fixed(rows) / subspace.factor
    return flat
