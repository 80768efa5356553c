"""A model's tensors as a checkpoint folder has them: some under other names, experts one by one, in several files.

Only the files that hold what is asked for are opened, and of them only that is read.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from swarm.core.errors import SettingsError
from swarm.model.families import Family
from swarm.model.layout import ParameterLayout

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Of safetensors, by PyTorch's names: the types in which weights are read and exported."""


@dataclass(frozen=True)
class Piece:
    """A tensor on disk."""

    name: str
    where: tuple[int | slice, ...] = ()
    """Which part of the model's tensor it is; () is all of it."""


def pieces_of(family: Family, name: str, shape: tuple[int, ...]) -> tuple[Piece, ...]:
    """What a model's tensor is on disk, as the family's published checkpoints have it."""
    for suffix, stored in family.stored:
        if not name.endswith(suffix):
            continue
        path = name.removesuffix(suffix)
        if len(shape) < 3:
            return (Piece(path + stored[0]),)
        rows = shape[1] // len(stored)
        return tuple(
            Piece(path + pattern.format(expert), (expert, slice(at * rows, (at + 1) * rows)))
            for expert in range(shape[0])
            for at, pattern in enumerate(stored)
        )
    return (Piece(name),)


def read_tensors(source: Path, family: Family, layout: ParameterLayout, tied_head: str | None) -> NDArray[np.float32]:
    """The layout's tensors as one flat vector; `tied_head` is read from the embedding. Raises SettingsError naming the
    file and tensor at fault."""
    files = _files_by_tensor(source)
    flat = np.empty(layout.num_values, dtype=np.float32)
    by_file: dict[str, list[tuple[NDArray[np.float32], str]]] = {}
    for name, view in layout.views(flat).items():
        # A tied checkpoint has no tensor for the head, or one that is not used: its embedding counts.
        for piece in _found(files, family, family.embedding_name if name == tied_head else name, view.shape, source):
            by_file.setdefault(files[piece.name], []).append((view[piece.where], piece.name))
    for file, wanted in sorted(by_file.items()):
        _read_file(source / file, wanted)
    return flat


def stored_dtype(source: Path) -> str:
    """In which type most of a checkpoint is, by PyTorch's name; float32 for one that nobody could train in."""
    from safetensors import safe_open

    files = _files_by_tensor(source)
    if not files:
        return "float32"
    name, file = min(files.items())
    path = _checked_file(source, file)
    with safe_open(path, framework="pt") as tensors:
        return DTYPES.get(tensors.get_slice(name).get_dtype(), "float32")


def _read_file(path: Path, wanted: Iterable[tuple[NDArray[np.float32], str]]) -> None:
    from safetensors import SafetensorError, safe_open

    _checked_file(path.parent, path.name)
    try:
        with safe_open(path, framework="pt") as tensors:
            for view, name in wanted:
                shape = tuple(tensors.get_slice(name).get_shape())
                if shape != view.shape:
                    raise SettingsError(
                        f"{path}: tensor {name} has shape {shape}, the model's config asks for {view.shape}; use the "
                        "checkpoint's own config"
                    )
                np.copyto(view, tensors.get_tensor(name).float().numpy())
    except (OSError, SafetensorError) as error:
        raise SettingsError(f"{path} cannot be read: {error}; download it again") from error


def _found(files: dict[str, str], family: Family, name: str, shape: tuple[int, ...], source: Path) -> tuple[Piece, ...]:
    """The tensor's pieces as this folder has them. Raises SettingsError if it has not."""
    bare = name.removeprefix(family.decoder_prefix)
    for pieces in (pieces_of(family, name, shape), (Piece(name),), (Piece(bare),)):
        if all(piece.name in files for piece in pieces):
            return pieces
    missing = next(piece.name for piece in pieces_of(family, name, shape) if piece.name not in files)
    raise SettingsError(
        f"{source} has no tensor {missing}; the model's config and the checkpoint must be of one architecture"
    )


def _files_by_tensor(source: Path) -> dict[str, str]:
    """File name of each tensor of a checkpoint, in one file or sharded with an index."""
    from safetensors import SafetensorError, safe_open

    if (source / INDEX_FILE).is_file():
        try:
            return dict(json.loads((source / INDEX_FILE).read_text())["weight_map"])
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise SettingsError(f"{source / INDEX_FILE} is no safetensors index: {error}") from error
    if not (source / SINGLE_FILE).is_file():
        raise SettingsError(
            f"{source} holds neither {SINGLE_FILE} nor {INDEX_FILE}; convert the checkpoint to safetensors "
            "(`save_pretrained` of transformers writes it)"
        )
    try:
        with safe_open(source / SINGLE_FILE, framework="pt") as tensors:
            return dict.fromkeys(tensors.keys(), SINGLE_FILE)
    except (OSError, SafetensorError) as error:
        raise SettingsError(f"{source / SINGLE_FILE} cannot be read: {error}; download it again") from error


def _checked_file(source: Path, file: str) -> Path:
    # An index is data: it may not lead out of its folder.
    if Path(file).name != file or not (source / file).is_file():
        raise SettingsError(f"{source} lacks {file}, which {INDEX_FILE} names; download it again")
    return source / file
