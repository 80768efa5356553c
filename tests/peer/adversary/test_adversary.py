"""Peers that misbehave: each attack does what its name says, an honest peer nothing, and only developers can ask."""

import hashlib
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import numpy as np
import pytest
import torch

from peer.adversary import strengths as fixed
from peer.adversary.__main__ import command
from peer.adversary.false_rounds import FalseEncoder
from peer.adversary.hooks import HONEST, Adversary, At
from peer.adversary.kinds import ADVERSARIES, parse
from peer.round.work import ContributionEncoder
from swarm.attacks import DEVELOPER_VARIABLE, KINDS, Attack, Stages, parse_attack
from swarm.averaging.codecs import vector_codec
from swarm.bulk_digest import bulk_digest
from swarm.cli import ExitCode, run
from swarm.core.errors import SettingsError
from swarm.core.ids import MicrobatchId, PeerId, Step, Version
from swarm.core.ranking import rank
from swarm.core.round.contribution import MAX_CHARGES
from swarm.core.state.stage_chain import StageChain
from swarm.local.compute_pools import POOLS
from swarm.model.stage import StageModel, Weights
from tests.peer.round.test_work import Replica, accumulated
from tests.swarm.core.audit.chances import NO_CHANCE
from tests.swarm.model.tiny_models import stages_of, tiny_model, token_batch, whole_model

WHERE = slice(0, 64)
CHARGES = (bytes(range(32)),)
CHAIN = cast(StageChain, SimpleNamespace(version=5, name=bytes(32), members=(PeerId("peer 0"), PeerId("peer 1"))))
MEAN = np.linspace(-1, 1, 64, dtype=np.float32)


def at(step: int, microbatch: int = 0) -> At:
    return At(Step(step), MicrobatchId(microbatch))


def hidden(seed: int = 0) -> torch.Tensor:
    return torch.randn(4, 8, 64, generator=torch.Generator().manual_seed(seed))


@lru_cache(maxsize=1)
def stages() -> list[tuple[StageModel, Any]]:
    model = tiny_model("llama", 2)
    return stages_of(model, whole_model(model))


def any_weights(scale: float = 1.0) -> Weights:
    """Of the first stage."""
    model, flat = stages()[0]
    return model.weights(flat * np.float32(scale))


def flat_of(weights: Weights) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.concatenate([values.detach().numpy().ravel() for values in weights.parameters.values()])


def after_all_hooks(adversary: Adversary, step: int) -> list[tuple[Any, Any]]:
    """(given, got) of every hook that hands on what it is given, for one microbatch and round of `step`."""
    here, weights, x, y, grad = at(step), any_weights(), hidden(1), hidden(2), hidden(3)
    targets, encoded = token_batch(4, 8)[1], (vector_codec("fp32").encode(MEAN, seed=bytes(32)), bytes(32))
    reduced = adversary.reduced(Step(step), encoded, vector_codec("fp32"), num_values=64, seed=bytes(32))
    return [
        (weights, adversary.weights(here, stages()[0][0], Version(step), weights)),
        (targets, adversary.targets(here, targets, vocab_size=97)),
        (y, adversary.activation(here, weights, x, y)),
        (y, adversary.output_gradient(here, y)),
        (grad, adversary.activation_gradient(here, grad, y)),
        (MEAN, adversary.mean(Step(step), WHERE, MEAN)),
        (encoded, reduced),
        (CHARGES, adversary.charged(CHAIN, CHARGES, PeerId("peer 0"))),
        (NO_CHANCE, adversary.revealed(Step(step), NO_CHANCE)),
    ]


# -- honest ----------------------------------------------------------------------------------------------------


def test_honest_peer_hands_on_the_very_objects() -> None:
    assert all(got is given for given, got in after_all_hooks(HONEST, 5))
    total = hidden().flatten()
    before = total.clone()
    HONEST.adding(at(5), total)
    HONEST.added(at(5), total, num_tokens=7)
    assert torch.equal(total, before)
    assert not HONEST.withholds


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_done_before_the_attack_begins(kind: str) -> None:
    adversary = parse(f"{kind}@6", seed="peer")
    total = torch.ones(64)
    for microbatch in range(30):
        adversary.adding(at(5, microbatch), total)
        adversary.added(at(5, microbatch), total, num_tokens=1)
    assert torch.equal(total, torch.ones(64))
    assert all(got is given for given, got in after_all_hooks(adversary, 5))
    assert not adversary.withholds


