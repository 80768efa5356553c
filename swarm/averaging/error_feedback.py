"""Error feedback: what a peer's contributions left unsaid is kept, and said with the next one.

    owed = mean + residual;  sent = decode(encode(owed));  residual = owed - sent

so that over the steps the sum of what was sent follows the sum of the means, however coarse the codec (Seide et al.,
"1-Bit Stochastic Gradient Descent", 2014; Karimireddy et al., "Error Feedback Fixes SignSGD", 2019).

The residual is this peer's alone. It begins at 0 and depends on nothing but its own means and seeds, never on what
became of a round, so whoever recomputes a peer's means recomputes its residuals too. Hence what was sent to a round
that did not count it - the peer was left out, or one part - is lost, as it is under every other codec; what was not
sent is owed still. Put back, it would come a step late and twice as long, which robust aggregation cuts.

A step without work sends nothing and leaves the residual as it is. The residual is a mean, not a sum: it is said with
the weight of the step in which it is said.
"""

import hashlib
import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kernels import norms
from kernels.codecs import formats
from kernels.threads import ONE_THREAD, Threads
from swarm.averaging.encoded import VectorCodec
from swarm.memory.kept_buffers import empty_floats

Floats = NDArray[np.float32]

MOST_OF_SENT = 2.0
"""The residual's norm is at most this many times that of what was sent: what is owed grows stale, and must not come to
outweigh what is new. int4 and topk stay below it by themselves: what the largest three in eight leave is at most
sqrt(5 / 3) times as long as they."""
_BELOW_ONE = 1.0 - 2.0**-21
"""So that a vector scaled down to a bound is within it, however its values are rounded."""


class Residual:
    """What one peer still owes its stage, in the stage's flat order."""

    def __init__(self, num_values: int) -> None:
        self.values: Floats = np.zeros(num_values, dtype=np.float32)

    def encode(
        self,
        mean: Callable[[slice], Floats],
        codec: VectorCodec,
        *,
        parts: Sequence[slice],
        seeds: Sequence[bytes],
        threads: Threads = ONE_THREAD,
        keep: Callable[[memoryview], memoryview] = memoryview,
    ) -> list[memoryview]:
        """The parts of mean + residual, encoded, each where it is to `keep`; the residual becomes what they lack.

        `parts` cover the vector once. `mean` is asked for each of them twice, in any thread, and says the same: so
        that it need not be in memory whole. Raises LocalError as `codec.encode` does; the residual is then what it was.
        Where memory gives out it may be nothing.
        """

        def owed_of(part: slice) -> Floats:
            owed = empty_floats(part.stop - part.start)
            np.add(mean(part), self.values[part], out=owed)
            formats.flush_in_place(owed.view(np.int32))
            return owed

        def said(place: int) -> memoryview:
            return keep(codec.encode(owed_of(parts[place]), seed=seeds[place]))

        def left(place: int) -> tuple[float, float]:
            part = parts[place]
            whole, rest = owed_of(part), self.values[part]
            codec.decode(encoded[place], rest)
            sent = norms.sum_of_squares(rest)
            np.subtract(whole, rest, out=rest)
            owed = norms.sum_of_squares(rest)
            formats.flush_in_place(rest.view(np.int32))
            return sent, owed

        assert len(parts) == len(seeds), f"{len(parts)} parts, {len(seeds)} seeds"
        encoded = threads.map(said, range(len(parts)))
        try:
            squares = threads.map(left, range(len(parts)))
        except BaseException:  # memory gave out: some of it is what was sent, and must never be said again
            self.values.fill(0.0)
            raise
        sent_squares = owed_squares = 0.0
        for sent, owed in squares:  # in the order of the parts, whoever was at them when; `sum` would compensate
            sent_squares += sent
            owed_squares += owed
        self._bound(MOST_OF_SENT * math.sqrt(sent_squares), math.sqrt(owed_squares))
        return encoded

    def digest(self) -> bytes:
        """SHA-256 of a domain tag and the values: 32 bytes for the header of the contribution that left this."""
        found = hashlib.sha256(b"homeswarm/residual\0")
        found.update(self.values.data)
        return found.digest()

    def _bound(self, limit: float, norm: float) -> None:
        """Scale the residual down to `limit` by one fp32 factor, and write magnitudes below 2^-126 as zero."""
        if norm > limit:
            np.multiply(self.values, np.float32(limit / norm * _BELOW_ONE), out=self.values)
            formats.flush_in_place(self.values.view(np.int32))
