"""AdamW of a vector that lies on a stage's device, to the bits of the host's kernels.

Each of PyTorch's operators here rounds once, as the kernels' own operations do; what they do to a value is in
`kernels.optimizers` and `kernels.norms`. The device is one of `swarm.model.link`.
"""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from kernels import norms
from kernels.bits import SMALLEST
from kernels.norms import RUN_VALUES
from swarm.core.settings import PART_VALUES
from swarm.model.link import Link, lent
from swarm.optim.exact import BegunStep, ExactOptimizer, StepTaken
from swarm.optim.gradient_sum import GradientSum

Floats = NDArray[np.float32]

PIECE_VALUES = 1 << 22
"""At a time, so that what is between two operators takes little memory; whole runs of norms."""
assert PIECE_VALUES % RUN_VALUES == 0 == PART_VALUES % RUN_VALUES


class AdamWThere:
    """The moments of an optimizer while they are on the device, and the weights that it steps."""

    def __init__(self, optimizer: ExactOptimizer, link: Link) -> None:
        """`optimizer` is AdamW with moments in fp32; its scalars move on with each step, its moments at `end`."""
        assert optimizer.moments.keys() == {"first", "second"}, "AdamW with moments in fp32"
        self._optimizer = optimizer
        self._link = link
        self._first, self._second, *self._weights = (self._empty(optimizer.num_values) for _ in range(4))
        self._steps_taken = 0

    @property
    def weights(self) -> torch.Tensor:
        """They hold until the step after the next."""
        return self._weights[self._steps_taken % 2]

    def begin(self, weights: Floats) -> None:
        """From these weights and the optimizer's moments."""
        self._steps_taken = 0
        for there, here in self._pairs(weights):
            self._link.put_into(there, lent(here))

    def step(self, gradient: GradientSum, *, step: int, clip_norm: float) -> StepTaken:
        """Of the mean of that sum, which is lost. Raises LocalError, with nothing else changed, if it is not finite."""
        mean = gradient.flat
        mean.div_(self._scalar(gradient.divisor()))
        for piece in _pieces(0, mean.numel()):
            _flush(mean[piece])
        begun = self._optimizer.begin(step, self._norm(mean), clip_norm=clip_norm)
        self._take(begun, mean, self._weights[(self._steps_taken + 1) % 2])
        self._steps_taken += 1
        return begun.report

    def end(self, weights: Floats) -> None:
        """Weights and moments are the host's again."""
        for there, here in self._pairs(weights):
            for piece in _pieces(0, here.size):
                here[piece] = self._link.fetch(there[piece]).numpy()

    def _norm(self, values: torch.Tensor) -> float:
        """`norms.norm_of_parts`."""
        sums = []
        for piece in _pieces(0, values.numel()):
            squares = values[piece].double().square_()
            if missing := -squares.numel() % RUN_VALUES:
                squares = torch.nn.functional.pad(squares, (0, missing))
            squares = squares.view(-1, RUN_VALUES)
            while squares.shape[1] > 1:
                low, high = squares.chunk(2, dim=1)
                squares = low + high
            sums.append(squares.view(-1))
        return norms.norm_of_runs(self._link.fetch(torch.cat(sums)).numpy(), part_values=PART_VALUES)

    def _take(self, begun: BegunStep, gradient: torch.Tensor, out: torch.Tensor) -> None:
        clip, beta1, rest1, beta2, rest2, unbias, epsilon, moment_share, gradient_share = map(float, begun.scalars)
        factors = zip(self._optimizer.segments, map(float, begun.keep), map(float, begun.times), strict=True)
        for segment, keep, times in factors:
            for piece in _pieces(segment.start, segment.stop):
                slope = gradient[piece].mul_(clip)
                mean = self._first[piece].mul_(beta1).add_(slope * rest1)
                square = self._second[piece].mul_(beta2).add_((slope * slope).mul_(rest2))
                _flush(mean)
                _flush(square)
                divisor = square.double().sqrt_().float().mul_(unbias).add_(epsilon)  # in fp32 it may be off by a unit
                update = (mean * moment_share).add_(slope.mul_(gradient_share)).div_(divisor)
                new = out[piece]
                torch.mul(self.weights[piece], keep, out=new)
                _flush(new.sub_(update.mul_(times)))

    def _pairs(self, weights: Floats) -> list[tuple[torch.Tensor, Floats]]:
        """What lies there, and where it lies on the host."""
        moments = self._optimizer.moments
        return [(self.weights, weights), (self._first, moments["first"]), (self._second, moments["second"])]

    def _empty(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.float32, device=self._link.device)

    def _scalar(self, number: np.float32) -> torch.Tensor:
        """On the device: by a number of the host's CUDA multiplies its inverse instead."""
        return torch.full((), float(number), dtype=torch.float32, device=self._link.device)


def _flush(values: torch.Tensor) -> None:
    values.masked_fill_(values.abs() < float(SMALLEST), 0.0)


def _pieces(start: int, stop: int) -> Iterator[slice]:
    for at in range(start, stop, PIECE_VALUES):
        yield slice(at, min(at + PIECE_VALUES, stop))
