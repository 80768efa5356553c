"""Peers that are broken rather than hostile, reduce wrongly, or keep silent when audited."""

import numpy as np
import torch

from peer.adversary import strengths
from peer.adversary.hooks import Adversary, At, Floats
from swarm.attacks import Attack
from swarm.averaging.encoded import VectorCodec
from swarm.bulk_digest import bulk_digest
from swarm.checkpoint.state import chunk_hash
from swarm.core.ids import Step, Version
from swarm.model.stage import StageModel, Weights


class BitFlips(Adversary):
    """Broken memory, a fault and no attack: now and then one bit of a weight or of a gradient is another."""

    @property
    def stands_by_its_work(self) -> bool:
        return False

    def weights(self, at: At, model: StageModel, version: Version, weights: Weights) -> Weights:
        if self._what_flips(at) != "weight":
            return weights
        values = [parameter.detach().cpu().numpy().ravel() for parameter in weights.parameters.values()]
        flat = np.concatenate(values)  # a copy: the version's own weights stay as they are
        index, mask = self._where(at, flat.size)
        flat.view(np.uint32)[index] ^= np.uint32(mask)
        return model.weights(flat)

    def added(self, at: At, gradient_sum: torch.Tensor, *, num_tokens: int) -> None:
        if self._what_flips(at) == "gradient":
            index, mask = self._where(at, gradient_sum.numel())
            flipped = gradient_sum[index : index + 1].cpu().numpy().copy()
            flipped.view(np.uint32)[:] ^= np.uint32(mask)
            gradient_sum[index] = float(flipped[0])

    def _what_flips(self, at: At) -> str:
        chance = self.chance("flips", *at)
        if not self.acts(at) or chance.random() >= strengths.BIT_FLIP_SHARE:
            return "nothing"
        return str(chance.choice(["weight", "gradient"]))

    def _where(self, at: At, num_values: int) -> tuple[int, int]:
        chance = self.chance("bit", *at)
        return int(chance.integers(num_values)), 1 << int(chance.choice(strengths.FLIPPED_BITS))


class _OneStep(Adversary):
    """A fault of one step alone, after which all is well."""

    @property
    def stands_by_its_work(self) -> bool:
        return False

    def _has_begun(self, step: Step) -> bool:
        return self.attack is not None and int(step) == self.attack.from_step


class NanWeights(_OneStep):
    """Nothing that is computed is finite, at the last stage no loss is."""

    def weights(self, at: At, model: StageModel, version: Version, weights: Weights) -> Weights:
        return model.weights(np.full(model.layout.num_values, np.nan, dtype=np.float32)) if self.acts(at) else weights


class NanGradient(_OneStep):
    """What an overflow leaves in the sum."""

    def added(self, at: At, gradient_sum: torch.Tensor, *, num_tokens: int) -> None:
        if self.acts(at):
            gradient_sum[0] = float("nan")


class LongGradient(_OneStep):
    """A finite mean, far too long."""

    def mean(self, step: Step, where: slice, mean: Floats) -> Floats:
        return mean * np.float32(strengths.LONG_FACTOR) if self.acts_in(step) else mean


class WrongReducer(Adversary):
    """The parts this peer reduces are not what their contributions give."""

    def reduced(
        self, step: Step, encoded: tuple[memoryview, bytes], codec: VectorCodec, *, num_values: int, seed: bytes
    ) -> tuple[memoryview, bytes]:
        if not self.acts_in(step):
            return encoded
        values = np.empty(num_values, dtype=np.float32)
        codec.decode(encoded[0], values)
        wrong = codec.encode(values * np.float32(strengths.REDUCED_FACTOR), seed=seed)
        return wrong, bulk_digest(wrong)


class FalseAccuser(Adversary):
    """Honest work; whoever it audits and finds honest is accused all the same."""

    def accuses_falsely(self, step: Step) -> bool:
        return self._has_begun(step)


class LyingJuror(Adversary):
    """Honest work; as a juror it votes the other way round."""

    def finds(self, guilty: bool) -> bool:
        return not guilty


class LazyAuditor(Adversary):
    """Honest work; what it draws, judges or examines it finds honest, and replays none of it."""

    def is_lazy(self, step: Step) -> bool:
        return self._has_begun(step)


class Charges(Adversary):
    """Honest work; every step it charges somebody with what there is no evidence of, and as a juror it convicts."""

    def charges_in(self, step: Step) -> bool:
        return self._has_begun(step)

    def finds(self, guilty: bool) -> bool:
        return True

    def is_lazy(self, step: Step) -> bool:
        return self._has_begun(step)


class WrongState(Adversary):
    """Another chunk than it has is stated of each snapshot."""

    def stated(self, step: Step, hashes: tuple[bytes, ...]) -> tuple[bytes, ...]:
        if not self.acts_in(step):
            return hashes
        return (*hashes[:-1], chunk_hash(hashes[-1]))


class Withholding(Adversary):
    """Honest work, of which nothing is shown once the attack has begun."""

    def __init__(self, attack: Attack, *, seed: str) -> None:
        super().__init__(attack, seed=seed)
        self._has_reached = False

    def adding(self, at: At, gradient_sum: torch.Tensor) -> None:
        self._has_reached = self._has_reached or self._has_begun(at.step)

    @property
    def withholds(self) -> bool:
        return self._has_reached
