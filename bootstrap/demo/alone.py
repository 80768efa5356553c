"""What one member of a run in windows would have come to by itself: as many steps, on as much data as each member's."""

from bootstrap.demo.request import PreparedDemo


def held_out_alone(prepared: PreparedDemo, *, windows: int, evaluate_tokens: int) -> float:
    """Held-out loss, nats a token, after the inner steps of so many windows, taken one after another by AdamW with the
    run's schedule of inner steps."""
    # These bring torch and transformers, which the start of the host need not wait for.
    import numpy as np
    import torch

    from swarm.core.ids import MicrobatchId
    from swarm.data.batches import BatchReader, held_out_batches
    from swarm.manifest.file import freeze, read_manifest
    from swarm.model.initial import stage_weights
    from swarm.model.stage import StageModel
    from swarm.optim.exact import ExactOptimizer
    from swarm.optim.gradient_sum import GradientSum

    settings = freeze(read_manifest(prepared.folder.manifest), prepared.data, ())
    model, each = StageModel(settings.model, 0), settings.microbatches_per_step
    layout, reader = model.layout, BatchReader(settings, prepared.data.train())
    flat = stage_weights(settings.model, 0, settings.data.seed, None)
    optimizer = ExactOptimizer.of(settings.inner, layout)
    gradient = GradientSum(layout.num_values)
    for step in range(windows * settings.averaging.local_steps):
        weights = model.weights(flat)
        gradient.zero()
        for number in range(step * each, (step + 1) * each):
            tokens_BL, targets_BL = map(torch.from_numpy, reader.batch(MicrobatchId(number)))
            _, counted, saved = model.loss(weights, tokens_BL, targets_BL, keep=True)
            assert saved is not None
            model.loss_backward(saved, gradient.flat)
            gradient.add_tokens(counted)
        gradient.close()
        out = np.empty_like(flat)
        optimizer.step(flat, gradient.take_mean(), step=step, clip_norm=settings.inner.max_norm, out=out)
        flat = out
    weights, total, count = model.weights(flat), 0.0, 0
    for batch in held_out_batches(settings, prepared.data.held_out(), limit_tokens=evaluate_tokens):
        loss, counted, _ = model.loss(weights, *map(torch.from_numpy, batch), keep=False)
        total, count = total + loss, count + counted
    return total / count
