"""What a peer does when memory gives out: it frees what it can, and computes less at once from then on."""

import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from peer.pipeline.compute import Urgency
from swarm.core.pipeline.compute_mode import ComputeMode, modes
from swarm.core.settings import RunSettings
from swarm.memory.kept_buffers import BUFFERS
from swarm.model.stage import StageModel

log = logging.getLogger(__name__)

REST_S = 5.0
"""With nothing smaller left to try, no microbatch is taken for so long: what is in flight holds the memory."""
TOLD_S = 600.0
"""Its owner is told of it so long."""

Place = Literal["host", "device"]


class MemoryPressure:
    """Of one peer at one stage. Heard of on the threads that compute, asked on the event loop."""

    def __init__(self, settings: RunSettings, model: StageModel) -> None:
        self._settings = settings
        self._model = model
        self._smaller = self._smaller_than(model.mode)
        self.events: Counter[Place] = Counter()
        """How often memory gave out: the host's and the GPU's."""
        self._last_at = float("-inf")
        self._last_in = ""
        self._rests_until = float("-inf")

    def gave_out(self, urgency: Urgency, place: Place, said: str) -> None:
        """(compute, exact) A job of that urgency has ended with it, and what it held is free again."""
        self.events[place] += 1
        self._last_at, self._last_in = time.monotonic(), f"{urgency.name.lower()} work"
        BUFFERS.give_back()
        torch: Any = sys.modules["torch"]
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        log.warning("out of memory (%s) in %s: %s", place, self._last_in, said[:200])
        if urgency in (Urgency.FORWARD, Urgency.BACKWARD, Urgency.BIRTH):
            self.compute_less()

    def compute_less(self) -> bool:
        """(compute) Whether there is a mode that needs less memory; it is the model's from now on."""
        mode = next(self._smaller, None)
        if mode is None:
            self._rests_until = time.monotonic() + REST_S
            log.warning("one sample at a time does not fit: nothing is begun for %.0f s", REST_S)
            return False
        self._model.compute_less(mode)
        log.warning("from now on %s", self._what())
        return True

    @property
    def rests(self) -> bool:
        """Whether no microbatch is to be begun."""
        return time.monotonic() < self._rests_until

    def words(self) -> str:
        """For the owner; empty if there has been nothing of late."""
        ago_s = time.monotonic() - self._last_at
        if ago_s > TOLD_S:
            return ""
        times = " and ".join(f"{count} times on the {place}" for place, count in sorted(self.events.items()))
        return f"memory gave out {times}, last {ago_s:.0f} s ago in {self._last_in}: {self._what()}"

    def _what(self) -> str:
        if self.rests:
            return "nothing new is begun for a moment"
        mode, size = self._model.mode or ComputeMode.of_run(self._settings), self._settings.batch.microbatch_size
        again = ", and forward twice" if mode.recompute else ""
        return f"{mode.samples_at_once} of a microbatch's {size} samples are computed at once{again}"

    def _smaller_than(self, mode: ComputeMode | None) -> Iterator[ComputeMode]:
        now = mode or ComputeMode.of_run(self._settings)
        choices = list(modes(self._settings))
        later = choices[choices.index(now) + 1 :]
        return (each for each in later if each != replace(now, steps_there=False))  # a window stays where it is
