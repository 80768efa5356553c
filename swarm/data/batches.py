"""Tokens and targets of a microbatch id.

Shapes: B samples of L tokens. Targets are the tokens one place on; -100 stands for one that is not to be learnt, -101
where another document begins with it, and so attention and positions anew (`swarm.core.pipeline.targets`).
"""

import numpy as np

from swarm.core.ids import MicrobatchId
from swarm.core.pipeline.data_order import DataOrder, Run
from swarm.core.settings import RunSettings
from swarm.data.documents.marks import Batch, Marks
from swarm.data.token_file import Tokens

__all__ = ["Batch", "BatchReader", "held_out_batch", "held_out_batches", "held_out_run"]


class BatchReader:
    """Microbatches of a run's training tokens: the same on every machine for the same id."""

    def __init__(self, settings: RunSettings, train: Tokens) -> None:
        """Raises ValueError if the file has not the number of tokens the settings name."""
        if len(train) != settings.data.num_train_tokens:
            raise ValueError(f"the file holds {len(train)} tokens, the run says {settings.data.num_train_tokens}")
        self.order = DataOrder.of_run(settings)
        self._marks = Marks.of(settings.data)
        self._train = train

    def batch(self, microbatch_id: MicrobatchId) -> Batch:
        """Tokens and targets of one microbatch, both int64 of shape (microbatch_size, sequence_length)."""
        return self._marks.batch(np.stack([self._train.read(*run) for run in self.order.runs(microbatch_id)]))


def held_out_run(settings: RunSettings, index: int) -> Run | None:
    """The held-out tokens that a held-out microbatch reads; None if there are not so many."""
    data, size = settings.data, settings.batch.microbatch_size
    first, stop = index * size, min((index + 1) * size, data.num_held_out_samples)
    if not 0 <= first < stop:
        return None
    return first * data.sequence_length, (stop - 1) * data.sequence_length + data.sample_tokens


def held_out_batch(settings: RunSettings, held_out: Tokens, index: int) -> Batch:
    """Windows of the held-out file in file order, without overlap, `microbatch_size` to a batch; the last may have
    fewer. Raises IndexError if there are not so many."""
    run, data = held_out_run(settings, index), settings.data
    if run is None:
        raise IndexError(f"held-out microbatch {index} of {data.num_held_out_tokens} tokens")
    starts = range(run[0], run[1] - data.sample_tokens + 1, data.sequence_length)
    return Marks.of(data).batch(np.stack([held_out.read(start, start + data.sample_tokens) for start in starts]))


def held_out_batches(settings: RunSettings, held_out: Tokens, *, limit_tokens: int) -> list[Batch]:
    """The first of them, of at most `limit_tokens` tokens, but always one window."""
    length, size = settings.data.sequence_length, settings.batch.microbatch_size
    num_windows = min(settings.data.num_held_out_samples, max(1, limit_tokens // length))
    found = [held_out_batch(settings, held_out, index) for index in range(-(-num_windows // size))]
    tokens_BL, targets_BL = found[-1]
    last = num_windows - (len(found) - 1) * size
    return [*found[:-1], (tokens_BL[:last], targets_BL[:last])]
