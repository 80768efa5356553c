"""A stage's part of a model's decoder: embedding, layers, norm, each as transformers has it.

Every layer is made with the whole model's config and its own place in it, so that whatever a family does by layer is
done in a stage too. Shapes: B samples, L tokens, D hidden values, K of them in a subspace, V vocabulary.
"""

import copy
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from swarm.core.errors import SettingsError
from swarm.core.settings import AdapterSettings, ModelSettings
from swarm.model.adapters.frozen import AdaptedLinear
from swarm.model.balancing import balance_experts
from swarm.model.documents import Documents
from swarm.model.families import (
    Family,
    attention_of,
    family_of,
    is_tied,
    validate_config,
    validate_stage_layers,
    whole_config,
)
from swarm.model.layout import ParameterLayout
from swarm.model.subspace import StageInput, Subspace, WithinSubspace, narrow_layers, narrowed


class Stack(nn.Module):
    """What is computed from token ids or hidden values without a cache: hidden values, at the last stage normed.

    transformers' own forward looks at the positions for packed sequences, which makes the host wait for a GPU.
    """

    def __init__(
        self,
        family: Family,
        config: Any,
        decoder: Any,
        layers: range,
        *,
        device: torch.device,
        subspace: Subspace | None = None,
    ) -> None:
        """`decoder` is the family's own, with any number of layers; its parts become the stack's. `subspace`: that in
        which the values lie which stages send."""
        from swarm.local.transformers_library import without_data

        super().__init__()
        self.family, self.config, self.subspace = family, config, subspace
        is_first, is_last = layers.start == 0, layers.stop == config.num_hidden_layers
        listed = getattr(config, "layer_types", None)
        everywhere = "full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"
        self.kinds = [listed[at] if listed is not None else everywhere for at in layers]
        self.embedding = _with_buffers(getattr(decoder, family.embedding), decoder, device) if is_first else None
        self.positions = getattr(decoder, family.positions) if is_first and family.positions is not None else None
        self.rotary = type(decoder.rotary_emb)(config).to(device) if hasattr(decoder, "rotary_emb") else None
        layer_class = type(getattr(decoder, family.layers)[0])
        with without_data():
            self.layers = nn.ModuleList(layer_class(config, layer_idx=at) for at in layers)
        self.norm = getattr(decoder, family.norm) if is_last else None
        if subspace is not None:
            narrow_layers(self.layers[:-1] if is_last else self.layers, family, subspace)
            self.embedding = narrowed(self.embedding, subspace) if self.embedding is not None else None
            self.positions = narrowed(self.positions, subspace) if self.positions is not None else None

    def forward(self, x: StageInput, documents: Documents | None = None) -> torch.Tensor:
        """`documents`: that samples are packed of; None: each is one. In a subspace (B, L, K) but at the last stage."""
        from swarm.local.transformers_library import transformers

        if documents is None:
            positions_BL = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        else:
            positions_BL = documents.positions_BL
        hidden_BLD, fixed_BLD = self._entered(x, positions_BL)
        masks = {
            "full_attention": transformers.masking_utils.create_causal_mask,
            "sliding_attention": transformers.masking_utils.create_sliding_window_causal_mask,
        }
        given: dict[str, Any] = {"attention_mask": None, "past_key_values": None, "position_ids": None}
        if documents is not None:
            given["and_mask_function"] = documents.mask
        by_kind: dict[str, dict[str, Any]] = {}
        for kind in sorted(set(self.kinds)):
            mask = masks[kind](config=self.config, inputs_embeds=hidden_BLD, **given)
            by_kind[kind] = {"attention_mask": mask, **self._turned(hidden_BLD, positions_BL, kind)}
        for layer, kind in zip(self.layers, self.kinds, strict=True):
            hidden_BLD = layer(hidden_BLD, position_ids=positions_BL, **by_kind[kind])
        if self.norm is not None:
            normed: torch.Tensor = self.norm(hidden_BLD)
            return normed
        return self._left(hidden_BLD, fixed_BLD)

    def skipped(self, x: StageInput) -> torch.Tensor:
        """What would be sent if no layer were computed."""
        if isinstance(x, WithinSubspace):
            return x.values_BLK
        positions_BL = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        return self._left(*self._entered(x, positions_BL)).float()

    def _entered(self, x: StageInput, positions_BL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the layers are given, (B, L, D), and what of it no layer changes, where it is known. `positions_BL` may
        be of one sample for all."""
        if isinstance(x, WithinSubspace):
            assert self.subspace is not None, "hidden values of another model"
            fixed_BLD = self.subspace.fixed(x.ids_BL)
            return self.subspace.entered(x.values_BLK, fixed_BLD), fixed_BLD
        if self.embedding is None:
            return x, None
        hidden_BLD: torch.Tensor = self.embedding(x)
        if self.positions is not None:
            hidden_BLD = hidden_BLD + self.positions(positions_BL)
        if self.family.embedding_factor is not None:
            hidden_BLD = hidden_BLD * getattr(self.config, self.family.embedding_factor)
        if self.subspace is None:
            return hidden_BLD, None
        fixed_BLD = self.subspace.fixed(x)
        return hidden_BLD + fixed_BLD, fixed_BLD

    def _left(self, hidden_BLD: torch.Tensor, fixed_BLD: torch.Tensor | None) -> torch.Tensor:
        """What is sent of hidden values."""
        if self.subspace is None:
            return hidden_BLD
        assert fixed_BLD is not None
        return self.subspace.left(hidden_BLD, fixed_BLD)

    def _turned(self, hidden_BLD: torch.Tensor, positions_BL: torch.Tensor, kind: str) -> dict[str, Any]:
        if self.rotary is None:
            return {}
        kinds = (kind,) if self.family.turns_by_kind else ()
        return {"position_embeddings": self.rotary(hidden_BLD, positions_BL, *kinds)}

    def logits(self, y: torch.Tensor, head_VD: torch.Tensor) -> torch.Tensor:
        """(..., V) of the last stage's output."""
        logits = nn.functional.linear(y, head_VD)
        if self.family.logits_divisor is not None:
            logits = logits / getattr(self.config, self.family.logits_divisor)
        cap = getattr(self.config, self.family.logits_cap) if self.family.logits_cap is not None else None
        return logits if cap is None else torch.tanh(logits / cap) * cap


@lru_cache(maxsize=8)
def build_stack(model: ModelSettings, stage: int, *, device: torch.device) -> Stack:
    """Parameters on the meta device take no memory; what no checkpoint holds is real on `device`.

    Made once, since it takes long, and shared: nobody changes it (`swarm.model.stage` binds weights into a copy).
    """
    family, config = family_of(model.config_json), _computed_config(model.config_json)
    layers, subspace = range(*model.stage_layers[stage]), Subspace.of(model, device)
    stack = Stack(family, config, decoder_of(model.config_json), layers, device=device, subspace=subspace)
    assert not [name for name, buffer in stack.named_buffers() if buffer.is_meta], "a buffer has no values"
    if family.routed and config.router_aux_loss_coef:
        balance_experts(stack.layers, config)
    if model.has_base:
        _adapt(stack.layers, model.adapters)
    return stack.eval()


def _adapt(layers: nn.ModuleList, adapters: AdapterSettings) -> None:
    """Put adapters beside the modules that are named. Raises SettingsError for names of none."""
    linear = {path: module for path, module in layers.named_modules() if isinstance(module, nn.Linear)}
    names = {path.rpartition(".")[2] for path in linear}
    wanted = names if "all-linear" in adapters.modules else set(adapters.modules)
    if not names or wanted - names:
        raise SettingsError(
            f"adapters.modules = {list(adapters.modules)}: a layer has no linear module "
            f"{', '.join(sorted(wanted - names)) or 'at all'}; it has {', '.join(sorted(names)) or 'none'}"
        )
    for path, module in linear.items():
        above, _, name = path.rpartition(".")
        if name in wanted:
            sizes = module.in_features, module.out_features
            made = AdaptedLinear(module, sizes, rank=adapters.rank, scale=adapters.scale)
            setattr(layers.get_submodule(above), name, made)


def decoder_of(config_json: str) -> Any:
    """The family's own decoder with one layer, on the meta device: what stacks are made of, and its rules for first
    weights (`_init_weights`)."""
    from swarm.local.transformers_library import transformers, without_data

    whole = _computed_config(config_json)
    config = copy.deepcopy(whole)
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[:1]
    with without_data():
        decoder: Any = getattr(transformers, family_of(config_json).decoder_class)(config)
    decoder.config = whole
    return decoder


def global_name(model: ModelSettings, stage: int, name: str) -> str:
    """Name in the whole model of the stage's stack parameter or module `name`."""
    family = family_of(model.config_json)
    first, *rest = name.split(".")
    if first == "layers":
        rest[0] = str(int(rest[0]) + model.stage_layers[stage][0])
    return family.decoder_prefix + ".".join([getattr(family, first), *rest])


@lru_cache(maxsize=64)
def stage_layout(model: ModelSettings, stage: int) -> ParameterLayout:
    """Layout of a stage without building it in memory. Raises SettingsError as `validate_stage_layers`."""
    validate_stage_layers(model)
    return layout_of_stack(model, stage, build_stack(model, stage, device=torch.device("cpu")))


def trained_parameters(model: ModelSettings, stack: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """All, or where they have a base to stand on the adapters'."""
    return [one for one in stack.named_parameters() if not model.has_base or ".lora_" in one[0]]


def layout_of_stack(model: ModelSettings, stage: int, stack: Stack) -> ParameterLayout:
    """Layout of what the stack trains, and the head at the last stage, under their names in the whole model."""
    shapes = {global_name(model, stage, name): tuple(value.shape) for name, value in trained_parameters(model, stack)}
    if model.has_base:
        return ParameterLayout.of(shapes)
    if stage == model.num_stages - 1 and not is_tied(model, stage):
        shape = validate_config(model.config_json)
        shapes[family_of(model.config_json).head_name] = (shape.vocab_size, shape.hidden_size)
    return ParameterLayout.of(shapes)


@lru_cache(maxsize=32)
def _computed_config(config_json: str) -> Any:
    """The whole model's, as layers read it; shared, like the checked one."""
    config = copy.deepcopy(whole_config(config_json))
    config.use_cache = False
    config._attn_implementation = attention_of(config)
    if family_of(config_json).routed:
        config._experts_implementation = "eager"  # another sums over experts in another order
    return config


def _with_buffers(module: nn.Module, decoder: Any, device: torch.device) -> nn.Module:
    """The module with what no checkpoint holds, by the family's own rule."""
    buffers = dict(module.named_buffers())
    for name, buffer in buffers.items():
        module.register_buffer(name, torch.empty_like(buffer, device=device), persistent=False)
    if buffers:
        decoder._init_weights(module)
    return module