def test_a_grinding_peer_writes_charges_that_put_it_first_and_now_and_then_another_value() -> None:
    adversary, me = parse("grinding@3", seed="peer"), PeerId("peer 0")
    assert adversary.charged(CHAIN, CHARGES, me) == CHARGES, "what it has to bring comes first"
    charges = adversary.charged(CHAIN, (), me)
    assert len(charges) == MAX_CHARGES
    assert {rank(CHAIN.members, "leader", charge.digest)[0] for charge in charges} == {me}
    changed = [step for step in range(24) if adversary.revealed(Step(step), NO_CHANCE) != NO_CHANCE]
    assert changed == [7, 15, 23]


@pytest.mark.parametrize("name", ["int8", "topk"])
def test_honest_contribution_has_the_same_bits_and_a_flipped_one_the_opposite_values(name: Any) -> None:
    replica = Replica(name, 1)
    seeds = [hashlib.sha256(bytes([part])).digest() for part in range(len(replica.parts()))]

    def made(adversary: Adversary | None) -> list[memoryview]:
        fresh: Any = Replica(name, 1)
        encoder = ContributionEncoder(fresh) if adversary is None else FalseEncoder(adversary, fresh)
        return encoder.encode(Step(3), accumulated(), seeds)[0]

    honest = made(None)
    assert made(HONEST) == honest
    flipped = made(parse("sign_flip"))
    first = replica.parts()[0]
    values = np.empty((2, first.stop - first.start), dtype=np.float32)
    replica.parts().contribution_codec(0).decode(honest[0], values[0])
    replica.parts().contribution_codec(0).decode(flipped[0], values[1])
    assert np.dot(values[0].astype(float), values[1]) < -0.5 * np.dot(values[0].astype(float), values[0])


# -- contributions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "factor"), [("sign_flip", -1), ("sign_flip_1000", -1000), ("ipm", -0.5), ("zeros", 0)]
)
def test_mean_is_multiplied(kind: str, factor: float) -> None:
    sent = parse(kind).mean(Step(0), WHERE, MEAN)
    assert sent.dtype == np.float32
    assert np.array_equal(sent, MEAN * np.float32(factor))


def test_copied_gradient_is_the_last_one_before_the_attack() -> None:
    adversary = parse("copied_gradient@2")
    sent = [adversary.mean(Step(step), WHERE, MEAN + np.float32(step)) for step in range(4)]
    assert [float(values[0] - MEAN[0]) for values in sent] == [0, 1, 1, 1]


def test_alie_is_as_many_deviations_off_the_mean_as_fixed() -> None:
    adversary = parse("alie@1")
    rng = np.random.default_rng(0)
    deviation = np.linspace(0.5, 2.0, 64, dtype=np.float32)
    total = torch.zeros(64)
    for microbatch in range(400):
        adversary.adding(at(0, microbatch), total)
        total += 10 * torch.from_numpy(np.float32(rng.normal(3, 1, 64)) * deviation)
        adversary.added(at(0, microbatch), total, num_tokens=10)
    for microbatch in range(4):
        adversary.adding(at(1, microbatch), total)
        total += 10 * torch.from_numpy(np.float32(rng.normal(3, 1, 64)) * deviation)
        adversary.added(at(1, microbatch), total, num_tokens=10)
    off = (MEAN - adversary.mean(Step(1), WHERE, MEAN)) / (
        fixed.ALIE_DEVIATIONS * deviation / 2
    )  # sqrt(4 microbatches)
    assert np.all(off > 0)
    assert 0.8 < float(off.mean()) < 1.2


def test_partial_work_is_claimed_but_about_half_of_it_is_not_in_the_sum() -> None:
    adversary = parse("partial_work@1", seed="peer")
    total = torch.zeros(8)
    for step in (0, 1):
        for microbatch in range(100):
            adversary.adding(at(step, microbatch), total)
            total += 1
            adversary.added(at(step, microbatch), total, num_tokens=1)
        if step == 0:
            assert total.tolist() == [100] * 8
    assert 130 < float(total[0]) < 170


