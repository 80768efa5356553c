"""What a newcomer must come to in its exam: what its examiner sent on and sent back, or, where a stage sends nothing,
drawn pieces of the microbatch's gradient.

A run of one stage has no tensors on wires. There the examiner computes the same pieces itself, and no more of the
gradient crosses the line than tells a replay from anything else.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from swarm.core.errors import RemoteError
from swarm.core.ids import Step
from swarm.core.settings import RunSettings
from swarm.optim.gradient_sum import GradientSum
from verification.audit.tolerance import Comparison, Kind, bounds_in_force, compare
from verification.replay.compared import compared_bodies
from verification.replay.stage_replay import Replayed, StageReplay
from verification.round.papers import Bytes, Exhibit

Pieces: TypeAlias = Sequence[slice]
"""Of the gradient, as `verification.audit.probation.exam_pieces` has drawn them."""


def encoded_hop(found: Replayed) -> tuple[Bytes, Bytes]:
    """y and the gradient of x as they are sent; empty where the stage has none."""
    return (found.y.body if found.y else b"", found.grad_x.body if found.grad_x else b"")


def sends_nothing(replay: StageReplay) -> bool:
    """Whether the stage is the only one."""
    return replay.model.is_first and replay.model.is_last


def exam_answer(replay: StageReplay, exhibit: Exhibit, step: Step, pieces: Pieces) -> tuple[Bytes, Bytes]:
    """y and the gradient of x, encoded; or the pieces as little-endian fp32, and nothing. Raises as
    `StageReplay.microbatch`."""
    if not sends_nothing(replay):
        return encoded_hop(replay.microbatch(exhibit, step, None))
    gradient = GradientSum(replay.layout.num_values, replay.model.link)
    replay.microbatch(exhibit, step, gradient.flat)
    gradient.add_tokens(exhibit.papers.birth.num_targets)
    gradient.close()
    values = np.empty(sum(where.stop - where.start for where in pieces), dtype="<f4")
    at = 0
    for where in pieces:
        size = where.stop - where.start
        gradient.mean_of(where, values[at : at + size])
        at += size
    return values.tobytes(), b""


def compared_answers(
    settings: RunSettings, shape: tuple[int, int, int], mine: Sequence[Bytes], theirs: Sequence[Bytes]
) -> list[Comparison]:
    """The newcomer's beside the examiner's, of tensors of this shape if they were sent, of pieces otherwise.

    Raises RemoteError("malformed").
    """
    if settings.model.num_stages == 1:
        if len(theirs[0]) != len(mine[0]) or len(theirs[1]):
            raise RemoteError("malformed", f"pieces of {len(theirs[0])} bytes, not {len(mine[0])}")
        own, said = (np.frombuffer(bodies[0], dtype="<f4") for bodies in (mine, theirs))
        if not np.isfinite(said).all():
            raise RemoteError("malformed", "pieces of a gradient that are not finite")
        return [compare(said, own, bounds_in_force(settings, "fp32", "gradient"))]
    kinds: tuple[Kind, Kind] = ("activation", "gradient")
    return [
        compared_bodies(settings, said, own, kind, shape)
        for own, said, kind in zip(mine, theirs, kinds, strict=True)
        if len(own)
    ]
