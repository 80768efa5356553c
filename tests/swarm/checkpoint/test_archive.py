"""Checkpoints on disk are whole or absent, and come back byte for byte."""

import dataclasses
import errno
import os
import signal
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from safetensors.numpy import load_file

from swarm.checkpoint import archive
from swarm.checkpoint.archive import (
    CheckpointMeta,
    CheckpointWriter,
    checkpoints,
    finish_sealed,
    keep_last,
    latest_checkpoint,
    load_stage,
    read_checkpoint,
    remove_leftovers,
)
from swarm.checkpoint.state import StageState, state_digest
from swarm.core.errors import SettingsError
from swarm.model.stack import stage_layout
from tests.swarm.model.tiny_models import tiny_model

MODEL = tiny_model("llama", 2, recompute=True, compute_dtype="bf16")
LAYOUTS = [stage_layout(MODEL, stage) for stage in range(2)]
META = CheckpointMeta(
    model=MODEL, tokenizer="bytes", run={"name": "demo", "seed": 3}, data_position={"next_id": 12, "laps": [1, 2]}
)


def make_state(stage: int, version: int) -> StageState:
    rng = np.random.default_rng(version * 10 + stage)
    count = LAYOUTS[stage].num_values
    return StageState(
        version=version,
        layout=LAYOUTS[stage],
        weights=rng.standard_normal(count, dtype=np.float32),
        moments={
            "first": rng.standard_normal(count, dtype=np.float32),
            "codes": rng.integers(0, 256, count, dtype=np.uint8),
            "scales": rng.random(11, dtype=np.float32),
        },
        scalars={"beta1_power": 0.9**version, "beta2_power": 1 / 3},
        certified_norms=[0.1, 1 / 3],
        name=bytes([version]) * 32,
    )


def write(folder: Path, version: int) -> Path:
    writer = CheckpointWriter(folder, version)
    for stage in (1, 0):
        writer.add_stage(stage, make_state(stage, version))
    return writer.commit(META)


def test_checkpoint_comes_back_byte_for_byte(tmp_path: Path) -> None:
    path = write(tmp_path / "checkpoints", 50)
    assert path.name == "step-00000050"
    info = read_checkpoint(path)
    assert info.version == 50
    assert info.meta == META
    for stage, layout in enumerate(LAYOUTS):
        expected = make_state(stage, 50)
        state = load_stage(info, stage, layout)
        assert state_digest(state) == state_digest(expected) == info.stages[stage].digest
        assert state.weights.tobytes() == expected.weights.tobytes()
        assert {name: values.tobytes() for name, values in state.moments.items()} == {
            name: values.tobytes() for name, values in expected.moments.items()
        }
        assert dataclasses.astuple(state)[4:] == dataclasses.astuple(expected)[4:]


def test_state_without_moments_comes_back(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, 0)
    states = [StageState(0, layout, np.ones(layout.num_values, np.float32)) for layout in LAYOUTS]
    for stage, state in enumerate(states):
        writer.add_stage(stage, state)
    info = read_checkpoint(writer.commit(META))
    assert state_digest(load_stage(info, 1, LAYOUTS[1])) == state_digest(states[1])


def test_files_are_safetensors_under_hugging_face_names(tmp_path: Path) -> None:
    path = write(tmp_path, 50)
    weights = load_file(path / "stage-1.safetensors")
    assert sorted(weights) == list(LAYOUTS[1].names)
    state = make_state(1, 50)
    name = "model.layers.3.mlp.up_proj.weight"
    assert weights[name].tobytes() == LAYOUTS[1].views(state.weights)[name].tobytes()
    moments = load_file(path / "stage-1.optimizer.safetensors")
    assert moments[f"first/{name}"].shape == weights[name].shape


def test_latest_is_the_highest_version(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "nothing-yet") is None
    for version in (100, 8, 9):
        write(tmp_path, version)
    latest = latest_checkpoint(tmp_path)
    assert latest is not None
    assert latest.version == 100


