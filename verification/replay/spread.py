"""A machine's honest spread: the same work, computed in every way that honest peers may.

A small model of two stages is computed forward and backward with each instruction set, number of threads and split of
the batch; what each would have sent is encoded and compared with what every other comes to, as audits do, beside the
own error of this machine: that of work which is rounded otherwise.
Fresh weights, a memorised batch (loss near 0, so that gradients are small differences) and weights with outlier
dimensions, which real checkpoints have, take turns.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from swarm.averaging.activations import ActivationCodec, activation_codec
from swarm.averaging.codecs import vector_codec
from swarm.core.settings import ActivationCodecName, AveragingCodecName, ModelSettings
from swarm.model.families import canonical_config_json
from swarm.model.initial import initial_weights
from swarm.model.rounding import rounded_otherwise
from swarm.model.stage import StageModel
from swarm.model.subspace import StageInput, given_on
from verification.audit.tolerance import Bounds, Kind, bounds_for, compare, relative_error
from verification.replay.own_error import FEWEST_DRAWS

Floats: TypeAlias = NDArray[np.float32]
Dtype = Literal["fp32", "bf16"]
Scene = Literal["fresh", "memorised", "outliers"]

SCENES: tuple[Scene, ...] = get_args(Scene)
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
ACTIVATION_CODECS: tuple[ActivationCodecName, ...] = get_args(ActivationCodecName)
CONTRIBUTION_CODECS: tuple[AveragingCodecName, ...] = ("fp32", "bf16", "int8")
"""Of a step's contribution that can be made again."""
THREADS = (1, 2, 4)
SPLITS = (1, 2)
"""Into so many pieces the batch is cut."""
SAMPLES, TOKENS, VOCABULARY = 4, 64, 256
OUTLIERS, OUTLIER_FACTOR = 4, 60.0
"""So many hidden dimensions of the embedding are so many times as large."""
MEMORISED_LOSS = 1e-4
"""Nats a token."""
SEED = bytes(32)
HIDDEN_SIZE = 128


def model_settings(dtype: Dtype, subspace: int) -> ModelSettings:
    """A stage of one layer with the embedding, and one with the head; hops have so many times fewer values."""
    config = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": TOKENS,
    }
    return ModelSettings(
        config_json=canonical_config_json(config),
        stage_layers=((0, 1), (1, 2)),
        compute_dtype=dtype,
        subspace=subspace,
        subspace_seed=subspace - 1,
    )


@dataclass(frozen=True)
class Setting:
    """One way to compute."""

    instructions: str
    """Name of an instruction set."""
    threads: int
    splits: int


@dataclass(frozen=True)
class Work:
    """One microbatch at both stages, as bytes on the wire would have brought it."""

    scene: Scene
    tokens_BL: NDArray[np.int64]
    targets_BL: NDArray[np.int64]
    x_BLD: Floats
    """Of the last stage."""
    grad_y_BLD: Floats
    """Of the first stage's output."""


@dataclass(frozen=True)
class Outcome:
    """What a peer of each stage makes of it, before it is encoded."""

    y_BLD: Floats
    grad_x_BLD: Floats
    gradients: tuple[Floats, Floats]
    """Of each stage's parameters."""

    @property
    def arrays(self) -> tuple[Floats, ...]:
        return (self.y_BLD, self.grad_x_BLD, *self.gradients)

    @classmethod
    def of_arrays(cls, arrays: Sequence[Floats]) -> "Outcome":
        y_BLD, grad_x_BLD, first, last = arrays
        return cls(y_BLD, grad_x_BLD, (first, last))


Weights: TypeAlias = tuple[Floats, Floats]


