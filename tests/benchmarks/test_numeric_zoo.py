"""The zoo's classes are other roundings of one product; nobody is accused among them, and lies are."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import numeric_zoo
from benchmarks.verification import zoo
from benchmarks.verification.numeric_classes import (
    CLASSES,
    TF32,
    in_lanes,
    in_splits,
    in_tensor_cores,
    plain_attention,
)


def _factors() -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(0)
    one, other = torch.randn((24, 70), generator=chance), torch.randn((70, 9), generator=chance)
    return one.bfloat16().float(), other.bfloat16().float()


def test_every_order_of_a_product_is_the_product_but_for_rounding() -> None:
    one, other = _factors()
    right = one.double() @ other.double()
    for found in (
        in_lanes(one, other, lanes=8),
        in_splits(one, other, splits=7),
        in_tensor_cores(one, other, group=8, bits=24),
        in_tensor_cores(one, other, group=16, bits=25),
    ):
        assert float((found.double() - right).norm() / right.norm()) < 1e-6


def test_tensor_cores_cut_toward_zero_what_lies_below_the_largest_of_a_group() -> None:
    one = torch.tensor([[1.0, 2.0**-23, 2.0**-24, -(2.0**-24)]])
    ones = torch.ones((4, 1))
    assert float(in_tensor_cores(one, ones, group=4, bits=24)) == 1 + 2.0**-23
    assert float(in_tensor_cores(-one, ones, group=4, bits=24)) == -(1 + 2.0**-23)
    # In a group of its own what is small is added up before it is cut off.
    assert float(in_tensor_cores(torch.full((1, 8), 2.0**-24), torch.ones((8, 1)), group=4, bits=24)) == 2.0**-21


@pytest.mark.parametrize("name", list(CLASSES))
def test_a_class_computes_the_same(name: str) -> None:
    one, other = _factors()
    usual = one @ other
    with CLASSES[name]():
        assert float(((one @ other) - usual).norm() / usual.norm()) < 1e-6


def test_tf32_loses_what_a_run_in_fp32_does_not() -> None:
    one, other = _factors()
    one = one + 1e-4
    usual = one @ other
    with TF32():
        found = one @ other
    assert 1e-5 < float((found - usual).norm() / usual.norm()) < 1e-3


@pytest.mark.parametrize("is_causal", [True, False])
def test_plain_attention_is_attention(is_causal: bool) -> None:
    chance = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn((1, heads, 8, 16), generator=chance) for heads in (4, 2, 2))
    usual = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=True)
    found = plain_attention(query, key, value, is_causal=is_causal, enable_gqa=True)
    assert torch.allclose(found, usual, atol=1e-5)


@pytest.mark.soak
def test_two_classes_do_not_accuse_each_other_and_a_kept_unit_is_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keep, scales = tmp_path / "zoo.jsonl", (2.0**-4, 2.0)
    monkeypatch.setattr(zoo, "SCALES", scales)
    asked = ["--json", "--keep", str(keep), "--microbatches", "1", "--depths", "1", "--scenes", "fresh"]
    asked += ["--dtypes", "bf16", "--classes", "tensor-16", "plain-attention"]
    numeric_zoo.main(asked)
    said = json.loads(capsys.readouterr().out)
    assert set(said["pairs"]) == {"tensor-16_plain-attention", "plain-attention_tensor-16"}
    assert all(pair["audits"] == 16 and pair["accused"] == 0 for pair in said["pairs"].values())
    assert 0 < said["largest_share_of_bound"] <= 0.5
    assert {"sign_flip", "ipm", "alie", "gradient_negate", "activation_swap"} <= set(said["attacks"])
    assert all(attack["found"] == attack["of"] > 0 for attack in said["attacks"].values())
    assert set(said["smallest_banned"].values()) <= set(scales)
    monkeypatch.setattr(zoo, "audited", None)
    numeric_zoo.main(asked)
    assert json.loads(capsys.readouterr().out) == said
