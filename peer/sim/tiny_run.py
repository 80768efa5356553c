"""A run small enough to be simulated with many seeds: a tiny model, and a language to learn.

The language: of each token's four successors, drawn once, the first comes most often. Nobody beats its entropy, 0.98
nats a token; who knows nothing has the logarithm of the vocabulary.
"""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swarm.core.ids import MicrobatchId
from swarm.core.settings import (
    AuditSettings,
    AveragingSettings,
    BatchSettings,
    CodecSettings,
    DataSettings,
    ModelSettings,
    OptimizerSettings,
    RunSettings,
)
from swarm.model.families import canonical_config_json
from swarm.release import PROTOCOL

Ids = NDArray[np.int64]

SUCCESSORS = (0.65, 0.2, 0.1, 0.05)
LANGUAGE_SEED = 0
"""The same language in every run: seeds differ in weights, samples, identities and chance."""
HELD_OUT = 1 << 40
"""Held-out microbatches are drawn from ids past this one."""


@dataclass(frozen=True, kw_only=True)
class TinyRun:
    """What a simulated run consists of; everything that is not named here is as in any run."""

    num_stages: int = 2
    """Of one layer each."""
    num_replicas: int = 8
    hidden_size: int = 32
    vocab_size: int = 64
    sequence_length: int = 16
    microbatches_per_step: int = 16
    """Of two samples; dealt out evenly to the peers of each stage."""
    total_steps: int = 150
    learning_rate: float = 1e-2
    audits: AuditSettings = field(default_factory=AuditSettings)
    codecs: CodecSettings = field(default_factory=CodecSettings)
    averaging: AveragingSettings = field(default_factory=AveragingSettings)
    distinct_microbatches: int | None = None
    """So many come again and again, until they are known by heart; None: each is new."""
    language_changes_at: int | None = None
    """Number of the microbatch from which on another language is learned; None: it stays the same."""

    def settings(self) -> RunSettings:
        """The run's, without the digests of its first states."""
        config: dict[str, Any] = {
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": 2 * self.hidden_size,
            "num_hidden_layers": self.num_stages,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.sequence_length,
            "initializer_range": 0.1,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }
        layers = tuple((stage, stage + 1) for stage in range(self.num_stages))
        return RunSettings(
            name="simulated",
            protocol=PROTOCOL,
            model=ModelSettings(config_json=canonical_config_json(config), stage_layers=layers),
            data=DataSettings(
                tokenizer="none",
                vocab_size=self.vocab_size,
                token_bytes=2,
                num_train_tokens=1 << 24,
                num_held_out_tokens=1 << 12,
                train_digest=bytes(32),
                held_out_digest=bytes(32),
                sequence_length=self.sequence_length,
                chunk_tokens=1 << 16,
                seed=0,
            ),
            batch=BatchSettings(microbatch_size=2, target_tokens=self.microbatches_per_step * 2 * self.sequence_length),
            optimizer=OptimizerSettings(learning_rate=self.learning_rate, warmup_steps=5, total_steps=self.total_steps),
            codecs=self.codecs,
            averaging=self.averaging,
            audits=self.audits,
            trust="public",
        )

    def batch(self, number: MicrobatchId, *, seed: int) -> tuple[Ids, Ids]:
        """Tokens and targets of a microbatch, each (B, L)."""
        is_second = self.language_changes_at is not None and number >= self.language_changes_at
        if self.distinct_microbatches is not None and number < HELD_OUT:
            number = MicrobatchId(number % self.distinct_microbatches)
        rng = np.random.default_rng((seed, number))
        shape = (2, self.sequence_length)
        choices = rng.choice(len(SUCCESSORS), size=shape, p=SUCCESSORS)
        successors = _successors(self.vocab_size, LANGUAGE_SEED + is_second)
        ids = np.empty((shape[0], shape[1] + 1), dtype=np.int64)
        ids[:, 0] = rng.integers(self.vocab_size, size=shape[0])
        for place in range(shape[1]):
            ids[:, place + 1] = successors[ids[:, place], choices[:, place]]
        return np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:])


@cache
def _successors(vocab_size: int, seed: int) -> Ids:
    """Of each token, (V, 4)."""
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(vocab_size) for _ in SUCCESSORS], axis=1)