class Bench:
    """The two stages in one compute dtype, on this thread's settings of PyTorch."""

    def __init__(self, dtype: Dtype, subspace: int = 1) -> None:
        model = model_settings(dtype, subspace)
        self.stages = [StageModel(model, stage) for stage in (0, 1)]
        self._model = model

    def entering(self, x_BLD: torch.Tensor, tokens_BL: torch.Tensor) -> StageInput:
        """What the last stage is given."""
        return given_on(self._model, x_BLD, tokens_BL)

    def compute(self, weights: Weights, work: Work, setting: Setting) -> Outcome:
        """As a peer with so many threads, which cuts the batch so."""
        before = torch.get_num_threads()
        torch.set_num_threads(setting.threads)
        try:
            return self._compute(weights, work, setting.splits)
        finally:
            torch.set_num_threads(before)

    def _compute(self, weights: Weights, work: Work, splits: int) -> Outcome:
        first, last = self.stages
        of_first, of_last = (stage.weights(flat) for stage, flat in zip(self.stages, weights, strict=True))
        sums = [torch.zeros(stage.layout.num_values) for stage in self.stages]
        ys, grad_xs = [], []
        for rows in np.array_split(np.arange(SAMPLES), splits):
            tokens, targets, x, grad_y = (
                torch.from_numpy(np.ascontiguousarray(part[rows]))
                for part in (work.tokens_BL, work.targets_BL, work.x_BLD, work.grad_y_BLD)
            )
            y, saved = first.forward(of_first, tokens, keep=True)
            assert saved is not None
            first.backward(saved, grad_y, sums[0])
            _, _, saved_loss = last.loss(of_last, self.entering(x, tokens), targets, keep=True)
            assert saved_loss is not None
            grad_x = last.loss_backward(saved_loss, sums[1])
            assert grad_x is not None
            ys.append(y)
            grad_xs.append(grad_x)
        return Outcome.of_arrays([tensor.numpy() for tensor in (torch.cat(ys), torch.cat(grad_xs), *sums)])


# -- what there is to compute -----------------------------------------------------------------------------


@dataclass
class Material:
    """Weights of each scene, the batch that was memorised, and any number of microbatches."""

    weights: dict[Scene, Weights]
    memorised: tuple[NDArray[np.int64], NDArray[np.int64]]
    _bench: Bench

    @classmethod
    def make(cls, *, scenes: Sequence[Scene] = SCENES, subspace: int = 1) -> "Material":
        """The same on every machine but for the memorised weights, which are trained here."""
        first, last = initial_weights(model_settings("fp32", subspace), 0, None)
        bench = Bench("fp32", subspace)
        batch = _batch(np.random.default_rng(1))
        weights: dict[Scene, Weights] = {"fresh": (first, last)}
        if "outliers" in scenes:
            weights["outliers"] = (_with_outliers(bench.stages[0], first), last)
        if "memorised" in scenes:
            weights["memorised"] = _memorised(bench, (first, last), batch)
        return cls(weights, batch, bench)

    def work(self, number: int, scenes: Sequence[Scene] = SCENES) -> Work:
        """Microbatch `number`: fp32, from one thread's forward and backward, through int8 on the wire."""
        scene = scenes[number % len(scenes)]
        rng = np.random.default_rng([2, number])
        tokens_BL, targets_BL = self.memorised if scene == "memorised" else _batch(rng)
        if scene == "memorised":  # the memorised samples in another order: so it stays so
            order = rng.permutation(SAMPLES)
            tokens_BL, targets_BL = tokens_BL[order], targets_BL[order]
        wire = activation_codec("int8")
        first, last = self._bench.stages
        of_first, of_last = (
            stage.weights(flat) for stage, flat in zip(self._bench.stages, self.weights[scene], strict=True)
        )
        tokens = torch.from_numpy(tokens_BL)
        y, _ = first.forward(of_first, tokens, keep=False)
        shape = (SAMPLES, TOKENS, first.hop_width)
        x = wire.decode(wire.encode(y), shape)
        _, _, saved = last.loss(of_last, self._bench.entering(x, tokens), torch.from_numpy(targets_BL), keep=True)
        assert saved is not None
        grad_x = last.loss_backward(saved, torch.zeros(last.layout.num_values))
        assert grad_x is not None
        return Work(scene, tokens_BL, targets_BL, x.numpy(), wire.decode(wire.encode(grad_x), shape).numpy())


