"""A replay compared with what was claimed, within the bounds of the run's dtype and codecs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from swarm.averaging.activations import ActivationCodec, activation_codec
from swarm.averaging.parts import CODEC_OF_MEANS
from swarm.core.errors import RemoteError
from swarm.core.ids import Step
from swarm.core.settings import AveragingCodecName, RunSettings
from verification.audit.amplified import Amplified, MovedBounds, amplified, moved_bounds_in_force
from verification.audit.tolerance import (
    Bounds,
    Comparison,
    Grade,
    Kind,
    bounds_in_force,
    compare,
    fraud_bound,
    relative_error,
)
from verification.pipeline.hop_claim import HopClaim
from verification.replay.own_error import Errors, own_errors
from verification.replay.stage_replay import Floats, Sent, StageReplay
from verification.round.papers import Bytes, Exhibit

MOVED_CONVICTING = 2.5
"""As `CONVICTING`, of what an error moves."""
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
    caution: float = 1.0,
) -> ComparedContribution:
    """Of a contribution, from its parts as they were sent and as they came out of a replay of the exhibits, which is
    made again, rounded otherwise, where that is not enough.

    A part that nobody shows is empty, and taken to be as it should. `second` are the second moments of the version that
    the round starts from, or more; `seed` as `amplified` has it, `caution` as `compare`. Raises
    RemoteError("malformed"), and as `StageReplay.encoded_contribution`.

    What is compared is decoded for as long as that takes: while a replay is made, its memory is there for that.
    """
    if len(claimed) != len(replayed):
        raise RemoteError("malformed", f"contribution of {len(claimed)} parts, not {len(replayed)}")
    claimed = [part if len(part) else other for part, other in zip(claimed, replayed, strict=True)]
    step, read = exhibits[0].papers.birth.step, replay.decoded_contribution

    def otherwise() -> Floats:
        return read(replay.encoded_contribution(exhibits, step))

    if replay.settings.has_windows:  # it is the way of weights: nothing amplifies it, and all of it is replayed
        found = past_doubt(
            lambda own: compared_window(replay, read(claimed), read(replayed), own, caution),
            lambda: errors_of_window(replay, otherwise(), read(replayed)),
        )
        return ComparedContribution(found, Amplified(0.0, 0.0, 0.0))
    epsilon = replay.settings.optimizer.epsilon
    moved = amplified(read(claimed), read(replayed), second, epsilon=epsilon, seed=seed)

    def own() -> Errors:
        other, again = otherwise(), read(replayed)
        return relative_error(other, again), amplified(other, again, second, epsilon=epsilon).measured

    bounds = contribution_bounds(replay.settings)
    found = past_doubt(
        lambda errors: compared_gradient(read(claimed), read(replayed), moved, bounds, own=errors, caution=caution),
        own,
    )
    wrong, untouched = replay.untouched_values(exhibits, read(claimed))
    if wrong:
        reason = f"{wrong} of {untouched} values that no token of the work touches are not zero"
        found = _worse(found, Grade.FRAUD, reason, wrong / untouched)
    return ComparedContribution(found, moved)


def contribution_bounds(settings: RunSettings) -> tuple[Bounds, MovedBounds]:
    """Of a contribution that is a gradient: of its error, and of what that moves."""
    return bounds_in_force(settings, settings.codecs.averaging, "contribution"), moved_bounds_in_force(settings)


def past_doubt(graded: Callable[[Errors | None], Comparison], drawn: Callable[[], Errors]) -> Comparison:
    """With as much of the own errors as it takes: none where the first look leaves no doubt."""
    found = graded(None)
    if not found.wants_own_error:
        return found
    for own in own_errors(drawn):
        found = graded(own)
        if found.grade is not Grade.FRAUD or found.is_clear:
            break
    return found


def compared_gradient(
    said: Floats,
    again: Floats,
    moved: Amplified,
    bounds: tuple[Bounds, MovedBounds],
    *,
    own: Errors | None,
    caution: float = 1.0,
) -> Comparison:
    """A contribution that is a gradient, as decoded, by its error and by what that moves; `own` is of both."""
    (own_error, own_moved), (of_error, of_moved) = own or (None, None), bounds
    found = compare(said, again, of_error, own_error=own_error, caution=caution)
    fraud = fraud_bound(of_moved.fraud, own_moved, caution, convicting=of_moved.factor * MOVED_CONVICTING)
    found = replace(found, moved=moved.measured, moved_fraud=fraud, own_moved=own_moved)
    if moved.measured > fraud:
        reason = f"moves weights by {moved.measured:.2e} of a learning rate a step: fraud past {fraud:.2e}"
        found = _worse(found, Grade.SUSPICIOUS if of_moved.report_only else Grade.FRAUD, reason, moved.off)
    return found


def _window_ranges(replay: StageReplay, values: Floats) -> tuple[tuple[str, Floats, AveragingCodecName], ...]:
    """Where a window went, its first moments, and the roots of its second ones, for a step is divided by these; a mean
    below zero counts as one, as in the state."""
    size, codec = replay.layout.num_values, replay.settings.codecs.averaging
    roots = np.sqrt(np.maximum(values[2 * size :], np.float32(0.0)))
    return (
        ("way", values[:size], codec),
        ("first moments", values[size : 2 * size], codec),
        ("second moments", roots, CODEC_OF_MEANS),
    )


def errors_of_window(replay: StageReplay, one: Floats, other: Floats) -> Errors:
    """Of all that `compared_window` compares, in its order."""
    pairs = zip(_window_ranges(replay, one), _window_ranges(replay, other), strict=True)
    return tuple(relative_error(mine, yours) for (_, mine, _), (_, yours, _) in pairs)


def compared_window(replay: StageReplay, said: Floats, again: Floats, own: Errors | None, caution: float) -> Comparison:
    """The worst of what a window says; as far as any of it is fraud."""
    found = []
    for place, ((name, one, codec), (_, other, _)) in enumerate(
        zip(_window_ranges(replay, said), _window_ranges(replay, again), strict=True)
    ):
        bounds = bounds_in_force(replay.settings, codec, "contribution")
        compared = compare(one, other, bounds, own_error=own[place] if own else None, caution=caution)
        found.append(replace(compared, reason=f"{name}: {compared.reason}"))
    return replace(worst(found), extent=max(one.extent for one in found))


def _worse(found: Comparison, grade: Grade, reason: str, extent: float) -> Comparison:
    """With one more thing that is wrong: the graver counts, and the larger extent."""
    if found.grade is Grade.FRAUD or grade is Grade.SUSPICIOUS:
        grade = found.grade if found.grade is not Grade.HONEST else grade
    return replace(found, grade=grade, reason=f"{found.reason}; {reason}", extent=max(found.extent, extent))


def compared_hop(
    replay: StageReplay, exhibit: Exhibit, step: Step, *, caution: float = 1.0
) -> dict[Literal["activation", "gradient"], Comparison]:
    """Of what the exhibit's peer sent on and sent back, where it sent any. Raises as `StageReplay.microbatch`."""
    replayed = replay.microbatch(exhibit, step, None)
    found: dict[Literal["activation", "gradient"], Comparison] = {}
    if replayed.y is not None:
        codec, bounds = _held_to(replay, "activation")

        def forward() -> Floats:
            return _exact(replay.microbatch(exhibit, step, None).y)

        found["activation"] = compared_sent(codec, bounds, exhibit.y, replayed.y, forward, caution=caution)
    if replayed.grad_x is not None:
        codec, bounds = _held_to(replay, "gradient")

        def backward() -> Floats:
            return _exact(replay.microbatch(exhibit, step, None).grad_x)

        found["gradient"] = compared_sent(codec, bounds, exhibit.grad_x, replayed.grad_x, backward, caution=caution)
    return found


