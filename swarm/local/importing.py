"""Imports of what is large, without the garbage collector.

Nothing of it is garbage, and there are very many objects: looking through them again and again is a fifth of the
processor time that a peer's imports take (6.5 and 5.1 s, medians of three), and each later look would go through them.
"""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Nothing is collected meanwhile, and what is there at the end is looked through no more."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
        gc.freeze()