def _batch(rng: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    ids = rng.integers(0, VOCABULARY, (SAMPLES, TOKENS + 1))
    return np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:])


def _with_outliers(stage: StageModel, flat: Floats) -> Floats:
    made = flat.copy()
    views = stage.layout.views(torch.from_numpy(made))
    name = next(name for name in views if "embed_tokens" in name)
    views[name][:, :OUTLIERS] *= OUTLIER_FACTOR
    return made


def _memorised(bench: Bench, weights: Weights, batch: tuple[NDArray[np.int64], NDArray[np.int64]]) -> Weights:
    """Adam on one batch, until the loss is near 0."""
    tokens, targets = (torch.from_numpy(part) for part in batch)
    first, last = bench.stages
    flats = [torch.from_numpy(flat.copy()) for flat in weights]
    means, squares = ([torch.zeros_like(flat) for flat in flats] for _ in range(2))
    for step in range(1, 400):
        of_first, of_last = first.weights(flats[0].numpy()), last.weights(flats[1].numpy())
        sums = [torch.zeros_like(flat) for flat in flats]
        y, saved = first.forward(of_first, tokens, keep=True)
        loss, num_targets, saved_loss = last.loss(of_last, bench.entering(y, tokens), targets, keep=True)
        assert saved is not None
        assert saved_loss is not None
        if loss / num_targets < MEMORISED_LOSS:
            break
        grad_x = last.loss_backward(saved_loss, sums[1])
        assert grad_x is not None
        first.backward(saved, grad_x, sums[0])
        for flat, mean, square, total in zip(flats, means, squares, sums, strict=True):
            gradient = total / num_targets
            mean.lerp_(gradient, 0.1)
            square.lerp_(gradient * gradient, 0.05)
            rate = 3e-3 / (1 - 0.9**step)
            flat -= rate * mean / ((square / (1 - 0.95**step)).sqrt() + 1e-8)
    return flats[0].numpy(), flats[1].numpy()


# -- what was measured ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One compute dtype, codec on the wire, and what it carries."""

    dtype: str
    codec: str
    kind: str
    """activation, gradient or contribution."""
    comparisons: int
    differing: int
    """Those in which not all values were in their cells, or equal to the last bit."""
    largest: float
    high: float
    """The error that 99.9 % do not exceed."""
    fraud: float
    """Bound that an error must be past to be fraud, however small the own error."""
    exceeded: int
    report_only: bool
    share: float
    """Of the fraud bound of its microbatch, that an error is at most."""

    @property
    def false_alarm(self) -> float | None:
        """Upper bound at 95 % on the probability of a false alarm, by the rule of three; None if one was raised."""
        return 3.0 / self.comparisons if self.comparisons and not self.exceeded else None

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "false_alarm": self.false_alarm}


