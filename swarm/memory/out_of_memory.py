"""How it is told that memory gave out, by whatever was asked for it: Python, numpy, PyTorch, a GPU's driver."""

import errno

_SAID_BY_TORCH = (
    "can't allocate memory",  # its allocator of the host's
    "out of memory",  # CUDA's driver and runtime
    "ALLOC_FAILED",  # CUDA's libraries
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether there was no memory for what was to be done: of the host's or of a GPU's."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # Known by its words: torch need not be imported for that, and `torch.OutOfMemoryError` is a RuntimeError too.
    is_torchs = isinstance(error, RuntimeError) and any(said in str(error) for said in _SAID_BY_TORCH)
    return isinstance(error, MemoryError) or is_torchs


def is_of_device(error: BaseException) -> bool:
    """Whether it is a GPU's memory that gave out."""
    return isinstance(error, RuntimeError) and "can't allocate memory" not in str(error)
