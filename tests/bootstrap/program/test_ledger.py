"""The host's memory: what was written down once stays, and replaying it gives the books that were."""

import asyncio
import contextlib
import json
import os
import resource
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootstrap.program.books import Books
from bootstrap.program.ledger import Ledger
from swarm.core.errors import DiskFullError, LocalError
from tests.swarm_in_process import manifest_of, prepare, swarm_in_process

WRITER = """
import sys
from collections.abc import Iterator
from pathlib import Path
from bootstrap.program.books import Books
from bootstrap.program.ledger import Ledger
ledger, books = Ledger(Path(sys.argv[1])), Books()
books.catch_up(ledger)
for number in range(1, 100000):
    ledger.append("voucher", {"digest": f"{number:064}", "note": "", "uses": 1, "expires_at": 1.0})
    books.catch_up(ledger)
    print(books.num_events, books.history.hex(), flush=True)
"""


def test_event_is_refused_when_it_happened_once_already(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    assert ledger.append("result", {"step": 1}, once="result 1/0/1")
    assert not ledger.append("result", {"step": 1, "ids": [7]}, once="result 1/0/1")
    assert ledger.append("result", {"step": 1}, once="result 2/0/1")
    assert ledger.append("figures", {"step": 1})
    assert ledger.append("figures", {"step": 1})
    assert [event.kind for event in ledger.events()] == ["result", "result", "figures", "figures"]
    assert [event.number for event in ledger.events(after=2)] == [3, 4]
    ledger.close()


def test_events_are_neither_changed_nor_removed_by_anyone(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.append("figures", {"step": 1})
    other = sqlite3.connect(tmp_path / "ledger.sqlite")
    for statement in ("UPDATE events SET kind = 'ban'", "DELETE FROM events"):
        with pytest.raises(sqlite3.IntegrityError, match="an event is never"):
            other.execute(statement)
    other.close()
    assert [event.kind for event in ledger.events()] == ["figures"]
    ledger.close()


def test_events_written_together_are_all_there_or_none(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")

    def half() -> None:
        with ledger.together():
            ledger.append("figures", {"step": 1})
            raise RuntimeError

    with pytest.raises(RuntimeError):
        half()
    assert list(ledger.events()) == []
    ledger.close()


def test_file_that_is_no_ledger_is_named(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite").write_bytes(b"something else" * 100)
    with pytest.raises(LocalError, match=r"ledger\.sqlite cannot be used: file is not a database"):
        Ledger(tmp_path / "ledger.sqlite")


def test_event_that_no_host_of_this_version_wrote_is_named(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.append("voucher_revoked", {"digest": "never made"})
    with pytest.raises(LocalError, match="event 1 of the ledger, a voucher_revoked"):
        Books().catch_up(ledger)
    ledger.close()


@pytest.mark.processes
def test_books_are_the_same_after_a_kill_in_mid_writing(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        said = [writer.stdout.readline().split() for _ in range(20)]
        os.kill(writer.pid, signal.SIGKILL)
        said += [line.split() for line in writer.stdout if line.endswith("\n")]
    ledger, books = Ledger(path), Books()
    digests = {}
    for event in ledger.events():
        books.apply(event)
        digests[event.number] = books.history.hex()
    for number, digest in said:
        assert digests[int(number)] == digest
    assert len(said) <= books.num_events <= len(said) + 1, "what was said to be written is lost"
    ledger.close()


def test_host_that_is_started_again_has_the_books_it_had_and_credits_what_was_certified(tmp_path: Path) -> None:
    run = prepare(manifest_of(optimizer={"total_steps": 6}), tmp_path)

    async def train() -> tuple[Books, dict[str, Any]]:
        async with swarm_in_process(run, tmp_path, peers=(1, 2)) as swarm:
            report = await swarm.finished()
            return swarm.host.books, report

    before, report = asyncio.run(train())
    ledger, books = Ledger(run.folder.ledger), Books()
    books.catch_up(ledger)
    assert books == before
    assert books.versions[0][0] == books.versions[1][0] == 6
    results = [event.facts for event in ledger.events("result")]
    assert len(results) == 12
    # Each microbatch is credited once in each stage, to whoever did it.
    credited = {stage: sum(n for f in results if f["stage"] == stage for _, n, _ in f["credit"]) for stage in (0, 1)}  # type: ignore[index,call-overload]
    assert credited == {0: 24, 1: 24}
    assert sum(credit.num_tokens for credit in books.credit.values()) == 2 * report["tokens"]
    assert report["credit"] == {peer: credit.num_tokens for peer, credit in books.credit.items()}
    assert json.dumps(sorted(books.held_out)) == "[0, 6]"
    assert sorted(books.checkpoints) == [6]
    assert all(6 in books.anchors[stage] for stage in (0, 1))
    ledger.close()


@contextlib.contextmanager
def no_room_beyond(size_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond the size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("together", [False, True])
def test_where_an_event_found_no_room_nothing_is_written_before_all_is_read_again(
    tmp_path: Path, together: bool
) -> None:
    told: list[str] = []
    ledger = Ledger(tmp_path / "ledger.sqlite", on_full=lambda: told.append("full"))
    ledger.append("figures", {"step": 1})

    def write(step: int) -> None:
        with ledger.together() if together else contextlib.nullcontext():
            ledger.append("figures", {"step": step})

    with no_room_beyond((tmp_path / "ledger.sqlite-wal").stat().st_size), pytest.raises(DiskFullError, match="full"):
        write(2)
    with pytest.raises(DiskFullError, match="make room there"):
        write(3)  # there is room again, but whoever writes this believes in the second
    assert told == ["full"]
    ledger.close()
    again = Ledger(tmp_path / "ledger.sqlite")
    again.append("figures", {"step": 4})
    assert [event.facts for event in again.events()] == [{"step": 1}, {"step": 4}]
    again.close()