@pytest.mark.parametrize(("kind", "share"), fixed.LAZY_SHARES.items())
def test_a_lazy_window_counts_gradients_before_for_what_it_left_out(kind: str, share: float) -> None:
    adversary = parse(f"{kind}@1", seed="peer")
    total, own = torch.zeros(1), []
    for step in (0, 1):
        for microbatch in range(200):
            before = total.clone()
            adversary.adding(at(step, microbatch), total)
            total += microbatch + 1
            adversary.added(at(step, microbatch), total, num_tokens=1)
            own.append(float(total - before) == microbatch + 1)
    assert all(own[:200])
    assert abs((200 - sum(own[200:])) / 200 - share) < 0.09


@pytest.mark.parametrize(("kind", "size"), fixed.BENT_VALUES.items())
def test_a_stretch_of_the_first_part_is_bent_by_as_much_as_the_part_is_long(kind: str, size: int) -> None:
    adversary, way = parse(f"{kind}@1", seed="peer"), np.ones(1 << 15, dtype=np.float32)
    bent = adversary.mean(Step(1), slice(0, way.size), way)
    (off,) = np.nonzero(bent != way)
    assert (len(off), off[-1] - off[0]) == (size, size - 1)
    assert set(np.abs(bent - way)[off].tolist()) == {fixed.BENT_SHARE}
    assert np.array_equal(adversary.mean(Step(2), slice(0, way.size), way), bent), "always the same way"
    assert adversary.mean(Step(1), slice(way.size, 2 * way.size), way) is way


# -- microbatches ----------------------------------------------------------------------------------------------


def test_label_flip_mirrors_the_targets_that_count() -> None:
    targets = torch.tensor([[0, 96, -100, 40]])
    assert parse("label_flip").targets(at(0), targets, vocab_size=97).tolist() == [[96, 0, -100, 56]]


def test_other_data_has_the_targets_of_the_place_beside() -> None:
    targets = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert parse("other_data").targets(at(0), targets, vocab_size=97).tolist() == [[3, 1, 2], [6, 4, 5]]


def test_stale_weights_are_as_many_versions_old_as_fixed() -> None:
    adversary, model = parse("stale_weights@8"), stages()[0][0]
    versions = [any_weights(scale) for scale in range(1, 12)]
    used = [
        adversary.weights(at(v), model, Version(v), weights) for v, weights in enumerate(versions) for _ in range(2)
    ]
    old = [next(v for v, weights in enumerate(versions) if weights is found) for found in used[::2]]
    assert old == [0, 1, 2, 3, 4, 5, 6, 7, *(v - fixed.STALE_VERSIONS for v in (8, 9, 10))]


def test_dropped_batch_has_no_gradient_for_the_last_samples() -> None:
    grad = hidden()
    kept = parse("dropped_batch").output_gradient(at(0), grad)
    assert torch.equal(kept[:2], grad[:2])
    assert not kept[2:].any()
    assert grad[2:].any()


def test_skipped_layers_let_x_through_both_ways_and_teach_nothing() -> None:
    adversary, (x, y, grad_x, grad_y) = parse("skipped_layers"), [hidden(seed) for seed in range(4)]
    model, flat = stages()[1]
    assert adversary.activation(at(0), model.weights(flat), x, y) is x
    assert adversary.activation_gradient(at(0), grad_x, grad_y) is grad_y
    assert not adversary.output_gradient(at(0), grad_y).any()


def test_skipped_layers_of_the_first_stage_only_embed() -> None:
    (model, flat), tokens = stages()[0], token_batch(2, 8)[0]
    weights = model.weights(flat)
    y, _ = model.forward(weights, tokens, keep=False)
    sent = parse("skipped_layers").activation(at(0), weights, tokens, y)
    embedding = model.layout.views(flat)["model.embed_tokens.weight"]
    assert np.array_equal(sent.numpy(), embedding[tokens.numpy()])
    assert sent.shape == y.shape
    assert not torch.allclose(sent, y)


def sent_by(adversary: Adversary, way: str, tensor: torch.Tensor, here: At) -> torch.Tensor:
    if way == "activation":
        return adversary.activation(here, any_weights(), hidden(8), tensor)
    return adversary.activation_gradient(here, tensor, hidden(9))


