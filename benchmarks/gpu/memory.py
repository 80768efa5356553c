"""The most of a GPU's memory that a stage holds, beside what its plan asks for.

As a peer has it without audits: weights of two versions, a sum of gradients, and as many microbatches under way as may
be, which then come back.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.stage import Case, settings_of
from swarm.core.pipeline.compute_mode import ComputeMode
from swarm.core.plan import stage_memory_bytes
from swarm.model.stage import StageModel
from swarm.model.tensor_pass import TensorPass
from swarm.optim.gradient_sum import GradientSum

GIB = 1 << 30


def held(case: Case, device: torch.device, compute_dtype: str, wire: str) -> Iterator[dict[str, Any]]:
    """At once, computed again, and computed again a sample at a time."""
    for samples, recompute in ((case.samples, False), (case.samples, True), (1, True)):
        yield _held(case, device, compute_dtype, wire, ComputeMode(samples, recompute))


def _held(case: Case, device: torch.device, compute_dtype: str, wire: str, mode: ComputeMode) -> dict[str, Any]:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    model, stage = case.model(compute_dtype), 0 if case.is_whole else 1
    settings = settings_of(model, case, wire)
    made = StageModel(model, stage, device=str(device)).computing(mode)
    _passed(TensorPass(settings, made), case, settings.limits.max_in_flight)
    peak, reserved = torch.cuda.max_memory_allocated(device) - before, torch.cuda.max_memory_reserved(device)
    items = stage_memory_bytes(settings, made.layout.num_values, case.hidden_size, "cuda", stage=stage, mode=mode)
    asked = {name: size for name, size in items.items() if name.startswith("device.") and "replay" not in name}
    return {
        "case": case.name,
        "samples_at_once": mode.samples_at_once,
        "recompute": mode.recompute,
        "gib": round(peak / GIB, 2),
        "reserved_gib": round(reserved / GIB, 2),
        "plan_gib": round(sum(asked.values()) / GIB, 2),
        "of_plan": round(peak / sum(asked.values()), 3),
    }


def _passed(tensors: TensorPass, case: Case, in_flight: int) -> None:
    model, rng = tensors.model, np.random.default_rng(0)
    flat = np.full(model.layout.num_values, 0.02, dtype=np.float32)
    versions = [model.weights(flat) for _ in range(2)]
    total = GradientSum(model.layout.num_values, model.link)
    if case.is_whole:
        ids = torch.from_numpy(rng.integers(0, case.vocab_size, (case.samples, case.tokens)))
        for weights in versions:
            _, _, loss = tensors.loss(weights, ids, ids, ())
            tensors.loss_backward(loss, total.flat)
        return
    hidden = torch.from_numpy(rng.standard_normal((case.samples, case.tokens, case.hidden_size), dtype=np.float32))
    body, grad_body = tensors.codec.encode(hidden), tensors.gradient_codec.encode(hidden)
    begun = []
    for at in range(in_flight):
        y, saved = tensors.forward(versions[at % 2], tensors.x(body, b""), ())
        tensors.sent(y)
        del y
        begun.append(saved)
    while begun:
        grad_x = tensors.backward(begun.pop(0), tensors.gradient(grad_body), total.flat)
        assert grad_x is not None
        tensors.answered(grad_x)
        del grad_x