class Tally:
    """All comparisons of one row."""

    def __init__(self, dtype: str, codec: str, kind: str, bounds: Bounds) -> None:
        self._named = (dtype, codec, kind)
        self._bounds = bounds
        self._equal = 0
        self._errors: list[float] = []
        self._heavy: list[int] = []
        self._shares: list[float] = []

    def add(self, tensors: Iterable[Floats], *, codec: ActivationCodec | None, own_error: float) -> None:
        """Hold each against every other, of a microbatch with that own error: as `codec` sends it, if there is one, in
        its cells; else as it is."""
        counts: Counter[bytes] = Counter()
        distinct: dict[bytes, Floats] = {}
        for tensor in tensors:
            found = tensor.tobytes()
            counts[found] += 1
            distinct.setdefault(found, tensor)
        self._equal += sum(count * (count - 1) // 2 for count in counts.values())
        bodies = {name: codec.encode(torch.from_numpy(values)) for name, values in distinct.items()} if codec else {}
        for one, other in itertools.combinations(distinct, 2):
            claimed, replayed, cells = distinct[one], distinct[other], None
            if codec is not None:
                samples, tokens, width = claimed.shape
                shape = samples, tokens, width
                decoded = codec.decode(bodies[one], shape).numpy()
                claimed, replayed = (codec.laid(values, bodies[one]) for values in (decoded, replayed))
                cells = codec.cells(bodies[one], bodies[other], shape)
            compared = compare(claimed, replayed, self._bounds, cells=cells, own_error=own_error)
            self._errors.append(compared.measured)
            self._shares.append(compared.share)
            self._heavy.append(counts[one] * counts[other])

    @property
    def comparisons(self) -> int:
        return self._equal + sum(self._heavy)

    def row(self) -> Row:
        heavy = list(zip(self._errors, self._shares, self._heavy, strict=True))
        return Row(
            *self._named,
            comparisons=self.comparisons,
            differing=sum(count for error, _, count in heavy if error > 0),
            largest=max(self._errors, default=0.0),
            high=self._quantile(0.999),
            fraud=self._bounds.fraud,
            exceeded=sum(count for _, share, count in heavy if share > 1.0),
            report_only=self._bounds.report_only,
            share=max(self._shares, default=0.0),
        )

    def _quantile(self, share: float) -> float:
        rank = math.ceil(share * self.comparisons) - self._equal
        for error, count in sorted(zip(self._errors, self._heavy, strict=True)):
            if rank <= 0:
                break
            rank -= count
            if rank <= 0:
                return error
        return 0.0


class Spread:
    """The tallies of every compute dtype, codec and kind."""

    def __init__(self, dtypes: Sequence[Dtype] = DTYPES) -> None:
        self._tallies: dict[tuple[str, str, str], Tally] = {}
        for dtype in dtypes:
            for kind in get_args(Kind):
                for codec in CONTRIBUTION_CODECS if kind == "contribution" else ACTIVATION_CODECS:
                    self._tallies[dtype, codec, kind] = Tally(dtype, codec, kind, bounds_for(dtype, codec, kind))

    def add(self, dtype: Dtype, outcomes: Sequence[Outcome], drawn: Sequence[Outcome], *, stage: int) -> None:
        """One microbatch as each setting has computed it, and as it comes out when it is rounded otherwise, the plain
        way first; contributions are of this stage."""
        plain, *otherwise = drawn

        def own(of: Callable[[Outcome], Floats]) -> float:
            return max(relative_error(of(other), of(plain)) for other in otherwise)

        for codec in ACTIVATION_CODECS:
            wire = activation_codec(codec)
            for kind, of in (("activation", _y), ("gradient", _grad_x)):
                self._tallies[dtype, codec, kind].add(map(of, outcomes), codec=wire, own_error=own(of))
        for name in CONTRIBUTION_CODECS:

            def said(outcome: Outcome, name: AveragingCodecName = name) -> Floats:
                return _contributed(name, outcome.gradients[stage])

            self._tallies[dtype, name, "contribution"].add(map(said, outcomes), codec=None, own_error=own(said))

    @property
    def audits(self) -> int:
        """Comparisons in each row, at least."""
        return min(tally.comparisons for tally in self._tallies.values())

    def rows(self) -> list[Row]:
        return [tally.row() for tally in self._tallies.values()]


def drawn_outcomes(bench: Bench, weights: Weights, work: Work) -> list[Outcome]:
    """The work by the native setting, and then rounded otherwise, as often as an auditor does at least."""
    setting = Setting("native", 1, 1)
    found = [bench.compute(weights, work, setting)]
    for draw in range(FEWEST_DRAWS):
        with rounded_otherwise(draw):
            found.append(bench.compute(weights, work, setting))
    return found


def _y(outcome: Outcome) -> Floats:
    return outcome.y_BLD


def _grad_x(outcome: Outcome) -> Floats:
    return outcome.grad_x_BLD


def _contributed(name: AveragingCodecName, gradient: Floats) -> Floats:
    codec = vector_codec(name)
    mean = gradient / np.float32(SAMPLES * TOKENS)
    decoded = np.empty_like(mean)
    codec.decode(codec.encode(mean, seed=SEED), decoded)
    return decoded
