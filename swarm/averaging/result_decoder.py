"""A round's gradient, decoded as its reduced parts come in, so that little is left to do at the end."""

import logging
import threading
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kernels.norms import norm_of_sums
from kernels.threads import ONE_THREAD, Threads
from swarm.averaging.encoded import Encoded, VectorCodec
from swarm.core.errors import RemoteError
from swarm.core.round.contribution import ReducedPart

log = logging.getLogger(__name__)


class ResultDecoder:
    """The gradient of a round as its reduced parts come in, each decoded as soon as it is here.

    Methods are for the exact thread, `take` for its threads too. What is decoded counts only once the result that names
    it is certified.
    """

    def __init__(
        self,
        codec: VectorCodec,
        parts: Sequence[slice],
        buffer: NDArray[np.float32],
        *,
        threads: Threads = ONE_THREAD,
    ) -> None:
        self._codec = codec
        self._threads = threads
        self._taking = [threading.Lock() for _ in parts]
        """Of each part: who signs two encodings of one must not have them decoded over each other."""
        self._parts = parts
        self._gradient = buffer
        self._decoded: dict[int, tuple[bytes, float | RemoteError]] = {}
        """Of each part that is in the gradient: digest, and sum of squares or what is wrong with it."""

    def take(self, part: int, part_digest: bytes, body: Encoded) -> float | RemoteError:
        """Put a part, whose bytes have this digest, into the gradient; a later one takes the place of an earlier.

        Its sum of squares, or what is wrong with it: then it is zeros.
        """
        with self._taking[part]:
            held = self._decoded.get(part)
            if held is None or held[0] != part_digest:
                values = self._gradient[self._parts[part]]
                try:
                    held = part_digest, self._codec.decode_and_square(body, values)
                except RemoteError as error:
                    values[:] = 0.0
                    held = part_digest, error
                self._decoded[part] = held
            return held[1]

    def gradient(
        self, reduced: Sequence[ReducedPart], bodies: Sequence[Encoded]
    ) -> tuple[NDArray[np.float32], float] | None:
        """The certified gradient and its norm; None if there are no parts.

        The vector is the buffer: it is overwritten in the next round. A part without bytes, which nobody's
        contribution reached, is zeros, and so is one that is malformed though it was certified: each part is taken by
        itself, so that a few of them prove what became of their values.
        """
        if all(part.is_empty for part in reduced):
            return None

        def put(part: ReducedPart, body: Encoded) -> None:
            if part.is_empty:
                self._decoded.pop(part.part, None)
                self._gradient[self._parts[part.part]] = 0.0
                return
            found = self.take(part.part, part.digest, body)
            if isinstance(found, RemoteError):
                log.warning("part %d of a certified result counts as zeros: %s", part.part, found)

        self._threads.map(lambda one: put(*one), list(zip(reduced, bodies, strict=True)))
        return self._gradient, certified_norm(reduced)


def certified_norm(reduced: Iterable[ReducedPart]) -> float:
    """Of a result's gradient, by what is certified of its parts."""
    return norm_of_sums(part.squares for part in reduced)


def squares_of(codec: VectorCodec, body: Encoded, num_values: int) -> float:
    """Sum of squares of the values that a reduced part stands for. Raises RemoteError if it is malformed."""
    values = np.empty(num_values, dtype=np.float32)
    return codec.decode_and_square(body, values)
