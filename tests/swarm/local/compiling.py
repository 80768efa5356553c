"""Kernels compiled once for all workers of a test session, and not by each at the same time."""

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher

_HELD = set[Path]()
"""By this process: a function that calls itself asks for its own code while it is compiled."""


def take_turns() -> None:
    """Until a process ends: who compiles a function that another process compiles finds what that one has kept."""
    Dispatcher.compile = _one_at_a_time(Dispatcher.compile)


def _one_at_a_time(compile_it: Callable[[Dispatcher, object], Any]) -> Callable[[Dispatcher, object], Any]:
    @wraps(compile_it)
    def in_turn(function: Dispatcher, signature: object) -> Any:
        kept = getattr(function._cache, "_cache_file", None)
        if kept is None:
            return compile_it(function, signature)
        with global_compiler_lock, _alone(Path(kept._index_path)):
            return compile_it(function, signature)

    return in_turn


@contextmanager
def _alone(index: Path) -> Iterator[None]:
    if index in _HELD:
        yield
        return
    index.parent.mkdir(parents=True, exist_ok=True)
    with index.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _HELD.add(index)
        try:
            yield
        finally:
            _HELD.remove(index)
