"""A stage's gradients, added up over a step: a sum of token losses' gradients and the count of tokens."""

import numpy as np
import torch
from numpy.typing import NDArray

from kernels import optimizers
from swarm.core.errors import LocalError


class GradientSum:
    """A flat fp32 tensor on the stage's device, into which backward passes add, and the tokens they stand for."""

    def __init__(self, num_values: int, device: torch.device | str = "cpu") -> None:
        self.num_values = num_values
        self.flat = torch.zeros(num_values, dtype=torch.float32, device=device)
        """The sum, parameters in name order; its views are the parameters' gradients."""
        self.num_tokens = 0

    def add_tokens(self, num_tokens: int) -> None:
        """Count the target tokens of a microbatch whose gradient has been added."""
        self.num_tokens += num_tokens

    def zero(self) -> None:
        """Start the next step."""
        self.flat.zero_()
        self.num_tokens = 0

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
        if self.num_tokens < 1:
            raise LocalError("no microbatch has been added to this step's gradient: there is no mean to take")
        return self.flat[where].detach().cpu().numpy(), np.float32(self.num_tokens)

    def mean_of(self, where: slice, out: NDArray[np.float32]) -> None:
        """Those values of `take_mean`, into `out` on the host. Raises LocalError for no tokens."""
        optimizers.divide(*self.quotient_of(where), out)
