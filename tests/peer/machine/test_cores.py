"""Daemons of one machine count each other by seats and claims, on folders as sysfs has them."""

import fcntl
import os
from pathlib import Path

import pytest

from peer.machine.cores import SEATS, Seat, Seen


@pytest.fixture
def cpus(tmp_path: Path) -> Path:
    for core in range(2):
        (tmp_path / f"cpu{core}" / SEATS).mkdir(parents=True)
    return tmp_path


def test_daemons_count_each_other_and_each_has_its_rank(cpus: Path) -> None:
    one, other, third = (Seat((0, 1), cpus=cpus) for _ in range(3))
    assert one.look() == Seen(claimed=0, daemons=1, rank=0)
    assert other.look() == Seen(claimed=0, daemons=2, rank=1)
    assert one.look() == Seen(claimed=0, daemons=2, rank=0)
    assert third.look() == Seen(claimed=0, daemons=3, rank=2), "there is no seat left for it"
    one.close()
    assert third.look() == Seen(claimed=0, daemons=2, rank=0)
    assert other.look() == Seen(claimed=0, daemons=2, rank=1)
    for seat in (other, third):
        seat.close()


def test_a_core_that_is_claimed_is_counted(cpus: Path) -> None:
    descriptor = os.open(cpus / "cpu1", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    seat = Seat((0, 1), cpus=cpus)
    assert seat.look() == Seen(claimed=1, daemons=1, rank=0)
    os.close(descriptor)
    assert seat.look() == Seen(claimed=0, daemons=1, rank=0)
    seat.close()


def test_where_there_are_no_such_folders_nobody_is_counted(tmp_path: Path) -> None:
    assert Seat((0, 1), cpus=tmp_path).look() is None
