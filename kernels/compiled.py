"""This is where kernels are compiled, all with the same flags, so that their bits never depend on them.

No fastmath: LLVM then neither fuses a*b + c into one rounding nor reorders a sum of floats. No parallel: numba's
threading layers abort on concurrent calls or die in forked children, and one compute thread calls kernels.

A cached kernel is rebuilt when its own file changes, not when a file it imports from does: a kernel calls only
compiled functions of its own module.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Machine code of `function`, built at its first call, kept on disk, run without the GIL."""
    return cast(Function, njit(cache=True, nogil=True, error_model="numpy")(function))


def borrowing(function: Function) -> Function:
    """As `compiled`, of a function that makes no array and keeps none: it does not count who holds those it is given.

    With many arrays in a tuple, numba counts each where any is touched, which costs more than what is done with it.
    """
    return cast(Function, njit(cache=True, nogil=True, error_model="numpy", _nrt=False)(function))


def inlined(function: Function) -> Function:
    """As `borrowing`, and made part of whatever compiled function calls it."""
    return cast(Function, njit(cache=True, nogil=True, error_model="numpy", _nrt=False, forceinline=True)(function))
