"""What a run's token files say of each token besides its id: whether it is to be learnt, and whether a document begins.

Both stand in the lowest bits of a token, so that they come with the tokens, in the same pieces, under the same digest,
and whoever has one has the other. Shapes: B samples of L tokens, T = L, or L + 1 where a sample's last target is the
next one's first token.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swarm.core.pipeline.targets import DOCUMENT_BEGINS, IGNORED_TARGET
from swarm.core.settings import DataSettings

Ids = npt.NDArray[np.integer]
Values = npt.NDArray[np.integer]
"""As they stand in a file."""
Batch = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""tokens_BL and targets_BL."""


@dataclass(frozen=True)
class Marks:
    """Which of them a run's files have. The lowest bit is that of beginnings, where there are both."""

    documents: bool
    answers: bool

    @classmethod
    def of(cls, data: DataSettings) -> "Marks":
        """A run's."""
        return cls(data.documents == "masked", data.loss_on == "answers")

    @property
    def bits(self) -> int:
        """Of each token."""
        return self.documents + self.answers

    def values(self, ids: Ids, learnt: npt.NDArray[np.bool_] | None = None) -> Values:
        """Of a document's tokens; `learnt` None: all are to be."""
        if not self.bits:
            return ids
        values = ids.astype(np.int64)
        if self.answers:
            values = values << 1 | (1 if learnt is None else learnt)
        if self.documents:
            values <<= 1
            values[:1] |= 1
        return values

    def padding(self, count: int, token: int) -> Values:
        """So many tokens that are nobody's: each begins a document, and so is no target."""
        return np.full(count, token << self.bits | self.documents, np.int64)

    def learnt(self, values: Values) -> npt.NDArray[np.bool_]:
        """Which tokens are targets, wherever their document lies: not its first."""
        found = np.ones(values.shape, dtype=bool) if not self.answers else (values >> self.documents & 1).astype(bool)
        return found & (values & 1 == 0) if self.documents else found

    def batch(self, values_BT: Values) -> Batch:
        """Tokens and targets of samples as they were read."""
        ids_BT = values_BT >> self.bits
        targets_BT = np.where(self.learnt(values_BT), ids_BT, IGNORED_TARGET) if self.answers else ids_BT
        if not self.documents:
            return np.ascontiguousarray(ids_BT[:, :-1]), np.ascontiguousarray(targets_BT[:, 1:])
        targets_BT = np.where(values_BT & 1, DOCUMENT_BEGINS, targets_BT)
        nothing_B1 = np.full((len(values_BT), 1), IGNORED_TARGET, np.int64)
        return ids_BT, np.concatenate([targets_BT[:, 1:], nothing_B1], axis=1)
