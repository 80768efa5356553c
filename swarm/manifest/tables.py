"""The tables of a run's TOML. `[run]`, `[model]` and `[data]` are what a person writes instead of digests and JSON."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from swarm.core.settings import (
    AdapterSettings,
    ComputeDtype,
    Licence,
    LossOn,
    ModelSettings,
    NumTokens,
    Packing,
    RunName,
    RunSettings,
    Seed,
    SequenceLength,
    TrainingSettings,
    Trust,
    Weight,
)
from swarm.core.tables import Amendable, Bounds, Table, show

Kind = Literal["text", "chat"]


@dataclass(frozen=True)
class Example:
    """A value that the default manifest shows, commented out, for a field that it leaves out."""

    value: Any


@dataclass(frozen=True, kw_only=True)
class RunTable(Table):
    name: Annotated[RunName, "What people call the run: letters, digits, dot, dash, underscore."] = "my-run"
    trust: Annotated[
        Trust,
        'How much peers are audited. "friends": all is signed and screened, reducers are recomputed. '
        '"public": replicas also replay each other\'s work (see [audits]).',
    ] = RunSettings.trust
    model_licence: Annotated[Licence, "Licence of the weights; volunteers see it before they join."] = (
        RunSettings.model_licence
    )
    data_licence: Annotated[Licence, "Licence of the text; they see it too."] = RunSettings.data_licence


@dataclass(frozen=True, kw_only=True)
class ModelTable(Table):
    """One of preset, config and checkpoint."""

    preset: Annotated[
        str, 'A model to begin with from random weights: "tiny" (0.8 M parameters), "small" (23 M), "medium" (202 M).'
    ] = "tiny"
    config: Annotated[
        str | dict[str, Any] | None,
        Example("config.json"),
        "Or a Hugging Face config of your own, as a path or as a table:",
    ] = None
    checkpoint: Annotated[
        str | None,
        Example("model-folder"),
        "Or a local Hugging Face folder (config.json, *.safetensors) whose weights the run starts from:",
    ] = None
    stages: Annotated[
        int,
        Bounds(least=1, most=1024),
        Amendable(),
        "Pieces the layers are cut into, balanced by cost; each peer holds one.",
    ] = 2
    stage_layers: Annotated[
        tuple[Annotated[int, Bounds(least=1, most=4096)], ...],
        Example((2, 2)),
        Amendable(),
        "Or the number of layers of each stage, in order:",
    ] = ()
    compute_dtype: Annotated[
        ComputeDtype, '"fp32", or "bf16": faster on GPUs; weights and gradients stay fp32 either way.'
    ] = ModelSettings.compute_dtype
    recompute: Annotated[bool, "Run forward again at backward time: less memory, a third more compute."] = (
        ModelSettings.recompute
    )
    subspace: Annotated[
        int,
        Bounds(least=1, most=1 << 16),
        "For slow lines: between stages a token has so many times fewer values than the model is wide. From random "
        "weights only. 1: it has all.",
    ] = ModelSettings.subspace

    def disagreement(self, given: Collection[str]) -> str | None:
        origins = [name for name in ("preset", "config", "checkpoint") if name in given]
        if len(origins) > 1:
            first, second = origins[:2]
            return f"{second} = {show(vars(self)[second])} and model.{first} are both given; keep one of them"
        if self.subspace > 1 and self.checkpoint is not None:
            return (
                f"subspace = {self.subspace} and model.checkpoint are both given, but trained values lie in none; "
                "keep one of them"
            )
        if "stages" in given and self.stage_layers:
            return f"stages = {self.stages} and model.stage_layers are both given; keep one of them"
        return None


@dataclass(frozen=True, kw_only=True)
class SourceTable(Table):
    """One source of a mixture."""

    text: tuple[str, ...]
    weight: Weight
    text_field: Annotated[str, Bounds(least=1)] | None = None
    """None: as `DataTable` has it."""
    kind: Kind | None = None
    """The same."""


@dataclass(frozen=True, kw_only=True)
class DataTable(Table):
    text: Annotated[
        tuple[str, ...],
        "Text, jsonl and Parquet files, also .gz and .zst, and folders of them, in this order; paths, or URLs such as "
        "hf://datasets/NAME. Empty: the source code of Python's standard library.",
    ] = ()
    mixture: Annotated[
        tuple[SourceTable, ...],
        Bounds(most=64),
        Example(({"text": ("web",), "weight": 7}, {"text": ("code",), "weight": 3})),
        "Or several such sources with whole numbers for weights: of each 10 tokens 7 are from the first here, whatever "
        "their sizes.",
    ] = ()
    tokenizer: Annotated[str, Bounds(least=1), '"bytes", or the path of a tokenizer.json or of a folder with one.'] = (
        "bytes"
    )
    text_field: Annotated[
        str, Bounds(least=1), "The field of each jsonl line, or column of each Parquet file, that holds its text."
    ] = "text"
    kind: Annotated[
        Kind,
        'What rows hold: "text", or "chat", conversations that the tokenizer\'s chat template makes text of.',
    ] = "text"
    documents: Annotated[
        Packing | None,
        Example("masked"),
        '"packed": documents lie end to end, and samples are cut from that. "masked": they are packed whole into '
        'samples, and attention stays within each. By default "masked" where a source holds conversations:',
    ] = None
    loss_on: Annotated[
        LossOn | None,
        Example("answers"),
        '"all", or "answers": of conversations only the answers are learnt. By default "answers" where there are any:',
    ] = None
    max_text_mb: Annotated[
        int, Bounds(least=1, most=1 << 24), "Reading a source stops after this many megabytes of text."
    ] = 1 << 17
    held_out_share: Annotated[
        float,
        Bounds(above=0, below=0.5),
        "Share of the documents that nobody trains on: the run's loss is measured on them.",
    ] = 0.05
    sequence_length: Annotated[SequenceLength, "Tokens in a sample."] = 128
    chunk_tokens: Annotated[
        NumTokens | None,
        Example(4194304),
        "Tokens in a chunk, the unit in which peers share out the data. "
        "By default 16 MiB, less where the text is short.",
    ] = None
    seed: Annotated[Seed, "Another number gives another order of the data, and other initial weights."] = 0

    def sources(self) -> tuple[SourceTable, ...]:
        """Of a mixture; else the text as the only one. Each with its own field and kind."""
        found = self.mixture or (SourceTable(text=self.text, weight=1),)
        return tuple(
            replace(one, text_field=one.text_field or self.text_field, kind=one.kind or self.kind) for one in found
        )

    @property
    def has_chats(self) -> bool:
        """Whether a source holds conversations."""
        return any(source.kind == "chat" for source in self.sources())

    @property
    def packing(self) -> Packing:
        """What is meant by `documents`."""
        return self.documents or ("masked" if self.has_chats else "packed")

    @property
    def learnt(self) -> LossOn:
        """What is meant by `loss_on`."""
        return self.loss_on or ("answers" if self.has_chats else "all")

    def disagreement(self, given: Collection[str]) -> str | None:
        if self.text and self.mixture:
            return f"text = {show(self.text)} and data.mixture are both given; keep one of them"
        if self.has_chats and self.packing == "packed":
            return 'documents = "packed" would cut conversations anywhere; remove it, or data.kind = "chat"'
        if not self.has_chats and self.learnt == "answers":
            return 'loss_on = "answers", but no source has kind = "chat"; remove it, or set data.kind'
        if self.has_chats and self.tokenizer == "bytes":
            return 'kind = "chat", but data.tokenizer = "bytes" has no chat template; give the folder of a tokenizer'
        return None


@dataclass(frozen=True, kw_only=True)
class OriginTables(Table):
    """What a run is made from."""

    run: RunTable = field(default_factory=RunTable)
    model: ModelTable = field(default_factory=ModelTable)
    adapters: AdapterSettings = field(default_factory=AdapterSettings)
    data: DataTable = field(default_factory=DataTable)


@dataclass(frozen=True, kw_only=True)
class ManifestTables(TrainingSettings, OriginTables):
    """The whole file: what the run is made from comes first. A table left out has its defaults."""