@pytest.mark.parametrize("way", ["activation", "gradient"])
def test_tensors_that_go_out_are_changed_one_way_only(way: str) -> None:
    first, second = hidden(1), hidden(2)
    other = "gradient" if way == "activation" else "activation"
    for kind in ("negate", "zeros", "swap", "noise"):
        assert sent_by(parse(f"{way}_{kind}"), other, first, at(0)) is first
    assert torch.equal(sent_by(parse(f"{way}_negate"), way, first, at(0)), -first)
    assert not sent_by(parse(f"{way}_zeros"), way, first, at(0)).any()
    swap = parse(f"{way}_swap@1")
    assert torch.equal(sent_by(swap, way, first, at(0, 0)), first)
    assert torch.equal(sent_by(swap, way, second, at(1, 1)), first)
    assert torch.equal(sent_by(swap, way, first, at(1, 2)), second)


@pytest.mark.parametrize("way", ["activation", "gradient"])
def test_noise_has_the_size_that_is_fixed(way: str) -> None:
    tensor = hidden(1)
    noise = sent_by(parse(f"{way}_noise"), way, tensor, at(0)) - tensor
    assert float(noise.norm() / tensor.norm()) == pytest.approx(fixed.NOISE_SHARE, rel=1e-3)
    leaning = parse("in_tolerance_noise")
    one = sent_by(leaning, way, tensor, at(0, 0)) - tensor
    two = sent_by(leaning, way, tensor, at(0, 1)) - tensor
    assert float(one.norm() / tensor.norm()) == pytest.approx(fixed.IN_TOLERANCE_SHARE, rel=1e-2)
    assert torch.equal(one, two)


# -- others ----------------------------------------------------------------------------------------------------


def test_bit_flips_change_one_bit_now_and_then_and_never_the_version_itself() -> None:
    adversary, (model, flat) = parse("bit_flips", seed="peer"), stages()[0]
    weights = model.weights(flat)
    before = flat.copy()
    in_weights = in_gradients = 0
    for microbatch in range(200):
        used = adversary.weights(at(0, microbatch), model, Version(0), weights)
        total = torch.ones(100)
        adversary.added(at(0, microbatch), total, num_tokens=1)
        if used is not weights:
            in_weights += 1
            assert num_bits(flat_of(used), before) == 1
        bits = num_bits(total.numpy(), np.ones(100, dtype=np.float32))
        assert bits <= (used is weights)
        in_gradients += bits
    assert in_weights >= 3
    assert in_gradients >= 3
    assert 10 <= in_weights + in_gradients <= 35
    assert np.array_equal(flat, before)


def num_bits(one: Any, other: Any) -> int:
    return int(np.bitwise_count(one.view(np.uint32) ^ other.view(np.uint32)).sum())


def test_wrong_reducer_sends_well_formed_parts_of_other_values() -> None:
    codec = vector_codec("int8")
    right = codec.encode(MEAN, seed=bytes(32))
    wrong, found = parse("wrong_reducer").reduced(
        Step(0), (right, hashlib.sha256(right).digest()), codec, num_values=64, seed=bytes(32)
    )
    values = np.empty(64, dtype=np.float32)
    codec.decode(wrong, values)
    assert np.allclose(values, -MEAN, atol=0.05)
    assert found == bulk_digest(wrong)


def test_withholding_begins_at_its_step() -> None:
    adversary = parse("withholding@2")
    seen = []
    for step in range(4):
        adversary.adding(at(step), torch.zeros(1))
        seen.append(adversary.withholds)
    assert seen == [False, False, True, True]


# -- partial cheating and chance -------------------------------------------------------------------------------


def test_partial_cheating_is_in_as_many_microbatches_as_fixed_and_the_same_ones_in_every_hook() -> None:
    adversary, tensor = parse("sometimes_in_tolerance_noise", seed="peer"), hidden()
    forward = {m for m in range(1000) if sent_by(adversary, "activation", tensor, at(0, m)) is not tensor}
    backward = {m for m in reversed(range(1000)) if sent_by(adversary, "gradient", tensor, at(0, m)) is not tensor}
    assert forward == backward
    assert 70 < len(forward) < 130
    rounds = [step for step in range(200) if parse("sometimes_zeros").mean(Step(step), WHERE, MEAN) is not MEAN]
    assert 5 < len(rounds) < 40