def compared_claim(replay: StageReplay, claim: HopClaim, *, caution: float = 1.0) -> Comparison:
    """The claim has passed `check`; raises as `StageReplay.microbatch`."""
    codec, bounds = _held_to(replay, claim.kind)
    return compared_sent(
        codec, bounds, claim.claimed, replay.hop(claim), lambda: replay.hop(claim).exact, caution=caution
    )


def _held_to(replay: StageReplay, kind: Kind) -> tuple[ActivationCodec, Bounds]:
    codecs = replay.settings.codecs
    codec = activation_codec(codecs.activations if kind == "activation" else codecs.activation_gradients)
    return codec, bounds_in_force(replay.settings, codec.name, kind)


def _exact(sent: Sent | None) -> Floats:
    assert sent is not None
    return sent.exact


def compared_sent(
    codec: ActivationCodec,
    bounds: Bounds,
    said: Bytes,
    sent: Sent,
    again: Callable[[], Floats],
    *,
    caution: float = 1.0,
) -> Comparison:
    """A tensor on the wire beside what a replay came to before it encoded it; `again` replays it. Raises
    RemoteError("malformed")."""
    shape = _shape_of(sent.exact)
    claimed, exact = (codec.laid(values, said) for values in (codec.decode(said, shape).numpy(), sent.exact))
    cells = codec.cells(said, sent.body, shape)

    def graded(own: Errors | None) -> Comparison:
        own_error = own[0] if own else None
        return compare(claimed, exact, bounds, cells=cells, own_error=own_error, caution=caution)

    return past_doubt(graded, lambda: (relative_error(again(), sent.exact),))


