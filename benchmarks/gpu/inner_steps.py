"""A window's inner step where its stage is computed, beside the same on the host: fetch, step, put.

Both end with weights to compute on; their bits are compared.
"""

import os
import statistics
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.stage import Case, settings_of, wait_for
from kernels.threads import Threads
from swarm.core.settings import AveragingSettings
from swarm.model.stage import StageModel
from swarm.optim.carried_moments import CarriedMoments
from swarm.optim.gradient_sum import GradientSum
from swarm.optim.local_window import LocalWindow, WindowThere

MICROBATCH_TOKENS = 1 << 16


def inner_steps(case: Case, device: torch.device, compute_dtype: str, *, times: int) -> dict[str, Any]:
    """Medians, and whether both went the same way to the bit."""
    model = StageModel(case.model(compute_dtype), 0, device=str(device))
    settings = replace(
        settings_of(case.model(compute_dtype), case, "int8"), averaging=AveragingSettings(local_steps=50)
    )
    rng, size = np.random.default_rng(0), model.layout.num_values
    start = rng.standard_normal(size, dtype=np.float32) * np.float32(0.02)
    slopes = torch.from_numpy(rng.standard_normal(size, dtype=np.float32)).to(device)
    gradient, threads = GradientSum(size, model.link), Threads(os.cpu_count() or 1)
    here = LocalWindow(settings, model.layout, threads=threads)
    there = WindowThere(settings, model.layout, model.link, threads=threads)
    carried = CarriedMoments(settings, model.layout).at_first()
    taken: dict[str, list[float]] = {"here": [], "there": []}
    for window in (here, there):
        window.begin(start, 0, carried)
    for _ in range(times + 1):
        for name, window in (("here", here), ("there", there)):
            gradient.flat.copy_(slopes)
            gradient.add_tokens(MICROBATCH_TOKENS)
            wait_for(device)  # the copy is done
            began = time.perf_counter()
            gradient.close()
            window.take(gradient)
            model.weights(window.weights)
            wait_for(device)
            taken[name].append(time.perf_counter() - began)
            gradient.zero()
    on_the_host = model.link.fetch(there.weights).numpy()
    return {
        "case": case.name,
        "parameters": size,
        "threads": threads.count,
        "ms_here": round(1e3 * statistics.median(taken["here"][1:]), 1),
        "ms_there": round(1e3 * statistics.median(taken["there"][1:]), 1),
        "equal": on_the_host.tobytes() == np.asarray(here.weights).tobytes(),
    }
