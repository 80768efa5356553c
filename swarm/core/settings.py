"""This is where a run's settings live: what every peer must agree on, checked, frozen and hashed.

`swarm.manifest` reads them from a user's TOML and from a stranger's bytes.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

ActivationCodecName = Literal["fp32", "bf16", "int8", "int4"]
AveragingCodecName = Literal["fp32", "bf16", "int8", "int4", "topk"]

PART_VALUES = 1 << 18
"""A part is at least this many consecutive values of a stage's flattened parameters, whatever the codec; see
`swarm.averaging.parts`."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The model every stage is cut from."""

    config_json: str
    """Canonical JSON (sorted keys, no spaces) of the Hugging Face config; `model_type` names the family."""
    stage_layers: tuple[tuple[int, int], ...]
    """Decoder layers [start, stop) of each stage; together all layers, in order."""
    compute_dtype: Literal["fp32", "bf16"] = "fp32"
    """bf16 runs forward and backward under autocast; weights and gradients stay fp32."""
    recompute: bool = False
    """Keep only a microbatch's input and run forward again at backward time: less memory, a third more compute."""

    @property
    def num_stages(self) -> int:
        return len(self.stage_layers)


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The token files and how samples are cut from them."""

    tokenizer: str
    """"bytes", or the name of the tokenizer folder that is shipped with the run."""
    vocab_size: int
    token_bytes: Literal[1, 2, 4]
    """Width of one token in the files: little-endian unsigned."""
    num_train_tokens: int
    num_held_out_tokens: int
    train_digest: bytes
    """SHA-256 of the training token file."""
    held_out_digest: bytes
    sequence_length: int
    """Tokens of input in a sample; a sample takes one more as the last target."""
    chunk_tokens: int
    """Tokens in a chunk, the unit of leases and of the permutation (16 MiB of tokens by default)."""
    seed: int


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    microbatch_size: int
    """Samples in a microbatch."""
    target_tokens: int
    """Target tokens in a step; a step closes when its microbatches hold at least this many."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    name: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    """Applied to tensors of two or more dimensions only."""
    momentum: float = 0.9
    """SGD only."""
    max_norm: float = 1.0
    """Gradient norm of the whole model; a stage clips at max_norm * sqrt(its parameters / all)."""
    skip_norm_factor: float = 16.0
    """A step whose certified gradient is longer than this many times the median of the last 16 is skipped (see
    `swarm.core.step_rule`); 0: only what is not finite is."""
    correction: Literal["none", "nadamw", "extrapolate"] = "none"
    """What softens stale gradients when delay = 1: Nesterov's AdamW, or computing the next step's
    microbatches on weights extrapolated by the last update."""
    moments: Literal["fp32", "int8"] = "fp32"
    """How AdamW's moments are kept: 8 bytes a parameter, or 2; exact both ways."""
    warmup_steps: int = 20
    total_steps: int = 200
    """The run ends at this version."""
    final_learning_rate_share: float = 0.1
    """The cosine schedule ends at this share of `learning_rate`."""

    @property
    def moment_bytes(self) -> float:
        """Bytes a parameter that its moments take."""
        if self.name == "sgd":
            return 4.0
        return 8.0 if self.moments == "fp32" else 2.0 + 4.0 / 128


@dataclass(frozen=True, kw_only=True)
class CodecSettings:
    activations: ActivationCodecName = "int8"
    activation_gradients: ActivationCodecName = "int8"
    averaging: AveragingCodecName = "int8"
    """int4 and topk come with error feedback: what a contribution leaves unsaid goes into its maker's next one."""


@dataclass(frozen=True, kw_only=True)
class AveragingSettings:
    rule: Literal["mean", "centered_clip", "trimmed_mean", "median"] = "centered_clip"
    delay: Literal[0, 1] = 0
    """0: sources wait for the round. 1: microbatches of step t + 1 go on with version t while round t runs."""
    sync_steps: int = 20
    """The first steps of a run with delay = 1 that are synchronous all the same."""


