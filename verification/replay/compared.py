"""A replay compared with what was claimed, within the bounds of the run's dtype and codecs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from swarm.averaging.activations import activation_codec
from swarm.averaging.parts import CODEC_OF_MEANS
from swarm.core.errors import RemoteError
from swarm.core.ids import Step
from swarm.core.settings import RunSettings
from verification.audit.amplified import Amplified, amplified, moved_bounds_for
from verification.audit.tolerance import Comparison, Grade, bounds_for, compare
from verification.pipeline.hop_claim import HopClaim
from verification.replay.stage_replay import Floats, StageReplay
from verification.round.papers import Bytes, Exhibit

MAGNIFIED = 40.0
"""By what a gradient's error is, at most, taken to exceed that of the activation it was computed from."""


@dataclass(frozen=True)
class ComparedContribution:
    """A contribution beside its replay."""

    found: Comparison
    amplified: Amplified
    """With a sketch, if a seed was given and all values are finite."""


def compared_contribution(
    replay: StageReplay,
    exhibits: Sequence[Exhibit],
    claimed: Sequence[Bytes],
    replayed: Sequence[Bytes],
    *,
    second: Floats | None,
    seed: bytes | None = None,
) -> ComparedContribution:
    """Of a contribution, from its parts as they were sent and as they came out of a replay of the exhibits.

    A part that nobody shows is empty, and taken to be as it should. `second` are the second moments of the version that
    the round starts from, or more; `seed` as `amplified` has it. Raises RemoteError("malformed").
    """
    settings = replay.settings
    if len(claimed) != len(replayed):
        raise RemoteError("malformed", f"contribution of {len(claimed)} parts, not {len(replayed)}")
    claimed = [part if len(part) else other for part, other in zip(claimed, replayed, strict=True)]
    arithmetic, codec = settings.model.arithmetic, settings.codecs.averaging
    said, again = replay.decoded_contribution(claimed), replay.decoded_contribution(replayed)
    if settings.has_windows:  # it is the way of weights: nothing amplifies it, and all of it is replayed
        return ComparedContribution(_compared_window(replay, said, again), Amplified(0.0, 0.0, 0.0))
    found = compare(said, again, bounds_for(arithmetic, codec, "gradient"))
    moved = amplified(said, again, second, epsilon=settings.optimizer.epsilon, seed=seed)
    bounds = moved_bounds_for(arithmetic, codec)
    found = replace(found, moved=moved.measured, moved_fraud=bounds.fraud)
    wrong, untouched = replay.untouched_values(exhibits, said)
    if wrong:
        reason = f"{wrong} of {untouched} values that no token of the work touches are not zero"
        found = _worse(found, Grade.FRAUD, reason, wrong / untouched)
    if moved.measured > bounds.fraud:
        reason = f"moves weights by {moved.measured:.2e} of a learning rate a step: fraud past {bounds.fraud:.2e}"
        found = _worse(found, Grade.SUSPICIOUS if bounds.report_only else Grade.FRAUD, reason, moved.off)
    return ComparedContribution(found, moved)


def _compared_window(replay: StageReplay, said: Floats, again: Floats) -> Comparison:
    """The worst of what a window says: where it went, its first moments, and the roots of its second ones, for a step
    is divided by these; a mean below zero counts as one, as in the state."""
    arithmetic, size = replay.settings.model.arithmetic, replay.layout.num_values
    codec = replay.settings.codecs.averaging
    ranges = (
        ("way", slice(0, size), codec),
        ("first moments", slice(size, 2 * size), codec),
        ("second moments", slice(2 * size, None), CODEC_OF_MEANS),
    )
    found = []
    for name, where, sent_in in ranges:
        one, other = said[where], again[where]
        if name == "second moments":
            one, other = (np.sqrt(np.maximum(values, np.float32(0.0))) for values in (one, other))
        compared = compare(one, other, bounds_for(arithmetic, sent_in, "gradient"))
        found.append(replace(compared, reason=f"{name}: {compared.reason}"))
    return worst(found)


def _worse(found: Comparison, grade: Grade, reason: str, extent: float) -> Comparison:
    """With one more thing that is wrong: the graver counts, and the larger extent."""
    if found.grade is Grade.FRAUD or grade is Grade.SUSPICIOUS:
        grade = found.grade if found.grade is not Grade.HONEST else grade
    return replace(found, grade=grade, reason=f"{found.reason}; {reason}", extent=max(found.extent, extent))


def compared_hop(
    replay: StageReplay, exhibit: Exhibit, step: Step, into: torch.Tensor | None
) -> dict[Literal["activation", "gradient"], Comparison]:
    """Of what the exhibit's peer sent on and sent back, where it sent any; `into` as `StageReplay.microbatch` has it,
    which also says what is raised."""
    arithmetic, codecs = replay.settings.model.arithmetic, replay.settings.codecs
    replayed = replay.microbatch(exhibit, step, into)
    claimed_y, claimed_grad_x = replay.claimed_y(exhibit), replay.claimed_grad_x(exhibit)
    found: dict[Literal["activation", "gradient"], Comparison] = {}
    if claimed_y is not None and replayed.y is not None:
        found["activation"] = compare(claimed_y, replayed.y, bounds_for(arithmetic, codecs.activations, "activation"))
    if claimed_grad_x is not None and replayed.grad_x is not None:
        bounds = bounds_for(arithmetic, codecs.activation_gradients, "gradient")
        found["gradient"] = compare(claimed_grad_x, replayed.grad_x, bounds)
    return found


def compared_claim(replay: StageReplay, claim: HopClaim) -> Comparison:
    """The claim has passed `check`; raises as `StageReplay.microbatch`."""
    settings = replay.settings
    is_forward = claim.header.direction == "forward"
    codec = settings.codecs.activations if is_forward else settings.codecs.activation_gradients
    bounds = bounds_for(settings.model.arithmetic, codec, "activation" if is_forward else "gradient")
    claimed, replayed = replay.hop(claim)
    return compare(claimed, replayed, bounds)


def compared_activations(settings: RunSettings, one: Bytes, other: Bytes, shape: tuple[int, int, int]) -> Comparison:
    """Of two activations that one peer sent of one microbatch: the smaller of their errors, each seen from the other.

    Raises RemoteError("malformed").
    """
    codec = activation_codec(settings.codecs.activations)
    bounds = bounds_for(settings.model.arithmetic, codec.name, "activation")
    first, second = (np.asarray(codec.decode(body, shape).numpy()) for body in (one, other))
    return min(compare(first, second, bounds), compare(second, first, bounds), key=lambda found: found.measured)


def stands_for(settings: RunSettings, one: Bytes, other: Bytes, shape: tuple[int, int, int]) -> bool:
    """Whether a gradient at one activation may be signed for as that at the other, from which it will be replayed.

    They must be the same to within what is accepted without a closer look, and so near that no gradient can come out as
    fraud; up to the cap where no gradient is fraud. Raises RemoteError("malformed").
    """
    gradient = bounds_for(settings.model.arithmetic, settings.codecs.activation_gradients, "gradient")
    found = compared_activations(settings, one, other, shape)
    return found.measured <= (found.cap if gradient.report_only else min(found.accept, gradient.fraud / MAGNIFIED))


def worst(found: Sequence[Comparison]) -> Comparison:
    """The one farthest towards fraud."""
    return max(found, key=lambda one: one.share)