def _shape_of(values_BLD: Floats) -> tuple[int, int, int]:
    samples, tokens, width = values_BLD.shape
    return samples, tokens, width


def compared_bodies(
    settings: RunSettings, said: Bytes, other: Bytes, kind: Kind, shape: tuple[int, int, int]
) -> Comparison:
    """What was sent, beside something else that was, in cells of both; neither is a replay. Raises
    RemoteError("malformed")."""
    codecs = settings.codecs
    codec = activation_codec(codecs.activations if kind == "activation" else codecs.activation_gradients)
    first, second = (codec.laid(codec.decode(body, shape).numpy(), said) for body in (said, other))
    cells = codec.cells(said, other, shape) + codec.cells(other, said, shape)
    return compare(first, second, bounds_in_force(settings, codec.name, kind), cells=cells)


def compared_activations(settings: RunSettings, one: Bytes, other: Bytes, shape: tuple[int, int, int]) -> Comparison:
    """Of two activations that one peer sent of one microbatch: the smaller of their errors, each seen from the other.

    Raises RemoteError("malformed").
    """
    found = [compared_bodies(settings, *pair, "activation", shape) for pair in ((one, other), (other, one))]
    return min(found, key=lambda compared: compared.measured)


def stands_for(settings: RunSettings, one: Bytes, other: Bytes, shape: tuple[int, int, int]) -> bool:
    """Whether a gradient at one activation may be signed for as that at the other, from which it will be replayed.

    As decoded, they must be so near that no gradient can come out as fraud; where none is fraud, within what is
    accepted. Raises RemoteError("malformed").
    """
    codec = activation_codec(settings.codecs.activations)
    activation = bounds_in_force(settings, codec.name, "activation")
    gradient = bounds_in_force(settings, settings.codecs.activation_gradients, "gradient")
    first, second = (codec.decode(body, shape).numpy() for body in (one, other))
    far = min(relative_error(first, second), relative_error(second, first))
    return far <= (activation.floor if gradient.report_only else min(activation.floor, gradient.fraud / MAGNIFIED))


def worst(found: Sequence[Comparison]) -> Comparison:
    """The one farthest towards fraud."""
    return max(found, key=lambda one: one.share)
