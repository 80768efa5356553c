"""A run's checkpoints on disk: a folder for each, whole or not there at all.

    <folder>/step-00000050/checkpoint.json                 the run, digests and names of the stages, data position
                           stage-0.safetensors             weights by Hugging Face name
                           stage-0.optimizer.safetensors   moments as "<moment>/<name>", scalars as metadata

A checkpoint is written under a name that nothing reads, sealed (all of it is on disk), and renamed.
"""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swarm.bulk_digest import bulk_digest
from swarm.checkpoint.state import Array, StageState, state_digest
from swarm.checkpoint.tensor_file import TensorFile, write_tensors
from swarm.core.errors import SettingsError
from swarm.core.settings import AdapterSettings, ModelSettings
from swarm.core.tables import read_table
from swarm.model.layout import ParameterLayout

INFO_FILE = "checkpoint.json"
FORMAT = 1
MAX_SPARED = 2
"""Whoever downloads makes the host keep so many more: anybody with an invite may."""
_PREFIX = "step-"
_PARTIAL = ".partial-"
_OPTIMIZER = ".optimizer.safetensors"
_WHOLE = "/whole/"
"""Moments that are not one value for each parameter are kept whole under this name."""


@dataclass(frozen=True, kw_only=True)
class CheckpointMeta:
    """What a checkpoint says besides the stages' states."""

    model: ModelSettings
    tokenizer: str
    """"bytes" or the name of the run's tokenizer folder, as in DataSettings."""
    run: dict[str, Any]
    """The run's settings as JSON values, for people and programs to read."""
    data_position: dict[str, Any]
    """How far the data has been used, as JSON values; only the data room reads it."""
    lineage: dict[str, Any] = field(default_factory=dict)
    """Where the weights come from, as JSON values, for the model card."""


@dataclass(frozen=True)
class StageRecord:
    """One stage in `checkpoint.json`."""

    digest: bytes
    weights_digest: bytes
    """Of the weights alone."""
    name: bytes
    certified_norms: tuple[float, ...]


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint on disk, its states not yet read."""

    path: Path
    version: int
    meta: CheckpointMeta
    stages: tuple[StageRecord, ...]


class CheckpointWriter:
    """Writes one checkpoint, stage by stage; `commit` makes it visible. Until then nothing reads it."""

    def __init__(self, folder: Path, version: int) -> None:
        """Raises SettingsError if the folder has a checkpoint of this version, OSError if it cannot be written now."""
        self._target = checkpoint_path(folder, version)
        self._partial = folder / f"{_PARTIAL}{version:08d}"
        self._version = version
        self._stages: dict[int, StageRecord] = {}
        if self._target.exists():
            raise SettingsError(
                f"{self._target} exists already; keep it, or remove it to write version {version} again"
            )
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)

    @property
    def folder(self) -> Path:
        """Where it is being written; what else is put here becomes a part of it."""
        return self._partial

    def add_stage(self, index: int, state: StageState) -> None:
        """Write a stage's state; it must be at the checkpoint's version. Raises OSError."""
        if state.version != self._version:
            raise ValueError(f"stage {index} is at version {state.version}, the checkpoint at {self._version}")
        layout, paths = state.layout, (self._partial / _weights_file(index), self._partial / _optimizer_file(index))
        write_tensors(paths[0], _tensors(layout, "", state.weights), {"format": "pt"})
        # The widest first: none of them begins where its values cannot be read.
        moments = sorted(state.moments.items(), key=lambda moment: (-moment[1].itemsize, moment[0]))
        tensors = [one for moment, values in moments for one in _moment_tensors(layout, moment, values)]
        write_tensors(paths[1], tensors, {"scalars": json.dumps(state.scalars, sort_keys=True)})
        for path in paths:
            _sync(path)
        record = StageRecord(
            state_digest(state), weights_digest(state.weights), state.name, tuple(state.certified_norms)
        )
        self._stages[index] = record

    def commit(self, meta: CheckpointMeta) -> Path:
        """Make the checkpoint visible and return its folder. All stages must have been added."""
        self.seal(meta)
        return self.show()

    def seal(self, meta: CheckpointMeta) -> None:
        """All of it is on disk when this returns, and nothing reads it yet. All stages must have been added."""
        if sorted(self._stages) != list(range(meta.model.num_stages)):
            raise ValueError(f"stages {sorted(self._stages)} were added, the model has {meta.model.num_stages}")
        for path in sorted(self._partial.rglob("*")):
            if path.is_dir() or path.parent != self._partial:  # what was put there besides the stages
                _sync(path)
        (self._partial / INFO_FILE).write_text(json.dumps(self._info(meta), indent=1, sort_keys=True) + "\n")
        _sync(self._partial / INFO_FILE)
        _sync(self._partial)
        _sync(self._partial.parent)

    def show(self) -> Path:
        """Make what is sealed visible and return its folder."""
        return _shown(self._partial, self._target)

    def abandon(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self._partial, ignore_errors=True)

    def _info(self, meta: CheckpointMeta) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": self._version,
            "model": {
                "config": json.loads(meta.model.config_json),
                "stage_layers": meta.model.stage_layers,
                "compute_dtype": meta.model.compute_dtype,
                "recompute": meta.model.recompute,
                "adapters": asdict(meta.model.adapters),
                "subspace": meta.model.subspace,
                "subspace_seed": meta.model.subspace_seed,
            },
            "tokenizer": meta.tokenizer,
            "run": meta.run,
            "data_position": meta.data_position,
            "lineage": meta.lineage,
            "stages": [
                {
                    "digest": record.digest.hex(),
                    "weights": record.weights_digest.hex(),
                    "name": record.name.hex(),
                    "certified_norms": list(record.certified_norms),
                }
                for _, record in sorted(self._stages.items())
            ],
        }


def read_checkpoint(path: Path) -> CheckpointInfo:
    """What a checkpoint's folder says. Raises SettingsError for any other folder."""
    try:
        fields = json.loads((path / INFO_FILE).read_text())
    except FileNotFoundError as error:
        raise SettingsError(
            f"{path} holds no {INFO_FILE}; give a checkpoint's own folder, such as {_PREFIX}00000050"
        ) from error
    except (OSError, json.JSONDecodeError) as error:
        raise SettingsError(f"{path / INFO_FILE} cannot be read: {error}") from error
    try:
        if fields["format"] != FORMAT:
            raise SettingsError(f"{path} has format {fields['format']}; this version of homeswarm reads {FORMAT}")
        return _info_of_fields(path, fields)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, SettingsError):
            raise
        raise SettingsError(f"{path / INFO_FILE} is damaged ({error!r}); use another checkpoint") from error


