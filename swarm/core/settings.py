"""A run's settings: what every peer must agree on, checked, frozen and hashed.

Each field is declared here once: its type, what values it takes, its default, and, where a person writes it, the
sentence above it in the file that `swarm init` writes. `swarm.manifest.file` reads settings from a user's TOML,
`swarm.manifest.value` from a stranger's bytes.
"""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from swarm.core.cohorts import MAX_MEMBERS
from swarm.core.tables import Amendable, Bounds, Matching, Table
from swarm.core.transfers import LEAST_MBIT

ActivationCodecName = Literal["fp32", "bf16", "int8", "int4", "int4h"]
AveragingCodecName = Literal["fp32", "bf16", "int8", "int4", "int2", "topk"]

_INT4_BYTES = 0.5 + 2 / 64
BYTES_A_VALUE: Mapping[AveragingCodecName, float] = {
    "fp32": 4.0,
    "bf16": 2.0,
    "int8": 1.0 + 2 / 128,
    "int4": _INT4_BYTES,
    "int2": 0.25 + 2 / 64,
    "topk": _INT4_BYTES,
}
"""Of a round's result: int8 has a bf16 scale for each 128 values, int4 and int2 for each 64."""

PART_VALUES = 1 << 18
"""A part is at least this many consecutive values of a stage's flattened parameters, whatever the codec; see
`swarm.averaging.parts`."""
LARGEST_PART_VALUES = 1 << 20
PARTS_OF_A_REDUCER = 8
"""Fewer, and a round's first and last part, for which others wait, would be too much of it."""

