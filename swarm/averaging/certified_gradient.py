"""A round's gradient from the bytes of its reduced parts, which it is decoded from part by part: never whole."""

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kernels.norms import norm_of_sums
from swarm.averaging.encoded import Encoded, VectorCodec
from swarm.averaging.encoded_mean import check_encoded
from swarm.averaging.parts import Parts
from swarm.core.errors import RemoteError
from swarm.core.round.contribution import ReducedPart
from swarm.memory.kept_buffers import empty_floats

log = logging.getLogger(__name__)


class CertifiedGradient:
    """What the parts of a certified result stand for.

    A part without bytes, which nobody's contribution reached, is zeros, and so is one that is malformed though it was
    certified: each part is taken by itself, so that a few of them prove what became of their values.
    """

    def __init__(self, parts: Parts, reduced: Sequence[ReducedPart], bodies: Sequence[Encoded]) -> None:
        self.pieces: Sequence[slice] = parts.gradient
        """Where each part of the gradient lies in it."""
        self.norm = certified_norm(parts, reduced)
        """By what is certified of the parts."""
        self._parts = parts
        self._reduced = reduced
        self._bodies = bodies

    @classmethod
    def of(cls, parts: Parts, reduced: Sequence[ReducedPart], bodies: Sequence[Encoded]) -> "CertifiedGradient | None":
        """None if there are no parts: the round had no work."""
        return None if all(part.is_empty for part in reduced) else cls(parts, reduced, bodies)

    def values(self, piece: int) -> NDArray[np.float32]:
        """(any thread) Those of a part, decoded anew each time."""
        reduced, where = self._reduced[piece], self.pieces[piece]
        values = empty_floats(where.stop - where.start)
        if reduced.is_empty:
            values.fill(0.0)
            return values
        try:
            self._parts.result_codec(piece).decode(self._bodies[piece], values)
        except RemoteError as error:
            log.warning("part %d of a certified result counts as zeros: %s", reduced.part, error)
            values.fill(0.0)
        return values

    def moments(self) -> list[Encoded | None]:
        """What the result says of moments, part by part and encoded; None for what is empty or malformed."""
        return [
            said_of_moments(self._parts, part, self._reduced[part], self._bodies[part]) for part in self._parts.moments
        ]


def said_of_moments(parts: Parts, part: int, reduced: ReducedPart, body: Encoded) -> Encoded | None:
    """What a result's part says of moments; None where it says nothing: it is empty, or malformed though certified."""
    if reduced.is_empty:
        return None
    try:
        check_encoded(parts.result_codec(part), body, num_values=parts.size(part))
    except RemoteError as error:
        log.warning("part %d of a certified result leaves moments as they were: %s", part, error)
        return None
    return body


def certified_norm(parts: Parts, reduced: Sequence[ReducedPart]) -> float:
    """Of a result's gradient, by what is certified of its parts."""
    return norm_of_sums(part.squares for part in reduced[: len(parts.gradient)])


def squares_of(codec: VectorCodec, body: Encoded, num_values: int) -> float:
    """Sum of squares of the values that a reduced part stands for. Raises RemoteError if it is malformed."""
    return codec.sum_of_squares(body, num_values)
