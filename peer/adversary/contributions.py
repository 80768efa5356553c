"""Contributions to the averaging round that are other than their work gives.

The literature lets liars know the honest gradients. One peer knows its own: its mean stands for the honest mean, and
the deviation among members follows from that among its own last microbatches.
"""

import hashlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from peer.adversary import strengths
from peer.adversary.hooks import Adversary, At, Floats
from swarm.attacks import Attack
from swarm.core.ids import MicrobatchId, Step
from swarm.core.round.contribution import MAX_ATTEMPTS, Work


class SignFlip(Adversary):
    """The mean gradient times a negative number."""

    def mean(self, step: Step, where: slice, mean: Floats) -> Floats:
        if not self.acts_in(step):
            return mean
        assert self.attack is not None
        return mean * np.float32(-strengths.FLIP_FACTORS[self.attack.plain_kind])


class InnerProduct(Adversary):
    """Inner-product manipulation: a small step back."""

    def mean(self, step: Step, where: slice, mean: Floats) -> Floats:
        return mean * np.float32(-strengths.INNER_PRODUCT_SHARE) if self.acts_in(step) else mean


class Zeros(Adversary):
    """Nothing, as if it were the mean of the claimed work."""

    def mean(self, step: Step, where: slice, mean: Floats) -> Floats:
        return np.zeros_like(mean) if self.acts_in(step) else mean


class CopiedGradient(Adversary):
    """The previous contribution once more; from then on always the same one."""

    def __init__(self, attack: Attack, *, seed: str) -> None:
        super().__init__(attack, seed=seed)
        self._previous: dict[tuple[int, int], Floats] = {}

    def mean(self, step: Step, where: slice, mean: Floats) -> Floats:
        key = (where.start, where.stop)
        if self.acts_in(step) and key in self._previous:
            return self._previous[key]
        self._previous[key] = mean.copy()
        return mean


class LittleIsEnough(Adversary):
    """ALIE: so near the mean that it looks like a member's, and on the wrong side of it."""

    def __init__(self, attack: Attack, *, seed: str) -> None:
        super().__init__(attack, seed=seed)
        self._before: torch.Tensor | None = None
        self._average: torch.Tensor | None = None
        self._deviation: torch.Tensor | None = None
        """Running moments of microbatch gradients: average, and average square of what differs from it."""
        self._in_step: dict[Step, int] = {}

    def adding(self, at: At, gradient_sum: torch.Tensor) -> None:
        self._before = gradient_sum.clone()

    def added(self, at: At, gradient_sum: torch.Tensor, *, num_tokens: int) -> None:
        assert self._before is not None
        gradient = (gradient_sum - self._before) / max(1, num_tokens)
        if self._average is None or self._deviation is None:
            self._average, self._deviation = gradient, torch.zeros_like(gradient)
        else:
            # New objects: the exact thread may be reading the old ones.
            share = 1 / strengths.ALIE_MICROBATCHES
            off = gradient - self._average
            self._average = self._average + share * off
            self._deviation = (1 - share) * (self._deviation + share * off.square())
        self._in_step[at.step] = self._in_step.get(at.step, 0) + 1
        for old in [step for step in self._in_step if int(step) < int(at.step) - 2]:
            del self._in_step[old]

    def mean(self, step: Step, where: slice, mean: Floats) -> Floats:
        if not self.acts_in(step) or self._deviation is None:
            return mean
        # The mean of n microbatches deviates by 1 / sqrt(n) of what one does.
        found = (self._deviation[where] / self._in_step.get(step, 1)).sqrt().cpu().numpy()
        return np.asarray(mean - np.float32(strengths.ALIE_DEVIATIONS) * found, dtype=np.float32)


class NegatedMoments(Adversary):
    """Of a window only the first moments are false: all others are to begin the next one backwards."""

    def moments(self, step: Step, said: Floats, *, is_second: bool) -> Floats:
        return said if is_second or not self.acts_in(step) else -said


class SmallMoments(Adversary):
    """Of a window only the second moments are false: all others' next steps are to be ten times as long."""

    def moments(self, step: Step, said: Floats, *, is_second: bool) -> Floats:
        return said * np.float32(strengths.SMALL_MOMENTS_SHARE) if is_second and self.acts_in(step) else said


class LazyWindow(Adversary):
    """Of a window a share of microbatches is claimed and never computed: each adds the gradient before it once more,
    which moves the window about as far as the work would."""

    def __init__(self, attack: Attack, *, seed: str) -> None:
        super().__init__(attack, seed=seed)
        self._share = strengths.LAZY_SHARES[attack.plain_kind]
        self._before: torch.Tensor | None = None
        self._last: torch.Tensor | None = None
        """The gradient sum of the last microbatch that was computed."""

    def adding(self, at: At, gradient_sum: torch.Tensor) -> None:
        self._before = gradient_sum.clone()

    def added(self, at: At, gradient_sum: torch.Tensor, *, num_tokens: int) -> None:
        assert self._before is not None
        is_left_out = self.acts(at) and self.chance("left out", *at).random() < self._share
        if is_left_out and self._last is not None:
            gradient_sum.copy_(self._before + self._last)
        else:
            self._last = gradient_sum - self._before
        self._before = None


