"""How kernels are compiled: all with the same flags, so that their bits never depend on them.

No fastmath: LLVM then neither fuses a*b + c into one rounding nor reorders a sum of floats. No parallel: numba's
threading layers abort on concurrent calls or die in forked children, and one compute thread calls kernels.

numba keeps machine code on disk, beside the function's own file, and builds it again when that changes. What a kernel
takes from other modules is in its code too: constants, types, what it inlines. So what is kept here has the name of a
stamp, which is of the text of all modules of this project that its own imports, directly or not
(`kernels.source_stamp`), and lies where all installations of a user find it: whoever updates or installs again compiles
what has changed.
"""

import fcntl
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite
import numba
import numpy
from numba import config
from numba.core.compiler_lock import global_compiler_lock
from numba.core.event import Listener, register
from numba.core.registry import CPUDispatcher

from kernels.source_stamp import source_stamp

log = logging.getLogger(__name__)
Function = TypeVar("Function", bound=Callable[..., Any])

_HELD = set[Path]()
"""Locks of this process: a function that calls itself asks for its own code while it is compiled."""
VERSIONS = f"{numba.__version__} {llvmlite.__version__} {numpy.__version__}"
_STAMP_DIGITS = 32
_UNUSED_S = 30 * 86400.0
"""Machine code that no process has asked for so long is forgotten, when other code is compiled."""
_ASKED_EVERY_S = 86400.0
_ONLY_KEPT = ContextVar("only_kept", default=False)


class NotKeptError(Exception):
    """A kernel's machine code is not on disk."""


@contextmanager
def only_kept() -> Iterator[None]:
    """Nothing is compiled here: what is not kept on disk raises NotKeptError. The compiler never gives back what memory
    it took, 0.1 GiB for a run's kernels, so whoever stays for long has another process compile."""
    before = _ONLY_KEPT.set(True)
    try:
        yield
    finally:
        _ONLY_KEPT.reset(before)


def compiled(function: Function) -> Function:
    """Machine code of `function`, built at its first call, kept on disk, run without the GIL."""
    return _kept(function)


def borrowing(function: Function) -> Function:
    """As `compiled`, of a function that makes no array and keeps none: it does not count who holds those it is given.

    With many arrays in a tuple, numba counts each where any is touched, which costs more than what is done with it.
    """
    return _kept(function, _nrt=False)


def inlined(function: Function) -> Function:
    """As `borrowing`, and made part of whatever compiled function calls it."""
    return _kept(function, _nrt=False, forceinline=True)


class _Kernel(CPUDispatcher):  # type: ignore[misc]
    """Compiled by one process at a time: who waits for another finds what that one has kept."""

    def compile(self, signature: object) -> Any:
        with global_compiler_lock, _alone(Path(self._cache._cache_file._index_path)):
            return super().compile(signature)


def _kept(function: Function, **flags: bool) -> Function:
    if config.DISABLE_JIT:
        return function
    made = _Kernel(function, targetoptions={"nopython": True, "nogil": True, "error_model": "numpy", **flags})
    made.enable_caching()
    if function.__module__ != "__main__":  # whose text is no module's
        _keep(made, source_stamp(function.__module__))
    return cast(Function, made)


def _keep(made: _Kernel, stamp: bytes) -> None:
    """numba has no other way to say what code was made from, and where it lies."""
    kept = made._cache._cache_file
    kept._source_stamp = stamp
    folder = _folder() / hashlib.sha256(stamp + VERSIONS.encode()).hexdigest()[:_STAMP_DIGITS]
    with suppress(OSError):  # where a home cannot be written it lies beside the file, as numba has it
        folder.mkdir(parents=True, exist_ok=True)
        if folder.stat().st_mtime < time.time() - _ASKED_EVERY_S:
            os.utime(folder)
        if os.access(folder, os.W_OK):
            kept._cache_path = made._cache._cache_path = str(folder)
            kept._index_path = str(folder / kept._index_name)


def _folder() -> Path:
    """Of machine code, by stamps."""
    if config.CACHE_DIR:
        return Path(config.CACHE_DIR) / "homeswarm"
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "homeswarm" / "kernels"


def _is_stamp(name: str) -> bool:
    return len(name) == _STAMP_DIGITS and set(name) <= set("0123456789abcdef")


def _forget_unused() -> None:
    """What was made from text that nobody has any more."""
    with suppress(OSError):
        for folder in _folder().iterdir():
            if _is_stamp(folder.name) and folder.stat().st_mtime < time.time() - _UNUSED_S:
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _alone(index: Path) -> Iterator[None]:
    """Until its end no other process compiles what is kept there."""
    if index in _HELD:
        yield
        return
    index.parent.mkdir(parents=True, exist_ok=True)
    with index.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.utime(index.parent)  # or it might be forgotten as unused while it is written to
        _HELD.add(index)
        try:
            yield
        finally:
            _HELD.remove(index)


class _Beginning(Listener):  # type: ignore[misc]
    """Says once in a process that kernels are compiled: whoever waits for it knows why, and that it is for once. Under
    `only_kept` they are not."""

    def __init__(self) -> None:
        self._is_said = False

    def on_start(self, event: object) -> None:
        if _ONLY_KEPT.get():
            raise NotKeptError
        if not self._is_said:
            self._is_said = True
            _forget_unused()
            log.info("compiles its kernels for this machine, once: a minute or two")

    def on_end(self, event: object) -> None:
        """Nothing is said of it."""


register("numba:compile", _Beginning())