RunName = Annotated[str, Matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")]
Licence = Annotated[str, Matching(r"[ -~]{1,120}")]
Trust = Literal["friends", "public"]
ComputeDtype = Literal["fp32", "bf16"]
Packing = Literal["packed", "masked"]
LossOn = Literal["all", "answers"]
Seed = Annotated[int, Bounds(least=0, most=(1 << 63) - 1)]
NumTokens = Annotated[int, Bounds(least=2, most=1 << 40)]
TokenPlace = Annotated[int, Bounds(least=0, most=1 << 40)]
Weight = Annotated[int, Bounds(least=1, most=1000)]
SequenceLength = Annotated[int, Bounds(least=1, most=1 << 20)]
Digest = Annotated[bytes, Bounds(least=32, most=32)]
Steps = Annotated[int, Bounds(least=1, most=1 << 31)]
StepsOrNone = Annotated[int, Bounds(least=0, most=1 << 31)]
Decay = Annotated[float, Bounds(least=0, below=1)]
WorkShare = Annotated[float, Bounds(least=0, most=64)]
BoundFactor = Annotated[float, Bounds(least=0.5, most=2)]
TensorKind = Literal["activation", "gradient", "contribution"]
"""What replays are compared with."""
NumPeers = Annotated[int, Bounds(least=1, most=MAX_MEMBERS)]
Seconds = Annotated[float, Bounds(above=0, most=86400)]


KEPT_SNAPSHOTS = 3
"""Of a stage, on a peer's disk: a transfer of one may last while two more are made."""
MOST_STEPS = 1 << 20
"""Of a run: at a minute a step, two years."""


@dataclass(frozen=True, kw_only=True)
class AdapterSettings(Table):
    """What is trained, if not the model itself: LoRA, two narrow matrices beside each product."""

    rank: Annotated[
        int,
        Bounds(least=0, most=1024),
        "LoRA: train two matrices of this rank beside each of the modules, and nothing else; 0: train the whole model.",
    ] = 0
    alpha: Annotated[
        float, Bounds(above=0, most=65536), "What they add is multiplied by alpha / rank, as peft has it."
    ] = 16.0
    modules: Annotated[
        tuple[Annotated[str, Matching(r"[a-z0-9_-]{1,64}")], ...],
        Bounds(least=1, most=32),
        'Names of linear modules within a layer, as ["q_proj", "v_proj"], or "all-linear" alone: all of them.',
    ] = ("all-linear",)
    base: Annotated[
        Literal["plain", "nf4"],
        'How the frozen base is kept: "plain", as its checkpoint has it, or "nf4" (QLoRA): its layers\' matrices in 4 '
        "bits and a half a value, as bitsandbytes has them.",
    ] = "plain"

    def disagreement(self, given: Collection[str]) -> str | None:
        if not self.rank and self.base != "plain":
            return f'base = "{self.base}" is of a frozen base; give adapters.rank too, such as 16'
        if "all-linear" in self.modules and len(self.modules) > 1:
            return f'modules = {list(self.modules)} names more beside "all-linear"; keep that, or the names'
        if len(set(self.modules)) < len(self.modules):
            return f"modules = {list(self.modules)} names one twice; name each once"
        return None

    @property
    def scale(self) -> float:
        """What the adapters' product is multiplied by."""
        return self.alpha / self.rank


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Table):
    """The model every stage is cut from."""

    config_json: Annotated[str, Bounds(most=1 << 20)]
    """Canonical JSON (sorted keys, no spaces) of the Hugging Face config; `model_type` names the family."""
    stage_layers: Annotated[tuple[tuple[int, int], ...], Amendable()]
    """Decoder layers [start, stop) of each stage; together all layers, in order."""
    compute_dtype: ComputeDtype = "fp32"
    """bf16 runs forward and backward under autocast; weights and gradients stay fp32."""
    recompute: bool = False
    """Keep only a microbatch's input and run forward again at backward time."""
    adapters: AdapterSettings = field(default_factory=AdapterSettings)
    subspace: Annotated[int, Bounds(least=1, most=1 << 16)] = 1
    """Between stages a token has so many times fewer values than the model is wide (`swarm.model.subspace`); 1: it has
    all of them."""
    subspace_seed: Seed = 0
    """Of what is fixed in such a model; 0 in others."""

    @property
    def sends_ids(self) -> bool:
        """Whether an activation means nothing without its tokens, which travel with it."""
        return self.subspace > 1 and self.num_stages > 1

    @property
    def has_base(self) -> bool:
        """Whether the model itself is frozen, and only adapters are trained: these are the stages' parameters then."""
        return self.adapters.rank > 0

    @property
    def num_stages(self) -> int:
        return len(self.stage_layers)

    @property
    def routes_tokens(self) -> bool:
        """Layers choose experts for every token: two honest machines may choose otherwise."""
        return "num_experts_per_tok" in json.loads(self.config_json)

    @property
    def arithmetic(self) -> str:
        """How far apart two honest machines may come: audits' bounds go by it."""
        return f"{self.compute_dtype}, routed" if self.routes_tokens else self.compute_dtype


