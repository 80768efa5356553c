"""A peer with a stopwatch: `swarm join`, and a line of JSON twice a second on where its CPU goes.

    python -m benchmarks.fleet.timed_peer FIGURES.jsonl ADDRESS [options of `swarm join`]

Seconds are CPU seconds since the start: of each thread, of the p2pd beside it, and of the calls timed below, wherever
they run, the outermost counting; a thread's remainder is everything else it did.
"""

import functools
import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.round.busy_spans import METHODS
from swarm.local.compute_pools import bound_pools

EVERY_S = 0.5
_spent: dict[str, float] = defaultdict(float)
_lock = threading.Lock()
_running = threading.local()


def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, adding its thread's CPU seconds to `name`, unless a timed call calls it."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if getattr(_running, "timed", False):
            return function(*args, **kwargs)
        _running.timed = True
        started = time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            _running.timed = False
            with _lock:
                _spent[name] += time.thread_time() - started

    return wrapper


def time_methods(kind: type, names: Iterable[str], label: str) -> None:
    for name in names:
        setattr(kind, name, timed(f"{label}.{name}", getattr(kind, name)))


def install() -> None:
    """Put stopwatches on what a peer's time may go to. Before `peer` is imported, which takes some by name."""
    from swarm import bulk_digest
    from swarm.averaging import aggregate
    from swarm.averaging.activations import activation_codec
    from swarm.averaging.codecs import vector_codec
    from swarm.identity import key as identity
    from swarm.model.stage import StageModel
    from swarm.optim.exact import ExactOptimizer
    from swarm.optim.gradient_sum import GradientSum

    time_methods(StageModel, ("forward", "backward", "loss", "loss_backward", "weights"), "model")
    time_methods(ExactOptimizer, ("step",), "optimizer")
    time_methods(GradientSum, ("take_mean", "zero"), "gradient")
    for activations in {type(activation_codec("int8")), type(activation_codec("fp32"))}:
        time_methods(activations, ("encode", "decode"), "activations")
    for vectors in {type(vector_codec("int8")), type(vector_codec("bf16")), type(vector_codec("fp32"))}:
        time_methods(vectors, [name for name in METHODS if hasattr(vectors, name)], "averaging")
    time_methods(identity.Identity, ("sign",), "identity")
    identity.verify = timed("identity.verify", identity.verify)
    aggregate.aggregate = timed("averaging.aggregate", aggregate.aggregate)
    bulk_digest.bulk_digest = timed("hash", bulk_digest.bulk_digest)


def figures(children: Sequence[Any] | None = None) -> dict[str, Any]:
    """CPU seconds so far. `children`: this program's processes, where they are known; looking for them takes long."""
    import psutil

    threads: dict[str, float] = defaultdict(float)
    for thread in threading.enumerate():
        if thread.ident is not None:
            clock = time.pthread_getcpuclockid(thread.ident)
            name = "loop" if thread is threading.main_thread() else thread.name.split("_")[0].split("-")[0]
            threads[name] += time.clock_gettime(clock)
    p2pd = 0.0
    for child in psutil.Process().children(recursive=True) if children is None else children:
        try:
            times = child.cpu_times()
        except psutil.Error:
            continue
        p2pd += times.user + times.system
    with _lock:
        calls = dict(_spent)
    return {
        "at": time.time(),
        "process": time.process_time(),
        "p2pd": p2pd,
        "threads": dict(threads),
        "calls": calls,
    }


def _write_for_ever(path: Path) -> None:
    with path.open("w") as file:
        while True:
            file.write(json.dumps(figures()) + "\n")
            file.flush()
            time.sleep(EVERY_S)


def main() -> None:
    path, arguments = Path(sys.argv[1]), sys.argv[2:]
    if "--threads" in arguments:  # before torch is first imported
        bound_pools(int(arguments[arguments.index("--threads") + 1]))
    install()
    from peer.program.command import command

    threading.Thread(target=_write_for_ever, args=(path,), name="stopwatch", daemon=True).start()
    command(arguments, standalone_mode=False)


if __name__ == "__main__":
    main()
