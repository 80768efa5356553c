"""A curve that a run is held against: another's held-out loss by the tokens it was trained on."""

import bisect
import csv
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm.core.errors import SettingsError

MARGIN = 0.03
"""Of the reference's loss: what is above it by no more is about the same."""
RUNNING = 3
"""Checkpoints one after another: one or two are above by chance."""
MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class Reference:
    """Points of rising tokens, two at least."""

    tokens: tuple[int, ...]
    losses: tuple[float, ...]
    """Nats a token."""

    def loss_at(self, tokens: int) -> float | None:
        """Between two points on the straight line; None outside of them."""
        if not self.tokens[0] <= tokens <= self.tokens[-1]:
            return None
        after = max(1, bisect.bisect_left(self.tokens, tokens))
        (x0, x1), (y0, y1) = self.tokens[after - 1 : after + 1], self.losses[after - 1 : after + 1]
        return y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)

    def why_behind(self, measured: Sequence[tuple[int, float]]) -> str | None:
        """Why the run is noticed at its last checkpoint; None if it is not, or was already and has been above since.

        `measured`: (tokens, held-out loss) at its checkpoints, oldest first.
        """
        above = [self._is_below(tokens, loss) for tokens, loss in measured]
        if len(above) < RUNNING or not all(above[-RUNNING:]) or any(above[-RUNNING - 1 : -RUNNING]):
            return None
        tokens, loss = measured[-1]
        return (
            f"the held-out loss {loss:.4g} is above the reference's {self.loss_at(tokens):.4g} at {tokens:,} tokens: "
            f"{RUNNING} checkpoints running by more than {MARGIN:.0%}"
        )

    def _is_below(self, tokens: int, loss: float) -> bool:
        """Whether the reference is, by more than the margin."""
        usual = self.loss_at(tokens)
        return usual is not None and loss > (1 + MARGIN) * usual


def read_reference(path: Path) -> Reference:
    """From a CSV with columns `tokens` and `loss`, a JSON list of such pairs, or what another run's `--report` wrote.

    Raises SettingsError if it is none of them.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise SettingsError(f"--reference {path}: more than {MAX_BYTES >> 20} MiB; give fewer points")
        pairs = _from_json(path) if path.suffix == ".json" else _from_csv(path)
        points = sorted({int(tokens): float(loss) for tokens, loss in pairs}.items())
    except (OSError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, SettingsError):
            raise
        raise SettingsError(
            f"--reference {path}: {type(error).__name__}: {error}; give a CSV with the columns tokens,loss, a JSON "
            "list of [tokens, loss], or the file that another run's host wrote by --report"
        ) from error
    if len(points) < 2 or points[0][0] < 0 or not all(math.isfinite(loss) and loss > 0 for _, loss in points):
        raise SettingsError(f"--reference {path}: {len(points)} points; two at least are needed, with losses above 0")
    return Reference(tuple(tokens for tokens, _ in points), tuple(loss for _, loss in points))


def _from_json(path: Path) -> list[Any]:
    said = json.loads(path.read_text(encoding="utf-8"))
    pairs: list[Any] = said["held_out_by_tokens"] if isinstance(said, dict) else said
    return pairs


def _from_csv(path: Path) -> list[Any]:
    with path.open(encoding="utf-8", newline="") as file:
        return [(row["tokens"], row["loss"]) for row in csv.DictReader(file)]
