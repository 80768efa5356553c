"""How the C library's allocator, which PyTorch's tensors on the host and Python's large objects come from, is set."""

import ctypes
import sys

_M_MMAP_THRESHOLD = -3
"""Of glibc's `mallopt`."""
RETURNED_FROM_BYTES = 4 << 20
"""What is at least as large is mapped by itself, and goes back to the system when it is freed."""


def return_large_blocks() -> bool:
    """Memory of tensors is what they hold, and no more; whether the allocator is one that can be told.

    glibc by itself keeps blocks of up to 32 MiB for later, in as many arenas as there are threads: peers held 12 bytes
    a parameter of what they had freed.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_MMAP_THRESHOLD, RETURNED_FROM_BYTES))