def test_nothing_looks_like_a_checkpoint_until_commit(tmp_path: Path) -> None:
    write(tmp_path, 1)
    writer = CheckpointWriter(tmp_path, 2)
    writer.add_stage(0, make_state(0, 2))
    with pytest.raises(ValueError, match="stages \\[0\\] were added"):
        writer.commit(META)
    writer.add_stage(1, make_state(1, 2))
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000001"]
    # The process dies here; the next one cleans up and writes the version anew.
    del writer
    assert len(remove_leftovers(tmp_path)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    write(tmp_path, 2)
    assert len(checkpoints(tmp_path)) == 2


def write_and_die(folder: Path, syncs_before_death: int) -> NoReturn:
    """Of a fork: it is killed while it writes version 2."""
    remaining, sync = syncs_before_death, archive._sync

    def sync_or_die(path: Path) -> None:
        nonlocal remaining
        if remaining == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        remaining -= 1
        sync(path)

    try:
        archive._sync = sync_or_die
        write(folder, 2)
    finally:
        os._exit(1)


def test_killed_writer_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    folders = [tmp_path / str(syncs_before_death) for syncs_before_death in range(8)]
    for folder in folders:
        write(folder, 1)
    for syncs_before_death, folder in enumerate(folders):
        child = os.fork()
        if child == 0:
            write_and_die(folder, syncs_before_death)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    for syncs_before_death, folder in enumerate(folders):
        latest = latest_checkpoint(folder)
        assert latest is not None
        # Two syncs a stage, one of the info file, one of the folder, one of where it is; the next follows the rename.
        assert latest.version == (2 if syncs_before_death == 7 else 1)
        for stage, layout in enumerate(LAYOUTS):
            load_stage(latest, stage, layout)
        remove_leftovers(folder)
        if latest.version == 1:
            write(folder, 2)
        assert {path.name for path in folder.iterdir()} == {"step-00000001", "step-00000002"}


def test_what_was_sealed_is_made_visible_if_it_is_what_is_named(tmp_path: Path) -> None:
    digests = [state_digest(make_state(stage, 9)) for stage in range(2)]
    write(tmp_path, 8)
    writer = CheckpointWriter(tmp_path, 9)
    for stage in (0, 1):
        writer.add_stage(stage, make_state(stage, 9))
    assert finish_sealed(tmp_path, 9, digests) is None, "it is not sealed"
    writer.seal(META)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000008"]
    assert finish_sealed(tmp_path, 9, digests[::-1]) is None
    assert finish_sealed(tmp_path, 10, digests) is None
    shown = finish_sealed(tmp_path, 9, digests)
    assert shown is not None
    assert load_stage(read_checkpoint(shown), 0, LAYOUTS[0]).version == 9
    shown.rename(tmp_path / ".partial-00000009")
    write(tmp_path, 10)
    assert finish_sealed(tmp_path, 9, digests) is None, "it is being removed"


def test_keep_last_removes_the_oldest(tmp_path: Path) -> None:
    for version in (1, 2, 3, 10):
        write(tmp_path, version)
    removed = keep_last(tmp_path, 2)
    assert [path.name for path in removed] == ["step-00000001", "step-00000002"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000010"]
    with pytest.raises(SettingsError, match="keep_last = 0"):
        keep_last(tmp_path, 0)


def test_keep_last_spares_two_that_are_named_at_most(tmp_path: Path) -> None:
    for version in (1, 2, 3, 4, 5):
        write(tmp_path, version)
    keep_last(tmp_path, 1, spared=[5, 9, 3, 1, 2])
    assert [read_checkpoint(path).version for path in checkpoints(tmp_path)] == [1, 3, 5]
    keep_last(tmp_path, 1)
    assert [read_checkpoint(path).version for path in checkpoints(tmp_path)] == [5]


def test_version_is_not_overwritten(tmp_path: Path) -> None:
    write(tmp_path, 5)
    with pytest.raises(SettingsError, match="exists already"):
        CheckpointWriter(tmp_path, 5)


def test_a_folder_that_cannot_be_made_now_is_the_disks_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk it is made later: whoever writes checkpoints tries again on OSError."""

    def full(path: Path, **options: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", full)
        with pytest.raises(OSError, match="No space left"):
            CheckpointWriter(tmp_path, 5)
    assert write(tmp_path, 5).is_dir()


def test_abandoned_writer_leaves_nothing(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, 5)
    writer.add_stage(0, make_state(0, 5))
    writer.abandon()
    assert list(tmp_path.iterdir()) == []


def test_state_of_another_version_is_not_added(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="version 4"):
        CheckpointWriter(tmp_path, 5).add_stage(0, make_state(0, 4))


@pytest.mark.parametrize("file", ["stage-0.safetensors", "stage-0.optimizer.safetensors"])
def test_damaged_files_are_noticed(tmp_path: Path, file: str) -> None:
    path = write(tmp_path, 5)
    data = bytearray((path / file).read_bytes())
    data[-1] ^= 1
    (path / file).write_bytes(data)
    with pytest.raises(SettingsError, match=r"stage 0 of .* is damaged"):
        load_stage(read_checkpoint(path), 0, LAYOUTS[0])
    (path / file).write_bytes(data[:100])
    with pytest.raises(SettingsError, match="cannot be read"):
        load_stage(read_checkpoint(path), 0, LAYOUTS[0])
    (path / file).unlink()
    with pytest.raises(SettingsError, match="cannot be read"):
        load_stage(read_checkpoint(path), 0, LAYOUTS[0])


def test_wrong_folder_or_stage_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, 5)
    with pytest.raises(SettingsError, match="give a checkpoint's own folder"):
        read_checkpoint(tmp_path)
    with pytest.raises(SettingsError, match="stages 0 to 1"):
        load_stage(read_checkpoint(path), 2, LAYOUTS[0])
    with pytest.raises(SettingsError, match="cannot be read"):
        load_stage(read_checkpoint(path), 0, LAYOUTS[1])
    for text in ("not json", "{}", "[]", '{"format": 2}', '{"format": 1, "version": 5, "model": {}}'):
        (path / "checkpoint.json").write_text(text)
        with pytest.raises(SettingsError):
            read_checkpoint(path)
