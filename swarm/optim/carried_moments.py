"""AdamW's moments from one window of local steps to the next, as the last certified result has them.

Every member begins a window with the same moments, which are part of the stage's state as the result's own bytes, and
says those that it has at its end, the second ones by their rows and columns (`swarm.optim.factored_moments`). The
powers of the betas go on by a whole window with each: to take young moments for grown ones cost more loss than three
local steps.

Whatever anybody says, no second moment is below zero, and no first one longer than AdamW can make it beside the
second: by Cauchy and Schwarz |m| <= r sqrt(v), and with that at its start no step of a window is longer than such a
step of any run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels import windows
from kernels.threads import ONE_THREAD, Threads
from swarm.averaging.encoded import Encoded
from swarm.averaging.parts import Parts
from swarm.checkpoint.state import StageState
from swarm.core.settings import RunSettings
from swarm.model.layout import ParameterLayout
from swarm.optim.exact import ExactOptimizer, longest_first_moment
from swarm.optim.factored_moments import from_means, num_means

CARRIED = "carried"
"""Their name in a state."""
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Carried:
    """What a window begins with besides the weights; nothing writes to it."""

    encoded: NDArray[np.uint8]
    """The moments' parts of a result, end to end."""
    scalars: Mapping[str, float]
    """AdamW's running products of its betas."""
    is_of_one: bool = False
    """Parts of a contribution instead: where one member has come to by itself."""

    @classmethod
    def of(cls, state: StageState) -> "Carried | None":
        """None in a run without windows."""
        encoded = state.moments.get(CARRIED)
        return None if encoded is None else cls(encoded.astype(np.uint8, copy=False), dict(state.scalars))


class CarriedMoments:
    """A run's: how they lie in a state, become others in a step, and become an optimizer's."""

    def __init__(self, settings: RunSettings, layout: ParameterLayout) -> None:
        self.parts = Parts.of(settings, layout)
        self._layout = layout
        self._inner = settings.inner
        self._num_steps = settings.averaging.local_steps
        self._ratio = np.float32(longest_first_moment(settings.inner))
        self._places = {of_one: places_of_moments(self.parts, of_one=of_one) for of_one in (False, True)}

    def at_first(self) -> Carried:
        """Of version 0: zeros, which every codec writes as such."""
        num_bytes = self._places[False][-1].stop
        return Carried(np.zeros(num_bytes, dtype=np.uint8), {"beta1_power": 1.0, "beta2_power": 1.0})

    def after(self, before: Carried, said: Sequence[Encoded | None]) -> Carried:
        """Of the version that a round's windows make; `said` as `CertifiedGradient.moments` has it."""
        return Carried(moments_after(self.parts, before.encoded, said), self.powers_after(before.scalars))

    def powers_after(self, scalars: Mapping[str, float]) -> dict[str, float]:
        """Of the betas, after one window more."""
        found = dict(scalars)
        for _ in range(self._num_steps):
            found["beta1_power"] *= self._inner.beta1
            found["beta2_power"] *= self._inner.beta2
        return found

    def after_own(self, before: Carried, said: Sequence[Encoded]) -> Carried:
        """Where a member has come to by itself from there; `said` is all of its contribution."""
        encoded = b"".join(said[part] for part in self.parts.moments)
        return Carried(np.frombuffer(encoded, dtype=np.uint8), self.powers_after(before.scalars), is_of_one=True)

    def load(self, carried: Carried, optimizer: ExactOptimizer, *, threads: Threads = ONE_THREAD) -> None:
        """Have the optimizer begin there. Raises RemoteError for what no result holds."""
        first, second = optimizer.moments["first"], optimizer.moments["second"]
        self._decode_second(carried, second, threads)

        threads.map(lambda part: self._decode_part(carried, part, first[self._where(part)]), self._parts_of_first)
        windows.shorten(first, second, self._ratio, threads=threads)
        optimizer.scalars = dict(carried.scalars)

    def move(
        self,
        optimizer: ExactOptimizer,
        before: Carried,
        after: Carried,
        scratch: Floats,
        *,
        num_steps: int,
        threads: Threads = ONE_THREAD,
    ) -> None:
        """Have the optimizer, which has taken so many steps since it began at `before`, be where it would be with the
        same gradients from `after`. Raises RemoteError for what no result holds. `scratch`: as long as a moment."""
        first, second = optimizer.moments["first"], optimizer.moments["second"]
        for carried, sign in ((after, 1.0), (before, -1.0)):
            self._decode_second(carried, scratch, threads)
            share = np.float32(sign * self._inner.beta1**num_steps)
            self._add_first(carried, share, scratch, first, threads)
            windows.add_share(second, scratch, np.float32(sign * self._inner.beta2**num_steps), threads=threads)
        windows.at_least_zero(second, threads=threads)
        windows.shorten(first, second, self._ratio, threads=threads)

    def _add_first(self, carried: Carried, share: np.float32, second: Floats, out: Floats, threads: Threads) -> None:
        """That share of the first moments, which are as `load` has them: cut to what goes with the second ones."""

        def add(part: int) -> None:
            where = self._where(part)
            piece = np.empty(self.parts.size(part), dtype=np.float32)
            self._decode_part(carried, part, piece)
            windows.shorten(piece, second[where], self._ratio)
            windows.add_share(out[where], piece, share)

        threads.map(add, self._parts_of_first)

    @property
    def _parts_of_first(self) -> range:
        moments = self.parts.moments
        return moments[: len(self.parts.first)]

    def _decode_second(self, carried: Carried, second: Floats, threads: Threads) -> None:
        parts, means = self.parts, np.empty(num_means(self._layout), dtype=np.float32)
        for part in parts.moments[len(parts.first) :]:
            self._decode_part(carried, part, means[self._where(part)])
        from_means(np.maximum(means, np.float32(0.0)), self._layout, second, threads=threads)

    def _decode_part(self, carried: Carried, part: int, out: Floats) -> None:
        parts, is_of_one = self.parts, carried.is_of_one
        place = self._places[is_of_one][part - parts.moments.start]
        codec = parts.contribution_codec(part) if is_of_one else parts.result_codec(part)
        codec.decode(carried.encoded[place].data, out)

    def _where(self, part: int) -> slice:
        """In the first moments, or in the second ones' means."""
        where, size = self.parts[part], self.parts.num_values
        before = size if where.start < 2 * size else 2 * size
        return slice(where.start - before, where.stop - before)


def places_of_moments(parts: Parts, *, of_one: bool = False) -> list[slice]:
    """Where each of the parts of moments lies in the encoded bytes of a result, or of one contribution, in order."""
    found, at = [], 0
    for part in parts.moments:
        codec = parts.contribution_codec(part) if of_one else parts.result_codec(part)
        found.append(slice(at, at + codec.encoded_bytes(parts.size(part))))
        at = found[-1].stop
    return found


def moments_after(parts: Parts, before: NDArray[np.uint8], said: Sequence[Encoded | None]) -> NDArray[np.uint8]:
    """The encoded moments once those parts are others that are said."""
    after = before.copy()
    for place, body in zip(places_of_moments(parts), said, strict=True):
        if body is not None:
            after[place] = np.frombuffer(body, dtype=np.uint8)
    after.setflags(write=False)
    return after