def load_stage(info: CheckpointInfo, index: int, layout: ParameterLayout) -> StageState:
    """A stage's state, byte for byte as it was saved, mapped from its files and checked.

    Raises SettingsError if they are missing or damaged.
    """
    record = _record(info, index)
    weights = _mapped_weights(info, index, layout)
    moments: dict[str, Array] = {}
    try:
        file = TensorFile(info.path / _optimizer_file(index))
        scalars = {key: float(value) for key, value in json.loads(file.metadata["scalars"]).items()}
        for moment in sorted({key.split("/")[0] for key in file.names}):
            whole = f"{moment}{_WHOLE}"
            moments[moment] = file.flat(
                [whole] if whole in file.names else [f"{moment}/{name}" for name in layout.names]
            )
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise _unreadable(info, index, error) from error
    state = StageState(info.version, layout, weights, moments, scalars, list(record.certified_norms), record.name)
    _check_digest(info, index, state_digest(state), record.digest)
    return state


def load_weights(info: CheckpointInfo, index: int, layout: ParameterLayout) -> NDArray[np.float32]:
    """A stage's weights as they were saved, mapped from their file and checked, without anything else of it.

    Raises SettingsError if it is missing or damaged.
    """
    weights, record = _mapped_weights(info, index, layout), _record(info, index)
    _check_digest(info, index, weights_digest(weights), record.weights_digest)
    return weights


def weights_digest(weights: NDArray[np.float32]) -> bytes:
    """BLAKE3."""
    return bulk_digest(weights.data.cast("B"))


def _record(info: CheckpointInfo, index: int) -> StageRecord:
    if not 0 <= index < len(info.stages):
        raise SettingsError(f"stage {index}: the checkpoint {info.path} has stages 0 to {len(info.stages) - 1}")
    return info.stages[index]


def _mapped_weights(info: CheckpointInfo, index: int, layout: ParameterLayout) -> NDArray[np.float32]:
    _record(info, index)
    try:
        weights: NDArray[np.float32] = TensorFile(info.path / _weights_file(index)).flat(layout.names)
        if weights.dtype != np.float32 or weights.size != layout.num_values:
            raise ValueError(f"{weights.size} weights of {weights.dtype}, not {layout.num_values}")
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise _unreadable(info, index, error) from error
    return weights


def _unreadable(info: CheckpointInfo, index: int, error: Exception) -> SettingsError:
    return SettingsError(f"stage {index} of {info.path} cannot be read: {error}; use another checkpoint")


def _check_digest(info: CheckpointInfo, index: int, found: bytes, said: bytes) -> None:
    if found != said:
        raise SettingsError(
            f"stage {index} of {info.path} is damaged: digest {found.hex()[:16]}, {INFO_FILE} says {said.hex()[:16]}; "
            "use another checkpoint"
        )