@dataclass(frozen=True, kw_only=True)
class DataSettings(Table):
    """The token files and how samples are cut from them."""

    tokenizer: Annotated[str, Matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")]
    """"bytes", or the name of the tokenizer folder that is shipped with the run."""
    vocab_size: Annotated[int, Bounds(least=1, most=1 << 32)]
    token_bytes: Literal[1, 2, 4]
    """Width of one token in the files: little-endian unsigned."""
    num_train_tokens: NumTokens
    num_held_out_tokens: NumTokens
    train_digest: Digest
    """Of the list of the training token file's pieces (`swarm.data.pieces`)."""
    held_out_digest: Digest
    sequence_length: SequenceLength
    """Tokens of input in a sample; a sample takes one more as the last target."""
    chunk_tokens: NumTokens
    """Tokens in a chunk, the unit of leases (16 MiB of tokens by default)."""
    seed: Seed
    mixture: Annotated[tuple[tuple[TokenPlace, NumTokens, Weight], ...], Bounds(most=64)] = ()
    """First token, number of tokens and weight of each source in the training file; empty: all of it is one."""
    documents: Packing = "packed"
    """"masked": samples lie one after another in the files, none across another's end, and a bit of each token says
    whether a document begins with it."""
    loss_on: LossOn = "all"
    """"answers": another bit of each token says whether it is to be learnt."""
    num_train_targets: NumTokens | None = None
    """Tokens of the training file that are to be learnt; None: all of them."""

    @property
    def sample_tokens(self) -> int:
        """That a sample takes: one more for the last target, but where samples end with their last document."""
        return self.sequence_length + (self.documents == "packed")

    @property
    def num_held_out_samples(self) -> int:
        return (self.num_held_out_tokens - self.sample_tokens) // self.sequence_length + 1


@dataclass(frozen=True, kw_only=True)
class BatchSettings(Table):
    microbatch_size: Annotated[
        int, Bounds(least=1, most=1 << 16), "Samples that travel through the stages together."
    ] = 8
    target_tokens: Annotated[
        int, Bounds(least=1, most=1 << 40), Amendable(), "Tokens of an optimizer step's samples, over all peers."
    ] = 8192
    """A step closes when its microbatches hold at least this many."""


@dataclass(frozen=True, kw_only=True)
class RateTable(Table):
    """Tensors with a learning rate of their own."""

    tensors: Annotated[str, Matching(r"[A-Za-z0-9_]{1,64}(\.[A-Za-z0-9_]{1,64}){0,7}")]
    """What stands in their names between dots, as "embed_tokens", "layers.0" or "lora_B"."""
    times: Annotated[float, Bounds(least=0, most=1000)]
    """How often they have the others' rate; 0: they stay as they are."""

    def fits(self, name: str) -> bool:
        """Whether a tensor of this name is one of them."""
        return f".{self.tensors}." in f".{name}."


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings(Table):
    name: Annotated[
        Literal["adamw", "muon", "sgd"],
        '"adamw", "sgd", or "muon": that for matrices within layers, AdamW for the rest, at AdamW\'s learning rate.',
    ] = "adamw"
    learning_rate: Annotated[
        float,
        Bounds(above=0, most=1000),
        Amendable(),
        "The highest rate of the schedule, which begins with a linear warm-up.",
    ] = 1e-3
    rates: Annotated[
        tuple[RateTable, ...],
        Bounds(most=32),
        'Rates of their own, as [{tensors = "embed_tokens", times = 0.5}]: so many times learning_rate for tensors '
        "that have this in their names, between dots; the first that fits. 0: they stay as they are.",
    ] = ()
    beta1: Annotated[Decay, "AdamW's decay of the mean gradient."] = 0.9
    beta2: Annotated[Decay, "AdamW's decay of the mean squared gradient."] = 0.95
    epsilon: Annotated[float, Bounds(above=0, most=1), "Added to AdamW's denominator."] = 1e-8
    weight_decay: Annotated[
        float, Bounds(least=0, most=10), "Decoupled weight decay, on tensors of two or more dimensions only."
    ] = 0.1
    momentum: Annotated[Decay, "SGD's momentum."] = 0.9
    muon_momentum: Annotated[Decay, "Muon's, which is Nesterov's."] = 0.95
    max_norm: Annotated[
        float, Bounds(above=0, most=10**9), "Gradients are clipped at this norm; a stage clips at its share of it."
    ] = 1.0
    """Of the whole model; a stage clips at max_norm * sqrt(its parameters / all)."""
    skip_norm_factor: Annotated[
        float,
        Bounds(least=0, most=10**9),
        "A step whose gradient is longer than this many times the median of the last 16 is skipped; "
        "0: none is for that.",
    ] = 16.0
    """See `swarm.core.state.step_rule`."""
    correction: Annotated[
        Literal["none", "nadamw", "extrapolate"],
        'What softens stale gradients with averaging.delay = 1: "none", "nadamw" or "extrapolate".',
    ] = "none"
    """Nesterov's AdamW, or computing the next step's microbatches on weights extrapolated by the last update."""
    moments: Annotated[
        Literal["fp32", "int8"],
        'How AdamW\'s moments are kept: "fp32" (8 bytes a parameter) or "int8" (2). '
        "Either is the same on every machine.",
    ] = "fp32"
    warmup_steps: Annotated[StepsOrNone, Amendable(), "Steps until the learning rate is at its highest."] = 20
    total_steps: Annotated[
        int, Bounds(least=1, most=MOST_STEPS), Amendable(), "The run ends after this many steps."
    ] = 200
    schedule: Annotated[
        Literal["cosine", "wsd"],
        Amendable(),
        'After the warm-up: "cosine" falls from there to the end; "wsd" stays, and falls in the last decay_steps.',
    ] = "cosine"
    decay_steps: Annotated[
        StepsOrNone, Amendable(), 'With schedule = "wsd": so many steps before the end the rate begins to fall.'
    ] = 0
    final_learning_rate_share: Annotated[
        float, Bounds(least=0, most=1), Amendable(), "The schedule ends at this share of learning_rate."
    ] = 0.1

    def disagreement(self, given: Collection[str]) -> str | None:
        if self.decay_steps and self.schedule != "wsd":
            return f'decay_steps = {self.decay_steps} is of schedule = "wsd"; set that, or leave it out'
        if self.warmup_steps + self.decay_steps > self.total_steps >= self.warmup_steps:
            return (
                f"decay_steps = {self.decay_steps} and warmup_steps = {self.warmup_steps} together are more than "
                f"optimizer.total_steps = {self.total_steps}; lower them"
            )
        if self.warmup_steps > self.total_steps:
            return (
                f"warmup_steps = {self.warmup_steps} is more than optimizer.total_steps = {self.total_steps}; lower it"
            )
        if self.name != "adamw" and self.correction == "nadamw":
            return 'correction = "nadamw" is a form of AdamW; set optimizer.name = "adamw" or choose another'
        if self.name != "adamw" and self.moments == "int8":
            return 'moments = "int8" is of AdamW; set optimizer.name = "adamw" or moments = "fp32"'
        return None

    def times_of(self, name: str) -> float:
        """How often a tensor has the learning rate."""
        return next((group.times for group in self.rates if group.fits(name)), 1.0)

    @property
    def moment_bytes(self) -> float:
        """Bytes a parameter that its moments take; Muon's take four less for what it turns."""
        if self.name == "sgd":
            return 4.0 if self.momentum else 0.0
        return 8.0 if self.moments == "fp32" else 2.0 + 4.0 / 128


@dataclass(frozen=True, kw_only=True)
class CodecSettings(Table):
    activations: Annotated[
        ActivationCodecName,
        'How activations travel between stages: "fp32", "bf16", "int8", "int4" or "int4h" '
        "(4, 2, about 1.1, 0.6 and 0.6 bytes a value; int4h turns tiles in which a value stands out).",
    ] = "int8"
    activation_gradients: Annotated[ActivationCodecName, "How their gradients travel back: one of the same."] = "int8"
    averaging: Annotated[
        AveragingCodecName,
        'How gradients travel in averaging rounds: "fp32", "bf16", "int8", "int4" or "topk" '
        "(4, 2, 1, 0.5 bytes a value; topk sends the largest three in eight in 0.32, results in 0.5). "
        "What int4 and topk leave unsaid a peer says in its next gradient. With averaging.local_steps above 1 also "
        '"int2" (0.28), but not "topk"; each window then says its first moments in the same.',
    ] = "int8"


@dataclass(frozen=True, kw_only=True)
class AveragingSettings(Table):
    rule: Annotated[
        Literal["mean", "centered_clip", "trimmed_mean", "median"],
        'How a stage\'s gradients become one: "mean"; "centered_clip", which bounds what one peer can do; '
        '"trimmed_mean" or "median", coordinate by coordinate (see docs/robustness.md).',
    ] = "centered_clip"
    delay: Annotated[
        Literal[0, 1],
        "0: each step waits for its round. "
        "1: the next step's microbatches go on meanwhile, on weights one version old; in windows of local steps (not "
        "in public runs) the next one from where its peer has come to by itself.",
    ] = 0
    sync_steps: Annotated[StepsOrNone, "With delay = 1, this many steps at the start wait all the same."] = 20
    local_steps: Annotated[
        int,
        Bounds(least=1, most=1024),
        "With model.stages = 1: inner steps, of batch.target_tokens each, that every peer takes by itself between two "
        "rounds. A step of the run is then such a window; its round averages AdamW's moments too. 10 was best with "
        'codecs.averaging = "int2" (see docs/outer_steps.md).',
    ] = 1
    straggler_share: Annotated[
        float,
        Bounds(least=0, most=16),
        "Once most members' parts of a round are there, the last ones' are waited for this share of the step's time; "
        "who does not make it is left out of the round whole.",
    ] = 0.5

    @property
    def reduction(self) -> Literal["mean", "centered_clip", "trimmed_mean", "median", "centered_clip_of_windows"]:
        """The rule as `swarm.averaging.aggregate` has it."""
        if self.local_steps > 1 and self.rule == "centered_clip":
            return "centered_clip_of_windows"
        return self.rule


@dataclass(frozen=True, kw_only=True)
class AuditSettings(Table):
    """What replicas spend on auditing each other, as shares of the audited peer's own work."""

    hop_budget: Annotated[
        WorkShare,
        'With trust = "public" replicas replay a drawn part of each other\'s work. How much, as shares of the work '
        "audited: single microbatches,",
    ] = 0.08
    contribution_budget: Annotated[WorkShare, "whole contributions,"] = 0.07
    reducer_share: Annotated[WorkShare, "and reduced parts: of fewer than 80 as many as of 80."] = 0.05
    """These are recomputed whatever the trust."""
    retained_versions: Annotated[
        int, Bounds(least=3, most=64), "Peers keep what a contribution was made from for this many versions."
    ] = 4
    """Draws are revealed after two."""
    agreements_to_promote: Annotated[
        int,
        Bounds(least=0, most=16),
        'With trust = "public" a newcomer trains once so many replays of others\' work, of the last 16 versions, '
        "came out the same; 0: at once.",
    ] = 10
    activation_bounds: Annotated[
        BoundFactor,
        Amendable(),
        "Honest work may be so many times as far from its replay as docs/verification.md has it: activations,",
    ] = 1.0
    gradient_bounds: Annotated[BoundFactor, Amendable(), "their gradients,"] = 1.0
    contribution_bounds: Annotated[
        BoundFactor, Amendable(), "and contributions; 1 but for what a run's own audits show (docs/calibration.md)."
    ] = 1.0

    def bounds_factor(self, kind: TensorKind) -> float:
        """By which all bounds of such tensors are multiplied."""
        factors = {
            "activation": self.activation_bounds,
            "gradient": self.gradient_bounds,
            "contribution": self.contribution_bounds,
        }
        return factors[kind]


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings(Table):
    every_steps: Annotated[Steps, "Steps between the checkpoints that the host archives."] = 48
    """It archives the run's last version too."""
    snapshot_every: Annotated[
        int,
        Bounds(least=1, most=1 << 16),
        "Steps between the snapshots that peers keep for joiners; divides every_steps.",
    ] = 8

    def disagreement(self, given: Collection[str]) -> str | None:
        if self.every_steps % self.snapshot_every == 0:
            return None
        return (
            f"snapshot_every = {self.snapshot_every} does not divide checkpoint.every_steps = {self.every_steps}; "
            f"set checkpoint.every_steps = {-(-self.every_steps // self.snapshot_every) * self.snapshot_every}, "
            "or another snapshot_every"
        )


@dataclass(frozen=True, kw_only=True)
class LimitSettings(Table):
    founders_per_stage: Annotated[
        NumPeers, Amendable(), "Peers of each stage the host waits for before the run begins."
    ] = 1
    max_peers_per_stage: Annotated[
        NumPeers,
        Amendable(),
        f"A stage takes in no more peers than this: {MAX_MEMBERS} at most; past 64 it reduces in cohorts.",
    ] = 64
    max_in_flight: Annotated[
        int, Bounds(least=1, most=4096), Amendable(), "Microbatches one peer holds at once; more need more memory."
    ] = 4
    """Past it a peer says BUSY."""
    min_replicas: Annotated[
        int, Bounds(least=1, most=4096), Amendable(), "A stage gives no peer to another below this many."
    ] = 2
    rebalance_s: Annotated[
        float,
        Bounds(least=0, most=86400),
        Amendable(),
        "Seconds between two looks of the host at whether a peer should move to a stage that limits the run; 0: nobody "
        "moves.",
    ] = 0.0
    refill_s: Annotated[
        float,
        Bounds(least=0, most=604800),
        Amendable(),
        "A stage whose peers are all gone is waited for for so many seconds; then peers of other stages are posted to "
        "it, and the run goes on from the newest state that is held; 0: it is waited for for ever.",
    ] = 300.0
    max_microbatch_attempts: Annotated[
        int,
        Bounds(least=1, most=10000),
        Amendable(),
        "After this many failed sends in one step a microbatch is left for a later one.",
    ] = 20

    def disagreement(self, given: Collection[str]) -> str | None:
        if self.founders_per_stage <= self.max_peers_per_stage:
            return None
        return (
            f"founders_per_stage = {self.founders_per_stage} is more than "
            f"limits.max_peers_per_stage = {self.max_peers_per_stage}; lower it"
        )


@dataclass(frozen=True, kw_only=True)
class DeadlineSettings(Table):
    """Upper bounds in seconds of what moves few bytes; measured times shorten them, never lengthen them."""

    call_s: Annotated[
        Seconds, "Seconds, upper bounds: measured times shorten them. A small request and its answer:"
    ] = 10.0
    hop_s: Annotated[Seconds, "A microbatch's way from a stage to the loss and back."] = 60.0
    least_mbit: Annotated[
        float,
        Bounds(above=0, most=1e6),
        "Megabits a second that a peer's line is assumed to carry: what moves bytes may take four times as long.",
    ] = LEAST_MBIT
    """See `swarm.core.transfers`: bytes in proportion to this, and for as long as they come."""
    step_s: Annotated[
        Seconds, "A step in which no microbatch has ended for this long closes with whatever it holds."
    ] = 120.0
    straggler_s: Annotated[Seconds, "How long a full step waits for microbatches already under way."] = 2.0
    """They are dropped and counted past it."""
    lease_s: Annotated[Seconds, "A peer not heard of for this long has left."] = 15.0
    drain_s: Annotated[Seconds, "How long a leaving peer waits while nothing moves of what it has in flight."] = 30.0


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(Table):
    """How a run trains: the tables that are in its settings as they stand in its file."""

    batch: BatchSettings = field(default_factory=BatchSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    codecs: CodecSettings = field(default_factory=CodecSettings)
    averaging: AveragingSettings = field(default_factory=AveragingSettings)
    audits: AuditSettings = field(default_factory=AuditSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    limits: LimitSettings = field(default_factory=LimitSettings)
    deadlines: DeadlineSettings = field(default_factory=DeadlineSettings)

    @property
    def has_windows(self) -> bool:
        """Whether peers take inner steps by themselves between two rounds."""
        return self.averaging.local_steps > 1

    @property
    def round_values(self) -> int:
        """Values that a round averages for each parameter: with windows also its first moment, and a few more."""
        return 2 if self.has_windows else 1

    @property
    def state_moment_bytes(self) -> float:
        """Bytes a parameter that the moments in a stage's state take."""
        return BYTES_A_VALUE[self.codecs.averaging] if self.has_windows else self.optimizer.moment_bytes


@dataclass(frozen=True, kw_only=True)
class RunSettings(TrainingSettings):
    """Everything the peers of a run agree on. Its canonical bytes and the run key hash to the run id."""

    name: RunName
    protocol: int
    model: ModelSettings
    data: DataSettings
    trust: Trust = "friends"
    model_licence: Licence = "not stated"
    """As the host states it; shown to volunteers before they join."""
    data_licence: Licence = "not stated"
    initial_state_digests: tuple[Digest, ...] = ()
    """State digest of each stage at version 0: weights are made once and shipped, never re-seeded."""
    base_digest: Digest | None = None
    """Of the list of the frozen base's pieces (`swarm.data.pieces`, `swarm.model.adapters.base`); None where nothing is
    frozen, or before it is made."""

    @property
    def microbatch_tokens(self) -> int:
        """Tokens in a full microbatch."""
        return self.batch.microbatch_size * self.data.sequence_length

    @property
    def leaves_residual(self) -> bool:
        """Whether contributions come with error feedback (`swarm.averaging.error_feedback`). Windows' do not: what is
        left out of one way of the weights is no part of the next."""
        return self.codecs.averaging in ("int4", "topk") and not self.has_windows

    @property
    def outer(self) -> OptimizerSettings:
        """What a certified result does to the weights: the optimizer's step; of windows, which bring the way that each
        has gone, exactly weights - mean."""
        if not self.has_windows:
            return self.optimizer
        return replace(
            self.optimizer,
            name="sgd",
            learning_rate=1.0,
            rates=(),
            momentum=0.0,
            weight_decay=0.0,
            max_norm=1e9,
            warmup_steps=0,
            final_learning_rate_share=1.0,
        )

    @property
    def inner(self) -> OptimizerSettings:
        """Of a window's steps, by their number in the run, version * local_steps + i: the schedule is as long in
        windows as it is in steps of a run without."""
        steps = self.averaging.local_steps
        stretched = {
            name: steps * getattr(self.optimizer, name) for name in ("warmup_steps", "decay_steps", "total_steps")
        }
        return replace(self.optimizer, **stretched)

    def part_values(self, num_values: int) -> int:
        """Values of a whole part of a stage that has so many: 2^18, or up to 2^20 where that leaves every peer some to
        reduce.

        Each part costs every peer a signature, a digest and a place in messages; in a run for a few peers, whose links
        may be fast, that was a sixth of a round.
        """
        size, wanted = PART_VALUES, PARTS_OF_A_REDUCER * self.limits.max_peers_per_stage
        while size < LARGEST_PART_VALUES and -(-num_values // (2 * size)) >= wanted:
            size *= 2
        return size

    @property
    def microbatches_of_one(self) -> int:
        """That one member can bring to a step: all of the step's, or its whole window's."""
        return self.averaging.local_steps * self.microbatches_per_step

    def step_tokens(self, num_members: int) -> int:
        """Target tokens of a step of so many members."""
        return self.batch.target_tokens * (self.averaging.local_steps * num_members if self.has_windows else 1)

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
        """Results whose bytes a peer keeps: for late ones, who may take as long for a snapshot as it is kept, and to
        rebuild what is audited."""
        return (
            KEPT_SNAPSHOTS * self.checkpoint.snapshot_every + 2 + (self.audits.retained_versions if self.replays else 0)
        )

    @property
    def microbatch_targets(self) -> int:
        """Target tokens of a microbatch on the average."""
        data, tokens = self.data, self.microbatch_tokens
        targets = data.num_train_targets
        return tokens if targets is None else max(1, tokens * targets // data.num_train_tokens)

    @property
    def microbatches_per_step(self) -> int:
        """Of all peers; of one peer's inner step where they take such."""
        return math.ceil(self.batch.target_tokens / self.microbatch_tokens)

    def delay_at(self, step: int) -> int:
        """Versions a microbatch of `step` may be behind: 0 while the run is synchronous."""
        return 0 if step < self.averaging.sync_steps else self.averaging.delay