class BentStretch(Adversary):
    """A stretch of what a window has gone, as long as a layer or a row, is bent by as much as it is long."""

    def mean(self, step: Step, where: slice, mean: Floats) -> Floats:
        assert self.attack is not None
        if not self.acts_in(step) or where.start:
            return mean
        size = min(mean.size, strengths.BENT_VALUES[self.attack.plain_kind])
        first = int(self.chance("stretch").integers(mean.size - size + 1))
        signs = np.float32(1) - 2 * self.chance("bent").integers(2, size=size, dtype=np.int8)
        bent = mean.copy()
        bent[first : first + size] += np.float32(strengths.BENT_SHARE * _root_mean_square(mean)) * signs
        return bent


class RowBias(Adversary):
    """A little of one sign in each value that no token of the work touches: AdamW, which divides by the root of what
    was there before, makes a whole step of it."""

    def mean(self, step: Step, where: slice, mean: Floats) -> Floats:
        if not self.acts_in(step):
            return mean
        size = np.float32(strengths.ROW_BIAS_SHARE * _root_mean_square(mean))
        return np.where(mean == 0, size, mean)


class SlowBias(Adversary):
    """A little in each value that the work touches, of a sign that never changes: one audit takes it for rounding."""

    def mean(self, step: Step, where: slice, mean: Floats) -> Floats:
        if not self.acts_in(step):
            return mean
        signs = np.float32(1) - 2 * self.chance("signs", where.start).integers(2, size=mean.size, dtype=np.int8)
        size = np.float32(strengths.SLOW_BIAS_SHARE * _root_mean_square(mean[mean != 0]))
        return np.where(mean == 0, mean, mean + size * signs)


def _root_mean_square(values: Floats) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64)))) if values.size else 0.0


class PartialWork(Adversary):
    """Microbatches are claimed whose gradients were never added."""

    def __init__(self, attack: Attack, *, seed: str) -> None:
        super().__init__(attack, seed=seed)
        self._before: torch.Tensor | None = None

    def adding(self, at: At, gradient_sum: torch.Tensor) -> None:
        is_left_out = self.acts(at) and self.chance("left out", *at).random() < strengths.PARTIAL_WORK_SHARE
        self._before = gradient_sum.clone() if is_left_out else None

    def added(self, at: At, gradient_sum: torch.Tensor, *, num_tokens: int) -> None:
        if self._before is not None:
            gradient_sum.copy_(self._before)
            self._before = None


class ClaimedIds(Adversary):
    """Everybody's microbatches are listed as its own, at the highest attempt: under digests of nothing, so that nothing
    that is shown can contradict them."""

    def listed(self, step: Step, work: tuple[Work, ...], *, most: int) -> tuple[tuple[Work, MicrobatchId | None], ...]:
        own = super().listed(step, work, most=most)
        if not self.acts_in(step) or not work:
            return own
        return tuple(sorted([*own, *self._invented(work, most - len(work))], key=lambda said: said[0].microbatch_id))

    def _invented(self, work: tuple[Work, ...], most: int) -> list[tuple[Work, MicrobatchId | None]]:
        done = {int(item.microbatch_id) for item in work}
        # Ids are given out in order: those of the others are near its own.
        near = sorted((number for number in range(max(0, min(done) - most), max(done) + most)), key=_far_from(done))
        others = [number for number in near if number not in done][:most]
        return [self._said(work[number % len(work)], MicrobatchId(number)) for number in others]

    def _said(self, like: Work, number: MicrobatchId) -> tuple[Work, MicrobatchId | None]:
        nothing = hashlib.sha256(f"{self._seed}/{number}".encode()).digest()
        output = nothing if any(like.output_header) else like.output_header
        claimed = replace(
            like, microbatch_id=number, attempt=MAX_ATTEMPTS - 1, input_header=nothing, output_header=output
        )
        return claimed, None


class CopiedPapers(ClaimedIds):
    """The same, under the digests of papers that it has, of other microbatches; it shows those."""

    def _said(self, like: Work, number: MicrobatchId) -> tuple[Work, MicrobatchId | None]:
        return replace(like, microbatch_id=number), like.microbatch_id


def _far_from(done: set[int]) -> Callable[[int], int]:
    return lambda number: min(abs(number - other) for other in (min(done), max(done)))
