"""Windows in bf16 among classes of machines: nobody honest is accused, who leaves a step out is."""

import json

import pytest
from click.testing import CliRunner

from benchmarks.windows import numeric_classes


def test_two_classes_do_not_accuse_each_other_and_a_step_left_out_is_fraud(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numeric_classes, "AUDITED", {10: (1,)})
    monkeypatch.setattr(numeric_classes, "LIES", {"lazy_10": numeric_classes.LIES["lazy_10"]})
    asked = ["--pieces", "1", "--classes", "native,plain-attention", "--json"]
    said = json.loads(CliRunner().invoke(numeric_classes.main, asked, catch_exceptions=False).stdout)
    assert set(said["pairs"]) == {"native_plain-attention", "plain-attention_native"}
    assert said["all"]["audits"] == 2 * len(numeric_classes.CODECS)
    assert said["all"]["accused"] == 0
    assert said["all"]["with_own_error"] > 0
    assert 0 < said["all"]["largest_share"] <= 0.5
    assert all(one["fraud"] == one["of"] == 1 for one in said["lies"].values())
