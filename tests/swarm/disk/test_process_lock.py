"""Whoever looks at a lock finds its holder, also while that writes down where it listens."""

import os
import threading
from contextlib import closing
from pathlib import Path

from swarm.disk.process_lock import Holder, ProcessLock, holder_of


def test_a_holder_is_known_while_it_says_where_it_listens(tmp_path: Path) -> None:
    """A command that came in between was told that the daemon is only just starting."""
    path, place, found = tmp_path / "daemon.lock", Path("/run/owner.sock"), list[Holder | None]()

    def look() -> None:
        for _ in range(300):
            found.append(holder_of(path))

    with closing(ProcessLock(path)) as lock:
        assert holder_of(path) == Holder(os.getpid())
        lock.listens_at(place)
        looking = threading.Thread(target=look)
        looking.start()
        while looking.is_alive():
            lock.listens_at(place)
    assert set(found) == {Holder(os.getpid(), place)}
    assert holder_of(path) is None
