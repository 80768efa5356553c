"""Tokens and targets of a microbatch id.

Shapes: B samples of L tokens. Targets are the tokens one place on.
"""

import numpy as np
import numpy.typing as npt

from swarm.core.ids import MicrobatchId
from swarm.core.pipeline.data_order import DataOrder
from swarm.core.settings import RunSettings
from swarm.data.token_file import Tokens

Batch = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""tokens_BL and targets_BL."""


class BatchReader:
    """Microbatches of a run's training tokens: the same on every machine for the same id."""

    def __init__(self, settings: RunSettings, train: Tokens) -> None:
        """Raises ValueError if the file has not the number of tokens the settings name."""
        if len(train) != settings.data.num_train_tokens:
            raise ValueError(f"the file holds {len(train)} tokens, the run says {settings.data.num_train_tokens}")
        self.order = DataOrder.of_run(settings)
        self._train = train

    def batch(self, microbatch_id: MicrobatchId) -> Batch:
        """Tokens and targets of one microbatch, both int64 of shape (microbatch_size, sequence_length)."""
        samples = [self._train.read(*run) for run in self.order.runs(microbatch_id)]
        return _tokens_and_targets(np.stack(samples))


def held_out_batch(settings: RunSettings, held_out: Tokens, index: int) -> Batch:
    """Windows of the held-out file in file order, without overlap, `microbatch_size` to a batch; the last may have
    fewer."""
    length, size = settings.data.sequence_length, settings.batch.microbatch_size
    windows = range(index * size, min((index + 1) * size, (len(held_out) - 1) // length))
    samples = [held_out.read(window * length, (window + 1) * length + 1) for window in windows]
    return _tokens_and_targets(np.stack(samples))


def held_out_batches(settings: RunSettings, held_out: Tokens, *, limit_tokens: int) -> list[Batch]:
    """The first of them, of at most `limit_tokens` target tokens, but always one window."""
    length, size = settings.data.sequence_length, settings.batch.microbatch_size
    num_windows = min((len(held_out) - 1) // length, max(1, limit_tokens // length))
    found = [held_out_batch(settings, held_out, index) for index in range(-(-num_windows // size))]
    tokens_BL, targets_BL = found[-1]
    last = num_windows - (len(found) - 1) * size
    return [*found[:-1], (tokens_BL[:last], targets_BL[:last])]


def _tokens_and_targets(samples: npt.NDArray[np.int64]) -> Batch:
    return np.ascontiguousarray(samples[:, :-1]), np.ascontiguousarray(samples[:, 1:])
