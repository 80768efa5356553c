"""Checkpoints of a small model that nobody has trained."""

from pathlib import Path

from swarm.checkpoint.archive import CheckpointMeta, CheckpointWriter
from swarm.checkpoint.state import StageState
from swarm.manifest.file import parse_manifest
from swarm.model.initial import initial_weights
from swarm.model.stack import stage_layout


def write_checkpoints(folder: Path, *, versions: tuple[int, ...]) -> Path:
    """Checkpoints of these versions, each with weights of its own; returns the folder that holds them."""
    model = parse_manifest("", folder / "run.toml").model
    for version in versions:
        writer = CheckpointWriter(folder, version)
        for stage, flat in enumerate(initial_weights(model, version, None)):
            writer.add_stage(stage, StageState(version, stage_layout(model, stage), flat))
        writer.commit(CheckpointMeta(model=model, tokenizer="bytes", run={}, data_position={}))
    return folder
