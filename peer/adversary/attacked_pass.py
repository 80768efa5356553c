"""The passes of a peer that misbehaves: an attack changes what goes in, what is added, and what comes out."""

from dataclasses import replace

import torch

from peer.adversary.hooks import Adversary, At
from peer.pipeline.stage_pass import Activation, Born, Ids, StagePass
from peer.state.replica import StageReplica
from swarm.core.ids import MicrobatchId, PeerId, Step, Version
from swarm.core.settings import RunSettings
from swarm.identity.key import Identity
from swarm.model.stage import Saved, SavedLoss, Weights
from swarm.model.subspace import StageInput
from verification.pipeline.headers import BirthRecord, HopHeader, Kind


class AttackedPass(StagePass):
    """As `StagePass`, with an adversary's hooks between its steps. Evaluations pass no hook."""

    def __init__(
        self, adversary: Adversary, settings: RunSettings, run_id: str, identity: Identity, replica: StageReplica
    ) -> None:
        super().__init__(settings, run_id, identity, replica)
        self._adversary = adversary

    def born(
        self,
        kind: Kind,
        microbatch_id: MicrobatchId,
        *,
        attempt: int,
        step: Step,
        era: int,
        tokens_BL: Ids,
        targets_BL: Ids,
    ) -> Born:
        if kind == "train" and not self.replica.model.is_last:  # else it lies where it computes the loss
            targets_BL = self._targets(At(step, microbatch_id), torch.from_numpy(targets_BL)).numpy()
        return super().born(
            kind, microbatch_id, attempt=attempt, step=step, era=era, tokens_BL=tokens_BL, targets_BL=targets_BL
        )

    def weights_for(self, birth: BirthRecord) -> tuple[Version, Weights]:
        version, weights = super().weights_for(birth)
        return version, self._adversary.weights(_at(birth), self.replica.model, version, weights)

    def forward_header(self, activation: Activation, consumer: PeerId) -> HopHeader:
        birth = activation.birth
        if birth.kind == "train":
            parents = self._adversary.parents(birth, activation.parents, self.identity)
            activation = replace(activation, parents=parents)
        return super().forward_header(activation, consumer)

    def output(self, birth: BirthRecord, x: StageInput) -> tuple[Version, torch.Tensor, Saved]:
        version, y_BLD, saved = super().output(birth, x)
        return version, self._adversary.activation(_at(birth), saved.weights, x, y_BLD), saved

    def outcome(self, birth: BirthRecord, x: StageInput, targets_BL: torch.Tensor) -> tuple[Version, float, SavedLoss]:
        return super().outcome(birth, x, self._targets(_at(birth), targets_BL))

    def gradient(self, birth: BirthRecord, saved: Saved, grad_y_BLD: torch.Tensor) -> torch.Tensor | None:
        adversary, at, into = self._adversary, _at(birth), self.sum_for(birth)
        if into is not None:
            adversary.adding(at, into)
        grad_x = super().gradient(birth, saved, adversary.output_gradient(at, grad_y_BLD))
        if into is not None:
            adversary.added(at, into, num_tokens=birth.num_targets)
        return None if grad_x is None else adversary.activation_gradient(at, grad_x, grad_y_BLD)

    def loss_gradient(self, birth: BirthRecord, saved: SavedLoss) -> torch.Tensor | None:
        adversary, at, into, grad_y_BLD = self._adversary, _at(birth), self.sum_for(birth), saved.grad_y_BLD
        if into is not None:
            adversary.adding(at, into)
        changed = replace(saved, grad_y_BLD=adversary.output_gradient(at, grad_y_BLD))
        grad_x = super().loss_gradient(birth, changed)
        if into is not None:
            adversary.added(at, into, num_tokens=birth.num_targets)
        return None if grad_x is None else adversary.activation_gradient(at, grad_x, grad_y_BLD)

    def counts(self, birth: BirthRecord) -> bool:
        return super().counts(birth) and self._adversary.lists(_at(birth))

    def _targets(self, at: At, targets_BL: torch.Tensor) -> torch.Tensor:
        return self._adversary.targets(at, targets_BL, vocab_size=self.replica.model.vocab_size)


def _at(birth: BirthRecord) -> At:
    return At(birth.step, birth.microbatch_id)
