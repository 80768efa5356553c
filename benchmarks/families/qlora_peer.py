"""The memory of a peer that has all of a model of eight layers of width 2048, frozen in NF4, while it trains adapters.

A host and the peer are programs, as volunteers have them.
"""

from pathlib import Path
from typing import Any

from benchmarks.families.given import write_given
from benchmarks.owner.memory import watched
from swarm.core.plan import round_bytes
from swarm.core.settings import AdapterSettings, ModelSettings
from swarm.manifest.checkpoint import fields_from
from swarm.manifest.model import stage_num_parameters
from swarm.manifest.text import manifest_text
from swarm.model.families import canonical_config_json

RANK = 16
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}
STEPS, STEPS_S = 3, 600.0


def model_settings(stages: int) -> ModelSettings:
    """The model, cut."""
    layers = CONFIG["num_hidden_layers"]
    cut = tuple((at * layers // stages, (at + 1) * layers // stages) for at in range(stages))
    adapters = AdapterSettings(rank=RANK, alpha=2.0 * RANK, base="nf4")
    return ModelSettings(config_json=canonical_config_json(CONFIG), stage_layers=cut, adapters=adapters)


def round_share() -> float:
    """Bytes of a round of adapters over those of a round of the whole model."""
    sizes = stage_num_parameters(model_settings(2))
    return sum(round_bytes("int8", size, 4) for size in sizes) / sum(round_bytes("int8", s.frozen, 4) for s in sizes)


def measured(root: Path) -> dict[str, int]:
    """The most that the peer held in some steps, with its p2pd and guard; and what it had mapped of files, its base and
    libraries, which the system may take back."""
    given, manifest = root / "large", root / "large.toml"
    write_given(given, CONFIG, dtype="bfloat16", shard_size="1GB")
    fields = fields_from(given, {"stages": 1})
    fields["model"].pop("preset")
    fields["data"] |= {"max_text_mb": 1, "sequence_length": 128}
    tables: dict[str, Any] = {
        **fields,
        "adapters": {"rank": RANK, "alpha": 2.0 * RANK, "base": "nf4"},
        "batch": {"microbatch_size": 1, "target_tokens": 256},
        "optimizer": {"total_steps": STEPS, "warmup_steps": 1},
    }
    manifest.write_text(manifest_text(tables))
    (peer,) = watched(manifest, root, [0], steps=STEPS, seconds=STEPS_S).peers
    return {"held_bytes": peer.all_bytes, "mapped_bytes": peer.mapped_bytes}
