"""What a token of a window is worth: the measured figures, and what lies between and beyond them."""

import itertools
import re
from pathlib import Path

import pytest

from swarm.core.planning.token_worth import GAINS, gain, is_measured, worth_of_token
from tests import ROOT


def test_measured_gains_are_those_of_the_page_they_are_named_after() -> None:
    page = Path(ROOT, "docs", "outer_steps.md").read_text()
    rows = {"synchronous fp32": 1, "H10-int2": 10, "H5-m2_vfac-int2": 5, "H30-m2_vfac-int2": 30}
    for name, steps in rows.items():
        row = next(line for line in page.splitlines() if line.startswith("|") and name in line)
        said = re.search(r"(\d\.\d\d)", row.split("|")[-2])
        assert said is not None
        assert gain(4, steps) == pytest.approx(float(said[1]))
    beside = next(line for line in page.splitlines() if line.startswith("|") and "H10-int2-overlap6" in line)
    assert f"**{gain(4, 10, beside=0.6):.2f}**" in beside


def test_worth_falls_with_members_and_with_steps_and_is_one_for_one_alone() -> None:
    assert [worth_of_token(1, steps) for steps in (1, *GAINS)] == [1.0] * 4
    assert worth_of_token(64, 1) == 1.0
    for members in (2, 4, 8, 16, 64):
        worths = [worth_of_token(members, steps) for steps in (1, 2, 5, 10, 20, 30, 100, 1000)]
        # 5 steps, of one seed, and 10, of three, are equal within what seeds differ by.
        assert all(later <= 1.01 * earlier for earlier, later in itertools.pairwise(worths))
        assert all(1 / members <= worth <= 1 for worth in worths)
        besides = [worth_of_token(members, 10, beside=share) for share in (0.0, 0.3, 0.6, 0.9, 1.0)]
        assert all(later < earlier for earlier, later in itertools.pairwise(besides))
        assert worth_of_token(members, 1, beside=1.0) == 1.0
    assert gain(8, 10) == pytest.approx(2.50 * 2.50 / 2.03)
    assert gain(16, 10) > gain(8, 10) > gain(4, 10) > gain(2, 10) > 1


def test_what_was_not_measured_is_known_as_such() -> None:
    assert is_measured(8, 10)
    assert is_measured(4, 10, beside=0.5)
    assert not is_measured(4, 30, beside=0.5)
    assert is_measured(500, 1)
    assert not is_measured(16, 10)
    assert not is_measured(4, 100)
