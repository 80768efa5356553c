"""How the host notices that training goes wrong: from certified norms, from losses, and from silence.

What it notices changes nothing by itself: replicas skip a step by their own rule (`swarm.core.state.step_rule`), and
only the host's owner rolls a run back.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from swarm.core.ids import MicrobatchId, PeerId
from swarm.core.pipeline.data_order import DataOrder
from swarm.core.settings import RunSettings
from swarm.core.state.step_rule import NUM_CERTIFIED_NORMS, norms_after, why_skipped

Kind = Literal["skipped", "not_finite", "loss_spike", "stalled", "left_out", "behind_reference"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""A step was skipped by a stage; a peer's work added nothing to one; its loss was far above the last; no step ends; a
peer's contribution is not in one, for its line was too slow; the held-out loss is above a reference curve's."""
KEPT_NORMS = 1024
"""Of each stage: a rollback goes back by fewer steps, and then wants those of the steps before."""
LOSSES = 16
"""The last of them say what a step's loss should be about."""
SPIKE_FACTOR = 1.3
"""A loss above so many times the median of the last 16 is a spike: it falls by and by, and never rises so."""


@dataclass(frozen=True)
class Notice:
    """What went wrong in a step: with whose work, on which data."""

    kind: Kind
    step: int
    stage: int | None
    """None: of all stages."""
    peers: tuple[PeerId, ...]
    ids: tuple[int, ...]
    """Microbatches of the step, as far as they are known; sorted."""
    reason: str

    def to_facts(self) -> dict[str, Any]:
        """For the ledger."""
        return {
            "kind": self.kind,
            "step": self.step,
            "stage": self.stage,
            "peers": list(self.peers),
            "ids": list(self.ids),
            "reason": self.reason,
        }

    @classmethod
    def from_facts(cls, facts: Any) -> "Notice":
        return cls(
            facts["kind"],
            facts["step"],
            facts["stage"],
            tuple(map(PeerId, facts["peers"])),
            tuple(facts["ids"]),
            facts["reason"],
        )

    def told(self, order: DataOrder) -> dict[str, Any]:
        """For people: the data as ranges of microbatches and of the training file's tokens."""
        spans = order.spans(MicrobatchId(number) for number in self.ids)
        return {
            **self.to_facts(),
            "ids": [[span.first, span.stop] for span in spans],
            "tokens": [[*run] for span in spans for run in span.tokens],
        }


def line_of(told: Mapping[str, Any]) -> str:
    """A notice that is told, on a line."""
    ids = ", ".join(f"{start} to {stop - 1}" for start, stop in told["ids"])
    tokens = ", ".join(f"{start} to {stop - 1}" for start, stop in told["tokens"])
    peers = ", ".join(peer[-8:] for peer in told["peers"])
    where = "" if told["stage"] is None else f" of stage {told['stage']}"
    data = f"; microbatches {ids} (tokens {tokens} of the training data)" if ids else ""
    of_whom = f"; peers {peers}" if peers else ""
    return f"{told['kind'].replace('_', ' ')}: step {told['step']}{where}: {told['reason']}{data}{of_whom}"


@dataclass
class Trouble:
    """What the last steps of a run were like, and so what is out of the ordinary."""

    settings: RunSettings
    _norms: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    """(step, certified norm) of each stage, in order."""
    _losses: list[float] = field(default_factory=list)

    def begin_again(self, stage: int, base: int) -> None:
        """The stage goes on from what it was at version `base`."""
        self._norms[stage] = [(step, norm) for step, norm in self._norms.get(stage, []) if step < base]
        self._losses.clear()

    def skipped(self, stage: int, step: int, norm: float | None) -> str | None:
        """Why the stage's replicas skip the step whose certified gradient has this norm; None if they take it.

        `norm` is None if nobody's work is in the result.
        """
        held = self._norms.setdefault(stage, [])
        norms = [number for _, number in held[-NUM_CERTIFIED_NORMS:]]
        held += [(step, number) for number in norms_after(norm, ())]
        del held[:-KEPT_NORMS]
        return why_skipped(norm, norms, factor=self.settings.optimizer.skip_norm_factor)

    def spiked(self, loss: float) -> str | None:
        """Why a step's loss, in nats a token, is no usual one; None if it is."""
        usual = statistics.median(self._losses[-LOSSES:]) if len(self._losses) >= LOSSES // 2 else math.inf
        self._losses = [*self._losses, loss][-LOSSES:]
        if loss <= SPIKE_FACTOR * usual:
            return None
        return f"the loss {loss:.4g} is more than {SPIKE_FACTOR:g} times {usual:.4g}, the median of the last"

    def silent_after_s(self, moves_s: float) -> float:
        """No step takes longer than this, unless something is wrong. `moves_s`: what the bytes of a round take."""
        deadlines = self.settings.deadlines
        return deadlines.step_s + deadlines.straggler_s + 4 * deadlines.call_s + deadlines.lease_s + moves_s