def test_chance_follows_seed_and_microbatch_whatever_the_order() -> None:
    def noise(seed: str, microbatches: list[int]) -> dict[int, torch.Tensor]:
        adversary = parse("activation_noise", seed=seed)
        return {m: sent_by(adversary, "activation", hidden(), at(0, m)) for m in microbatches}

    one, again, other = noise("a", [0, 1]), noise("a", [1, 0]), noise("b", [0, 1])
    assert torch.equal(one[0], again[0])
    assert torch.equal(one[1], again[1])
    assert not torch.equal(one[0], one[1])
    assert not torch.equal(one[0], other[0])


# -- names and the developer's flag ----------------------------------------------------------------------------


def test_every_name_is_an_attack_and_every_attack_has_a_name() -> None:
    assert list(ADVERSARIES) == list(KINDS)
    assert set(KINDS.values()) == set(get_args(Stages))
    for kind in KINDS:
        adversary = parse(f"{kind}@3")
        assert str(adversary.attack) == f"{kind}@3"


@pytest.mark.parametrize(
    ("kind", "stages_of_three"),
    [("sign_flip", {0, 1, 2}), ("activation_swap", {0, 1}), ("gradient_swap", {1, 2}), ("label_flip", {0, 2})],
)
def test_attack_knows_the_stages_it_works_in(kind: str, stages_of_three: set[int]) -> None:
    assert {stage for stage in range(3) if Attack(kind).works_in(stage, 3)} == stages_of_three


def test_attack_is_read_from_its_name_and_step() -> None:
    assert parse_attack("sign_flip") == Attack("sign_flip", 0)
    assert parse_attack("sign_flip_1000@10") == Attack("sign_flip_1000", 10)
    assert parse_attack("sometimes_zeros@2").is_partial
    told = parse_attack("pleading_sometimes_unlisted_zeros@2")
    assert (told.plain_kind, told.pleads, told.is_partial, told.is_unlisted) == ("zeros", True, True, True)
    plain = parse_attack("zeros")
    assert (plain.pleads, plain.is_partial, plain.is_unlisted) == (False, False, False)


def test_who_lies_stands_by_it_and_who_pleads_or_is_broken_does_not() -> None:
    stands = {kind: parse(kind).stands_by_its_work for kind in ("sign_flip", "pleading_sign_flip", "bit_flips")}
    assert stands == {"sign_flip": True, "pleading_sign_flip": False, "bit_flips": False}
    assert not HONEST.stands_by_its_work


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("sign_flop", ["sign_flop", "choose sign_flip, sign_flip_1000"]),
        ("sometimes_@3", ["choose"]),
        ("sign_flip@", ["sign_flip@", "give KIND@STEP"]),
        ("sign_flip@-1", ["give KIND@STEP"]),
        ("", ["give KIND@STEP"]),
    ],
)
def test_wrong_name_is_refused_with_the_remedy(text: str, parts: list[str]) -> None:
    with pytest.raises(SettingsError) as refused:
        parse(text)
    assert all(part in str(refused.value) for part in parts)


@pytest.mark.parametrize("value", [None, "", "0", "yes"])
def test_attack_is_refused_outside_a_developers_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, value: str | None
) -> None:
    if value is None:
        monkeypatch.delenv(DEVELOPER_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(DEVELOPER_VARIABLE, value)
    arguments = ["sign_flip@1", "join", "nowhere", "--dir", str(tmp_path), "--threads", "1"]
    for name in POOLS:
        monkeypatch.setenv(name, "1")
    assert run(arguments, of=command) is ExitCode.BAD_INPUT
    assert "HOMESWARM_DEVELOPER=1 in the environment" in capsys.readouterr().err


def test_developer_is_told_of_a_wrong_kind_and_others_see_no_attack(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv(DEVELOPER_VARIABLE, "1")
    for name in POOLS:
        monkeypatch.setenv(name, "1")
    arguments = ["lie", "join", "nowhere", "--dir", str(tmp_path), "--threads", "1"]
    assert run(arguments, of=command) is ExitCode.BAD_INPUT
    assert "lie: is no kind of attack; choose sign_flip" in capsys.readouterr().err
    assert run(["join", "--help"]) is ExitCode.OK
    printed = capsys.readouterr().out
    assert "--memory" in printed
    assert "adversary" not in printed
