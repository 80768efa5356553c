"""This is where a round's gradient is decoded as its reduced parts come in, so that little is left to do at the end."""

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kernels.norms import norm_of_sums, sum_of_squares
from swarm.averaging.encoded import Encoded, VectorCodec
from swarm.core.contribution import ReducedPart
from swarm.core.errors import RemoteError

log = logging.getLogger(__name__)


class ResultDecoder:
    """The gradient of a round as its reduced parts come in, each decoded as soon as it is here.

    Methods are for the exact thread. What is decoded counts only once the result that names it is certified.
    """

    def __init__(self, codec: VectorCodec, parts: Sequence[slice], buffer: NDArray[np.float32]) -> None:
        self._codec = codec
        self._parts = parts
        self._gradient = buffer
        self._decoded: dict[int, tuple[bytes, float | RemoteError]] = {}
        """Of each part that is in the gradient: digest, and sum of squares or what is wrong with it."""

    def take(self, part: int, part_digest: bytes, body: Encoded) -> None:
        """Put a part, whose bytes have this digest, into the gradient; a later one takes the place of an earlier."""
        if part not in self._decoded or self._decoded[part][0] != part_digest:
            values = self._gradient[self._parts[part]]
            try:
                self._codec.decode(body, values)
                self._decoded[part] = (part_digest, sum_of_squares(values))
            except RemoteError as error:
                self._decoded[part] = (part_digest, error)

    def gradient(
        self, reduced: Sequence[ReducedPart], bodies: Sequence[Encoded]
    ) -> tuple[NDArray[np.float32], float] | None:
        """The certified gradient and its norm; None if there are no parts, or if one that was certified is malformed.

        The vector is the buffer: it is overwritten in the next round. A part without bytes, which nobody's
        contribution reached, is zeros.
        """
        if all(part.is_empty for part in reduced):
            return None
        sums = []
        for part, body in zip(reduced, bodies, strict=True):
            if part.is_empty:
                self._decoded.pop(part.part, None)
                self._gradient[self._parts[part.part]] = 0.0
                sums.append(0.0)
                continue
            self.take(part.part, part.digest, body)
            found = self._decoded[part.part][1]
            if isinstance(found, RemoteError):  # the same bytes everywhere: every replica skips the step alike
                log.warning("a result is not applied: %s", found)
                return None
            sums.append(found)
        return self._gradient, norm_of_sums(sums)
