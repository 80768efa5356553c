"""What is seldom read is on disk for as long as somebody holds it."""

import errno
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swarm.core.errors import DiskFullError
from swarm.disk import cold_bytes
from swarm.disk.cold_bytes import ALIGNMENT_BYTES, ColdBytes


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_put_is_there_until_nobody_holds_any_of_it(tmp_path: Path) -> None:
    (tmp_path / "parts-00000007").write_bytes(b"of an earlier process")
    cold = ColdBytes(tmp_path, "parts")
    assert names(tmp_path) == []
    bodies = [bytes([number]) * (1000 + number) for number in range(4)]
    first = [cold.put(memoryview(body)) for body in bodies[:2]]
    cold.begin_anew()
    second = [cold.put(memoryview(body)) for body in bodies[2:]]
    assert names(tmp_path) == ["parts-00000000", "parts-00000001"]
    assert [bytes(body) for body in first + second] == bodies
    assert all(body.readonly for body in first + second)
    last = first.pop()[10:20]
    del first
    assert names(tmp_path) == ["parts-00000000", "parts-00000001"]
    assert bytes(last) == bodies[1][10:20]
    del last
    assert names(tmp_path) == ["parts-00000001"]
    del second
    assert names(tmp_path) == ["parts-00000001"], "it is still written to"
    cold.begin_anew()
    assert names(tmp_path) == []


def test_numbers_lie_where_they_can_be_read_and_a_hole_takes_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cold_bytes, "MAPPED_AT_ONCE_BYTES", 1 << 16)
    cold, bodies = ColdBytes(tmp_path, "parts"), [os.urandom(size) for size in (1, 40_000, 30_000, 200_000, 3)]
    held: list[Any] = [cold.put(memoryview(body)) for body in bodies]
    assert [bytes(body) for body in held] == bodies
    address = [np.frombuffer(body, "u1").ctypes.data for body in held]
    assert all(place % ALIGNMENT_BYTES == 0 for place in address)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_blocks * 512 < sum(map(len, bodies)) + 5 * 8192


def test_several_threads_put_at_a_time(tmp_path: Path) -> None:
    cold, held = ColdBytes(tmp_path, "parts"), dict[int, memoryview]()

    def put(of: int) -> None:
        for number in range(of, 200, 4):
            held[number] = cold.put(memoryview(bytes([number]) * (number + 1)))

    threads = [threading.Thread(target=put, args=(of,)) for of in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert all(bytes(held[number]) == bytes([number]) * (number + 1) for number in range(200))


def test_where_the_disk_takes_no_more_it_stays_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cold, body = ColdBytes(tmp_path, "parts"), memoryview(b"part" * 100)
    with monkeypatch.context() as full:

        def pwrite(*arguments: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        full.setattr(cold_bytes.os, "pwrite", pwrite)
        assert [cold.put(body) is body for _ in range(3)] == [True] * 3
        assert [record.name for record in caplog.records].count(cold_bytes.__name__) == 1
        with pytest.raises(DiskFullError, match="make room there"):  # gigabytes of a state stayed in memory
            cold.put_all([body])
    assert cold.put(body) is not body
    assert ColdBytes(None, "parts").put(body) is body


def test_several_lie_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = [b"one", b"", b"three" * 1000]
    whole = ColdBytes(tmp_path, "parts").put_all(bodies)
    assert bytes(whole) == b"".join(bodies)
    assert whole.readonly
    assert names(tmp_path) == ["parts-00000000"]
    assert ColdBytes(None, "parts").put_all(bodies) == b"".join(bodies)
