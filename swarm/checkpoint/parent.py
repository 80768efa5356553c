"""What is kept of the checkpoint that a run began from, beside its weights: its name and digest, and how it generates.

<folder>/parent.json               name, SHA-256 of the weights' files, type, whether it was tied
         generation_config.json    as it came, if there was one
"""

import json
import shutil
from pathlib import Path
from typing import Any

from swarm.checkpoint.record import files_below
from swarm.core.canonical import digest
from swarm.disk.whole_file import whole_file

PARENT = "parent"
"""The folder's name within a checkpoint."""
INFO = "parent.json"
GENERATION = "generation_config.json"


def keep_parent(source: Path, folder: Path) -> None:
    """Write what is kept of the Hugging Face checkpoint in `source` to `folder`. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    if (source / GENERATION).is_file():
        shutil.copyfile(source / GENERATION, folder / GENERATION)
    with whole_file(folder / INFO) as partial:
        partial.write_text(json.dumps({"name": source.name, "digest": weights_digest(source)}, indent=1) + "\n")


def weights_digest(source: Path) -> str:
    """Of the names and bytes of a checkpoint's safetensors files, in hex."""
    files = [file for file in files_below(source, "*.safetensors") if "/" not in file.name]
    return digest("parent-weights", [[file.name, file.sha256] for file in files]).hex()


def read_parent(folder: Path) -> dict[str, Any] | None:
    """None for a run that began from weights of its own."""
    if not (folder / INFO).is_file():
        return None
    return dict(json.loads((folder / INFO).read_text()))
