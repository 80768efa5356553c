"""How kernels are compiled: all with the same flags, so that their bits never depend on them.

No fastmath: LLVM then neither fuses a*b + c into one rounding nor reorders a sum of floats. No parallel: numba's
threading layers abort on concurrent calls or die in forked children, and one compute thread calls kernels.

numba keeps machine code on disk, and builds it again when the function's own file changes. What a kernel takes from
other modules is in its code too: constants, types, what it inlines. So the stamp of what is kept here is of the text of
all modules of this project that its own imports, directly or not (`kernels.source_stamp`).
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

from kernels.source_stamp import source_stamp

Function = TypeVar("Function", bound=Callable[..., Any])


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


def _kept(function: Function, **flags: bool) -> Function:
    made = njit(cache=True, nogil=True, error_model="numpy", **flags)(function)
    if made is not function:  # as it is where NUMBA_DISABLE_JIT is set
        # numba has no other way to say what code was made from.
        kept = made._cache._cache_file
        kept._source_stamp = (kept._source_stamp, source_stamp(function.__module__))
    return cast(Function, made)
