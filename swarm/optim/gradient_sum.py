"""A stage's gradients, added up over a step: a sum of token losses' gradients and the count of tokens."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kernels import optimizers
from swarm.core.errors import LocalError
from swarm.memory.kept_buffers import KeptBuffers, empty_floats
from swarm.model.link import Link

TO_THE_HOST = Link(torch.device("cpu"))


class GradientSum:
    """A flat fp32 tensor on the stage's device, into which backward passes add, and the tokens they stand for."""

    def __init__(self, num_values: int, link: Link = TO_THE_HOST, memory: KeptBuffers | None = None) -> None:
        """`memory`: where a sum on the host lies."""
        self.num_values = num_values
        self.flat = (
            torch.zeros(num_values, dtype=torch.float32, device=link.device)
            if memory is None or link.device.type != "cpu"
            else torch.from_numpy(empty_floats(num_values, memory)).zero_()
        )
        """The sum, parameters in name order; its views are the parameters' gradients."""
        self.num_tokens = 0
        self._link = link
        self._complete: Any = None

    def close(self) -> None:
        """Nothing is added any more: who fetches the sum waits for what this thread has had computed, and no longer."""
        self._complete = self._link.mark()

    def let_go(self) -> None:
        """Nobody fetches the sum any more: its memory is another's."""
        self.flat = self.flat.new_empty(0)

    def add_tokens(self, num_tokens: int) -> None:
        """Count the target tokens of a microbatch whose gradient has been added."""
        self.num_tokens += num_tokens

    def zero(self) -> None:
        """Start the next step."""
        self.flat.zero_()
        self.num_tokens = 0
        self._complete = None

    def take_mean(self) -> NDArray[np.float32]:
        """sum / tokens on the host, one exact fp32 division a value; the sum stays. Raises LocalError for no tokens."""
        values, num_tokens = self.quotient_of(slice(None))
        mean = np.empty(self.num_values, dtype=np.float32)
        optimizers.divide(values, num_tokens, mean)
        return mean

    def quotient_of(self, where: slice) -> tuple[NDArray[np.float32], np.float32]:
        """Those values of the sum, on the host, and the tokens: divided, they are those of `take_mean`.

        Raises LocalError for no tokens.
        """
        divisor = self.divisor()
        assert self.flat.numel() == self.num_values, "the sum is fetched after it was let go of"
        values = self._link.fetch(self.flat[where], after=self._complete)
        return values.numpy(), divisor

    def divisor(self) -> np.float32:
        """The tokens, by which the sum is divided for its mean. Raises LocalError for none."""
        if self.num_tokens < 1:
            raise LocalError("no microbatch has been added to this step's gradient: there is no mean to take")
        return np.float32(self.num_tokens)

    def mean_of(self, where: slice, out: NDArray[np.float32]) -> None:
        """Those values of `take_mean`, into `out` on the host. Raises LocalError for no tokens."""
        optimizers.divide(*self.quotient_of(where), out)
