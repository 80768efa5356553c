"""Lines that the disk does not take leave the file as it was: what comes later begins on a line of its own."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from swarm.core.errors import DiskFullError, LocalError
from swarm.disk.durable_lines import append_line, replace_lines
from swarm.disk.room import disk_room


@contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_line_that_fits_only_in_part_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    append_line(path, "first")
    with files_of_at_most(path.stat().st_size + 3), pytest.raises(OSError):
        append_line(path, "does not fit")
    append_line(path, "second")
    assert path.read_text().splitlines() == ["first", "second"]


def test_lines_that_do_not_fit_replace_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    replace_lines(path, ["kept"])
    with files_of_at_most(3), pytest.raises(OSError):
        replace_lines(path, ["does not fit"])
    assert path.read_text() == "kept\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_waited_for_and_a_broken_one_is_not(tmp_path: Path) -> None:
    with pytest.raises(DiskFullError, match=f"the disk of {tmp_path} is full: make room there"), disk_room(tmp_path):
        Path("/dev/full").write_text("one byte is too much")
    with pytest.raises(LocalError, match="failed"), disk_room(tmp_path):
        (tmp_path / "missing" / "file").write_text("")
    with pytest.raises(TimeoutError), disk_room(tmp_path):
        raise TimeoutError
