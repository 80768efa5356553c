"""The thread pools of compute libraries: how many threads each may have, and that a thread which waits sleeps.

OpenMP's threads (PyTorch, MKL) and OpenBLAS's by default wait for one another at full speed. On a core that somebody
else needs too, the one waited for is then kept from running by those that wait for it: two daemons on two cores came to
819 tokens/s in that way, and to 13,653 with threads that sleep. Libraries read these variables once, when they are
loaded: set them before the first import of torch, numpy or numba.
"""

import os
from collections.abc import MutableMapping

POOLS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
ASLEEP = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",  # libgomp, as PyTorch's wheels bring it
    "KMP_BLOCKTIME": "0",  # Intel's and LLVM's; milliseconds
    "OPENBLAS_THREAD_TIMEOUT": "4",  # the least: 2**4 cycles
}
AWAKE = {"GOMP_SPINCOUNT": "300000"}
"""As PyTorch's threads wait where nobody has a say: so many turns at full speed, the quickest on a quiet machine."""


def wait_asleep(environment: MutableMapping[str, str] = os.environ) -> None:
    """Threads that wait shall sleep, in this process and those it starts; nothing if the owner has a say in it."""
    if not ASLEEP.keys() & environment.keys():
        environment.update(ASLEEP)


def bound_pools(threads: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """No pool shall have more threads, and they sleep while they wait, in this process and those it starts."""
    wait_asleep(environment)
    environment.update(dict.fromkeys(POOLS, str(threads)))


def pools_bound_by_owner(environment: MutableMapping[str, str] = os.environ) -> int | None:
    """The most threads that the environment allows OpenMP, if it says so in a plain number."""
    said = environment.get("OMP_NUM_THREADS", "")
    return int(said) if said.isdecimal() and int(said) > 0 else None
