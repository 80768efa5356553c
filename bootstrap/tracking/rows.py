"""What the ledger's events say of each step, as the series of a tracker."""

from dataclasses import dataclass, field
from typing import Any

from bootstrap.owner.trained_tokens import TrainedTokens
from bootstrap.program.ledger import Event
from bootstrap.tracking.tracker import Row
from swarm.checkpoint.record import CheckpointScores
from swarm.core.state.stage_chain import Genesis

KINDS = ("genesis", "rollback", "amendment", "result", "figures", "evaluation", "scores")
"""The events that are looked at."""


@dataclass
class _Step:
    """What is known of a step that not all stages have ended."""

    stages: set[int] = field(default_factory=set)
    peers: set[str] = field(default_factory=set)


class Rows:
    """All that the events so far add up to. The same events make the same rows, also in another process."""

    def __init__(self) -> None:
        self._stages: set[int] = set()
        self._open: dict[int, _Step] = {}
        self._tokens = TrainedTokens()
        self._ended_at: float | None = None
        """When the step before this one ended."""

    def take(self, event: Event) -> Row | None:
        """The next event; None where it says nothing of a step that a tracker draws."""
        facts: Any = event.facts
        self._tokens.take(event)
        match event.kind:
            case "amendment":
                self._stages.clear()
            case "genesis":
                self._stages.add(int(Genesis.from_value(facts).stage))
                self._open.clear()
                self._ended_at = None
            case "result":
                return self._result(event, facts)
            case "figures":
                return Row(event.number, event.at, facts["step"], _reported(facts))
            case "evaluation":
                return Row(event.number, event.at, facts["version"], {"held_out_loss": facts["held_out_loss"]})
            case "scores":
                record = CheckpointScores.from_value(facts)
                found = {f"{score.task}/{score.metric}": score.value for score in record.scores}
                return Row(event.number, event.at, record.version, found)
        return None

    def _result(self, event: Event, facts: Any) -> Row | None:
        """Once all stages have ended the step."""
        number, stage = facts["step"], facts["stage"]
        step = self._open.setdefault(number, _Step())
        step.stages.add(stage)
        step.peers |= {peer for peer, _, _ in facts["credit"]}
        if step.stages < self._stages:
            return None
        del self._open[number]
        figures: dict[str, float] = {"tokens": self._tokens.at(number + 1), "peers": len(step.peers)}
        if self._ended_at is not None and event.at > self._ended_at:
            figures["tokens_per_second"] = (figures["tokens"] - self._tokens.at(number)) / (event.at - self._ended_at)
        self._ended_at = event.at
        return Row(event.number, event.at, number, figures)


def _reported(facts: Any) -> dict[str, float]:
    """What a step's peers have said of it."""
    return {
        "training_loss": facts["loss_sum"] / facts["num_targets"],
        "round_seconds": facts["round_s"],
        "round_bytes": facts["round_bytes"],
        "stale_share": facts["stale"] / facts["counted"] if facts["counted"] else 0.0,
    }
