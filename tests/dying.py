"""This is where a peer process is made to SIGKILL itself at a named moment, as if the power went just then."""

import os
import signal
from collections.abc import Callable
from typing import Any

MOMENTS = {
    # moment: (module, class, method, whether the arguments mean this moment)
    "forward": ("swarm.model.stage", "StageModel", "forward", lambda a, k: k.get("keep", False)),
    "loss": ("swarm.model.stage", "StageModel", "loss", lambda a, k: k.get("keep", False)),
    "backward": ("swarm.model.stage", "StageModel", "backward", lambda a, k: True),
    "loss_backward": ("swarm.model.stage", "StageModel", "loss_backward", lambda a, k: True),
    "closing": ("swarm.core.averaging_round", "AveragingRound", "close", lambda a, k: True),
    "closed": ("swarm.core.averaging_round", "AveragingRound", "on_close", lambda a, k: True),
    "committed": ("swarm.core.averaging_round", "AveragingRound", "contributed", lambda a, k: True),
    "roster": ("swarm.core.averaging_round", "AveragingRound", "on_roster", lambda a, k: True),
    "part": ("swarm.core.averaging_round", "AveragingRound", "on_part", lambda a, k: True),
    "aggregated": ("swarm.core.averaging_round", "AveragingRound", "aggregated", lambda a, k: True),
    "result": ("swarm.core.averaging_round", "AveragingRound", "on_result", lambda a, k: True),
    "step": ("peer.replica", "StageReplica", "next_version", lambda a, k: True),
    "snapshot": ("peer.snapshots", "SnapshotStore", "_write", lambda a, k: a[1].version > 0),
    "donating": ("peer.snapshots", "Snapshot", "chunk", lambda a, k: True),
}


def arm(moment: str, count: int) -> None:
    """The process dies when it comes to the moment for the `count`-th time."""
    module_name, class_name, method_name, means = MOMENTS[moment]
    module = __import__(module_name, fromlist=[class_name])
    cls = getattr(module, class_name)
    original: Callable[..., Any] = getattr(cls, method_name)
    left = count

    def dying(*arguments: Any, **keywords: Any) -> Any:
        nonlocal left
        if means(arguments, keywords):
            left -= 1
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **keywords)

    setattr(cls, method_name, dying)