@dataclass(frozen=True, kw_only=True)
class AuditSettings:
    """What replicas spend on auditing each other, as shares of the audited peer's own work."""

    hop_budget: float = 0.08
    """One microbatch replayed whole."""
    contribution_budget: float = 0.07
    """Every microbatch of a contribution replayed."""
    reducer_share: float = 0.05
    """Of reduced parts, recomputed."""
    retained_versions: int = 4
    """A peer keeps what its contribution was made from until this many versions later; draws are revealed after two."""
    agreements_to_promote: int = 10
    """Replays, of 16 versions, in which a newcomer must agree with the members before it trains; 0: no probation."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    every_steps: int = 48
    """The host archives a checkpoint at these versions and at the last one."""
    snapshot_every: int = 8
    """Versions between the snapshots that peers keep for joiners; divides `every_steps`."""


@dataclass(frozen=True, kw_only=True)
class LimitSettings:
    founders_per_stage: int = 1
    """Peers of each stage the host waits for before it signs the run's genesis."""
    max_peers_per_stage: int = 64
    max_in_flight: int = 4
    """Microbatches one peer holds at once; past it a peer says BUSY."""
    min_replicas: int = 2
    """A stage gives no peer to another below this many."""
    rebalance_s: float = 0.0
    """Seconds between two looks at who should move to another stage; 0: nobody moves, as in all public runs."""
    max_microbatch_attempts: int = 20
    """After this many failed sends of one microbatch in one step its source lets it go to a later step."""


@dataclass(frozen=True, kw_only=True)
class DeadlineSettings:
    """Upper bounds in seconds; measured times shorten them, never lengthen them."""

    call_s: float = 10.0
    """A small request and its answer."""
    hop_s: float = 60.0
    """A microbatch's way from a stage to the loss and back."""
    round_phase_s: float = 10.0
    """Each phase of an averaging round: commitments, roster, parts, result."""
    step_s: float = 120.0
    """A step that has its first microbatch closes at this age with whatever it holds."""
    straggler_s: float = 2.0
    """How long a full step waits for microbatches already under way; they are dropped and counted past it."""
    lease_s: float = 15.0
    """A peer not heard of for this long has left."""
    drain_s: float = 30.0
    state_transfer_s: float = 600.0


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Everything the peers of a run agree on. Its canonical bytes hash to the run id."""

    name: str
    protocol: int
    model: ModelSettings
    data: DataSettings
    batch: BatchSettings
    optimizer: OptimizerSettings
    codecs: CodecSettings = field(default_factory=CodecSettings)
    averaging: AveragingSettings = field(default_factory=AveragingSettings)
    audits: AuditSettings = field(default_factory=AuditSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    limits: LimitSettings = field(default_factory=LimitSettings)
    deadlines: DeadlineSettings = field(default_factory=DeadlineSettings)
    trust: Literal["friends", "public"] = "friends"
    model_licence: str = "not stated"
    """As the host states it; shown to volunteers before they join."""
    data_licence: str = "not stated"
    initial_state_digests: tuple[bytes, ...] = ()
    """State digest of each stage at version 0: weights are made once and shipped, never re-seeded."""

    @property
    def microbatch_tokens(self) -> int:
        """Target tokens in a full microbatch."""
        return self.batch.microbatch_size * self.data.sequence_length

    @property
    def replays(self) -> bool:
        """Whether replicas replay each other's work."""
        return self.trust == "public"

    @property
    def has_probation(self) -> bool:
        """Whether newcomers replay drawn work before they train."""
        return self.replays and self.audits.agreements_to_promote > 0

    @property
    def retained_results(self) -> int:
        """Results whose bytes a peer keeps, for late ones and to rebuild what is audited; snapshots cover the rest."""
        return self.checkpoint.snapshot_every + 2 + (self.audits.retained_versions if self.replays else 0)

    @property
    def microbatches_per_step(self) -> int:
        return math.ceil(self.batch.target_tokens / self.microbatch_tokens)

    def delay_at(self, step: int) -> int:
        """Versions a microbatch of `step` may be behind: 0 while the run is synchronous."""
        return 0 if step < self.averaging.sync_steps else self.averaging.delay
