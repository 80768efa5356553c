"""Weights & Biases: a run of a project, with its ledger's event numbers as W&B's own steps, which must only rise.

What is drawn goes by the series `step`. W&B knows the last event of an online run that is taken up again. An offline
run is files of this process alone: a note in the run's folder says which event was last written into any of them.
"""

from bootstrap.tracking.tracker import Row, TrackedRun
from swarm.disk.whole_file import whole_file

NOTE = "wandb-events.txt"


class WandB:
    """One run of a project."""

    def __init__(self, project: str, run: TrackedRun) -> None:
        import wandb

        entity, _, project = project.rpartition("/")
        self._note = run.folder / NOTE
        self._run = wandb.init(
            entity=entity or None,
            project=project,
            id=run.run_id[:32],
            name=run.name,
            config=dict(run.settings),
            resume="allow",
            dir=str(run.folder),
            settings=wandb.Settings(console="off", x_disable_stats=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._written = self._run.step - 1
        if self._run.offline and self._note.exists():
            self._written = int(self._note.read_text())

    def write(self, row: Row) -> None:
        if row.event > self._written:
            self._run.log({**row.figures, "step": row.step}, step=row.event)
            self._written = row.event

    def flush(self) -> None:
        with whole_file(self._note) as partial:
            partial.write_text(str(self._written))

    def close(self) -> None:
        self._run.finish()
