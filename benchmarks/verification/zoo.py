"""Audits between numeric classes: the same microbatch as each class computes it, held against each other's replay.

Two stages of so many layers, width 64. Scenes: fresh weights; weights that have learnt a small language; and such on
the one batch that they know by heart, whose gradients are what a cancellation leaves. What is compared is compared as
audits do it (`verification.replay.compared`), own errors and an accuser's caution included; of contributions AdamW is
taken to know nothing yet, which is the worst case of what errors move.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.verification.numeric_classes import TF32, computing_as, device_of
from peer.adversary import strengths
from swarm.averaging.activations import activation_codec
from swarm.averaging.codecs import vector_codec
from swarm.core.settings import ActivationCodecName, AveragingCodecName, ModelSettings
from swarm.model.families import canonical_config_json
from swarm.model.initial import initial_weights
from swarm.model.stage import StageModel
from verification.audit.amplified import amplified, moved_bounds_for
from verification.audit.draws import contribution_rate, detection, microbatch_rate
from verification.audit.tolerance import CAUTION, Comparison, Grade, Kind, bounds_for, relative_error
from verification.replay.compared import compared_gradient, compared_sent, past_doubt
from verification.replay.stage_replay import Sent

Floats: TypeAlias = NDArray[np.float32]
Ids: TypeAlias = NDArray[np.int64]
Dtype = Literal["fp32", "bf16"]
Scene = Literal["fresh", "trained", "by heart"]

DTYPES: tuple[Dtype, ...] = get_args(Dtype)
SCENES: tuple[Scene, ...] = get_args(Scene)
WIRES: tuple[ActivationCodecName, ...] = ("fp32", "bf16", "int8", "int4", "int4h")
AVERAGING: tuple[AveragingCodecName, ...] = ("fp32", "bf16", "int8")
WIDTH, SAMPLES, TOKENS, VOCABULARY = 64, 2, 32, 128
SEED = bytes(32)
SEEDS = (9, 22)
"""Of microbatches. (3,) to (8, 22) were looked at while bounds were fixed."""

TAUGHT_STEPS = 60
BY_HEART_LOSS, BY_HEART_STEPS = 1e-3, 300
"""Nats a token, or so many steps."""
REPLICAS, MICROBATCHES = 4, 8
"""Of a stage, and of a peer in a version, for the law's bound on the versions until a ban."""
SCALES = tuple(2.0 ** (power / 2) for power in range(-18, 3))
"""Norms of lies, over the honest tensor's."""


@dataclass(frozen=True)
class Outcome:
    """What a microbatch came to at both stages."""

    y_BLD: Floats
    grad_x_BLD: Floats
    means: tuple[Floats, Floats]
    """Gradients of each stage's parameters, of one token."""


@dataclass(frozen=True)
class Work:
    """A microbatch at both stages."""

    weights: tuple[Floats, Floats]
    tokens_BL: Ids
    targets_BL: Ids
    x_BLD: Floats
    grad_y_BLD: Floats


def settings_of(depth: int, dtype: Dtype) -> ModelSettings:
    config = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 2 * depth,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": TOKENS,
        "initializer_range": 0.05,
    }
    cuts = ((0, depth), (depth, 2 * depth))
    return ModelSettings(config_json=canonical_config_json(config), stage_layers=cuts, compute_dtype=dtype)


