"""A peer process that kills or stops itself at a named moment, as if the power or the machine did."""

import os
import signal
from collections.abc import Callable
from typing import Any

from peer.state.replica import StageReplica
from swarm.checkpoint.snapshots import Snapshot, SnapshotStore
from swarm.core.round.averaging_round import AveragingRound
from swarm.model.stage import StageModel

Meant = Callable[[tuple[Any, ...], dict[str, Any]], bool]


def _always(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    return True


def _in_training(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    return bool(keywords.get("keep", False))


def _past_the_genesis(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    return bool(arguments[1].version > 0)


MOMENTS: dict[str, tuple[type, str, Meant]] = {
    # moment: (class, method, whether the arguments mean this moment)
    "forward": (StageModel, "forward", _in_training),
    "loss": (StageModel, "loss", _in_training),
    "backward": (StageModel, "backward", _always),
    "loss_backward": (StageModel, "loss_backward", _always),
    "closing": (AveragingRound, "close", _always),
    "closed": (AveragingRound, "on_close", _always),
    "committed": (AveragingRound, "contributed", _always),
    "ballot": (AveragingRound, "on_ballot", _always),
    "vote": (AveragingRound, "on_vote", _always),
    "roster": (AveragingRound, "on_roster", _always),
    "part": (AveragingRound, "on_part", _always),
    "aggregated": (AveragingRound, "aggregated", _always),
    "result": (AveragingRound, "on_result", _always),
    "step": (StageReplica, "next_version", _always),
    "snapshot": (SnapshotStore, "_write", _past_the_genesis),
    "donating": (Snapshot, "chunk", _always),
}


def arm(moment: str, count: int, number: int = signal.SIGKILL) -> None:
    """The process sends itself the signal when it comes to the moment for the `count`-th time, once."""
    cls, method_name, means = MOMENTS[moment]
    original: Callable[..., Any] = getattr(cls, method_name)
    left = count

    def dying(*arguments: Any, **keywords: Any) -> Any:
        nonlocal left
        if means(arguments, keywords):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), number)
        return original(*arguments, **keywords)

    setattr(cls, method_name, dying)
