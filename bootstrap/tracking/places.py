"""Which tracker an owner means by KIND:PLACE, and whether its package is there."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from bootstrap.tracking.tensorboard import TensorBoard
from bootstrap.tracking.tracker import TrackedRun, Tracker
from bootstrap.tracking.trackio import Trackio
from bootstrap.tracking.wandb import WandB
from swarm.core.errors import SettingsError

ADAPTERS: dict[str, Callable[[str, TrackedRun], Tracker]] = {
    "tensorboard": TensorBoard,
    "trackio": Trackio,
    "wandb": WandB,
}
"""By kind, which is also the name of the package and of the optional extra."""


@dataclass(frozen=True)
class TrackerPlace:
    """Where figures go."""

    kind: str
    place: str
    """TensorBoard's folder, or the project."""

    @classmethod
    def of(cls, text: str) -> "TrackerPlace":
        """KIND:PLACE. Raises SettingsError if it is none, or the tracker's package is not installed."""
        kind, _, place = text.partition(":")
        if kind not in ADAPTERS or not place:
            raise SettingsError(f"--track {text}: give one of tensorboard:DIR, trackio:PROJECT, wandb:PROJECT")
        spec = importlib.util.find_spec(kind)
        if spec is None or spec.origin is None:  # a mere folder of this name has none
            raise SettingsError(f"--track {text}: {kind} is not installed here; pip install 'homeswarm[{kind}]'")
        return cls(kind, place)

    def __str__(self) -> str:
        return f"{self.kind}:{self.place}"

    def open(self, run: TrackedRun) -> Tracker:
        """Raises what the tracker raises."""
        return ADAPTERS[self.kind](self.place, run)
