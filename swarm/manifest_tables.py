"""This is where the tables of a run's TOML are described: each field's type, bounds and default.

`[batch]` to `[deadlines]` have the fields of `swarm.core.settings`, and a stranger's settings are checked by the same
tables; `[run]`, `[model]` and `[data]` are what a person writes instead of digests and canonical JSON.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, Strict, model_validator
from pydantic_core import PydanticCustomError

from swarm.core.cohorts import MAX_MEMBERS
from swarm.core.settings import ActivationCodecName, AveragingCodecName

MAX_TOKENS = 1 << 40
RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Licence = Annotated[str, Field(pattern=r"^[ -~]{1,120}$")]
Trust = Literal["friends", "public"]
Seconds = Annotated[float, Field(gt=0, le=86400)]
Share = Annotated[float, Field(ge=0, le=64)]
Texts = Annotated[tuple[str, ...], Strict(False)]  # TOML and MessagePack know lists only
Counts = Annotated[tuple[Annotated[int, Field(ge=1, le=4096)], ...], Strict(False)]


class Table(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


def inconsistent(field: str, value: Any, message: str) -> PydanticCustomError:
    """A value that does not go with another: "<field> = <value> <message>"."""
    return PydanticCustomError("inconsistent", "{message}", {"field": field, "value": value, "message": message})


class RunTable(Table):
    name: RunName = "my-run"
    trust: Trust = "friends"
    model_licence: Licence = "not stated"
    data_licence: Licence = "not stated"


class ModelTable(Table):
    """One of preset, config and checkpoint; the preset "tiny" where none is given."""

    preset: str | None = None
    config: str | dict[str, Any] | None = None
    checkpoint: str | None = None
    stages: int = Field(default=2, ge=1, le=1024)
    stage_layers: Counts = ()
    compute_dtype: Literal["fp32", "bf16"] = "fp32"
    recompute: bool = False

    @model_validator(mode="before")
    @classmethod
    def _one_origin(cls, value: Any) -> Any:
        if isinstance(value, dict):
            given = [name for name in ("preset", "config", "checkpoint") if value.get(name) is not None]
            if len(given) > 1:
                raise inconsistent(given[1], value[given[1]], f"and model.{given[0]} are both given; keep one of them")
            if not given:
                value = {**value, "preset": "tiny"}
            if "stages" in value and value.get("stage_layers"):
                raise inconsistent("stages", value["stages"], "and model.stage_layers are both given; keep one of them")
        return value


class DataTable(Table):
    text: Texts = ()
    tokenizer: str = Field(default="bytes", min_length=1)
    jsonl_field: str = Field(default="text", min_length=1)
    max_text_mb: int = Field(default=1024, ge=1, le=1 << 24)
    held_out_share: float = Field(default=0.05, gt=0, lt=0.5)
    sequence_length: int = Field(default=128, ge=1, le=1 << 20)
    chunk_tokens: int | None = Field(default=None, ge=2, le=MAX_TOKENS)
    seed: int = Field(default=0, ge=0, lt=1 << 63)


class BatchTable(Table):
    microbatch_size: int = Field(default=8, ge=1, le=1 << 16)
    target_tokens: int = Field(default=8192, ge=1, le=MAX_TOKENS)


class OptimizerTable(Table):
    name: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = Field(default=1e-3, gt=0, le=1e3)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    epsilon: float = Field(default=1e-8, gt=0, le=1)
    weight_decay: float = Field(default=0.1, ge=0, le=10)
    momentum: float = Field(default=0.9, ge=0, lt=1)
    max_norm: float = Field(default=1.0, gt=0, le=1e9)
    skip_norm_factor: float = Field(default=16.0, ge=0, le=1e9)
    correction: Literal["none", "nadamw", "extrapolate"] = "none"
    moments: Literal["fp32", "int8"] = "fp32"
    warmup_steps: int = Field(default=20, ge=0, le=1 << 31)
    total_steps: int = Field(default=200, ge=1, le=1 << 31)
    final_learning_rate_share: float = Field(default=0.1, ge=0, le=1)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.warmup_steps > self.total_steps:
            raise inconsistent(
                "warmup_steps",
                self.warmup_steps,
                f"is more than optimizer.total_steps = {self.total_steps}; lower it",
            )
        if self.name == "sgd" and self.correction == "nadamw":
            raise inconsistent(
                "correction", self.correction, 'is a form of AdamW; set optimizer.name = "adamw" or choose another'
            )
        if self.name == "sgd" and self.moments == "int8":
            raise inconsistent("moments", self.moments, 'is of AdamW; set optimizer.name = "adamw" or moments = "fp32"')
        return self


class CodecTable(Table):
    activations: ActivationCodecName = "int8"
    activation_gradients: ActivationCodecName = "int8"
    averaging: AveragingCodecName = "int8"


class AveragingTable(Table):
    rule: Literal["mean", "centered_clip", "trimmed_mean", "median"] = "centered_clip"
    delay: Literal[0, 1] = 0
    sync_steps: int = Field(default=20, ge=0, le=1 << 31)


class AuditTable(Table):
    hop_budget: Share = 0.08
    contribution_budget: Share = 0.07
    reducer_share: Share = 0.05
    retained_versions: int = Field(default=4, ge=3, le=64)
    agreements_to_promote: int = Field(default=10, ge=0, le=16)


class CheckpointTable(Table):
    every_steps: int = Field(default=48, ge=1, le=1 << 31)
    snapshot_every: int = Field(default=8, ge=1, le=1 << 16)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.every_steps % self.snapshot_every:
            raise inconsistent(
                "snapshot_every",
                self.snapshot_every,
                f"does not divide checkpoint.every_steps = {self.every_steps}; "
                f"set checkpoint.every_steps = {-(-self.every_steps // self.snapshot_every) * self.snapshot_every}, "
                "or another snapshot_every",
            )
        return self


class LimitTable(Table):
    founders_per_stage: int = Field(default=1, ge=1, le=MAX_MEMBERS)
    max_peers_per_stage: int = Field(default=64, ge=1, le=MAX_MEMBERS)
    max_in_flight: int = Field(default=4, ge=1, le=4096)
    min_replicas: int = Field(default=2, ge=1, le=4096)
    rebalance_s: float = Field(default=0.0, ge=0, le=86400)
    max_microbatch_attempts: int = Field(default=20, ge=1, le=10000)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.founders_per_stage > self.max_peers_per_stage:
            raise inconsistent(
                "founders_per_stage",
                self.founders_per_stage,
                f"is more than limits.max_peers_per_stage = {self.max_peers_per_stage}; lower it",
            )
        return self


class DeadlineTable(Table):
    call_s: Seconds = 10.0
    hop_s: Seconds = 60.0
    round_phase_s: Seconds = 10.0
    step_s: Seconds = 120.0
    straggler_s: Seconds = 2.0
    lease_s: Seconds = 15.0
    drain_s: Seconds = 30.0
    state_transfer_s: Seconds = 600.0


class ManifestTable(Table):
    """The whole file. A table left out has its defaults."""

    run: RunTable = Field(default_factory=RunTable)
    model: ModelTable = Field(default_factory=ModelTable)
    data: DataTable = Field(default_factory=DataTable)
    batch: BatchTable = Field(default_factory=BatchTable)
    optimizer: OptimizerTable = Field(default_factory=OptimizerTable)
    codecs: CodecTable = Field(default_factory=CodecTable)
    averaging: AveragingTable = Field(default_factory=AveragingTable)
    audits: AuditTable = Field(default_factory=AuditTable)
    checkpoint: CheckpointTable = Field(default_factory=CheckpointTable)
    limits: LimitTable = Field(default_factory=LimitTable)
    deadlines: DeadlineTable = Field(default_factory=DeadlineTable)
