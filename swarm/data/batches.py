"""Tokens and targets of a microbatch id.

Shapes: B samples of L tokens. Targets are the tokens one place on.
"""

import numpy as np
import numpy.typing as npt

from swarm.core.ids import MicrobatchId
from swarm.core.pipeline.data_order import DataOrder
from swarm.core.settings import RunSettings
from swarm.data.token_file import TokenFile

Batch = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""tokens_BL and targets_BL."""


class BatchReader:
    """Microbatches of a run's training tokens: the same on every machine for the same id."""

    def __init__(self, settings: RunSettings, train: TokenFile) -> None:
        """Raises ValueError if the file has not the number of tokens the settings name."""
        if len(train) != settings.data.num_train_tokens:
            raise ValueError(f"{train.path} holds {len(train)} tokens, the run says {settings.data.num_train_tokens}")
        self.order = DataOrder.of_run(settings)
        self._train = train

    def batch(self, microbatch_id: MicrobatchId) -> Batch:
        """Tokens and targets of one microbatch, both int64 of shape (microbatch_size, sequence_length)."""
        length = self.order.sequence_length
        samples = [self._train.read(start, start + length + 1) for start in self.order.sample_starts(microbatch_id)]
        return _tokens_and_targets(np.stack(samples))


def held_out_batches(settings: RunSettings, held_out: TokenFile, *, limit_tokens: int) -> list[Batch]:
    """Windows of the held-out file in file order, without overlap, `microbatch_size` to a batch.

    At most `limit_tokens` target tokens, but always one window; the last batch may have fewer samples.
    """
    length = settings.data.sequence_length
    num_windows = min((len(held_out) - 1) // length, max(1, limit_tokens // length))
    windows = [held_out.read(start, start + length + 1) for start in range(0, num_windows * length, length)]
    size = settings.batch.microbatch_size
    return [_tokens_and_targets(np.stack(windows[at : at + size])) for at in range(0, num_windows, size)]


def _tokens_and_targets(samples: npt.NDArray[np.int64]) -> Batch:
    return np.ascontiguousarray(samples[:, :-1]), np.ascontiguousarray(samples[:, 1:])
