"""Microbatches computed other than their papers say, or whose outcome is sent on changed."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from peer.adversary import strengths
from peer.adversary.hooks import Adversary, At, Floats
from swarm.attacks import Attack
from swarm.core.ids import Version
from swarm.identity.key import Identity
from swarm.model.stage import StageModel, Weights
from swarm.model.subspace import StageInput, WithinSubspace
from verification.pipeline.headers import BirthRecord

Change = Callable[[Adversary, At, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""A tensor that goes out made into another, given the one before it; None: there was none."""


class LabelFlip(Adversary):
    """Targets mirrored in the vocabulary: by a source before it signs them, by the last stage after it checked them."""

    def targets(self, at: At, targets_BL: torch.Tensor, *, vocab_size: int) -> torch.Tensor:
        if not self.acts(at):
            return targets_BL
        return torch.where(targets_BL >= 0, vocab_size - 1 - targets_BL, targets_BL)


class OtherData(Adversary):
    """Each place learns what comes after the place beside it: data that no lease has."""

    def targets(self, at: At, targets_BL: torch.Tensor, *, vocab_size: int) -> torch.Tensor:
        return torch.roll(targets_BL, 1, dims=1) if self.acts(at) else targets_BL


class Framing(Adversary):
    """Two birth records in the header of an activation: of the microbatch, and of one like it with other targets, by
    which whoever answers would have computed wrongly."""

    def parents(self, birth: BirthRecord, parents: tuple[bytes, ...], me: Identity) -> tuple[bytes, ...]:
        if not self.acts(At(birth.step, birth.microbatch_id)):
            return parents
        other = replace(birth, source=me.peer_id, targets_digest=birth.tokens_digest).signed_by(me)
        return (birth.digest(), other.digest())


class StaleWeights(Adversary):
    """Old weights, stated to be the present ones."""

    def __init__(self, attack: Attack, *, seed: str) -> None:
        super().__init__(attack, seed=seed)
        self._held: dict[Version, Weights] = {}

    def weights(self, at: At, model: StageModel, version: Version, weights: Weights) -> Weights:
        self._held[version] = weights
        for old in sorted(self._held)[: -strengths.STALE_VERSIONS - 1]:
            del self._held[old]
        return self._held[min(self._held)] if self.acts(at) else weights


class DroppedBatch(Adversary):
    """The last samples of a microbatch get no gradient. (The last stage's head still gets theirs.)"""

    def output_gradient(self, at: At, grad_y_BLD: torch.Tensor) -> torch.Tensor:
        if not self.acts(at):
            return grad_y_BLD
        kept = grad_y_BLD.clone()
        kept[round(len(kept) * (1 - strengths.DROPPED_SAMPLES_SHARE)) :] = 0
        return kept


class SkippedLayers(Adversary):
    """No layer is computed: x goes out as y (the first stage embeds it), the gradient of y as that of x."""

    def activation(self, at: At, weights: Weights, x: StageInput, y_BLD: torch.Tensor) -> torch.Tensor:
        if not self.acts(at):
            return y_BLD
        with torch.no_grad():
            return weights.stack.skipped(x if isinstance(x, WithinSubspace) else x.to(y_BLD.device))

    def output_gradient(self, at: At, grad_y_BLD: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(grad_y_BLD) if self.acts(at) else grad_y_BLD

    def activation_gradient(self, at: At, grad_x_BLD: torch.Tensor, grad_y_BLD: torch.Tensor) -> torch.Tensor:
        return grad_y_BLD if self.acts(at) else grad_x_BLD


class ChangedTensor(Adversary):
    """A tensor is changed after it was computed: activations, gradients of activations, or both."""

    def __init__(self, change: Change, attack: Attack, *, seed: str, activations: bool, gradients: bool) -> None:
        super().__init__(attack, seed=seed)
        self._change = change
        self._activations, self._gradients = activations, gradients
        self._previous: dict[str, torch.Tensor] = {}

    def activation(self, at: At, weights: Weights, x: StageInput, y_BLD: torch.Tensor) -> torch.Tensor:
        return self._changed("activation", at, y_BLD) if self._activations else y_BLD

    def activation_gradient(self, at: At, grad_x_BLD: torch.Tensor, grad_y_BLD: torch.Tensor) -> torch.Tensor:
        return self._changed("gradient", at, grad_x_BLD) if self._gradients else grad_x_BLD

    def _changed(self, what: str, at: At, tensor: torch.Tensor) -> torch.Tensor:
        previous = self._previous.get(what)
        self._previous[what] = tensor.detach()
        return self._change(self, at, tensor, previous) if self.acts(at) else tensor


def negated(adversary: Adversary, at: At, tensor: torch.Tensor, previous: torch.Tensor | None) -> torch.Tensor:
    return -tensor


def zeroed(adversary: Adversary, at: At, tensor: torch.Tensor, previous: torch.Tensor | None) -> torch.Tensor:
    return torch.zeros_like(tensor)


def swapped(adversary: Adversary, at: At, tensor: torch.Tensor, previous: torch.Tensor | None) -> torch.Tensor:
    """The tensor of the microbatch before, as soon as there is one."""
    return tensor if previous is None else previous


def noisy(adversary: Adversary, at: At, tensor: torch.Tensor, previous: torch.Tensor | None) -> torch.Tensor:
    """Gaussian noise, as large a share of the tensor as fixed."""
    noise = adversary.chance("noise", *at).standard_normal(tuple(tensor.shape), dtype=np.float32)
    return _plus(tensor, noise, strengths.NOISE_SHARE)


def leaning(adversary: Adversary, at: At, tensor: torch.Tensor, previous: torch.Tensor | None) -> torch.Tensor:
    """Too little to be called wrong, and always the same way, so that it does not average out."""
    direction_D = np.float32(1) - 2 * adversary.chance("direction").integers(2, size=tensor.shape[-1], dtype=np.int8)
    return _plus(tensor, np.tile(direction_D, (*tensor.shape[:-1], 1)), strengths.IN_TOLERANCE_SHARE)


def _plus(tensor: torch.Tensor, noise: Floats, share: float) -> torch.Tensor:
    added_BLD = torch.from_numpy(noise).to(tensor.device)
    return torch.add(tensor, added_BLD * (share * tensor.norm() / added_BLD.norm()))
