"""A manifest that goes on from a Hugging Face folder: what `swarm init --checkpoint` writes, and says of the model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swarm.core.errors import SettingsError
from swarm.core.tables import show
from swarm.manifest.file import Manifest
from swarm.manifest.tables import DataTable, ManifestTables, ModelTable

LONGEST_SEQUENCE = 1024
"""Proposed for models that were made for more: memory grows with it."""


def tables_from(folder: Path) -> ManifestTables:
    """The defaults, but for the model, its tokenizer and as many tokens in a sample as its positions allow.

    Raises SettingsError for a folder that holds no model that can be trained.
    """
    from swarm.manifest.model import checkpoint_config
    from swarm.model.families import canonical_config_json, validate_config

    folder = folder.absolute()
    if not (folder / "tokenizer.json").is_file():
        raise SettingsError(
            f"{folder} has no tokenizer.json; save its tokenizer there: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers writes it"
        )
    shape = validate_config(canonical_config_json(checkpoint_config(folder)))
    return ManifestTables(
        model=ModelTable(checkpoint=str(folder), stages=min(ModelTable.stages, shape.num_layers)),
        data=DataTable(tokenizer=str(folder), sequence_length=min(LONGEST_SEQUENCE, shape.max_positions)),
    )


def what_was_read(manifest: Manifest) -> list[str]:
    """Lines for people: what a manifest took from its checkpoint."""
    import json

    from swarm.model.families import validate_config

    config: Mapping[str, Any] = json.loads(manifest.model.config_json)
    shape, stages = validate_config(manifest.model.config_json), manifest.model.num_stages
    special = [f"{name.removesuffix('_token_id')} {show(config[name])}" for name in _SPECIAL if config.get(name)]
    tied = "its embeddings are tied, and stay so" if stages == 1 else (
        f"its embeddings are tied; with {stages} stages the head trains on its own and is exported so: "
        "model.stages = 1 keeps them tied"
    )  # fmt: skip
    return [
        f"{shape.model_type}: {shape.num_layers} layers of width {shape.hidden_size}, {shape.vocab_size} tokens, "
        f"up to {shape.max_positions} in a sequence, weights in {config['dtype']}",
        *([f"special tokens: {', '.join(special)}"] if special else []),
        *([tied] if shape.tied else []),
    ]


_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
