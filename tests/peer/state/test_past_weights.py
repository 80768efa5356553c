"""Weights that audits need are kept until they are made, and no longer."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from peer.state.past_weights import PastVersion, PastWeights
from swarm.core.errors import LocalError


def version(number: int) -> PastVersion:
    return PastVersion(np.full(3, number, dtype=np.float32), None, ahead_is_known=True)


def walked(past: PastWeights, first: int, last: int) -> PastWeights:
    for number in range(first, last + 1):
        past.remember(number, version(number))
    return past


def test_only_the_last_versions_are_kept_when_nothing_is_wanted() -> None:
    past = walked(PastWeights(2), 0, 6)
    assert past.versions == [5, 6]
    assert past.get(6).weights.tolist() == [6, 6, 6]
    with pytest.raises(LocalError, match="version 4"):
        past.get(4)


def test_a_wanted_version_stays_until_it_is_not_wanted_any_more() -> None:
    past = walked(PastWeights(1), 0, 3)
    past.want({3}, by="audits")
    walked(past, 4, 6)
    assert past.versions == [3, 6]
    past.want({6}, by="audits")
    assert past.versions == [6]


def test_a_version_that_is_gone_does_not_come_back_when_wanted() -> None:
    past = walked(PastWeights(1), 0, 3)
    past.want({1, 3}, by="audits")
    assert past.versions == [3]


def test_nothing_is_kept_where_nothing_is_replayed_or_after_another_state() -> None:
    assert walked(PastWeights(0), 0, 3).versions == []
    past = walked(PastWeights(2), 0, 3)
    past.want({2, 3}, by="audits")
    past.clear()
    assert past.versions == []


def test_what_is_written_is_read_from_disk_and_goes_with_its_version(tmp_path: Path) -> None:
    (tmp_path / "past-00000099").write_bytes(b"of an earlier process")
    past = PastWeights(2, tmp_path)
    assert not list(tmp_path.iterdir())
    for number in range(5):
        held = version(number)
        past.remember(number, PastVersion(held.weights, held.weights + 1 if number % 2 else None, ahead_is_known=True))
        past.write()
        past.write()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["past-00000003", "past-00000003-ahead", "past-00000004"]
    old, last = past.get(3), past.get(4)
    assert isinstance(old.weights, np.memmap)
    assert not old.weights.flags.writeable
    assert old.ahead is not None
    assert (old.weights.tolist(), old.ahead.tolist(), last.ahead) == ([3, 3, 3], [4, 4, 4], None)
    past.clear()
    assert not list(tmp_path.iterdir())
    assert old.weights.tolist() == [3, 3, 3], "who has it reads on"


def test_what_was_cleared_while_it_was_written_does_not_come_back(tmp_path: Path) -> None:
    class Cleared(PastWeights):
        def _mapped(self, path: Path, values: NDArray[np.float32]) -> NDArray[np.float32]:  # type: ignore[override]
            found = PastWeights._mapped(path, values)
            self.clear()
            return found

    past = walked(Cleared(2, tmp_path), 0, 0)
    past.write()
    assert past.versions == []
    assert not list(tmp_path.iterdir())


def test_what_goes_while_it_is_written_does_not_take_its_file_from_the_writer(tmp_path: Path) -> None:
    class Forgetful(PastWeights):
        """Lets go of a version of which a file is on its way to its place."""

        def _remove(self, version: int) -> None:
            partial = tmp_path / f"past-{version:08d}.partial"
            partial.write_bytes(b"under way")
            super()._remove(version)
            assert partial.exists()
            partial.unlink()

    past = walked(Forgetful(1, tmp_path), 0, 3)
    past.write()
    assert [path.name for path in tmp_path.iterdir()] == ["past-00000003"]


def test_two_write_what_is_held_at_the_same_time(tmp_path: Path) -> None:
    past = PastWeights(8, tmp_path)
    for number in range(8):
        past.remember(number, PastVersion(np.full(1 << 18, number, np.float32), None, ahead_is_known=True))
    with ThreadPoolExecutor(4) as pool:
        for written in [pool.submit(past.write) for _ in range(8)]:
            written.result()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"past-{number:08d}" for number in range(8)]
    for number in range(8):
        assert np.array_equal(past.get(number).weights, np.full(1 << 18, number, np.float32))
