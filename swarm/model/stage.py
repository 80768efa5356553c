"""A stage as a pure function: weights and an input in, an output and gradients out.

Shapes: B samples, L tokens, D hidden values (between stages with a subspace fewer, K), V vocabulary, N = B * L,
C tokens of one loss chunk.
"""

import copy
import math
import os
import threading
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from swarm.core.errors import LocalError, RemoteError, SettingsError
from swarm.core.pipeline.compute_mode import ComputeMode
from swarm.core.pipeline.targets import DOCUMENT_BEGINS, IGNORED_TARGET
from swarm.core.settings import ModelSettings
from swarm.model.adapters.base import Base, base_tensors
from swarm.model.adapters.frozen import Frozen, frozen_tree
from swarm.model.documents import Bounds, Documents, split
from swarm.model.families import family_of, hop_width, is_tied, validate_config, validate_stage_layers
from swarm.model.layout import ParameterLayout
from swarm.model.link import lent, link_to
from swarm.model.stack import Stack, build_stack, global_name, layout_of_stack, trained_parameters
from swarm.model.subspace import StageInput, WithinSubspace

MAX_CHUNK_TOKENS = 4096
MAX_CHUNK_LOGITS = 1 << 26
"""The loss is computed on as many tokens at a time as keep within both, so full logits never exist."""


@dataclass(frozen=True)
class Weights:
    """One immutable version of a stage's weights, bound into a module tree of its own.

    Work in flight holds the version it began with; the memory goes when the last of it is done.
    """

    stack: Stack
    head_VD: nn.Parameter | None
    """Only at the last stage, where it is trained; the embedding's own where a stage has both of a tied model."""
    parameters: dict[str, nn.Parameter]
    """By name, in layout order; in the type that they are computed with."""
    backward_lock: threading.Lock
    """Gradients pass through the parameters' `grad`: one backward at a time on one version."""


@dataclass(frozen=True)
class Beside:
    """What a microbatch's x comes with."""

    documents: Documents | None
    """That its samples are packed of; None: each is one."""
    ids_BL: torch.Tensor | None
    """Of its tokens, where x lies in a subspace."""

    def split(self, slices: int) -> "list[Beside]":
        """Of the samples in so many pieces."""
        ids = [None] * slices if self.ids_BL is None else self.ids_BL.tensor_split(slices)
        return [Beside(*pair) for pair in zip(split(self.documents, slices), ids, strict=True)]


@dataclass(eq=False)
class Saved:
    """What backward needs of one forward: its graph, or where that is computed again only x.

    It serves one backward, and another one if that came to nothing and the graph was forgotten.
    """

    weights: Weights
    x: torch.Tensor
    """Without its ids, where it lies in a subspace."""
    y_BLD: torch.Tensor | None
    """Output with its graph; None when forward is to be run again."""
    beside: Beside


@dataclass(frozen=True)
class SavedLoss:
    """What `loss_backward` needs of one loss: that of its forward, and gradients down to the stack's output."""

    forward: Saved
    grad_y_BLD: torch.Tensor
    grad_head_VD: torch.Tensor | None
    """None where the head is frozen."""
    is_finite: bool = True
    """Whether the loss is a number; else nothing can be learnt from the microbatch, and its gradient is zero."""


