"""A ledger as a host writes it, and what a tracker is to have of it."""

from pathlib import Path
from typing import Any

from bootstrap.program.ledger import Ledger
from bootstrap.tracking.tracker import TrackedRun
from swarm.core.ids import PeerId, RunId, StageIndex, Version
from swarm.core.pipeline.leases import LeaseTable
from swarm.core.state.stage_chain import Genesis

RUN_ID = RunId("ab" * 32)
TOKENS = 64
"""Of each step."""


def tracked(folder: Path) -> TrackedRun:
    return TrackedRun(run_id=RUN_ID, name="small", settings={"batch": {"target_tokens": TOKENS}}, folder=folder)


def begin(ledger: Ledger, version: int = 0, *, from_version: int | None = None) -> None:
    """Both stages begin; from an earlier version, if one is given."""
    if from_version is not None:
        ledger.append("rollback", {"to": from_version, "version": version})
    peer = PeerId("peer")
    for stage in range(2):
        made = Genesis(
            *(RUN_ID, StageIndex(stage), Version(version), bytes(32), (peer,), LeaseTable(), peer, peer, (), bytes(32)),
            signature=bytes(64),
        )
        ledger.append("genesis", made.to_value())


def train(ledger: Ledger, *steps: int) -> None:
    """These steps end, and what their peers said of them is written down."""
    for step in steps:
        for stage in range(2):
            facts: dict[str, Any] = {"stage": stage, "step": step, "credit": [[f"peer {stage}", 1, TOKENS]]}
            ledger.append("result", facts)
        said = {"loss_sum": loss_of(step) * TOKENS, "num_targets": TOKENS, "round_s": 0.5, "round_bytes": 100}
        ledger.append("figures", {"step": step, "stale": 1, "counted": 4, **said})


def loss_of(step: int) -> float:
    """A number that single precision has too."""
    return 5.0 - step / 16


def evaluate(ledger: Ledger, version: int, loss: float) -> None:
    ledger.append("evaluation", {"version": version, "held_out_loss": loss})