class TwoStages:
    """The model in one compute type, on one device."""

    def __init__(self, depth: int, dtype: Dtype, device: str = "cpu") -> None:
        self.stages = [StageModel(settings_of(depth, dtype), stage, device=device) for stage in (0, 1)]

    def compute(self, work: Work) -> Outcome:
        """Each stage from what came in at it."""
        first, last = self.stages
        of_first, of_last = (stage.weights(flat) for stage, flat in zip(self.stages, work.weights, strict=True))
        sums = [torch.zeros(stage.layout.num_values, device=stage.device) for stage in self.stages]
        y, saved = first.forward(of_first, torch.from_numpy(work.tokens_BL), keep=True)
        assert saved is not None
        first.backward(saved, torch.from_numpy(work.grad_y_BLD), sums[0])
        _, count, kept = last.loss(of_last, torch.from_numpy(work.x_BLD), torch.from_numpy(work.targets_BL), keep=True)
        assert kept is not None
        grad_x = last.loss_backward(kept, sums[1])
        assert grad_x is not None
        fetch = last.link.fetch
        means = (fetch(sums[0]) / count).numpy(), (fetch(sums[1]) / count).numpy()
        return Outcome(fetch(y.float()).numpy(), fetch(grad_x.float()).numpy(), means)


def language(rng: np.random.Generator) -> tuple[Ids, Ids]:
    """A batch of a language in which each token has three successors."""
    ids = np.empty((SAMPLES, TOKENS + 1), dtype=np.int64)
    ids[:, 0] = rng.integers(VOCABULARY, size=SAMPLES)
    for place in range(TOKENS):
        ids[:, place + 1] = (5 * ids[:, place] + rng.choice([1, 7, 40], size=SAMPLES, p=[0.7, 0.2, 0.1])) % VOCABULARY
    return np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:])


@lru_cache(maxsize=1)
def weights_of(depth: int, scene: Scene) -> tuple[Floats, Floats]:
    """The same wherever PyTorch adds up alike."""
    model = TwoStages(depth, "fp32")
    first, last = initial_weights(settings_of(depth, "fp32"), 0, None)
    if scene == "fresh":
        return first, last
    flats, rng = [first.copy(), last.copy()], np.random.default_rng(1)
    means, squares = ([np.zeros_like(flat) for flat in flats] for _ in range(2))
    steps = TAUGHT_STEPS if scene == "trained" else BY_HEART_STEPS
    known = language(np.random.default_rng(SEEDS))
    for step in range(1, steps + 1):
        work, loss = _passed(model, (flats[0], flats[1]), *(known if scene == "by heart" else language(rng)))
        if scene == "by heart" and loss < BY_HEART_LOSS:
            break
        found = model.compute(work).means
        for flat, mean, square, gradient in zip(flats, means, squares, found, strict=True):
            mean += np.float32(0.1) * (gradient - mean)
            square += np.float32(0.05) * (gradient * gradient - square)
            rate = np.float32(2e-3 / (1 - 0.9**step))
            flat -= rate * mean / (np.sqrt(square / np.float32(1 - 0.95**step)) + np.float32(1e-8))
    return flats[0], flats[1]


def work_of(depth: int, scene: Scene, number: int) -> Work:
    """Microbatch `number`, through int8 on the wire between the stages."""
    weights, rng = weights_of(depth, scene), np.random.default_rng([*SEEDS, number])
    if scene == "by heart":
        order = rng.permutation(SAMPLES)
        tokens, targets = (part[order] for part in language(np.random.default_rng(SEEDS)))
    else:
        tokens, targets = language(rng)
    return _passed(TwoStages(depth, "fp32"), weights, tokens, targets)[0]


def other_work(depth: int, scene: Scene, number: int) -> Work:
    """Another batch on the same weights, not known by heart: what a liar has instead."""
    tokens, targets = language(np.random.default_rng([*SEEDS, number, 1]))
    return _passed(TwoStages(depth, "fp32"), weights_of(depth, scene), tokens, targets)[0]


def _passed(model: TwoStages, weights: tuple[Floats, Floats], tokens: Ids, targets: Ids) -> tuple[Work, float]:
    """With what passes between the stages; and the loss in nats a token."""
    (first, last), wire = model.stages, activation_codec("int8")
    of_first, of_last = (stage.weights(flat) for stage, flat in zip(model.stages, weights, strict=True))
    y, _ = first.forward(of_first, torch.from_numpy(tokens), keep=False)
    shape = (*tokens.shape, WIDTH)
    x = wire.decode(wire.encode(y), shape)
    loss, count, kept = last.loss(of_last, x, torch.from_numpy(targets), keep=True)
    assert kept is not None
    grad = last.loss_backward(kept, torch.zeros(last.layout.num_values))
    assert grad is not None
    sent = wire.decode(wire.encode(grad), shape).numpy()
    return Work(weights, tokens, targets, x.numpy(), sent), loss / count