class StageModel:
    """A stage of a run's model. Same inputs and mode, same bits; calls change nothing in it.

    It holds no weights: `weights` makes versions of them. A model's with adapters is to be set `on` what of it never
    changes. Under bf16 the matrices of products are rounded to it once a version, and the rest is as autocast has it;
    TF32 is off.
    """

    mode: ComputeMode | None = None
    """None: a microbatch of any size at once, computed again in backward if the run's model says so."""

    def __init__(self, model: ModelSettings, stage: int, *, device: str = "cpu") -> None:
        """Raises SettingsError for a model that cannot be cut, a stage out of range, or a missing device."""
        validate_stage_layers(model)
        if not 0 <= stage < model.num_stages:
            raise SettingsError(f"stage = {stage}: the run has stages 0 to {model.num_stages - 1}")
        self.device = _checked_device(device)
        self.link = link_to(self.device)
        shape = validate_config(model.config_json)
        self.stage = stage
        self.is_first = stage == 0
        self.is_last = stage == model.num_stages - 1
        self.hidden_size = shape.hidden_size
        self.hop_width = hop_width(model)
        """Values of a token between stages."""
        self.vocab_size = shape.vocab_size
        self._stack = build_stack(model, stage, device=self.device)
        self._model = model
        self._names = {name: global_name(model, stage, name) for name, _ in trained_parameters(model, self._stack)}
        self._frozen_head: Frozen | None = None
        self._has_weights = not model.has_base
        family, self._tied = family_of(model.config_json), is_tied(model, stage)
        self._head_name = (family.embedding_name if self._tied else family.head_name) if self.is_last else None
        if model.has_base:
            self._head_name = None
        self._has_ids = model.sends_ids
        self._recompute = model.recompute
        self._bf16 = model.compute_dtype == "bf16"
        # A tied head is an embedding too, of which nothing is rounded.
        head_name = None if self._tied else self._head_name
        rounds = self._bf16 and not model.has_base  # autocast rounds adapters itself: they are small
        self._of_products = _parameters_of_products(self._stack, self._names, head_name) if rounds else set()
        self._chunk_tokens = max(1, min(MAX_CHUNK_TOKENS, MAX_CHUNK_LOGITS // self.vocab_size))
        self.layout: ParameterLayout = layout_of_stack(model, stage, self._stack)
        self._waiting = WeakSet[Saved]()
        """Of those that hold a graph, what `forward` gave."""

    def on(self, base: Base) -> "StageModel":
        """The same stage of a model with adapters, beside whose products they stand."""
        made, model = copy.copy(self), self._model
        family, names = family_of(model.config_json), {tensor.name for tensor in base_tensors(model, self.stage)}
        shown: Any = frozen_tree(
            self._stack, "", lambda local: base.tensor(global_name(model, self.stage, local)).on(self.device)
        )
        made._stack, made._waiting, made._has_weights = shown, WeakSet[Saved](), True
        if self.is_last:
            head = family.head_name if family.head_name in names else family.embedding_name
            made._frozen_head = base.tensor(head).on(self.device)
        return made

    def computing(self, mode: ComputeMode | None) -> "StageModel":
        """The same stage, computed in that mode."""
        made = copy.copy(self)
        made.mode, made._waiting = mode, WeakSet[Saved]()
        return made

    def compute_less(self, mode: ComputeMode) -> None:
        """(compute) In that mode from now on. What waits for its gradient forgets its graph: forward is run again."""
        self.mode = mode
        for saved in list(self._waiting):
            saved.y_BLD = None

    def weights(self, flat: NDArray[np.float32] | torch.Tensor) -> Weights:
        """A version of the weights from their flat vector in layout order: an array, or a tensor on the device.

        What is computed with in fp32 shares memory with a `flat` that is on the device, which must not change while
        the version lives; all else is a copy, of the type that it is computed with.
        """
        values = lent(flat) if isinstance(flat, np.ndarray) else flat
        if values.dtype != torch.float32 or not values.is_contiguous():
            raise ValueError(f"weights are one contiguous fp32 vector, got {flat.dtype}")
        if not self._has_weights:
            raise LocalError(
                f"stage {self.stage} of a model with adapters computes on its frozen base, which is not here"
            )
        parameters = {
            name: nn.Parameter(self._resident(name, view)) for name, view in self.layout.views(values).items()
        }
        stack: Any = _bound(self._stack, "", {local: parameters[name] for local, name in self._names.items()})
        if self._bf16 and self.device.type != "cpu":
            stack = _with_rounded_norms(stack)
        head_VD = parameters[self._head_name] if self._head_name is not None else None
        return Weights(stack, head_VD, parameters, threading.Lock())

    def _resident(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """A parameter where and as it is computed with."""
        dtype = torch.bfloat16 if name in self._of_products else torch.float32
        if values.device.type == self.device.type:
            return values.to(dtype)
        there = torch.empty(values.shape, dtype=dtype, device=self.device)
        self.link.put_into(there, values)
        return there

    def forward(
        self, weights: Weights, x: StageInput, *, keep: bool, bounds: Bounds = ()
    ) -> tuple[torch.Tensor, Saved | None]:
        """Hidden values y (B, L, D) fp32; after the final norm at the last stage. In a subspace before that: (B, L, K).

        x is token ids (B, L) int64 at the first stage, at the others y of the one before, with the ids where it lies in
        a subspace; documents begin at
        `bounds` in it. With `keep`, what `backward` needs comes along. Raises RemoteError("malformed") for an x of
        another shape, dtype or range.
        """
        values, beside = self._checked_input(x, bounds)
        if not keep or self._recomputes:
            y_BLD = self._run_without_graph(weights, values, beside)
            return y_BLD, Saved(weights, values, None, beside) if keep else None
        saved = self._run_with_graph(weights, values, beside)
        assert saved.y_BLD is not None
        self._waiting.add(saved)
        return saved.y_BLD.detach(), saved

    def backward(self, saved: Saved, grad_y_BLD: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor | None:
        """Add parameter gradients to `into` (flat fp32, layout order, on the device); return the gradient of x.

        They are added once all are there: where anything is raised, nothing was. `into` None: they are not wanted. The
        first stage returns None. Raises RemoteError("malformed") for a gradient of another shape or dtype.
        """
        shape = (*saved.x.shape[:2], self.hidden_size if self.is_last else self.hop_width)
        if grad_y_BLD.shape != shape or grad_y_BLD.dtype != torch.float32:
            raise RemoteError(
                "malformed", f"gradient is {grad_y_BLD.dtype} {tuple(grad_y_BLD.shape)}, the output float32 {shape}"
            )
        return self._backward_into(saved, self.link.put(grad_y_BLD), into, None)

    def loss(
        self, weights: Weights, x: StageInput, targets_BL: torch.Tensor, *, keep: bool, bounds: Bounds = ()
    ) -> tuple[float, int, SavedLoss | None]:
        """Sum of the tokens' cross-entropies in nats and how many tokens were counted; last stage only.

        targets are int64 (B, L), -100 where not counted, and -101 where another document begins with them as well.
        `bounds`, and RemoteError("malformed"), as `forward`.
        """
        assert self.is_last, f"stage {self.stage} has no head"
        num_counted = self._checked_targets(targets_BL, x)
        values, beside = self._checked_input(x, bounds)
        targets_N = self.link.put(targets_BL.clamp(min=IGNORED_TARGET)).reshape(-1)
        if not keep:
            y_BLD = self._run_without_graph(weights, values, beside)
            with torch.no_grad():
                losses = [
                    _cross_entropy(self._logits(y_CD, weights), targets_C)
                    for y_CD, targets_C in self._chunks(y_BLD, targets_N)
                ]
            return self._sum(losses), num_counted, None
        if self._slices(values) > 1:
            y_BLD, saved = self._run_without_graph(weights, values, beside), Saved(weights, values, None, beside)
        else:
            # `recompute` does not matter here: loss_backward follows at once, and would need the graph again.
            saved = self._run_with_graph(weights, values, beside)
            assert saved.y_BLD is not None
            y_BLD = saved.y_BLD
        losses, grad_y_BLD, grad_head_VD = self._loss_gradients(y_BLD, weights, targets_N)
        loss_sum = self._sum(losses)
        return loss_sum, num_counted, SavedLoss(saved, grad_y_BLD, grad_head_VD, math.isfinite(loss_sum))

    def _sum(self, losses: list[torch.Tensor]) -> float:
        return sum(map(float, self.link.fetch(torch.stack(losses))))

    def loss_backward(self, saved: SavedLoss, into: torch.Tensor | None) -> torch.Tensor | None:
        """Add the gradients of the loss sum to `into`, as `backward` does; return that of x, None in a one-stage model.

        Those of a loss that is not finite are zero: one such microbatch does not spoil the step's others.
        """
        assert self.is_last
        if not saved.is_finite:
            return None if self.is_first else torch.zeros_like(saved.forward.x)
        return self._backward_into(saved.forward, saved.grad_y_BLD, into, saved.grad_head_VD)

    def logits(self, weights: Weights, x: StageInput, *, bounds: Bounds = ()) -> torch.Tensor:
        """Full logits (B, L, V) of the last stage, for comparing with a whole model: not for training."""
        assert self.is_last, f"stage {self.stage} has no head"
        y_BLD = self._run_without_graph(weights, *self._checked_input(x, bounds))
        with torch.no_grad(), self._autocast():
            return weights.stack.logits(y_BLD, self._head(weights))

    @property
    def _recomputes(self) -> bool:
        return self._recompute if self.mode is None else self.mode.recompute

    def _slices(self, x: torch.Tensor) -> int:
        """In how many pieces a microbatch is computed."""
        return 1 if self.mode is None else math.ceil(len(x) / self.mode.samples_at_once)

    def _run_without_graph(self, weights: Weights, x: torch.Tensor, beside: Beside) -> torch.Tensor:
        slices = self._slices(x)
        with torch.no_grad():
            if slices == 1:
                return self._run(weights, x, beside)
            parts = zip(x.tensor_split(slices), beside.split(slices), strict=True)
            return torch.cat([self._run(weights, *part) for part in parts])

    def _run(self, weights: Weights, x: torch.Tensor, beside: Beside) -> torch.Tensor:
        given = x if beside.ids_BL is None else WithinSubspace(x, beside.ids_BL)
        with self._autocast():
            y_BLD: torch.Tensor = weights.stack(given, beside.documents)
            return y_BLD.float()

    def _run_with_graph(self, weights: Weights, x: torch.Tensor, beside: Beside) -> Saved:
        leaf = x if self.is_first else x.detach().requires_grad_()
        with torch.enable_grad():
            # Of a leaf autocast keeps one rounded copy, and sums in bf16 the gradients of all products that share it.
            return Saved(weights, leaf, self._run(weights, leaf.view_as(leaf), beside), beside)

    def _backward_into(
        self, saved: Saved, grad_y_BLD: torch.Tensor, into: torch.Tensor | None, grad_head_VD: torch.Tensor | None
    ) -> torch.Tensor | None:
        if into is None:
            return None if self.is_first else self._gradient_of_x(saved, grad_y_BLD, only_x=True)
        sums, parameters = self.layout.views(into), saved.weights.parameters
        with saved.weights.backward_lock:
            try:
                grad_x = self._gradient_of_x(saved, grad_y_BLD, only_x=False)
                # From here on nothing is allocated: memory cannot give out between two of them.
                if grad_head_VD is not None:
                    sums[self._head_name or ""].add_(grad_head_VD)
                for name, parameter in parameters.items():
                    if parameter.grad is not None:
                        sums[name].add_(parameter.grad)
                        parameter.grad = None
            finally:
                for parameter in parameters.values():
                    parameter.grad = None
        return grad_x

    def _gradient_of_x(self, saved: Saved, grad_y_BLD: torch.Tensor, *, only_x: bool) -> torch.Tensor | None:
        """None at the first stage. The parameters' gradients are added to their `grad`, unless only that of x is asked
        for."""
        if saved.y_BLD is None:  # forward is run again, and forgotten again, piece by piece
            slices = self._slices(saved.x)
            pieces = zip(
                saved.x.tensor_split(slices),
                saved.beside.split(slices),
                grad_y_BLD.tensor_split(slices),
                strict=True,
            )
            grads = [
                self._gradient_of_x(self._run_with_graph(saved.weights, x, beside), grad_BLD, only_x=only_x)
                for x, beside, grad_BLD in pieces
            ]
            found = [grad for grad in grads if grad is not None]
            return found[0] if len(found) == 1 else torch.cat(found) if found else None
        # Where a leaf has a gradient already, autograd adds to it in place; else the one that was made is its own.
        torch.autograd.backward((saved.y_BLD,), (grad_y_BLD,), inputs=(saved.x,) if only_x else None)
        return None if self.is_first else saved.x.grad

    def _loss_gradients(
        self, y_BLD: torch.Tensor, weights: Weights, targets_N: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor | None]:
        """Chunks' losses, and their sum's gradients for y and a trained head; each chunk's logits are freed before the
        next one's."""
        head_VD = weights.head_VD
        losses: list[torch.Tensor] = []
        grads_y_CD: list[torch.Tensor] = []
        grad_head_VD: torch.Tensor | None = None
        for y_CD, targets_C in self._chunks(y_BLD.detach(), targets_N):
            leaf_CD = y_CD.requires_grad_()
            with torch.enable_grad():
                logits_CV = self._logits(leaf_CD, weights)
            losses.append(_cross_entropy(logits_CV.detach(), targets_C))
            grad_logits_CV = _cross_entropy_gradient(logits_CV.detach(), targets_C)
            wanted = (leaf_CD,) if head_VD is None else (leaf_CD, head_VD)
            grad_y_CD, *grads = torch.autograd.grad(logits_CV, wanted, grad_logits_CV)
            grads_y_CD.append(grad_y_CD)
            for grad_chunk_VD in grads:
                grad_head_VD = grad_chunk_VD if grad_head_VD is None else grad_head_VD.float().add_(grad_chunk_VD)
        grad_ND = grads_y_CD[0] if len(grads_y_CD) == 1 else torch.cat(grads_y_CD)
        return losses, grad_ND.view_as(y_BLD), grad_head_VD

    def _chunks(self, y_BLD: torch.Tensor, targets_N: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        y_ND = y_BLD.reshape(-1, self.hidden_size)
        return list(zip(torch.split(y_ND, self._chunk_tokens), torch.split(targets_N, self._chunk_tokens), strict=True))

    def _logits(self, y_CD: torch.Tensor, weights: Weights) -> torch.Tensor:
        """fp32 (C, V)."""
        with self._autocast():
            return weights.stack.logits(y_CD, self._head(weights)).float()

    def _head(self, weights: Weights) -> torch.Tensor:
        """Trained, or made whole of the base for a product."""
        if weights.head_VD is not None:
            return weights.head_VD
        assert self._frozen_head is not None
        return self._frozen_head.dense(torch.bfloat16 if self._bf16 else torch.float32)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._bf16)

    def _checked_input(self, x: StageInput, bounds: Bounds) -> tuple[torch.Tensor, Beside]:
        """On the device."""
        values, ids_BL = (x.values_BLK, x.ids_BL) if isinstance(x, WithinSubspace) else (x, None)
        if self.is_first:
            self._check_ids(values)
            return self.link.put(values), Beside(Documents.within(bounds, values, self.link), None)
        width = self.hop_width
        if values.dtype != torch.float32 or values.ndim != 3 or values.shape[-1] != width or values.numel() == 0:
            raise RemoteError(
                "malformed", f"hidden values are float32 (B, L, {width}), got {values.dtype} {tuple(values.shape)}"
            )
        if self._has_ids != (ids_BL is not None):
            raise RemoteError("malformed", "hidden values of a subspace come with their token ids, and no others do")
        if ids_BL is not None:
            self._check_ids(ids_BL)
            if ids_BL.shape != values.shape[:2]:
                raise RemoteError("malformed", f"ids {tuple(ids_BL.shape)} of hidden values {tuple(values.shape)}")
            ids_BL = self.link.put(ids_BL)
        return self.link.put(values), Beside(Documents.within(bounds, values, self.link), ids_BL)

    def _check_ids(self, ids_BL: torch.Tensor) -> None:
        if ids_BL.dtype != torch.int64 or ids_BL.ndim != 2 or ids_BL.numel() == 0:
            raise RemoteError("malformed", f"token ids are int64 (B, L), got {ids_BL.dtype} {tuple(ids_BL.shape)}")
        least, most = int(ids_BL.min()), int(ids_BL.max())
        if least < 0 or most >= self.vocab_size:
            raise RemoteError("malformed", f"token ids lie in [0, {self.vocab_size}), got {least} to {most}")

    def _checked_targets(self, targets_BL: torch.Tensor, x: StageInput) -> int:
        """How many are counted. They are on the host yet."""
        # A target outside the vocabulary would stop a GPU for good, so it is refused here.
        if targets_BL.dtype != torch.int64 or targets_BL.shape != x.shape[:2]:
            raise RemoteError(
                "malformed", f"targets are int64 {tuple(x.shape[:2])}, got {targets_BL.dtype} {tuple(targets_BL.shape)}"
            )
        is_counted = (targets_BL >= 0) & (targets_BL < self.vocab_size)
        known = is_counted | (targets_BL == IGNORED_TARGET) | (targets_BL == DOCUMENT_BEGINS)
        if not bool(known.all()):
            raise RemoteError(
                "malformed", f"targets lie in [0, {self.vocab_size}) or are {IGNORED_TARGET} or {DOCUMENT_BEGINS}"
            )
        return int(is_counted.sum())


def _checked_device(device: str) -> torch.device:
    checked = torch.device(device)
    if checked.type == "cuda":
        if not torch.cuda.is_available():
            raise SettingsError(f"device = {device}: PyTorch finds no GPU here; use cpu or install its CUDA build")
        if (checked.index or 0) >= torch.cuda.device_count():
            raise SettingsError(f"device = {device}: PyTorch finds {torch.cuda.device_count()} GPUs, counted from 0")
        _compute_alike()
    return checked


def _compute_alike() -> None:
    """On GPUs, in this process: what is computed twice has the same bits, and every sum is fp32's."""
    # TF32 keeps 10 bits of a product, bf16 8 of a partial sum: replays on other machines would not agree.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    # Else attention's backward adds in the order in which its blocks are done, and a machine that tests itself
    # (`peer.audit.mending`) takes itself for broken.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)  # with `warn_only` attention is not
    deterministic: Any = torch.utils.deterministic
    deterministic.fill_uninitialized_memory = False


def _parameters_of_products(stack: nn.Module, names: dict[str, str], head_name: str | None) -> set[str]:
    """Names in the whole model of what autocast would round for each product."""
    from swarm.local.transformers_library import transformers

    found = {
        names[f"{path}.{name}"]
        for path, module in stack.named_modules()
        for name, value in module.named_parameters(recurse=False)
        # Of three dimensions are a layer's experts.
        if isinstance(module, nn.Linear | transformers.pytorch_utils.Conv1D) or value.ndim == 3
    }
    return found if head_name is None else found | {head_name}


class _RoundedNorm(nn.Module):
    """A layer's RMSNorm of fp32 values in one kernel, rounded to bf16 once for all the products that follow.

    Autocast rounds anew for each; transformers' own norm has six kernels.
    """

    def __init__(self, weight: nn.Parameter, epsilon: float) -> None:
        super().__init__()
        self.weight, self._epsilon = weight, epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self._epsilon).to(torch.bfloat16)


def _with_rounded_norms(stack: Any) -> Any:
    """The bound stack, with the norms before its layers' products in one kernel."""
    for layer in stack.layers:
        for name in stack.family.norms_before_products:
            norm = getattr(layer, name)
            setattr(layer, name, _RoundedNorm(norm.weight, norm.variance_epsilon))
    return stack


def _bound(module: nn.Module, prefix: str, parameters: dict[str, nn.Parameter]) -> nn.Module:
    """A tree like `module`'s that shares everything with it but the parameters."""
    bound: Any = copy.copy(module)
    bound._parameters = {
        # What is frozen is in the tree already.
        name: None if value is None else parameters.get(prefix + name, value)
        for name, value in module._parameters.items()
    }
    bound._modules = {
        name: None if child is None else _bound(child, f"{prefix}{name}.", parameters)
        for name, child in module._modules.items()
    }
    result: nn.Module = bound
    return result


def _cross_entropy(logits_CV: torch.Tensor, targets_C: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits_CV, targets_C, ignore_index=IGNORED_TARGET, reduction="sum")


def _cross_entropy_gradient(logits_CV: torch.Tensor, targets_C: torch.Tensor) -> torch.Tensor:
    """Of the sum of cross-entropies: softmax minus one-hot, where the target's own is minus the sum of the others.

    As a difference from 1 it is mere rounding once a batch is memorised, and honest machines differ by 1e-3.
    """
    gradient_CV = torch.softmax(logits_CV, dim=-1)
    counted_C = targets_C != IGNORED_TARGET
    at_C1 = targets_C.clamp(min=0).unsqueeze(-1)
    gradient_CV.scatter_(-1, at_C1, 0.0)
    gradient_CV.scatter_(-1, at_C1, -gradient_CV.sum(dim=-1, keepdim=True))
    return gradient_CV.mul_(counted_C.unsqueeze(-1))
