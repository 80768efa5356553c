"""A long benchmark measures each piece once, however often it is interrupted."""

from pathlib import Path

import pytest

from benchmarks.kept_pieces import KeptPieces


def test_a_piece_is_measured_once_when_the_command_is_run_again(tmp_path: Path) -> None:
    path, measured = tmp_path / "deep" / "pieces.jsonl", list[str]()

    def measure(name: str) -> dict[int, str]:
        measured.append(name)
        return {1: name}

    for names in (["a"], ["a", "b"], ["b", "a"]):
        with KeptPieces(path, total=2) as pieces:
            for name in names:
                assert pieces.get(name, lambda name=name: measure(name)) == {"1": name}
    assert measured == ["a", "b"]


def test_no_piece_is_begun_when_the_time_is_over_and_those_that_are_there_stay(tmp_path: Path) -> None:
    path = tmp_path / "pieces.jsonl"
    with KeptPieces(path, total=2) as pieces:
        pieces.get("a", lambda: 1)
    with KeptPieces(path, total=2, stop_after_s=-1.0) as pieces:
        assert pieces.get("a", lambda: 2) == 1
        with pytest.raises(SystemExit, match="75"):
            pieces.get("b", lambda: 2)