# -- one auditor's view ----------------------------------------------------------------------------------


@dataclass
class Auditor:
    """A class's replays of one microbatch."""

    name: str
    dtype: Dtype
    model: TwoStages
    work: Work
    _drawn: list[Outcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        with computing_as(self.name):
            self.base = self.model.compute(self.work)
        self._sent = {
            (wire, kind): Sent(activation_codec(wire).encode(torch.from_numpy(tensor)), tensor)
            for wire in WIRES
            for kind, tensor in tensors_of(self.base).items()
        }
        self.said = {(name, stage): decoded(name, self.base.means[stage]) for name in AVERAGING for stage in (0, 1)}

    def hop(self, wire: ActivationCodecName, kind: Kind, claimed: memoryview) -> Comparison:
        """What it thinks of a tensor on a wire."""
        outcomes = self._otherwise()
        with computing_as(self.name):
            return compared_sent(
                *(activation_codec(wire), bounds_for(self.dtype, wire, kind), claimed, self._sent[wire, kind]),
                lambda: tensors_of(next(outcomes))[kind],
                caution=CAUTION,
            )

    def contribution(self, name: AveragingCodecName, stage: int, claimed: Floats) -> Comparison:
        """What it thinks of a contribution of this microbatch alone."""
        again, outcomes = self.said[name, stage], self._otherwise()
        moved = amplified(claimed, again, None, epsilon=1e-8)
        bounds = bounds_for(self.dtype, name, "contribution"), moved_bounds_for(self.dtype, name)

        def own() -> tuple[float, float]:
            other = decoded(name, next(outcomes).means[stage])
            return relative_error(other, again), amplified(other, again, None, epsilon=1e-8).measured

        with computing_as(self.name):
            return past_doubt(
                lambda errors: compared_gradient(claimed, again, moved, bounds, own=errors, caution=CAUTION),
                own,
            )

    def _otherwise(self) -> Iterator[Outcome]:
        """Of draws from the first on, each made once, within the draw's own rounding."""
        for draw in itertools.count():
            if draw == len(self._drawn):
                self._drawn.append(self.model.compute(self.work))
            yield self._drawn[draw]


def tensors_of(outcome: Outcome) -> dict[Kind, Floats]:
    return {"activation": outcome.y_BLD, "gradient": outcome.grad_x_BLD}


def decoded(name: AveragingCodecName, mean: Floats) -> Floats:
    """As a contribution says it."""
    codec, values = vector_codec(name), np.empty_like(mean)
    codec.decode(codec.encode(mean, seed=SEED), values)
    return values


# -- a microbatch among all classes -----------------------------------------------------------------------


@dataclass
class Found:
    """What audits of one microbatch came to, ready for JSON."""

    pairs: dict[str, list[float]] = field(default_factory=dict)
    """Of auditor_claimant: audits, accused, largest share of the bound."""
    rows: dict[str, list[float]] = field(default_factory=dict)
    """Of honest work, by compute, codec and kind: audits, largest error, share, own error that was measured."""
    attacks: dict[str, list[int]] = field(default_factory=dict)
    """By kind: found, of."""
    tf32: list[int] = field(default_factory=lambda: [0, 0])
    """What was computed in it and sent in fp32: not honest, of."""
    scales: dict[str, float] = field(default_factory=dict)
    """By compute, codec and kind: the smallest lie that is a ban and all larger ones are, over the tensor's norm."""

    def honest(self, pair: str, row: str, found: Comparison) -> None:
        audits, accused, largest = self.pairs.get(pair, [0, 0, 0.0])
        self.pairs[pair] = [audits + 1, accused + (found.grade is Grade.FRAUD), max(largest, found.share)]
        count, error, share, own = self.rows.get(row, [0, 0.0, 0.0, 0.0])
        measured = max(own, found.own_error or 0.0)
        self.rows[row] = [count + 1, max(error, found.measured), max(share, found.share), measured]

    def attack(self, kind: str, found: Comparison) -> None:
        seen, of = self.attacks.get(kind, [0, 0])
        self.attacks[kind] = [seen + (found.grade is Grade.FRAUD), of + 1]


def audited(dtype: Dtype, depth: int, scene: Scene, number: int, names: Sequence[str]) -> Found:
    """Everybody audits everybody's work on this microbatch; and lies, of one class each, before another."""
    work, other = work_of(depth, scene, number), other_work(depth, scene, number)
    model = TwoStages(depth, dtype)
    models = {device: TwoStages(depth, dtype, device) for device in {device_of(name) for name in names}}
    auditors = [Auditor(name, dtype, models[device_of(name)], work) for name in names]
    found = Found()
    for one, two in itertools.permutations(auditors, 2):
        pair = f"{one.name}_{two.name}"
        for wire, (kind, tensor) in itertools.product(WIRES, tensors_of(two.base).items()):
            body = activation_codec(wire).encode(torch.from_numpy(tensor))
            found.honest(pair, f"{dtype}, {wire}, {kind}", one.hop(wire, kind, body))
        for name, stage in itertools.product(AVERAGING, (0, 1)):
            compared = one.contribution(name, stage, two.said[name, stage])
            found.honest(pair, f"{dtype}, {name}, contribution", compared)
    auditor, liar = (auditors[place % len(auditors)] for place in (number, number + 1 + number % 3))
    _lies(found, auditor, liar, model.compute(other))
    if dtype == "fp32":
        with TF32():
            tf32 = model.compute(work)
        for kind, tensor in tensors_of(tf32).items():
            compared = auditor.hop("fp32", kind, activation_codec("fp32").encode(torch.from_numpy(tensor)))
            found.tf32 = [found.tf32[0] + (compared.grade is not Grade.HONEST), found.tf32[1] + 1]
    return found


def _lies(found: Found, auditor: Auditor, liar: Auditor, other: Outcome) -> None:
    rng = np.random.default_rng(7)
    for wire, (kind, honest) in itertools.product(WIRES, tensors_of(liar.base).items()):
        codec = activation_codec(wire)

        def hop(tensor: Floats, wire: ActivationCodecName = wire, kind: Kind = kind) -> Comparison:
            return auditor.hop(wire, kind, activation_codec(wire).encode(torch.from_numpy(tensor)))

        noise = _noise(rng, honest)
        for name, lie in (
            ("negate", -honest),
            ("zeros", np.zeros_like(honest)),
            ("noise", honest + np.float32(strengths.NOISE_SHARE) * noise),
            ("swap", tensors_of(other)[kind]),
        ):
            found.attack(f"{kind}_{name}", hop(lie))
        row = f"{auditor.dtype}, {codec.name}, {kind}"
        found.scales[row] = max(found.scales.get(row, 0.0), _smallest(hop, honest, noise))
    for name, stage in itertools.product(AVERAGING, (0, 1)):
        honest = liar.base.means[stage]
        noise = _noise(rng, honest)

        def contributed(mean: Floats, name: AveragingCodecName = name, stage: int = stage) -> Comparison:
            return auditor.contribution(name, stage, decoded(name, mean))

        half = np.float32(strengths.PARTIAL_WORK_SHARE)
        for attack, lie in (
            ("sign_flip", -honest),
            ("sign_flip_1000", np.float32(-1000) * honest),
            ("ipm", np.float32(-strengths.INNER_PRODUCT_SHARE) * honest),
            ("alie", honest - np.float32(strengths.ALIE_DEVIATIONS) * np.abs(honest - other.means[stage])),
            ("zeros", np.zeros_like(honest)),
            ("copied_gradient", other.means[stage]),
            ("partial_work", half * honest + half * other.means[stage]),
            ("noise", honest + np.float32(strengths.NOISE_SHARE) * noise),
        ):
            found.attack(attack, contributed(lie))
        row = f"{auditor.dtype}, {name}, contribution"
        smallest = _smallest(contributed, honest, noise)
        found.scales[row] = max(found.scales.get(row, 0.0), smallest)


def _noise(rng: np.random.Generator, like: Floats) -> Floats:
    """Of the same norm, in values as large as those they are beside."""
    drawn = (rng.standard_normal(like.shape) * np.abs(like)).astype(np.float32)
    return np.asarray(drawn * (np.linalg.norm(like) / np.linalg.norm(drawn)), dtype=np.float32)


def _smallest(grade: Callable[[Floats], Comparison], honest: Floats, noise: Floats) -> float:
    """The scale of noise from which on all is fraud; infinite if the largest is not."""
    smallest = math.inf
    for scale in reversed(SCALES):
        if grade(honest + np.float32(scale) * noise).grade is not Grade.FRAUD:
            break
        smallest = scale
    return smallest


# -- all of it --------------------------------------------------------------------------------------------


def versions_until_found(kind: str, share: float) -> float | None:
    """By the law's 99 % bound, of a liar that lies in all it does and whose lies are found in that share of audits."""
    is_hop = kind.startswith(("activation", "gradient"))
    rate = microbatch_rate(REPLICAS) if is_hop else contribution_rate(REPLICAS)
    missed = (1 - share * detection(rate, REPLICAS - 1)) ** (MICROBATCHES if is_hop else 1)
    return math.ceil(math.log(0.01) / math.log(missed)) if 0 < missed < 1 else 1 if missed == 0 else None


def summed(scenes: Sequence[str], units: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What units, as `Found` has them, come to together; each of its scene."""
    pairs: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0])
    rows: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0, 0.0])
    attacks: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    scales: dict[str, float] = {}
    for scene, unit in zip(scenes, units, strict=True):
        for pair, (audits, accused, share) in unit["pairs"].items():
            held = pairs[pair]
            pairs[pair] = [held[0] + audits, held[1] + accused, max(held[2], share)]
        for row, (count, *largest) in unit["rows"].items():
            row = f"{row}, {scene}"
            rows[row] = [rows[row][0] + count, *map(max, rows[row][1:], largest)]
        for kind, (found, of) in unit["attacks"].items():
            attacks[kind] = [attacks[kind][0] + found, attacks[kind][1] + of]
        for row, scale in unit["scales"].items():
            row = f"{row}, {scene}"
            scales[row] = max(scales.get(row, 0.0), scale)
    return {
        "microbatches": len(units),
        "audits": int(sum(pair[0] for pair in pairs.values())),
        "accused": int(sum(pair[1] for pair in pairs.values())),
        "largest_share_of_bound": max((pair[2] for pair in pairs.values()), default=0.0),
        "pairs": {
            pair: {"audits": int(audits), "accused": int(accused), "largest_share_of_bound": share}
            for pair, (audits, accused, share) in sorted(pairs.items())
        },
        "rows": {
            row: {
                "audits": int(count),
                "largest_error": error,
                "largest_share_of_bound": share,
                "largest_own_error": own,
            }
            for row, (count, error, share, own) in sorted(rows.items())
        },
        "attacks": {
            kind: {"found": found, "of": of, "versions": versions_until_found(kind, found / of)}
            for kind, (found, of) in sorted(attacks.items())
        },
        "tf32": {
            "not_honest": sum(unit["tf32"][0] for unit in units),
            "of": sum(unit["tf32"][1] for unit in units),
        },
        "smallest_banned": dict(sorted(scales.items())),
    }