def checkpoint_path(folder: Path, version: int) -> Path:
    """Where the checkpoint of a version is, or would be."""
    return folder / f"{_PREFIX}{version:08d}"


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a folder, oldest version first."""
    return sorted(path.parent for path in folder.glob(f"{_PREFIX}*/{INFO_FILE}"))


def latest_checkpoint(folder: Path) -> CheckpointInfo | None:
    """The newest complete checkpoint of a folder; None if it has none yet."""
    found = checkpoints(folder)
    return read_checkpoint(found[-1]) if found else None


def keep_last(folder: Path, count: int, spared: Sequence[int] = ()) -> list[Path]:
    """Remove all but the newest `count` checkpoints, and besides them the first MAX_SPARED that are here of the
    versions `spared`; return what was removed."""
    if count < 1:
        raise SettingsError(f"keep_last = {count}: keep at least 1 checkpoint")
    old = checkpoints(folder)[:-count]
    extra = [path for version in spared if (path := checkpoint_path(folder, version)) in old][:MAX_SPARED]
    removed = [path for path in old if path not in extra]
    for path in removed:
        # Renamed first: a removal that is interrupted leaves nothing that looks like a checkpoint.
        doomed = folder / f"{_PARTIAL}{path.name.removeprefix(_PREFIX)}"
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(path, doomed)
        shutil.rmtree(doomed)
    return removed


def finish_sealed(folder: Path, version: int, digests: Sequence[bytes]) -> Path | None:
    """Make visible what a writer that was killed had sealed, if it holds the states with these digests and is the
    newest of the folder; its folder then. Call it before the folder's only writer starts.
    """
    partial, target = folder / f"{_PARTIAL}{version:08d}", checkpoint_path(folder, version)
    latest = latest_checkpoint(folder)
    if not (partial / INFO_FILE).is_file() or (latest is not None and latest.version >= version):
        return None
    try:
        info = read_checkpoint(partial)
    except SettingsError:  # it was killed in the middle of that
        return None
    if (info.version, [record.digest for record in info.stages]) != (version, [*digests]):
        return None
    return _shown(partial, target)


def _shown(partial: Path, target: Path) -> Path:
    os.rename(partial, target)
    _sync(target.parent)
    return target


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove what interrupted writes left; call it before the folder's only writer starts."""
    leftovers = sorted(folder.glob(f"{_PARTIAL}*"))
    for path in leftovers:
        shutil.rmtree(path)
    return leftovers


def _weights_file(index: int) -> str:
    return f"stage-{index}.safetensors"


def _optimizer_file(index: int) -> str:
    return f"stage-{index}{_OPTIMIZER}"


def is_optimizer_file(name: str) -> bool:
    """Whether a checkpoint's file holds nothing but what training goes on from."""
    return name.startswith("stage-") and name.endswith(_OPTIMIZER)


def _moment_tensors(layout: ParameterLayout, moment: str, values: Array) -> list[tuple[str, NDArray[Any]]]:
    if "/" in moment:
        raise ValueError(f"moment {moment!r} has a slash in its name")
    if len(values) != layout.num_values:
        return [(f"{moment}{_WHOLE}", values)]
    return _tensors(layout, f"{moment}/", values)


def _tensors(layout: ParameterLayout, prefix: str, values: NDArray[Any]) -> list[tuple[str, NDArray[Any]]]:
    """In the layout's order: in a file they make up the vector again."""
    tensors = zip(layout.names, layout.offsets, layout.sizes, layout.shapes, strict=True)
    return [(prefix + name, values[at : at + size].reshape(shape)) for name, at, size, shape in tensors]


def _info_of_fields(path: Path, fields: dict[str, Any]) -> CheckpointInfo:
    model = fields["model"]
    meta = CheckpointMeta(
        model=ModelSettings(
            config_json=json.dumps(model["config"], sort_keys=True, separators=(",", ":")),
            stage_layers=tuple((int(start), int(stop)) for start, stop in model["stage_layers"]),
            compute_dtype=model["compute_dtype"],
            recompute=bool(model["recompute"]),
            adapters=read_table(AdapterSettings, model["adapters"]),
            subspace=int(model["subspace"]),
            subspace_seed=int(model["subspace_seed"]),
        ),
        tokenizer=str(fields["tokenizer"]),
        run=dict(fields["run"]),
        data_position=dict(fields["data_position"]),
        lineage=dict(fields["lineage"]),
    )
    stages = tuple(
        StageRecord(
            bytes.fromhex(stage["digest"]),
            bytes.fromhex(stage["weights"]),
            bytes.fromhex(stage["name"]),
            tuple(float(norm) for norm in stage["certified_norms"]),
        )
        for stage in fields["stages"]
    )
    if len(stages) != meta.model.num_stages:
        raise ValueError(f"{len(stages)} stages are listed, the model has {meta.model.num_stages}")
    return CheckpointInfo(path, int(fields["version"]), meta, stages)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
